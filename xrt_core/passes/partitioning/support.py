"""Support matrix: which engine supports which node, or why not, and which nodes may share a cluster (`Kind`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError
from xrt_core.ir.graph import NO_ANNOTATIONS, OPEN_REGION, Graph, Node, Phase, Support

HOST = "host"
"""The engine name of nodes that are pinned to the host, and of the host's space."""

_AUTO = "auto"  # stands for several engines; nodes cannot be marked for it
_LAUNCH = Support.no("it is a launch already")


class Candidate(Struct, frozen=True):
    """An engine that takes part in partitioning.

    supports: node -> Support.yes(), or Support.no(reason). It alone decides on types (unknown, dynamic, strings,
        sequences), devices and the phase.
    """

    name: str
    supports: Callable[[Node], Support]


class Marks(Struct, frozen=True):
    """The support matrix and the marks of a graph.

    engines: names of the candidates, by descending priority.
    verdicts: engine -> one answer per node; None where the engine was not asked.
    pins: per node the engine it is pinned to, "host", or None.
    regions: per node the label of the marked region it belongs to, "" for none.
    phase, device: those of the queries; `device` is the device of nodes without a device annotation.
    """

    engines: tuple[str, ...]
    verdicts: Mapping[str, Sequence[Support | None]]
    pins: Sequence[str | None]
    regions: Sequence[str]
    phase: Phase
    device: str

    def reason(self, node: int) -> str:
        """The reason why no engine that was asked supports the node with this index."""
        if self.pins[node] == HOST:
            return "pinned to the host"
        if not self.engines:
            return "no engine takes part"
        asked = [(e, v) for e in self.engines if (v := self.verdicts[e][node]) is not None]
        if asked and all(v is _LAUNCH for _, v in asked):
            return _LAUNCH.reason
        reasons = [f"{e}: {v.reason or 'no reason given'}" for e, v in asked if not v.ok]
        return "; ".join(reasons) or "no engine was asked"


def mark(
    graph: Graph,
    engines: Sequence[Candidate],
    phase: Phase = "inference",
    device: str = "cpu",
    *,
    automatic: bool = True,
    obey: bool = True,
    absent: Callable[[str], str] = lambda name: "",
    placed: Mapping[int, str] = MappingProxyType({}),
    reserved: Collection[str] = (),
) -> Marks:
    """Query each engine for each node that it may run.

    Of a pinned node (`annotations.engine`) only that engine is asked, of one pinned to "host" none. A Launch is left
    unchanged. A node annotated with the other phase is rejected. If `automatic` is off, only pinned nodes are queried.
    Four kinds of pinned nodes are treated as unpinned if their engine does not support them: nodes of the backward
    pass (phase "train"), whose pins are copies of those in the forward pass, nodes with zero-element tensors, such as
    an empty batch, nodes with subgraphs, whose marks apply to the nodes in these as well, and nodes that were marked
    for their data-dependent shapes.

    obey: False ignores pins to engines, for runs without engines.
    absent: engine -> why it does not take part and the remedy, "" if unknown.
    placed: nodes that are pinned to a candidate for their devices (`devices.place`); their own marks do not count.
    reserved: candidates that are asked of nodes pinned to them alone.

    Raises GraphError for a pinned node whose engine does not take part or does not support the node (names the node,
    its operator and the reason), and for two candidates of one name.
    """
    names = tuple(c.name for c in engines)
    if len(set(names)) != len(names) or HOST in names:
        raise GraphError(f"candidate engines {names!r}: each name must stand once, and {HOST!r} is not an engine")
    nodes = graph.nodes
    pinned, apart = _set_apart(nodes, phase, obey)
    pinned.update(placed)
    for i, p in pinned.items():
        if p != HOST and p not in names and not nodes[i].subgraphs:
            why = absent(p) or "add it with engine=[...] or take the mark off"
            raise GraphError(
                f"{_describe(nodes[i], i)} is pinned to engine {p!r}, which does not take part here "
                f"({', '.join(names) or 'no engine does'}); {why}"
            )
    takes = {c.name: c.supports for c in engines}
    free = [i for i, p in pinned.items() if p != HOST and _may_be_unpinned(nodes[i])]
    free = [i for i in free if i not in apart and not (pinned[i] in takes and takes[pinned[i]](nodes[i]).ok)]
    for i in free:
        del pinned[i]
    unmarked = Support.no("it carries no mark, and automatic clustering is off (automatic=True switches it on)")
    verdicts: dict[str, Sequence[Support | None]] = {}
    for c in engines:
        supports = c.supports
        found: list[Support | None]
        if c.name in reserved:
            found = [None] * len(nodes)
        elif not automatic:
            found = [unmarked] * len(nodes)
            for i, verdict in apart.items():
                found[i] = verdict
            for i in free:
                found[i] = supports(nodes[i])
        elif pinned or apart:
            found = [None if i in pinned else apart[i] if i in apart else supports(n) for i, n in enumerate(nodes)]
        else:
            found = [supports(n) for n in nodes]
        verdicts[c.name] = found
        for i, p in pinned.items():
            found[i] = None
            if p == c.name:
                verdict = apart[i] if i in apart else supports(nodes[i])
                if not verdict.ok:
                    raise GraphError(_rejection(nodes[i], i, p, verdict, engines, apart.get(i)))
                found[i] = verdict
    pins: list[str | None] = [None] * len(nodes)
    regions = [""] * len(nodes)
    for i, p in pinned.items():
        pins[i] = p
        regions[i] = nodes[i].annotations.region
        if i in placed and p != HOST and not regions[i]:
            regions[i] = f"placed on {nodes[i].annotations.device}"
    return Marks(names, verdicts, pins, regions, phase, device)


