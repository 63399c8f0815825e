"""Index tensors that count positions: what is looked up by all of them is a view of the data.

Exporters write `mask[rows, columns]`, whose indices are ranges over all rows and columns: a GatherND by all pairs of
positions, or a Gather of the flattened mask by row * width + column. In the padded form positions lie elsewhere, so
that the sums would point to other elements; a Reshape gives what was looked up, at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from xrt_core.ir.graph import Node
from xrt_core.ir.symbols import Expr, product
from xrt_core.passes.padding.form import Axis, Padded, Steps, axis_of
from xrt_core.passes.padding.operands import numbers
from xrt_core.passes.padding.walk import Given

_COUNTS: Final = (np.dtype(np.int32), np.dtype(np.int64))
_ZERO: Final = Expr.of(0)


def counted(node: Node, given: Given, made: Given) -> Given:
    """The results of a node's rule; `steps` of the first one, where they follow from its inputs."""
    find = None if node.domain else _TABLE.get(node.op_type)
    result = made[0] if len(made) == 1 else None
    if find is None or result is None or result.dtype not in _COUNTS:
        return made
    steps = find(node, given, result)
    return [replace(result, steps=steps)] if steps else made


def covered(steps: Steps, index: Sequence[Axis], axis: Axis) -> list[int] | None:
    """The axes of an index that together count all positions of an axis of the data, in their order; None where it
    points to others, or in another order."""
    where = [k for k, (s, a) in enumerate(zip(steps, index, strict=True)) if a != () and s != 0]
    if axis_of(f for k in where for f in index[k]) != axis:
        return None
    stride = Expr.of(1)
    for k in reversed(where):
        if steps[k] != stride:
            return None
        stride = stride * product(index[k])
    return where


def columns_of(s: Padded) -> tuple[Steps, ...]:
    """By which steps an index counts positions: of each column of its last axis, or of all; () where it does not."""
    if s.steps:
        return s.steps
    known = s.known
    if known is None:
        data = None if s.value is None else s.value.data
        if data is None or data.dtype not in _COUNTS or not data.size:
            return ()
        corner = (0,) * data.ndim
        steps = [int(data[(*corner[:k], 1, *corner[k + 1 :])]) if n > 1 else 0 for k, n in enumerate(data.shape)]
        total = np.zeros(data.shape, np.int64)
        for k, n in enumerate(data.shape):
            total += np.arange(n).reshape(-1, *(1,) * (data.ndim - 1 - k)) * steps[k]
        return (tuple(map(Expr.of, steps)),) if np.array_equal(total, data) else ()
    if not known.size or s.dtype not in _COUNTS:
        return ()
    corner = (0,) * known.ndim
    found = tuple(known[(*corner[:k], 1, *corner[k + 1 :])] if n > 1 else _ZERO for k, n in enumerate(known.shape))
    for at in np.ndindex(known.shape):
        if known[at] != sum((e * i for e, i in zip(found, at, strict=True)), _ZERO):
            return ()
    return (found,)


def _one(s: Padded | None) -> Steps | None:
    """The steps of a tensor that is no index of several columns."""
    found = () if s is None else columns_of(s)
    return found[0] if len(found) == 1 else None


def _range(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    start, _, delta = (None if s is None or s.known is None else s.known.reshape(-1)[0] for s in given)
    return ((Expr.of(1),),) if start == 0 and delta == 1 else ()


def _same(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    return () if given[0] is None or given[0].dtype not in _COUNTS else columns_of(given[0])


def _regrouped(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    """Of what has axes of size 1 more, or less."""
    x, steps = given[0], _one(given[0])
    if x is None or steps is None or [a for a in x.axes if a] != [a for a in result.axes if a]:
        return ()
    left = iter([s for s, a in zip(steps, x.axes, strict=True) if a])
    return (tuple(next(left) if a else _ZERO for a in result.axes),)


def _aligned(s: Padded, steps: Steps, rank: int) -> Steps:
    """The steps along the axes of a result of so many that it is repeated to."""
    return (*[_ZERO] * (rank - s.rank), *(e if a else _ZERO for e, a in zip(steps, s.axes, strict=True)))


def _expanded(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    x, steps = given[0], _one(given[0])
    return () if x is None or steps is None else (_aligned(x, steps, result.rank),)


def _transposed(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    steps = _one(given[0])
    if steps is None:
        return ()
    perm = numbers(node, "perm") or range(len(steps))[::-1]
    return (tuple(steps[k] for k in perm),)


def _sum(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    a, b = given
    left, right = _one(a), _one(b)
    if a is None or b is None or left is None or right is None:
        return ()
    both = zip(_aligned(a, left, result.rank), _aligned(b, right, result.rank), strict=True)
    return (tuple(x + y for x, y in both),)


def _times(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    for s, by in (given, given[::-1]):
        steps = _one(s)
        if s is not None and steps is not None and by is not None and by.known is not None and by.known.size == 1:
            return (tuple(e * by.known.item() for e in _aligned(s, steps, result.rank)),)
    return ()


def _columns(node: Node, given: Given, result: Padded) -> tuple[Steps, ...]:
    """Of coordinates that stand beside one another."""
    axis = node.attributes.get("axis", 0)
    steps = [_one(s) for s in given]
    if axis not in (-1, result.rank - 1) or any(s is None or s.axes[-1] != () for s in given):
        return ()
    found = tuple(s for s in steps if s is not None)
    return found if len(found) == len(steps) else ()


_TABLE: Final[dict[str, Callable[[Node, Given, Padded], tuple[Steps, ...]]]] = {
    "Add": _sum,
    "Cast": _same,
    "Concat": _columns,
    "Expand": _expanded,
    "Identity": _same,
    "Mul": _times,
    "Range": _range,
    "Reshape": _regrouped,
    "Squeeze": _regrouped,
    "Transpose": _transposed,
    "Unsqueeze": _regrouped,
}
