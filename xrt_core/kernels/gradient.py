"""Kernels of the dialect's operators for training: filter and pooling gradients, counter-based random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import accumulate, is_jax, narrow, widen
from xrt_core.kernels.registry import OpContext, kernel
from xrt_core.kernels.windows import Windows, pad_with, windows_of


@kernel("StopGradient", domain="xrt")
def stop_gradient(ctx: OpContext, x: Any) -> Any:
    """The input itself."""
    return x


@kernel("Assign", domain="xrt")
def assign(ctx: OpContext, variable: Any, value: Any) -> Any:
    """The new value of a variable. The node's aliases declare that it may take the variable's storage."""
    return value


@kernel("Boxing", domain="xrt")
def boxing(ctx: OpContext, x: Any) -> Any:
    """The tensor itself: how it lies on a mesh is no matter of numbers."""
    return x


@kernel("Barrier", domain="xrt")
def barrier(ctx: OpContext, *values: Any) -> Any:
    """The first inputs, one per output, unchanged; ordered after the computation of all inputs."""
    return values[: ctx.num_outputs]


@kernel("ConvFilterGrad", domain="xrt")
def conv_filter_grad(ctx: OpContext, x: Any, dy: Any) -> Any:
    """Gradient of Conv(x[N, C, ...], w) by w[M, C / group, *kernel_shape], for dy[N, M, ...]: one product a tap."""
    xp, dtype, groups = ctx.xp, x.dtype, int(ctx.attr("group", 1))
    kernel_shape = tuple(map(int, ctx.attr("kernel_shape")))
    windows = windows_of(ctx, x.shape[2:], kernel_shape)
    (n, channels), filters = x.shape[:2], dy.shape[1]
    shape = (filters, channels // groups, *kernel_shape)
    if 0 in dy.shape or 0 in x.shape or 0 in shape:
        return xp.zeros(shape, dtype)
    positions = math.prod(windows.out)
    x = pad_with(xp, widen(x), windows.begin, windows.overhang, 0)
    # as matrices: rows of dy are filters, columns all positions of all images
    rows = xp.reshape(widen(dy), (n, groups, filters // groups, positions))
    rows = xp.reshape(xp.transpose(rows, (1, 2, 0, 3)), (groups, filters // groups, n * positions))
    parts = []
    for tap in windows.taps():
        seen = xp.reshape(x[(..., *tap)], (n, groups, channels // groups, positions))
        seen = xp.reshape(xp.transpose(seen, (1, 0, 3, 2)), (groups, n * positions, channels // groups))
        parts.append(xp.matmul(rows, seen))
    return narrow(xp.reshape(xp.stack(parts, axis=-1), shape), dtype)


def _canvas(windows: Windows) -> tuple[int, ...]:
    """The size of the padded input, as far as windows reach."""
    rank = windows.rank
    return tuple(
        max(windows.begin[i] + windows.size[i] + windows.overhang[i], windows.reach(i)) for i in range(rank)
    )


def _cropped(total: Any, windows: Windows) -> Any:
    return total[(..., *(slice(b, b + n) for b, n in zip(windows.begin, windows.size, strict=True)))]


@kernel("MaxPoolGrad", domain="xrt")
def max_pool_grad(ctx: OpContext, dy: Any, x: Any, y: Any) -> Any:
    """Gradient of y = MaxPool(x) by x: each window's share goes to the first of its maxima."""
    xp, dtype = ctx.xp, x.dtype
    windows = windows_of(ctx, x.shape[2:], tuple(map(int, ctx.attr("kernel_shape"))))
    if 0 in dy.shape or 0 in x.shape:
        return xp.zeros(x.shape, dtype)
    lowest = -np.inf if float_like(dtype) else np.iinfo(dtype).min
    padded = pad_with(xp, widen(x), windows.begin, windows.overhang, lowest)
    share, top = widen(dy), widen(y)
    total = xp.zeros((*x.shape[:2], *_canvas(windows)), share.dtype)
    free = xp.ones(dy.shape, np.bool_)
    zero = xp.zeros((), share.dtype)
    for tap in windows.taps():
        hit = (padded[(..., *tap)] == top) & free
        free = free & ~hit
        total = accumulate(xp, total, (..., *tap), xp.where(hit, share, zero))
    return narrow(_cropped(total, windows), dtype)


