"""Conversions against the ONNX backend tests, the table in Cast's specification, and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ExecutionError
from xrt_core.ir.types import DTYPE_TO_ONNX, ONNX_TO_DTYPE, STRING
from xrt_core.kernels import cast, find_kernel

RUNS = [run_numpy, run_jax]

NUMBERS = [d for d in ONNX_TO_DTYPE.values() if d != STRING and d.kind != "c"]


def cast_case(x: np.ndarray, dtype: Any, version: int = 25, **attributes: Any) -> Case:
    """A Cast of x to `dtype`."""
    return node_case("Cast", version, [x], to=DTYPE_TO_ONNX[np.dtype(dtype)], **attributes)


@pytest.mark.parametrize("source", NUMBERS, ids=str)
def test_every_pair_of_types(source: np.dtype) -> None:
    """1 survives the way from every type to every type (0 too, where both have one)."""
    x = np.array([1, 1, 0], np.float32).astype(source)
    count = 2 if source == ml_dtypes.float8_e8m0fnu else 3
    for target in NUMBERS:
        (got,) = run_numpy(cast_case(x[:count], target))
        assert got.dtype == target
        if target == ml_dtypes.float8_e8m0fnu:
            got = got[:2]
        np.testing.assert_array_equal(got.astype(np.float32), np.array([1, 1, 0], np.float32)[: got.size])


BEYOND = [1e10, -1e10, 3e9, -3e9, 6.5e10, -1.5, 300.7, -70000.5, 2.0**31, -(2.0**31), 2.0**63, 1.5 * 2.0**63, 1e20,
          -1e20, np.nan, np.inf, -np.inf]  # fmt: skip


def _as_c(v: float, dtype: np.dtype) -> int:
    """The integer that x86-64 makes of a float: truncated to 32 or 64 bits, of which the low ones are kept."""
    bits = 64 if dtype in (np.int64, np.uint64, np.uint32) else 32
    if dtype == np.uint64 and v >= 2.0**63:  # converted as that much less
        return (int(v) if v < 2.0**64 else 0) & (1 << 64) - 1
    least = -(1 << (bits - 1))
    whole = int(v) if least <= v < -least else least
    width = 8 * dtype.itemsize
    low = whole & ((1 << width) - 1)
    return low - (1 << width) if dtype.kind == "i" and low >> (width - 1) else low


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [d for d in NUMBERS if d.kind in "iu"], ids=str)
def test_floats_beyond_integers_are_the_same_everywhere(target: np.dtype, source: Any, run: Any) -> None:
    """What ONNX leaves open: at every place of an array, by NumPy and by JAX, what C compilers make of it on x86-64."""
    with np.errstate(all="ignore"):
        x = np.tile(np.array(BEYOND).astype(source), 5)
    (got,) = run(cast_case(x, target))
    assert got.tolist() == [_as_c(v, target) for v in x.astype(np.float64).tolist()]


@pytest.mark.parametrize("target", [np.uint16, np.int32, np.int64, np.uint64])
def test_numpy_that_saturates_is_corrected(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors whose conversions differ, floats are converted as JAX's are."""
    monkeypatch.setattr(cast, "_numpy_converts_alike", lambda: False)
    (got,) = run_numpy(cast_case(np.array(BEYOND), target))
    assert got.tolist() == [_as_c(v, np.dtype(target)) for v in BEYOND]


FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("source", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_saturates_or_not(dtype: Any, source: Any, run: Any) -> None:
    """What exceeds a float8 becomes its largest value, or NaN or infinity with saturate=0; NaN stays NaN."""
    x = np.array([np.nan, np.inf, -np.inf, 65000, -65000, 0.5]).astype(source)
    largest = float(ml_dtypes.finfo(dtype).max)
    (got,) = run(cast_case(x, dtype))
    np.testing.assert_array_equal(got.astype(np.float32), [np.nan, largest, -largest, largest, -largest, 0.5])
    (got,) = run(cast_case(x, dtype, saturate=0))
    over = np.inf if dtype is ml_dtypes.float8_e5m2 else np.nan
    np.testing.assert_array_equal(got.astype(np.float32), [np.nan, over, -over, over, -over, 0.5])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("source", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_float4_saturates(source: Any, run: Any) -> None:
    """Infinities as well, of which the type has none; also in a constant, which XLA folds by other rules."""
    import jax

    x, small = np.array([np.inf, -np.inf, 65000, -7, 0.5, -3.5]).astype(source), np.dtype(ml_dtypes.float4_e2m1fn)
    (got,) = run(cast_case(x, small))
    for y in (got, jax.jit(lambda: cast.cast_array(jax.numpy, jax.numpy.asarray(x), small))()):
        np.testing.assert_array_equal(np.asarray(y).astype(np.float32), [6, -6, 6, -6, 0.5, -4])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("mode", "saturate", "want"),
    [
        ("up", 1, [2.0**-127, np.nan, 2.0**127, 2.0, 2.0, 4.0, 2.0**-127, 2.0**-126, 2.0**127]),
        ("down", 1, [2.0**-127, np.nan, 2.0**127, 1.0, 2.0, 2.0, 2.0**-127, 2.0**-127, 2.0**127]),
        ("nearest", 0, [np.nan, np.nan, np.nan, 1.0, 2.0, 4.0, 2.0**-127, 2.0**-126, np.nan]),
    ],
)
def test_rounding_to_powers_of_two(mode: str, saturate: int, want: list[float], run: Any) -> None:
    """float8_e8m0: zero, NaN, infinity, between two powers, at the bottom of the range and at its top."""
    x = np.array([0, np.nan, np.inf, 1.25, 2, 3, 2.0**-127, 1.75 * 2.0**-127, 1.9 * 2.0**127], np.float32)
    (got,) = run(cast_case(x, ml_dtypes.float8_e8m0fnu, saturate=saturate, round_mode=mode))
    np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "bits"), [(ml_dtypes.int4, 4), (ml_dtypes.uint4, 4), (np.int8, 8), (np.uint16, 16)])
