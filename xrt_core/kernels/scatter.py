"""Kernels that write elements at indices: Scatter, ScatterElements, ScatterND, TensorScatter, WriteSlice."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.kernels.indexing import grid_index
from xrt_core.kernels.movement import axis_of, check_shape
from xrt_core.kernels.namespace import reduce_at, set_at, wide
from xrt_core.kernels.registry import OpContext, kernel

_BOOL_AS = {"add": "max", "mul": "min", "min": "min", "max": "max"}


def _scatter(ctx: OpContext, x: Any, index: tuple[Any, ...], updates: Any, how: str) -> Any:
    """A copy of `x` with updates written or combined at `index`; narrow dtypes are combined in wider ones."""
    xp, dtype = ctx.xp, x.dtype
    if how == "none":
        return set_at(xp, x, index, updates)
    if how not in _BOOL_AS:
        raise ShapeError(f"{ctx.node.operator}: unknown reduction {how!r}; ONNX has none, add, mul, min and max")
    to = wide(dtype)
    if dtype == np.bool_:
        how, to = _BOOL_AS[how], np.dtype(np.uint8)
    elif dtype.name.startswith(("int2", "int4", "uint2", "uint4")):
        to = np.dtype(np.int8)
    if to == dtype:
        return reduce_at(xp, x, index, updates, how)
    return reduce_at(xp, x.astype(to), index, updates.astype(to), how).astype(dtype)


def _positive(xp: Any, indices: Any, size: int) -> Any:
    return xp.where(indices < 0, indices + size, indices)


@kernel("Scatter", "ScatterElements")
def scatter_elements(ctx: OpContext, x: Any, indices: Any, updates: Any) -> Any:
    """ScatterElements (Scatter in version 9): one update per index along `axis`; reductions from version 16.

    An index out of range raises IndexError under NumPy and is dropped under JAX.
    """
    xp = ctx.xp
    axis = axis_of(ctx.attr("axis", 0), x.ndim, ctx.node.op_type)
    check_shape(updates.shape, indices.shape, f"{ctx.node.op_type}: updates")
    index = grid_index(xp, indices.shape, axis)
    index[axis] = _positive(xp, indices, x.shape[axis])
    return _scatter(ctx, x, tuple(index), updates, ctx.attr("reduction", "none"))


@kernel("ScatterND")
def scatter_nd(ctx: OpContext, x: Any, indices: Any, updates: Any) -> Any:
    """ScatterND: the last axis of `indices` holds index tuples; reductions from version 16."""
    depth = indices.shape[-1]
    if not 1 <= depth <= x.ndim:
        raise ShapeError(f"ScatterND: index tuples of length {depth} for data of rank {x.ndim}; give 1 to {x.ndim}")
    check_shape(updates.shape, (*indices.shape[:-1], *x.shape[depth:]), "ScatterND: updates")
    index = tuple(_positive(ctx.xp, indices[..., i], x.shape[i]) for i in range(depth))
    return _scatter(ctx, x, index, updates, ctx.attr("reduction", "none"))


@kernel("TensorScatter")
def tensor_scatter(ctx: OpContext, cache: Any, update: Any, start: Any = None) -> Any:
    """TensorScatter: writes `update` into each batch entry of a KV cache from its own position on, wrapping round
    in mode circular."""
    xp = ctx.xp
    axis = axis_of(ctx.attr("axis", -2), cache.ndim, "TensorScatter")
    if axis == 0:
        raise ShapeError("TensorScatter: axis 0 is the batch; give the axis of the sequence")
    batch, size = cache.shape[0], cache.shape[axis]
    steps = xp.asarray(np.arange(update.shape[axis])[None, :])
    at = steps if start is None else xp.reshape(start, (-1, 1)) + steps
    if ctx.attr("mode", "linear") == "circular":
        at = at % size
    rows = xp.asarray(np.arange(batch)[:, None])
    written = set_at(xp, xp.moveaxis(cache, axis, 1), (rows, at), xp.moveaxis(update, axis, 1))
    return xp.moveaxis(written, 1, axis)


@kernel("WriteSlice", domain="xrt")
def write_slice(ctx: OpContext, x: Any, update: Any, start: Any) -> Any:
    """A copy of `x` with `update` in the place of its entries from `start` on, along one axis. A start from which it
    would not fit counts as the nearest one from which it does."""
    xp = ctx.xp
    axis = axis_of(ctx.attr("axis"), x.ndim, "WriteSlice")
    count = update.shape[axis]
    if count > x.shape[axis]:
        raise ShapeError(f"WriteSlice: {count} entries for an axis of size {x.shape[axis]}")
    at = xp.clip(xp.reshape(start, (-1,)), 0, x.shape[axis] - count) + xp.asarray(np.arange(count))
    written = set_at(xp, xp.moveaxis(x, axis, 0), (at,), xp.moveaxis(update, axis, 0))
    return xp.moveaxis(written, 0, axis)
