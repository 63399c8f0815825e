"""Human-readable reasons: why a node stays on the host, why a marked region is in parts, why a cluster moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.contraction import distinct
from xrt_core.passes.partitioning.cost_model import Estimate, duration
from xrt_core.passes.partitioning.grow import Grower
from xrt_core.passes.partitioning.support import Kind, Marks

_SHOWN = 32  # parts of marked regions whose note names the path that cut them off


def reasons_of(grower: Grower, marks: Marks) -> dict[int, str]:
    """For every node that is in no cluster, the reason."""
    left = np.flatnonzero(~grower.clustered)
    dissolved = np.zeros(len(left), np.bool_)  # whether it was in a cluster, for any engine
    for engine in marks.engines:
        dissolved |= (grower.unpaid[engine][left] >= 0) | (grower.small[engine][left] > 0)
    reasons = dict.fromkeys(left.tolist(), "")
    for i in left[~dissolved].tolist():
        reasons[i] = marks.reason(i)
    nodes = left[dissolved]
    said = [_said(engine, grower, marks, nodes) for engine in marks.engines]
    for i, texts in zip(nodes.tolist(), zip(*said, strict=True), strict=False):
        reasons[i] = "; ".join(filter(None, texts))
    return reasons


def _said(engine: str, grower: Grower, marks: Marks, nodes: np.ndarray) -> list[str]:
    """What an engine says about nodes of which it, or another, had some in clusters; "" for nothing."""
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
    """Unit -> why a marked region is in parts, for those that are. members: the clusters, as `Grower.members`."""
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
                path = _way_back(grower, u, same) if shown > 0 else []
                if path:
                    shown -= 1
                    why += f": {_path(graph, grower, path, members)}"
            notes[u] = f"part {k + 1} of {len(units)} of {what}: {why}"
    return notes


def reassignment_notes(grower: Grower, members: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Unit -> what it has of engines before its own, and why, for those that have. members: as `Grower.members`."""
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


def _way_back(grower: Grower, part: int, inside: set[int]) -> list[int]:
    """The shortest path through others from another part of a region to this one, or from this one to another."""
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
    """The names along a path: of each unit the node that has an edge to the one before, or else behind, it."""
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
