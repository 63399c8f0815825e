"""Contraction: a graph seen as units, each a node or a group of nodes, and the ways to group units without a cycle.

A `Contraction` holds the units and the edges between them, numbered in a topological order. Four functions group its
units; each takes `open_`, the units that may be grouped with one another, and returns a label per unit: units of one
label are to become one, and a unit that is not open keeps a label of its own. Results depend on the order of the units
alone. No group can make a cycle:

*Free groups* (`free_groups`). Let W(u) be the set of closed units that depend on u. Open units with equal W form a
group. No cycle: along an edge from an open unit W can only shrink; where a path goes through a closed unit c, W loses
c, because c depends on the units before it and not on those after it. So no path returns to a group that it left.
Nothing closed is delayed: a unit that depends on one unit of a group depends on all others already. And this is the
coarsest such grouping: if u and v have c in W(u) but not in W(v), grouping them makes c depend on v, which it did not
before. The result is therefore unique, and has the fewest groups.

*Level groups* (`level_groups`). Let the level of a unit be the largest number of steps from open to closed on a path
that ends there. Open units of one level that are connected by edges form a group. No cycle: levels never fall along an
edge and rise on each open-to-closed step, so a cycle would lie within one level, hence within connected groups, which
are one group.

*Region groups* (`region_groups`). All open units of one level form a group, connected or not. No cycle, by the same
argument: a path that leaves a group through a closed unit leads to higher levels only. And these are the fewest
possible groups: on a path that changes from open to closed and back k times, no two open stretches may be in one
group. A convex set has one level, and is one group.

*Edge groups* (`edge_groups`). An edge between two open units is contracted if no second path joins its ends, which is
exactly when contracting it makes no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.graph import Graph, Value

_LONG = 512  # bits of a set from which on shortening is tried
_FEW = 64  # most live sets, and most bits after shortening, for which shortening pays
_SEARCH = 400  # units that one search for a second path may visit
_BUDGET = 12  # units that all searches may visit, per unit and edge of the graph


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
    def of_reads(cls, reads: Reads) -> Contraction:
        """Every node of a graph a unit of its own, numbered as the nodes. reads: of the graph (`reads_of`)."""
        source, target = reads.edges
        if np.any(source >= target):
            raise InternalError("clustering was given a graph whose nodes are not in topological order")
        return cls([1] * reads.nodes, (source, target))

    def on_cycles(self, label: Sequence[int] | np.ndarray) -> set[int]:
        """The labels of groups that lie on a cycle of the quotient graph, or on a path between two cycles.

        Linear: sources and sinks are removed until none is left.
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
        InternalError if the groups make a cycle, which is a bug of the caller.
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
    """The reads of a graph's nodes as arrays: one row for each pair of a value and a node that reads it.

    values: the values that are read, constants included. producer: for each of them its node, -1 for none.
    value, reader: for each row the index of its value, and its node. nodes: the number of nodes of the graph.
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
    """The distinct non-negative numbers, ascending. `np.unique` would import `numpy.ma`, 6 ms of every process."""
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
    flat = tuple(target.tolist())  # slices are tuples of integers, which the garbage collector does not track
    return [flat[a:b] for a, b in pairwise(bounds)]


def _sorted(source: np.ndarray, target: np.ndarray, count: int) -> list[int]:
    """The units in a topological order: as they become ready, those after one unit in ascending order."""
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


# --- grouping ---


def free_groups(c: Contraction, open_: np.ndarray, ignored: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Group open units on which the same closed units depend; `ignored` ones do not count (nothing may depend on them).

    Sets are bit masks, one bit for each closed unit that reads from an open one; bits that no set distinguishes any
    more become one (`_Sets.shorten`). Time is linear in units and edges, plus, where there are no such bits, 1/64 of a
    machine word operation per edge and closed unit (0.1 s in total for 100 000 units).
    """
    count = len(c)
    source, target = c.edges
    counts = np.zeros(count, np.bool_)  # closed units that read from an open one
    counts[target[open_[source]]] = True
    counts[open_] = False
    counts[np.asarray(ignored, np.int64)] = False
    earliest = np.full(count, count)  # the first unit with an edge to it: sets are kept until then, there can be many
    earliest[target[::-1]] = source[::-1]
    opened, counted, last_use = open_.tolist(), counts.tolist(), earliest.tolist()
    successors = c.successors
    label = list(range(count))
    waiting: list[int | None] = [None] * count  # W of an open unit; of a closed one also itself
    sets = _Sets()
    bits, limit = 0, _LONG
    for u in range(count - 1, int(open_.argmax()) - 1, -1):  # nothing before the first open unit matters
        mask = 0
        origin = -1  # a successor whose set is `mask`
        for s in successors[u]:
            other = waiting[s]
            if other:
                if not mask:
                    mask, origin = other, s
                elif other is mask:
                    if opened[s]:
                        origin = s
                else:
                    joined = mask | other
                    if joined == other:
                        mask, origin = other, s
                    elif joined != mask:
                        mask, origin = joined, -1
            if last_use[s] == u:
                waiting[s] = None
        if opened[u]:
            if origin >= 0 and opened[origin]:
                label[u] = label[origin]  # avoids the lookup
            else:
                label[u], mask = sets.find(mask, u)
        elif counted[u]:
            mask |= 1 << bits
            bits += 1
        waiting[u] = mask
        if bits > limit:
            bits = sets.shorten(waiting, (u + np.flatnonzero(earliest[u:] < u)).tolist(), bits)
            limit = max(_LONG, 2 * bits)
    return np.asarray(label, np.int64)


