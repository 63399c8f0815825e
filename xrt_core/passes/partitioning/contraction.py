"""Contraction: a graph seen as units, each a node or a group of nodes, numbered in a topological order."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.graph import Graph, Value


class Contraction:
    """Units and the edges between them; unit numbers ascend along every edge.

    sizes: nodes in each unit.
    edges: two int64 arrays, sources and targets, each edge once, ascending by source and then by target.
    successors, predecessors: unit -> the units next to it, each once, ascending; made when first asked for.
    """

    __slots__ = ("_predecessors", "_successors", "edges", "sizes")

    def __init__(self, sizes: list[int], edges: tuple[np.ndarray, np.ndarray]) -> None:
        self.sizes = sizes
        self.edges = edges
        self._successors: list[tuple[int, ...]] | None = None
        self._predecessors: list[tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def successors(self) -> list[tuple[int, ...]]:
        """For each unit those with an edge from it."""
        if self._successors is None:
            self._successors = adjacency(*self.edges, len(self))
        return self._successors

    @property
    def predecessors(self) -> list[tuple[int, ...]]:
        """For each unit those with an edge to it."""
        if self._predecessors is None:
            self._predecessors = adjacency(*ascending(self.edges[1], self.edges[0], len(self)), len(self))
        return self._predecessors

    @classmethod
    def of_graph(cls, graph: Graph) -> Contraction:
        """Every node a unit of its own, numbered as the graph's nodes."""
        return cls.of_reads(reads_of(graph))

    @classmethod
    def of_reads(cls, reads: Reads) -> Contraction:
        """The same for a graph whose reads are known."""
        source, target = reads.edges
        if np.any(source >= target):
            raise InternalError("clustering was given a graph whose nodes are not in topological order")
        return cls([1] * reads.nodes, (source, target))

    def on_cycles(self, label: Sequence[int] | np.ndarray) -> set[int]:
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

    def merge(self, label: Sequence[int] | np.ndarray) -> tuple[Contraction, np.ndarray]:
        """The contraction in which units of one label are one unit, and old unit -> new unit (int64).

        label: an integer per unit, from 0 to about the number of units. Linear up to a sort of the edges. Raises
        InternalError where the groups make a cycle, which is a bug of the caller.
        """
        labels = np.asarray(label, np.int64)
        if not len(labels):
            return self, labels
        units = np.arange(len(labels))
        first = np.empty(int(labels.max()) + 1, np.int64)
        first[labels[::-1]] = units[::-1]  # the first unit of a label is written last
        head = first[labels]
        group = (np.cumsum(head == units) - 1)[head]  # by first appearance, whatever the labels were
        count = int(group.max()) + 1
        source, target = group[self.edges[0]], group[self.edges[1]]
        across = source != target
        source, target = ascending(source[across], target[across], count)
        place = np.empty(count, np.int64)
        place[_sorted(source, target, count)] = np.arange(count)
        new = place[group]
        sizes = np.bincount(new, self.sizes, count).astype(np.int64).tolist()
        return Contraction(sizes, ascending(place[source], place[target], count)), new


class Reads(NamedTuple):
    """Who reads what in a graph, as arrays: one row for each value and each node that reads it.

    values: what is read, constants included. producer: for each of them the node that makes it, -1 for none.
    value, reader: for each row the index of its value, and its node. nodes: how many the graph has.
    """

    values: list[Value]
    producer: np.ndarray
    value: np.ndarray
    reader: np.ndarray
    nodes: int

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Producers and consumers, each edge between two nodes once, ascending by producer and then by consumer."""
        source = self.producer[self.value]
        made = source >= 0
        return ascending(source[made], self.reader[made], self.nodes)


def reads_of(graph: Graph) -> Reads:
    """The reads of a graph; linear."""
    consumers, get = graph.consumers, graph.producers.get
    count = len(consumers)
    producer = np.fromiter((get(v, -1) for v in consumers), np.int64, count)
    readers = np.fromiter(map(len, consumers.values()), np.int64, count)
    value = np.repeat(np.arange(count), readers)
    reader = np.fromiter(chain.from_iterable(consumers.values()), np.int64, len(value))
    return Reads(list(consumers), producer, value, reader, len(graph.nodes))


def distinct(numbers: np.ndarray) -> list[int]:
    """The different ones of numbers from 0 on, ascending. `np.unique` imports `numpy.ma`, 6 ms of every process."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def ascending(source: np.ndarray, target: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of two int64 arrays, each pair once, ascending by the first; targets are from 0 to below `count`."""
    keys = source * count + target
    keys.sort()
    if len(keys):
        keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    found = np.divmod(keys, max(count, 1))
    return found[0], found[1]


def adjacency(source: np.ndarray, target: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """For each of `count` sources its targets; the edges ascend."""
    bounds = np.searchsorted(source, np.arange(count + 1)).tolist()
    flat = tuple(target.tolist())  # slices are tuples of integers, which the garbage collector need not follow
    return [flat[a:b] for a, b in pairwise(bounds)]


def _sorted(source: np.ndarray, target: np.ndarray, count: int) -> list[int]:
    """The units in a topological order: as they become free to go, those of one unit in ascending order."""
    bounds = np.searchsorted(source, np.arange(count + 1)).tolist()
    flat = target.tolist()
    waiting = np.bincount(target, minlength=count).tolist()
    order = [u for u, n in enumerate(waiting) if n == 0]
    for u in order:  # grows while it is walked
        for s in flat[bounds[u] : bounds[u + 1]]:
            if waiting[s] == 1:
                order.append(s)
            else:
                waiting[s] -= 1
    if len(order) != count:
        raise InternalError(f"clusters of {count} units wait for each other; please report this graph")
    return order


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside the block; reference counting goes on. Does nothing where it is off already.

    Partitioning leaves no cycles behind, but makes up to twenty containers a node, which set off collections that go
    through the whole graph each time: half of the time for 100 000 nodes, and more than linear in them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
