"""Ranges of integer tensors as expressions over sizes: what each operator makes of those of its inputs.

The rules of `SymbolicShapes` for tensors that are too large for `symbolic_elements`, such as computed indices.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.symbols import Expr
from xrt_core.ir.types import TensorType
from xrt_core.passes.symbolic_elements import KnownElements, constants

_LARGEST: Final = int(np.iinfo(np.int32).max)
MOST_COLUMNS: Final = 8
"""Columns of an index that are followed by themselves."""

Interval = tuple[Expr, Expr]
"""The least and the greatest element."""


class KnownRanges(KnownElements, Protocol):
    """What the rules may ask about the graph so far."""

    def interval(self, v: Value | None) -> Interval | None:
        """The least and the greatest element that an integer tensor may have; None where nothing is known of it."""

    def columns(self, v: Value | None) -> tuple[Interval | None, ...] | None:
        """The intervals of the elements in each column of an integer tensor's last axis; None where there are many."""


def result_interval(s: KnownRanges, node: Node) -> Interval | None:
    """The range of a result of integers. Those of 64 bits do not wrap around: they are made of sizes of tensors; of 32
    bits, that the range fits is a guard, if it is not known."""
    found, result = _interval(s, node), node.outputs[0]
    if found is None or result is None or result.dtype != np.int32:
        return found
    return found if s.holds(found[0] + _LARGEST) and s.holds(_LARGEST - found[1]) else None


def _interval(s: KnownRanges, node: Node) -> Interval | None:
    op = node.op_type
    x = node.inputs[0] if node.inputs else None
    if op == "Cast" and x is not None and x.dtype is not None and x.dtype.kind == "b":
        return Expr.of(0), Expr.of(1)
    if op in ("ArgMax", "ArgMin", "CumSum"):
        return _along_axis(s, node)
    if op == "Range":
        first, last, step = (s.interval(v) for v in node.inputs)
        if first is None or last is None or step is None or step[0].constant != 1 or step[1].constant != 1:
            return None
        return first[0], last[1] - 1
    if op in ("Add", "Sub", "Mul"):
        a, b = (s.interval(v) for v in node.inputs)
        if a is None or b is None:
            return None
        if op != "Mul":
            return (a[0] + b[0], a[1] + b[1]) if op == "Add" else (a[0] - b[1], a[1] - b[0])
        least = s.bounds(a[0])[0], s.bounds(b[0])[0]
        return (a[0] * b[0], a[1] * b[1]) if None not in least and min(least) >= 0 else None  # type: ignore[type-var, operator]
    return s.interval(node.inputs[0]) if _is_of_first(node) else None


def _along_axis(s: KnownRanges, node: Node) -> Interval | None:
    """The range of positions along an axis, or of sums of what is not negative."""
    sums, dims = node.op_type == "CumSum", s.dims(node.inputs[0])
    given = constants(s, node, 1) if sums else [node.attributes.get("axis", 0)]
    at = given[0] if given else None
    size = dims[at] if dims is not None and isinstance(at, int) and -len(dims) <= at < len(dims) else None
    if size is None or not sums:
        return None if size is None else (Expr.of(0), size - 1)
    each = s.interval(node.inputs[0])
    least = None if each is None else s.bounds(each[0])[0]
    return (Expr.of(0), each[1] * size) if each is not None and least is not None and least >= 0 else None


def _is_of_first(node: Node) -> bool:
    """Whether all elements of a result are the first input's."""
    return node.op_type == "Cast" or (traits_of(node).view and node.op_type != "BitCast")


def result_columns(s: KnownRanges, node: Node, result: TensorType) -> tuple[Interval | None, ...] | None:
    """The ranges of the columns of a result of integers, where they are those of columns of inputs."""
    width, rank = result.shape[-1] if result.shape else None, len(result.shape or ())
    if not isinstance(width, int) or not 0 < width <= MOST_COLUMNS:
        return None
    if node.op_type == "Concat" and node.attributes.get("axis") in (-1, rank - 1):
        parts = [s.columns(v) for v in node.inputs]
        whole = [] if any(p is None for p in parts) else [i for p in parts if p is not None for i in p]
        return tuple(whole) if len(whole) == width else None
    x = node.inputs[0] if node.inputs else None
    if x is None or not x.shape or x.shape[-1] != width or not _is_of_first(node) or node.op_type == "Transpose":
        return None
    return s.columns(x) if x.dtype == result.dtype or result.dtype == np.int64 else None  # fewer bits wrap around