class _Sets:
    """The distinct sets of open units, as bit masks, each with the first unit that has it."""

    def __init__(self) -> None:
        self._by_head: dict[tuple[int, int], tuple[int, int]] = {}  # by length and first bits: long hashes are rare
        self._others: dict[int, tuple[int, int]] = {}  # those whose length and first bits another has as well

    def find(self, mask: int, unit: int) -> tuple[int, int]:
        """The first unit with this set, `unit` if it is new, and one object for all equal masks."""
        length = mask.bit_length()
        head = length, mask >> (length - 192) if length > 192 else mask
        found = self._by_head.setdefault(head, (unit, mask))
        if found[1] is not mask and found[1] != mask:
            return self._others.setdefault(mask, (unit, mask))
        return found

    def shorten(self, waiting: list[int | None], live: Sequence[int], bits: int) -> int:
        """Merge the bits that no live set distinguishes, in all sets. Returns the number of bits then in use.

        live: the units whose sets are still to be joined. All later sets are unions of theirs and of new bits, so bits
        that none of them distinguishes never will be, and a set that is no such union can be dropped: none will equal
        it.
        """
        masks = {m: 0 for u in live if (m := waiting[u])}
        classes: list[int] = []
        if len(masks) > _FEW:
            return bits
        for mask in masks:
            rest = mask
            for k, known in enumerate(classes.copy()):
                both = known & mask
                if both:
                    rest ^= both
                    if both != known:
                        classes[k] = both
                        classes.append(known ^ both)
            if rest:
                classes.append(rest)
            if len(classes) > _FEW:
                return bits
        for mask in masks:
            masks[mask] = sum(1 << k for k, known in enumerate(classes) if known & mask)
        for u in live:
            if m := waiting[u]:
                waiting[u] = masks[m]
        entries = [*self._by_head.values(), *self._others.values()]
        self._by_head, self._others = {}, {}
        one = {short: short for short in masks.values()}
        for unit, mask in entries:
            short, rest = 0, mask
            for k, known in enumerate(classes):
                both = known & mask
                if both:
                    if both != known:
                        break
                    short |= 1 << k
                    rest ^= both
            else:
                if not rest:
                    self.find(one.setdefault(short, short), unit)
        return len(classes)


def level_groups(c: Contraction, open_: Sequence[bool]) -> list[int]:
    """Group open units of one level that edges join. Linear."""
    count = len(c)
    label = list(range(count))
    level = _levels(c, open_)
    for u, predecessors in enumerate(c.predecessors):
        if not open_[u]:
            continue
        for p in predecessors:
            if open_[p] and level[p] == level[u]:
                a, b = find_root(label, p), find_root(label, u)
                if a != b:
                    label[max(a, b)] = min(a, b)
    return [find_root(label, u) for u in range(count)]


def region_groups(c: Contraction, region: Sequence[int]) -> dict[int, int]:
    """Group the units of a region, ascending, by level, into the fewest groups. Returns unit -> first of its group.

    Linear in the units from the first to the last: a path that re-enters the region leads through no others.
    """
    members = frozenset(region)
    first, level = region[0], dict.fromkeys(region, 0)
    groups: dict[int, int] = {}
    found = {}
    for u in range(first, region[-1] + 1):
        is_open = u in members
        reached = [level[p] + (p in members and not is_open) for p in c.predecessors[u] if p in level]
        if reached:
            level[u] = max(reached)
        if is_open:
            found[u] = groups.setdefault(level[u], u)
    return found


def _levels(c: Contraction, open_: Sequence[bool]) -> list[int]:
    """For each unit the largest number of steps from open to closed on a path that ends there."""
    level = [0] * len(c)
    for u, predecessors in enumerate(c.predecessors):
        if open_[u]:
            level[u] = max((level[p] for p in predecessors), default=0)
        else:
            level[u] = max((level[p] + 1 if open_[p] else level[p] for p in predecessors), default=0)
    return level


def edge_groups(c: Contraction, open_: Sequence[bool], maximum: int) -> list[int]:
    """Contract edges between open units, in order, where the group stays within `maximum` nodes.

    A second path is searched for in both directions, between the places of the two ends in a topological order that is
    maintained as in D. J. Pearce and P. H. J. Kelly, "A dynamic topological sort algorithm for directed acyclic graphs"
    (2006). Each search and their total are bounded, so the cost is linear; an edge whose search hits the bound is not
    contracted.
    """
    merger = _EdgeMerger(c, open_, maximum)
    for _ in range(2):
        before = merger.merged
        for u in range(len(c)):
            if open_[u] and merger.alive[u]:
                merger.absorb(u)
        if merger.merged == before or merger.budget <= 0:
            break
    return [find_root(merger.label, u) for u in range(len(c))]


