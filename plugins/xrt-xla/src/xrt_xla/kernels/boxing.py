"""Boxing: how a tensor lies on a mesh, as a constraint from which XLA makes collectives."""

from __future__ import annotations

from typing import Any

from xrt_xla.kernels.context import XlaContext, xla_kernel


@xla_kernel("Boxing", domain="xrt")
def boxing(ctx: XlaContext, x: Any) -> Any:
    """The tensor, split or whole on the devices of the mesh."""
    from xrt_xla import _toolkit  # imports JAX

    mesh, source, target = (str(ctx.attr(n)) for n in ("mesh", "source", "target"))
    if source not in ("B", target) and "P(" not in source:
        # without this XLA carries the target back to what computes the tensor, and moves its operands instead
        x = ctx.lax.with_sharding_constraint(x, _toolkit.sharding_of(mesh, source, ctx.kind))
        x = ctx.lax.optimization_barrier(x)
    return ctx.lax.with_sharding_constraint(x, _toolkit.sharding_of(mesh, target, ctx.kind))
