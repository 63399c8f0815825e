"""LayerNormalization and RMSNormalization whose input XLA computes once.

On the CPU XLA fuses a plain reduction with all that comes before it. In a transformer that is the residual sum of the
layers so far, which every further LayerNormalization then computes again (BERT: 7 % of its time). An operand of a dot
product is computed once and kept, so the first sum is a product with ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.namespace import narrow, wide
from xrt_xla.kernels.context import XlaContext, xla_kernel

_EPSILON = 1e-5


def _rows(ctx: XlaContext, x: Any) -> tuple[Any, int, tuple[int, ...]]:
    """x in the type to compute in, a row for each normalised part; the row's length; the shape of the means."""
    axis = ctx.attr("axis", -1)
    axis += x.ndim if axis < 0 else 0
    length = math.prod(x.shape[axis:])
    x = x.astype(wide(np.dtype(x.dtype)))
    kept = (*x.shape[:axis], *(1,) * (x.ndim - axis))
    return ctx.xp.reshape(x, (math.prod(x.shape[:axis]), length)), length, kept


def _mean(ctx: XlaContext, rows: Any, length: int) -> Any:
    """The mean of each row, as a column."""
    if ctx.kind != "cpu":
        return ctx.xp.mean(rows, axis=1, keepdims=True)
    ones = ctx.xp.ones((length, 1), rows.dtype)
    return ctx.lax.dot(rows, ones, precision=ctx.lax.Precision.HIGHEST) / length


@xla_kernel("LayerNormalization")
def layer_normalization(ctx: XlaContext, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalisation over the axes from `axis` on; Mean and InvStdDev come in the type that `stash_type` names."""
    rows, length, kept = _rows(ctx, x)
    mean = _mean(ctx, rows, length)
    centred = rows - mean
    variance = ctx.xp.mean(centred * centred, axis=1, keepdims=True)
    inverse = 1 / ctx.xp.sqrt(variance + ctx.attr("epsilon", _EPSILON))
    out = ctx.xp.reshape(centred * inverse, x.shape) * scale.astype(rows.dtype)
    if bias is not None:
        out = out + bias.astype(rows.dtype)
    y = narrow(out, x.dtype)
    if ctx.num_outputs == 1:
        return y
    stash = ONNX_TO_DTYPE[ctx.attr("stash_type", 1)]
    return y, narrow(ctx.xp.reshape(mean, kept), stash), narrow(ctx.xp.reshape(inverse, kept), stash)


@xla_kernel("RMSNormalization")
def rms_normalization(ctx: XlaContext, x: Any, scale: Any) -> Any:
    """x over its root mean square over the axes from `axis` on, times the scale, in the scale's dtype."""
    rows, length, _ = _rows(ctx, x)
    if ctx.kind == "cpu":  # the rows themselves must be the operand that is kept, not their squares
        mean = _mean(ctx, rows, length)
        square = ctx.xp.mean((rows - mean) ** 2, axis=1, keepdims=True) + mean * mean
    else:
        square = ctx.xp.mean(rows * rows, axis=1, keepdims=True)
    inverse = 1 / ctx.xp.sqrt(square + ctx.attr("epsilon", _EPSILON))
    return narrow(ctx.xp.reshape(rows * inverse, x.shape) * scale.astype(rows.dtype), scale.dtype)