def slices(units: Sequence[int], sizes: Sequence[int], minimum: int, maximum: int) -> list[list[int]]:
    """Cut a group, its units in topological order, into consecutive slices of at most `maximum` nodes.

    Slices are of even size if each then has `minimum` nodes, and otherwise as large as allowed, to leave a small
    remainder. Consecutive slices of a convex group can be units in its place: edges between them all point one way.
    """
    total = sum(sizes[u] for u in units)
    if total <= maximum:
        return [list(units)]
    pieces = -(-total // maximum)
    goal = -(-total // pieces) if total >= pieces * minimum else maximum
    found: list[list[int]] = []
    filled = goal
    for u in units:
        if filled >= goal or filled + sizes[u] > maximum:
            found.append([])
            filled = 0
        found[-1].append(u)
        filled += sizes[u]
    return found


def find_root(parent: list[int] | dict[int, int], u: int) -> int:
    """The representative of `u` in a union-find forest; compresses the path to it."""
    while parent[u] != u:
        parent[u] = parent[parent[u]]
        u = parent[u]
    return u


class _EdgeMerger:
    """The mutable state of `edge_groups`: adjacency, topological places, and the remaining budget."""

    def __init__(self, c: Contraction, open_: Sequence[bool], maximum: int) -> None:
        self.open = open_
        self.maximum = maximum
        self.successors = [dict.fromkeys(s) for s in c.successors]
        self.predecessors = [dict.fromkeys(p) for p in c.predecessors]
        self.size = list(c.sizes)
        self.place = list(range(len(c)))
        self.label = list(range(len(c)))
        self.alive = [True] * len(c)
        self.budget = _BUDGET * (len(c) + len(c.edges[0])) + 10 * _SEARCH
        self.merged = 0

    def absorb(self, u: int) -> None:
        """Merge successors of `u` into it while possible, nearest first."""
        failed: set[int] = set()
        while self.budget > 0:
            self.budget -= 1 + len(self.successors[u])
            fitting = [
                v
                for v in self.successors[u]
                if self.open[v] and v not in failed and self.size[u] + self.size[v] <= self.maximum
            ]
            if not fitting:
                return
            v = min(fitting, key=self.place.__getitem__)
            if not self._make_adjacent(u, v):
                failed.add(v)
                continue
            u = self._join(u, v)

    def _make_adjacent(self, u: int, v: int) -> bool:
        """Give `u` and `v` one place in the order if no second path joins them; otherwise change nothing."""
        place = self.place
        if len(self.predecessors[v]) == 1:
            place[v] = place[u]
            return True
        if len(self.successors[u]) == 1:
            place[u] = place[v]
            return True
        below = self._search(self.successors, u, v, lambda w: place[w] < place[v])
        if below is None:
            return False
        above = self._search(self.predecessors, v, u, lambda w: place[w] > place[u])
        if above is None:
            return False
        below.sort(key=place.__getitem__)
        above.sort(key=place.__getitem__)
        slots = sorted([place[w] for w in (*above, u, v, *below)])
        for w, slot in zip(above, slots, strict=False):
            place[w] = slot
        place[u] = place[v] = slots[len(above)]
        for w, slot in zip(below, slots[len(above) + 2 :], strict=True):
            place[w] = slot
        return True

    def _search(
        self, adjacency: list[dict[int, None]], start: int, goal: int, inside: Callable[[int], bool]
    ) -> list[int] | None:
        """Units reached from `start` by other edges than to `goal`; None if `goal` is reached or the bound is hit."""
        seen = {start}
        found: list[int] = []
        todo = [w for w in adjacency[start] if w != goal]
        steps = len(todo)
        while todo:
            w = todo.pop()
            if w == goal:
                self.budget -= steps
                return None
            if w in seen or not inside(w):
                continue
            seen.add(w)
            found.append(w)
            todo.extend(adjacency[w])
            steps += 1 + len(adjacency[w])
            if steps > _SEARCH:
                self.budget -= steps
                return None
        self.budget -= steps
        return found

    def _join(self, u: int, v: int) -> int:
        """Merge two units that share a place; returns the one with more edges, which keeps its number."""
        successors, predecessors = self.successors, self.predecessors
        del successors[u][v], predecessors[v][u]
        if len(successors[u]) + len(predecessors[u]) < len(successors[v]) + len(predecessors[v]):
            u, v = v, u
        for w in successors[v]:
            del predecessors[w][v]
            predecessors[w][u] = None
            successors[u][w] = None
        for w in predecessors[v]:
            del successors[w][v]
            successors[w][u] = None
            predecessors[u][w] = None
        successors[v], predecessors[v] = {}, {}
        self.size[u] += self.size[v]
        self.alive[v] = False
        self.label[v] = u
        self.merged += 1
        return u
