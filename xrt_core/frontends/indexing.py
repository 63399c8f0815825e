"""Lowering of NumPy index expressions on traced tensors to Slice, Gather, GatherND and Compress nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.frontends.numpy_interop import as_array, is_array
from xrt_core.frontends.numpy_semantics import apply, constant, literal, stack_scalars, with_axes
from xrt_core.frontends.promotion import BOOL, INT64, is_integer
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tensor import Tensor
from xrt_core.frontends.tracing import current_tracer

_LAST = 2**63 - 1
_FIRST = -(2**63)
_NEW = object()  # None in the key: an axis of size 1


def index(x: Tensor, key: Any) -> Tensor:
    """`x[key]` with NumPy's semantics: integers, slices, None, Ellipsis, masks, integer arrays and tensors, and mixes.

    Raises TraceError for too many indices, one out of range, or a kind that cannot index.
    """
    parts = _expanded(x, key)
    advanced = [p for p in parts if isinstance(p, Tensor | np.ndarray)]
    if advanced and all(isinstance(p, Tensor) and p.ndim == 0 and p.dtype != BOOL for p in advanced):
        return _with_scalars(x, parts)  # selects one position per axis, as an integer does
    whole = sum(1 for p in parts if isinstance(p, slice) and p == slice(None))
    if len(advanced) == 1 and len(parts) == 1 + whole:
        single = _single(x, parts, advanced[0])
        if single is not None:
            return single
    return _basic(x, parts) if not advanced else _advanced(x, parts)


def _expanded(x: Tensor, key: Any) -> list[Any]:
    """Normalise the key to one entry per axis: ints, slices, _NEW, and arrays or tensors of integers or bools."""
    given = [_part(k) for k in (key if isinstance(key, tuple) else (key,))]
    rank = x.ndim
    used = sum(_consumed(p) for p in given)
    if used > rank:
        raise trace_error(f"{used} indices for {x!r}, which has {rank} axes")
    dots = [i for i, p in enumerate(given) if p is Ellipsis]
    if len(dots) > 1:
        raise trace_error("an index can have one Ellipsis only")
    at = dots[0] if dots else len(given)
    return given[:at] + [slice(None)] * (rank - used) + given[at + 1 :]


def _part(k: Any) -> Any:
    if k is None:
        return _NEW
    if k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, bool | np.bool_):
        raise trace_error("a single True or False cannot index a tensor; use None for a new axis")
    if isinstance(k, Tensor):
        if k.dtype != BOOL and not is_integer(k.dtype):
            raise trace_error(f"{k!r} cannot index: integers or bools are needed")
        return k
    if isinstance(k, int | np.integer):
        return int(k)
    if isinstance(k, list):
        k = np.asarray(k, dtype=np.int64) if not k else np.asarray(k)
    if is_array(k):
        array = k if isinstance(k, np.ndarray) else as_array(k)
        if array.dtype == BOOL or array.dtype.kind in "iu":
            return array
    try:
        return operator.index(k)
    except TypeError:
        raise trace_error(f"{k!r} ({type(k).__name__}) cannot index a tensor") from None


def _consumed(part: Any) -> int:
    """Return the number of axes that an index consumes."""
    if part is _NEW or part is Ellipsis:
        return 0
    if isinstance(part, Tensor | np.ndarray) and part.dtype == BOOL:
        return part.ndim
    return 1


# integers and slices


def _basic(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Apply integers, slices and new axes; an axis indexed by an array or a tensor is left unchanged."""
    bounds: list[tuple[Any, Any, int, int]] = []  # start, end, axis, step
    dropped: list[int] = []
    added: list[int] = []
    axis = place = 0
    for p in parts:
        if p is _NEW:
            added.append(place)
            place += 1
            continue
        if isinstance(p, int):
            at = _position(p, x.shape[axis], axis, x)
            bounds.append((at, _LAST if at == -1 else at + 1, axis, 1))
            dropped.append(axis)
        elif isinstance(p, slice):
            found = _slice(p, x.shape[axis])
            if found is not None:
                bounds.append((found[0], found[1], axis, found[2]))
            place += 1
        else:
            place += _consumed(p)
            axis += _consumed(p) - 1
        axis += 1
    if bounds:
        x = _slice_node(x, bounds)
    if dropped:
        x = with_axes("Squeeze", x, dropped)
    return with_axes("Unsqueeze", x, added) if added else x


