"""Reassigns clusters to a lower-priority engine when the saved transfers exceed the preferred engine's speed-up.

Engines cluster in order of priority, so one that supports few nodes may cut the next engine's nodes into pieces. With
the constants of the cost model, let a group be clusters of engine B and of engines before it, joined by edges and able
to be one cluster of B. What lies between launch and boundary is taken to be a share `preferred` quicker on an
engine that stands before, so that

    apart   = sum over the group's clusters of their cost, less the cost of the group as one cluster of B
    faster  = sum over the clusters of engines before B of  preferred * max(moved / bandwidth, F / flops)

and the group becomes one where `apart` is more than `faster`. What a single cluster has of `apart` is in proportion to
its own launch and boundary; one that is worth more than that stays, and the group is formed anew without it. Where the
host has nodes, what would cost less there counts with that: it would not stay a cluster anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from xrt_core.passes.partitioning.contraction import Contraction, distinct
from xrt_core.passes.partitioning.cost_model import Costs
from xrt_core.passes.partitioning.grow import Grower, Reassignment
from xrt_core.passes.partitioning.support import Kind

_ROUNDS = 8  # in which clusters may turn out to be worth staying, for each engine that others might go to


def reassign_clusters(grower: Grower, takes: Mapping[str, np.ndarray], costs: Callable[[str], Costs]) -> bool:
    """Reassign clusters to later engines where that is estimated to be cheaper. Returns whether any was reassigned.

    takes: engine -> per node whether it takes it, in the order of the engines. Marked regions are not touched, and no
    transfer is added: clusters are only merged, and so that nothing outside is delayed, whatever `strict` says. (Where
    clusters still turn out to be worth staying after `_ROUNDS` rounds, those may be.) Linear in nodes and edges, up to
    sorts.
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
    """Reassign clusters of the kinds `numbers` to `target`, whose engine takes the nodes in `takes`."""
    owner = grower.owner
    own = owner == grower.number(target)
    reassigned = np.isin(owner, numbers)
    reassigned[grower.unit[~takes | (grower.unpaid[target.engine] >= 0)]] = False
    if not _touch(grower.units, owner, own, reassigned):
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
    )  # the first engine's counts
    grower.merge(np.where(chosen, label, np.arange(len(owner))))
    grower.owner[grower.unit[nodes]] = grower.number(target)
    return True


def _touch(units: Contraction, owner: np.ndarray, own: np.ndarray, reassigned: np.ndarray) -> bool:
    """Whether an edge joins a cluster that may be reassigned and one of another engine."""
    source, target = units.edges
    open_ = own | reassigned
    return bool((open_[source] & open_[target] & (owner[source] != owner[target])).any())


def _mixed(grower: Grower, open_: np.ndarray) -> np.ndarray:
    """For each unit the first of its group, -1 for none: groups that edges join, with clusters of several engines."""
    label = _joined(grower.units, grower.free(open_)[0], open_)
    least = np.full(len(label), len(grower.kinds))
    most = np.full(len(label), -1)
    units = np.flatnonzero(open_)
    np.minimum.at(least, label[units], grower.owner[units])
    np.maximum.at(most, label[units], grower.owner[units])
    found: np.ndarray = np.where(open_ & (least < most)[label], label, -1)
    return found


def _joined(units: Contraction, label: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """The labels with each group taken apart into what edges join; every label is the first of its units."""
    source, target = units.edges
    inner = open_[source] & open_[target] & (label[source] == label[target])
    parent = list(range(len(units)))
    for a, b in zip(source[inner].tolist(), target[inner].tolist(), strict=True):
        while parent[a] != a:
            parent[a] = a = parent[parent[a]]
        while parent[b] != b:
            parent[b] = b = parent[parent[b]]
        parent[max(a, b)] = min(a, b)
    for u, p in enumerate(parent):
        parent[u] = parent[p]  # a parent is smaller, and has its root already
    return np.asarray(parent, np.int64)
