"""Explanation: the partitioning and compilation decisions for one signature, as data, as text, and as one line."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xrt_core.errors import InputError, printable
from xrt_core.ir.graph import Graph, engine_and_device
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.passes.partitioning.report import ClusterReport, PartitionReport
from xrt_core.passes.sharding import ShardingReport


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decisions for one signature of one graph.

    name: of the graph. signature: input -> type, with the value if it is part of the signature.
    report: clusters and host nodes. own_flops: estimated, of this graph without subgraphs. cluster_flops: by cluster.
    errors: cluster -> its failure. lost: clusters that run on the host because of a failure.
    nested: separately planned subgraphs (bodies of control flow, regions with data-dependent shapes) that have run.
    partitioned: the graph with a Launch node per cluster, for diagrams.
    precision: the nodes lowered to a narrow float and those kept, with reasons; None if mixed precision is off.
    memory, peak_bytes: memory of a run, as text and in bytes; "" and None if the signature has not been planned.
    side_by_side: whether clusters of different engines or devices run concurrently.
    symbols, guards: of a symbolic signature its symbols with their ranges, and what holds for every call of it.
    sharding: how tensors lie on the mesh, with the collectives; None without a mesh.
    ran_on: cluster -> the devices of its executable, as the engine's library tells them; without those that do not.
    padding: what was decided about buckets, as text; "" without the option `buckets`.
    """

    name: str
    signature: Mapping[str, str]
    report: PartitionReport
    own_flops: int
    cluster_flops: Mapping[str, int]
    errors: Mapping[str, str] = field(default_factory=dict)
    lost: Collection[str] = ()
    nested: Mapping[str, tuple[Explanation, ...]] = field(default_factory=dict)
    partitioned: Graph | None = field(default=None, repr=False, compare=False)
    precision: PrecisionReport | None = None
    memory: str = ""
    peak_bytes: int | None = None
    side_by_side: bool = False
    symbols: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    padding: str = ""
    ran_on: Mapping[str, str] = field(default_factory=dict)
    sharding: ShardingReport | None = None

    @property
    def node_count(self) -> int:
        """Number of nodes, subgraphs included (of each subgraph, the first signature counts)."""
        return sum(e.report.node_count for e in self._with_parts())

    @property
    def engine_node_count(self) -> int:
        """Number of nodes that run on engines, subgraphs included; clusters that fell back to the host do not count."""
        return sum(c.node_count for e in self._with_parts() for c in e.report.clusters if c.name not in e.lost)

    @property
    def node_share(self) -> float:
        """Share of the nodes that run on engines, 1.0 for a graph without nodes."""
        return self.engine_node_count / self.node_count if self.node_count else 1.0

    @property
    def flops(self) -> int:
        """Estimated FLOPs, subgraphs included."""
        return sum(e.own_flops for e in self._with_parts())

    @property
    def engine_flops(self) -> int:
        """Estimated FLOPs on engines, counted as `engine_node_count` counts."""
        return sum(n for e in self._with_parts() for name, n in e.cluster_flops.items() if name not in e.lost)

    @property
    def flop_share(self) -> float:
        """Share of the estimated FLOPs on engines, 1.0 if the total is 0."""
        return self.engine_flops / self.flops if self.flops else 1.0

    def _with_parts(self) -> Iterator[Explanation]:
        """Yield this explanation, and recursively the first signature of each subgraph."""
        yield self
        for signatures in self.nested.values():
            if signatures:
                yield from signatures[0]._with_parts()

    def summary(self) -> str:
        """Return one line: clusters by engine, shares, operators on the host; subgraphs included."""
        whole = list(self._with_parts())
        per_engine = Counter(c.engine for e in whole for c in e.report.clusters)
        clusters = ", ".join(f"{n} on {e}" for e, n in sorted(per_engine.items())) or "none"
        lost = sum(c.name in e.lost for e in whole for c in e.report.clusters)
        if lost:
            clusters += f" ({lost} of them run by the host)"
        host = [h for e in whole for h in e.report.host_nodes]
        left = ""
        if host:
            operators = Counter(h.operator for h in host).most_common(3)
            left = f"; {len(host)} nodes on the host ({', '.join(o for o, _ in operators)})"
        return (
            f"{self.node_count} nodes, clusters: {clusters}; {self.node_share:.0%} of nodes and "
            f"{self.flop_share:.0%} of FLOPs on engines{left}"
        )

    def as_text(self, indent: str = "") -> str:
        """Return the full explanation, human-readable."""
        signature = ", ".join(f"{n}: {t}" for n, t in self.signature.items())
        lines = [f"{self.name or 'graph'}({signature})", f"  {self.summary()}"]
        if self.symbols:
            lines.append(f"  one plan for all sizes: {'; '.join(self.symbols)}")
        if self.guards:
            lines.append(f"  guards: {'; '.join(self.guards)}")
        if self.memory:
            lines.append(f"  memory: {self.memory}")
        lines += [f"  {line}" for line in self.padding.splitlines()]
        if self.side_by_side:
            lines.append("  clusters of different engines run concurrently")
        for c in self.report.clusters:
            operators = ", ".join(f"{o} x{n}" if n > 1 else o for o, n in c.operators)
            engine = engine_and_device(c.engine)[0]
            lines.append(f"  {c.name}: {c.node_count} nodes on {engine} ({self._where(c)}): {operators}")
            lines.append(f"    in:  {', '.join(f'{t.name}: {t.type}' for t in c.inputs) or 'nothing'}")
            lines.append(f"    out: {', '.join(f'{t.name}: {t.type}' for t in c.outputs)}")
            if c.region:
                lines.append(f"    marked: {c.region}")
            if c.estimate is not None:
                lines.append(f"    {c.estimate}")
            if c.note:
                lines.append(f"    note: {c.note}")
            if c.name in self.errors:
                lines.extend(f"    {line}" for line in self.errors[c.name].splitlines())
        by_reason: dict[tuple[str, str], list[str]] = {}
        for h in self.report.host_nodes:
            by_reason.setdefault((h.operator, h.reason), []).append(h.name or f"#{h.index}")
        if by_reason:
            lines.append("  on the host:")
        for (operator, reason), names in by_reason.items():
            shown = ", ".join(names[:3]) + (f", ... {len(names)} in all" if len(names) > 3 else "")
            lines.append(f"    {operator} ({shown}): {reason}")
        if self.precision is not None:
            lines.extend(f"  {line}" for line in self.precision.lines())
        if self.sharding is not None:
            lines.extend(f"  {line}" for line in self.sharding.lines())
        text = "\n".join(indent + printable(line, lines=False) for line in lines)
        for label, parts in self.nested.items():
            for part in parts:
                text += f"\n{indent}  in {label}:\n{part.as_text(indent + '    ')}"
        return text

    def _where(self, c: ClusterReport) -> str:
        """Where a cluster runs: what its executable says, and otherwise what was asked for."""
        if c.name in self.lost:
            return f"asked for {c.device}; the host runs it"
        found = self.ran_on.get(c.name)
        if found is None:
            return c.device
        return found if c.device in found.split(", ") else f"{found}, asked for {c.device}"

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON-compatible data."""
        return {
            "name": self.name,
            "signature": dict(self.signature),
            "nodes": self.node_count,
            "node_share": self.node_share,
            "flops": self.flops,
            "flop_share": self.flop_share,
            "peak_bytes": self.peak_bytes,
            "symbols": list(self.symbols),
            "guards": list(self.guards),
            **self.report.to_json(),
            "errors": dict(self.errors),
            "lost": list(self.lost),
            "ran_on": dict(self.ran_on),
            "sharding": None if self.sharding is None else dataclasses.asdict(self.sharding),
            "precision": None if self.precision is None else self.precision.to_json(),
            "nested": {label: [e.to_json() for e in parts] for label, parts in self.nested.items()},
        }

    def to_html(self) -> str:
        """Return an HTML page with the partition as diagrams and tables; self-contained (see `reports.html`)."""
        from xrt_core.reports import to_html

        return to_html(self._graph(), self.report, self.name or "graph", self.summary(), self.sharding)

    def to_dot(self) -> str:
        """Return the partition in DOT, the language of Graphviz."""
        from xrt_core.reports import to_dot

        return to_dot(self._graph(), self.report)

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from xrt_core.reports import to_notebook

        return to_notebook(self.partitioned, self.report, self.name or "graph", self.summary())

    def _graph(self) -> Graph:
        if self.partitioned is None:
            raise InputError("this explanation has no graph; use the one that XRTModule.explain returns")
        return self.partitioned

    def __str__(self) -> str:
        return self.as_text()
