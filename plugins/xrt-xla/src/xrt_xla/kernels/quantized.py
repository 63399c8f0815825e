"""Integer matrix products and convolutions: 8-bit operands, or exact floats where XLA has no fast integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.kernels.quantization import plain, quantize
from xrt_core.kernels.windows import windows_of
from xrt_xla.kernels.context import XlaContext, portable, xla_kernel
from xrt_xla.kernels.convolution import convolve, filter_layout, form_of

_EIGHT_BIT = (np.dtype(np.int8), np.dtype(np.uint8))


def _per_row(xp: Any, p: Any) -> Any:
    return xp.reshape(p, (-1, 1)) if p.ndim == 1 and p.size != 1 else xp.reshape(p, ()) if p.size == 1 else p


def _per_column(xp: Any, p: Any) -> Any:
    return xp.reshape(p, ()) if p.size == 1 else p


def signed(xp: Any, x: Any) -> Any:
    """8-bit integers as int8; unsigned ones, and with them their zero point, move down by 128."""
    return x if x.dtype == np.int8 else (x ^ np.uint8(0x80)).view(np.int8)


def _signed(xp: Any, x: Any, zero: Any) -> tuple[Any, Any]:
    """`x` as int8 and its zero point as int32 or None; unsigned numbers move down by 128, and so does their zero."""
    if zero is not None:
        zero = zero.astype(np.int32)
    if x.dtype == np.uint8:
        zero = (0 if zero is None else zero) - xp.asarray(128, np.int32)
    return signed(xp, x), zero


def dequantized_product(ctx: XlaContext, a: Any, b: Any, offset: Any, scale: Any) -> Any:
    """A MatMul of what two DequantizeLinear gave, of the integers that they read (`xrt_xla.dequantized`)."""
    y = ctx.xp.matmul(signed(ctx.xp, a), b, preferred_element_type=np.int32)
    return (y - offset).astype(np.float32) * scale


def integer_product(xp: Any, a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    """(a - a_zero) @ (b - b_zero) as int32, for 8-bit matrices of rank 2 and more.

    The product itself stays 8-bit (ten times as fast as int32 on a CPU); the zero points follow from
    (a - p)(b - q) = ab - p colsum(b) - rowsum(a) q + k p q, exact modulo 2**32.
    """
    a, a_zero = _signed(xp, a, a_zero)
    b, b_zero = _signed(xp, b, b_zero)
    y = xp.matmul(a, b, preferred_element_type=np.int32)
    p = None if a_zero is None else _per_row(xp, a_zero)
    q = None if b_zero is None else _per_column(xp, b_zero)
    if p is not None:
        y = y - p * xp.sum(b, axis=-2, keepdims=True, dtype=np.int32)
    if q is not None:
        y = y - q * xp.sum(a, axis=-1, keepdims=True, dtype=np.int32)
    if p is not None and q is not None:
        y = y + np.int32(a.shape[-1]) * p * q
    return y


def _fits(a: Any, b: Any) -> bool:
    return a.ndim >= 2 and b.ndim >= 2 and a.dtype in _EIGHT_BIT and b.dtype in _EIGHT_BIT


@xla_kernel("MatMulInteger", train=False)
def matmul_integer(ctx: XlaContext, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """Product of 8-bit matrices in int32."""
    if not _fits(a, b):
        return portable(ctx, a, b, a_zero, b_zero)
    return integer_product(ctx.xp, a, b, a_zero, b_zero)


@xla_kernel("QLinearMatMul", train=False)
def qlinear_matmul(
    ctx: XlaContext, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    """Product of quantised 8-bit matrices, quantised again."""
    if not _fits(a, b):
        return portable(ctx, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero)
    xp = ctx.xp
    product = integer_product(xp, a, b, a_zero, b_zero)
    a_scale, b_scale, y_scale = (s.astype(np.float32) for s in (a_scale, b_scale, y_scale))
    scale = _per_row(xp, a_scale) * _per_column(xp, b_scale) / _per_row(xp, y_scale)
    scaled = product.astype(np.float32) * scale
    return quantize(xp, scaled, _per_row(xp, plain(xp, y_zero)), y_zero.dtype)


def _integer_convolution(ctx: XlaContext, x: Any, x_zero: Any, w: Any, w_zero: Any) -> Any:
    """Exact convolution of 8-bit integers as int32: in floats wide enough for every partial sum."""
    xp, groups, shape = ctx.xp, int(ctx.attr("group", 1)), tuple(w.shape)
    # |x - zero| and |w - zero| are at most 255; float32 is exact up to 2**24
    exact = np.float32 if math.prod(shape[1:]) * 255 * 255 < 1 << 24 else np.float64
    x, w = x.astype(np.int32), w.astype(np.int32)
    if x_zero is not None:
        x = x - xp.reshape(x_zero, ()).astype(np.int32)
    if w_zero is not None:
        w = w - xp.reshape(w_zero, (-1,) + (1,) * (w.ndim - 1) if w_zero.size > 1 else ()).astype(np.int32)
    form = form_of(shape, groups, ctx.kind)
    layout = filter_layout(form, groups)
    w = w.astype(exact) if layout is None else layout.make(xp, w.astype(exact))
    y = convolve(ctx, x.astype(exact), w, windows_of(ctx, x.shape[2:], shape[2:]), groups, form, shape)
    return y.astype(np.int64).astype(np.int32) if exact is np.float64 else y.astype(np.int32)


@xla_kernel("ConvInteger", train=False)
def conv_integer(ctx: XlaContext, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    """Convolution of 8-bit integers in int32."""
    if 0 in x.shape or 0 in w.shape:
        return portable(ctx, x, w, x_zero, w_zero)
    return _integer_convolution(ctx, x, x_zero, w, w_zero)


@xla_kernel("QLinearConv", train=False)
def qlinear_conv(
    ctx: XlaContext, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any,
    bias: Any = None,
) -> Any:  # fmt: skip
    """Convolution of quantised 8-bit integers, quantised again; the bias is int32 at scale x_scale * w_scale."""
    if 0 in x.shape or 0 in w.shape:
        return portable(ctx, x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias)
    xp, channel = ctx.xp, (-1,) + (1,) * (x.ndim - 2)
    sums = _integer_convolution(ctx, x, x_zero, w, w_zero)
    if bias is not None:
        sums = sums + xp.reshape(bias, channel)
    scale = xp.reshape(x_scale, ()) * xp.reshape(w_scale, channel) / xp.reshape(y_scale, ())
    scaled = sums.astype(np.float32) * scale.astype(np.float32)
    return quantize(xp, scaled, plain(xp, xp.reshape(y_zero, ())), y_zero.dtype)
