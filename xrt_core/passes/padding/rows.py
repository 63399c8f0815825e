"""Rows that do not mix: a symbol along which a graph may be divided, so that parts give what the whole would.

The graph is padded with a symbol for the number of rows that is never padded: it may be part of sizes, as a factor,
but nothing reads it. Then that form is walked for two numbers of rows, node by node. Where shapes differ, there the
rows lie; each operator must be able to run on a part of them (`passes.sharding.rules`: what devices may have parts of,
without a collective). Of which row is which only the place among all may be read, to look up what belongs to the same
row (`mask[arange(batch), ...]`, as exporters write masks). Then the results of all rows are those of parts, one behind
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import draws_random
from xrt_core.ir.sharding import B, Sbp
from xrt_core.ir.symbols import Expr, expression
from xrt_core.ir.types import Dim
from xrt_core.passes.padding.form import ROWS, PaddedGraph, PaddingRefused
from xrt_core.passes.padding.operands import number
from xrt_core.passes.padding.rules import apply_rule
from xrt_core.passes.padding.walk import Body, Padder
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.passes.sharding.rules import ways

RUN_FLOPS: Final = 5e6
"""What could be computed while one more run is begun and its results are put beside the others': about 0.1 ms."""
BYTE_FLOPS: Final = 8.0
"""What could be computed while a byte of weights comes from memory."""
OVERHEAD: Final = 0.125
"""The share of a run that beginning it, and reading the weights again, may take."""

