"""Outlining: every cluster becomes a Launch node that holds its nodes as a Function."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.function import Function, InputOutputAlias, Parameter, launch
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning.cluster import Cluster, Clustering
from xrt_core.passes.partitioning.contraction import Reads, adjacency, ascending, collector_paused, distinct, reads_of

XRT_VERSION = 1


@collector_paused()
def outline(graph: Graph, clustering: Clustering) -> Graph:
    """The graph with one `xrt.Launch` in place of each cluster; nodes and values outside are shared, not copied.

    A function's params are the values that it reads from outside, those that its subgraphs capture included, in order
    of first use; its returns are the values that are read outside or are graph outputs, in order of production.
    Constants stay inside as they are. Aliases of nodes become aliases of the function where both ends are at its
    boundary, and where everything else that reads the old value can run before: not where it waits for the function,
    nor for a value that the graph returns. Nodes of the result stand in a topological order in which it does: each as
    early as its inputs, and what it overwrites, allow, ties in the order of the graph. Linear but for that order's heap
    and a search for each function with aliases.

    Raises GraphError for a value at a boundary that is no tensor of known dtype and shape, and InternalError where
    `clustering` was made for another graph or has clusters that wait for each other.
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
    plain = Annotations(device=clustering.clusters[0].device)  # most launches can share it
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
    spared, before = _overwrites(graph, assignment, reads, unit, len(units))
    nodes = [
        graph.nodes[i]
        if (k := assignment[i]) < 0
        else _launch(graph, clustering.clusters[k], names[k], outer, parameters, plain, spared)
        for i in units
    ]
    opsets = graph.opsets if "xrt" in graph.opsets else {**graph.opsets, "xrt": XRT_VERSION}
    order = _order(_edges(reads, unit, len(units), before), len(units))
    return graph.replace(nodes=[nodes[u] for u in order], opsets=opsets)


def _overwrites(
    graph: Graph, assignment: Sequence[int], reads: Reads, unit: Sequence[int], count: int
) -> tuple[set[Value], list[tuple[int, int]]]:
    """The values whose storage no function may take, and for all others (reader, writer): units in this order.

    A function that writes into the storage of a value runs behind all units that read it. It cannot where one of them
    waits for the function, and must not where the graph returns the value.
    """
    writes = [
        (unit[i], v)
        for i, n in enumerate(graph.nodes)
        if n.annotations.aliases and assignment[i] >= 0
        for _, k in n.annotations.aliases
        if (v := n.inputs[k]) is not None
    ]
    returned = set(graph.outputs)
    spared = {v for _, v in writes if v in returned}
    before: list[tuple[int, int]] = []
    successors: list[set[int]] = []
    for writer, v in writes:
        readers = {unit[i] for i in graph.consumers.get(v, ())} - {writer}
        if not readers or v in spared:
            continue
        if not successors:
            source, target = _edges(reads, unit, count)
            successors = [set(s) for s in adjacency(source, target, count)]
        if readers & _behind(successors, writer):
            spared.add(v)
            continue
        for r in readers:
            successors[r].add(writer)
            before.append((r, writer))
    return spared, before


def _behind(successors: Sequence[set[int]], unit: int) -> set[int]:
    """The units that wait for a unit."""
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
    crossing = distinct(reads.value[(made >= 0) & (made != cluster[reads.reader])])
    return {v for v in graph.outputs if v in producers}.union(reads.values[k] for k in crossing)


def _names(graph: Graph, clustering: Clustering) -> list[str]:
    taken = {n.name for n in graph.nodes if n.op_type == "Launch" and n.domain == "xrt"}
    count: dict[str, int] = {}
    names = []
    for c in clustering.clusters:
        while True:
            k = count.get(c.engine, 0)
            count[c.engine] = k + 1
            if (name := f"{c.engine}_{k}") not in taken:
                break
        names.append(name)
    return names


def _launch(
    graph: Graph,
    cluster: Cluster,
    name: str,
    outer: set[Value],
    parameters: dict[Value, Parameter],
    plain: Annotations,
    spared: set[Value],
) -> Node:
    nodes = [graph.nodes[i] for i in cluster.nodes]
    made: dict[Value, None] = {}
    read: dict[Value, None] = {}
    for n in nodes:
        for v in n.uses():
            if v.data is None and v not in made:
                read[v] = None
        for o in n.outputs:
            if o is not None:
                made[o] = None
    entry, exit_ = tuple(read), tuple(v for v in made if v in outer)
    body = Graph(entry, exit_, nodes, opsets=graph.opsets, name=name)
    aliases = _aliases(nodes, entry, exit_, spared)
    for v in (*entry, *exit_):  # what one function returns others read: one Parameter serves them all
        t = v.type
        if v.name and v not in parameters and isinstance(t, TensorType) and t.is_static:
            parameters[v] = Parameter(v.name, t.dtype, t.shape)  # type: ignore[arg-type]
    try:
        function = Function(name, [parameters[v] for v in entry], [parameters[v] for v in exit_], body, aliases)
    except KeyError:  # a value without a name or a static type: this names the one and refuses the other
        function = Function.from_graph(body, name=name, aliases=aliases)
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


def _is_plain(node: Node) -> bool:
    a = node.annotations
    return a is NO_ANNOTATIONS or (a.sbp is None and a.placement is None)


def _shared_sbp(nodes: list[Node], count: int) -> tuple[str, ...] | None:
    """The signature of a launch's `count` outputs, where all outputs of its nodes share one."""
    sbp = nodes[0].annotations.sbp
    return sbp[:1] * count if sbp and len(set(sbp)) == 1 else None


def _aliases(
    nodes: list[Node], params: tuple[Value, ...], returns: tuple[Value, ...], spared: set[Value]
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
            if source.type != target.type or source in spared:
                continue
            found.append(InputOutputAlias(exit_.pop(target), entry.pop(source)))  # an end is in one alias only
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
