"""Generator kernels against the ONNX backend tests and their definitions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import GraphError
from xrt_core.ir.graph import SparseTensor


@pytest.mark.parametrize(
    ("attributes", "want"),
    [
        ({"value": np.array([[1, 2]], ml_dtypes.uint4)}, np.array([[1, 2]], ml_dtypes.uint4)),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_floats": (1.0, 2.0)}, np.array([1, 2], np.float32)),
        ({"value_int": -3}, np.array(-3)),
        ({"value_ints": ()}, np.zeros(0, np.int64)),
        ({"sparse_value": SparseTensor(np.array([5, 6]), np.array([1, 3]), (2, 2))}, np.array([[0, 5], [0, 6]])),
        (
            {"sparse_value": SparseTensor(np.array([5.0]), np.array([[1, 0]]), (2, 3))},
            np.array([[0, 0, 0], [5.0, 0, 0]]),
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_constant_of_every_kind(attributes: dict[str, Any], want: np.ndarray, run: Any) -> None:
    """Each kind of value attribute gives its tensor."""
    (got,) = run(node_case("Constant", 13, [], **attributes))
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def test_constant_strings_and_nothing() -> None:
    """Strings are object arrays; a Constant without a value is an error."""
    assert run_numpy(node_case("Constant", 13, [], value_string="x"))[0].item() == "x"
    (words,) = run_numpy(node_case("Constant", 13, [], value_strings=("a", "bc")))
    assert words.dtype == object
    assert words.tolist() == ["a", "bc"]
    with pytest.raises(GraphError, match="no value attribute"):
        run_numpy(node_case("Constant", 13, []))


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_constant_of_shape_of_scalars_and_empties(run: Any) -> None:
    """An empty shape gives a scalar; without a value it is float32 0."""
    (scalar,) = run(node_case("ConstantOfShape", 9, [np.zeros(0, np.int64)]))
    assert (scalar.dtype, scalar.shape, float(scalar)) == (np.float32, (), 0.0)
    value = np.array([3], ml_dtypes.bfloat16)
    (empty,) = run(node_case("ConstantOfShape", 21, [np.array([0, 2])], value=value))
    assert (empty.dtype, empty.shape) == (value.dtype, (0, 2))


@pytest.mark.parametrize(
    ("start", "limit", "delta"), [(3, 9, 3), (10, 4, -2), (1, 1, 1), (5, 0, 1), (-3, 8, 4), (0, 10, 3), (0, -7, -2)]
)
@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_range_as_python(start: int, limit: int, delta: int, dtype: Any) -> None:
    """The numbers of Python's range in every dtype."""
    case = node_case("Range", 27, [np.array(v, dtype) for v in (start, limit, delta)])
    want = np.array(range(start, limit, delta), np.float64)
    for got in (run_numpy(case)[0], run_jax(case)[0]):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float64), want)


def test_range_of_large_and_fractional_numbers() -> None:
    """64-bit integers stay exact; the count of a float range is rounded up."""
    big = 2**62
    (got,) = run_numpy(node_case("Range", 11, [np.array(v) for v in (big, big + 3, 1)]))
    assert got.tolist() == [big, big + 1, big + 2]
    (parts,) = run_numpy(node_case("Range", 11, [np.array(v, np.float32) for v in (0, 1, 0.3)]))
    np.testing.assert_allclose(parts, [0, 0.3, 0.6, 0.9], rtol=1e-6)


@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_eye_like_diagonals(k: int) -> None:
    """Diagonals beyond the matrix leave zeros; the dtype comes from the input or the attribute."""
    case = node_case("EyeLike", 9, [np.zeros((3, 4), np.int8)], k=k)
    np.testing.assert_array_equal(run_numpy(case)[0], np.eye(3, 4, k=k, dtype=np.int8), strict=True)
    np.testing.assert_array_equal(run_jax(case)[0], np.eye(3, 4, k=k, dtype=np.int8), strict=True)
    (half,) = run_numpy(node_case("EyeLike", 22, [np.zeros((2, 2))], dtype=16))
    assert half.dtype == ml_dtypes.bfloat16
