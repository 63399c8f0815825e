"""Placement: users' rules, `xrt.device` blocks and metadata name a device for a node; each is obeyed or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from xrt_core.errors import DeviceNotFoundError, GraphError, OptionError
from xrt_core.ir.graph import DEVICE, NO_ANNOTATIONS, Attribute, Graph, Node, engine_and_device
from xrt_core.passes.partitioning.placement import MarkRule, label, unmatched
from xrt_core.passes.partitioning.support import HOST, Candidate

GiveUp = Callable[[str, str, str], None]
"""(node, device, reason): called where a placement cannot be had and is given up."""


def apply_placement(graph: Graph, rules: Sequence[MarkRule]) -> Graph:
    """The graph with the devices of `rules` and of its nodes' metadata as annotations, subgraphs included.

    A rule wins over what the model says; a device on a node with subgraphs applies to the nodes in them that have none.

    Raises GraphError for a node that two rules place on different devices, OptionError for a rule without a match.
    """
    used: set[MarkRule] = set()
    placed = _placed(graph, rules, used, None)
    for rule in rules:
        if rule not in used:
            raise OptionError(unmatched(rule, graph))
    return placed


def devices_of(graph: Graph) -> tuple[str, ...]:
    """The devices that nodes of the graph, without subgraphs, are placed on, in the order of the nodes."""
    found = (n.annotations.device for n in graph.nodes if n.annotations is not NO_ANNOTATIONS)
    return tuple(dict.fromkeys(d for d in found if d is not None))


def resolve_devices(graph: Graph, device_for: Callable[[str], str | None], give_up: GiveUp | None) -> Graph:
    """The graph with the devices of its nodes as `device_for` names them; None from it is the engines' own device.

    Raises DeviceNotFoundError, naming the first node, for a device that `device_for` raises it for; with `give_up` the
    placement is dropped.
    """
    names: dict[str, str | None] = {}
    for device in devices_of(graph):
        try:
            names[device] = device_for(device)
        except DeviceNotFoundError as e:
            node = next(n for n in graph.nodes if n.annotations.device == device)
            if give_up is None:
                raise DeviceNotFoundError(f"{_described(node)} is placed on {device!r}: {e}") from None
            give_up(label(node), device, str(e))
            names[device] = None
    if all(name == device for device, name in names.items()):
        return graph
    return graph.replace(nodes=[_on(n, names.get(n.annotations.device or "")) for n in graph.nodes])


def place(
    graph: Graph, candidates: Sequence[Candidate], host_device: str | None, give_up: GiveUp | None
) -> tuple[Graph, Mapping[int, str]]:
    """The graph, and for each placed node the engine on its device that takes it (`engine_at`), or the host.

    candidates: of all engines on all devices, by priority. host_device: where the host computes, None for a device of
    the engines. Nodes of the backward pass, whose devices are copies, are not held to them.

    Raises GraphError, with each engine's reason, for a node that nothing on its device takes, or that is marked for an
    engine that does not; with `give_up` the placement is dropped.
    """
    chosen: dict[int, str] = {}
    nodes: list[Node] | None = None
    for i, n in enumerate(graph.nodes):
        a = n.annotations
        if a is NO_ANNOTATIONS or a.device is None:
            continue
        at_device = [c for c in candidates if engine_and_device(c.name)[1] == a.device]
        reasons = []
        for c in at_device:
            engine = engine_and_device(c.name)[0]
            if a.engine not in (None, engine):
                reasons.append(f"it is marked for {a.engine!r}")
                continue
            found = c.supports(n)
            if found.ok:
                chosen[i] = c.name
                break
            reasons.append(f"{engine}: {found.reason or 'no reason given'}")
        if i in chosen:
            continue
        if a.device == host_device:
            chosen[i] = HOST
            continue
        reason = "; ".join(dict.fromkeys(reasons)) or "no engine that takes part can use it"
        if give_up is None and a.phase != "train":
            raise GraphError(
                f"{_described(n)} is placed on {a.device!r}, where nothing takes it: {reason}; place it elsewhere, or "
                "give placement='prefer', with which it may run elsewhere"
            )
        if give_up is not None:
            give_up(label(n), a.device, reason)
        nodes = list(graph.nodes) if nodes is None else nodes
        nodes[i] = _on(n, None)
    return (graph if nodes is None else graph.replace(nodes=nodes)), chosen


def _on(node: Node, device: str | None) -> Node:
    a = node.annotations
    return node if a.device in (None, device) else node.replace(annotations=a.replace(device=device))


def _described(node: Node) -> str:
    where = f" ({node.annotations.source})" if node.annotations.source else ""
    return f"node {label(node)!r}, operator {node.operator},{where}"


def _placed(graph: Graph, rules: Sequence[MarkRule], used: set[MarkRule], around: str | None) -> Graph:
    nodes = []
    for n in graph.nodes:
        matching = [r for r in rules if r.matches(n)]
        used.update(matching)
        if len({r.engine for r in matching}) > 1:
            said = " and ".join(str(r) for r in matching)
            raise GraphError(f"{_described(n)} is placed on several devices, by {said}; narrow one of the patterns")
        a = n.annotations
        device = matching[0].engine if matching else a.device or a.metadata.get(DEVICE) or around
        attributes: dict[str, Attribute] | None = None
        for key, value in n.attributes.items() if n.attributes and n.subgraphs else ():
            if isinstance(value, Graph):
                attributes = {**(attributes or n.attributes), key: _placed(value, rules, used, device)}
        if attributes is not None:  # the host runs the control, so that only the bodies are placed
            nodes.append(n.replace(attributes=attributes, annotations=a.replace(device=None)))
        else:
            nodes.append(n if device == a.device else n.replace(annotations=a.replace(device=device)))
    return graph.replace(nodes=nodes)