def _slice_node(x: Tensor, bounds: Sequence[tuple[Any, Any, int, int]]) -> Tensor:
    starts, ends, axes, steps = (list(c) for c in zip(*bounds, strict=True))
    if "starts" in current_tracer("Slice").schema("Slice").attributes:
        if any(s != 1 for s in steps) or any(isinstance(b, Tensor) for b in (*starts, *ends)):
            raise trace_error("slices with steps or with tensors as bounds need opset 10 or newer")
        return apply("Slice", x, starts=tuple(starts), ends=tuple(ends), axes=tuple(axes))
    traced = any(isinstance(b, Tensor) for b in (*starts, *ends))
    pack = stack_scalars if traced else (lambda values: literal(values, INT64))
    inputs = [pack(starts), pack(ends), literal(axes, INT64)]
    if any(s != 1 for s in steps):
        inputs.append(literal(steps, INT64))
    return apply("Slice", x, *inputs)


def _position(i: int, dim: Any, axis: int, x: Tensor) -> int:
    if not isinstance(dim, int):
        return i
    if not -dim <= i < dim:
        raise trace_error(f"index {i} is out of range for axis {axis} of {x!r}")
    return i % dim


def _slice(s: slice, dim: Any) -> tuple[Any, Any, int] | None:
    """Return (start, end, step) as Slice takes them; None if the slice keeps the whole axis."""
    step = _bound(s.step, 1)
    if isinstance(step, Tensor) or step == 0:
        raise trace_error(f"a slice's step must be an integer other than 0, not {s.step!r}")
    if s.start is None and s.stop is None and step == 1:
        return None
    start = _bound(s.start, 0 if step > 0 else _LAST)
    end = _bound(s.stop, _LAST if step > 0 else _FIRST)
    if isinstance(start, Tensor) or isinstance(end, Tensor) or not isinstance(dim, int):
        return start, end, step
    whole = slice(s.start if s.start is None else start, s.stop if s.stop is None else end, step)
    a, b, step = whole.indices(dim)
    if (a, b, step) == (0, dim, 1):
        return None
    return a, _FIRST if b < 0 else b, step


def _bound(b: Any, default: int) -> Any:
    if b is None:
        return default
    if isinstance(b, Tensor):
        if not is_integer(b.dtype):
            raise trace_error(f"{b!r} cannot bound a slice: an integer is needed")
        return b
    try:
        return operator.index(b)
    except TypeError:
        raise trace_error(f"{b!r} ({type(b).__name__}) cannot bound a slice") from None


# arrays and tensors


