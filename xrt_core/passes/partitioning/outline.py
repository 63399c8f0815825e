"""Outlining: every cluster becomes a Launch node that holds it as a Function; converter nodes mark the transfers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.function import Function, InputOutputAlias, Parameter, launch
from xrt_core.ir.garbage_collection import collector_paused
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Graph, Node, Value, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION
from xrt_core.ir.types import Shape, TensorType
from xrt_core.passes.partitioning.cluster import Cluster, Clustering
from xrt_core.passes.partitioning.contraction import Reads, adjacency, ascending, distinct, reads_of
from xrt_core.passes.partitioning.support import HOST

Elements = Callable[[Value], "Shape | None"]
"""What is known of the elements of a value that holds sizes (`Parameter.elements`)."""


@collector_paused()
def outline(graph: Graph, clustering: Clustering, elements: Elements | None = None) -> Graph:
    """The graph with one `xrt.Launch` in place of each cluster; nodes and values outside are shared, not copied.

    A function's params are the values that it reads from outside, captures of its subgraphs included: graph inputs in
    their order, then others in order of first use. Its returns are graph outputs in their order, then other values that
    are read outside, in order of production; so a graph that is one function is called as it is. Constants stay inside.
    Aliases of nodes become aliases of the function if both ends are at its boundary, the graph does not return
    the old value, and all other readers of the old value can run before the function. The result is in a topological
    order in which they do: each node as early as its inputs, and the readers of what it overwrites, allow; ties in the
    order of the graph. Linear, except for the heap of that order and a search for each function with aliases.

    elements: tells what is known of a value's elements, which goes to the params.

    Raises GraphError for a value at a boundary that is not a tensor of known dtype and shape, and InternalError if
    `clustering` was made for another graph or its clusters form a cycle.
    """
    if clustering.node_count != len(graph.nodes):
        raise InternalError(f"a clustering of {clustering.node_count} nodes for a graph of {len(graph.nodes)} nodes")
    if not clustering.clusters:
        return graph
    assignment = clustering.assignment()
    reads = reads_of(graph)
    outer = _values_read_outside(graph, reads, assignment)
    names = _names(graph, clustering)
    parameters: dict[Value, Parameter] = {}
    ends = tuple({v: i for i, v in enumerate(values)} for values in (graph.inputs, graph.outputs))
    plain = Annotations(device=clustering.clusters[0].device)  # shared by most launches
    units: list[int] = []  # for each its first node
    unit = [0] * len(graph.nodes)
    unit_of_cluster: dict[int, int] = {}
    for i, k in enumerate(assignment):
        if k < 0 or k not in unit_of_cluster:
            unit[i] = len(units)
            units.append(i)
            if k >= 0:
                unit_of_cluster[k] = unit[i]
        else:
            unit[i] = unit_of_cluster[k]
    preserved, before = _overwrites(graph, assignment, reads, unit, len(units))
    nodes = [
        graph.nodes[i]
        if (k := assignment[i]) < 0
        else _launch(graph, clustering.clusters[k], names[k], outer, ends, parameters, plain, preserved, elements)
        for i in units
    ]
    opsets = graph.opsets if DIALECT in graph.opsets else {**graph.opsets, DIALECT: DIALECT_VERSION}
    order = _order(_edges(reads, unit, len(units), before), len(units))
    return graph.replace(nodes=[nodes[u] for u in order], opsets=opsets)


def _overwrites(
    graph: Graph, assignment: Sequence[int], reads: Reads, unit: Sequence[int], count: int
) -> tuple[set[Value], list[tuple[int, int]]]:
    """The values that must not be overwritten, and for the others pairs (reader, writer) of units: their order.

    A function that writes into the storage of a value must run after all units that read it. It must not write if one
    of them depends on the function, or if the graph returns the value.
    """
    writes = [
        (unit[i], v)
        for i, n in enumerate(graph.nodes)
        if n.annotations.aliases and assignment[i] >= 0
        for _, k in n.annotations.aliases
        if (v := n.inputs[k]) is not None
    ]
    returned = set(graph.outputs)
    preserved = {v for _, v in writes if v in returned}
    before: list[tuple[int, int]] = []
    successors: list[set[int]] = []
    for writer, v in writes:
        readers = {unit[i] for i in graph.consumers.get(v, ())} - {writer}
        if not readers or v in preserved:
            continue
        if not successors:
            source, target = _edges(reads, unit, count)
            successors = [set(s) for s in adjacency(source, target, count)]
        if readers & _dependents(successors, writer):
            preserved.add(v)
            continue
        for r in readers:
            successors[r].add(writer)
            before.append((r, writer))
    return preserved, before


def _dependents(successors: Sequence[set[int]], unit: int) -> set[int]:
    """The units that depend on a unit."""
    found: set[int] = set()
    todo = [unit]
    while todo:
        new = successors[todo.pop()] - found
        found |= new
        todo += new
    return found


def _values_read_outside(graph: Graph, reads: Reads, assignment: list[int]) -> set[Value]:
    producers = graph.producers
    cluster = np.asarray(assignment, np.int64)
    made = np.where(reads.producer >= 0, cluster[reads.producer], -1)[reads.value]
    read_outside = distinct(reads.value[(made >= 0) & (made != cluster[reads.reader])])
    return {v for v in graph.outputs if v in producers}.union(reads.values[k] for k in read_outside)


def _names(graph: Graph, clustering: Clustering) -> list[str]:
    taken = {n.name for n in graph.nodes if n.op_type == "Launch" and n.domain == "xrt"}
    count: dict[str, int] = {}
    names = []
    for c in clustering.clusters:
        while True:
            k = count.get(c.engine, 0)
            count[c.engine] = k + 1
            if (name := f"{c.engine.replace('@', '_').replace(':', '')}_{k}") not in taken:
                break
        names.append(name)
    return names


def _launch(
    graph: Graph,
    cluster: Cluster,
    name: str,
    outer: set[Value],
    ends: Sequence[Mapping[Value, int]],
    parameters: dict[Value, Parameter],
    plain: Annotations,
    preserved: set[Value],
    elements: Elements | None,
) -> Node:
    nodes = [graph.nodes[i] for i in cluster.nodes]
    made: dict[Value, None] = {}
    read: dict[Value, None] = {}
    for n in nodes:
        for v in (*n.inputs, *n.captures) if n.attributes else n.inputs:
            if v is not None and v.data is None and v not in made:
                read[v] = None
        for o in n.outputs:
            if o is not None:
                made[o] = None
    inputs, outputs = ends
    entry, exit_ = _sorted(read, inputs), _sorted([v for v in made if v in outer], outputs)
    body = Graph(entry, exit_, nodes, opsets=graph.opsets, name=name)
    aliases = _aliases(nodes, entry, exit_, preserved)
    for v in (*entry, *exit_):  # a value at several boundaries has one Parameter
        t = v.type
        if v.name and v not in parameters and isinstance(t, TensorType) and t.shape is not None and None not in t.shape:
            parameters[v] = Parameter(v.name, t.dtype, t.shape)  # type: ignore[arg-type]
    try:
        function = Function(name, [parameters[v] for v in entry], [parameters[v] for v in exit_], body, aliases)
    except KeyError:  # a value without a name or a known shape: `from_graph` names the former and rejects the latter
        function = Function.from_graph(body, name=name, aliases=aliases)
    known = [] if elements is None else [elements(v) for v in entry]
    if any(known):
        params = [Parameter(p.name, p.dtype, p.dims, e) for p, e in zip(function.params, known, strict=True)]
        function = Function(name, params, function.returns, body, aliases)
    annotations = plain
    if cluster.device != plain.device or cluster.model_update or aliases or not all(_is_plain(n) for n in nodes):
        annotations = Annotations(
            device=cluster.device,
            sbp=_shared_sbp(nodes, len(exit_)),
            placement=nodes[0].annotations.placement,
            model_update=cluster.model_update,
            aliases=tuple((x.output, x.input) for x in function.aliases),
        )
    return launch(function, cluster.engine, entry, exit_, annotations=annotations)


def _sorted(values: Iterable[Value], places: Mapping[Value, int]) -> tuple[Value, ...]:
    """The values that have a place, by that, then the others as they come."""
    return tuple(sorted(values, key=lambda v: places.get(v, len(places))))


def _is_plain(node: Node) -> bool:
    a = node.annotations
    return a is NO_ANNOTATIONS or (a.sbp is None and a.placement is None)


def _shared_sbp(nodes: list[Node], count: int) -> tuple[str, ...] | None:
    """The signature of a launch's `count` outputs, where all outputs of its nodes share one."""
    sbp = nodes[0].annotations.sbp
    return sbp[:1] * count if sbp and len(set(sbp)) == 1 else None


