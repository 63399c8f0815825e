"""Kernels that read elements at indices (Gather, GatherElements, GatherND), and OneHot, NonZero, Compress, Unique."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import float_like
from xrt_core.kernels.movement import axis_of, check_shape, check_size
from xrt_core.kernels.namespace import is_jax
from xrt_core.kernels.registry import OpContext, kernel

_DATA_SHAPE = "the output's shape depends on the data"


def wrap(xp: Any, indices: Any, size: int) -> Any:
    """Indices with negative ones counted from the end; clamped for namespaces that do not check bounds.

    NumPy wraps and raises IndexError itself, so under NumPy the indices are returned unchanged.
    """
    if xp is np:
        return indices
    positive = xp.where(indices < 0, indices + size, indices)
    return xp.clip(positive, 0, max(size - 1, 0))


def grid_index(xp: Any, shape: tuple[int, ...], skip: int) -> list[Any]:
    """One array of positions an axis, broadcastable to `shape`; the entry of axis `skip` is to be replaced."""
    rank = len(shape)
    return [
        None if a == skip else xp.reshape(xp.arange(d), (1,) * a + (d,) + (1,) * (rank - a - 1))
        for a, d in enumerate(shape)
    ]


@kernel("Gather")
def gather(ctx: OpContext, x: Any, indices: Any) -> Any:
    """Gather slices along `axis`; negative indices count from the end."""
    xp = ctx.xp
    axis = axis_of(ctx.attr("axis", 0), x.ndim, "Gather")
    flat = wrap(xp, xp.reshape(indices, (-1,)), x.shape[axis])
    taken = xp.take(x, flat, axis=axis, mode="clip") if is_jax(xp) else xp.take(x, flat, axis=axis)
    return xp.reshape(taken, x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@kernel("GatherElements")
def gather_elements(ctx: OpContext, x: Any, indices: Any) -> Any:
    """GatherElements: one element per index; `indices` may be smaller than the data off the axis."""
    xp = ctx.xp
    axis = axis_of(ctx.attr("axis", 0), x.ndim, "GatherElements")
    if xp is not np:
        index = grid_index(xp, indices.shape, axis)
        index[axis] = wrap(xp, indices, x.shape[axis])
        return x[tuple(index)]
    corner = tuple(slice(None) if a == axis else slice(0, d) for a, d in enumerate(indices.shape))
    return np.take_along_axis(x[corner], indices.astype(np.int64, copy=False), axis=axis)


@kernel("GatherND")
def gather_nd(ctx: OpContext, x: Any, indices: Any) -> Any:
    """GatherND: the last axis of `indices` holds index tuples into what follows the `batch_dims` first axes."""
    xp, batch = ctx.xp, ctx.attr("batch_dims", 0)
    depth, lead = indices.shape[-1], indices.shape[:-1]
    if batch + depth > x.ndim:
        raise ShapeError(f"GatherND: {depth} indices after {batch} batch axes address more than rank {x.ndim}")
    rank = max(len(lead), 1)
    shape = lead or (1,)
    index = [xp.reshape(xp.arange(d), (1,) * a + (d,) + (1,) * (rank - a - 1)) for a, d in enumerate(shape[:batch])]
    for i in range(depth):
        index.append(xp.reshape(wrap(xp, indices[..., i], x.shape[batch + i]), shape))
    taken = x[tuple(index)] if index else x
    return xp.reshape(taken, lead + x.shape[batch + depth :])


@kernel("OneHot", static=(1,))
def one_hot(ctx: OpContext, indices: Any, depth: Any, values: Any) -> Any:
    """OneHot: indices outside [-depth, depth-1] give all `off`; float indices and depth are cut to integers."""
    xp, rank = ctx.xp, indices.ndim
    axis = axis_of(ctx.attr("axis", -1), rank + 1, "OneHot")
    count = int(np.asarray(depth).reshape(-1)[0])
    check_shape(values.shape, (2,), "OneHot: values")
    check_size((*indices.shape, max(count, 0)), values.dtype, "OneHot")
    whole = xp.expand_dims(indices.astype(np.int64), axis)
    classes = xp.reshape(xp.arange(count), (count,) + (1,) * (rank - axis))
    hot = (whole == classes) | (whole + count == classes)
    return xp.where(hot, values[1:2], values[0:1])


@kernel("NonZero", dynamic=_DATA_SHAPE)
def non_zero(ctx: OpContext, x: Any) -> Any:
    """NonZero: indices in row-major order, shape (rank, count); a scalar gives shape (0, count)."""
    if x.ndim == 0:
        return ctx.xp.zeros((0, int(bool(x))), np.int64)
    return ctx.xp.stack(ctx.xp.nonzero(x)).astype(np.int64, copy=False)


def _condition_unknown(node: Node) -> str | None:
    condition = node.inputs[1]
    return None if condition is not None and condition.is_constant else _DATA_SHAPE


@kernel("Compress", static=(1,), dynamic=_condition_unknown)
def compress(ctx: OpContext, x: Any, condition: Any) -> Any:
    """Compress: keeps what the condition selects, along `axis` or flattened; a short condition drops the tail."""
    axis = ctx.attr("axis")
    if axis is None:
        x, axis = ctx.xp.reshape(x, (-1,)), 0
    axis = axis_of(axis, x.ndim, "Compress")
    return ctx.xp.take(x, ctx.xp.asarray(np.flatnonzero(condition)), axis=axis)


@kernel("Unique", dynamic=_DATA_SHAPE)
def unique(ctx: OpContext, x: Any) -> Any:
    """Unique values, or slices along `axis`: sorted, or with sorted=0 in order of first occurrence."""
    axis = ctx.attr("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.ndim, "Unique")
    keys = x
    if float_like(x.dtype) and x.dtype.itemsize < 4:
        keys = x.astype(np.float32)
    elif x.dtype.kind == "V":  # the integers narrower than a byte
        keys = x.astype(np.int16)
    if x.dtype == object and x.ndim > 1:
        keys = np.unique(x, return_inverse=True)[1].reshape(x.shape)  # ranks sort as the strings do
    _, first, inverse, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True, axis=None if keys.ndim == 1 else axis
    )
    inverse = inverse.reshape(-1)
    if not ctx.attr("sorted", 1):
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    values = np.take(x, first, axis=axis)
    if ctx.num_outputs == 1:
        return values
    return values, *(a.astype(np.int64, copy=False) for a in (first, inverse, counts)[: ctx.num_outputs - 1])
