"""Reductions, arg-extrema, cumulative sums and products, TopK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.ir.types import float_like
from xrt_core.kernels.movement import axis_of, ints
from xrt_core.kernels.namespace import divide_integers, is_cupy, is_jax, result, widen
from xrt_core.kernels.registry import OpContext, kernel

Reduction = Callable[[Any, Any, tuple[int, ...], bool], Any]


def reduced_axes(ctx: OpContext, rank: int, given: Any) -> tuple[int, ...]:
    """Axes to reduce over: an input or an attribute; none given means all, or none with noop_with_empty_axes.

    Raises ShapeError for one that is out of range.
    """
    axes = ctx.attr("axes") if given is None else ints(given)
    if not axes:
        return () if ctx.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis_of(a, rank, ctx.node.op_type) for a in axes})) if rank else ()


def _register(op_type: str) -> Callable[[Reduction], Reduction]:
    """Register `reduction(xp, x, axes, keepdims)`; its x is widened and its result takes the input's dtype."""

    def wrap(reduction: Reduction) -> Reduction:
        @kernel(op_type, static=(1,))
        def reduce(ctx: OpContext, x: Any, axes: Any = None) -> Any:
            over = reduced_axes(ctx, x.ndim, axes)
            return result(ctx.xp, reduction(ctx.xp, widen(x), over, bool(ctx.attr("keepdims", 1))), x.dtype)

        reduce.__doc__ = reduction.__doc__
        return reduction

    return wrap


@_register("ReduceSum")
def reduce_sum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Sum; integers keep their type and wrap."""
    return xp.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


@_register("ReduceProd")
def reduce_prod(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Product; integers keep their type and wrap."""
    return xp.prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


