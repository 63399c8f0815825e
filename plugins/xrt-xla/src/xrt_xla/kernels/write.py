"""WriteSlice: entries of an axis written over, in the storage of the input where that is donated."""

from __future__ import annotations

from typing import Any

from xrt_core.kernels.movement import axis_of
from xrt_xla.kernels.context import XlaContext, xla_kernel


@xla_kernel("WriteSlice", domain="xrt")
def write_slice(ctx: XlaContext, x: Any, update: Any, start: Any) -> Any:
    """One dynamic update slice."""
    axis = axis_of(ctx.attr("axis"), x.ndim, "WriteSlice")
    at = ctx.xp.clip(ctx.xp.reshape(start, ()), 0, x.shape[axis] - update.shape[axis])
    return ctx.lax.dynamic_update_slice_in_dim(x, update, at, axis)
