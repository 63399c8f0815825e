"""Softmax and LogSoftmax that stay finite where XLA computes their input twice.

XLA may compute x once for its maximum, rounded, and again inside x - max(x), where a product in x joins the subtraction
unrounded. For logits around 1e10 the largest difference is then 500 or -500 instead of 0, and the result NaN. So
differences below one unit in the last place of the maximum count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.kernels.namespace import narrow, wide
from xrt_xla.kernels.context import XlaContext, xla_kernel


def _below_top(xp: Any, x: Any, axis: int) -> Any:
    """x less its maximum along `axis`, exactly 0 at the maximum."""
    top = xp.max(x, axis=axis, keepdims=True)
    below = x - top
    return xp.where(below >= xp.abs(top) * -np.finfo(x.dtype).eps, 0, below)


def _softmax(xp: Any, x: Any, axis: int) -> Any:
    powers = xp.exp(_below_top(xp, x, axis))
    return powers / xp.sum(powers, axis=axis, keepdims=True)


def _log_softmax(xp: Any, x: Any, axis: int) -> Any:
    x = _below_top(xp, x, axis)
    return x - xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=True))


def _along(ctx: XlaContext, function: Callable[[Any, Any, int], Any], x: Any) -> Any:
    """Apply `function` along `axis`; before version 13 to the matrix that x flattens to at `axis`."""
    if x.size == 0:
        return x
    dtype, shape = x.dtype, x.shape
    x = x.astype(wide(np.dtype(dtype)))
    if ctx.version >= 13:
        return narrow(function(ctx.xp, x, ctx.attr("axis", -1)), dtype)
    axis = ctx.attr("axis", 1)
    rows = math.prod(shape[: axis + len(shape) if axis < 0 else axis])
    y = function(ctx.xp, ctx.xp.reshape(x, (rows, x.size // rows)), 1)
    return narrow(ctx.xp.reshape(y, shape), dtype)


@xla_kernel("Softmax")
def softmax(ctx: XlaContext, x: Any) -> Any:
    """exp(x) over its sum along `axis` (before version 13: along all axes from `axis` on)."""
    return _along(ctx, _softmax, x)


@xla_kernel("LogSoftmax")
def log_softmax(ctx: XlaContext, x: Any) -> Any:
    """Logarithm of Softmax."""
    return _along(ctx, _log_softmax, x)
