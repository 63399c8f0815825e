"""Contraction: a graph seen as units, each a node or a group of nodes, numbered in a topological order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.graph import Graph


class Contraction:
    """Units and the edges between them; unit numbers ascend along every edge.

    sizes: nodes in each unit.
    successors, predecessors: unit -> the units next to it, each once, ascending.
    edges: the same edges as two int64 arrays, sources and targets.
    """

    __slots__ = ("edges", "predecessors", "sizes", "successors")

    def __init__(self, sizes: list[int], edges: tuple[np.ndarray, np.ndarray]) -> None:
        self.sizes = sizes
        self.edges = edges
        self.successors = adjacency(edges[0], edges[1], len(sizes))
        self.predecessors = adjacency(edges[1], edges[0], len(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of_graph(cls, graph: Graph) -> Contraction:
        """Every node a unit of its own, numbered as the graph's nodes."""
        source, target = edges_of(graph)
        if np.any(source >= target):
            raise InternalError("clustering was given a graph whose nodes are not in topological order")
        return cls([1] * len(graph.nodes), (source, target))

    def on_cycles(self, label: Sequence[int]) -> set[int]:
        """The labels that `merge` could not make units of, as they would wait for each other, and those between them.

        Linear: what waits for nothing is peeled off again and again, from both ends.
        """
        group = np.asarray(label, np.int64)
        source, target = group[self.edges[0]], group[self.edges[1]]
        across = source != target
        pairs = set(zip(source[across].tolist(), target[across].tolist(), strict=True))
        left = {end for pair in pairs for end in pair}
        for forward in (True, False):
            waiting = dict.fromkeys(left, 0)
            after: dict[int, list[int]] = {}
            for a, b in pairs:
                if a in left and b in left:
                    first, then = (a, b) if forward else (b, a)
                    waiting[then] += 1
                    after.setdefault(first, []).append(then)
            ready = [u for u, n in waiting.items() if n == 0]
            for u in ready:  # grows while it is walked
                for then in after.get(u, ()):
                    waiting[then] -= 1
                    if waiting[then] == 0:
                        ready.append(then)
            left.difference_update(ready)
        return left

    def merge(self, label: Sequence[int]) -> tuple[Contraction, list[int]]:
        """The contraction in which units of one label are one unit, and old unit -> new unit.

        label: any integer per unit. Linear up to a sort of the edges. Raises InternalError where the groups make a
        cycle: whoever chose them broke their promise.
        """
        first, group = np.unique(np.asarray(label, np.int64), return_index=True, return_inverse=True)[1:]
        count = len(first)
        by_first = np.argsort(first, kind="stable")  # number the groups by first appearance, whatever the labels were
        number = np.empty(count, np.int64)
        number[by_first] = np.arange(count)
        group = number[group]
        source, target = group[self.edges[0]], group[self.edges[1]]
        across = source != target
        keys = np.unique(source[across] * count + target[across])
        source, target = keys // max(count, 1), keys % max(count, 1)
        waiting = np.bincount(target, minlength=count).tolist()
        place = np.empty(count, np.int64)
        place[_sorted(adjacency(source, target, count), waiting)] = np.arange(count)
        sizes = np.zeros(count, np.int64)
        renumbered = place[group]
        np.add.at(sizes, renumbered, np.asarray(self.sizes, np.int64))
        return Contraction(sizes.tolist(), (place[source], place[target])), renumbered.tolist()


def edges_of(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """The edges between a graph's nodes as two int64 arrays of node indices: producers and consumers."""
    predecessors = graph.predecessors
    counts = np.fromiter(map(len, predecessors), np.int64, len(predecessors))
    target = np.repeat(np.arange(len(predecessors), dtype=np.int64), counts)
    return np.fromiter(chain.from_iterable(predecessors), np.int64, len(target)), target


def adjacency(source: np.ndarray, target: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """For each of `count` sources its targets, ascending."""
    order = np.lexsort((target, source))
    bounds = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    flat = tuple(target[order].tolist())  # slices are tuples of integers, which the garbage collector need not follow
    return [flat[a:b] for a, b in pairwise(bounds)]


def _sorted(successors: Sequence[Sequence[int]], waiting: list[int]) -> list[int]:
    order = [u for u, n in enumerate(waiting) if n == 0]
    for u in order:  # grows while it is walked
        for s in successors[u]:
            waiting[s] -= 1
            if waiting[s] == 0:
                order.append(s)
    if len(order) != len(successors):
        raise InternalError(f"clusters of {len(successors)} units wait for each other; please report this graph")
    return order
