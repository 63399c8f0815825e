"""Clustering: groups of marked nodes that engines are to run, one engine after another on what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xrt_core.errors import OptionError
from xrt_core.ir.annotations import NO_ANNOTATIONS
from xrt_core.ir.graph import Graph
from xrt_core.passes.clustering.collector import collector_paused
from xrt_core.passes.clustering.contract import Contraction
from xrt_core.passes.clustering.mark import Marks
from xrt_core.passes.clustering.merge import edge_groups, free_groups, level_groups, slices

UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that one engine runs as one.

    engine, device: who runs it and where. nodes: indices into the graph, ascending.
    pinned, model_update: what kind of node all of them are. note: what a reader should know of how it came about.
    """

    engine: str
    nodes: tuple[int, ...]
    device: str
    pinned: bool = False
    model_update: bool = False
    note: str = ""


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


@collector_paused()
def cluster(
    graph: Graph, marks: Marks, *, minimum_nodes: int = 1, maximum_nodes: int = UNLIMITED, strict: bool = True
) -> Clustering:
    """Group the nodes that `marks` allows into clusters.

    In a cluster all nodes have one engine, device, SBP signature and placement, are all model updates or none, and are
    all pinned or none. Contracting all clusters of all engines at once leaves a directed acyclic graph. Clusters hold
    at most `maximum_nodes`; one under `minimum_nodes` is dissolved, and what is left is offered to the next engine.
    A cluster need not be connected: nodes without an edge between them share one where that delays nothing, so a graph
    that one engine takes whole is one cluster, and so are all updates of an optimiser.

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

    Pinned nodes are grouped first and with pinned nodes only, as if not strict and without bounds: a region that a
    user marked is cut only where a path leaves it and comes back. Deterministic, and near-linear in nodes and edges;
    the argument why no cycle can arise is in `merge`, and `Contraction.merge` would notice.

    Raises OptionError for bounds under 1 or that contradict each other.
    """
    if minimum_nodes < 1:
        raise OptionError(f"minimum_nodes={minimum_nodes}: must be at least 1")
    if maximum_nodes < minimum_nodes:
        raise OptionError(f"maximum_nodes={maximum_nodes}: must be at least minimum_nodes={minimum_nodes}")
    grower = _Grower(graph, marks)
    signature = _signatures(graph, marks.device)
    pinned = [i for i, v in enumerate(marks.pins) if v in marks.verdicts]
    for kind, nodes in _kinds(((i, str(marks.pins[i])) for i in pinned), signature, pinned=True):
        grower.grow(kind, nodes, 1, UNLIMITED, strict=False)
    kinds: list[tuple[_Kind, list[int]]] = []
    taken = set(pinned)
    for engine in marks.engines:
        verdicts = marks.verdicts[engine]
        takes = ((i, engine) for i, v in enumerate(verdicts) if v is not None and v[0] and i not in taken)
        kinds.extend(_kinds(takes, signature, pinned=False))
    again = True
    while again:  # a second round only where something was dissolved: it may find company in what others dissolved
        again = False
        for kind, nodes in kinds:
            again |= grower.grow(kind, nodes, minimum_nodes, maximum_nodes, strict)
        again &= bool(grower.dissolved)
    grower.settle(maximum_nodes)
    return grower.clustering(minimum_nodes)


def _signatures(graph: Graph, device: str) -> list[_Signature]:
    plain: _Signature = (device, None, None, False)
    found = []
    for n in graph.nodes:
        a = n.annotations
        if a is NO_ANNOTATIONS or (a.sbp is None and a.device is None and a.placement is None and not a.model_update):
            found.append(plain)
        else:  # one entry per output says the same as one entry, where all agree
            sbp = tuple(dict.fromkeys(a.sbp)) if a.sbp and len(set(a.sbp)) == 1 else a.sbp
            found.append((a.device or device, sbp, a.placement, a.model_update))
    return found


def _kinds(
    nodes: Iterable[tuple[int, str]], signature: Sequence[_Signature], pinned: bool
) -> list[tuple[_Kind, list[int]]]:
    """The nodes by kind: model updates first, so that all others see them as the one unit they mostly become."""
    found: dict[tuple[str, _Signature], list[int]] = {}
    for i, engine in nodes:
        found.setdefault((engine, signature[i]), []).append(i)
    kinds = [(_Kind(engine, *own, pinned), members) for (engine, own), members in found.items()]
    return sorted(kinds, key=lambda k: not k[0].model_update)


class _Grower:
    """The clusters so far: the contraction of the graph by them, and who owns which unit."""

    def __init__(self, graph: Graph, marks: Marks) -> None:
        self.marks = marks
        self.units = Contraction.of_graph(graph)
        self.unit = list(range(len(graph.nodes)))  # node -> unit
        self.owner: dict[int, _Kind] = {}  # unit -> kind, for those that are clusters
        self.clustered = bytearray(len(graph.nodes))
        self.dissolved: dict[int, dict[str, int]] = {}  # node -> engine -> size of the cluster that was too small
        self.updates = [i for i, n in enumerate(graph.nodes) if n.annotations.model_update]

    def grow(self, kind: _Kind, nodes: Sequence[int], minimum: int, maximum: int, strict: bool) -> bool:
        """Make clusters of the nodes that are not in one yet. Returns whether there is a new one."""
        unit = self.unit
        left = [i for i in nodes if not self.clustered[i]]
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

    def settle(self, maximum: int) -> None:
        """Merge clusters of one kind that only seemed to delay each other's neighbours before those were clusters."""
        changed = len(set(self.owner.values())) > 1
        while changed:
            changed = False
            for kind in sorted(set(self.owner.values()), key=repr):
                open_ = [self.owner.get(u) == kind for u in range(len(self.units))]
                limit = UNLIMITED if kind.pinned else maximum
                before = len(self.units)
                label = free_groups(self.units, open_, self._unread_updates())
                self._merge(_sliced(label, self.units, open_, 1, limit))
                changed |= len(self.units) < before

    def clustering(self, minimum: int) -> Clustering:
        """The result, with a reason for every node of the host."""
        members: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        for i, u in enumerate(self.unit):
            if self.clustered[i]:
                members.setdefault(u, []).append(i)
            else:
                reasons[i] = self._reason(i, minimum)
        clusters = []
        for u, nodes in members.items():
            k = self.owner[u]
            around = (*self.units.predecessors[u], *self.units.successors[u])
            cut = k.pinned and any(self.owner.get(v) == k for v in around)
            note = "part of a marked region that a path leaves and re-enters" if cut else ""
            clusters.append(Cluster(k.engine, tuple(nodes), k.device, k.pinned, k.model_update, note))
        return Clustering(tuple(clusters), reasons, len(self.unit))

    def _reason(self, node: int, minimum: int) -> str:
        small = self.dissolved.get(node)
        if not small:
            return self.marks.reason(node)
        said = []
        for engine in self.marks.engines:
            if engine in small:
                n = small[engine]
                nodes = f"{n} node{'s' if n > 1 else ''}"
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
