"""Convolutions: Conv, ConvTranspose, their integer forms, and the causal convolution with a state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.kernels.namespace import is_jax, narrow, widen
from xrt_core.kernels.registry import OpContext, kernel
from xrt_core.kernels.windows import Windows, explicit_pads, pad_with, spatial_attribute, windows_of

_PATCH_BYTES = 1 << 24
"""Under NumPy, images are unfolded into patches in batches of about this size, so that the patches stay in cache."""


def convolve(xp: Any, x: Any, w: Any, windows: Windows, groups: int) -> Any:
    """Correlate x[N, C, *size] with w[M, C/groups, *kernel]; both of one dtype, in which the sums are kept."""
    x = pad_with(xp, x, windows.begin, windows.overhang, 0)
    n, channels, filters = x.shape[0], x.shape[1], w.shape[0]
    if channels == groups and filters and groups > 1:
        return _depthwise(xp, x, w, windows)
    taps = list(windows.taps())
    positions = math.prod(windows.out)
    depth = channels // groups
    weight = xp.reshape(w, (groups, filters // groups, depth * len(taps)))
    shape = (n, filters, *windows.out)
    if len(taps) == 1:
        patches = xp.reshape(x[(..., *taps[0])], (n, groups, depth, positions))
        return xp.reshape(xp.matmul(weight, patches), shape)
    if is_jax(xp):
        patches = xp.stack([x[(..., *tap)] for tap in taps], axis=2)
        patches = xp.reshape(patches, (n, groups, depth * len(taps), positions))
        return xp.reshape(xp.matmul(weight, patches), shape)
    y = xp.empty((n, groups, filters // groups, positions), dtype=x.dtype)
    each = channels * len(taps) * positions * x.dtype.itemsize
    batch = max(1, min(n, _PATCH_BYTES // max(each, 1)))
    buffer = xp.empty((batch, channels, len(taps), *windows.out), dtype=x.dtype)
    for first in range(0, n, batch):
        count = min(batch, n - first)
        part = buffer[:count]
        for i, tap in enumerate(taps):
            part[:, :, i] = x[(slice(first, first + count), slice(None), *tap)]
        patches = xp.reshape(part, (count, groups, depth * len(taps), positions))
        xp.matmul(weight, patches, out=y[first : first + count])
    return xp.reshape(y, shape)


def _depthwise(xp: Any, x: Any, w: Any, windows: Windows) -> Any:
    """One input channel a group: a sum over the kernel's taps, each scaled by its channel's weight."""
    n, channels, filters = x.shape[0], x.shape[1], w.shape[0]
    multiplier = filters // channels
    weight = xp.reshape(w, (channels, multiplier, -1, *(1,) * windows.rank))
    in_place = not is_jax(xp)
    total, product = None, None
    for i, tap in enumerate(windows.taps()):
        part, scale = x[(slice(None), slice(None), None, *tap)], weight[:, :, i]
        if total is None:
            total = part * scale
        elif in_place:
            product = xp.multiply(part, scale, out=product)
            total += product
        else:
            total = total + part * scale
    if total is None:  # a kernel without elements
        return xp.zeros((n, filters, *windows.out), dtype=x.dtype)
    return xp.reshape(total, (n, filters, *windows.out))


def _add_bias(xp: Any, y: Any, bias: Any | None) -> Any:
    if bias is None:
        return y
    bias = xp.reshape(bias, (-1,) + (1,) * (y.ndim - 2)).astype(y.dtype)
    if is_jax(xp):
        return y + bias
    y += bias  # in place: `convolve` allocated it
    return y


def _groups(ctx: OpContext, x: Any, w: Any) -> int:
    """Attribute `group`. Raises ShapeError unless it fits the channels of input and filter."""
    groups = int(ctx.attr("group", 1))
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: input {tuple(x.shape)} and filter {tuple(w.shape)} with "
            f"group = {groups} do not fit: the input needs filter.shape[1] * group channels"
        )
    return groups


@kernel("Conv")
def conv(ctx: OpContext, x: Any, w: Any, bias: Any = None) -> Any:
    """Conv: floats narrower than float32 accumulate in float32."""
    groups = _groups(ctx, x, w)
    windows = windows_of(ctx, x.shape[2:], w.shape[2:])
    y = convolve(ctx.xp, widen(x), widen(w), windows, groups)
    return narrow(_add_bias(ctx.xp, y, bias), x.dtype)


def _integer_convolution(ctx: OpContext, x: Any, x_zero: Any, w: Any, w_zero: Any) -> Any:
    """Exact convolution of 8-bit integers, zero points taken off first (so padding means zero), as int32."""
    xp = ctx.xp
    # float64 holds every sum exactly and has a fast matmul in NumPy and CuPy; JAX multiplies integers itself
    exact = np.dtype(np.int32) if is_jax(xp) else np.dtype(np.float64)
    groups = _groups(ctx, x, w)
    windows = windows_of(ctx, x.shape[2:], w.shape[2:])
    x, w = x.astype(exact), w.astype(exact)
    if x_zero is not None:
        x = x - xp.reshape(x_zero, (-1,) + (1,) * (x.ndim - 1)).astype(exact)
    if w_zero is not None:
        w = w - xp.reshape(w_zero, (-1,) + (1,) * (w.ndim - 1)).astype(exact)
    y = convolve(xp, x, w, windows, groups)
    # through int64, so that a sum past 32 bits wraps as the operator allows
    return y if is_jax(xp) else y.astype(np.int64).astype(np.int32)


@kernel("ConvInteger", train=False)
def conv_integer(ctx: OpContext, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    """ConvInteger: the filter's zero point is a scalar or one value for each output channel."""
    return _integer_convolution(ctx, x, x_zero, w, w_zero)


