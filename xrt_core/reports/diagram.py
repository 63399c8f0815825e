"""A partitioned graph as boxes and edges, and the transfers of values between its spaces."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from xrt_core.errors import printable
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning.report import PartitionReport

HOST: Final = "host"
_SHOWN: Final = 4  # operators named on a cluster's box

Kind = Literal["input", "output", "node", "cluster"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the diagram. label, detail: its two lines of text. space: "host" or an engine. cluster: the name of the
    cluster that it is, or belongs to, "" for none. tip: the tooltip."""

    kind: Kind
    label: str
    detail: str
    space: str
    cluster: str
    tip: str


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one box produces and another reads. source, target: indices of boxes. text: its name and type."""

    source: int
    target: int
    text: str


@dataclass(frozen=True, slots=True)
class Diagram:
    """Boxes in topological order, and edges between them."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of a value. source, target: "host", or a cluster and its engine. bytes: None if unknown."""

    value: str
    type: str
    bytes: int | None
    source: str
    target: str


def diagram(graph: Graph, report: PartitionReport, *, expanded: bool) -> Diagram:
    """Return the diagram of a partitioned graph. report: its partition report, for the reasons of host nodes.

    expanded: a box per node of a cluster; else a box per cluster. Constants are omitted.
    """
    reasons = _Reasons(report)
    boxes: list[Box] = []
    edges: list[Edge] = []
    made: dict[Value, int] = {}

    def add(box: Box, inputs: Sequence[Value | None], outputs: Sequence[Value | None]) -> None:
        index = len(boxes)
        boxes.append(box)
        for v in dict.fromkeys(inputs):
            if v is not None and v in made:
                edges.append(Edge(made[v], index, _described(v)))
        made.update({v: index for v in outputs if v is not None})

    for v in graph.inputs:
        add(Box("input", _name(v) or "input", str(v.type or "?"), HOST, "", _described(v)), (), (v,))
    for n in graph.nodes:
        function = n.attributes.get("function") if _is(n, "Launch") else None
        if traits_of(n).boundary:
            made.update({o: made[i] for i, o in zip(n.inputs, n.outputs, strict=False) if i in made and o is not None})
        elif not isinstance(function, Function):
            tip = f"{n.operator} {_name(n)}\non the host: {reasons.of(n)}"
            add(Box("node", n.operator, _name(n), HOST, "", tip), [*n.inputs, *n.captures], n.outputs)
        elif not expanded:
            add(_cluster_box(function, str(n.attributes["engine"])), n.inputs, n.outputs)
        else:
            body, engine, cluster = function.body, str(n.attributes["engine"]), _name(function)
            made.update({b: made[o] for b, o in zip(body.inputs, n.inputs, strict=False) if o in made})
            for inner in body.nodes:
                tip = f"{inner.operator} {_name(inner)}\n{cluster} on {engine}"
                head = inner.operator
                if _is(inner, "Boxing"):
                    kind, source, target = (str(inner.attributes.get(n) or "") for n in ("kind", "source", "target"))
                    head, tip = kind or head, f"{tip}\n{source} -> {target}"
                add(Box("node", head, _name(inner), engine, cluster, tip), inner.inputs, inner.outputs)
            made.update({o: made[b] for b, o in zip(body.outputs, n.outputs, strict=False) if b in made and o})
    for v in graph.outputs:
        add(Box("output", _name(v) or "output", str(v.type or "?"), HOST, "", _described(v)), (v,), ())
    return Diagram(tuple(boxes), tuple(edges))


def node_count(graph: Graph) -> int:
    """Return the number of nodes of a partitioned graph, nodes inside clusters counted individually."""
    return sum(
        len(f.body.nodes) if isinstance(f := n.attributes.get("function"), Function) else 1
        for n in graph.nodes
        if not traits_of(n).boundary
    )


def transfers(graph: Graph) -> Iterator[Transfer]:
    """Yield every value that a cluster reads from outside or that is read outside it, in the order of its readers."""
    where: dict[Value, str] = dict.fromkeys(graph.inputs, HOST)
    made: dict[Value, Value] = {}  # output of a converter -> its input

    def transfer_of(v: Value, target: str) -> Iterator[Transfer]:
        v = made.get(v, v)
        if v.data is None and (source := where.get(v, HOST)) != target:
            yield Transfer(_name(v), str(v.type or "?"), _bytes(v), source, target)

    for n in graph.nodes:
        if traits_of(n).boundary:
            made.update({o: made.get(i, i) for i, o in zip(n.inputs, n.outputs, strict=False) if i and o})
            continue
        place = _place(n)
        for v in dict.fromkeys(n.inputs):
            if v is not None:
                yield from transfer_of(v, place)
        where.update({v: place for v in n.outputs if v is not None})
    for v in graph.outputs:
        yield from transfer_of(v, HOST)


def _place(node: Node) -> str:
    function = node.attributes.get("function") if _is(node, "Launch") else None
    return f"{_name(function)} ({node.attributes['engine']!s})" if isinstance(function, Function) else HOST


def _cluster_box(function: Function, engine: str) -> Box:
    nodes = function.body.nodes
    counted = Counter(n.operator for n in nodes).most_common()
    said = [f"{o} x{k}" if k > 1 else o for o, k in counted]
    short = ", ".join(said[:_SHOWN]) + (", ..." if len(said) > _SHOWN else "")
    name = _name(function)
    tip = f"{name} on {engine}: {len(nodes)} nodes\n{', '.join(said)}"
    return Box("cluster", f"{name} on {engine}: {len(nodes)} nodes", short, engine, name, tip)


class _Reasons:
    """The reasons of host nodes, looked up by name and operator, in the order of the report."""

    def __init__(self, report: PartitionReport) -> None:
        self._found: dict[tuple[str, str], deque[str]] = {}
        for h in report.host_nodes:
            self._found.setdefault((h.name, h.operator), deque()).append(h.reason)

    def of(self, node: Node) -> str:
        waiting = self._found.get((node.name, node.operator))
        return waiting.popleft() if waiting else "it is no node of the model"


def _is(node: Node, operator: str) -> bool:
    return node.domain == "xrt" and node.op_type == operator


def _described(v: Value) -> str:
    return f"{_name(v)}: {v.type or '?'}"


def _name(named: Value | Node | Function) -> str:
    return printable(named.name, lines=False)


def _bytes(v: Value) -> int | None:
    t = v.type
    if not isinstance(t, TensorType) or t.dtype is None or not t.is_static:
        return None
    return math.prod(d for d in t.shape or () if isinstance(d, int)) * t.dtype.itemsize
