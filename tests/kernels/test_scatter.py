"""Scatter kernels against the ONNX backend tests and element-by-element definitions, for every reduction."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import ShapeError

COMBINE = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": min,
    "max": max,
}
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, ml_dtypes.int4]


@pytest.mark.slow
@pytest.mark.parametrize("how", COMBINE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_elements_by_definition(how: str, dtype: Any, rng: np.random.Generator) -> None:
    """Each update is combined in turn with what stands there; indices repeat unless they replace."""
    x = rng.integers(0, 3, (3, 4)).astype(dtype)
    indices = rng.integers(-4, 4, (2, 3)) if how != "none" else np.array([[0, -1, 2], [3, 1, -2]])
    updates = rng.integers(0, 2, (2, 3)).astype(dtype)
    want = x.astype(np.float64)
    for at in np.ndindex(indices.shape):
        target = at[0], indices[at]
        want[target] = COMBINE[how](want[target], float(updates[at]))
    case = node_case("ScatterElements", 18, [x, indices, updates], axis=1, reduction=how)
    for got in (run_numpy(case)[0], run_jax(case)[0]):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("how", COMBINE)
def test_scatter_nd_by_definition(how: str, rng: np.random.Generator) -> None:
    """Index tuples shorter than the rank replace or combine slices."""
    x = rng.standard_normal((3, 4, 2))
    index = np.array([[0, -1], [2, 0], [0, 3]]) if how != "none" else np.array([[0, -1], [2, 0], [1, 1]])
    updates = rng.standard_normal((3, 2))
    want = x.copy()
    for place, update in zip(index, updates, strict=True):
        for k in range(2):
            want[(*place, k)] = COMBINE[how](want[(*place, k)], update[k])
    case = node_case("ScatterND", 18, [x, index, updates], reduction=how)
    for got in (run_numpy(case)[0], run_jax(case)[0]):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_half_precision_sums_accumulate_in_float32() -> None:
    """4096 times 1 in bfloat16 is 4096, not where adding 1 stops to matter (256)."""
    x = np.zeros(1, ml_dtypes.bfloat16)
    case = node_case(
        "ScatterElements", 18, [x, np.zeros(4096, np.int64), np.ones(4096, ml_dtypes.bfloat16)], reduction="add"
    )
    assert float(run_numpy(case)[0][0]) == 4096.0
    assert float(run_jax(case)[0][0]) == 4096.0


def test_scatter_9_and_nothing_to_write() -> None:
    """The deprecated Scatter works; empty indices return the data."""
    x = np.arange(4.0)
    np.testing.assert_array_equal(
        run_numpy(node_case("Scatter", 9, [x, np.array([-1]), np.array([9.0])]))[0], [0, 1, 2, 9]
    )
    empty = node_case("ScatterND", 11, [x, np.zeros((0, 1), np.int64), np.zeros(0)])
    np.testing.assert_array_equal(run_numpy(empty)[0], x)
    np.testing.assert_array_equal(run_jax(empty)[0], x)


def test_what_cannot_be_scattered_says_so() -> None:
    """Index tuples longer than the rank, unknown reductions and a TensorScatter along the batch raise ShapeError."""
    x = np.zeros((2, 2))
    with pytest.raises(ShapeError, match="length 3 for data of rank 2"):
        run_numpy(node_case("ScatterND", 18, [x, np.zeros((1, 3), np.int64), np.zeros(1)]))
    with pytest.raises(ShapeError, match="unknown reduction 'mean'"):
        run_numpy(node_case("ScatterND", 18, [x, np.zeros((1, 2), np.int64), np.zeros(1)], reduction="mean"))
    with pytest.raises(ShapeError, match="axis 0 is the batch"):
        run_numpy(node_case("TensorScatter", 24, [x, x], axis=0))


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter_by_definition(mode: str, rng: np.random.Generator) -> None:
    """Each batch entry is written from its own position on, around the end in mode circular."""
    cache, update = rng.standard_normal((2, 5, 3, 2)), rng.standard_normal((2, 2, 3, 2))
    start = np.array([1, 3] if mode == "linear" else [4, 8])
    want = cache.copy()
    for b, s in np.ndindex(2, 2):
        want[b, (start[b] + s) % 5] = update[b, s]
    case = node_case("TensorScatter", 24, [cache, update, start], axis=1, mode=mode)
    np.testing.assert_array_equal(run_numpy(case)[0], want)
    np.testing.assert_array_equal(run_jax(case)[0], want)
