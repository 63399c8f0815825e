"""Clustering: groups of marked nodes that engines are to run, one engine after another on what is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xrt_core.errors import InternalError, OptionError
from xrt_core.ir.annotations import NO_ANNOTATIONS
from xrt_core.ir.graph import Graph
from xrt_core.passes.clustering.collector import collector_paused
from xrt_core.passes.clustering.contract import Contraction
from xrt_core.passes.clustering.gain import Costs, Estimate, Estimator
from xrt_core.passes.clustering.mark import Marks
from xrt_core.passes.clustering.merge import edge_groups, free_groups, level_groups, region_groups, slices

UNLIMITED = 2**31 - 1
_SHOWN = 32  # parts of marked regions whose note names the path that cut them off


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that one engine runs as one.

    engine, device: who runs it and where. nodes: indices into the graph, ascending.
    pinned: its nodes are marked for the engine, and region is the label they share. model_update: it has updates.
    note: what a reader should know of how it came about. estimate: what it saves, where that was asked for.
    """

    engine: str
    nodes: tuple[int, ...]
    device: str
    pinned: bool = False
    model_update: bool = False
    note: str = ""
    region: str = ""
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Clustering:
    """A partition of a graph's nodes: clusters by their first node, and the host's nodes, each with a reason."""

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


_Signature = tuple[str, tuple[str, ...] | None, tuple[str, ...] | None, bool]  # device, SBP, placement, update


class _Kind(NamedTuple):
    """Nodes may share a cluster only where all of this is equal."""

    engine: str
    device: str
    sbp: tuple[str, ...] | None
    placement: tuple[str, ...] | None
    model_update: bool
    pinned: bool
    region: str = ""


