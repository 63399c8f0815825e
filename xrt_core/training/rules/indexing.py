"""Gradients of gathering and scattering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.training.gradient_context import Backward, emit, filled, reshaped, where
from xrt_core.training.registry import gradient

_ADDS = 16
"""The opset from which Scatter operators can add; gradients of gathering need it, regardless of the graph's opset."""


@gradient("Gather")
def gather(ctx: Backward) -> Any:
    """Scatter-add of dy at the gathered rows."""
    x, indices = ctx.inputs
    axis = int(ctx.attr("axis", 0)) % x.ndim
    g, count = ctx.grad, indices.ndim
    order = [axis, *(i for i in range(x.ndim) if i != axis)]
    if axis:
        rows = x.transpose(order)  # only its shape is used
        g = g.transpose([*range(axis, axis + count), *range(axis), *range(axis + count, g.ndim)])
    else:
        rows = x
    total = emit("ScatterND", [filled(rows), _int64(indices).unsqueeze(count), g], opset=_ADDS, reduction="add")
    return (total.transpose([int(i) for i in np.argsort(order)]) if axis else total), None


def _int64(indices: Tensor) -> Tensor:
    return indices.astype(np.int64)


@gradient("GatherElements")
def gather_elements(ctx: Backward) -> Any:
    """Scatter-add of dy at the gathered elements."""
    x, indices = ctx.inputs
    axis = int(ctx.attr("axis", 0))
    return emit("ScatterElements", [filled(x), indices, ctx.grad], opset=_ADDS, axis=axis, reduction="add"), None


@gradient("GatherND")
def gather_nd(ctx: Backward) -> Any:
    """Scatter-add of dy at the gathered slices; batch axes become part of the index."""
    x, indices = ctx.inputs
    batch = int(ctx.attr("batch_dims", 0))
    if batch:
        shape = ctx.shape(indices)
        grid = np.indices(shape[:batch]).reshape(batch, *shape[:batch], *[1] * (len(shape) - 1 - batch))
        grid = np.broadcast_to(grid, (batch, *shape[:-1]))
        indices = ops.Concat(literal(np.moveaxis(grid, 0, -1), INT64), _int64(indices), axis=len(shape) - 1)
    return emit("ScatterND", [filled(x), _int64(indices), ctx.grad], opset=_ADDS, reduction="add"), None


@gradient("ScatterElements", "Scatter")
def scatter_elements(ctx: Backward) -> Any:
    """By the updates: dy gathered at their indices. By the data: dy, zero there unless the updates were reduced."""
    indices, axis = ctx.inputs[1], int(ctx.attr("axis", 0))

    def put(data: Tensor, updates: Tensor, how: str) -> Tensor:
        if how == "none":  # opset 11, which has no reductions, is understood by more engines
            return cast(Tensor, emit("ScatterElements", [data, indices, updates], opset=11, axis=axis))
        return cast(Tensor, emit("ScatterElements", [data, indices, updates], opset=18, axis=axis, reduction=how))

    return _scattered(ctx, put, lambda x: ops.GatherElements(x, indices, axis=axis))


@gradient("ScatterND")
def scatter_nd(ctx: Backward) -> Any:
    """As for ScatterElements, in slices."""
    indices = ctx.inputs[1]

    def put(data: Tensor, updates: Tensor, how: str) -> Tensor:
        if how == "none":
            return cast(Tensor, ops.ScatterND(data, indices, updates))
        return cast(Tensor, emit("ScatterND", [data, indices, updates], opset=18, reduction=how))

    return _scattered(ctx, put, lambda x: ops.GatherND(x, indices))


def _scattered(
    ctx: Backward, put: Callable[[Tensor, Tensor, str], Tensor], take: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients by data and updates. put: (data, updates, reduction) -> the scattered; take: what is at the indices.

    Where updates meet in a maximum or minimum, equal ones share the gradient, as in PyTorch. A product's gradient is
    that of the other factors, zeros among them included.
    """
    data, _, updates = ctx.inputs
    g, y, how = ctx.grad, ctx.outputs[0], str(ctx.attr("reduction", "none"))
    by_data = by_updates = None
    if how in ("none", "add"):
        if ctx.wants(0):
            by_data = g if how == "add" else put(g, filled(updates), "none")
        if ctx.wants(2):
            by_updates = take(g)
    elif how == "mul":
        if ctx.wants(0):
            by_data = g * put(filled(data, 1.0), updates, "mul")
        if ctx.wants(2):
            zero = updates == literal(0.0, updates.dtype)
            alone = zero & (take(put(filled(data), zero.astype(data.dtype), "add")) == literal(1.0, data.dtype))
            others = put(data, where(alone, 1.0, updates), "mul")
            by_updates = where(alone, take(g * others), take(g * y) / where(zero, 1.0, updates))
    else:
        own, theirs = (data == y).astype(g.dtype), (updates == take(y)).astype(g.dtype)
        share = g / put(own, theirs, "add")
        by_data = share * own if ctx.wants(0) else None
        by_updates = take(share) * theirs if ctx.wants(2) else None
    return by_data, None, by_updates


@gradient("TensorScatter")
def tensor_scatter(ctx: Backward) -> Any:
    """As for ScatterElements: each batch entry is written from its own position on, wrapping around if circular."""
    update, start = ctx.inputs[1], ctx.input(2)
    shape, size = ctx.shape(update), ctx.shape(ctx.grad)
    axis = int(ctx.attr("axis", -2)) % len(shape)
    place = [shape[axis] if i == axis else 1 for i in range(len(shape))]
    at = literal(np.arange(shape[axis]).reshape(place), INT64)
    if start is not None:
        at = at + _int64(start).reshape([-1] + [1] * (len(shape) - 1))
    if str(ctx.attr("mode", "linear")) == "circular":
        at = ops.Mod(at, size[axis])
    indices = ops.Expand(at, list(shape))
    by_cache = by_update = None
    if ctx.wants(0):
        by_cache = emit("ScatterElements", [ctx.grad, indices, filled(update)], opset=11, axis=axis)
    if ctx.wants(1):
        by_update = ops.GatherElements(ctx.grad, indices, axis=axis)
    return by_cache, by_update, None


@gradient("OneHot")
def one_hot(ctx: Backward) -> Any:
    """By the pair of values [off, on]: the sums of dy over the positions of each."""
    if not ctx.wants(2):
        return None, None, None
    hot = ops.OneHot(ctx.inputs[0], ctx.inputs[1], literal([0, 1], ctx.grad.dtype), axis=int(ctx.attr("axis", -1)))
    on = where(hot > 0.0, ctx.grad, 0.0).sum().reshape(1)
    off = where(hot > 0.0, 0.0, ctx.grad).sum().reshape(1)
    return None, None, reshaped(ops.Concat(off, on, axis=0), ctx.inputs[2])


@gradient("Compress")
def compress(ctx: Backward) -> Any:
    """dy scattered to the selected positions."""
    x, condition = ctx.inputs
    axis = ctx.attr("axis")
    order = list(range(x.ndim)) if axis is None else [int(axis) % x.ndim]
    order += [i for i in range(x.ndim) if i not in order]
    rows = x.reshape(-1) if axis is None else x.transpose(order)  # only its shape is used
    g = ctx.grad if axis is None else ctx.grad.transpose(order)
    taken = ops.NonZero(condition).T  # (count, 1)
    total = emit("ScatterND", [filled(rows), taken, g], opset=11)
    if axis is None:
        return reshaped(total, x), None
    return total.transpose([int(i) for i in np.argsort(order)]), None
