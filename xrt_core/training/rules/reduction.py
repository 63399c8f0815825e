"""Gradients of reductions and of TopK."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import BOOL
from xrt_core.frontends.tensor import Tensor, literal, with_axes
from xrt_core.training.gradient_context import Backward, Forward, emit, expanded, filled, sum_over, where
from xrt_core.training.registry import composition, gradient


def _axes(ctx: Backward) -> list[int]:
    """Return the axes that the node reduces over."""
    rank = ctx.inputs[0].ndim
    given: Any = ctx.attr("axes")
    if given is None and ctx.input(1) is not None:
        given = ctx.known(1, "axes").reshape(-1).tolist()
    if not given:
        return [] if ctx.attr("noop_with_empty_axes", 0) else list(range(rank))
    return sorted({int(a) % rank for a in given}) if rank else []


def _kept(ctx: Backward, x: Tensor, axes: list[int]) -> Tensor:
    """Return a reduced tensor with the reduced axes restored with size 1."""
    return x if ctx.attr("keepdims", 1) or not axes else x.unsqueeze(axes)


def _result(ctx: Backward, by_x: Any) -> Any:
    return (by_x, *[None] * (len(ctx.inputs) - 1))


@gradient("ReduceSum")
def reduce_sum(ctx: Backward) -> Any:
    """dy goes to every element."""
    return _result(ctx, expanded(_kept(ctx, ctx.grad, _axes(ctx)), ctx.inputs[0]))


def _count(ctx: Backward, axes: list[int]) -> Any:
    """Return the number of elements per result: a number, or a tensor if dimensions are symbolic."""
    x = ctx.inputs[0]
    sizes = [x.shape[a] for a in axes]
    if all(isinstance(d, int) for d in sizes):
        return float(max(math.prod(sizes), 1))
    each = ops.Gather(ops.Shape(x), axes)
    return with_axes("ReduceProd", each, [0], keepdims=0).astype(x.dtype)


@gradient("ReduceMean")
def reduce_mean(ctx: Backward) -> Any:
    """dy divided by the number of elements goes to every element."""
    axes = _axes(ctx)
    return _result(ctx, expanded(_kept(ctx, ctx.grad, axes) / _count(ctx, axes), ctx.inputs[0]))


@gradient("ReduceMax", "ReduceMin")
def reduce_extreme(ctx: Backward) -> Any:
    """dy goes to the extrema, divided among equal ones."""
    x, axes = ctx.inputs[0], _axes(ctx)
    hit = (x == _kept(ctx, ctx.outputs[0], axes)).astype(x.dtype)
    return _result(ctx, hit * (_kept(ctx, ctx.grad, axes) / sum_over(hit, axes)))


@gradient("ReduceProd")
def reduce_prod(ctx: Backward) -> Any:
    """The product of the other elements; zeros are counted separately, so that there is no division by zero."""
    x, axes = ctx.inputs[0], _axes(ctx)
    if not axes:
        return _result(ctx, ctx.grad)
    zero = x == 0.0
    zeros = sum_over(zero.astype(x.dtype), axes)
    safe = where(zero, 1.0, x)
    rest = with_axes("ReduceProd", safe, axes, keepdims=1) * _kept(ctx, ctx.grad, axes)
    others = where(zero, where(zeros == 1.0, rest, 0.0), where(zeros == 0.0, rest / safe, 0.0))
    return _result(ctx, others)


@gradient("ReduceL1")
def reduce_l1(ctx: Backward) -> Any:
    """The sign."""
    return _result(ctx, ops.Sign(ctx.inputs[0]) * _kept(ctx, ctx.grad, _axes(ctx)))


@gradient("ReduceL2")
def reduce_l2(ctx: Backward) -> Any:
    """x / y, and 0 where the norm is 0."""
    x, axes = ctx.inputs[0], _axes(ctx)
    y = _kept(ctx, ctx.outputs[0], axes)
    zero = y == 0.0
    return _result(ctx, x * where(zero, 0.0, _kept(ctx, ctx.grad, axes) / where(zero, 1.0, y)))


@gradient("ReduceSumSquare")
def reduce_sum_square(ctx: Backward) -> Any:
    """2 x."""
    return _result(ctx, ctx.inputs[0] * 2.0 * _kept(ctx, ctx.grad, _axes(ctx)))


@gradient("ReduceLogSum")
def reduce_log_sum(ctx: Backward) -> Any:
    """1 / sum."""
    x, axes = ctx.inputs[0], _axes(ctx)
    return _result(ctx, expanded(_kept(ctx, ctx.grad, axes) / sum_over(x, axes), x))


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(ctx: Backward) -> Any:
    """The softmax."""
    x, axes = ctx.inputs[0], _axes(ctx)
    return _result(ctx, ops.Exp(x - _kept(ctx, ctx.outputs[0], axes)) * _kept(ctx, ctx.grad, axes))


@gradient("TopK")
def top_k(ctx: Backward) -> Any:
    """dy scattered to the positions of the selected values."""
    x, indices = ctx.inputs[0], ctx.outputs[1]
    if indices is None:
        raise ctx.error("its output Indices is left out; name it")
    axis = int(ctx.attr("axis", -1)) % x.ndim
    return _result(ctx, emit("ScatterElements", [filled(x), indices, ctx.grad], opset=11, axis=axis))


@composition("CumProd")
def cum_prod(ctx: Forward) -> Any:
    """Products over the elements of each result, computed without division, so that zeros are allowed."""
    x = ctx.inputs[0]
    shape = ctx.shape(x)
    axis = int(ctx.known(1, "axis").reshape(())) % x.ndim
    n = shape[axis]
    if 0 in shape:
        return None
    at = np.arange(n)
    first, last = at[None, :], at[:, None]  # which elements (columns) go into which results (rows)
    counts = first >= last if ctx.attr("reverse", 0) else first <= last
    if ctx.attr("exclusive", 0):
        counts = counts & (first != last)
    place = [1] * (x.ndim + 1)
    place[axis], place[axis + 1] = n, n
    factors = where(literal(counts.reshape(place), BOOL), x.unsqueeze(axis), 1.0)
    return with_axes("ReduceProd", factors, [axis + 1], keepdims=0)
