"""Subgraph extraction: nodes of a Function as Functions, convex partitions, and runs piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.host.place import HostPlace
from xrt_core.ir.dag import sort_indices
from xrt_core.ir.function import Function, InputOutputAlias
from xrt_core.ir.graph import Graph, Node, Value

Run = Callable[[Sequence[Any]], Sequence[Any]]
_ON_CPU: Final = HostPlace()
Nodes = tuple[int, ...]
"""Indices into `function.body.nodes`, ascending."""


def subfunction(function: Function, nodes: Sequence[int], name: str = "") -> Function:
    """Nodes of a function as a Function. Its params are the values read from outside, in order of first use; its
    returns those that are read outside or returned, in order of production.

    An alias is kept if both its ends are at the new boundary and nothing else reads the param. All nodes give the
    function itself. Raises GraphError for no nodes.
    """
    body = function.body
    inside = set(nodes)
    if not inside:
        raise GraphError(f"function {function.name!r}: a part without nodes")
    if len(inside) == len(body.nodes):
        return function
    chosen = [body.nodes[i] for i in sorted(inside)]
    producers, consumers, returned = body.producers, body.consumers, set(body.outputs)
    read = dict.fromkeys(v for n in chosen for v in n.uses() if v.data is None and producers.get(v) not in inside)
    entry = tuple(read)
    exit_ = tuple(
        v
        for n in chosen
        for v in n.outputs
        if v is not None and (v in returned or any(u not in inside for u in consumers.get(v, ())))
    )
    places = {v: i for i, v in enumerate(exit_)}
    aliases = []
    for a in function.aliases:
        source, target = body.inputs[a.input], body.outputs[a.output]
        if source in read and target in places and all(u in inside for u in consumers[source]):
            aliases.append(InputOutputAlias(places[target], entry.index(source)))
    label = name or f"{function.name}.{min(inside)}_{max(inside)}"
    part = Graph(entry, exit_, chosen, opsets=body.opsets, name=label)
    return Function.from_graph(part, name=label, aliases=aliases, open_entries=function.is_open_within)


def disjoint_union(function: Function, parts: Iterable[Sequence[int]]) -> tuple[Function, list[Value], list[Nodes]]:
    """The disjoint union of parts of a function, each as its `subfunction`: a Function in which each has params and
    returns of its own.

    Returns it, for each of its params the value of `function` that it stands for, and for each part, in the given
    order, the indices of its returns. As no two parts are connected, a compiler can neither fuse nor merge them, and
    one compilation tests every part. Values that attribute graphs capture are not renamed.
    """
    entry: list[Value] = []
    meant: list[Value] = []
    made: list[Node] = []
    exit_: list[Value] = []
    places: list[Nodes] = []
    for nodes in parts:
        part = subfunction(function, nodes).body
        own = {v: Value(f"p{len(entry) + k}", v.type) for k, v in enumerate(part.inputs)}
        entry += own.values()
        meant += part.inputs
        for node in part.nodes:
            own |= {v: Value(f"r{len(made)}_{k}", v.type) for k, v in enumerate(node.outputs) if v is not None}
            made.append(
                node.replace(
                    inputs=[None if v is None else own.get(v, v) for v in node.inputs],
                    outputs=[None if v is None else own[v] for v in node.outputs],
                )
            )
        places.append(tuple(range(len(exit_), len(exit_) + len(part.outputs))))
        exit_ += [own[v] for v in part.outputs]
    name = f"{function.name}.parts"
    graph = Graph(entry, exit_, made, opsets=function.body.opsets, name=name)
    return Function.from_graph(graph, name=name, open_entries=function.is_open_within), meant, places


def cut_after(graph: Graph, marked: Collection[int]) -> list[Nodes]:
    """Partition nodes into convex sets, none of which has a marked node and another that depends on it.

    A node is in the set of the earliest node that reads its results, so that what is computed from constants alone
    stays with its reader. A set has the nodes with the same largest number of marked nodes on a path from them, which
    never grows along a path. Linear in nodes and edges.
    """
    level = [0] * len(graph.nodes)
    found: dict[int, list[int]] = {}
    for i in range(len(graph.nodes) - 1, -1, -1):
        level[i] += i in marked
        found.setdefault(level[i], []).append(i)
        for p in graph.predecessors[i]:
            level[p] = max(level[p], level[i])
    return [tuple(reversed(found[k])) for k in sorted(found, reverse=True)]


def convex_partition(
    graph: Graph, evicted: Collection[int], cuts: Iterable[int] = ()
) -> tuple[list[Nodes], list[Nodes]]:
    """Partition nodes into the minimum number of convex sets such that the quotient graph is acyclic, `evicted` nodes
    kept apart. Returns the sets of other nodes, and those of evicted ones.

    cuts: indices at which sets are cut as well: none has nodes on both sides of one. A set has the nodes with the same
    largest number of transitions into evicted nodes on a path to them: a path between two of them through an evicted
    node would raise the number, so each set is convex, and the longest path needs that many sets, so there are no
    fewer. Linear in nodes and edges.
    """
    apart = set(evicted)
    level = [0] * len(graph.nodes)
    for i, preds in enumerate(graph.predecessors):
        if i in apart:
            level[i] = max((level[p] for p in preds), default=-1)
        else:
            level[i] = max((level[p] + (p in apart) for p in preds), default=0)
    marks = sorted(set(cuts))
    stay: dict[tuple[int, int], list[int]] = {}
    leave: dict[int, list[int]] = {}
    for i, k in enumerate(level):
        if i in apart:
            leave.setdefault(k, []).append(i)
        else:
            stay.setdefault((k, sum(m <= i for m in marks)), []).append(i)
    return [tuple(x) for _, x in sorted(stay.items())], [tuple(x) for _, x in sorted(leave.items())]


def topological_order(graph: Graph, pieces: Sequence[Sequence[int]]) -> list[int]:
    """Indices of the pieces in topological order. pieces: cover all nodes. Raises GraphError for a cycle."""
    owner = {i: k for k, nodes in enumerate(pieces) for i in nodes}
    before = [sorted({owner[p] for i in nodes for p in graph.predecessors[i]} - {k}) for k, nodes in enumerate(pieces)]
    return sort_indices(before, lambda k: f"piece {k} ({len(pieces[k])} nodes)")


def run_pieces(
    function: Function, pieces: Sequence[Sequence[int]], runs: Sequence[Run | None], place: HostPlace = _ON_CPU
) -> Callable[[Sequence[Any]], list[Any]]:
    """A callable that computes `function` piece by piece. runs: computes the `subfunction` of each piece, None for the
    host. place: where the host computes; arrays go from piece to piece as the host's."""
    body, to_host = function.body, place.to_host
    steps: list[tuple[Run, tuple[Value, ...], tuple[Value, ...]]] = []
    for k in topological_order(body, pieces):
        run = runs[k]
        if run is not None:
            part = subfunction(function, pieces[k]).body
            steps.append((run, part.inputs, part.outputs))
        else:
            for i in pieces[k]:
                n = body.nodes[i]
                own: Any = place.lower(n).call
                steps.append((own, (*n.inputs, *n.captures), n.outputs))  # type: ignore[arg-type]  # None: left out

    def call(inputs: Sequence[Any]) -> list[Any]:
        env: dict[Value | None, Any] = dict(zip(body.inputs, inputs, strict=True))
        with np.errstate(all="ignore"), place.within():
            for run, entry, exit_ in steps:
                given = [v.data if v is not None and v.data is not None else env.get(v) for v in entry]
                env.update(zip(exit_, (to_host(r) for r in run(given)), strict=False))
        return [v.data if v.data is not None else env[v] for v in body.outputs]

    return call
