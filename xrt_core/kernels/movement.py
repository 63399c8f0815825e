"""Kernels that only move elements: reshape, transpose, concatenate, split, slice, repeat."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import InputError, ShapeError
from xrt_core.ir.types import size_fault
from xrt_core.kernels.namespace import is_jax
from xrt_core.kernels.registry import OpContext, kernel


def ints(values: Any) -> tuple[int, ...]:
    """Python ints of a static input or an integer list attribute; a scalar gives one. Raises ShapeError for others."""
    given = np.asarray(values).reshape(-1)
    if given.size and given.dtype.kind not in "iub":
        raise ShapeError(f"{given.tolist()} of {given.dtype}: sizes, axes and positions are integers")
    return tuple(int(v) for v in given)


def axis_of(axis: int, rank: int, where: str) -> int:
    """The axis counted from the front. Raises ShapeError where it is out of range."""
    if not -rank <= axis < rank:
        raise ShapeError(f"{where}: axis {axis} is out of range for rank {rank}; give one of {-rank} to {rank - 1}")
    return axis % rank


def check_size(shape: Iterable[int], dtype: np.dtype, where: str) -> None:
    """Raise ShapeError for a result that exceeds the machine's memory, of which it may be a view at first."""
    fault = size_fault(tuple(shape), dtype)
    if fault is not None:
        raise ShapeError(f"{where}: {fault}")


def check_shape(found: Sequence[int], wanted: Sequence[int], where: str, *, broadcasts: bool = False) -> None:
    """Raise ShapeError for an operand of another shape; broadcasts: than what broadcasts to that, which stays."""
    fits = len(found) <= len(wanted) and all(n in (1, m) for n, m in zip(found[::-1], wanted[::-1], strict=False))
    if not (fits if broadcasts else tuple(found) == tuple(wanted)):
        rule = "give one that broadcasts to" if broadcasts else "give"
        raise ShapeError(f"{where} of shape {list(found)}: {rule} {list(wanted)}")


def check_lengths(xp: Any, lengths: Any, steps: int, where: str) -> None:
    """Under NumPy, raise InputError for lengths below 0 or above `steps`; other arrays are not looked at."""
    if xp is not np or not lengths.size or (lengths.min() >= 0 and lengths.max() <= steps):
        return
    wrong = next(int(n) for n in lengths.reshape(-1) if not 0 <= n <= steps)
    raise InputError(f"{where}: a sequence of length {wrong}: the input has {steps} steps; give 0 to {steps}")


def axes_of(axes: Iterable[int], rank: int, where: str) -> tuple[int, ...]:
    """`axis_of` for several axes."""
    return tuple(axis_of(a, rank, where) for a in axes)


@kernel("Reshape", static=(1,))
def reshape(ctx: OpContext, x: Any, shape: Any) -> Any:
    """Reshape: 0 copies the input's dimension (unless `allowzero`), -1 is inferred from the rest."""
    wanted = list(ints(shape))
    free, taken = x.size, 1  # the dimension -1: elements of the input / elements of the other output dimensions
    if not ctx.attr("allowzero", 0):
        copied = [i for i, d in enumerate(wanted) if d == 0]
        for i in copied:
            if i >= x.ndim:
                raise ShapeError(f"Reshape: the target {wanted} copies dimension {i} of an input of rank {x.ndim}")
            wanted[i] = x.shape[i]
        free = math.prod(d for i, d in enumerate(x.shape) if i not in copied)
        taken = math.prod(d for i, d in enumerate(wanted) if i not in copied and d != -1)
    else:
        taken = math.prod(d for d in wanted if d != -1)
    if wanted.count(-1) == 1:
        if free and (not taken or free % taken):
            raise ShapeError(f"Reshape: {list(x.shape)} does not fit {list(ints(shape))}: -1 has no integer solution")
        wanted[wanted.index(-1)] = free // taken if taken else 0
    if math.prod(wanted) != x.size or any(d < 0 for d in wanted):
        raise ShapeError(f"Reshape: {list(x.shape)} ({x.size} elements) does not fit {list(ints(shape))}")
    return ctx.xp.reshape(x, tuple(wanted))


