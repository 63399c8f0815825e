"""Comparison, logic and bits against the ONNX backend tests and Python's integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case

RUNS = [run_numpy, run_jax]


@pytest.mark.parametrize("run", RUNS)
def test_comparison_of_64_bit_integers_is_exact(run: Any) -> None:
    """Neighbours beyond 2**53 are told apart."""
    a, b = np.array([2**62, 2**62 + 1], np.int64), np.array([2**62 + 1, 2**62 + 1], np.int64)
    np.testing.assert_array_equal(run(node_case("Less", 13, [a, b]))[0], [True, False])
    np.testing.assert_array_equal(run(node_case("Equal", 13, [a, b]))[0], [False, True])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_nan_equals_nothing(dtype: Any, run: Any) -> None:
    """Comparisons with NaN are false, for narrow floats too."""
    x = np.array([np.nan, 1, np.inf]).astype(dtype)
    for op, want in (("Equal", [False, True, True]), ("Less", [False] * 3), ("GreaterOrEqual", [False, True, True])):
        (got,) = run(node_case(op, 16 if op == "GreaterOrEqual" else 13, [x, x]))
        assert got.dtype == np.bool_
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", RUNS)
def test_shifts(run: Any) -> None:
    """A shift loses what leaves the type, on both sides."""
    x, n = np.array([255, 1, 128], np.uint8), np.array([1, 7, 3], np.uint8)
    np.testing.assert_array_equal(run(node_case("BitShift", 11, [x, n], direction="LEFT"))[0], [254, 128, 0])
    np.testing.assert_array_equal(run(node_case("BitShift", 11, [x, n], direction="RIGHT"))[0], [127, 0, 16])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("positive", "negative"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_is_inf_by_sign(positive: int, negative: int, run: Any) -> None:
    """Each sign of infinity counts only where it is asked for."""
    x = np.array([np.inf, -np.inf, 1, np.nan], np.float32)
    (got,) = run(node_case("IsInf", 20, [x], detect_positive=positive, detect_negative=negative))
    np.testing.assert_array_equal(got, [bool(positive), bool(negative), False, False])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.int64, np.bool_, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_where_keeps_any_type(dtype: Any, run: Any) -> None:
    """Where chooses elements of any type and broadcasts all three inputs."""
    x, y = np.array([[1], [0]], np.int8).astype(dtype), np.array([0, 1, 0], np.int8).astype(dtype)
    (got,) = run(node_case("Where", 16, [np.array([True, False, True]), x, y]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.int32), [[1, 1, 1], [0, 1, 0]])


def test_where_and_equal_take_strings() -> None:
    """Strings are chosen and compared as objects."""
    a, b = np.array(["x", "y"], object), np.array(["x", "z"], object)
    np.testing.assert_array_equal(run_numpy(node_case("Equal", 19, [a, b]))[0], [True, False])
    (got,) = run_numpy(node_case("Where", 16, [np.array([True, False]), a, b]))
    assert got.tolist() == ["x", "z"]


def test_scalar_results_are_arrays() -> None:
    """Comparisons of 0-d arrays give 0-d arrays."""
    one = np.array(1.0, np.float32)
    for op, inputs in (("Less", [one, one]), ("IsNaN", [one]), ("IsInf", [one]), ("Not", [np.array(True)])):
        (got,) = run_numpy(node_case(op, 20 if op.startswith("Is") else 13, inputs))
        assert type(got) is np.ndarray
        assert got.shape == ()
