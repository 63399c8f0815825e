"""Barrier: what recomputation reads, which XLA must neither compute before nor merge with what it stands for."""

from __future__ import annotations

from typing import Any

from xrt_xla.kernels.context import XlaContext, xla_kernel


@xla_kernel("Barrier", domain="xrt")
def barrier(ctx: XlaContext, *values: Any) -> Any:
    """The inputs themselves, as many as there are outputs; none of them before all inputs are there."""
    return tuple(ctx.lax.optimization_barrier(values)[: ctx.num_outputs])
