"""Partition report: every cluster, and every host node with its reason, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.passes.partitioning.cluster import Clustering
from xrt_core.passes.partitioning.cost_model import Estimate


class TensorReport(Struct, frozen=True):
    """A value at a cluster's boundary, human-readable."""

    name: str
    type: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "type": self.type}


class ClusterReport(Struct, frozen=True):
    """One cluster.

    operators: pairs of an operator and its count, most frequent first. region: label of its marked region, or "".
    estimate: of the cost model.
    """

    name: str
    engine: str
    device: str
    node_count: int
    inputs: tuple[TensorReport, ...]
    outputs: tuple[TensorReport, ...]
    operators: tuple[tuple[str, int], ...]
    nodes: tuple[str, ...]
    pinned: bool = False
    model_update: bool = False
    note: str = ""
    region: str = ""
    estimate: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "engine": self.engine,
            "device": self.device,
            "node_count": self.node_count,
            "inputs": [t.to_json() for t in self.inputs],
            "outputs": [t.to_json() for t in self.outputs],
            "operators": dict(self.operators),
            "nodes": list(self.nodes),
            "pinned": self.pinned,
            "model_update": self.model_update,
            "note": self.note,
            "region": self.region,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
        }


class HostNodeReport(Struct, frozen=True):
    """One node that the host runs, and why."""

    index: int
    name: str
    operator: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"index": self.index, "name": self.name, "operator": self.operator, "reason": self.reason}


class PartitionReport(Struct, frozen=True):
    """The partition of one graph."""

    clusters: tuple[ClusterReport, ...]
    host_nodes: tuple[HostNodeReport, ...]
    node_count: int

    @property
    def offloaded_share(self) -> float:
        """Share of the nodes that engines run; 0.0 for a graph without nodes."""
        return 1.0 - len(self.host_nodes) / self.node_count if self.node_count else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "node_count": self.node_count,
            "offloaded_share": self.offloaded_share,
            "clusters": [c.to_json() for c in self.clusters],
            "host_nodes": [n.to_json() for n in self.host_nodes],
        }


def report(before: Sequence[Node], clustering: Clustering, outlined: Graph) -> PartitionReport:
    """Describe `outlined`, which `outline` made by `clustering` of a graph with the nodes `before`."""
    made = [n for n in outlined.nodes if n.op_type == "Launch" and n.domain == "xrt"]
    functions = {id(f.body.nodes[0]): f for n in made if isinstance(f := n.attributes["function"], Function)}
    clusters = []
    for c in clustering.clusters:
        function = functions[id(before[c.nodes[0]])]
        nodes = [before[i] for i in c.nodes]
        counted = Counter(n.operator for n in nodes)
        clusters.append(
            ClusterReport(
                function.name,
                c.engine,
                c.device,
                len(nodes),
                tuple(_tensor(v) for v in function.body.inputs),
                tuple(_tensor(v) for v in function.body.outputs),
                tuple(sorted(counted.items(), key=lambda item: (-item[1], item[0]))),
                tuple(n.name for n in nodes),
                c.pinned,
                c.model_update,
                c.note,
                c.region,
                c.estimate,
            )
        )
    host = tuple(
        HostNodeReport(i, before[i].name, before[i].operator, reason)
        for i, reason in sorted(clustering.reasons.items())
    )
    return PartitionReport(tuple(clusters), host, len(before))


def _tensor(value: Value) -> TensorReport:
    return TensorReport(value.name, str(value.type or "?"))
