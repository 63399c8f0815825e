"""LayerNormalization and RMSNormalization whose input XLA computes once.

On the CPU XLA fuses a reduction with all that comes before it. In a transformer that may be the residual sum of all
layers so far, which every further normalisation then computes again (BERT: 7 % of its time): a barrier stops it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.namespace import narrow, wide
from xrt_xla.kernels.context import XlaContext, xla_kernel

_EPSILON = 1e-5


def _rows(ctx: XlaContext, x: Any) -> tuple[Any, tuple[int, ...]]:
    """x in the type to compute in, computed once, with a row for each normalised part; the shape of the means."""
    axis = ctx.attr("axis", -1)
    axis += x.ndim if axis < 0 else 0
    x = x.astype(wide(np.dtype(x.dtype)))
    if ctx.kind == "cpu":
        x = ctx.lax.optimization_barrier(x)
    rows = ctx.xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return rows, (*x.shape[:axis], *(1,) * (x.ndim - axis))


@xla_kernel("LayerNormalization")
def layer_normalization(ctx: XlaContext, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalisation over the axes from `axis` on; Mean and InvStdDev come in the type that `stash_type` names."""
    rows, kept = _rows(ctx, x)
    mean = ctx.xp.mean(rows, axis=1, keepdims=True)
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
    rows, _ = _rows(ctx, x)
    inverse = 1 / ctx.xp.sqrt(ctx.xp.mean(rows * rows, axis=1, keepdims=True) + ctx.attr("epsilon", _EPSILON))
    return narrow(ctx.xp.reshape(rows * inverse, x.shape) * scale.astype(rows.dtype), scale.dtype)
