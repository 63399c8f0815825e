"""Cluster growth: the state of clustering, and the steps that form, merge and dissolve clusters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from xrt_core.errors import InternalError
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.contraction import Contraction, distinct, reads_of
from xrt_core.passes.partitioning.cost_model import Costs, Estimate, Estimator
from xrt_core.passes.partitioning.grouping import edge_groups, free_groups, level_groups, region_groups, slices
from xrt_core.passes.partitioning.support import Kind, Members

_Merged = tuple[Contraction, np.ndarray]  # as `Contraction.merge` returns it


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large clusters are, and whether other nodes may wait for them: options of `cluster`."""

    minimum: int
    maximum: int
    strict: bool


class Reassignment(NamedTuple):
    """A cluster of `engine` that became part of one of a later engine (`reassign`).

    apart: seconds per call that it would cost as a separate cluster, for its launch and transfers.
    faster: estimated seconds per call that its own engine would save on its nodes.
    """

    engine: str
    apart: float
    faster: float


class Grower:
    """The contraction of a graph by its clusters so far, and which cluster kind owns each unit.

    unit: node -> unit. owner: unit -> index of its kind in `kinds`, -1 for one that is no cluster. clustered: node ->
    whether it is in a cluster. Where nodes were in clusters that were dissolved, for each engine: `small`: node -> size
    of one that was too small, 0 for none; `unpaid`: node -> index in `losses` of one that does not pay, -1 for none.
    losses: nodes in it, and the three figures of its Estimate. reassigned: node -> index in `reassignments` of the
    cluster it was part of before that went to a later engine, -1 for none. updates: the nodes that are model updates.
    """

    def __init__(self, graph: Graph, bounds: Bounds, engines: Sequence[str]) -> None:
        count = len(graph.nodes)
        self.graph = graph
        self.bounds = bounds
        self.reads = reads_of(graph)
        self.plain = self.units = Contraction.of_reads(self.reads)
        self.unit = np.arange(count)
        self.kinds: list[Kind] = []
        self.owner = np.full(count, -1)
        self.clustered = np.zeros(count, np.bool_)
        self.small = {e: np.zeros(count, np.int64) for e in engines}
        self.unpaid = {e: np.full(count, -1) for e in engines}
        self.losses: list[tuple[int, float, float, float]] = []
        self.reassigned = np.full(count, -1)
        self.reassignments: list[Reassignment] = []
        self.updates = frozenset(i for i, n in enumerate(graph.nodes) if n.annotations.model_update)
        self._listed = np.asarray(sorted(self.updates), np.int64)
        self._numbers: dict[Kind, int] = {}
        self._settled: dict[int, Contraction] = {}  # kind -> the units among which nothing of it was left to merge

    @functools.cached_property
    def estimator(self) -> Estimator:
        """The cost model for this graph."""
        return Estimator(self.graph, self.reads)

    def kind_of(self, unit: int) -> Kind:
        """The kind of a unit that is a cluster."""
        return self.kinds[int(self.owner[unit])]

    def grow(self, kind: Kind, nodes: np.ndarray) -> bool:
        """Make clusters of the nodes that are not in one yet. Returns whether there is a new one."""
        minimum = self.bounds.minimum
        left = nodes[~self.clustered[nodes] & (self.unpaid[kind.engine][nodes] < 0)]
        if not len(left):
            return False
        open_ = np.zeros(len(self.units), np.bool_)
        open_[self.unit[left]] = True
        ignored = self._unread_updates()
        while True:
            label, merged, whole = self._group(open_, ignored)
            sizes = np.bincount(label[self.unit[left]], minlength=len(label))[label[self.unit[left]]]
            is_small = sizes < minimum
            if not is_small.any():
                break
            whole, merged = False, None
            small, left = left[is_small], left[~is_small]
            self.small[kind.engine][small] = sizes[is_small]
            open_[self.unit[small]] = False
            label[self.unit[small]] = self.unit[small]
            if not self.bounds.strict:  # the rest stays acyclic: taking a group apart cannot make a cycle
                label = _apart(label, open_)
                break
            # what was dissolved stays outside now, and must not be delayed either: group the rest again
            if not len(left):
                return False
        self.clustered[left] = True
        for sizes in self.small.values():
            sizes[left] = 0
        number = self.number(kind)
        whole &= not (self.owner == number).any()
        self.merge(label, merged)
        self.owner[self.unit[left]] = number
        if whole:
            self._settled[number] = self.units
        return bool(len(left))

    def grow_regions(self, regions: Members) -> None:
        """Make as few clusters of each marked region as there can be; nothing has been clustered before.

        All at once, and one after another those few that would wait for each other then.
        """
        if not regions:
            return
        label = np.arange(len(self.units))
        for _, nodes in regions:
            for u, first in region_groups(self.units, nodes.tolist()).items():
                label[u] = first
        cyclic: set[int] = set()
        try:
            self.merge(label)
        except InternalError:
            cyclic = self.units.on_cycles(label)
            self.merge(np.asarray([u if t in cyclic else t for u, t in enumerate(label.tolist())]))
        for _, nodes in regions:
            if cyclic and not cyclic.isdisjoint(label[nodes].tolist()):
                groups = region_groups(self.units, sorted(set(self.unit[nodes].tolist())))
                self.merge(np.asarray([groups.get(u, u) for u in range(len(self.units))]))
            self.clustered[nodes] = True
        for kind, nodes in regions:
            self.owner[self.unit[nodes]] = self.number(kind)

    def settle(self) -> None:
        """Merge clusters of one kind that only seemed to delay each other's neighbours before those were clusters."""
        present = distinct(self.owner[self.owner >= 0])
        if len(present) < 2 and not self.losses:
            return
        order = sorted((k for k in present if not self.kinds[k].pinned), key=lambda k: repr(self.kinds[k]))
        changed = True
        while changed:
            changed = False
            for k in order:
                if self._settled.get(k) is self.units:
                    continue
                before = len(self.units)
                open_ = self.owner == k
                if np.count_nonzero(open_) < 2:
                    continue
                label, whole = self.free(open_)
                self.merge(label)
                changed |= len(self.units) < before
                if whole:
                    self._settled[k] = self.units

    def free(self, open_: np.ndarray) -> tuple[np.ndarray, bool]:
        """Labels for the open units, so that nothing closed is delayed, and whether no bound cut a group."""
        found = free_groups(self.units, open_, self._unread_updates())
        label = _sliced(found, self.units, open_, 1, self.bounds.maximum)
        return label, label is found

    def prune(self, costs: Callable[[str], Costs]) -> bool:
        """Dissolve the clusters that save nothing, where the host has nodes anyway. Returns whether there were any."""
        if self.clustered.all():
            return False
        cluster, units = self.clusters()
        seconds = self.seconds(cluster, units, costs)
        pinned = np.array([k.pinned for k in self.kinds], np.bool_)
        lost = np.flatnonzero(~pinned[self.owner[units]] & ~(seconds[0] - seconds[1] > 0))
        if not len(lost):
            return False
        known = len(self.losses)
        sizes = np.bincount(cluster[cluster >= 0], minlength=len(units))
        self.losses.extend(zip(sizes[lost].tolist(), *seconds[:, lost].tolist(), strict=True))
        loss = np.full(len(units) + 1, -1)  # the last is for nodes that are in no cluster
        loss[lost] = np.arange(known, len(self.losses))
        dropped = np.flatnonzero(loss[cluster] >= 0)
        engine = np.array([list(self.unpaid).index(k.engine) for k in self.kinds])[self.owner[self.unit[dropped]]]
        for k, unpaid in enumerate(self.unpaid.values()):
            nodes = dropped[engine == k]
            unpaid[nodes] = loss[cluster[nodes]]
        self.clustered[dropped] = False
        self.reassigned[dropped] = -1
        kept = np.where(self.clustered, self.owner[self.unit], -1)
        label = self.unit.copy()
        label[dropped] = len(self.units) + dropped  # the rest stays acyclic: taking a group apart cannot make a cycle
        self.units, self.unit = self.plain.merge(label)
        self.owner = np.full(len(self.units), -1)
        self.owner[self.unit] = kept
        return True

    def members(self) -> dict[int, tuple[int, ...]]:
        """The units that are clusters, each with its nodes, ascending; in the order of their first nodes."""
        nodes = np.flatnonzero(self.clustered)
        nodes = nodes[np.argsort(self.unit[nodes], kind="stable")]
        units = self.unit[nodes]
        cuts = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), len(nodes)] if len(nodes) else [0]
        flat = tuple(nodes.tolist())
        parts = sorted(flat[a:b] for a, b in pairwise(cuts))
        return dict(zip(self.unit[[part[0] for part in parts]].tolist() if parts else (), parts, strict=True))

    def estimates(self, costs: Callable[[str], Costs]) -> list[Estimate]:
        """What the clusters save, in the order of `members`."""
        cluster, units = self.clusters()
        if not len(units):
            return []
        first = np.full(len(units), len(cluster))
        inside = np.flatnonzero(cluster >= 0)
        first[cluster[inside[::-1]]] = inside[::-1]
        seconds = self.seconds(cluster, units, costs)[:, np.argsort(first)]
        return [Estimate(*found) for found in zip(*seconds.tolist(), strict=True)]

    def any_dissolved(self) -> bool:
        """Whether a node that is in no cluster now was in one that was too small."""
        return any(bool(sizes.any()) for sizes in self.small.values())

    def clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Per node the number of its cluster, -1 for none; and the units that are clusters, by number."""
        units = np.flatnonzero(self.owner >= 0)
        number = np.full(len(self.units), -1)
        number[units] = np.arange(len(units))
        return number[self.unit], units

    def seconds(self, cluster: np.ndarray, units: np.ndarray, costs: Callable[[str], Costs]) -> np.ndarray:
        """What clusters save, as `clusters` numbers them or with other nodes in each: three rows, see `Estimator`."""
        devices = list(dict.fromkeys(k.device for k in self.kinds))
        which = np.array([devices.index(k.device) for k in self.kinds])
        return self.estimator(cluster, [costs(d) for d in devices], which[self.owner[units]])

    def number(self, kind: Kind) -> int:
        """The index of a kind in `kinds`, where it stands from now on."""
        found = self._numbers.setdefault(kind, len(self.kinds))
        if found == len(self.kinds):
            self.kinds.append(kind)
        return found

    def _unread_updates(self) -> np.ndarray:
        """Units with an update that nothing waits for."""
        units = self.unit[self._listed]
        read = np.zeros(len(self.units), np.bool_)
        read[self.units.edges[0]] = True
        found: np.ndarray = units[~read[units]]
        return found

    def merge(self, label: np.ndarray, merged: _Merged | None = None) -> None:
        """Make units of one label one. merged: what that gives, where it is known."""
        if (label == np.arange(len(label))).all():
            return
        owner = self.owner
        self.units, new = merged or self.units.merge(label)
        self.unit = new[self.unit]
        self.owner = np.full(len(self.units), -1)
        self.owner[new] = owner

    def _group(self, open_: np.ndarray, ignored: np.ndarray) -> tuple[np.ndarray, _Merged | None, bool]:
        """Labels for the open units; what merging by them gives, where that is known; whether no bound cut a group.

        Not strictly, edges are contracted though others wait longer: all that is free, by levels, by single edges.
        """
        minimum, maximum = self.bounds.minimum, self.bounds.maximum
        units = self.units
        found = free_groups(units, open_, ignored)
        label = _sliced(found, units, open_, minimum, maximum)
        if self.bounds.strict:
            return label, None, label is found
        merged: _Merged = units, np.arange(len(units))
        steps = 0
        whole = label is found

        def step(label: np.ndarray) -> None:
            nonlocal units, open_, ignored, merged, steps
            if (label == np.arange(len(label))).all():
                return
            units, new = units.merge(label)
            opened = np.zeros(len(units), np.bool_)
            opened[new] = open_
            open_, ignored, merged = opened, new[ignored], (units, new[merged[1]])
            steps += 1

        def joined() -> bool:
            return bool((open_[units.edges[0]] & open_[units.edges[1]]).any())

        step(label)
        freed = steps
        if joined():
            step(_sliced(np.asarray(level_groups(units, open_.tolist())), units, open_, minimum, maximum))
        if joined():
            step(_sliced(np.asarray(edge_groups(units, open_.tolist(), maximum)), units, open_, minimum, maximum))
        if steps > freed or not whole:  # else nothing more is free
            found = free_groups(units, open_, ignored)
            label = _sliced(found, units, open_, minimum, maximum)
            whole = label is found
            step(label)
        first = np.empty(len(units), np.int64)
        first[merged[1][::-1]] = np.arange(len(merged[1]))[::-1]
        return first[merged[1]], merged if steps == 1 else None, whole


def _sliced(label: np.ndarray, units: Contraction, open_: np.ndarray, minimum: int, maximum: int) -> np.ndarray:
    """The labels with every group over `maximum` nodes cut into slices."""
    if sum(units.sizes) <= maximum:
        return label
    total = np.bincount(label[open_], np.asarray(units.sizes)[open_], len(label))
    if not (total > maximum).any():
        return label
    large: dict[int, list[int]] = {t: [] for t in np.flatnonzero(total > maximum).tolist()}
    for u, t in enumerate(label.tolist()):
        if t in large:
            large[t].append(u)
    label = label.copy()
    for members in large.values():
        for piece in slices(_by_component(members, units), units.sizes, minimum, maximum):
            label[piece] = piece[0]
    return label


def _by_component(members: list[int], units: Contraction) -> list[int]:
    """The units, one connected component after another, each in topological order: slices then cut few edges."""
    parent = {u: u for u in members}

    def root(u: int) -> int:
        while parent[u] != u:
            parent[u] = parent[parent[u]]
            u = parent[u]
        return u

    for u in members:
        for s in units.successors[u]:
            if s in parent:
                a, b = root(u), root(s)
                parent[max(a, b)] = min(a, b)
    components: dict[int, list[int]] = {}
    for u in members:
        components.setdefault(root(u), []).append(u)
    return [u for component in components.values() for u in component]


def _apart(label: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """The labels again as first members of their groups, with every unit that is not open alone."""
    first: dict[int, int] = {}
    return np.asarray([first.setdefault(t, u) if open_[u] else u for u, t in enumerate(label.tolist())])
