"""Marks: users' rules by name or operator, and the metadata of nodes, become annotations that pin nodes to engines."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xrt_core.errors import GraphError, OptionError
from xrt_core.ir.graph import DEVICE, MARK, NO_ANNOTATIONS, REGION, Annotations, Attribute, Graph, Node

log = logging.getLogger("xrt")

_KINDS = ("name", "op")
# keys in nodes' metadata that XRT reads or writes
_KEYS = frozenset((MARK, REGION, DEVICE, "xrt.function", "xrt.same", "xrt.recompute", "xrt.training.saved"))
_MEANT = {MARK: MARK, REGION: REGION, DEVICE: DEVICE, "xrt.engine": MARK}


@dataclass(frozen=True, slots=True)
class MarkRule:
    """One entry of the option `marks`.

    pattern: "name:PATTERN" for node names (a node without one goes by its first output's), "op:PATTERN" for operators
        (those of the ONNX domain without it, others as "domain.Operator"); shell patterns with `*`, `?` and `[...]`,
        case-sensitive. engine: the name of an engine, or "host". option: the option that holds the entry; in
        `placement` the rule names a device in the place of an engine.

    Raises OptionError for a pattern of another form.
    """

    pattern: str
    engine: str
    option: str = "marks"
    kind: str = field(init=False)
    _match: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind, colon, glob = self.pattern.partition(":")
        if not colon or kind not in _KINDS or not glob:
            raise OptionError(f"{self.option}: {self.pattern!r} names no nodes; say 'name:encoder/*' or 'op:Softmax'")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "_match", re.compile(fnmatch.translate(glob)))

    def matches(self, node: Node) -> bool:
        """Whether the rule applies to this node."""
        return self._match.match(node.operator if self.kind == "op" else label(node)) is not None

    def __str__(self) -> str:
        return f"{self.option}={{{self.pattern!r}: {self.engine!r}}}"


def label(node: Node) -> str:
    """The name of a node in rules: its own, or its first output's."""
    return node.name or next((v.name for v in node.outputs if v is not None and v.name), "")


def apply_marks(graph: Graph, rules: Sequence[MarkRule]) -> Graph:
    """The graph with the marks of `rules` and of its nodes' metadata as annotations, subgraphs included.

    All nodes that one rule matches are a region, and so are all nodes with one label under REGION in their metadata, or
    with one engine and no label. A mark on a node with subgraphs (If, Loop, Scan) applies to the nodes in them that
    have no mark, since the host runs the control flow. Metadata keys that look like misspelled marks are logged in one
    warning of the logger "xrt".

    Raises GraphError for two contradicting marks of a node, naming both, and OptionError for a rule without a match,
    with the closest names.
    """
    keys = _metadata_keys(graph)
    _warn_of_typos(keys)
    if not rules and MARK not in keys:
        return graph
    marker = _Marker(rules)
    marked = marker.graph(graph, None)
    for rule in rules:
        if rule not in marker.used:
            raise OptionError(unmatched(rule, graph))
    return marked


def names_an_engine(graph: Graph) -> bool:
    """Whether any node, subgraphs included, is marked for an engine (not for the host)."""
    for n in graph.nodes:
        if n.annotations is not NO_ANNOTATIONS and n.annotations.engine not in (None, "host"):
            return True
        if n.attributes and any(names_an_engine(g) for g in n.subgraphs):
            return True
    return False


def names_a_device(graph: Graph) -> bool:
    """Whether any node, subgraphs included, is placed on a device."""
    for n in graph.nodes:
        a = n.annotations
        if a is not NO_ANNOTATIONS and (a.device is not None or (a.metadata and DEVICE in a.metadata)):
            return True
        if n.attributes and any(names_a_device(g) for g in n.subgraphs):
            return True
    return False


def without_marks(graph: Graph) -> Graph:
    """The graph without marks, subgraphs included."""
    return _Marker((), erase=True).graph(graph, None)


def unmatched(rule: MarkRule, graph: Graph) -> str:
    """The message for a rule that matches nothing of a graph, with the closest names."""
    known = sorted(set(_labels(graph, rule.kind)))
    close = difflib.get_close_matches(rule.pattern.partition(":")[2], known[:5000], n=3, cutoff=0.4)
    what = "operator" if rule.kind == "op" else "node name"
    shown = f"the closest: {', '.join(close)}" if close else f"there are: {', '.join(known[:8]) or 'none'}"
    return f"{rule} matches no {what} of graph {graph.name!r}; {shown}"


_Found = tuple[str, str, str]  # engine, region, source of the mark for messages


class _Marker:
    def __init__(self, rules: Sequence[MarkRule], erase: bool = False) -> None:
        self.rules = rules
        self.erase = erase
        self.used: set[MarkRule] = set()

    def graph(self, graph: Graph, around: _Found | None) -> Graph:
        nodes = [self.node(n, around) for n in graph.nodes]
        changed = any(new is not old for new, old in zip(nodes, graph.nodes, strict=True))
        return graph.replace(nodes=nodes) if changed else graph

    def node(self, node: Node, around: _Found | None) -> Node:
        found = None if self.erase else self.mark_of(node) or around
        attributes: dict[str, Attribute] | None = None
        if node.attributes:
            for name, a in node.attributes.items():
                new = self.attribute(a, found)
                if new is not a:
                    attributes = {**(attributes or node.attributes), name: new}
        own = node.annotations
        engine, region = found[:2] if found else (None, "")
        if engine == own.engine and region == own.region:
            return node if attributes is None else node.replace(attributes=attributes)
        return node.replace(attributes=attributes, annotations=own.replace(engine=engine, region=region))

    def attribute(self, a: Attribute, around: _Found | None) -> Attribute:
        if isinstance(a, Graph):
            return self.graph(a, around)
        if type(a) is tuple and a and isinstance(a[0], Graph):
            made = tuple(self.graph(g, around) for g in a)
            return made if any(x is not y for x, y in zip(made, a, strict=True)) else a
        return a

    def mark_of(self, node: Node) -> _Found | None:
        found: _Found | None = None
        for mark in (*_own(node), *self.marks_by_rules(node)):
            if found is None:
                found = mark
            elif found[0] != mark[0]:
                raise GraphError(
                    f"node {label(node)!r}, operator {node.operator}, is marked for {found[0]!r} by {found[2]} and for "
                    f"{mark[0]!r} by {mark[2]}; take one of the marks off, or narrow the pattern"
                )
        return found

    def marks_by_rules(self, node: Node) -> Iterable[_Found]:
        for rule in self.rules:
            if rule.matches(node):
                self.used.add(rule)
                yield rule.engine, rule.pattern if rule.engine != "host" else "", str(rule)


def _own(node: Node) -> Iterable[_Found]:
    a: Annotations = node.annotations
    if a is NO_ANNOTATIONS:
        return
    if a.engine is not None:
        yield a.engine, a.region, f"power_by_engine{f' ({a.source})' if a.source else ''}"
    elif a.metadata and (engine := a.metadata.get(MARK)):
        region = a.metadata.get(REGION, f"{MARK}={engine}") if engine != "host" else ""
        yield engine, region, f"the model's metadata {MARK!r}"


def _metadata_keys(graph: Graph) -> dict[str, str]:
    """The keys of the nodes' metadata, subgraphs included, each with the name of a node that has it."""
    found: dict[str, str] = {}
    for n in graph.nodes:
        if n.annotations is not NO_ANNOTATIONS:
            for key in n.annotations.metadata:
                if key not in found:
                    found[key] = label(n)
        for g in n.subgraphs if n.attributes else ():
            found = {**_metadata_keys(g), **found}
    return found


def _warn_of_typos(keys: Mapping[str, str]) -> None:
    typos = []
    for key, node in keys.items():
        if key in _KEYS or "xrt" not in key.lower():
            continue
        close = difflib.get_close_matches(key.strip().lower().replace("_", "."), _MEANT, n=1, cutoff=0.7)
        if close or key.startswith("xrt."):
            meant = f"; did you mean {_MEANT[close[0]]!r}?" if close else ""
            typos.append(f"{key!r} (node {node!r}{meant})")
    if typos:
        known = f"marks are {MARK!r}, the engine, and beside it {REGION!r}"
        log.warning("the model's metadata has keys that mark nothing: %s; %s", ", ".join(typos), known)


def _labels(graph: Graph, kind: str) -> Iterable[str]:
    for n in graph.nodes:
        text = n.operator if kind == "op" else label(n)
        if text:
            yield text
        for g in n.subgraphs if n.attributes else ():
            yield from _labels(g, kind)
