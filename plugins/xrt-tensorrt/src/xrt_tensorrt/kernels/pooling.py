"""Pooling beyond TensorRT's own layer: dilations, indices, norms, and the backward pass through pooling."""

from __future__ import annotations

import math

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels import OpContext
from xrt_core.kernels.windows import Windows, windows_of
from xrt_tensorrt.kernels.context import EIGHT_BITS, FLOATS, NetworkContext, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, INT64, Tensor


def spatial(x: Tensor) -> range:
    """The axes after batch and channels."""
    return range(2, x.rank)


def windows_over(ctx: NetworkContext, x: Tensor) -> Windows:
    """The node's windows over the spatial axes of x."""
    return windows_of(ctx, [x.size(a) for a in spatial(x)], tuple(map(int, ctx.attr("kernel_shape"))))


def completed(x: Tensor, windows: Windows, fill: float) -> Tensor:
    """x padded so that every window is complete."""
    return x.padded(spatial(x), windows.begin, windows.overhang, fill)


def seen_by(x: Tensor, windows: Windows, tap: tuple[slice, ...]) -> Tensor:
    """What one position of the kernel sees of a completed x."""
    starts, steps = [s.start for s in tap], [s.step for s in tap]
    return x.window(spatial(x), starts, windows.out, steps)


def over_windows(x: Tensor, windows: Windows, operation: str, fill: float) -> Tensor:
    """Every window's MAX or SUM, axis after axis."""
    for i, axis in enumerate(spatial(x)):
        ends = windows.overhang[i]
        whole = x.padded((axis,), (windows.begin[i],), (ends,), fill)
        parts = []
        for tap in range(windows.kernel[i]):
            span = windows.span(i, tap)
            parts.append(whole.window((axis,), (span.start,), (windows.out[i],), (span.step,)))
        x = parts[0]
        for part in parts[1:]:
            x = x.maximum(part) if operation == "MAX" else x + part
    return x


def _too_large(node: Node) -> str:
    taps = math.prod(OpContext(node, np).attr("kernel_shape", ()))
    return f"a window of {taps} elements would take too many layers" if taps > 512 else ""


