"""Clustering: mark what engines can take, cluster it, fold the clusters into Launch nodes, report."""

from xrt_core.passes.clustering.cluster import UNLIMITED, Cluster, Clustering, cluster
from xrt_core.passes.clustering.fold import fold
from xrt_core.passes.clustering.mark import HOST, Candidate, Marks, mark
from xrt_core.passes.clustering.report import ClusterReport, HostNodeReport, PartitionReport, TensorReport, report

__all__ = [
    "HOST",
    "UNLIMITED",
    "Candidate",
    "Cluster",
    "ClusterReport",
    "Clustering",
    "HostNodeReport",
    "Marks",
    "PartitionReport",
    "TensorReport",
    "cluster",
    "fold",
    "mark",
    "report",
]
