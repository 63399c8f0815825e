"""Arithmetic and mathematical functions against the ONNX backend tests, Python's arithmetic and float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference

RUNS = [run_numpy, run_jax]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["Exp", "Tanh", "Erf", "Reciprocal", "Sqrt", "Sin"])
def test_narrow_floats_are_rounded_once(op: str, dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """A narrow float's function is the float64 one, rounded to the type: half a unit off at most."""
    x = (rng.random((5, 7)) * 3 + 0.1).astype(dtype)
    got = run(node_case(op, 13, [x]))[0]
    want = run_numpy(node_case(op, 13, [x.astype(np.float64)]))[0]
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=float(ml_dtypes.finfo(dtype).eps) * 0.51)


@pytest.mark.parametrize("op", ["Abs", "Neg", "Floor", "Sqrt", "Erf", "Round", "Sign", "Reciprocal"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_tensors_stay_arrays(op: str, shape: tuple[int, ...]) -> None:
    """A 0-d or empty input gives an array of its shape, never a NumPy scalar."""
    (got,) = run_numpy(node_case(op, 13, [np.ones(shape, np.float32)]))
    assert type(got) is np.ndarray
    assert got.shape == shape


@pytest.mark.parametrize("run", RUNS)
def test_division_of_integers_truncates(run: Any) -> None:
    """The quotient of integers is truncated toward zero, up to the ends of the range."""
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    a = np.array([7, -7, 7, -7, low, high, low], np.int64)
    b = np.array([2, 2, -2, -2, 3, -1, low], np.int64)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    want = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]
    np.testing.assert_array_equal(run(node_case("Div", 14, [a, b]))[0], np.array(want, np.int64))


@pytest.mark.parametrize("run", RUNS)
def test_powers_of_integers(run: Any) -> None:
    """Negative powers of integers truncate to zero, save those of 1 and -1; 64-bit bases stay exact."""
    x = np.array([2, -2, 1, -1, -1, 3, 3037000499], np.int64)
    y = np.array([-1, -3, -5, -5, -4, 4, 2], np.int32)
    np.testing.assert_array_equal(run(node_case("Pow", 15, [x, y]))[0], [0, 0, 1, -1, 1, 81, 9223372030926249001])
    least = np.array([-(2**63)] * 3)
    np.testing.assert_array_equal(run(node_case("Pow", 15, [np.array([1, -1, 2]), least]))[0], [1, 1, 0])


@pytest.mark.parametrize("run", RUNS)
def test_pow_of_integers_beyond_their_type_is_the_same_everywhere(run: Any) -> None:
    """As a Cast of the number would be, where the exponent is a float: ONNX leaves it open."""
    y = np.array([120.0, 180.0, -1.0], np.float32)
    for dtype, least in ((np.int64, -(2**63)), (np.int32, -(2**31))):
        x = np.array([2, -3, 2], dtype)
        np.testing.assert_array_equal(run(node_case("Pow", 15, [x, y]))[0], [least, least, 0])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("y", [np.array(2.0, np.float32), np.array([3], np.int64), np.array([[0.5]], np.float64)])
def test_pow_keeps_the_type_of_the_base(y: np.ndarray, run: Any) -> None:
    """The result has the base's dtype and the broadcast shape, whatever the exponent's type."""
    x = np.array([1.5, 4.0, 0.25], np.float32)
    (got,) = run(node_case("Pow", 15, [x, y]))
    assert got.dtype == np.float32
    assert got.shape == np.broadcast_shapes(x.shape, y.shape)
    np.testing.assert_allclose(got.reshape(-1), x.astype(np.float64) ** float(y.reshape(())), rtol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_modulo_of_floats_at_the_corners(run: Any) -> None:
    """With fmod=0 the sign is the divisor's, zeros and infinite divisors included."""
    a = np.array([5.5, -5.5, 0.0, -0.0, 1.0, -1.0, np.inf, 3.0, 1.0], np.float32)
    b = np.array([3.0, 3.0, -2.0, 2.0, np.inf, np.inf, 1.0, 0.0, -np.inf], np.float32)
    want = np.array([2.5, 0.5, -0.0, 0.0, 1.0, np.inf, np.nan, np.nan, -np.inf], np.float32)
    (got,) = run(node_case("Mod", 28, [a, b]))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[:4]), np.signbit(want[:4]))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("op", "want"), [("Max", [np.nan, 2, 5]), ("Min", [np.nan, -1, 3])])
def test_nan_wins_in_extrema(op: str, want: list[float], run: Any) -> None:
    """Max and Min give NaN where any input is NaN."""
    parts = [np.array([np.nan, 2, 3], np.float32), np.array([1, -1, 5], np.float32), np.array([4], np.float32)]
    want = [w if np.isnan(w) else (max(w, 4) if op == "Max" else min(w, 4)) for w in want]
    np.testing.assert_array_equal(run(node_case(op, 13, parts))[0], np.array(want, np.float32))


@pytest.mark.parametrize("run", RUNS)
def test_clip_before_its_bounds_were_inputs(run: Any) -> None:
    """Version 6 takes attributes, and its default bounds are float32's finite range."""
    x = np.array([-np.inf, -3.0, 0.5, 7.0, np.inf], np.float32)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(run(node_case("Clip", 6, [x], min=-1.0, max=2.0))[0], [-1, -1, 0.5, 2, 2])
    np.testing.assert_array_equal(run(node_case("Clip", 6, [x]))[0], [-largest, -3, 0.5, 7, largest])


@pytest.mark.parametrize("run", RUNS)
def test_clip_with_crossed_bounds(run: Any) -> None:
    """Where the lower bound is above the upper one, the upper one wins."""
    x = np.array([-9, 0, 9], np.int8)
    (got,) = run(node_case("Clip", 13, [x, np.array(5, np.int8), np.array(2, np.int8)]))
    np.testing.assert_array_equal(got, np.array([2, 2, 2], np.int8))


@pytest.mark.parametrize("run", RUNS)
def test_round_takes_halves_to_even(run: Any) -> None:
    """Halves go to the even neighbour, and the sign of zero stays."""
    x = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 1e20], np.float64)
    (got,) = run(node_case("Round", 11, [x]))
    np.testing.assert_array_equal(got, [0, 2, 2, 0, -2, 1e20])
    assert np.signbit(got[3])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8])
def test_division_of_integers_by_zero_is_zero(run: Any, dtype: Any) -> None:
    """In every namespace; the standard leaves it open, and it ends no process."""
    a, b = np.array([5, 7, 0], dtype), np.array([0, 2, 0], dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(node_case("Div", 14, [a, b]))[0], np.array([0, 3, 0], dtype))


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
def test_strided_inputs_match_the_reference(op: str, rng: np.random.Generator) -> None:
    """Transposed and reversed views give what the reference evaluator gives."""
    a = rng.standard_normal((4, 6)).astype(np.float32).T
    b = rng.standard_normal((4,)).astype(np.float32)[::-1]
    case = node_case(op, 14, [a, b])
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-6)
