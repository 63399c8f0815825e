"""Clustering: groups supported nodes into clusters, engine by engine in order of priority; host nodes have reasons."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from xrt_core.errors import InternalError, OptionError
from xrt_core.ir.garbage_collection import collector_paused
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.contraction import (
    Contraction,
    distinct,
    edge_groups,
    find_root,
    free_groups,
    level_groups,
    reads_of,
    region_groups,
    slices,
)
from xrt_core.passes.partitioning.cost_model import Costs, Estimate, Estimator, duration
from xrt_core.passes.partitioning.support import Kind, Marks, Members, pinned_kinds, signatures, taken, takers

UNLIMITED = 2**31 - 1

_ROUNDS = 8  # of `_reassign`, for each engine that clusters may be reassigned to
_SHOWN = 32  # parts of marked regions whose note names the path that cuts them off
_Merged = tuple[Contraction, np.ndarray]  # as `Contraction.merge` returns it


class Cluster(Struct, frozen=True):
    """Nodes that one engine compiles as a unit.

    engine, device: where it runs. nodes: indices into the graph, ascending.
    pinned: its nodes are marked for the engine; region is the label they share. model_update: it has model updates.
    note: human-readable remark on its formation, or "". estimate: of the cost model, None if there were no costs.
    """

    engine: str
    nodes: tuple[int, ...]
    device: str
    pinned: bool = False
    model_update: bool = False
    note: str = ""
    region: str = ""
    estimate: Estimate | None = None


class Clustering(Struct, frozen=True):
    """A partition of a graph's nodes: clusters, ordered by their first nodes, and host nodes, each with a reason."""

    clusters: tuple[Cluster, ...]
    reasons: Mapping[int, str]
    node_count: int

    def assignment(self) -> list[int]:
        """Per node the index of its cluster, -1 for the host."""
        found = [-1] * self.node_count
        for k, c in enumerate(self.clusters):
            for i in c.nodes:
                found[i] = k
        return found


