"""Clustering: groups supported nodes into clusters, engine by engine in order of priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xrt_core.errors import OptionError
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.contraction import collector_paused
from xrt_core.passes.partitioning.cost_model import Costs, Estimate
from xrt_core.passes.partitioning.grow import Bounds, Grower
from xrt_core.passes.partitioning.reasons import reasons_of, reassignment_notes, region_notes
from xrt_core.passes.partitioning.reassign import reassign_clusters
from xrt_core.passes.partitioning.support import Marks, pinned_kinds, signatures, taken, takers

UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that one engine runs as one.

    engine, device: where it runs. nodes: indices into the graph, ascending.
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
        model updates that nothing reads, nor other clusters of the same engine (a reader of one has to wait for
        the whole cluster anyway). The clusters are then the coarsest there are, and unique, bounds aside. Examples,
        with H left to the host and the rest supported:

            a -> b, a -> H          {a} {b}     with b in a's cluster, H would wait for b
            a -> b -> H, a -> H     {a, b}      H waits for b anyway
            a -> b, a -> c -> d, b -> d         {a, b, c, d}, whatever reads d: a residual block is whole
            a -> b, c -> b, b -> H  {a, b, c}   H waits for all three

        Without strict, edges are contracted further wherever that makes no cycle, in the first example to {a, b}.

    Pinned nodes are grouped first, each region by itself, not strictly and without bounds: a region that a user marked
    is cut only where a path leaves it and comes back, into as few parts as that allows (`grouping.region_groups`), or
    where its nodes differ in device, SBP, placement or being updates.

    costs: device -> constants of the cost model (`cost_model`); each cluster then carries what it is estimated to save.
        With `prune` those that save nothing are dissolved, what is left is offered to the next engine, and other nodes
        are not held to be delayed thereby: whatever reads a node that was dissolved waits for what the node waits for.
        Marked regions are never dissolved, nor is anything where the engines take the whole graph. Before that, a
        cluster goes to an engine behind its own that takes all of it and has the clusters around it, where the order of
        the engines is estimated to be worth less than the launch and the transfers (`reassign`).

    Deterministic, and near-linear in nodes and edges;
    the argument why no cycle can arise is in `grouping`, and `Contraction.merge` raises on one.

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
            if not any(new) or not grower.any_dissolved():  # that may find company in what others dissolved
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