_ALL: Final = frozenset({-1})
"""All elements of a value, where others are columns of its last axis."""
_COUNTS: Final = (np.dtype(np.int32), np.dtype(np.int64))
"""What holds the number of any row."""
_MOVES: Final = {"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators behind which a row's number is still one."""
_SHAPE_OPERANDS: Final = {("Reshape", 1), ("Expand", 1), ("ConstantOfShape", 0)}


@dataclass(frozen=True, slots=True)
class Rows:
    """That the rows of a graph do not mix.

    symbol: their number. inputs, outputs: the axis of each along which its rows lie; None for what is the same for all.
    flops: of one row, for other symbols at `sizes`. least: of a run that is worth its beginning.
    """

    symbol: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    flops: float
    least: float
    sizes: Mapping[str, int]

    def worth(self, sizes: Mapping[str, int]) -> int:
        """How many rows a run should have at least, for these sizes of the other symbols: a power of two."""
        scale = math.prod(n / self.sizes[s] for s, n in sizes.items() if s != self.symbol)
        rows = self.least / max(self.flops * scale, 1.0)
        return 1 << max(0, math.ceil(math.log2(max(rows, 1.0))))

    def part(self, arrays: Sequence[np.ndarray], start: int, rows: int) -> list[np.ndarray]:
        """The arguments with so many rows from `start` on; behind the last one, that again."""
        found = []
        for a, axis in zip(arrays, self.inputs, strict=True):
            if axis is not None:
                before: tuple[slice, ...] = (slice(None),) * axis
                last = a[(*before, slice(-1, None))]
                a = a[(*before, slice(start, start + rows))]
                if a.shape[axis] < rows:
                    a = np.concatenate([a, *[last] * (rows - a.shape[axis])], axis)
            found.append(a)
        return found

    def joined(self, parts: Sequence[Sequence[np.ndarray]], count: int, rows: int) -> list[np.ndarray]:
        """The results of `count` rows in all, for those of parts of so many rows."""
        found, last = [], count - (len(parts) - 1) * rows
        for k, axis in enumerate(self.outputs):
            each = [p[k] for p in parts]
            if axis is None:
                found.append(each[0])
                continue
            if last < rows:
                wanted = each[-1].shape[axis] // rows * last
                each[-1] = each[-1][(*(slice(None),) * axis, slice(wanted))]
            found.append(each[0] if len(each) == 1 and last == rows else np.concatenate(each, axis))
        return found


def divided(
    graph: Graph,
    shapes: Sequence[Sequence[Dim] | None],
    sizes: Mapping[str, int],
    symbol: str,
    rows: int,
    body_of: Body | None = None,
) -> tuple[PaddedGraph, Rows]:
    """The padded form of a graph for so many rows, which `symbol` counts, and that they do not mix.

    shapes, body_of: as of `pad_graph`. sizes: of the other symbols. Raises PaddingRefused where rows might mix, naming
    the node.
    """
    inputs = tuple(_own_axis(s or (), symbol) for s in shapes)
    few, many = (
        Padder(graph, _with_rows(shapes, symbol), sizes, True, n, body_of).run(apply_rule) for n in (rows, rows + 2)
    )  # fmt: skip
    outputs = _Walk(few, many, rows + 2).run(inputs)
    if all(a is None for a in outputs):
        raise PaddingRefused(f"no result has rows ({symbol})")
    needed = _needed(few.graph)  # what no result needs was not looked at, and might fail for parts
    nodes = [n for n in few.graph.nodes if any(v in needed for v in n.outputs)]
    few = replace(few, graph=few.graph.replace(nodes=nodes))
    one = sum(map(flops, nodes)) / rows
    least = (RUN_FLOPS + BYTE_FLOPS * _weights(few.graph)) / OVERHEAD
    return few, Rows(symbol, inputs, outputs, one, least, dict(sizes))


def _with_rows(shapes: Sequence[Sequence[Dim] | None], symbol: str) -> list[tuple[Dim, ...] | None]:
    """The shapes with the symbol for rows in the place of their own."""
    found: list[tuple[Dim, ...] | None] = []
    for shape in shapes:
        exprs = None if shape is None else [expression(d) for d in shape]
        found.append(
            None
            if exprs is None
            else tuple(None if e is None else e.substitute({symbol: Expr.of(ROWS)}).dim for e in exprs)
        )
    return found


def _own_axis(shape: Sequence[Dim], symbol: str) -> int | None:
    """The axis of an input along which its rows lie. Raises PaddingRefused where they do not lie so."""
    found = [i for i, d in enumerate(shape) if (e := expression(d)) is not None and symbol in e.symbols]
    if len(found) > 1 or any(expression(shape[i]) != Expr.of(symbol) for i in found):
        raise PaddingRefused(f"an input of shape {list(shape)}, where {symbol} is no number of rows along one axis")
    return found[0] if found else None


def _weights(graph: Graph) -> int:
    """The bytes of constants that a run reads: of a table that is looked up in, next to nothing."""
    tables = {n.inputs[0] for n in graph.nodes if n.op_type in ("Gather", "GatherND", "GatherElements")}
    return sum(v.data.nbytes for v in graph.constants if v.data is not None and v not in tables)


class _Walk:
    """Where the rows of each value of the second form, of `count` rows, lie: an axis, or None for what is the same for
    all rows. numbers: in which columns of the last axis a value has but the number of the row, from 0."""

    def __init__(self, few: PaddedGraph, many: PaddedGraph, count: int) -> None:
        self.few, self.many, self.count = few.graph, many.graph, count
        self.rows: dict[Value, int | None] = {}
        self.numbers: dict[Value, frozenset[int]] = {}

    def run(self, inputs: Sequence[int | None]) -> tuple[int | None, ...]:
        """The axes of the results, for those of the inputs. Raises PaddingRefused."""
        few, many = self.few, self.many
        given = [*inputs, *[None] * (len(many.inputs) - len(inputs))]  # valid sizes of other symbols
        for a, b, axis in zip(few.inputs, many.inputs, given, strict=True):
            self.keep(a, b, axis, None)
        if len(few.nodes) != len(many.nodes):
            raise PaddingRefused("the graph is another one for another number of rows")
        needed = _needed(many)
        for m, n in zip(few.nodes, many.nodes, strict=True):
            if any(v in needed for v in n.outputs):
                self.node(m, n)
        if any(v in self.numbers for v in many.outputs):
            raise PaddingRefused("a result tells which row is which")
        return tuple(
            self.operand(None, k, a, b).axis for k, (a, b) in enumerate(zip(few.outputs, many.outputs, strict=True))
        )

    def node(self, m: Node, n: Node) -> None:
        """Find where the rows of a node's results lie."""
        if m.op_type != n.op_type or n.subgraphs or len(m.inputs) != len(n.inputs):
            raise self.refused(n, "it has bodies, or is another one for another number of rows")
        if draws_random(n):
            raise self.refused(n, "parts would draw other random numbers than the whole")
        if n.op_type == "ScatterND":  # its indices count rows from the first
            raise self.refused(n, "rows might mix in it")
        given = tuple(self.operand(n, k, a, b) for k, (a, b) in enumerate(zip(m.inputs, n.inputs, strict=True)))
        numbered = {k: self.numbers[v] for k, v in enumerate(n.inputs) if v is not None and v in self.numbers}
        if numbered:
            self.with_numbers(m, n, given, numbered)
            return
        if all(g.is_broadcast for g in given):
            for a, b in zip(m.outputs, n.outputs, strict=True):
                if a is not None and b is not None:
                    self.keep(a, b, self.repeated(n, a, b), n)
            return
        self.keep_apart(m, n, given)

    def keep_apart(self, m: Node, n: Node, given: tuple[Sbp, ...]) -> None:
        """Note where the rows of a node's results lie, where it computes each from the same row of its operands."""
        for way in ways(n)[0]:
            if way.inputs == given and not any(s.reduce for s in way.outputs):
                for a, b, s in zip(m.outputs, n.outputs, way.outputs, strict=True):
                    if a is not None and b is not None:
                        self.keep(a, b, s.axis, n)
                return
        raise self.refused(n, "rows might mix in it")

    def with_numbers(self, m: Node, n: Node, given: tuple[Sbp, ...], numbered: Mapping[int, frozenset[int]]) -> None:
        """As `node`, where operands have the numbers of rows: they are moved, or what they point to is looked up."""
        made = n.outputs[0]
        assert made is not None
        rank = len(made.shape or ())
        if n.op_type in _MOVES and numbered == {0: _ALL} and made.dtype in _COUNTS:
            self.keep_apart(m, n, given)
            self.numbers[made] = _ALL
            return
        if n.op_type == "Concat" and set(numbered.values()) == {_ALL}:
            self.keep_apart(m, n, given)
            if number(n, "axis", 0) % rank == rank - 1 and self.rows[made] != rank - 1:
                widths = [int((v.shape or (0,))[-1]) for v in n.inputs if v is not None]  # type: ignore[arg-type]
                starts = [sum(widths[:k]) for k in numbered]
                self.numbers[made] = frozenset(
                    c for k, i in zip(numbered, starts, strict=True) for c in range(i, i + widths[k])
                )
                return
        if n.op_type in ("Gather", "GatherND") and list(numbered) == [1] and not n.attributes.get("batch_dims", 0):
            looked_up, at = given[0].axis, given[1].axis
            data = n.inputs[0]
            assert data is not None
            shape = data.shape or (0,)
            axis = number(n, "axis", 0) % len(shape)
            columns = _ALL if n.op_type == "Gather" else frozenset({looked_up})
            is_own = n.op_type == "GatherND" or looked_up == axis
            assert at is not None
            is_row = looked_up is not None and shape[looked_up] == self.count  # not merged with another size
            if is_row and is_own and numbered[1] == columns:
                few = m.outputs[0]
                assert few is not None
                self.keep(few, made, at + (axis if n.op_type == "Gather" else 0), n)
                return
        raise self.refused(n, "it reads which row is which")

    def operand(self, n: Node | None, k: int, few: Value | None, many: Value | None) -> Sbp:
        """How an operand of a node, or a result of the graph, lies."""
        if few is None or many is None:
            return B
        if many.data is None:
            axis = self.rows[many]
            return B if axis is None else Sbp(axis)
        if few is many or (n is not None and (n.op_type, k) in _SHAPE_OPERANDS):
            return B
        assert few.data is not None
        axis = _numbered(few.data, many.data)
        if axis is not None:
            self.numbers[many] = _ALL
            return Sbp(axis)
        if few.data.shape != many.data.shape or few.data.tobytes() != many.data.tobytes():
            raise self.refused(n, "it reads how many rows there are, or which is which")
        return B

    def repeated(self, n: Node, few: Value, many: Value) -> int | None:
        """The axis along which what is the same for all rows is repeated for each."""
        differ = _differ(few, many)
        if not differ:
            return None
        if len(differ) == 1 and n.op_type == "ConstantOfShape":
            return differ[0]
        if len(differ) == 1 and n.op_type == "Expand" and n.inputs[0] is not None:
            shape = n.inputs[0].shape or ()
            own = differ[0] - len(many.shape or ()) + len(shape)
            if own < 0 or shape[own] == 1:
                return differ[0]
        raise self.refused(n, "its result is another one for another number of rows")

    def keep(self, few: Value, many: Value, axis: int | None, n: Node | None) -> None:
        """Note where the rows of a value lie, which must be where its shapes differ."""
        if _differ(few, many) != ([] if axis is None else [axis]):
            raise self.refused(n, f"the rows of {many.name!r} lie elsewhere")
        self.rows[many] = axis

    @staticmethod
    def refused(n: Node | None, reason: str) -> PaddingRefused:
        if n is None:
            return PaddingRefused(reason)
        label = n.name or next((v.name for v in n.outputs if v is not None and v.name), "")
        return PaddingRefused(f"{n.operator} {label!r}: {reason}")


def _differ(few: Value, many: Value) -> list[int]:
    """The axes whose sizes depend on the number of rows; [-1] where that cannot be told."""
    a, b = few.shape, many.shape
    if a is None or b is None or len(a) != len(b) or not (few.is_static and many.is_static):
        return [-1]
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]


def _numbered(few: np.ndarray, many: np.ndarray) -> int | None:
    """The axis along which these constants have the numbers 0, 1, 2, ... of few and of many rows, all alike but for
    that."""
    if many.dtype.kind not in "iu" or few.ndim != many.ndim:
        return None
    differ = [i for i, (x, y) in enumerate(zip(few.shape, many.shape, strict=True)) if x != y]
    if len(differ) != 1:
        return None
    for data in (few, many):
        n = data.shape[differ[0]]
        if not np.array_equal(
            data, np.broadcast_to(np.arange(n).reshape(-1, *(1,) * (data.ndim - 1 - differ[0])), data.shape)
        ):
            return None
    return differ[0]


def _needed(graph: Graph) -> set[Value]:
    """The values that results depend on."""
    found = set(graph.outputs)
    for n in reversed(graph.nodes):
        if any(v in found for v in n.outputs):
            found.update(n.uses())
    return found