@_register("ReduceMean")
def reduce_mean(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Mean; that of integers truncates toward zero."""
    if float_like(x.dtype):
        return xp.mean(x, axis=axes, keepdims=keepdims)
    total = xp.asarray(xp.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype))
    return divide_integers(xp, total, xp.asarray(math.prod(x.shape[a] for a in axes), x.dtype))


def _bound(dtype: np.dtype, lowest: bool) -> Any:
    if float_like(dtype):
        return -np.inf if lowest else np.inf
    info = np.iinfo(dtype)
    return info.min if lowest else info.max


def _of_nothing(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool, lowest: bool) -> Any:
    """The bound of the type where axes of `x`, which has no elements, are reduced (CuPy's max has no `initial`)."""
    shape = [1 if a in axes else d for a, d in enumerate(x.shape) if keepdims or a not in axes]
    return xp.full(tuple(shape), _bound(x.dtype, lowest), x.dtype)


@_register("ReduceMax")
def reduce_max(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Maximum; of nothing, the least value of the type. Bools: whether any holds."""
    if x.dtype == np.bool_:
        return xp.any(x, axis=axes, keepdims=keepdims)
    return xp.max(x, axis=axes, keepdims=keepdims) if x.size else _of_nothing(xp, x, axes, keepdims, True)


@_register("ReduceMin")
def reduce_min(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Minimum; of nothing, the greatest value of the type. Bools: whether all hold."""
    if x.dtype == np.bool_:
        return xp.all(x, axis=axes, keepdims=keepdims)
    return xp.min(x, axis=axes, keepdims=keepdims) if x.size else _of_nothing(xp, x, axes, keepdims, False)


@_register("ReduceL1")
def reduce_l1(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Sum of absolute values."""
    return xp.sum(xp.abs(x), axis=axes, keepdims=keepdims, dtype=x.dtype)


@_register("ReduceSumSquare")
def reduce_sum_square(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Sum of squares."""
    return xp.sum(x * x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _as_float(x: Any) -> Any:
    return x if float_like(x.dtype) else x.astype(np.float64)


@_register("ReduceL2")
def reduce_l2(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Square root of the sum of squares."""
    x = _as_float(x)
    return xp.sqrt(xp.sum(x * x, axis=axes, keepdims=keepdims))


@_register("ReduceLogSum")
def reduce_log_sum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Logarithm of the sum."""
    return xp.log(xp.sum(_as_float(x), axis=axes, keepdims=keepdims))


@_register("ReduceLogSumExp")
def reduce_log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Logarithm of the sum of exponentials, shifted by the maximum so that none overflows."""
    x = _as_float(x)
    if x.size == 0:
        return xp.log(xp.sum(x, axis=axes, keepdims=keepdims))
    top = xp.max(x, axis=axes, keepdims=True)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    out = xp.log(xp.sum(xp.exp(x - top), axis=axes, keepdims=True)) + top
    return out if keepdims else xp.squeeze(out, axis=axes)


def _arg_extremum(ctx: OpContext, function: Any, x: Any) -> Any:
    xp, axis = ctx.xp, ctx.attr("axis", 0)
    wide = widen(x)
    if ctx.attr("select_last_index", 0):
        index = x.shape[axis] - 1 - function(xp.flip(wide, axis), axis=axis)
    else:
        index = function(wide, axis=axis)
    index = result(xp, index, np.dtype(np.int64))
    return xp.expand_dims(index, axis) if ctx.attr("keepdims", 1) else index


@kernel("ArgMax")
def arg_max(ctx: OpContext, x: Any) -> Any:
    """Index of the maximum along `axis`: the first, or with select_last_index the last."""
    return _arg_extremum(ctx, ctx.xp.argmax, x)


@kernel("ArgMin")
def arg_min(ctx: OpContext, x: Any) -> Any:
    """Index of the minimum along `axis`: the first, or with select_last_index the last."""
    return _arg_extremum(ctx, ctx.xp.argmin, x)


def _cumulative(ctx: OpContext, function: Any, x: Any, axis: Any, neutral: int) -> Any:
    xp, wide = ctx.xp, widen(x)
    along = axis_of(int(axis.reshape(())), x.ndim, ctx.node.op_type)
    if ctx.attr("reverse", 0):
        wide = xp.flip(wide, along)
    if ctx.attr("exclusive", 0) and x.shape[along]:
        start = xp.full((*x.shape[:along], 1, *x.shape[along + 1 :]), neutral, wide.dtype)
        wide = xp.concatenate([start, wide[(slice(None),) * along + (slice(None, -1),)]], axis=along)
    out = function(wide, axis=along, dtype=wide.dtype)
    return result(xp, xp.flip(out, along) if ctx.attr("reverse", 0) else out, x.dtype)


@kernel("CumSum", static=(1,))
def cum_sum(ctx: OpContext, x: Any, axis: Any) -> Any:
    """Running sum along `axis`, backwards with `reverse`, without the element itself with `exclusive`."""
    return _cumulative(ctx, ctx.xp.cumsum, x, axis, 0)


@kernel("CumProd", static=(1,))
def cum_prod(ctx: OpContext, x: Any, axis: Any) -> Any:
    """Running product along `axis`, backwards with `reverse`, without the element itself with `exclusive`."""
    return _cumulative(ctx, ctx.xp.cumprod, x, axis, 1)


def _top_indices(xp: Any, x: Any, k: int, largest: bool) -> Any:
    """Indices of the k largest or smallest along the last axis, in order, the lower index first among equals."""
    if is_jax(xp):
        import jax

        if float_like(x.dtype):  # JAX orders by sign first, even zeros and NaNs
            x = xp.where(x == 0, xp.zeros_like(x), xp.where(xp.isnan(x), xp.full_like(x, np.nan), x))
        if not largest:  # ~x turns the order of integers round without overflow
            x = -x if float_like(x.dtype) else ~x
        return jax.lax.top_k(x, k)[1]
    stable = {} if is_cupy(xp) else {"kind": "stable"}  # CuPy's sort always is
    if not largest:
        return xp.argsort(x, axis=-1, **stable)[..., :k]
    # a descending stable sort: of the array read backwards, taken from the end
    return (x.shape[-1] - 1 - xp.argsort(xp.flip(x, -1), axis=-1, **stable))[..., ::-1][..., :k]


@kernel("TopK", static=(1,))
def top_k(ctx: OpContext, x: Any, k: Any = None) -> Any:
    """The k largest (or smallest) along `axis` and their indices; k was an attribute before version 10.

    Raises InputError for a k below 0 or above the size of the axis.
    """
    xp = ctx.xp
    count = int(ctx.attr("k") if k is None else k.reshape(()))
    axis = ctx.attr("axis", -1)
    if not 0 <= count <= x.shape[axis]:
        raise InputError(f"node {ctx.node.name!r}: K = {count}; axis {axis} of {x.shape} allows 0 to {x.shape[axis]}")
    index = _top_indices(xp, xp.moveaxis(widen(x), axis, -1), count, bool(ctx.attr("largest", 1)))
    index = result(xp, xp.moveaxis(index, -1, axis), np.dtype(np.int64))
    return xp.take_along_axis(x, index, axis=axis), index
