"""Properties of a graph by their definitions, which tests check algorithms against."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from xrt_core.ir.dag import leaving_nodes
from xrt_core.ir.graph import Graph


def is_sorted(graph: Graph) -> bool:
    """Whether every node stands after the nodes it depends on."""
    return all(p < i for i, preds in enumerate(graph.predecessors) for p in preds)


def _flood(adjacency: Sequence[Sequence[int]], seeds: Iterable[int]) -> set[int]:
    seen: set[int] = set()
    todo = list(seeds)
    while todo:
        for j in adjacency[todo.pop()]:
            if j not in seen:
                seen.add(j)
                todo.append(j)
    return seen


def ancestors(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """Indices of the nodes from which a path of at least one edge leads to one of `nodes`."""
    return _flood(graph.predecessors, nodes)


def descendants(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """Indices of the nodes to which a path of at least one edge leads from one of `nodes`."""
    return _flood(graph.successors, nodes)


def is_convex(graph: Graph, nodes: Collection[int]) -> bool:
    """Whether no path leaves the set of nodes and comes back to it.

    Linear in the nodes between the first and the last of the set.
    """
    return not leaving_nodes(graph, nodes)