@kernel("AveragePoolGrad", domain="xrt")
def average_pool_grad(ctx: OpContext, dy: Any) -> Any:
    """Gradient of AveragePool by its input of spatial shape `size`: each window's share, by its count, to all of it."""
    xp, dtype = ctx.xp, dy.dtype
    size, kernel_shape = tuple(map(int, ctx.attr("size"))), tuple(map(int, ctx.attr("kernel_shape")))
    windows = windows_of(ctx, size, kernel_shape)
    share = widen(dy)
    if 0 in dy.shape or 0 in size:
        return xp.zeros((*dy.shape[:2], *size), dtype)
    share = share / xp.asarray(windows.counts(share.dtype, bool(ctx.attr("count_include_pad", 0))))
    total = xp.zeros((*dy.shape[:2], *_canvas(windows)), share.dtype)
    for tap in windows.taps():
        total = accumulate(xp, total, (..., *tap), share)
    return narrow(_cropped(total, windows), dtype)


@kernel("BatchNormGrad", domain="xrt")
def batch_norm_grad(ctx: OpContext, dy: Any, x: Any, scale: Any) -> Any:
    """Gradients of BatchNormalization by the statistics of the batch: by x[N, C, ...], by the scale, by the bias.

    With n = (x - mean) / deviation over all axes but the second, and P elements to a channel:
    by the bias sum(dy), by the scale sum(dy n), by x scale / deviation (dy - (sum(dy) + n sum(dy n)) / P).
    """
    xp, wide, back = ctx.xp, widen(x), widen(dy)
    axes, shape = (0, *range(2, x.ndim)), (-1,) + (1,) * (x.ndim - 2)
    count = max(math.prod(x.shape[a] for a in axes), 1)
    centred = wide - xp.sum(wide, axis=axes, keepdims=True) / count
    variance = xp.sum(centred * centred, axis=axes) / count
    inverse = 1 / xp.sqrt(variance + ctx.attr("epsilon", 1e-5))
    by_bias, by_scale = xp.sum(back, axis=axes), xp.sum(back * centred, axis=axes) * inverse
    factor, first, second = (
        xp.reshape(p, shape) for p in (widen(scale) * inverse, by_bias / count, by_scale * inverse / count)
    )
    by_x = factor * (back - first - centred * second)
    return narrow(by_x, x.dtype), narrow(by_scale, scale.dtype), narrow(by_bias, scale.dtype)


@kernel("Cofactors", domain="xrt")
def cofactors(ctx: OpContext, x: Any) -> Any:
    """The gradient of the determinant of the matrices in the last two axes, by their singular values:
    det(U) det(V) U diag(products of all singular values but one) V'."""
    xp = ctx.xp
    n = x.shape[-1]
    if 0 in x.shape:
        return x
    u, s, v = xp.linalg.svd(widen(x))
    others = xp.where(xp.asarray(np.eye(n, dtype=np.bool_)), xp.ones((), s.dtype), s[..., None, :])
    scaled = u * xp.prod(others, axis=-1)[..., None, :]
    sign = xp.linalg.det(u) * xp.linalg.det(v)
    return narrow(xp.matmul(scaled, v) * sign[..., None, None], x.dtype)


# Threefry-2x32 with 20 rounds: J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _threefry(xp: Any, key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of 32 random bits for each counter, all uint32; additions wrap."""
    schedule = (*key, key[0] ^ key[1] ^ xp.asarray(_PARITY, dtype=np.uint32))
    a, b = counter[0] + schedule[0], counter[1] + schedule[1]
    for block in range(5):
        for r in _ROTATIONS[block % 2]:
            a = a + b
            b = (b << np.uint32(r)) | (b >> np.uint32(32 - r))
            b = a ^ b
        a = a + schedule[(block + 1) % 3]
        b = b + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return a, b


@kernel("CounterUniform", domain="xrt")
def counter_uniform(ctx: OpContext, key: Any) -> Any:
    """`shape` numbers of float32 in [0, 1), a function of the integers `key` and `stream` alone, on every device."""
    xp = ctx.xp
    shape = tuple(map(int, ctx.attr("shape")))
    count, stream = math.prod(shape), int(ctx.attr("stream"))
    word = xp.reshape(key, ()).astype(np.int64)
    low = (word & 0xFFFFFFFF).astype(np.uint32)
    high = ((word >> 32) & 0xFFFFFFFF).astype(np.uint32) ^ xp.asarray(stream & 0xFFFFFFFF, dtype=np.uint32)
    half = (count + 1) // 2
    index = xp.arange(half, dtype=np.uint32)
    zeros = xp.full((half,), (stream >> 32) & 0xFFFFFFFF, dtype=np.uint32)
    if is_jax(xp):
        words = _threefry(xp, (low, high), (index, zeros))
    else:
        low, high = (np.full((1,), int(w), np.uint32) if xp is np else w for w in (low, high))  # arrays wrap silently
        words = _threefry(xp, (low, high), (index, zeros))
    bits = xp.concatenate(words)[:count] >> np.uint32(8)
    return xp.reshape(bits.astype(np.float32) * np.float32(2.0**-24), shape)