def test_integers_out_of_range_wrap(dtype: Any, bits: int, run: Any) -> None:
    """Integers lose their high bits."""
    x = np.array([200, -9, 70000, 7, -1], np.int32)
    (got,) = run(cast_case(x, dtype))
    np.testing.assert_array_equal(got.astype(np.int32) & (2**bits - 1), x & (2**bits - 1))


@pytest.mark.parametrize("run", RUNS)
def test_truth_is_anything_but_zero(run: Any) -> None:
    """Floats become True unless they are zero, the negative one included."""
    x = np.array([0.0, -0.0, 0.3, np.nan, -5], np.float32)
    np.testing.assert_array_equal(run(cast_case(x, np.bool_))[0], [False, False, True, True, True])


def test_strings_and_numbers() -> None:
    """Strings read as numbers, special values in any case; numbers print as strings; neither runs on an engine."""
    words = np.array(["3.14", "1e-5", "+INF", "-inf", "NaN"], object)
    (got,) = run_numpy(cast_case(words, np.float32))
    np.testing.assert_array_equal(got, np.array([3.14, 1e-5, np.inf, -np.inf, np.nan], np.float32))
    (got,) = run_numpy(cast_case(np.array(["9007199254740993", "-7"], object), np.int64))
    np.testing.assert_array_equal(got, [9007199254740993, -7])
    np.testing.assert_array_equal(run_numpy(cast_case(np.array(["100.5"], object), np.int32))[0], [100])
    case = cast_case(np.array([0.1, 2], np.float32), object)
    assert run_numpy(case)[0].tolist() == ["0.1", "2"]
    odd = [-2.0, -0.0, 1e-5, 1e20, 123456789.0, 0.1234567891234, np.nan, np.inf, -np.inf, 16777216.0]
    wanted = ["-2", "-0", "1e-05", "1e+20", "1.2345679e+08", "0.12345679", "NaN", "INF", "-INF", "16777216"]
    assert run_numpy(cast_case(np.array(odd), object))[0].tolist() == wanted  # as onnxruntime 1.32 prints them
    assert run_numpy(cast_case(np.array([[True, False]]), object))[0].tolist() == [["1", "0"]]
    assert run_numpy(cast_case(np.array([200, 0], np.uint8), object))[0].tolist() == ["200", "0"]
    with pytest.raises(ExecutionError, match="Hello"):
        run_numpy(cast_case(np.array(["Hello"], object), np.float32))
    found = find_kernel("", "Cast")
    assert found is not None
    assert "strings" in (found.why_dynamic(cast_case(words, np.float32).node) or "")
    assert found.why_dynamic(cast_case(np.zeros(1), np.float32).node) is None


def test_unknown_target() -> None:
    """A type number that ONNX does not have is refused by number."""
    with pytest.raises(ExecutionError, match="99"):
        run_numpy(node_case("Cast", 25, [np.zeros(2)], to=99))


@pytest.mark.parametrize("run", RUNS)
def test_bits_of_small_types(run: Any) -> None:
    """BitCast between 4-bit types keeps the four bits."""
    x = np.array([0, 7, 8, 15], np.uint8).astype(ml_dtypes.uint4)
    (signed,) = run(node_case("BitCast", 26, [x], to=22))
    np.testing.assert_array_equal(signed.astype(np.int32), [0, 7, -8, -1])
    (back,) = run(node_case("BitCast", 26, [np.asarray(signed)], to=21))
    np.testing.assert_array_equal(back.astype(np.int32), [0, 7, 8, 15])
    (floats,) = run(node_case("BitCast", 26, [x], to=23))
    np.testing.assert_array_equal(floats.astype(np.float32), [0, 6, 0, -6])


@pytest.mark.parametrize("version", [6, 9, 13, 19])
def test_old_versions_match_the_reference(version: int) -> None:
    """A plain conversion gives the reference's numbers in every version."""
    case = cast_case(np.array([1.7, -1.7, 0.0], np.float32), np.int32, version)
    np.testing.assert_array_equal(run_numpy(case)[0], run_reference(case)[0])
