"""The support matrix: which engine supports which node, or why not, and what nodes of one cluster have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.ir.graph import NO_ANNOTATIONS, Graph, Node, Phase, Support

HOST = "host"
"""The name that a node pinned to the host carries as its engine."""

_AUTO = "auto"  # stands for several engines, and takes no marks
_LAUNCH = Support.no("it is a launch already")
_CONTROL = Support.no("the host runs control flow; its bodies are planned by themselves")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes part: its name, and what it says about a node.

    supports: Support.yes(), or Support.no(reason). It alone judges types (unknown, dynamic, strings, sequences),
        devices and the phase of the run.
    """

    name: str
    supports: Callable[[Node], Support]


@dataclass(frozen=True, slots=True)
class Marks:
    """The verdicts on every node of a graph.

    engines: names of the candidates, in the order in which they are to be tried.
    verdicts: engine -> one verdict per node; None where the engine was not asked.
    pins: per node the engine it is pinned to, "host", or None.
    regions: per node the label of the marked region it belongs to, "" for none.
    phase, device: what the verdicts hold for; `device` is where a node without a device annotation runs.
    """

    engines: tuple[str, ...]
    verdicts: Mapping[str, Sequence[Support | None]]
    pins: Sequence[str | None]
    regions: Sequence[str]
    phase: Phase
    device: str

    def reason(self, node: int) -> str:
        """Why the node with this index is left to the host by every engine that was asked."""
        if self.pins[node] == HOST:
            return "pinned to the host"
        if not self.engines:
            return "no engine takes part"
        asked = [(e, v) for e in self.engines if (v := self.verdicts[e][node]) is not None]
        if asked and all(v is _LAUNCH for _, v in asked):
            return _LAUNCH.reason
        said = [f"{e}: {v.reason or 'no reason given'}" for e, v in asked if not v.ok]
        return "; ".join(said) or "no engine was asked"


def mark(
    graph: Graph,
    engines: Sequence[Candidate],
    phase: Phase = "inference",
    device: str = "cpu",
    *,
    automatic: bool = True,
    obey: bool = True,
    absent: Callable[[str], str] = lambda name: "",
) -> Marks:
    """Ask each engine about each node that it may have.

    A pinned node (`annotations.engine`) is asked of that engine alone, one pinned to "host" of none, and a Launch is
    never taken again. A node with bodies stays on the host whatever its mark, which is one on what is in them. A node
    annotated with the other phase is refused. With `automatic` off only pinned nodes are asked about. A node of the way
    back (phase "train") has its pin from a node of the forward pass; where that engine does not take it, it is free. So
    is a node around tensors without elements, of an empty batch say: they leave an engine nothing to be wanted for.

    obey: False lets pins to engines be, which is for runs that were told to use none.
    absent: engine -> why it does not take part and what to do about it, "" where nothing is known.

    Raises GraphError for a pinned node whose engine does not take part or does not take the node (names the node, its
    operator and the reason), and for two candidates of one name.
    """
    names = tuple(c.name for c in engines)
    if len(set(names)) != len(names) or HOST in names:
        raise GraphError(f"candidate engines {names!r}: each name must stand once, and {HOST!r} is not an engine")
    nodes = graph.nodes
    pinned, apart = _set_apart(nodes, phase, obey)
    for i, p in pinned.items():
        if p != HOST and p not in names:
            why = absent(p) or "add it with engine=[...] or take the mark off"
            raise GraphError(
                f"{_describe(nodes[i], i)} is pinned to engine {p!r}, which does not take part here "
                f"({', '.join(names) or 'no engine does'}); {why}"
            )
    takes = {c.name: c.supports for c in engines}
    free = [
        i for i, p in pinned.items() if p != HOST and (nodes[i].annotations.phase == "train" or _is_empty(nodes[i]))
    ]
    free = [i for i in free if i not in apart and not takes[pinned[i]](nodes[i]).ok]
    for i in free:
        del pinned[i]
    unmarked = Support.no("it carries no mark, and automatic clustering is off (automatic=True switches it on)")
    verdicts: dict[str, Sequence[Support | None]] = {}
    for c in engines:
        supports = c.supports
        found: list[Support | None]
        if not automatic:
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
                    raise GraphError(_refused(nodes[i], i, p, verdict, engines, apart.get(i)))
                found[i] = verdict
    pins: list[str | None] = [None] * len(nodes)
    regions = [""] * len(nodes)
    for i, p in pinned.items():
        pins[i] = p
        regions[i] = nodes[i].annotations.region
    return Marks(names, verdicts, pins, regions, phase, device)


def _set_apart(nodes: Sequence[Node], phase: Phase, obey: bool) -> tuple[dict[int, str], dict[int, Support]]:
    """The nodes that are pinned, with their engines, and those that no engine is asked about, with the reason."""
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
            if a.engine != HOST and n.attributes and n.subgraphs:
                apart.setdefault(i, _CONTROL)
            else:
                pinned[i] = a.engine
    return pinned, apart


def _is_empty(node: Node) -> bool:
    """Whether a tensor that the node reads or makes, and that is no constant, has no elements."""
    shapes = (v.shape for v in (*node.inputs, *node.outputs) if v is not None and v.data is None)
    return any(shape is not None and 0 in shape for shape in shapes)


def _refused(
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
