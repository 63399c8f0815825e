"""Pooling kernels against the ONNX backend tests, a plain definition, and the corners of the attributes."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError

RUNS = [run_numpy, run_jax]


def windows_by_definition(x: np.ndarray, out: tuple, kernel: tuple, strides: tuple, dilations: tuple, begin: tuple):
    """For each window: its position in the output and the input elements under it that are no padding."""
    for at in itertools.product(*map(range, out)):
        inside = []
        for tap in itertools.product(*map(range, kernel)):
            where = tuple(o * s + t * d - b for o, s, t, d, b in zip(at, strides, tap, dilations, begin, strict=True))
            if all(0 <= i < n for i, n in zip(where, x.shape[2:], strict=True)):
                inside.append(where)
        yield at, inside


LAYOUTS = [
    # spatial size, kernel, strides, dilations, begin, end, ceil_mode, windows
    ((9,), (3,), (2,), (2,), (1,), (2,), 0, (4,)),
    ((9,), (2,), (2,), (1,), (0,), (0,), 1, (5,)),
    ((7, 6), (3, 2), (2, 2), (1, 2), (1, 0), (1, 1), 1, (4, 3)),
    ((5, 5), (2, 2), (3, 3), (1, 1), (0, 0), (1, 1), 1, (2, 2)),  # a third window would start in the padding
    ((4, 5, 6), (2, 3, 1), (1, 2, 1), (1, 1, 1), (0, 1, 0), (1, 1, 0), 0, (4, 3, 6)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("include", [0, 1])
def test_average_is_its_definition(layout: tuple, run: Any, include: int, rng: np.random.Generator) -> None:
    """AveragePool divides by the elements under the window, padding counted or not, never the overhang."""
    size, kernel, strides, dilations, begin, end, ceil, out = layout
    x = rng.standard_normal((2, 3, *size))
    (y,) = run(node_case("AveragePool", 19, [x], kernel_shape=kernel, strides=strides, dilations=dilations,
                         pads=begin + end, ceil_mode=ceil, count_include_pad=include))  # fmt: skip
    assert y.shape == (2, 3, *out)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    taken, origin = (padded, (0,) * len(size)) if include else (x, begin)
    for at, inside in windows_by_definition(taken, out, kernel, strides, dilations, origin):
        want = np.mean([taken[(..., *where)] for where in inside], axis=0)
        np.testing.assert_allclose(y[(..., *at)], want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint8])
def test_max_and_index_are_their_definition(layout: tuple, run: Any, dtype: Any, rng: np.random.Generator) -> None:
    """MaxPool and its Indices (row major and column major) agree with the definition, ties to the first element."""
    size, kernel, strides, dilations, begin, end, ceil, out = layout
    x = rng.integers(0, 9, (2, 3, *size)).astype(dtype)
    if dtype != np.uint8:
        x -= dtype(20)  # padding must not win over negative elements
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": begin + end,
                  "ceil_mode": ceil}  # fmt: skip
    (alone,) = run(node_case("MaxPool", 12, [x], **attributes))
    y, index = run(node_case("MaxPool", 12, [x], 2, **attributes))
    column = run(node_case("MaxPool", 12, [x], 2, storage_order=1, **attributes))[1]
    assert (y.dtype, index.dtype, column.dtype) == (x.dtype, np.int64, np.int64)
    np.testing.assert_array_equal(alone, y)
    linear = np.arange(x.size).reshape(x.shape)
    spatial = np.arange(np.prod(size)).reshape(size, order="F")
    for at, inside in windows_by_definition(x, out, kernel, strides, dilations, begin):
        for n, c in itertools.product(range(2), range(3)):
            values = [x[(n, c, *where)] for where in inside]
            first = inside[int(np.argmax(values))]
            assert y[(n, c, *at)] == max(values)
            assert index[(n, c, *at)] == linear[(n, c, *first)]
            assert column[(n, c, *at)] == spatial[first] + (n * 3 + c) * spatial.size


@pytest.mark.parametrize("run", RUNS)
def test_max_of_infinities_and_nan(run: Any) -> None:
    """A window of -inf beside padding reports its own first element; a NaN is a maximum and its index is its own."""
    x = np.array([[[-np.inf, -np.inf, 1.0, np.nan, 2.0, np.nan]]], np.float32)
    y, index = run(node_case("MaxPool", 12, [x], 2, kernel_shape=(2,), strides=(2,), pads=(1, 1)))
    np.testing.assert_array_equal(y, np.array([[[-np.inf, 1.0, np.nan, np.nan]]], np.float32))
    np.testing.assert_array_equal(index, [[[0, 2, 3, 5]]])
    (alone,) = run(node_case("MaxPool", 12, [x], kernel_shape=(2,), strides=(2,), pads=(1, 1)))
    np.testing.assert_array_equal(alone, y)


@pytest.mark.parametrize(("auto_pad", "begin"), [("SAME_UPPER", 0), ("SAME_LOWER", 1)])
def test_auto_pad(auto_pad: str, begin: int) -> None:
    """SAME gives ceil(size / stride) windows; the odd element of padding goes to the end or the begin."""
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 1, 6)
    (y,) = run_numpy(node_case("MaxPool", 12, [x], kernel_shape=(2,), auto_pad=auto_pad))
    np.testing.assert_array_equal(y[0, 0], [2, 3, 4, 5, 6, 6] if begin == 0 else [1, 2, 3, 4, 5, 6])
    (y,) = run_numpy(node_case("MaxPool", 12, [x], kernel_shape=(1,), strides=(4,), auto_pad=auto_pad))
    np.testing.assert_array_equal(y[0, 0], [1, 5])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalLpPool"])
@pytest.mark.parametrize("run", RUNS)
def test_narrow_floats(dtype: Any, op: str, run: Any, rng: np.random.Generator) -> None:
    """Narrow floats are summed in float32: within one rounding of the float64 result, no overflow on the way."""
    x = (rng.standard_normal((1, 2, 40, 40)) * 200).astype(dtype)
    attributes = {} if op.startswith("Global") else {"kernel_shape": (8, 8), "strides": (4, 4)}
    (y,) = run(node_case(op, 22, [x], **attributes))
    (want,) = run_numpy(node_case(op, 22, [x.astype(np.float64)], **attributes))
    assert y.dtype == dtype
    step = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=step, atol=1e-3)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("run", RUNS)
def test_lp_norms(p: int, run: Any, rng: np.random.Generator) -> None:
    """LpPool and GlobalLpPool are p-norms; padding adds nothing."""
    x = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    (y,) = run(node_case("GlobalLpPool", 2, [x], p=p))
    np.testing.assert_allclose(y, (np.abs(x) ** p).sum(axis=(2, 3), keepdims=True) ** (1 / p), rtol=1e-5)
    (y,) = run(node_case("LpPool", 11, [x], p=p, kernel_shape=(5, 4), pads=(2, 2, 2, 2), strides=(9, 9)))
    want = (np.abs(x[:, :, :3, :2]) ** p).sum(axis=(2, 3), keepdims=True) ** (1 / p)
    np.testing.assert_allclose(y, want, rtol=1e-5)


def test_old_versions_agree_with_the_reference(rng: np.random.Generator) -> None:
    """Models of opset 7 to 10 give what the reference evaluator gives."""
    x = rng.standard_normal((1, 2, 9, 9)).astype(np.float32)
    for op, version, attributes in [
        ("AveragePool", 7, {"pads": (1, 1, 1, 1), "count_include_pad": 1}),
        ("AveragePool", 10, {"strides": (2, 2), "ceil_mode": 1}),
        ("MaxPool", 8, {"strides": (2, 2)}),
        ("MaxPool", 10, {"dilations": (2, 2)}),
        ("LpPool", 2, {"strides": (3, 3), "p": 3}),
    ]:
        case = node_case(op, version, [x], kernel_shape=(3, 3), **attributes)
        np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_unpool_inverts_pool(run: Any, rng: np.random.Generator) -> None:
    """MaxUnpool puts the maxima back where MaxPool found them; `output_shape` adds zeros at the end."""
    x = rng.standard_normal((2, 3, 6, 4)).astype(np.float32)
    y, index = run_numpy(node_case("MaxPool", 12, [x], 2, kernel_shape=(2, 2), strides=(2, 2)))
    (back,) = run(node_case("MaxUnpool", 11, [y, index], kernel_shape=(2, 2), strides=(2, 2)))
    kept = back != 0
    assert kept.sum() == y.size
    np.testing.assert_array_equal(back[kept], x[kept])
    shape = np.array([2, 3, 7, 5])
    (more,) = run(node_case("MaxUnpool", 11, [y, index, shape], kernel_shape=(2, 2), strides=(2, 2)))
    np.testing.assert_array_equal(more, np.pad(back, [(0, 0), (0, 0), (0, 1), (0, 1)]))


@pytest.mark.parametrize("run", RUNS)
def test_empty_batches(run: Any) -> None:
    """An empty batch pools to an empty batch."""
    x = np.zeros((0, 2, 5, 5), np.float32)
    for op in ("MaxPool", "AveragePool", "LpPool"):
        assert run(node_case(op, 11, [x], kernel_shape=(2, 2)))[0].shape == (0, 2, 4, 4)
    assert run(node_case("MaxPool", 11, [x], 2, kernel_shape=(2, 2)))[1].shape == (0, 2, 4, 4)
    for op in ("GlobalMaxPool", "GlobalAveragePool"):
        assert run(node_case(op, 1, [x]))[0].shape == (0, 2, 1, 1)


def test_missing_kernel_shape_is_named() -> None:
    """A kernel_shape of the wrong length is a ShapeError that says so."""
    with pytest.raises(ShapeError, match=r"kernel_shape = \(2,\)"):
        run_numpy(node_case("MaxPool", 11, [np.zeros((1, 1, 4, 4), np.float32)], kernel_shape=(2,)))
