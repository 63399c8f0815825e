"""Ranges of integer tensors as expressions over sizes: what each operator makes of those of its inputs.

The rules of `SymbolicShapes` for tensors that are too large for `symbolic_elements`, such as computed indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.symbols import Expr
from xrt_core.ir.types import TensorType
from xrt_core.passes.symbolic_elements import KnownElements, constants, extreme

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
    rule = _RULES.get(node.op_type)
    if rule is not None:
        return rule(s, node)
    return s.interval(node.inputs[0]) if node.op_type in _TAKEN or _is_of_first(node) else None


def _of_all(combine: Callable[..., Interval | None]) -> _Rule:
    """`combine(s, interval, ...)` where those of all inputs are known."""

    def rule(s: KnownRanges, node: Node) -> Interval | None:
        found = [s.interval(v) for v in node.inputs if v is not None]
        return None if any(i is None for i in found) else combine(s, *found)

    return rule


def _cast(s: KnownRanges, node: Node) -> Interval | None:
    x = node.inputs[0]
    return (Expr.of(0), Expr.of(1)) if x is not None and x.dtype == np.bool_ else s.interval(x)


def _range(s: KnownRanges, first: Interval, last: Interval, step: Interval) -> Interval | None:
    by = step[0].constant
    if not by or by != step[1].constant:
        return None
    return (first[0], last[1] - 1) if by > 0 else (last[0] + 1, first[1])


def _product(s: KnownRanges, a: Interval, b: Interval) -> Interval | None:
    return (a[0] * b[0], a[1] * b[1]) if _never_negative(s, a) and _never_negative(s, b) else None


def _never_negative(s: KnownRanges, a: Interval) -> bool:
    low = s.bounds(a[0])[0]
    return low is not None and low >= 0


def _magnitude(s: KnownRanges, a: Interval) -> Interval:
    return a if _never_negative(s, a) else (Expr.of(0), extreme(True)(s, -a[0], a[1]))


def _remainder(s: KnownRanges, node: Node) -> Interval | None:
    """Of a division that rounds down, by what is positive."""
    divisor = s.interval(node.inputs[1])
    low = None if divisor is None else s.bounds(divisor[0])[0]
    if divisor is None or low is None or low < 1 or node.attributes.get("fmod"):
        return None
    return Expr.of(0), divisor[1] - 1


def _extreme_of(largest: bool) -> Callable[..., Interval]:
    def combine(s: KnownRanges, *given: Interval) -> Interval:
        low, high = given[0]
        for a in given[1:]:
            low, high = extreme(largest)(s, low, a[0]), extreme(largest)(s, high, a[1])
        return low, high

    return combine


def _clipped(s: KnownRanges, node: Node) -> Interval | None:
    """Of any integers, where both limits are known; the upper one holds where they contradict."""
    found, *limits = (None if v is None else s.interval(v) for v in (*node.inputs, None, None)[:3])
    if any(v is not None and limit is None for v, limit in zip(node.inputs[1:], limits, strict=False)):
        return None
    low, high = limits
    if found is None:
        return None if low is None or high is None else (extreme(False)(s, low[0], high[0]), high[1])
    for limit, largest in ((low, True), (high, False)):
        found = found if limit is None else _extreme_of(largest)(s, found, limit)
    return found


def _any_of(s: KnownRanges, *given: Interval) -> Interval:
    low, high = given[0]
    for a in given[1:]:
        low, high = extreme(False)(s, low, a[0]), extreme(True)(s, high, a[1])
    return low, high


def _selected(s: KnownRanges, node: Node) -> Interval | None:
    a, b = (s.interval(v) for v in node.inputs[1:])
    return None if a is None or b is None else _any_of(s, a, b)


def _scattered(s: KnownRanges, node: Node) -> Interval | None:
    """Of the elements that are there, and of those that take their places."""
    kept, taken = s.interval(node.inputs[0]), s.interval(node.inputs[2])
    if kept is None or taken is None or node.attributes.get("reduction", "none") not in ("none", "max", "min"):
        return None
    return _any_of(s, kept, taken)


def _filled(s: KnownRanges, node: Node) -> Interval | None:
    value = node.attributes.get("value")
    if value is None:
        return None
    number = Expr.of(int(np.asarray(value).reshape(-1)[0]))
    return number, number


def positions(s: KnownRanges, node: Node) -> Interval | None:
    """The range of the positions that are a TopK's second result."""
    return _along_axis(s, node) if node.op_type == "TopK" and not node.domain else None


def _along_axis(s: KnownRanges, node: Node) -> Interval | None:
    """The range of positions along an axis, or of sums of what is not negative."""
    sums, dims = node.op_type == "CumSum", s.dims(node.inputs[0])
    given = constants(s, node, 1) if sums else [node.attributes.get("axis", -1 if node.op_type == "TopK" else 0)]
    at = given[0] if given else None
    size = dims[at] if dims is not None and isinstance(at, int) and -len(dims) <= at < len(dims) else None
    if size is None or not sums:
        return None if size is None else (Expr.of(0), size - 1)
    each = s.interval(node.inputs[0])
    least = None if each is None else s.bounds(each[0])[0]
    return (Expr.of(0), each[1] * size) if each is not None and least is not None and least >= 0 else None


_Rule = Callable[[KnownRanges, Node], "Interval | None"]
_RULES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "Cast": _cast,
        "Range": _of_all(_range),
        "Add": _of_all(lambda s, a, b: (a[0] + b[0], a[1] + b[1])),
        "Sub": _of_all(lambda s, a, b: (a[0] - b[1], a[1] - b[0])),
        "Mul": _of_all(_product),
        "Mod": _remainder,
        "Neg": _of_all(lambda s, a: (-a[1], -a[0])),
        "Abs": _of_all(_magnitude),
        "Max": _of_all(_extreme_of(True)),
        "Min": _of_all(_extreme_of(False)),
        "Clip": _clipped,
        "Where": _selected,
        "Concat": _of_all(_any_of),
        "ConstantOfShape": _filled,
        **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), _scattered),
        **dict.fromkeys(("ArgMax", "ArgMin", "CumSum"), _along_axis),
    }
)


def _is_of_first(node: Node) -> bool:
    """Whether all elements of a result are the first input's, in the same columns where its last axis is as long."""
    return node.op_type == "Cast" or (traits_of(node).view and node.op_type != "BitCast")


_TAKEN: Final = frozenset(("Compress", "Gather", "GatherElements", "GatherND", "ReverseSequence", "Tile"))
"""Operators whose results are elements of the first input, in other columns."""


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
