"""ConvFilterGrad as one convolution of the input by what comes back, which XLA runs without writing windows out.

On the CPU both sides are laid out behind barriers: a transpose by itself is as fast as a copy, but one that XLA fuses
with the arithmetic before it takes five times as long. Depthwise ones are sums of shifted products there.
"""

from __future__ import annotations

import math
from typing import Any

from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.windows import Windows, windows_of
from xrt_xla.kernels.context import XlaContext, portable, xla_kernel
from xrt_xla.kernels.convolution import MAX_TAPS, channels_last, columns, pad, plane
from xrt_xla.kernels.reduction import sum_pixels

_FEW = 16
"""With fewer input channels than this the input is the side whose windows are taken."""


@xla_kernel("ConvFilterGrad", domain="xrt")
def conv_filter_grad(ctx: XlaContext, x: Any, dy: Any) -> Any:
    """The filter's gradient: images are what is summed over, strides and dilations change places."""
    groups = int(ctx.attr("group", 1))
    windows = windows_of(ctx, x.shape[2:], tuple(map(int, ctx.attr("kernel_shape"))))
    depthwise = ctx.kind == "cpu" and x.shape[1] == dy.shape[1] == groups > 1
    if 0 in x.shape or 0 in dy.shape or (groups != 1 and not depthwise):
        return portable(ctx, x, dy)
    if depthwise:
        form = _depthwise
    elif ctx.kind != "cpu":
        form = _whole
    elif x.shape[0] * math.prod(windows.out) <= dy.shape[1] and math.prod(windows.kernel) <= MAX_TAPS:
        form = _columns
    else:
        form = _planes if windows.rank == 3 else _laid_out
    dtype = wide(x.dtype)
    return narrow(form(ctx, x.astype(dtype), dy.astype(dtype), windows), x.dtype)


def _padding(windows: Windows) -> list[tuple[int, int]]:
    """Padding of the input such that it ends where the last window does."""
    return [(b, windows.reach(i) - windows.size[i] - b) for i, b in enumerate(windows.begin)]


def _whole(ctx: XlaContext, x: Any, dy: Any, windows: Windows) -> Any:
    spatial = "".join(map(str, range(windows.rank)))
    return ctx.lax.conv_general_dilated(
        x, dy, windows.dilations, _padding(windows), rhs_dilation=windows.strides,
        dimension_numbers=(f"CN{spatial}", f"IO{spatial}", f"CN{spatial}"),
        precision=ctx.lax.Precision.HIGHEST,
    )  # fmt: skip


def _columns(ctx: XlaContext, x: Any, dy: Any, windows: Windows) -> Any:
    """Of small images one product: what comes back by the windows of Conv's form "columns"."""
    xp, filters = ctx.xp, dy.shape[1]
    rows = xp.reshape(xp.swapaxes(dy, 0, 1), (filters, -1))
    made = xp.matmul(rows, columns(ctx, x, windows).T, precision=ctx.lax.Precision.HIGHEST)
    return xp.reshape(made, (filters, x.shape[1], *windows.kernel))


def _last(ctx: XlaContext, x: Any) -> Any:
    """x[N, C, ...] channels last, computed once."""
    return ctx.lax.optimization_barrier(ctx.xp.moveaxis(x, 1, -1))


def _laid_out(ctx: XlaContext, x: Any, dy: Any, windows: Windows) -> Any:
    """Channels last, with the images as channels: windows of one side, the whole other side as the filter.

    Without strides and dilations the sides may change places, which gives the flipped result, and gives it with the
    input channels last: it becomes OI... within rows that stay in the cache.
    """
    xp, lax, rank = ctx.xp, ctx.lax, windows.rank
    held: Any = lax.optimization_barrier
    swap = x.shape[1] >= _FEW and set(windows.strides) == set(windows.dilations) == {1}
    seen, whole = (_last(ctx, side) for side in ((dy, x) if swap else (x, dy)))
    seen = held(xp.transpose(seen, (rank + 1, *range(1, rank + 1), 0)))
    whole = held(xp.transpose(whole, (*range(1, rank + 1), 0, rank + 1)))
    if swap:
        sides = zip(windows.kernel, windows.begin, windows.size, windows.out, strict=True)
        padding = [(k - 1 - b, n + b - o) for k, b, n, o in sides]
    else:
        padding = _padding(windows)
    made = lax.conv_general_dilated(
        seen, whole, windows.dilations, padding, rhs_dilation=windows.strides,
        dimension_numbers=channels_last(ctx, rank + 2), precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    made = held(xp.moveaxis(held(made), -1, 1))
    if swap:
        return xp.flip(made, tuple(range(2, rank + 2)))
    return held(xp.swapaxes(made, 0, 1))  # the second of two steps: first within rows, then whole rows


def _planes(ctx: XlaContext, x: Any, dy: Any, windows: Windows) -> Any:
    """3D as 2D ones, in a sixth of the time: a plane of each image is an image, for each place along the first axis."""
    xp, parts = ctx.xp, []
    sides = [(0, 0, 0), (0, 0, 0), (windows.begin[0], windows.overhang[0], 0), (0, 0, 0), (0, 0, 0)]
    x = ctx.lax.pad(x, xp.zeros((), x.dtype), sides)
    dy = _planes_of(xp, dy)
    for tap in range(windows.kernel[0]):
        parts.append(_laid_out(ctx, _planes_of(xp, x[:, :, windows.span(0, tap)]), dy, plane(windows)))
    return xp.stack(parts, axis=2)


def _planes_of(xp: Any, x: Any) -> Any:
    return xp.reshape(xp.swapaxes(x, 1, 2), (-1, x.shape[1], *x.shape[3:]))


def _depthwise(ctx: XlaContext, x: Any, dy: Any, windows: Windows) -> Any:
    """Of one filter a channel: for each tap the sum of the products at all positions."""
    xp = ctx.xp
    x = ctx.lax.optimization_barrier(pad(ctx, xp.moveaxis(x, 1, -1), windows))
    dy = _last(ctx, dy)
    taps = [sum_pixels(ctx, x[(slice(None), *tap)] * dy) for tap in windows.taps()]
    return xp.reshape(xp.stack(taps, axis=1), (x.shape[-1], 1, *windows.kernel))
