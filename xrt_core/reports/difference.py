"""Comparison of two partitions of a model, from the JSON that `xrt partition --json` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrt_core.errors import InputError, printable
from xrt_core.files import Size, convert


@dataclass(frozen=True, slots=True)
class Difference:
    """Human-readable differences, by subject; all empty if the partitions are equal.

    moved: nodes that run on a different engine or the host. reasons: host nodes whose reason changed. clusters: added,
    removed or changed clusters. nodes: nodes that only one of the two has. figures: shares and counts.
    """

    moved: tuple[str, ...]
    reasons: tuple[str, ...]
    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    figures: tuple[str, ...]

    def __bool__(self) -> bool:
        return any((self.moved, self.reasons, self.clusters, self.nodes, self.figures))

    def as_text(self) -> str:
        """Return all differences, one line each."""
        titles = ("moved", "reasons", "clusters", "nodes", "figures")
        lines = [
            f"{title}:\n" + "\n".join(f"  {x}" for x in found) for title in titles if (found := getattr(self, title))
        ]
        return printable("\n".join(lines)) or "no difference"


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compare two partitions, each the result of `Explanation.to_json()`. Raises InputError for other data."""
    old, new = _Partition(before, "the first"), _Partition(after, "the second")
    both = [n for n in old.where if n in new.where]
    moved = [f"{n}: {old.where[n]} -> {new.where[n]}" for n in both if old.where[n] != new.where[n]]
    reasons = [
        f"{n}: {old.reasons[n]} -> {new.reasons[n]}"
        for n in both
        if n in old.reasons and n in new.reasons and old.reasons[n] != new.reasons[n]
    ]
    nodes = [f"{n}: only before ({old.where[n]})" for n in old.where if n not in new.where]
    nodes += [f"{n}: only after ({new.where[n]})" for n in new.where if n not in old.where]
    gone = [f"gone: {name} ({len(c)} nodes)" for c, name in old.clusters.items() if c not in new.clusters]
    come = [f"new: {name} ({len(c)} nodes)" for c, name in new.clusters.items() if c not in old.clusters]
    figures = [
        f"{key}: {mine} -> {theirs}"
        for key in ("nodes", "node_share", "flop_share")
        if (mine := getattr(old.report, key)) != (theirs := getattr(new.report, key)) and None not in (mine, theirs)
    ]
    return Difference(tuple(moved), tuple(reasons), tuple(gone + come), tuple(nodes), tuple(figures))


@dataclass(frozen=True, slots=True)
class _Cluster:
    name: str
    engine: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _HostNode:
    name: str
    operator: str
    index: Size
    reason: str


@dataclass(frozen=True, slots=True)
class _Report:
    clusters: tuple[_Cluster, ...]
    host_nodes: tuple[_HostNode, ...]
    nodes: Size | None = None
    node_share: float | None = None
    flop_share: float | None = None


class _Partition:
    """where: node -> engine or "host". reasons: host node -> reason. clusters: node names -> name and engine."""

    def __init__(self, report: Mapping[str, Any], which: str) -> None:
        self.where: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.clusters: dict[tuple[str, ...], str] = {}
        where = f"{which} is no report of a partition, as `xrt partition MODEL --report FILE` writes them: it"
        self.report = convert(report, _Report, where, InputError)
        for c in self.report.clusters:
            self.clusters[c.nodes] = f"{c.name} on {c.engine}"
            for i, n in enumerate(c.nodes):
                self.where[n or f"{c.name} node {i}"] = c.engine
        for h in self.report.host_nodes:
            name = h.name or f"{h.operator} #{h.index}"
            self.where[name] = "host"
            self.reasons[name] = h.reason
