"""A partitioned graph as boxes and edges, their groups, and the transfers of values between its spaces."""

from __future__ import annotations

import math
import textwrap
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from xrt_core.errors import printable
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning.report import PartitionReport

HOST: Final = "host"
_SHOWN: Final = 26  # characters of the operators on the box of a group
Kind = Literal["input", "output", "node", "cluster"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the diagram. label, detail: its two lines of text. space: "host" or an engine. cluster: the name of the
    cluster that it is, or belongs to, "" for none. tip: what it is, line by line.

    A box of the kind "cluster" stands for several nodes: of a cluster, or of a chain of host nodes."""

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


@dataclass(frozen=True, slots=True)
class Groups:
    """A diagram whose clusters, and whose chains of host nodes, are one box each.

    members: for each box the indices of its boxes in the diagram that was grouped; a single one for what is no group.
    """

    diagram: Diagram
    members: tuple[tuple[int, ...], ...]


def diagram(graph: Graph, report: PartitionReport) -> Diagram:
    """Return the diagram of a partitioned graph, with a box per node, those of clusters too. Constants are omitted.

    report: its partition report, for the reasons of host nodes.
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


def groups(drawn: Diagram) -> Groups:
    """Return a diagram with a box per cluster, and per chain of host nodes each of which only the next one reads.

    Boxes of one cluster are neighbours in `drawn`, so the first ones of the groups are in topological order.
    """
    sources: dict[int, set[int]] = {}
    targets: dict[int, set[int]] = {}
    for e in drawn.edges:
        sources.setdefault(e.target, set()).add(e.source)
        targets.setdefault(e.source, set()).add(e.target)
    members: list[list[int]] = []
    group: list[int] = []

    def follows(i: int) -> int | None:
        """The group that box i is a part of, if not of one of its own."""
        box, last = drawn.boxes[i], drawn.boxes[i - 1] if i else None
        if box.cluster:
            return group[i - 1] if last is not None and last.cluster == box.cluster else None
        if box.kind != "node" or len(before := sources.get(i, set())) != 1:
            return None
        (j,) = before
        alone = drawn.boxes[j].kind == "node" and not drawn.boxes[j].cluster and targets[j] == {i}
        return group[j] if alone else None

    for i in range(len(drawn.boxes)):
        found = follows(i)
        if found is None:
            found = len(members)
            members.append([])
        members[found].append(i)
        group.append(found)
    boxes = [_group_box([drawn.boxes[i] for i in inner]) for inner in members]
    joined: dict[tuple[int, int], list[str]] = {}
    for e in drawn.edges:
        if group[e.source] != group[e.target]:
            said = joined.setdefault((group[e.target], group[e.source]), [])
            if e.text not in said:
                said.append(e.text)
    edges = (Edge(source, target, "\n".join(said)) for (target, source), said in sorted(joined.items()))
    return Groups(Diagram(tuple(boxes), tuple(edges)), tuple(map(tuple, members)))


def parts(drawn: Diagram, members: Iterable[Sequence[int]]) -> Iterator[tuple[Diagram, tuple[int, ...]]]:
    """Yield for each sorted selection of boxes the diagram of these and of those that they exchange values with, and
    for each box of it its index in `drawn`."""
    edges_of: dict[int, list[int]] = {}
    for k, e in enumerate(drawn.edges):
        edges_of.setdefault(e.source, []).append(k)
        edges_of.setdefault(e.target, []).append(k)
    for chosen in members:
        edges = [drawn.edges[k] for k in sorted({k for i in chosen for k in edges_of.get(i, ())})]
        indices = tuple(sorted({*chosen, *(i for e in edges for i in (e.source, e.target))}))
        renumbered = {i: k for k, i in enumerate(indices)}
        kept = tuple(Edge(renumbered[e.source], renumbered[e.target], e.text) for e in edges)
        yield Diagram(tuple(drawn.boxes[i] for i in indices), kept), indices


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


def _group_box(boxes: Sequence[Box]) -> Box:
    """The box of a cluster or of a chain of host nodes; a host node, an input or an output alone is itself."""
    first = boxes[0]
    if not first.cluster and len(boxes) == 1:
        return first
    counted = Counter(b.label for b in boxes).most_common()
    said = ", ".join(f"{o} x{k}" if k > 1 else o for o, k in counted)
    short = textwrap.shorten(said, _SHOWN, placeholder=" ...")
    count = f"{len(boxes)} node{'s' if len(boxes) > 1 else ''}"
    if first.cluster:
        tip = f"{first.cluster} on {first.space}: {count}\n{said}"
        return Box("cluster", f"{first.cluster}: {count}", short, first.space, first.cluster, tip)
    return Box("cluster", f"{count} on the host", short, HOST, "", "\n".join(b.tip for b in boxes))


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