def _aliases(
    nodes: list[Node], params: tuple[Value, ...], returns: tuple[Value, ...], preserved: set[Value]
) -> list[InputOutputAlias]:
    if all(n.annotations is NO_ANNOTATIONS or not n.annotations.aliases for n in nodes):
        return []
    found: list[InputOutputAlias] = []
    entry = {v: i for i, v in enumerate(params)}
    exit_ = {v: i for i, v in enumerate(returns)}
    for n in nodes:
        for o, i in n.annotations.aliases:
            source, target = n.inputs[i], n.outputs[o]
            if source is None or target is None or source not in entry or target not in exit_:
                continue
            if source.type != target.type or source in preserved:
                continue
            found.append(InputOutputAlias(exit_.pop(target), entry.pop(source)))  # each end is in one alias only
    return found


def _edges(
    reads: Reads, unit: Sequence[int], count: int, more: Sequence[tuple[int, int]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Edges between units, ascending: of values, and `more`."""
    place = np.asarray(unit, np.int64)
    source, target = (place[end] for end in reads.edges)
    across = source != target
    extra = np.asarray(more, np.int64).reshape(-1, 2)
    return ascending(np.append(source[across], extra[:, 0]), np.append(target[across], extra[:, 1]), count)


def _order(edges: tuple[np.ndarray, np.ndarray], count: int) -> list[int]:
    source, target = edges
    successors = adjacency(source, target, count)
    waiting = np.bincount(target, minlength=count).tolist()
    ready = [u for u, n in enumerate(waiting) if n == 0]
    heapify(ready)
    order = []
    while ready:
        u = heappop(ready)
        order.append(u)
        for s in successors[u]:
            waiting[s] -= 1
            if waiting[s] == 0:
                heappush(ready, s)
    if len(order) != count:
        raise InternalError("clusters wait for each other: contracting them leaves a cycle")
    return order


# --- transfers ---


def is_converter(node: Node) -> bool:
    """Whether the node is a converter: `EngineInputConvert` or `EngineOutputConvert`."""
    return traits_of(node).boundary


def space_of(node: Node) -> str:
    """The space of a node's values: the engine of a Launch, the host for all other nodes."""
    return str(node.attributes["engine"]) if node.domain == DIALECT and node.op_type == "Launch" else HOST


def insert_converters(graph: Graph, has_converter: Callable[[str, str], bool], mixed: Collection[str] = ()) -> Graph:
    """The graph with a converter wherever a node reads a value of another space.

    has_converter: whether a converter is registered for a pair of spaces: from engine to engine, which then need not go
    through the host, or from an engine to the host, if only that converter can read the engine's arrays.
    mixed: names that stand for several engines, so that two of their launches do not share a space.

        host -> engine      EngineInputConvert(source="host", target=engine)
        engine -> host      EngineOutputConvert(source=engine, target="host")
        engine A -> B       EngineInputConvert(source=A, target=B) where `has_converter(A, B)`, else the two above

    A value is transferred to a space once, right before its first reader there; launches of one engine pass arrays on
    unconverted. Converters that are in the graph already are removed and inserted again where needed, so pairs that
    cancel vanish, and the pass is idempotent.

    Graph outputs stay in their space, since only the caller knows which array library it wants; exceptions: outputs of
    an engine with `has_converter(engine, "host")`, and the repetition of an output that is returned twice, whose
    storage must be distinct.
    """
    if not any(n.domain == DIALECT for n in graph.nodes):
        return graph
    return _Inserter(graph, has_converter, mixed).run()


class _Inserter:
    def __init__(self, graph: Graph, has_converter: Callable[[str, str], bool], mixed: Collection[str]) -> None:
        self.graph = graph
        self.has_converter = has_converter
        self.mixed = mixed
        self.home: dict[Value, str] = {}  # values made in an engine's space -> that engine
        self.plain: dict[Value, Value] = {}  # what a converter of the given graph made -> what it was made of
        self.forms: dict[tuple[Value, str], Value] = {}  # (value, space) -> the value there
        self.nodes: list[Node] = []
        self.names: set[str] = set()

    def run(self) -> Graph:
        graph = self.graph
        for n in graph.nodes:
            if is_converter(n):
                v, made = n.inputs[0], n.outputs[0]
                if v is not None and made is not None:
                    self.plain[made] = self.plain.get(v, v)
            else:
                self.nodes.append(self.in_its_space(n))
        outputs: list[Value] = []
        for v in graph.outputs:
            v = self.plain.get(v, v)
            leaves = v in self.home and (v in outputs or self.has_converter(self.home[v], HOST))
            outputs.append(self.form(v, HOST) if leaves else v)
        opsets = graph.opsets if DIALECT in graph.opsets else {**graph.opsets, DIALECT: DIALECT_VERSION}
        return graph.replace(nodes=self.nodes, outputs=outputs, opsets=opsets)

    def in_its_space(self, node: Node) -> Node:
        """The node, reading each value in its own space; inserts the converters before it."""
        space = space_of(node)
        if space == HOST and not self.home and not self.plain:
            return node
        new: dict[Value, Value] = {}
        for v in node.uses():
            there = self.form(self.plain.get(v, v), space)
            if there is not v:
                new[v] = there
        if space != HOST:
            self.home.update((v, space) for v in node.outputs if v is not None)
        return substitute(node, new) if new else node

    def form(self, v: Value, space: str) -> Value:
        """The value that stands for `v` in `space`."""
        home = self.home.get(v, HOST)
        if home == space and space not in self.mixed:
            return v
        found = self.forms.get((v, space))
        if found is not None:
            return found
        if HOST in (home, space) or (home != space and self.has_converter(home, space)):
            made = self.convert(v, home, space)
        else:
            made = self.convert(self.form(v, HOST), HOST, space)
        self.forms[v, space] = made
        return made

    def convert(self, v: Value, source: str, target: str) -> Value:
        made = Value(self.name(f"{v.name}_on_{target}") if v.name else "", v.type)
        op_type = "EngineOutputConvert" if target == HOST else "EngineInputConvert"
        attributes: Mapping[str, str] = {"source": source, "target": target}
        self.nodes.append(
            Node(op_type, [v], [made], attributes, domain=DIALECT, version=DIALECT_VERSION, name=made.name)
        )
        return made

    def name(self, wanted: str) -> str:
        """`wanted`, with a number appended if the name is taken."""
        if not self.names:
            nodes = [n for n in self.graph.nodes if not is_converter(n)]
            self.names = {n.name for n in nodes}
            self.names.update(v.name for n in nodes for v in n.outputs if v is not None)
            self.names.update(v.name for v in (*self.graph.inputs, *self.graph.constants))
        name, i = wanted, 0
        while name in self.names:
            i += 1
            name = f"{wanted}_{i}"
        self.names.add(name)
        return name
