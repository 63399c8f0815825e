"""Sums over many rows in stages that XLA vectorises on the CPU.

XLA walks a column of a matrix element by element. In stages of a few rows, with a barrier between them so that they
are not fused into one, that takes a quarter of the time, and rounding errors grow with the stages instead of the rows.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.reduction import reduced_axes
from xrt_xla.kernels.context import XlaContext, portable, xla_kernel

_STAGE: Final = 64
"""About as many elements are summed at a time; an axis up to four times as long is not split."""


def sum_pixels(ctx: XlaContext, x: Any) -> Any:
    """The sum of x[..., C] over all its axes but the last."""
    xp = ctx.xp
    if ctx.kind != "cpu":
        return xp.sum(x, axis=tuple(range(x.ndim - 1)))
    while x.ndim > 1:
        if x.shape[-2] > 4 * _STAGE:
            if rest := -x.shape[-2] % _STAGE:
                x = xp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rest), (0, 0)])
            x = xp.reshape(x, (*x.shape[:-2], -1, _STAGE, x.shape[-1]))
        count, first = x.shape[-2], x.ndim - 2
        while first and count * x.shape[first - 1] <= _STAGE:
            first -= 1
            count *= x.shape[first]
        x = ctx.lax.optimization_barrier(xp.sum(x, axis=tuple(range(first, x.ndim - 1))))
    return x


def _by_channel(ctx: XlaContext, x: Any, axes: Any) -> Any:
    """The sum of x[N, C, ...] over all axes but the channels', in the type to compute in and of the shape that the node
    gives it, as the rest of a network runs: channels last. None for other axes, types and devices."""
    over = reduced_axes(ctx, x.ndim, axes)
    if ctx.kind != "cpu" or x.ndim < 3 or over != (0, *range(2, x.ndim)) or not x.size or not float_like(x.dtype):
        return None
    sums = sum_pixels(ctx, ctx.xp.moveaxis(x.astype(wide(np.dtype(x.dtype))), 1, -1))
    return ctx.xp.reshape(sums, (1, -1, *(1,) * (x.ndim - 2)) if ctx.attr("keepdims", 1) else (-1,))


@xla_kernel("ReduceSum", static=(1,))
def reduce_sum(ctx: XlaContext, x: Any, axes: Any = None) -> Any:
    """Sums by channel (the gradient of a bias) in stages."""
    sums = _by_channel(ctx, x, axes)
    return portable(ctx, x, axes) if sums is None else narrow(sums, x.dtype)


@xla_kernel("ReduceMean", static=(1,))
def reduce_mean(ctx: XlaContext, x: Any, axes: Any = None) -> Any:
    """Means by channel (statistics of a batch) in stages."""
    sums = _by_channel(ctx, x, axes)
    return portable(ctx, x, axes) if sums is None else narrow(sums / (x.size // x.shape[1]), x.dtype)