@kernel("Flatten")
def flatten(ctx: OpContext, x: Any) -> Any:
    """Flatten to a matrix: dimensions before `axis` times the others."""
    axis = ctx.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return ctx.xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@kernel("Squeeze", static=(1,))
def squeeze(ctx: OpContext, x: Any, axes: Any = None) -> Any:
    """Squeeze: axes are an attribute before version 13; without axes every dimension of size 1 goes."""
    given = ctx.attr("axes") if ctx.version < 13 else axes
    if given is None:
        gone = tuple(i for i, d in enumerate(x.shape) if d == 1)
    else:
        gone = axes_of(ints(given), x.ndim, "Squeeze")
    for a in gone:
        if x.shape[a] != 1:
            raise ShapeError(f"Squeeze: axis {a} of {list(x.shape)} has size {x.shape[a]}; only size 1 can be removed")
    return ctx.xp.reshape(x, tuple(d for i, d in enumerate(x.shape) if i not in gone))


@kernel("Unsqueeze", static=(1,))
def unsqueeze(ctx: OpContext, x: Any, axes: Any = None) -> Any:
    """Unsqueeze: axes (an attribute before version 13) count in the output."""
    given = ints(ctx.attr("axes") if ctx.version < 13 else axes)
    new = axes_of(given, x.ndim + len(given), "Unsqueeze")
    if len(set(new)) != len(new):
        raise ShapeError(f"Unsqueeze: axes {list(given)} name an axis twice")
    rest = iter(x.shape)
    return ctx.xp.reshape(x, tuple(1 if i in new else next(rest) for i in range(x.ndim + len(new))))


@kernel("Transpose")
def transpose(ctx: OpContext, x: Any) -> Any:
    """Transpose: without `perm` the axes are reversed."""
    perm = ctx.attr("perm")
    return ctx.xp.transpose(x, None if perm is None else perm)


@kernel("Concat")
def concat(ctx: OpContext, *inputs: Any) -> Any:
    """Concat along `axis`."""
    axis = axis_of(ctx.attr("axis", 1), inputs[0].ndim, "Concat")
    if len(inputs) == 1:
        return inputs[0]
    dtype = inputs[0].dtype
    if dtype.name in ("int2", "uint2") and is_jax(ctx.xp):  # JAX's compiler for CPUs ends the process on these
        return ctx.xp.concatenate([x.astype(np.int8) for x in inputs], axis=axis).astype(dtype)
    return ctx.xp.concatenate(inputs, axis=axis)


