"""Sequences and optionals: Python lists, and None for an absent value. They exist on the host only.

Source: the ONNX operator specifications of the Sequence* and Optional* operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.kernels.registry import OpContext, kernel

_HOST = "sequences and optionals exist on the host only"


@kernel("SequenceEmpty", dynamic=_HOST)
def sequence_empty(ctx: OpContext) -> Any:
    """An empty sequence."""
    return ([],)


@kernel("SequenceConstruct", dynamic=_HOST)
def sequence_construct(ctx: OpContext, *elements: Any) -> Any:
    """The sequence of the inputs."""
    return (list(elements),)


@kernel("SequenceInsert", dynamic=_HOST)
def sequence_insert(ctx: OpContext, sequence: Any, element: Any, position: Any = None) -> Any:
    """The sequence with `element` before `position` (at the end where it is left out; negative counts from the end)."""
    made = list(sequence)
    at = len(made) if position is None else _position(position, len(made), len(made))
    made.insert(at, element)
    return (made,)


@kernel("SequenceErase", dynamic=_HOST)
def sequence_erase(ctx: OpContext, sequence: Any, position: Any = None) -> Any:
    """The sequence without the element at `position` (the last where it is left out)."""
    made = list(sequence)
    del made[-1 if position is None else _position(position, len(made), len(made) - 1)]
    return (made,)


@kernel("SequenceAt", dynamic=_HOST)
def sequence_at(ctx: OpContext, sequence: Any, position: Any) -> Any:
    """The element at `position`."""
    return sequence[_position(position, len(sequence), len(sequence) - 1)]


@kernel("SequenceLength", dynamic=_HOST)
def sequence_length(ctx: OpContext, sequence: Any) -> Any:
    """The number of elements, an int64 scalar."""
    return ctx.xp.asarray(len(sequence), dtype=np.int64)


@kernel("SplitToSequence", static=(1,), dynamic=_HOST)
def split_to_sequence(ctx: OpContext, x: Any, split: Any = None) -> Any:
    """Parts along `axis`: of one element each (the axis kept if `keepdims`), of one size (the last may be smaller), or
    of the sizes given."""
    axis = ctx.attr("axis", 0) % x.ndim
    length = x.shape[axis]
    if split is None:
        sizes = [1] * length
    elif np.ndim(split) == 0:
        size = int(split)
        sizes = [min(size, length - i) for i in range(0, length, size)]
    else:
        sizes = [int(s) for s in split]
        if sum(sizes) != length:
            raise ValueError(f"split {sizes} does not add up to {length}, the length of axis {axis}")
    parts = []
    start = 0
    for size in sizes:
        part = x[(slice(None),) * axis + (slice(start, start + size),)]
        if split is None and not ctx.attr("keepdims", 1):
            part = ctx.xp.squeeze(part, axis)
        parts.append(part)
        start += size
    return (parts,)


@kernel("ConcatFromSequence", dynamic=_HOST)
def concat_from_sequence(ctx: OpContext, sequence: Any) -> Any:
    """The elements joined along `axis`, a new one if `new_axis`."""
    join = ctx.xp.stack if ctx.attr("new_axis", 0) else ctx.xp.concatenate
    return join(sequence, axis=ctx.attr("axis", 0))


@kernel("Optional", dynamic=_HOST)
def optional(ctx: OpContext, value: Any = None) -> Any:
    """The optional that holds `value`; an empty one where it is left out."""
    return (value,)


@kernel("OptionalHasElement", dynamic=_HOST)
def optional_has_element(ctx: OpContext, value: Any = None) -> Any:
    """Whether there is a value, a bool scalar."""
    return ctx.xp.asarray(value is not None)


@kernel("OptionalGetElement", dynamic=_HOST)
def optional_get_element(ctx: OpContext, value: Any) -> Any:
    """The value. Raises ValueError for an empty optional."""
    if value is None:
        raise ValueError("the optional holds no element")
    return (value,)


def _position(position: Any, length: int, last: int) -> int:
    at = int(np.asarray(position).reshape(-1)[0])
    if not -length <= at <= last:
        raise ValueError(f"position {at} is outside a sequence of {length} elements")
    return at + length if at < 0 else at