@kernel("QLinearConv", train=False)
def qlinear_conv(
    ctx: OpContext,
    x: Any,
    x_scale: Any,
    x_zero: Any,
    w: Any,
    w_scale: Any,
    w_zero: Any,
    y_scale: Any,
    y_zero: Any,
    bias: Any = None,
) -> Any:
    """QLinearConv: the bias is int32 at scale x_scale * w_scale; rounds half to even, then saturates."""
    xp = ctx.xp
    dtype = y_zero.dtype if y_zero is not None else x.dtype
    sums = _integer_convolution(ctx, x, x_zero, w, w_zero)
    if bias is not None:
        sums = sums + xp.reshape(bias, (-1,) + (1,) * (sums.ndim - 2))
    factor = x_scale.reshape(()) * w_scale.reshape((-1,) + (1,) * (sums.ndim - 2)) / y_scale.reshape(())
    y = xp.round(sums.astype(factor.dtype) * factor)
    if y_zero is not None:
        y = y + y_zero.reshape(()).astype(y.dtype)
    limits = np.iinfo(dtype)
    return xp.clip(y, limits.min, limits.max).astype(dtype)


def _transpose_layout(
    ctx: OpContext, size: tuple[int, ...], kernel_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """ConvTranspose's (strides, dilations, length of the full result, crop at its begin, output shape), by axis."""
    rank = len(size)
    strides, dilations = (spatial_attribute(ctx, name, rank, 1) for name in ("strides", "dilations"))
    extra = spatial_attribute(ctx, "output_padding", rank, 0)
    full = tuple(
        (n - 1) * s + (k - 1) * d + 1 if n else 0
        for n, s, k, d in zip(size, strides, kernel_shape, dilations, strict=True)
    )
    auto_pad = ctx.attr("auto_pad", "NOTSET") or "NOTSET"
    wanted = ctx.attr("output_shape")
    if wanted:
        wanted = tuple(map(int, wanted))[-rank:]  # some exporters list batch and channels too
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # size * stride, but no more than there is: type inference and other frameworks stop where the result ends
        wanted = tuple(min(n * s, f + e) for n, s, f, e in zip(size, strides, full, extra, strict=True))
    if wanted:
        total = [max(0, f + e - o) for f, e, o in zip(full, extra, wanted, strict=True)]
        begin = tuple(t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total)
        return strides, dilations, full, begin, wanted
    begin, end = explicit_pads(ctx, rank) if auto_pad == "NOTSET" else ((0,) * rank, (0,) * rank)
    out = tuple(max(0, f + e - a - b) for f, e, a, b in zip(full, extra, begin, end, strict=True))
    return strides, dilations, full, begin, out


@kernel("ConvTranspose")
def conv_transpose(ctx: OpContext, x: Any, w: Any, bias: Any = None) -> Any:
    """ConvTranspose: `output_shape` overrides `pads`; elements outside every window are zero (plus bias)."""
    xp = ctx.xp
    groups = int(ctx.attr("group", 1))
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[1] != w.shape[0] or x.shape[1] % groups:
        raise ShapeError(
            f"ConvTranspose {ctx.node.name!r}: input {tuple(x.shape)} and filter {tuple(w.shape)} with "
            f"group = {groups} do not fit: the filter needs as many rows as the input has channels"
        )
    size, kernel_shape = tuple(x.shape[2:]), tuple(w.shape[2:])
    strides, dilations, full, begin, out = _transpose_layout(ctx, size, kernel_shape)
    dtype, (n, channels), filters = x.dtype, x.shape[:2], w.shape[1] * groups
    x, w = widen(x), widen(w)
    # every input element adds its scaled filter to the result; one matmul makes all of them
    weight = xp.reshape(w, (groups, channels // groups, math.prod(w.shape[1:])))
    image = xp.reshape(x, (n, groups, channels // groups, math.prod(size)))
    scaled = xp.matmul(xp.swapaxes(weight, 1, 2), image)
    scaled = xp.reshape(scaled, (n, filters, math.prod(kernel_shape), *size))
    # the canvas covers the full result and whatever the output shows beyond it
    canvas = tuple(max(f, b + o) for f, b, o in zip(full, begin, out, strict=True))
    y = xp.zeros((n, filters, *canvas), dtype=scaled.dtype)
    if math.prod(size):
        for i, tap in enumerate(np.ndindex(*kernel_shape)):
            where = (..., *(slice(t * d, t * d + (m - 1) * s + 1, s)
                            for t, d, m, s in zip(tap, dilations, size, strides, strict=True)))  # fmt: skip
            if is_jax(xp):
                y = y.at[where].add(scaled[:, :, i])
            else:
                y[where] += scaled[:, :, i]
    y = y[(..., *(slice(b, b + o) for b, o in zip(begin, out, strict=True)))]
    return narrow(_add_bias(xp, y, bias), dtype)


@kernel("CausalConvWithState")
def causal_conv_with_state(ctx: OpContext, x: Any, w: Any, bias: Any = None, past: Any = None) -> Any:
    """CausalConvWithState: depthwise over [past, input]; the new state is the last k - 1 positions of that."""
    xp = ctx.xp
    k = w.shape[2]
    if past is None:
        past = xp.zeros((*x.shape[:2], k - 1), dtype=x.dtype)
    joined = xp.concatenate([past.astype(x.dtype), x], axis=2)
    length = x.shape[2]
    windows = Windows((joined.shape[2],), (k,), (1,), (1,), (0,), (0,), (length,))
    y = _add_bias(xp, _depthwise(xp, widen(joined), widen(w), windows), bias)
    activation = ctx.attr("activation", "none") or "none"
    if activation in ("silu", "swish"):
        y = y / (1 + xp.exp(-y))
    elif activation != "none":
        raise ShapeError(
            f"CausalConvWithState {ctx.node.name!r}: activation = {activation!r}; it takes silu, swish or none"
        )
    return narrow(y, x.dtype), joined[:, :, length:]
