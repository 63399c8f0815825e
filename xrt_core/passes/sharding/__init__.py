"""Sharding: how each tensor lies on a mesh, inferred from annotations, and the conversions between."""

from xrt_core.passes.sharding.automatic import automatic
from xrt_core.passes.sharding.propagate import (
    Collective,
    ShardingReport,
    by_batch,
    exact_name,
    marked,
    shard_graph,
    without_boxing,
)

__all__ = [
    "Collective",
    "ShardingReport",
    "automatic",
    "by_batch",
    "exact_name",
    "marked",
    "shard_graph",
    "without_boxing",
]
