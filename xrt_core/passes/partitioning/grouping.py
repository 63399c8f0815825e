"""Grouping: four ways to group the units of a contraction, none of which can make a cycle.

Each function takes `open_`, the units that may be grouped with one another, and returns a label per unit; units of one
label are to become one, and a unit that is not open keeps a label of its own. Everything depends on the order of the
units alone.

*Free groups* (`free_groups`). Let W(u) be the set of closed units that a path leads to from u: what waits for u. Open
units with equal W form a group. No cycle: along an edge from an open unit W can only shrink; where the path goes
through a closed unit c, W loses c, because c waits for what stands before it and not for what stands after it. So no
path returns to a group that it left. Nothing closed is delayed: whatever waits for one unit of a group waits for every
other already. And this is the coarsest grouping of the kind: if u and v have c in W(u) but not in W(v), grouping them
makes c wait for v, which it did not before. The result is therefore unique, and least in number.

*Level groups* (`level_groups`). Let the level of a unit be the largest number of steps from open to closed on a path
that ends there. Open units of one level that edges between them join form a group. No cycle: levels never fall along
an edge and rise on each open-to-closed step, so a cycle would lie within one level, hence within groups that edges
join, which are one group.

*Region groups* (`region_groups`). All open units of one level form a group, joined by edges or not. No cycle, by the
same argument: a way out of a group through a closed unit leads to higher levels only. And these are the fewest groups
there can be: on a path that changes from open to closed and back k times, no two open stretches may be in one group.
A set that no path leaves and re-enters has one level, and is one group.

*Edge groups* (`edge_groups`). An edge between two open units is contracted where no second path joins its ends, which
is exactly when contracting it makes no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xrt_core.passes.partitioning.contraction import Contraction

_LONG = 512  # bits of a set from which on it is worth shortening
_FEW = 64  # live sets, and bits that are left of them, with which shortening is worth its time
_SEARCH = 400  # units that one search for a second path may see
_BUDGET = 12  # units that all searches may see, per unit and edge of the graph


def free_groups(c: Contraction, open_: np.ndarray, ignored: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Group open units for which the same closed units wait; `ignored` ones do not count (nothing may depend on them).

    Sets are bit masks, one bit for each closed unit that reads from an open one, and bits that need not be told apart
    any more become one (`_Sets.shorten`). Time is linear in units and edges, plus, where no such bits are found, a 64th
    of a machine word's work per edge and closed unit (0.1 s in all for 100 000 units).
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
                label[u] = label[origin]  # spares the search
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
    """The sets that open units have, as bit masks, each with the first unit that has it."""

    def __init__(self) -> None:
        self._by_head: dict[tuple[int, int], tuple[int, int]] = {}  # by length and first bits: long hashes are rare
        self._others: dict[int, tuple[int, int]] = {}  # those whose length and first bits another has as well

    def find(self, mask: int, unit: int) -> tuple[int, int]:
        """The unit that stands for this set, `unit` where it is new, and the one object for all equal masks."""
        length = mask.bit_length()
        head = length, mask >> (length - 192) if length > 192 else mask
        found = self._by_head.setdefault(head, (unit, mask))
        if found[1] is not mask and found[1] != mask:
            return self._others.setdefault(mask, (unit, mask))
        return found

    def shorten(self, waiting: list[int | None], live: Sequence[int], bits: int) -> int:
        """Make one bit of those that no live set tells apart, in all sets. Returns how many bits are in use then.

        live: the units whose sets are still to be joined. All sets to come are made of theirs and of new bits, so what
        none of them tells apart none will, and a set that is not made of theirs can be forgotten: none will equal it.
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
                a, b = _find(label, p), _find(label, u)
                if a != b:
                    label[max(a, b)] = min(a, b)
    return [_find(label, u) for u in range(count)]


def region_groups(c: Contraction, region: Sequence[int]) -> dict[int, int]:
    """Group the units of a region, ascending, by level: as few groups as there can be. Returns unit -> first of group.

    Linear in the units from the first to the last: a path that comes back leads through no others.
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

    A second path is searched for between the two ends' places in a topological order that is kept up to date, both
    ways, as in D. J. Pearce and P. H. J. Kelly, "A dynamic topological sort algorithm for directed acyclic graphs"
    (2006). Searches have a limit each and all together, so the cost is linear; an edge whose search runs out stays.
    """
    merger = _EdgeMerger(c, open_, maximum)
    for _ in range(2):
        before = merger.merged
        for u in range(len(c)):
            if open_[u] and merger.alive[u]:
                merger.absorb(u)
        if merger.merged == before or merger.budget <= 0:
            break
    return [_find(merger.label, u) for u in range(len(c))]


def slices(units: Sequence[int], sizes: Sequence[int], minimum: int, maximum: int) -> list[list[int]]:
    """Cut a group, its units in topological order, into consecutive slices of at most `maximum` nodes.

    Slices are of even size where each then has `minimum` nodes, and else as large as allowed, to leave little over.
    Consecutive slices of a group that no path leaves and re-enters can be units in its stead: edges between them all
    point one way.
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


def _find(parent: list[int], u: int) -> int:
    while parent[u] != u:
        parent[u] = parent[parent[u]]
        u = parent[u]
    return u


class _EdgeMerger:
    """The mutable state of `edge_groups`: adjacency, topological places, and what is left of the budget."""

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
        """Merge the successors of `u` into it while any can be, nearest first."""
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
        """Give `u` and `v` one place in the order, if no second path joins them; else change nothing."""
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
        """Units reached from `start` by other ways than the edge to `goal`; None if one is `goal`, or too many."""
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
        """Make one unit of two that share a place; the one with more edges keeps its number, which is returned."""
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
