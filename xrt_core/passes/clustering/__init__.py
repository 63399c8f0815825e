"""Clustering: mark what engines can take, cluster it, fold the clusters into Launch nodes, report."""

from xrt_core.passes.clustering.cluster import UNLIMITED, Cluster, Clustering, cluster
from xrt_core.passes.clustering.convert import insert_converters, is_converter
from xrt_core.passes.clustering.fold import fold
from xrt_core.passes.clustering.gain import Costs, Estimate, costs_for
from xrt_core.passes.clustering.mark import HOST, Candidate, Marks, mark
from xrt_core.passes.clustering.report import ClusterReport, HostNodeReport, PartitionReport, TensorReport, report
from xrt_core.passes.clustering.rules import MarkRule, apply_marks, names_an_engine, without_marks

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
    "cluster",
    "costs_for",
    "fold",
    "insert_converters",
    "is_converter",
    "mark",
    "names_an_engine",
    "report",
    "without_marks",
]