def _with_scalars(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Scalar tensors among basic indices: Gather per axis, from the last on, so that earlier axes stay in place."""
    axis = sum(_consumed(p) for p in parts)
    for i in reversed(range(len(parts))):
        axis -= _consumed(parts[i])
        if isinstance(parts[i], Tensor):
            x = apply("Gather", x, _indices(parts[i]), axis=axis)
    return _basic(x, [p for p in parts if not isinstance(p, Tensor)])


def _single(x: Tensor, parts: Sequence[Any], part: Any) -> Tensor | None:
    """One array or tensor and nothing else: Gather, or Compress for a mask along one axis; None for other masks."""
    axis = next(i for i, p in enumerate(parts) if p is part)
    if part.dtype == BOOL:
        if part.ndim != 1:
            return None
        if isinstance(part, np.ndarray):
            (part,) = _positions(part, axis, x)
        else:
            _check_mask(part.shape, axis, x)
            return apply("Compress", x, part, axis=axis)
    _check_range(part, x.shape[axis], axis, x)
    return apply("Gather", x, _indices(part), axis=axis)


def _advanced(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Any mix: basic indices first, then one GatherND over the axes that arrays and tensors index."""
    rest: list[Any] = []  # index of each axis left after basic indexing; masks as one integer index per axis
    fancy = [i for i, p in enumerate(parts) if isinstance(p, Tensor | np.ndarray | int)]
    adjacent = fancy == list(range(fancy[0], fancy[-1] + 1))
    axis = 0
    for p in parts:
        if p is _NEW or isinstance(p, slice):
            rest.append(None)
        elif isinstance(p, int):
            _position(p, x.shape[axis], axis, x)
        elif p.dtype == BOOL:
            _check_mask(p.shape, axis, x)
            rest.extend(_positions(p, axis, x) if isinstance(p, np.ndarray) else _traced_positions(p))
        else:
            _check_range(p, x.shape[axis], axis, x)
            rest.append(p)
        axis += _consumed(p)
    # NumPy puts the indexed axes at the position of the first index if all are adjacent, else in front
    front = parts[: fancy[0]] if adjacent else []
    lead = sum(1 for p in front if p is _NEW or isinstance(p, slice))
    x = _basic(x, parts)
    where = [i for i, p in enumerate(rest) if p is not None]
    others = [i for i, p in enumerate(rest) if p is None]
    if where + others != list(range(len(rest))):
        x = x.transpose(where + others)
    indices, rank = _stacked([rest[i] for i in where])
    found = apply("GatherND", x, indices)
    if lead == 0:
        return found
    order = [*range(rank, rank + lead), *range(rank), *range(rank + lead, rank + len(others))]
    return found.transpose(order)


def _stacked(parts: Sequence[Any]) -> tuple[Tensor, int]:
    """Broadcast the indices and stack them along a new last axis; return the stack and the rank of the broadcast."""
    if all(isinstance(p, np.ndarray) for p in parts):
        try:
            arrays = np.broadcast_arrays(*parts)
        except ValueError:
            raise trace_error(f"index arrays of shapes {[p.shape for p in parts]} do not broadcast") from None
        stacked = np.stack([a.astype(np.int64) for a in arrays], axis=-1)
        return constant(stacked), stacked.ndim - 1
    tensors = [_indices(p) for p in parts]
    rank = max(t.ndim for t in tensors)
    if len({t.shape for t in tensors}) > 1 or any(None in t.shape for t in tensors):
        total = tensors[0]
        for t in tensors[1:]:  # a sum has the broadcast shape, also where dimensions depend on data
            total = total + t
        zero = total - total
        tensors = [t + zero for t in tensors]
    columns = [t.unsqueeze(-1) for t in tensors]
    return (columns[0] if len(columns) == 1 else apply("Concat", *columns, axis=-1)), rank


def _indices(part: Any) -> Tensor:
    return part.astype(INT64) if isinstance(part, Tensor) else constant(part.astype(np.int64))


def _positions(mask: np.ndarray, axis: int, x: Tensor) -> list[np.ndarray]:
    _check_mask(mask.shape, axis, x)
    return list(np.nonzero(mask))


def _traced_positions(mask: Tensor) -> list[Tensor]:
    found = apply("NonZero", mask)  # one row per axis
    return [apply("Gather", found, literal(i, INT64), axis=0) for i in range(mask.ndim)]


def _check_mask(shape: Sequence[Any], axis: int, x: Tensor) -> None:
    for i, (a, b) in enumerate(zip(shape, x.shape[axis:], strict=False)):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise trace_error(f"a mask of shape {tuple(shape)} does not fit axis {axis + i} of {x!r}")


def _check_range(part: Any, dim: Any, axis: int, x: Tensor) -> None:
    if isinstance(part, np.ndarray) and isinstance(dim, int) and part.size:
        low, high = int(part.min()), int(part.max())
        if low < -dim or high >= dim:
            raise trace_error(f"index {low if low < -dim else high} is out of range for axis {axis} of {x!r}")
