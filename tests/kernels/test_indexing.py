"""Indexing kernels against the ONNX backend tests, ONNX's definitions, negative indices and odd dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.ir.graph import Node, Value
from xrt_core.kernels import find_kernel


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.int4, np.uint64, bool, np.complex64])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_gather_keeps_dtype_and_wraps(dtype: Any, run: Any) -> None:
    """A scalar index removes the axis, negative ones count from the end, int32 indices are fine."""
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    for indices in (np.array(-3, np.int32), np.array([[-1, 0]], np.int64), np.zeros((0,), np.int64)):
        (got,) = run(node_case("Gather", 13, [x, indices], axis=0))
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x[indices])
    (element,) = run(node_case("Gather", 1, [x[:, 1], np.array(-2)]))
    assert isinstance(element, np.ndarray)
    assert element.shape == ()


def test_gather_out_of_range_is_an_error_on_the_host() -> None:
    """NumPy reports an index outside the axis instead of returning something."""
    with pytest.raises(IndexError):
        run_numpy(node_case("Gather", 13, [np.arange(3), np.array([3])]))
    with pytest.raises(IndexError):
        run_numpy(node_case("GatherND", 13, [np.arange(3), np.array([[-4]])]))


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_gather_elements_with_fewer_indices(run: Any, rng: np.random.Generator) -> None:
    """Indices may be smaller than the data off the axis and longer along it."""
    x, indices = rng.standard_normal((3, 4, 5)), rng.integers(-4, 4, (2, 7, 3))
    (got,) = run(node_case("GatherElements", 13, [x, indices], axis=-2))
    for at in np.ndindex(indices.shape):
        assert got[at] == x[at[0], indices[at], at[2]]


@pytest.mark.parametrize(
    ("shape", "indices", "batch"),
    [
        ((2, 3, 4), (2, 2), 1),
        ((2, 3, 4), (2, 3, 1), 2),
        ((4, 3), (2,), 0),
        ((2, 3, 4), (5, 2, 1), 0),
        ((3,), (0, 1), 0),
    ],
)
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_gather_nd_batches(shape: tuple, indices: tuple, batch: int, run: Any, rng: np.random.Generator) -> None:
    """Index tuples address what follows the batch axes; an element alone is a scalar array."""
    x, index = rng.standard_normal(shape), rng.integers(-2, 2, indices)
    (got,) = run(node_case("GatherND", 12, [x, index], batch_dims=batch))
    lead = indices[:-1]
    assert isinstance(got, np.ndarray)
    assert got.shape == lead + shape[batch + indices[-1] :]
    for at in np.ndindex(lead):
        np.testing.assert_array_equal(got[at], x[(*at[:batch], *index[at])])


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_one_hot_float_indices_and_axis(run: Any) -> None:
    """Float indices and depth are cut to integers; what is out of range is all off."""
    indices = np.array([[0.9, -1.0], [3.0, -4.0]], np.float32)
    case = node_case("OneHot", 9, [indices, np.array([3.0], np.float32), np.array([5, 7], np.int8)], axis=0)
    (got,) = run(case)
    want = np.full((3, 2, 2), 5, np.int8)
    want[0, 0, 0] = want[2, 0, 1] = 7
    assert got.dtype == np.int8
    np.testing.assert_array_equal(got, want)


def test_one_hot_of_strings() -> None:
    """Values may be strings."""
    (got,) = run_numpy(node_case("OneHot", 11, [np.array(1), np.array(2), np.array(["off", "on"], object)]))
    assert got.dtype == object
    assert got.tolist() == ["off", "on"]


@pytest.mark.parametrize("x", [np.array(3.0), np.array(0), np.zeros((0, 2)), np.array([[0, ml_dtypes.bfloat16(1)]])])
def test_non_zero_shapes(x: np.ndarray) -> None:
    """A scalar gives shape (0, count), an empty tensor (rank, 0)."""
    (got,) = run_numpy(node_case("NonZero", 13, [x]))
    assert got.dtype == np.int64
    assert got.shape == (x.ndim, int(np.count_nonzero(x)))


def test_compress_with_a_constant_condition_is_static() -> None:
    """A constant condition makes Compress run under JAX; another one is dynamic, with the reason."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    case = node_case("Compress", 11, [x, np.array([False, True])], axis=1)
    np.testing.assert_array_equal(run_jax(case)[0], x[:, 1:2])
    found = find_kernel("", "Compress")
    assert found is not None
    assert found.why_dynamic(case.node) == "the output's shape depends on the data"
    known = Node("Compress", [Value("x"), Value.constant(case.inputs[1])], [Value("y")], version=11)
    assert found.why_dynamic(known) is None


@pytest.mark.parametrize("sort", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16, np.uint8, ml_dtypes.int4, bool])
def test_unique_by_definition(sort: int, axis: int | None, dtype: Any, rng: np.random.Generator) -> None:
    """Values, first occurrences, inverse and counts, sorted or in order of first occurrence."""
    x = rng.integers(0, 2 if dtype is bool else 3, (5, 2)).astype(dtype)
    slices = [x.reshape(-1)[i] for i in range(x.size)] if axis is None else list(np.moveaxis(x, axis, 0))
    keys = [tuple(np.ravel(s).astype(float)) for s in slices]
    order = list(dict.fromkeys(sorted(keys) if sort else keys))
    attributes = {"sorted": sort} | ({} if axis is None else {"axis": axis})
    values, first, inverse, counts = run_numpy(node_case("Unique", 11, [x], outputs=4, **attributes))
    assert values.dtype == x.dtype
    got = values if axis is None else np.moveaxis(values, axis, 0)
    assert [tuple(np.ravel(v).astype(float)) for v in got] == order
    assert first.tolist() == [keys.index(k) for k in order]
    assert inverse.tolist() == [order.index(k) for k in keys]
    assert counts.tolist() == [keys.count(k) for k in order]
    assert first.dtype == inverse.dtype == counts.dtype == np.int64


def test_unique_of_strings_along_an_axis() -> None:
    """Rows of strings are compared as wholes, in their order."""
    x = np.array([["b", "a"], ["a", "z"], ["b", "a"]], object)
    values, first, inverse, counts = run_numpy(node_case("Unique", 11, [x], outputs=4, axis=0))
    assert values.tolist() == [["a", "z"], ["b", "a"]]
    assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([1, 0], [1, 0, 1], [1, 2])
