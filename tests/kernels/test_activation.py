"""Activation functions against the ONNX backend tests, float64 formulas and the reference's older versions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference

RUNS = [run_numpy, run_jax]


SMOOTH = {"Celu": 12, "Elu": 6, "Gelu": 20, "Mish": 18, "Selu": 6, "Sigmoid": 13, "Softplus": 1, "Swish": 24}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("op", SMOOTH)
def test_precision(op: str, dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """In a narrow float the result is the float64 one, rounded; in float32 it is close to it."""
    x = (rng.standard_normal((6, 5)) * 3).astype(dtype)
    (got,) = run(node_case(op, SMOOTH[op], [x]))
    (want,) = run_numpy(node_case(op, SMOOTH[op], [x.astype(np.float64)]))
    assert got.dtype == dtype
    slack = 1e-5 if dtype is np.float32 else 0.6 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=slack, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_extremes_do_not_overflow(run: Any) -> None:
    """Sigmoid, Softplus and Softmax stay finite where exp overflows."""
    x = np.array([-1e4, -100, 0, 100, 1e4], np.float32)
    np.testing.assert_allclose(run(node_case("Sigmoid", 13, [x]))[0], [0, 0, 0.5, 1, 1], atol=1e-30)
    np.testing.assert_allclose(run(node_case("Softplus", 1, [x]))[0], [0, 0, np.log(2), 100, 1e4], atol=1e-7)
    np.testing.assert_allclose(run(node_case("Softmax", 13, [x]))[0], [0, 0, 0, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_flattening_before_version_13(op: str, axis: int | None, run: Any, rng: np.random.Generator) -> None:
    """Version 11 works on the matrix that x flattens to at `axis` (1 by default)."""
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    case = node_case(op, 11, [x], **({} if axis is None else {"axis": axis}))
    rows = int(np.prod(x.shape[: (1 if axis is None else axis) % 3]))
    want = run_numpy(node_case(op, 13, [x.reshape(rows, -1)], axis=1))[0].reshape(x.shape)
    np.testing.assert_allclose(run(case)[0], want, rtol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_hardmax_takes_the_first_of_equals(run: Any) -> None:
    """One 1 a row, at the first maximum."""
    x = np.array([[3, 1, 3], [2, 2, 2]], np.float64)
    np.testing.assert_array_equal(run(node_case("Hardmax", 13, [x]))[0], [[1, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax", "Relu", "Gelu"])
@pytest.mark.parametrize("run", RUNS)
def test_empty(op: str, run: Any) -> None:
    """An empty tensor stays as it is."""
    x = np.zeros((0, 3), np.float32)
    assert run(node_case(op, 20 if op == "Gelu" else 13, [x]))[0].shape == (0, 3)


@pytest.mark.parametrize("run", RUNS)
def test_integers(run: Any) -> None:
    """Relu, PRelu and Shrink take integers and keep their type."""
    x = np.array([-3, -1, 0, 2, 5], np.int32)
    for case, want in (
        (node_case("Relu", 14, [x]), [0, 0, 0, 2, 5]),
        (node_case("PRelu", 16, [x, np.array([2], np.int32)]), [-6, -2, 0, 2, 5]),
        (node_case("Shrink", 9, [x], lambd=1.5, bias=1.0), [-2, 0, 0, 1, 4]),
    ):
        (got,) = run(case)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op", "version"),
    [("LeakyRelu", 6), ("Elu", 6), ("Selu", 6), ("HardSigmoid", 6), ("ThresholdedRelu", 10), ("Softsign", 1)],
)
def test_defaults_match_the_reference(op: str, version: int, rng: np.random.Generator) -> None:
    """Attributes that are left out have the schema's defaults."""
    case = node_case(op, version, [rng.standard_normal((3, 4)).astype(np.float32) * 2])
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-5, atol=1e-6)
