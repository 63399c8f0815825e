"""Partitioning: query support, cluster, outline clusters into Launch nodes, insert converters, report."""

from xrt_core.passes.partitioning.cluster import UNLIMITED, Cluster, Clustering, cluster
from xrt_core.passes.partitioning.cost_model import Costs, Estimate, costs_for
from xrt_core.passes.partitioning.devices import (
    apply_placement,
    devices_of,
    place,
    resolve_devices,
)
from xrt_core.passes.partitioning.outline import insert_converters, is_converter, outline
from xrt_core.passes.partitioning.placement import MarkRule, apply_marks, names_a_device, names_an_engine, without_marks
from xrt_core.passes.partitioning.report import ClusterReport, HostNodeReport, PartitionReport, TensorReport, report
from xrt_core.passes.partitioning.support import HOST, Candidate, Marks, mark

__all__ = [
    "HOST",
    "UNLIMITED",
    "Candidate",
    "Cluster",
    "ClusterReport",
    "Clustering",
    "Costs",
    "Estimate",
    "HostNodeReport",
    "MarkRule",
    "Marks",
    "PartitionReport",
    "TensorReport",
    "apply_marks",
    "apply_placement",
    "cluster",
    "costs_for",
    "devices_of",
    "insert_converters",
    "is_converter",
    "mark",
    "names_a_device",
    "names_an_engine",
    "outline",
    "place",
    "report",
    "resolve_devices",
    "without_marks",
]