def _set_apart(nodes: Sequence[Node], phase: Phase, obey: bool) -> tuple[dict[int, str], dict[int, Support]]:
    """The pinned nodes with their engines, and the nodes of which no engine is asked, with the reasons."""
    pinned: dict[int, str] = {}
    apart: dict[int, Support] = {}
    for i, n in enumerate(nodes):
        if n.op_type == "Launch" and n.domain == "xrt":
            apart[i] = _LAUNCH
            continue
        a = n.annotations
        if a is NO_ANNOTATIONS:
            continue
        if a.phase is not None and a.phase != phase:
            apart[i] = Support.no(f"it belongs to the phase {a.phase!r}, and this is {phase!r}")
        if a.engine is not None and (obey or a.engine == HOST):
            pinned[i] = a.engine
    return pinned, apart


def _may_be_unpinned(node: Node) -> bool:
    a = node.annotations
    return a.phase == "train" or a.region == OPEN_REGION or bool(node.attributes and node.subgraphs) or _is_empty(node)


def _is_empty(node: Node) -> bool:
    """Whether a non-constant input or output of the node has no elements."""
    shapes = (v.shape for v in (*node.inputs, *node.outputs) if v is not None and v.data is None)
    return any(shape is not None and 0 in shape for shape in shapes)


def _rejection(
    node: Node, index: int, engine: str, verdict: Support, engines: Sequence[Candidate], apart: Support | None
) -> str:
    others = [c.name for c in engines if c.name not in (engine, _AUTO) and apart is None and c.supports(node).ok]
    cure = f"mark it for {others[0]!r}, which takes it, or take the mark off" if others else "take the mark off"
    return (
        f"{_describe(node, index)} is pinned to engine {engine!r}, which cannot take it: "
        f"{verdict.reason or 'no reason given'}; {cure} (power_by_engine(None) inside the block, or 'host' in marks=, "
        f"keeps it on the host)"
    )


def _describe(node: Node, index: int) -> str:
    where = f" ({node.annotations.source})" if node.annotations.source else ""
    return f"node {node.name or index!r}{'' if node.name else ' (unnamed)'}, operator {node.operator},{where}"


class Signature(NamedTuple):
    """The annotations that nodes of a cluster share. model_update: always False if updates may share clusters."""

    device: str
    sbp: tuple[str, ...] | None
    placement: tuple[str, ...] | None
    model_update: bool

    def kind(self, engine: str, pinned: bool, region: str = "") -> Kind:
        """The kind of such nodes on this engine."""
        return Kind(engine, self.device, self.sbp, self.placement, self.model_update, pinned, region)


class Kind(NamedTuple):
    """The key of nodes that may share a cluster: nodes of different kinds never do."""

    engine: str
    device: str
    sbp: tuple[str, ...] | None
    placement: tuple[str, ...] | None
    model_update: bool
    pinned: bool
    region: str = ""


Members = list[tuple[Kind, np.ndarray]]
"""Kinds, each with its nodes, ascending. Per engine, kinds of model updates come first, so that they are clusters when
the others are grouped; otherwise kinds are ordered by their first nodes."""


def signatures(graph: Graph, device: str, merge_updates: bool) -> tuple[list[Signature], np.ndarray]:
    """The distinct signatures of the nodes, and for each node the index of its signature."""
    plain = Signature(device, None, None, False)
    number = {plain: 0}
    found = []
    for n in graph.nodes:
        a = n.annotations
        if a is NO_ANNOTATIONS or (a.sbp is None and a.device is None and a.placement is None and not a.model_update):
            found.append(0)
        else:  # equal entries for all outputs are equivalent to one entry
            sbp = tuple(dict.fromkeys(a.sbp)) if a.sbp and len(set(a.sbp)) == 1 else a.sbp
            own = Signature(a.device or device, sbp, a.placement, a.model_update and not merge_updates)
            found.append(number.setdefault(own, len(number)))
    return list(number), np.asarray(found, np.int64)


def pinned_kinds(marks: Marks, signature: tuple[list[Signature], np.ndarray]) -> Members:
    """The nodes that are pinned to engines: one kind per marked region and signature."""
    known, own = signature
    found: dict[tuple[str, str, int], list[int]] = {}
    for i, engine in enumerate(marks.pins):
        if engine is not None and engine in marks.verdicts:
            found.setdefault((engine, marks.regions[i], int(own[i])), []).append(i)
    kinds = [(known[s].kind(e, True, region), np.asarray(nodes)) for (e, region, s), nodes in found.items()]
    return sorted(kinds, key=lambda k: not k[0].model_update)


def taken(marks: Marks) -> dict[str, np.ndarray]:
    """For each engine, in order of priority, whether it supports each node."""
    return {
        engine: np.fromiter((v is not None and v[0] for v in verdicts), np.bool_, len(verdicts))
        for engine in marks.engines
        for verdicts in [marks.verdicts[engine]]
    }


def takers(
    takes: Mapping[str, np.ndarray], signature: tuple[list[Signature], np.ndarray], clustered: np.ndarray
) -> Members:
    """The nodes that each engine supports (see `taken`) and that are in no cluster yet."""
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