@tensorrt_kernel("MaxPool", dtypes=FLOATS | EIGHT_BITS, train=True, check=_too_large)
def max_pool(ctx: NetworkContext, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Each window's maximum, and where asked for the first one's index in the unpadded input."""
    if x.dtype not in FLOATS:
        x = x.astype(F32)
    windows = windows_over(ctx, x)
    if not ctx.wants(1):
        return over_windows(x, windows, "MAX", -math.inf)
    spots = [np.clip(windows.positions(i), 0, windows.size[i] - 1) for i in range(windows.rank)]
    turn = -1 if ctx.attr("storage_order", 0) else 1  # column-major counts from the left
    padded = completed(x, windows, -math.inf)
    best = index = None
    for place, tap in zip(np.ndindex(*windows.kernel), windows.taps(), strict=True):
        at = np.meshgrid(*(spots[i][:, t] for i, t in enumerate(place)), indexing="ij")
        flat = np.asarray(np.ravel_multi_index(tuple(at[::turn]), windows.size[::turn]))[None, None].astype(np.int32)
        seen = seen_by(padded, windows, tap)
        if best is None:
            best, index = seen, ctx.layers.constant(flat)
            continue
        assert index is not None
        index = ctx.layers.where(seen > best, ctx.layers.constant(flat), index)
        best = best.maximum(seen)
    assert best is not None
    assert index is not None
    images = np.arange(x.size(0) * x.size(1)).reshape((x.size(0), x.size(1)) + (1,) * windows.rank)
    return best, index.astype(INT64) + (images * math.prod(windows.size)).astype(np.int64)


@tensorrt_kernel("AveragePool", dtypes=FLOATS, train=True, check=_too_large)
def average_pool(ctx: NetworkContext, x: Tensor) -> Tensor:
    """Each window's mean."""
    dtype, windows = x.dtype, windows_over(ctx, x)
    counts = windows.counts(F32, bool(ctx.attr("count_include_pad", 0)))
    return (over_windows(x.astype(F32), windows, "SUM", 0) / counts).astype(dtype)


@tensorrt_kernel("LpPool", dtypes=FLOATS, check=_too_large)
def lp_pool(ctx: NetworkContext, x: Tensor) -> Tensor:
    """Each window's p-norm."""
    dtype, windows, p = x.dtype, windows_over(ctx, x), float(ctx.attr("p", 2))
    powers = x.astype(F32).unary("ABS").power(p)
    return over_windows(powers, windows, "SUM", 0).power(1 / p).astype(dtype)


# --- the backward pass ------------------------------------------------------------------------------------------------


def _back(total: Tensor, windows: Windows) -> Tensor:
    """A sum over the completed input, cut to the input."""
    return total.window(spatial(total), windows.begin, windows.size)


def _canvas(windows: Windows) -> list[int]:
    ends = zip(windows.begin, windows.size, windows.overhang, strict=True)
    return [max(b + n + e, windows.reach(i)) for i, (b, n, e) in enumerate(ends)]


def _placed(share: Tensor, windows: Windows, tap: tuple[int, ...], canvas: list[int]) -> Tensor:
    """Each window's share where one position of the kernel lies, zeros elsewhere."""
    for i, axis in enumerate(spatial(share)):
        share = share.spaced(axis, windows.strides[i])
    starts = [-t * d for t, d in zip(tap, windows.dilations, strict=True)]
    return share.window(spatial(share), starts, canvas, fill=0)


@tensorrt_kernel("MaxPoolGrad", domain="xrt", dtypes=FLOATS, train=True, check=_too_large)
def max_pool_grad(ctx: NetworkContext, dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of y = MaxPool(x) by x: each window's share goes to the first of its maxima."""
    dtype, layers = x.dtype, ctx.layers
    windows = windows_over(ctx, x)
    padded, canvas = completed(x, windows, -math.inf), _canvas(windows)
    total = free = None
    for place, tap in zip(np.ndindex(*windows.kernel), windows.taps(), strict=True):
        hit = seen_by(padded, windows, tap).equals(y)
        first = hit if free is None else hit & free
        free = ~hit if free is None else free & ~hit
        part = _placed(layers.where(first, dy.astype(F32), 0.0), windows, place, canvas)
        total = part if total is None else total + part
    assert total is not None
    return _back(total, windows).astype(dtype)


@tensorrt_kernel("AveragePoolGrad", domain="xrt", dtypes=FLOATS, train=True, check=_too_large)
def average_pool_grad(ctx: NetworkContext, dy: Tensor) -> Tensor:
    """Gradient of AveragePool: each window's share, by its count, to all of it."""
    windows = windows_of(ctx, tuple(map(int, ctx.attr("size"))), tuple(map(int, ctx.attr("kernel_shape"))))
    counts, canvas = windows.counts(F32, bool(ctx.attr("count_include_pad", 0))), _canvas(windows)
    total = dy.astype(F32) / counts
    for i, axis in enumerate(spatial(dy)):  # all positions get the same, so axis after axis
        apart = total.spaced(axis, windows.strides[i])
        parts = [
            apart.window((axis,), (-t * windows.dilations[i],), (canvas[i],), fill=0) for t in range(windows.kernel[i])
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
    return _back(total, windows).astype(dy.dtype)


@tensorrt_kernel("ConvFilterGrad", domain="xrt", dtypes=FLOATS, train=True)
def conv_filter_grad(ctx: NetworkContext, x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of Conv(x, w) by w: a convolution of x by dy that sums over the images; strides and dilations change
    places."""
    windows, groups = windows_over(ctx, x), int(ctx.attr("group", 1))
    spread = [windows.reach(i) - n - b for i, (n, b) in enumerate(zip(windows.size, windows.begin, strict=True))]
    x = x.padded(spatial(x), windows.begin, spread, 0)  # some of the end may be seen by no window
    n, channels, sizes = x.size(0), x.size(1) // groups, x.shape[2:]
    axes = list(range(3, 3 + len(sizes)))
    images = x.reshape((n, groups, channels, *sizes)).transpose((2, 1, 0, *axes))
    images = images.reshape((channels, groups * n, *sizes))
    kernel = dy.transpose((1, 0, *spatial(dy)))
    made = images.convolve(kernel, strides=windows.dilations, dilations=windows.strides, groups=groups)
    return made.transpose((1, 0, *spatial(made)))