@collector_paused()  # there are up to twenty containers per node, and collections take half of the time
def cluster(
    graph: Graph,
    marks: Marks,
    *,
    minimum_nodes: int = 1,
    maximum_nodes: int = UNLIMITED,
    strict: bool = True,
    merge_updates: bool = False,
    costs: Callable[[str], Costs] | None = None,
    prune: bool = True,
) -> Clustering:
    """Group the nodes that `marks` allows into clusters.

    In a cluster all nodes have one engine, device, SBP signature and placement, are all model updates or none (unless
    `merge_updates`), and are all of one marked region or unmarked. Contracting all clusters of all engines at once
    leaves a directed acyclic graph. Clusters have at most `maximum_nodes`; one under `minimum_nodes` is dissolved, and
    the remaining nodes are offered to the next engine. A cluster need not be connected: nodes without a path between
    them share one if that delays nothing, so a graph that one engine supports entirely is one cluster, and so are all
    updates of an optimiser.

    strict: no node outside the clusters of an engine is delayed: the set of nodes that must run before it is the same
        in the graph and in the graph with clusters contracted. Graph outputs do not count, nor do model updates that
        nothing reads, nor other clusters of the same engine (a reader of one waits for the whole cluster anyway). The
        clusters are then the coarsest possible, and unique, bounds aside. Examples, with H left to the host and the
        other nodes supported:

            a -> b, a -> H          {a} {b}     with b in a's cluster, H would wait for b
            a -> b -> H, a -> H     {a, b}      H waits for b anyway
            a -> b, a -> c -> d, b -> d         {a, b, c, d}, whatever reads d: a residual block is whole
            a -> b, c -> b, b -> H  {a, b, c}   H waits for all three

        Without strict, edges are contracted further wherever that makes no cycle, in the first example to {a, b}.

    Pinned nodes are grouped first, each region separately, not strictly and without bounds: a region that a user marked
    is split only where a path leaves it and re-enters it, into the fewest convex parts (`contraction.region_groups`),
    or where its nodes differ in device, SBP, placement or in being updates.

    costs: device -> constants of the cost model; each cluster then has an estimate. With `prune`, clusters that save
        no time are dissolved and their nodes offered to the next engine; readers of dissolved nodes do not count as
        delayed, since they wait for the same nodes as before. Marked regions are never dissolved, nor is any cluster if
        the engines support the whole graph. Before that, clusters may be reassigned to a later engine
        (`reassign_clusters`).

    Deterministic, and close to linear in nodes and edges. `contraction` has the proof that no cycle can arise;
    `Contraction.merge` raises on one.

    Raises OptionError for bounds under 1 or that contradict each other.
    """
    if minimum_nodes < 1:
        raise OptionError(f"minimum_nodes={minimum_nodes}: must be at least 1")
    if maximum_nodes < minimum_nodes:
        raise OptionError(f"maximum_nodes={maximum_nodes}: must be at least minimum_nodes={minimum_nodes}")
    bounds = Bounds(minimum_nodes, maximum_nodes, strict)
    grower = Grower(graph, bounds, marks.engines)
    signature = signatures(graph, marks.device, merge_updates)
    grower.grow_regions(pinned_kinds(marks, signature))
    takes = taken(marks)
    offers = takers(takes, signature, grower.clustered)
    while True:
        grown = False
        while True:
            new = [grower.grow(kind, nodes) for kind, nodes in offers]
            grown |= any(new)
            if not any(new) or not grower.any_dissolved():  # nodes dissolved by one engine may join another's clusters
                break
        if not grown:
            break
        grower.settle()
        if costs is None or not prune:
            break
        changed = len(takes) > 1 and reassign_clusters(grower, takes, costs)
        if not grower.prune(costs):  # ends: a dissolved cluster is not offered to that engine again
            if changed:
                grower.settle()
            break
    members = grower.members()
    estimates = [None] * len(members) if costs is None else grower.estimates(costs)
    notes = {**region_notes(graph, grower, members), **reassignment_notes(grower, members)}
    clusters = []
    for (u, nodes), found in zip(members.items(), estimates, strict=True):
        k = grower.kind_of(u)
        update = k.model_update or any(i in grower.updates for i in nodes)
        clusters.append(Cluster(k.engine, nodes, k.device, k.pinned, update, notes.get(u, ""), k.region, found))
    return Clustering(tuple(clusters), reasons_of(grower, marks), len(graph.nodes))


# --- cluster growth ---


class Bounds(Struct, frozen=True):
    """The options of `cluster` of these names."""

    minimum: int
    maximum: int
    strict: bool


class Reassignment(NamedTuple):
    """A cluster of `engine` that became part of a cluster of a later engine (`reassign_clusters`).

    apart: estimated seconds per call of its launch and transfers as a separate cluster.
    faster: estimated seconds per call that its own engine would save on its nodes.
    """

    engine: str
    apart: float
    faster: float


