"""Quantisation against the ONNX backend tests and float64 formulas, per tensor, axis and block."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError

RUNS = [run_numpy, run_jax]

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_rounding_and_saturation(dtype: Any, run: Any) -> None:
    """Halves go to even before the zero point is added; the ends of the type hold, infinities included."""
    x = np.array([0.5, 1.5, -0.5, 1e9, -1e9, np.inf, -np.inf], np.float32)
    info = ml_dtypes.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    (got,) = run(node_case("QuantizeLinear", 25, [x, np.array(1.0, np.float32), np.array(1, np.int32).astype(dtype)]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.int32), [1, min(3, high), 1, high, low, high, low])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dequantised_by_definition(dtype: Any, scale_dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """(x - zero point) * scale per axis, in the dtype of the scale."""
    info = ml_dtypes.iinfo(dtype)
    x = rng.integers(int(info.min), int(info.max) + 1, (2, 3, 4)).astype(np.int32).astype(dtype)
    zero = np.array([1, 0, 1], np.int32).astype(dtype)
    scale = np.array([0.5, 0.1, 0.75], scale_dtype)
    (got,) = run(node_case("DequantizeLinear", 25, [x, scale, zero], axis=-2))
    wide_zero, wide_scale = zero.astype(np.float64)[:, None], scale.astype(np.float64)[:, None]
    assert got.dtype == scale_dtype
    tolerance = float(ml_dtypes.finfo(scale_dtype).eps)
    np.testing.assert_allclose(got.astype(np.float64), (x.astype(np.float64) - wide_zero) * wide_scale, rtol=tolerance)


@pytest.mark.parametrize("run", RUNS)
def test_blocks_with_a_short_last_one(run: Any, rng: np.random.Generator) -> None:
    """Blocks of 3 along an axis of 5: the last block is cut short; back and forth stays within half a step."""
    x = rng.standard_normal((2, 5, 2)).astype(np.float32)
    scale = (rng.random((2, 2, 2)) * 0.1 + 0.05).astype(np.float32)
    (q,) = run(node_case("QuantizeLinear", 21, [x, scale], axis=1, block_size=3, output_dtype=3))
    assert q.dtype == np.int8
    (back,) = run(node_case("DequantizeLinear", 21, [np.asarray(q), scale], axis=1, block_size=3))
    steps = np.repeat(scale, 3, axis=1)[:, :5]
    assert np.all(np.abs(back - x) <= steps * 0.501)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2fnuz])
def test_float8(dtype: Any, run: Any) -> None:
    """float8 saturates unless told otherwise, and comes back exactly."""
    x, scale, zero = np.array([1.0, 1e6, -1e6, 3], np.float32), np.array(0.5, np.float32), np.array(0, dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    (got,) = run(node_case("QuantizeLinear", 19, [x, scale, zero]))
    np.testing.assert_array_equal(got.astype(np.float32), [2, largest, -largest, 6])
    (open_,) = run(node_case("QuantizeLinear", 19, [x, scale, zero], saturate=0))
    np.testing.assert_array_equal(open_.astype(np.float32), [2, np.nan, np.nan, 6])
    (back,) = run(node_case("DequantizeLinear", 19, [np.asarray(got)[[0, 3]], scale]))
    np.testing.assert_array_equal(back, [1, 3])


@pytest.mark.parametrize("run", RUNS)
def test_precision_of_the_division(run: Any) -> None:
    """The scale's type decides the precision of the division, the attribute overrules it."""
    x, scale = np.array([2049.0], np.float32), np.array(1.0, np.float16)  # float16 has 11 bits: 2049 becomes 2048
    (got,) = run(node_case("QuantizeLinear", 23, [x, scale], output_dtype=5))
    np.testing.assert_array_equal(got, np.array([2048], np.int16))
    (got,) = run(node_case("QuantizeLinear", 23, [x, scale], output_dtype=5, precision=1))
    np.testing.assert_array_equal(got, np.array([2049], np.int16))


@pytest.mark.parametrize("run", RUNS)
def test_scale_that_fits_nothing(run: Any) -> None:
    """A scale of the wrong length is refused with both shapes."""
    x, scale = np.ones((2, 3), np.float32), np.ones(4, np.float32)
    with pytest.raises(ShapeError, match=r"\[4\].*\[2, 3\]"):
        run(node_case("QuantizeLinear", 13, [x, scale]))


@pytest.mark.parametrize("version", [10, 13, 19])
def test_old_versions(version: int, rng: np.random.Generator) -> None:
    """Per tensor, every version gives the reference's numbers, and the way back is the formula's."""
    scale, zero = np.array(0.3, np.float32), np.array(3, np.int8)
    case = node_case("QuantizeLinear", version, [rng.standard_normal((3, 4)).astype(np.float32) * 50, scale, zero])
    (q,) = run_numpy(case)
    np.testing.assert_array_equal(q, run_reference(case)[0])
    (back,) = run_numpy(node_case("DequantizeLinear", version, [q, scale, zero]))
    np.testing.assert_allclose(back, (q.astype(np.float32) - 3) * np.float32(0.3), rtol=1e-6)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("x", [[0.0, 0.0], [], [1.0, 2.0], [-3.0, -1.0], [-1.0, 5.0]])
def test_dynamic_range(x: list[float], run: Any) -> None:
    """The range always holds 0, which quantises exactly; constant zero and nothing at all have scale 1."""
    given = np.array(x, np.float32)
    y, scale, zero = run(node_case("DynamicQuantizeLinear", 11, [given], 3))
    assert (y.dtype, scale.dtype, zero.dtype) == (np.uint8, np.float32, np.uint8)
    assert scale.shape == zero.shape == ()
    reach = max([0.0, *x]) - min([0.0, *x])
    np.testing.assert_allclose(scale, reach / 255 if reach else 1.0, rtol=1e-6)
    assert np.all(np.abs((y.astype(np.float32) - zero) * scale - given) <= scale * 0.51)