@collector_paused()
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
    `merge_updates`), and are all of one marked region or not marked. Contracting all clusters of all engines at once
    leaves a directed acyclic graph. Clusters hold at most `maximum_nodes`; one under `minimum_nodes` is dissolved, and
    what is left is offered to the next engine. A cluster need not be connected: nodes without an edge between them
    share one where that delays nothing, so a graph that one engine takes whole is one cluster, and so are all updates
    of an optimiser.

    strict: no node outside the clusters of an engine waits for more than before: the set of nodes that must run before
        it starts is the same in the graph and in the graph with clusters contracted. Graph outputs don't count, nor do
        model updates that nothing reads, nor other clusters of the same engine (whoever waits for those has to wait
        for all of it anyway). The clusters are then the coarsest there are, and unique, bounds aside. Examples, with
        H left to the host and the rest supported:

            a -> b, a -> H          {a} {b}     with b in a's cluster, H would wait for b
            a -> b -> H, a -> H     {a, b}      H waits for b anyway
            a -> b, a -> c -> d, b -> d         {a, b, c, d}, whatever reads d: a residual block is whole
            a -> b, c -> b, b -> H  {a, b, c}   H waits for all three

        Without strict, edges are contracted further wherever that makes no cycle, in the first example to {a, b}.

    Pinned nodes are grouped first, each region by itself, not strictly and without bounds: a region that a user marked
    is cut only where a path leaves it and comes back, into as few parts as that allows (`merge.region_groups`), or
    where its nodes differ in device, SBP, placement or being updates.

    costs: device -> constants of the cost model (`gain`); each cluster then carries what it is estimated to save. With
        `prune` those that save nothing are dissolved, what is left is offered to the next engine, and other nodes are
        not held to be delayed thereby: whatever reads a node that was dissolved waits for what the node waits for.
        Marked regions are never dissolved, nor is anything where the engines take the whole graph.

    Deterministic, and near-linear in nodes and edges;
    the argument why no cycle can arise is in `merge`, and `Contraction.merge` would notice.

    Raises OptionError for bounds under 1 or that contradict each other.
    """
    if minimum_nodes < 1:
        raise OptionError(f"minimum_nodes={minimum_nodes}: must be at least 1")
    if maximum_nodes < minimum_nodes:
        raise OptionError(f"maximum_nodes={maximum_nodes}: must be at least minimum_nodes={minimum_nodes}")
    grower = _Grower(graph, marks, costs)
    signature = _signatures(graph, marks.device, merge_updates)
    pinned = [i for i, v in enumerate(marks.pins) if v in marks.verdicts]
    regions = ((i, str(marks.pins[i]), marks.regions[i]) for i in pinned)
    grower.grow_regions(_kinds(regions, signature, pinned=True))
    kinds: list[tuple[_Kind, list[int]]] = []
    taken = set(pinned)
    for engine in marks.engines:
        verdicts = marks.verdicts[engine]
        takes = ((i, engine, "") for i, v in enumerate(verdicts) if v is not None and v[0] and i not in taken)
        kinds.extend(_kinds(takes, signature, pinned=False))
    while True:
        grown = False
        while True:
            new = [grower.grow(kind, nodes, minimum_nodes, maximum_nodes, strict) for kind, nodes in kinds]
            grown |= any(new)
            if not any(new) or not grower.dissolved:  # what was dissolved may find company in what others dissolved
                break
        if not grown:
            break
        grower.settle(maximum_nodes)
        if costs is None or not prune or not grower.prune():  # ends: no node is offered to an engine again
            break
    return grower.clustering(minimum_nodes)


def _signatures(graph: Graph, device: str, merge_updates: bool) -> list[_Signature]:
    plain: _Signature = (device, None, None, False)
    found = []
    for n in graph.nodes:
        a = n.annotations
        if a is NO_ANNOTATIONS or (a.sbp is None and a.device is None and a.placement is None and not a.model_update):
            found.append(plain)
        else:  # one entry per output says the same as one entry, where all agree
            sbp = tuple(dict.fromkeys(a.sbp)) if a.sbp and len(set(a.sbp)) == 1 else a.sbp
            found.append((a.device or device, sbp, a.placement, a.model_update and not merge_updates))
    return found


def _kinds(
    nodes: Iterable[tuple[int, str, str]], signature: Sequence[_Signature], pinned: bool
) -> list[tuple[_Kind, list[int]]]:
    """The nodes, each with engine and region, by kind.

    Model updates come first, so that all others see them as the one unit they mostly become.
    """
    found: dict[tuple[str, str, _Signature], list[int]] = {}
    for i, engine, region in nodes:
        found.setdefault((engine, region, signature[i]), []).append(i)
    kinds = [(_Kind(engine, *own, pinned, region), members) for (engine, region, own), members in found.items()]
    return sorted(kinds, key=lambda k: not k[0].model_update)


class _Grower:
    """The clusters so far: the contraction of the graph by them, and who owns which unit."""

    def __init__(self, graph: Graph, marks: Marks, costs: Callable[[str], Costs] | None) -> None:
        self.graph = graph
        self.marks = marks
        self.costs = costs
        self.plain = self.units = Contraction.of_graph(graph)
        self.unit = list(range(len(graph.nodes)))  # node -> unit
        self.owner: dict[int, _Kind] = {}  # unit -> kind, for those that are clusters
        self.clustered = bytearray(len(graph.nodes))
        self.dissolved: dict[int, dict[str, int]] = {}  # node -> engine -> size of the cluster that was too small
        self.unpaid: dict[int, dict[str, str]] = {}  # node -> engine -> why the cluster it was in does not pay
        self.estimators: dict[str, Estimator] = {}
        self.estimates: dict[tuple[int, ...], Estimate] = {}
        self.updates = [i for i, n in enumerate(graph.nodes) if n.annotations.model_update]

    def grow(self, kind: _Kind, nodes: Sequence[int], minimum: int, maximum: int, strict: bool) -> bool:
        """Make clusters of the nodes that are not in one yet. Returns whether there is a new one."""
        unit = self.unit
        unpaid = self.unpaid
        left = [i for i in nodes if not self.clustered[i] and not (i in unpaid and kind.engine in unpaid[i])]
        if not left:
            return False
        open_ = [False] * len(self.units)
        for i in left:
            open_[unit[i]] = True
        free = self._unread_updates()
        while True:
            if strict:
                label = _sliced(free_groups(self.units, open_, free), self.units, open_, minimum, maximum)
            else:
                label = self._loose(open_, free, minimum, maximum)
            sizes = [0] * len(label)
            for i in left:
                sizes[label[unit[i]]] += 1
            small = [i for i in left if sizes[label[unit[i]]] < minimum]
            if not small:
                break
            for i in small:
                open_[unit[i]] = False
                self.dissolved.setdefault(i, {})[kind.engine] = sizes[label[unit[i]]]
                label[unit[i]] = unit[i]
            left = [i for i in left if open_[unit[i]]]
            if not strict:  # the rest stays acyclic: taking a group apart cannot make a cycle
                label = _apart(label, open_)
                break
            # what was dissolved stays outside now, and must not be delayed either: group the rest again
        for i in left:
            self.clustered[i] = True
            self.dissolved.pop(i, None)
        self._merge(label)
        for i in left:
            self.owner[self.unit[i]] = kind
        return bool(left)

    def grow_regions(self, regions: Sequence[tuple[_Kind, list[int]]]) -> None:
        """Make as few clusters of each marked region as there can be; nothing has been clustered before.

        All at once, and one after another those few that would wait for each other then.
        """
        label = list(range(len(self.units)))
        for _, nodes in regions:
            for u, first in region_groups(self.units, nodes).items():
                label[u] = first
        cyclic: set[int] = set()
        try:
            self._merge(label)
        except InternalError:
            cyclic = self.units.on_cycles(label)
            self._merge([u if t in cyclic else t for u, t in enumerate(label)])
        for _, nodes in regions:
            if cyclic and any(label[i] in cyclic for i in nodes):
                groups = region_groups(self.units, sorted({self.unit[i] for i in nodes}))
                self._merge([groups.get(u, u) for u in range(len(self.units))])
            for i in nodes:
                self.clustered[i] = True
        for kind, nodes in regions:
            self.owner.update((self.unit[i], kind) for i in nodes)

    def prune(self) -> bool:
        """Dissolve the clusters that save nothing, where the host has nodes anyway. Returns whether there were any."""
        if all(self.clustered):
            return False
        dropped: set[int] = set()
        for u, nodes in self._members().items():
            kind = self.owner[u]
            if kind.pinned or (found := self._estimate(kind, nodes)).gain > 0:
                continue
            dropped.add(u)
            said = f"a cluster of {len(nodes)} node{'s' if len(nodes) > 1 else ''} would not pay, {found}"
            for i in nodes:
                self.clustered[i] = False
                self.unpaid.setdefault(i, {})[kind.engine] = said
        if not dropped:
            return False
        count = len(self.units)  # the rest stays acyclic: taking a group apart cannot make a cycle
        label = [count + i if u in dropped else u for i, u in enumerate(self.unit)]
        owner = self.owner
        self.units, new = self.plain.merge(label)
        self.owner = {new[i]: owner[u] for i, u in enumerate(self.unit) if u in owner and u not in dropped}
        self.unit = new
        return True

    def _members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for i, u in enumerate(self.unit):
            if self.clustered[i]:
                members.setdefault(u, []).append(i)
        return members

    def _estimate(self, kind: _Kind, nodes: Sequence[int]) -> Estimate:
        key = tuple(nodes)
        found = self.estimates.get(key)
        if found is None:
            estimator = self.estimators.get(kind.device)
            if estimator is None:
                assert self.costs is not None
                estimator = self.estimators[kind.device] = Estimator(self.graph, self.costs(kind.device))
            found = self.estimates[key] = estimator(nodes)
        return found

    def settle(self, maximum: int) -> None:
        """Merge clusters of one kind that only seemed to delay each other's neighbours before those were clusters."""
        changed = len(set(self.owner.values())) > 1 or bool(self.unpaid)
        while changed:
            changed = False
            for kind in sorted({k for k in self.owner.values() if not k.pinned}, key=repr):
                open_ = [self.owner.get(u) == kind for u in range(len(self.units))]
                before = len(self.units)
                label = free_groups(self.units, open_, self._unread_updates())
                self._merge(_sliced(label, self.units, open_, 1, maximum))
                changed |= len(self.units) < before

    def clustering(self, minimum: int) -> Clustering:
        """The result, with a reason for every node of the host."""
        reasons = {i: self._reason(i, minimum) for i, c in enumerate(self.clustered) if not c}
        members = self._members()
        notes = self._notes(members)
        clusters = []
        nodes_of = self.graph.nodes
        for u, nodes in members.items():
            k = self.owner[u]
            update = k.model_update or any(nodes_of[i].annotations.model_update for i in nodes)
            found = None if self.costs is None else self._estimate(k, nodes)
            note = notes.get(u, "")
            clusters.append(Cluster(k.engine, tuple(nodes), k.device, k.pinned, update, note, k.region, found))
        return Clustering(tuple(clusters), reasons, len(self.unit))

    def _notes(self, members: Mapping[int, Sequence[int]]) -> dict[int, str]:
        """Unit -> why a marked region is in parts, for those that are."""
        parts: dict[tuple[str, str], list[int]] = {}
        for u in members:
            if self.owner[u].pinned:
                parts.setdefault((self.owner[u].engine, self.owner[u].region), []).append(u)
        notes = {}
        shown = _SHOWN
        for (engine, region), units in parts.items():
            if len(units) < 2:
                continue
            alike: dict[_Kind, set[int]] = {}
            for u in units:
                alike.setdefault(self.owner[u], set()).add(u)
            what = f"the region {region!r} marked for {engine}" if region else f"what is marked for {engine}"
            for k, u in enumerate(units):
                same = alike[self.owner[u]]
                if len(same) < 2:
                    why = "its nodes differ in device, SBP, placement or being updates"
                else:
                    why = "a path leaves it and comes back"
                    path = self._way_back(u, same) if shown > 0 else []
                    if path:
                        shown -= 1
                        why += f": {self._path(path, members)}"
                notes[u] = f"part {k + 1} of {len(units)} of {what}: {why}"
        return notes

    def _way_back(self, part: int, inside: set[int]) -> list[int]:
        """The shortest path through others from another part of a region to this one, or from this one to another."""
        low, high = min(inside), max(inside)
        for adjacency, step in ((self.units.predecessors, -1), (self.units.successors, 1)):
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

    def _path(self, units: Sequence[int], members: Mapping[int, Sequence[int]]) -> str:
        """The names along a path: of each unit the node that has an edge to the one before, or else behind, it."""
        graph = self.graph
        names = []
        for u, beside in zip(units, [units[1], *units[:-1]], strict=True):
            nodes = members.get(u) or [self.unit.index(u)]
            edged = (
                i for i in nodes if any(self.unit[j] == beside for j in (*graph.predecessors[i], *graph.successors[i]))
            )
            n = graph.nodes[next(edged, nodes[0])]
            names.append(n.name or n.operator)
        return " -> ".join(names)

    def _reason(self, node: int, minimum: int) -> str:
        small, unpaid = self.dissolved.get(node, {}), self.unpaid.get(node, {})
        if not small and not unpaid:
            return self.marks.reason(node)
        said = []
        for engine in self.marks.engines:
            if engine in unpaid:
                said.append(f"{engine}: {unpaid[engine]}")
            elif engine in small:
                nodes = f"{small[engine]} node{'s' if small[engine] > 1 else ''}"
                said.append(f"{engine}: a cluster of {nodes} would be under minimum_nodes={minimum}")
            elif (v := self.marks.verdicts[engine][node]) is not None and not v.ok:
                said.append(f"{engine}: {v.reason or 'no reason given'}")
        return "; ".join(said)

    def _unread_updates(self) -> set[int]:
        successors = self.units.successors
        return {u for i in self.updates if not successors[u := self.unit[i]]}

    def _merge(self, label: list[int]) -> None:
        if len(set(label)) == len(label):
            return
        self.units, new = self.units.merge(label)
        self.unit = [new[u] for u in self.unit]
        self.owner = {new[u]: kind for u, kind in self.owner.items()}

    def _loose(self, open_: list[bool], free: set[int], minimum: int, maximum: int) -> list[int]:
        """Labels where edges are contracted though others wait longer: all that is free, by levels, by single edges."""
        units = self.units
        total = list(range(len(units)))

        def step(label: list[int]) -> None:
            nonlocal units, open_, free, total
            if len(set(label)) == len(label):
                return
            units, new = units.merge(_sliced(label, units, open_, minimum, maximum))
            total = [new[u] for u in total]
            merged = [False] * len(units)
            for u, is_open in enumerate(open_):
                merged[new[u]] = is_open
            open_, free = merged, {new[u] for u in free}

        step(free_groups(units, open_, free))
        step(level_groups(units, open_))
        step(edge_groups(units, open_, maximum))
        step(free_groups(units, open_, free))
        first: dict[int, int] = {}
        return [first.setdefault(t, u) for u, t in enumerate(total)]


def _sliced(label: list[int], units: Contraction, open_: Sequence[bool], minimum: int, maximum: int) -> list[int]:
    """The labels with every group over `maximum` nodes cut into slices."""
    total: dict[int, int] = {}
    for u, t in enumerate(label):
        if open_[u]:
            total[t] = total.get(t, 0) + units.sizes[u]
    large: dict[int, list[int]] = {t: [] for t, n in total.items() if n > maximum}
    if not large:
        return label
    for u, t in enumerate(label):
        if t in large:
            large[t].append(u)
    label = list(label)
    for members in large.values():
        for piece in slices(_by_component(members, units), units.sizes, minimum, maximum):
            for u in piece:
                label[u] = piece[0]
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


def _apart(label: list[int], open_: Sequence[bool]) -> list[int]:
    """The labels again as first members of their groups, with every unit that is not open alone."""
    first: dict[int, int] = {}
    return [first.setdefault(t, u) if open_[u] else u for u, t in enumerate(label)]