class Grower:
    """The mutable state of clustering: the graph contracted by its clusters so far, and the kind of each cluster.

    unit: node -> unit. owner: unit -> index of its kind in `kinds`, -1 if it is no cluster. clustered: node -> whether
    it is in a cluster. Of dissolved clusters, for each engine: `small`: node -> size of one that was too small, 0 for
    none; `unpaid`: node -> index in `losses` of one that saves no time, -1 for none. losses: number of nodes, and the
    three figures of the Estimate. reassigned: node -> index in `reassignments` of its former cluster, -1 for none.
    updates: the nodes that are model updates.
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
        self._settled: dict[int, Contraction] = {}  # kind -> the contraction in which its clusters could not be merged

    @functools.cached_property
    def estimator(self) -> Estimator:
        """The cost model for this graph."""
        return Estimator(self.graph, self.reads)

    def kind_of(self, unit: int) -> Kind:
        """The kind of a unit that is a cluster."""
        return self.kinds[int(self.owner[unit])]

    def grow(self, kind: Kind, nodes: np.ndarray) -> bool:
        """Form clusters of the nodes that are in none yet. Returns whether there is a new one."""
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
            if not self.bounds.strict:  # acyclic: splitting a group cannot make a cycle
                label = _apart(label, open_)
                break
            # dissolved nodes are outside now and must not be delayed either: group the others again
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
        """Form the fewest clusters of each marked region; called before any other clustering.

        All regions at once; those that would form cycles with each other are then grouped one after another.
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
        """Merge clusters of one kind that could not be merged while their neighbours were single nodes."""
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
        """Labels of the open units that delay no closed unit, and whether no group was cut by a bound."""
        found = free_groups(self.units, open_, self._unread_updates())
        label = _sliced(found, self.units, open_, 1, self.bounds.maximum)
        return label, label is found

    def prune(self, costs: Callable[[str], Costs]) -> bool:
        """Dissolve clusters that save no time, unless the host has no nodes. Returns whether any was dissolved."""
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
        label[dropped] = len(self.units) + dropped  # acyclic: splitting a group cannot make a cycle
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
        """The estimates of the clusters, in the order of `members`."""
        cluster, units = self.clusters()
        if not len(units):
            return []
        first = np.full(len(units), len(cluster))
        inside = np.flatnonzero(cluster >= 0)
        first[cluster[inside[::-1]]] = inside[::-1]
        seconds = self.seconds(cluster, units, costs)[:, np.argsort(first)]
        return [Estimate(*found) for found in zip(*seconds.tolist(), strict=True)]

    def any_dissolved(self) -> bool:
        """Whether a node outside all clusters was in one that was too small."""
        return any(bool(sizes.any()) for sizes in self.small.values())

    def clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Per node the number of its cluster, -1 for none; and the units that are clusters, by number."""
        units = np.flatnonzero(self.owner >= 0)
        number = np.full(len(self.units), -1)
        number[units] = np.arange(len(units))
        return number[self.unit], units

    def seconds(self, cluster: np.ndarray, units: np.ndarray, costs: Callable[[str], Costs]) -> np.ndarray:
        """Estimates of clusters, numbered as in `clusters`: three rows, see `Estimator`."""
        devices = list(dict.fromkeys(k.device for k in self.kinds))
        which = np.array([devices.index(k.device) for k in self.kinds])
        return self.estimator(cluster, [costs(d) for d in devices], which[self.owner[units]])

    def number(self, kind: Kind) -> int:
        """The index of a kind in `kinds`, to which it is added if new."""
        found = self._numbers.setdefault(kind, len(self.kinds))
        if found == len(self.kinds):
            self.kinds.append(kind)
        return found

    def _unread_updates(self) -> np.ndarray:
        """Units with a model update on which nothing depends."""
        units = self.unit[self._listed]
        read = np.zeros(len(self.units), np.bool_)
        read[self.units.edges[0]] = True
        found: np.ndarray = units[~read[units]]
        return found

    def merge(self, label: np.ndarray, merged: _Merged | None = None) -> None:
        """Merge the units of each label. merged: the result, if it is known."""
        if (label == np.arange(len(label))).all():
            return
        owner = self.owner
        self.units, new = merged or self.units.merge(label)
        self.unit = new[self.unit]
        self.owner = np.full(len(self.units), -1)
        self.owner[new] = owner

    def _group(self, open_: np.ndarray, ignored: np.ndarray) -> tuple[np.ndarray, _Merged | None, bool]:
        """Labels of the open units; the result of merging by them, if known; whether no group was cut by a bound.

        If not strict, edges are contracted although nodes outside wait longer: free groups first, then level groups,
        then edge groups.
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
        if steps > freed or not whole:  # otherwise there are no more free groups
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
    """The units by connected component, each in topological order, so that slices cut few edges."""
    parent = {u: u for u in members}
    for u in members:
        for s in units.successors[u]:
            if s in parent:
                a, b = find_root(parent, u), find_root(parent, s)
                parent[max(a, b)] = min(a, b)
    components: dict[int, list[int]] = {}
    for u in members:
        components.setdefault(find_root(parent, u), []).append(u)
    return [u for component in components.values() for u in component]


