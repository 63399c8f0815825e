"""Pools, and Concat of channels, behind convolutions: with channels last on the CPU (see `xrt_xla.channels_last`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import narrow, widen
from xrt_core.kernels.windows import Windows, windows_of
from xrt_xla.kernels.context import XlaContext, portable, xla_kernel


def _is_turned(ctx: XlaContext, x: Any) -> bool:
    return ctx.channels_last and x.ndim > 2 and x.size > 0 and float_like(np.dtype(x.dtype))


def _reduced(ctx: XlaContext, x: Any, combine: Callable[..., Any], neutral: float) -> tuple[Any, Windows]:
    """Every window of x[N, C, *size] as [N, *out, C], one axis after the other as in the portable kernel, in the type
    to compute in; the windows."""
    windows = windows_of(ctx, x.shape[2:], tuple(map(int, ctx.attr("kernel_shape"))))
    y = widen(ctx.xp.moveaxis(x, 1, -1))
    for axis in range(windows.rank):
        sides = [(0, 0, 0)] * y.ndim
        sides[1 + axis] = (windows.begin[axis], windows.overhang[axis], 0)
        y = ctx.lax.pad(y, ctx.xp.asarray(neutral, y.dtype), sides)
        parts = [y[(*(slice(None),) * (1 + axis), windows.span(axis, t))] for t in range(windows.kernel[axis])]
        y = parts[0]
        for part in parts[1:]:
            y = combine(y, part)
    return y, windows


@xla_kernel("MaxPool")
def max_pool(ctx: XlaContext, x: Any) -> Any:
    """MaxPool without indices."""
    if ctx.wants(1) or not _is_turned(ctx, x):
        return portable(ctx, x)
    best, _ = _reduced(ctx, x, ctx.xp.maximum, -math.inf)
    y = narrow(ctx.xp.moveaxis(best, -1, 1), x.dtype)
    return y if ctx.num_outputs == 1 else (y, None)


@xla_kernel("AveragePool")
def average_pool(ctx: XlaContext, x: Any) -> Any:
    """AveragePool."""
    if not _is_turned(ctx, x):
        return portable(ctx, x)
    sums, windows = _reduced(ctx, x, ctx.xp.add, 0)
    counts: Any = math.prod(windows.kernel)
    if windows.is_padded:
        counts = windows.counts(np.dtype(sums.dtype), bool(ctx.attr("count_include_pad", 0)))[..., None]
    return narrow(ctx.xp.moveaxis(sums / counts, -1, 1), x.dtype)


@xla_kernel("GlobalAveragePool")
def global_average_pool(ctx: XlaContext, x: Any) -> Any:
    """The mean of each channel."""
    if not _is_turned(ctx, x):
        return portable(ctx, x)
    pixels = widen(ctx.xp.moveaxis(x, 1, -1))
    means = ctx.xp.mean(pixels, axis=tuple(range(1, x.ndim - 1)), keepdims=True)
    return narrow(ctx.xp.moveaxis(means, -1, 1), x.dtype)


@xla_kernel("Concat")
def concat(ctx: XlaContext, *inputs: Any) -> Any:
    """Concat, of channels where they lie last."""
    rank = inputs[0].ndim
    if len(inputs) == 1 or ctx.attr("axis", 1) not in (1, 1 - rank) or not all(_is_turned(ctx, x) for x in inputs):
        return portable(ctx, *inputs)
    return ctx.xp.moveaxis(ctx.xp.concatenate([ctx.xp.moveaxis(x, 1, -1) for x in inputs], axis=-1), -1, 1)
