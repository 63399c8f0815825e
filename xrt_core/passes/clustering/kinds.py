"""Kinds: what nodes must have in common to share a cluster, and which nodes of each kind there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xrt_core.ir.annotations import NO_ANNOTATIONS
from xrt_core.ir.graph import Graph
from xrt_core.passes.clustering.mark import Marks


class Signature(NamedTuple):
    """What a node says of where it runs; `model_update` is False for all nodes where updates may be among others."""

    device: str
    sbp: tuple[str, ...] | None
    placement: tuple[str, ...] | None
    model_update: bool

    def kind(self, engine: str, pinned: bool, region: str = "") -> Kind:
        """The kind of such nodes where they go to this engine."""
        return Kind(engine, self.device, self.sbp, self.placement, self.model_update, pinned, region)


class Kind(NamedTuple):
    """Nodes may share a cluster only where all of this is equal."""

    engine: str
    device: str
    sbp: tuple[str, ...] | None
    placement: tuple[str, ...] | None
    model_update: bool
    pinned: bool
    region: str = ""


Members = list[tuple[Kind, np.ndarray]]
"""Kinds, each with its nodes, ascending. Of each engine's kinds model updates come first, so that all others see them
as the one unit that they mostly become; otherwise they stand in the order of their first nodes."""


def signatures(graph: Graph, device: str, merge_updates: bool) -> tuple[list[Signature], np.ndarray]:
    """The signatures that nodes have, and for each node the index of its own."""
    plain = Signature(device, None, None, False)
    number = {plain: 0}
    found = []
    for n in graph.nodes:
        a = n.annotations
        if a is NO_ANNOTATIONS or (a.sbp is None and a.device is None and a.placement is None and not a.model_update):
            found.append(0)
        else:  # one entry per output says the same as one entry, where all agree
            sbp = tuple(dict.fromkeys(a.sbp)) if a.sbp and len(set(a.sbp)) == 1 else a.sbp
            own = Signature(a.device or device, sbp, a.placement, a.model_update and not merge_updates)
            found.append(number.setdefault(own, len(number)))
    return list(number), np.asarray(found, np.int64)


def pinned_kinds(marks: Marks, signature: tuple[list[Signature], np.ndarray]) -> Members:
    """The nodes that are pinned to engines: one kind for each marked region and signature."""
    known, own = signature
    found: dict[tuple[str, str, int], list[int]] = {}
    for i, engine in enumerate(marks.pins):
        if engine is not None and engine in marks.verdicts:
            found.setdefault((engine, marks.regions[i], int(own[i])), []).append(i)
    kinds = [(known[s].kind(e, True, region), np.asarray(nodes)) for (e, region, s), nodes in found.items()]
    return sorted(kinds, key=lambda k: not k[0].model_update)


def taken(marks: Marks) -> dict[str, np.ndarray]:
    """For each engine, in their order, whether it takes each node."""
    return {
        engine: np.fromiter((v is not None and v[0] for v in verdicts), np.bool_, len(verdicts))
        for engine in marks.engines
        for verdicts in [marks.verdicts[engine]]
    }


def takers(
    takes: Mapping[str, np.ndarray], signature: tuple[list[Signature], np.ndarray], clustered: np.ndarray
) -> Members:
    """The nodes that each engine takes (see `taken`), but for those that are in clusters already."""
    known, own = signature
    found: Members = []
    for engine, is_taken in takes.items():
        nodes = np.flatnonzero(is_taken & ~clustered)
        by_signature = nodes[np.argsort(own[nodes], kind="stable")]
        cuts = np.flatnonzero(np.diff(own[by_signature])) + 1
        parts = [part for part in np.split(by_signature, cuts) if len(part)]
        parts.sort(key=lambda part: int(part[0]))
        kinds = [(known[own[part[0]]].kind(engine, False), part) for part in parts]
        found.extend(sorted(kinds, key=lambda k: not k[0].model_update))
    return found