@kernel("Split", static=(1,))
def split(ctx: OpContext, x: Any, sizes: Any = None) -> Any:
    """Split: sizes are an attribute before version 13; without them parts are equal (from 18 the last may be smaller).

    Raises ShapeError where sizes do not add up or equal parts do not exist.
    """
    axis = axis_of(ctx.attr("axis", 0), x.ndim, "Split")
    total, count = x.shape[axis], ctx.num_outputs
    given = ctx.attr("split") if ctx.version < 13 else sizes
    if given is not None:
        parts = ints(given)
    elif ctx.version >= 18:
        chunk = -(-total // count)
        parts = tuple(max(0, min(chunk, total - i * chunk)) for i in range(count))
    else:
        parts = (total // count,) * count
    if sum(parts) != total or len(parts) != count or any(n < 0 for n in parts):
        raise ShapeError(f"Split: sizes {list(parts)} for {count} outputs do not fit axis {axis} of {list(x.shape)}")
    outputs, start = [], 0
    for size in parts:
        outputs.append(x[(slice(None),) * axis + (slice(start, start + size),)])
        start += size
    return tuple(outputs) if count > 1 else outputs[0]


def _slice(start: int, end: int, step: int, size: int) -> slice:
    """The Python slice of ONNX's start, end and step: both ends are clamped after negatives wrap once."""
    if step == 0:
        raise ShapeError("Slice: a step is 0; give a positive or negative one")
    start += size if start < 0 else 0
    end += size if end < 0 else 0
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    if start <= end or size == 0:
        return slice(0, 0, 1)
    return slice(start, None if end < 0 else end, step)


@kernel("Slice", static=(1, 2, 3, 4))
def slice_(ctx: OpContext, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    """Slice: attributes (no steps) in version 1, inputs from 10; ends beyond the array are clamped."""
    if ctx.version < 10:
        starts, ends, axes = ctx.attr("starts"), ctx.attr("ends"), ctx.attr("axes")
    first, last = ints(starts), ints(ends)
    where = axes_of(range(len(first)) if axes is None else ints(axes), x.ndim, "Slice")
    by = (1,) * len(first) if steps is None else ints(steps)
    index = [slice(None)] * x.ndim
    for a, s, e, t in zip(where, first, last, by, strict=True):
        index[a] = _slice(s, e, t, x.shape[a])
    return x[tuple(index)]


@kernel("Expand", static=(1,))
def expand(ctx: OpContext, x: Any, shape: Any) -> Any:
    """Expand: broadcasting goes both ways, so a 1 in the target keeps the input's dimension."""
    try:
        target = np.broadcast_shapes(x.shape, ints(shape))
    except ValueError:
        raise ShapeError(f"Expand: {list(x.shape)} cannot be broadcast with {list(ints(shape))}") from None
    check_size(target, x.dtype, "Expand")
    return ctx.xp.broadcast_to(x, target)


@kernel("Tile", static=(1,))
def tile(ctx: OpContext, x: Any, repeats: Any) -> Any:
    """Tile: repeats has one entry an axis."""
    times = ints(repeats)
    if len(times) != x.ndim or any(n < 0 for n in times):
        raise ShapeError(f"Tile: repeats {list(times)} for {list(x.shape)}; give one count an axis, none negative")
    check_size((d * n for d, n in zip(x.shape, times, strict=True)), x.dtype, "Tile")
    return ctx.xp.tile(x, times)


@kernel("DepthToSpace")
def depth_to_space(ctx: OpContext, x: Any) -> Any:
    """DepthToSpace: modes DCR (block offsets outermost in the channels) and CRD (innermost)."""
    b, (n, c, h, w) = ctx.attr("blocksize"), x.shape
    depth = c // (b * b)
    if ctx.attr("mode", "DCR") == "DCR":
        blocks = ctx.xp.transpose(ctx.xp.reshape(x, (n, b, b, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        blocks = ctx.xp.transpose(ctx.xp.reshape(x, (n, depth, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return ctx.xp.reshape(blocks, (n, depth, h * b, w * b))


@kernel("SpaceToDepth")
def space_to_depth(ctx: OpContext, x: Any) -> Any:
    """SpaceToDepth: the inverse of DepthToSpace; mode CRD exists from version 28."""
    b, (n, c, h, w) = ctx.attr("blocksize"), x.shape
    order = (0, 3, 5, 1, 2, 4) if ctx.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    blocks = ctx.xp.transpose(ctx.xp.reshape(x, (n, c, h // b, b, w // b, b)), order)
    return ctx.xp.reshape(blocks, (n, c * b * b, h // b, w // b))


@kernel("Shape")
def shape(ctx: OpContext, x: Any) -> Any:
    """Shape: int64; `start` and `end` (from version 15) wrap and are clamped."""
    end = ctx.attr("end")
    return ctx.xp.asarray(np.array(x.shape[slice(ctx.attr("start", 0), end)], np.int64))


@kernel("Size")
def size(ctx: OpContext, x: Any) -> Any:
    """Size: the number of elements, a scalar int64."""
    return ctx.xp.asarray(np.array(math.prod(x.shape), np.int64))