def _apart(label: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """The labels as first members of their groups, with every unit that is not open in a group of its own."""
    first: dict[int, int] = {}
    return np.asarray([first.setdefault(t, u) if open_[u] else u for u, t in enumerate(label.tolist())])


# --- reassignment to later engines ---


def reassign_clusters(grower: Grower, takes: Mapping[str, np.ndarray], costs: Callable[[str], Costs]) -> bool:
    """Reassign clusters to a lower-priority engine where the saved launches and transfers exceed the preferred engine's
    estimated speed-up. Returns whether any was reassigned.

    Engines cluster in order of priority, so one that supports few nodes may cut the next engine's nodes into pieces.
    Let a group be clusters of engine B and of engines before it that are connected by edges and can be one cluster of
    B. An engine is assumed to save the share `preferred` of compute time over engines of lower priority, so that

        apart   = sum over the group's clusters of their cost, less the cost of the group as one cluster of B
        faster  = sum over the clusters of engines before B of  preferred * max(moved / bandwidth, F / flops)

    and the group becomes one cluster if `apart` > `faster`. A single cluster has the share of `apart` that is
    proportional to its own launch and boundary; one whose `faster` is not less than its share stays, and the group is
    formed without it. If the host has nodes, the cost of a cluster is at most its cost on the host, since it would be
    dissolved otherwise.

    takes: engine -> per node whether it supports it, in order of priority. Marked regions are never reassigned, and no
    transfer is added: clusters are only merged, and no node outside is delayed, whatever `strict` is. (It may be if
    clusters still drop out of a group after `_ROUNDS` rounds.) Linear in nodes and edges, up to sorts.
    """
    changed = False
    engines = list(takes)
    for rank, engine in enumerate(engines):
        before = engines[:rank]
        sources: dict[Kind, list[int]] = {}
        for number in distinct(grower.owner[grower.owner >= 0]):
            kind = grower.kinds[number]
            if not kind.pinned and kind.engine in before:
                sources.setdefault(kind._replace(engine=engine), []).append(number)
        for target, numbers in sources.items():
            changed |= _reassign(grower, target, numbers, takes[engine], costs)
    return changed


def _reassign(
    grower: Grower, target: Kind, numbers: list[int], takes: np.ndarray, costs: Callable[[str], Costs]
) -> bool:
    """Reassign clusters of the kinds `numbers` to `target`, whose engine supports the nodes in `takes`."""
    owner = grower.owner
    own = owner == grower.number(target)
    reassigned = np.isin(owner, numbers)
    reassigned[grower.unit[~takes | (grower.unpaid[target.engine] >= 0)]] = False
    if not _adjacent(grower.units, owner, own, reassigned):
        return False
    constants = costs(target.device)
    cluster, which = grower.clusters()
    host, engine, around = np.zeros((3, len(owner)))
    host[which], engine[which], around[which] = grower.seconds(cluster, which, costs)
    faster = constants.preferred * (engine - around)
    alone = engine if grower.clustered.all() else np.minimum(host, engine)
    for left in reversed(range(_ROUNDS)):
        label = _mixed(grower, own | reassigned)
        chosen = label >= 0
        if not chosen.any():
            return False
        heads, group = np.unique(label[chosen], return_inverse=True)
        number = np.full(len(owner), -1)
        number[chosen] = group
        whole = grower.estimator(number[grower.unit], [constants], np.zeros(len(heads), np.int64))[1]
        saved = np.bincount(group, alone[chosen]) - whole
        weight = np.bincount(group, np.where(reassigned, around, 0.0)[chosen])
        apart = np.zeros(len(owner))
        apart[chosen] = (saved / weight)[group] * around[chosen]
        staying = chosen & reassigned & ~(apart > faster)
        if not staying.any():
            break
        reassigned &= ~staying
        if not left:
            lost = np.zeros(len(heads), np.bool_)
            lost[number[staying]] = True
            chosen &= ~lost[number]
    if not chosen.any():
        return False
    reassignments = np.full(len(owner), -1)
    for u in np.flatnonzero(chosen & reassigned).tolist():
        reassignments[u] = len(grower.reassignments)
        grower.reassignments.append(Reassignment(grower.kinds[owner[u]].engine, float(apart[u]), float(faster[u])))
    nodes = chosen[grower.unit]
    grower.reassigned = np.where(
        nodes & (grower.reassigned < 0), reassignments[grower.unit], grower.reassigned
    )  # of several reassignments the first is reported
    grower.merge(np.where(chosen, label, np.arange(len(owner))))
    grower.owner[grower.unit[nodes]] = grower.number(target)
    return True


def _adjacent(units: Contraction, owner: np.ndarray, own: np.ndarray, reassigned: np.ndarray) -> bool:
    """Whether an edge connects clusters of two engines that may become one cluster."""
    source, target = units.edges
    open_ = own | reassigned
    return bool((open_[source] & open_[target] & (owner[source] != owner[target])).any())


def _mixed(grower: Grower, open_: np.ndarray) -> np.ndarray:
    """For each unit the first of its group, -1 for none; groups are connected, with clusters of several engines."""
    label = _joined(grower.units, grower.free(open_)[0], open_)
    least = np.full(len(label), len(grower.kinds))
    most = np.full(len(label), -1)
    units = np.flatnonzero(open_)
    np.minimum.at(least, label[units], grower.owner[units])
    np.maximum.at(most, label[units], grower.owner[units])
    found: np.ndarray = np.where(open_ & (least < most)[label], label, -1)
    return found


def _joined(units: Contraction, label: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """The labels with each group split into its connected components; each label is the first of its units."""
    source, target = units.edges
    inner = open_[source] & open_[target] & (label[source] == label[target])
    parent = list(range(len(units)))
    for a, b in zip(source[inner].tolist(), target[inner].tolist(), strict=True):
        a, b = find_root(parent, a), find_root(parent, b)
        parent[max(a, b)] = min(a, b)
    for u, p in enumerate(parent):
        parent[u] = parent[p]  # a parent is smaller, and has its root already
    return np.asarray(parent, np.int64)


# --- reasons and notes ---


def reasons_of(grower: Grower, marks: Marks) -> dict[int, str]:
    """Return the reason for every node that is in no cluster."""
    left = np.flatnonzero(~grower.clustered)
    dissolved = np.zeros(len(left), np.bool_)  # whether it was in a dissolved cluster of any engine
    for engine in marks.engines:
        dissolved |= (grower.unpaid[engine][left] >= 0) | (grower.small[engine][left] > 0)
    reasons = dict.fromkeys(left.tolist(), "")
    for i in left[~dissolved].tolist():
        reasons[i] = marks.reason(i)
    nodes = left[dissolved]
    by_engine = [_reasons_by(engine, grower, marks, nodes) for engine in marks.engines]
    for i, texts in zip(nodes.tolist(), zip(*by_engine, strict=True), strict=False):
        reasons[i] = "; ".join(filter(None, texts))
    return reasons


def _reasons_by(engine: str, grower: Grower, marks: Marks, nodes: np.ndarray) -> list[str]:
    """For each node, some engine's dissolved node, the reason why this engine does not run it; "" for none."""
    lost: dict[tuple[int, float, float, float], str] = {}
    found = []
    verdicts = marks.verdicts[engine]
    losses, sizes = grower.unpaid[engine][nodes].tolist(), grower.small[engine][nodes].tolist()
    for i, loss, size in zip(nodes.tolist(), losses, sizes, strict=True):
        text = ""
        if loss >= 0:
            text = lost.get(grower.losses[loss], "")
            if not text:
                count, *seconds = grower.losses[loss]
                text = f"{engine}: a cluster of {_nodes(count)} would not pay, {Estimate(*seconds)}"
                lost[grower.losses[loss]] = text
        elif size:
            text = f"{engine}: a cluster of {_nodes(size)} would be under minimum_nodes={grower.bounds.minimum}"
        elif (v := verdicts[i]) is not None and not v.ok:
            text = f"{engine}: {v.reason or 'no reason given'}"
        found.append(text)
    return found


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def region_notes(graph: Graph, grower: Grower, members: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Cluster -> why its marked region was split, for regions that were. members: as `Grower.members`."""
    parts: dict[tuple[str, str], list[int]] = {}
    for u in members:
        kind = grower.kind_of(u)
        if kind.pinned:
            parts.setdefault((kind.engine, kind.region), []).append(u)
    notes = {}
    shown = _SHOWN
    for (engine, region), units in parts.items():
        if len(units) < 2:
            continue
        alike: dict[Kind, set[int]] = {}
        for u in units:
            alike.setdefault(grower.kind_of(u), set()).add(u)
        what = f"the region {region!r} marked for {engine}" if region else f"what is marked for {engine}"
        for k, u in enumerate(units):
            same = alike[grower.kind_of(u)]
            if len(same) < 2:
                why = "its nodes differ in device, SBP, placement or being updates"
            else:
                why = "a path leaves it and comes back"
                path = _reentrant_path(grower, u, same) if shown > 0 else []
                if path:
                    shown -= 1
                    why += f": {_path(graph, grower, path, members)}"
            notes[u] = f"part {k + 1} of {len(units)} of {what}: {why}"
    return notes


def reassignment_notes(grower: Grower, members: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Cluster -> which of its nodes were reassigned from other engines, and why. members: as `Grower.members`."""
    notes = {}
    for u in distinct(grower.unit[grower.reassigned >= 0]):
        own: dict[str, list[int]] = {}
        for k in grower.reassigned[list(members[u])].tolist():
            if k >= 0:
                own.setdefault(grower.reassignments[k].engine, []).append(k)
        said = []
        for engine, nodes in own.items():
            reassigned = [grower.reassignments[k] for k in dict.fromkeys(nodes)]
            apart, faster = duration(sum(r.apart for r in reassigned)), duration(sum(r.faster for r in reassigned))
            what, which = ("a cluster", "that") if len(reassigned) == 1 else (f"{len(reassigned)} clusters", "those")
            said.append(
                f"{_nodes(len(nodes))} of it would be {what} of {engine}, which stands before: launch and transfers of "
                f"{which} are estimated to cost {apart} a call, and {engine} is taken to save {faster}"
            )
        notes[u] = "; ".join(said)
    return notes


def _reentrant_path(grower: Grower, part: int, inside: set[int]) -> list[int]:
    """The shortest path that leaves a region and re-enters it, to or from this part of it."""
    low, high = min(inside), max(inside)
    for adjacency, step in ((grower.units.predecessors, -1), (grower.units.successors, 1)):
        came = {v: part for v in adjacency[part] if v not in inside}
        todo = deque(came)
        while todo:
            u = todo.popleft()
            for v in adjacency[u]:
                if v in inside and v != part:
                    path = [v, u]
                    while path[-1] != part:
                        path.append(came[path[-1]])
                    return path[::-step]
                if v not in came and v not in inside and low < v < high:
                    came[v] = u
                    todo.append(v)
    return []


def _path(graph: Graph, grower: Grower, units: Sequence[int], members: Mapping[int, Sequence[int]]) -> str:
    """The names along a path: of each unit the node with an edge to its neighbour on the path."""
    unit, consumers, producers = grower.unit, graph.consumers, graph.producers
    names = []
    for u, beside in zip(units, [units[1], *units[:-1]], strict=True):
        nodes = members.get(u) or [int(np.flatnonzero(unit == u)[0])]
        for i in nodes:
            n = graph.nodes[i]
            near = {producers[v] for v in n.uses() if v in producers}.union(
                *(consumers.get(o, ()) for o in n.outputs if o is not None)
            )
            if any(unit[j] == beside for j in near):
                break
        else:
            n = graph.nodes[nodes[0]]
        names.append(n.name or n.operator)
    return " -> ".join(names)
