"""Normalisations whose input XLA computes once.

On the CPU XLA fuses a reduction with all that comes before it. In a transformer that may be the residual sum of all
layers so far, which every further normalisation then computes again (BERT: 7 % of its time): a barrier stops it.
In the training of a convolutional network, BatchNormalization and its gradient took as long as the convolutions; here
they run over channels-last rows, as the convolutions around them do, and sum them in stages.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.namespace import narrow, wide, widen
from xrt_xla.kernels.context import XlaContext, portable, xla_kernel
from xrt_xla.kernels.reduction import sum_pixels

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


def _pixels(ctx: XlaContext, x: Any) -> Any:
    """x[N, C, ...] with channels last, in the type to compute in, computed once."""
    return ctx.lax.optimization_barrier(ctx.xp.moveaxis(x, 1, -1)).astype(wide(np.dtype(x.dtype)))


def _statistics(ctx: XlaContext, pixels: Any) -> tuple[Any, Any, Any]:
    """Mean, pixels less their mean, and variance, of each channel."""
    count = pixels.size // pixels.shape[-1]
    mean = sum_pixels(ctx, pixels) / count
    centred = pixels - mean
    return mean, centred, sum_pixels(ctx, centred * centred) / count


@xla_kernel("BatchNormalization")
def batch_normalization(ctx: XlaContext, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    """On the CPU with channels last, by the batch's statistics and behind convolutions by given ones; every other case
    is the portable kernel's."""
    training = ctx.version >= 14 and ctx.attr("training_mode", 0)
    if not training and ctx.num_outputs == 1 and ctx.channels_last and (ctx.version >= 9 or ctx.attr("spatial", 1)):
        w_scale, w_bias, w_mean, w_var = map(widen, (scale, bias, mean, var))
        factor = w_scale / ctx.xp.sqrt(w_var + ctx.attr("epsilon", _EPSILON))
        pixels = widen(ctx.xp.moveaxis(x, 1, -1))
        return narrow(ctx.xp.moveaxis(pixels * factor + (w_bias - w_mean * factor), -1, 1), x.dtype)
    if not training or ctx.kind != "cpu" or x.ndim < 3 or not x.size:
        return portable(ctx, x, scale, bias, mean, var)
    pixels = _pixels(ctx, x)
    batch_mean, centred, batch_var = _statistics(ctx, pixels)
    factor = scale.astype(pixels.dtype) / ctx.xp.sqrt(batch_var + ctx.attr("epsilon", _EPSILON))
    y = ctx.xp.moveaxis(centred * factor + bias.astype(pixels.dtype), -1, 1)
    keep = ctx.attr("momentum", 0.9)
    running = (
        narrow(old.astype(pixels.dtype) * keep + new * (1 - keep), old.dtype)
        for old, new in ((mean, batch_mean), (var, batch_var))
    )
    return narrow(y, x.dtype), *running


@xla_kernel("BatchNormGrad", domain="xrt")
def batch_norm_grad(ctx: XlaContext, dy: Any, x: Any, scale: Any) -> Any:
    """The gradient of BatchNormalization by the batch's statistics; on the CPU channels last."""
    if ctx.kind != "cpu" or x.ndim < 3 or not x.size:
        return portable(ctx, dy, x, scale)
    pixels, back = _pixels(ctx, x), _pixels(ctx, dy)
    _, centred, variance = _statistics(ctx, pixels)
    inverse = 1 / ctx.xp.sqrt(variance + ctx.attr("epsilon", _EPSILON))
    by_bias, by_scale = sum_pixels(ctx, back), sum_pixels(ctx, back * centred) * inverse
    count = pixels.size // pixels.shape[-1]
    factor, first, second = ctx.lax.optimization_barrier(
        (scale.astype(pixels.dtype) * inverse, by_bias / count, by_scale * inverse / count)
    )
    by_x = ctx.xp.moveaxis(factor * (back - first - centred * second), -1, 1)
    return narrow(by_x, x.dtype), narrow(by_scale, scale.dtype), narrow(by_bias, scale.dtype)
