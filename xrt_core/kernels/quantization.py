"""Quantisation: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.types import ONNX_TO_DTYPE, float_like
from xrt_core.kernels.cast import cast_array
from xrt_core.kernels.namespace import widen
from xrt_core.kernels.registry import OpContext, kernel

_FLOAT32 = np.dtype(np.float32)


def spread(xp: Any, parameter: Any, shape: tuple[int, ...], axis: int, block: int) -> Any:
    """A scale or zero point, broadcastable to `shape`: one for all, one per index of `axis`, or one per block of it.

    Raises ShapeError where it is neither a scalar, nor a vector of the axis' length, nor blocked.
    """
    if parameter.size == 1 and parameter.ndim <= 1:
        return xp.reshape(parameter, ())
    if block > 0:
        repeated = xp.repeat(parameter, block, axis=axis)
        keep = [slice(None)] * len(shape)
        keep[axis] = slice(shape[axis])
        return repeated[tuple(keep)]
    if parameter.ndim != 1 or parameter.shape[0] != shape[axis]:
        raise ShapeError(
            f"scale or zero point of shape {list(parameter.shape)} for an input of shape {list(shape)}: give a scalar, "
            f"{shape[axis]} elements for axis {axis}, or a block_size"
        )
    aligned = [1] * len(shape)
    aligned[axis] = parameter.shape[0]
    return xp.reshape(parameter, aligned)


def plain(xp: Any, x: Any) -> Any:
    """A quantised array as float32, in which every type of at most 16 bits is exact."""
    return x if x.dtype == _FLOAT32 else cast_array(xp, x, _FLOAT32)


def quantize(xp: Any, scaled: Any, zero: Any, dtype: np.dtype, saturate: bool = True) -> Any:
    """`scaled` (x / scale, float32) as `dtype`: rounded half to even, shifted by `zero` (float or None), saturated."""
    if float_like(dtype):
        return cast_array(xp, scaled if zero is None else scaled + zero, dtype, saturate=saturate)
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    rounded = xp.rint(scaled)
    shifted = rounded if zero is None else rounded + zero
    return cast_array(xp, xp.clip(shifted, int(info.min), int(info.max)).astype(np.int32), dtype)


def _scaled(ctx: OpContext, x: Any, scale: Any, raw_scale_dtype: np.dtype) -> Any:
    """x / scale, rounded to the precision of the attribute or of the scale's type."""
    precision = ONNX_TO_DTYPE.get(ctx.attr("precision", 0), raw_scale_dtype)
    if precision == np.int32:
        return x.astype(np.float64) / scale.astype(np.float64)
    if precision == np.float32 or precision.name.startswith("float8"):
        return x.astype(_FLOAT32) / scale.astype(_FLOAT32)
    return widen(widen(x.astype(precision)) / widen(scale.astype(precision))).astype(precision).astype(_FLOAT32)


@kernel("QuantizeLinear")
def quantize_linear(ctx: OpContext, x: Any, scale: Any, zero_point: Any = None) -> Any:
    """saturate(round(x / scale) + zero_point), per tensor, per axis or per block; uint8 by default."""
    xp, axis, block = ctx.xp, ctx.attr("axis", 1), ctx.attr("block_size", 0)
    asked = ONNX_TO_DTYPE.get(ctx.attr("output_dtype", 0), np.dtype(np.uint8))
    dtype = asked if zero_point is None else np.dtype(zero_point.dtype)
    scaled = _scaled(ctx, x, spread(xp, widen(scale), x.shape, axis, block), np.dtype(scale.dtype))
    zero = None if zero_point is None else spread(xp, plain(xp, zero_point), x.shape, axis, block)
    return xp.asarray(quantize(xp, xp.asarray(scaled), zero, dtype, bool(ctx.attr("saturate", 1))))


@kernel("DequantizeLinear")
def dequantize_linear(ctx: OpContext, x: Any, scale: Any, zero_point: Any = None) -> Any:
    """(x - zero_point) * scale in the dtype of the scale or of `output_dtype`, per tensor, per axis or per block."""
    xp, axis, block = ctx.xp, ctx.attr("axis", 1), ctx.attr("block_size", 0)
    out = plain(xp, x)
    if zero_point is not None:
        out = out - spread(xp, plain(xp, zero_point), x.shape, axis, block)
    out = out * spread(xp, widen(scale), x.shape, axis, block)
    dtype = ONNX_TO_DTYPE.get(ctx.attr("output_dtype", 0), np.dtype(scale.dtype))
    return xp.asarray(out).astype(dtype)


@kernel("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: OpContext, x: Any) -> Any:
    """x as uint8 with the scale and zero point that its range (0 included) gives; an all-zero x gets scale 1."""
    xp = ctx.xp
    nothing = xp.zeros((), x.dtype)
    low = xp.minimum(xp.min(x), nothing) if x.size else nothing
    high = xp.maximum(xp.max(x), nothing) if x.size else nothing
    scale = xp.asarray((high - low) / _FLOAT32.type(255), _FLOAT32)
    scale = xp.where(scale == 0, xp.ones_like(scale), scale)
    zero = xp.clip(xp.rint(-low / scale), 0, 255)
    y = quantize(xp, x / scale, zero, np.dtype(np.uint8))
    return xp.asarray(y), xp.asarray(scale), xp.asarray(zero.astype(np.uint8))
