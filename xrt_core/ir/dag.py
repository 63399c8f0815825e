"""Algorithms on a directed acyclic graph, over the integer adjacency that a Graph keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from xrt_core.errors import GraphError
from xrt_core.ir.graph import Graph, Node, Value


def topological_sort(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes with every producer before its consumers; what is in order already keeps its place.

    A value that none of the nodes makes counts as given. Linear in nodes and edges. Raises GraphError for a cycle,
    naming its nodes, and for a value that two nodes make.
    """
    listed = tuple(nodes)
    producer: dict[Value, int] = {}
    for i, n in enumerate(listed):
        for v in n.outputs:
            if v is None:
                continue
            if v in producer:
                raise GraphError(f"value {v.name!r} is made twice: by {listed[producer[v]]!r} and by {n!r}")
            producer[v] = i
    get = producer.get
    order = sort_indices(
        [[p for v in n.uses() if (p := get(v)) is not None] for n in listed],
        lambda i: listed[i].name or listed[i].operator,
    )
    return tuple(listed[i] for i in order)


def sort_indices(predecessors: Sequence[Iterable[int]], label: Callable[[int], str]) -> list[int]:
    """Indices 0..n-1 in an order where each follows its predecessors, as near to ascending as that allows.

    Raises GraphError for a cycle, with `label` of each index on it.
    """
    count = len(predecessors)
    state = bytearray(count)  # 0: not seen, 1: on the stack, 2: placed
    order: list[int] = []
    for root in range(count):
        if state[root]:
            continue
        state[root] = 1
        stack: list[tuple[int, Iterator[int]]] = [(root, iter(predecessors[root]))]
        while stack:
            i, rest = stack[-1]
            for p in rest:
                if state[p] == 0:
                    state[p] = 1
                    stack.append((p, iter(predecessors[p])))
                    break
                if state[p] == 1:
                    path = [j for j, _ in stack]
                    cycle = path[path.index(p) :][::-1]
                    shown = [label(j) for j in (cycle if len(cycle) <= 12 else [*cycle[:11], cycle[-1]])]
                    raise GraphError(
                        f"the graph has a cycle of {len(cycle)} nodes: {' -> '.join([*shown, shown[0]])}; "
                        f"a graph must be acyclic"
                    )
            else:
                state[i] = 2
                order.append(i)
                stack.pop()
    return order


def reaches(graph: Graph, source: int, target: int) -> bool:
    """Whether a path of at least one edge leads from node `source` to node `target`.

    Only nodes between the two in the topological order are looked at.
    """
    if source >= target:
        return False
    predecessors = graph.predecessors
    seen = {target}
    todo = [target]
    while todo:
        for p in predecessors[todo.pop()]:
            if p == source:
                return True
            if p > source and p not in seen:
                seen.add(p)
                todo.append(p)
    return False


def leaving_nodes(graph: Graph, nodes: Collection[int]) -> list[int]:
    """Indices outside the set that lie on a path from it back into it, ascending; empty where it is convex."""
    if not nodes:
        return []
    inside = set(nodes)
    first, last = min(inside), max(inside)
    predecessors, successors = graph.predecessors, graph.successors
    below: set[int] = set()  # outside nodes that depend on the set
    for i in range(first + 1, last):
        if i not in inside and any(p in inside or p in below for p in predecessors[i]):
            below.add(i)
    above: set[int] = set()  # those of them on which the set depends
    for i in sorted(below, reverse=True):
        if any(s in inside or s in above for s in successors[i]):
            above.add(i)
    return sorted(above)
