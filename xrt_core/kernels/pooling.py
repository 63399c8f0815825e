"""Pooling: windows reduced to a maximum, a mean or a norm, globally or locally, and its inverse MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import is_jax, narrow, set_at, widen
from xrt_core.kernels.registry import OpContext, kernel
from xrt_core.kernels.windows import Windows, pad_with, windows_of


def reduce_windows(xp: Any, x: Any, windows: Windows, combine: Callable[..., Any], neutral: Any) -> Any:
    """Reduce every window of x[N, C, *size] with `xp.maximum` or `xp.add`; padding counts as `neutral`.

    Windows are boxes, so one axis after the other is reduced: the sum of the kernel's sides in steps, not the product.
    """
    overhang = windows.overhang
    for axis in range(windows.rank):
        trivial = windows.kernel[axis] == 1 and windows.strides[axis] == 1
        if trivial and not windows.begin[axis] and not overhang[axis]:
            continue
        ends = [0] * windows.rank
        begins = list(ends)
        begins[axis], ends[axis] = windows.begin[axis], overhang[axis]
        padded = pad_with(xp, x, begins, ends, neutral)
        before, after = (slice(None),) * (2 + axis), (slice(None),) * (windows.rank - axis - 1)
        if windows.out[axis] == 0:
            x = padded[(*before, slice(0, 0), *after)]
            continue
        if windows.out[axis] == 1:  # one window: a plain reduction
            whole = padded[(*before, slice(0, windows.reach(axis), windows.dilations[axis]), *after)]
            x = (xp.max if combine is xp.maximum else xp.sum)(whole, axis=2 + axis, keepdims=True)
            continue
        parts = [padded[(*before, windows.span(axis, t), *after)] for t in range(windows.kernel[axis])]
        x = parts[0]
        for i, part in enumerate(parts[1:]):
            # the first step allocates the result; under NumPy the others accumulate into it
            x = combine(x, part) if i == 0 or is_jax(xp) else combine(x, part, out=x)
    return x


def _lowest(dtype: np.dtype) -> Any:
    if float_like(dtype):
        return -math.inf
    return np.iinfo(dtype).min


def _kernel_shape(ctx: OpContext, x: Any) -> tuple[int, ...]:
    shape = tuple(map(int, ctx.attr("kernel_shape") or ()))
    if len(shape) != x.ndim - 2:
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: kernel_shape = {shape} must have one entry for each of the "
            f"{x.ndim - 2} spatial axes of the input of shape {tuple(x.shape)}"
        )
    return shape


@kernel("MaxPool")
def max_pool(ctx: OpContext, x: Any) -> Any:
    """MaxPool: padding never wins; Indices count in the unpadded input, the first of equal maxima is reported."""
    xp = ctx.xp
    windows = windows_of(ctx, x.shape[2:], _kernel_shape(ctx, x))
    if ctx.wants(1):
        best, index = _max_with_index(xp, widen(x), windows, column_major=bool(ctx.attr("storage_order", 0)))
        return narrow(best, x.dtype), index
    y = reduce_windows(xp, widen(x), windows, xp.maximum, _lowest(x.dtype))
    y = narrow(y, x.dtype)
    return y if ctx.num_outputs == 1 else (y, None)


def _max_with_index(xp: Any, x: Any, windows: Windows, column_major: bool) -> tuple[Any, Any]:
    """Maxima and their linear indices over the whole [N, C, *size]; `column_major` counts spatial axes from the left.

    Everything about positions is known from the shapes, so it is worked out by NumPy ahead of the comparisons.
    """
    rank, size = windows.rank, windows.size
    order = range(rank) if column_major else range(rank - 1, -1, -1)
    steps, step = [0] * rank, 1
    for axis in order:
        steps[axis] = step
        step *= size[axis]
    positions = [windows.positions(axis) for axis in range(rank)]
    padded = pad_with(xp, x, windows.begin, windows.overhang, _lowest(x.dtype))
    best = index = None
    seen = np.zeros(windows.out, np.bool_)
    for tap, where in zip(np.ndindex(*windows.kernel), windows.taps(), strict=True):
        linear, inside = np.zeros((), np.int64), np.ones((), np.bool_)
        for axis, t in enumerate(tap):
            at = positions[axis][:, t].reshape((-1,) + (1,) * (rank - axis - 1))
            linear = linear + at * steps[axis]
            inside = inside & (at >= 0) & (at < size[axis])
        part = padded[(..., *where)]
        linear, inside = xp.asarray(np.broadcast_to(linear, windows.out)), np.broadcast_to(inside, windows.out)
        if best is None:
            best, index = part, xp.broadcast_to(linear, part.shape)
        else:
            # not (part <= best) lets a NaN win over numbers, and best == best keeps the first NaN
            wins = ~(part <= best) & (best == best) if float_like(x.dtype) else part > best
            if not seen.all():
                wins = wins | xp.asarray(~seen)
            if not inside.all():
                wins = wins & xp.asarray(inside)
            best, index = xp.where(wins, part, best), xp.where(wins, linear, index)
        seen = seen | inside
    offsets = np.arange(x.shape[0] * x.shape[1], dtype=np.int64).reshape(*x.shape[:2], *(1,) * rank)
    return best, index + xp.asarray(offsets * math.prod(size))


@kernel("AveragePool")
def average_pool(ctx: OpContext, x: Any) -> Any:
    """AveragePool: sums over counts; `count_include_pad` counts `pads`, never what `ceil_mode` adds beyond them."""
    xp = ctx.xp
    windows = windows_of(ctx, x.shape[2:], _kernel_shape(ctx, x))
    y = reduce_windows(xp, widen(x), windows, xp.add, 0)
    if not windows.is_padded:
        return narrow(y / math.prod(windows.kernel), x.dtype)
    counts = windows.counts(y.dtype, bool(ctx.attr("count_include_pad", 0)))
    return narrow(y / xp.asarray(counts), x.dtype)


def _power_sum_root(xp: Any, x: Any, p: int, total: Callable[[Any], Any]) -> Any:
    """(sum of |x|^p)^(1/p) with `total` as the sum, for the usual p without general powers."""
    if p == 1:
        return total(xp.abs(x))
    if p == 2:
        return xp.sqrt(total(x * x))
    return total(xp.abs(x) ** p) ** (1.0 / p)


@kernel("LpPool")
def lp_pool(ctx: OpContext, x: Any) -> Any:
    """LpPool: the p-norm of every window (not divided by its size); padding adds nothing."""
    xp = ctx.xp
    windows = windows_of(ctx, x.shape[2:], _kernel_shape(ctx, x))
    y = _power_sum_root(
        xp, widen(x), int(ctx.attr("p", 2)), lambda powers: reduce_windows(xp, powers, windows, xp.add, 0)
    )
    return narrow(y, x.dtype)


@kernel("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(ctx: OpContext, x: Any) -> Any:
    """The global pools: every spatial axis reduced to length 1."""
    xp, axes = ctx.xp, tuple(range(2, x.ndim))
    if ctx.node.op_type == "GlobalMaxPool":
        if 0 in x.shape[2:]:
            return xp.full((*x.shape[:2], *(1,) * len(axes)), _lowest(x.dtype), dtype=x.dtype)
        return xp.max(x, axis=axes, keepdims=True)
    values = widen(x)
    if ctx.node.op_type == "GlobalAveragePool":
        y = xp.mean(values, axis=axes, keepdims=True)
    else:
        y = _power_sum_root(xp, values, int(ctx.attr("p", 2)), lambda powers: xp.sum(powers, axis=axes, keepdims=True))
    return narrow(y, x.dtype)


@kernel("MaxUnpool", static=(2,))
def max_unpool(ctx: OpContext, x: Any, indices: Any, output_shape: Any = None) -> Any:
    """MaxUnpool: indices count in the shape inferred from the attributes; `output_shape` pads that with zeros."""
    xp = ctx.xp
    kernel_shape = _kernel_shape(ctx, x)
    rank = len(kernel_shape)
    strides = ctx.attr("strides") or (1,) * rank
    pads = ctx.attr("pads") or (0,) * (2 * rank)
    inferred = tuple(
        (x.shape[2 + i] - 1) * strides[i] - pads[i] - pads[rank + i] + kernel_shape[i] for i in range(rank)
    )
    shape = (*x.shape[:2], *inferred)
    flat = xp.zeros((math.prod(shape),), dtype=x.dtype)
    y = xp.reshape(set_at(xp, flat, xp.reshape(indices, (-1,)), xp.reshape(x, (-1,))), shape)
    if output_shape is None:
        return y
    wanted = tuple(int(n) for n in np.asarray(output_shape))
    y = y[tuple(slice(0, n) for n in wanted)]
    return pad_with(xp, y, (0,) * x.ndim, [max(0, n - m) for n, m in zip(wanted, y.shape, strict=True)], 0)
