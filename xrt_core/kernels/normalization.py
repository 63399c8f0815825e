"""Normalisations: batch, instance, layer, group, RMS, local response, Lp, mean-variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.movement import check_shape
from xrt_core.kernels.namespace import result, widen
from xrt_core.kernels.registry import OpContext, kernel

_EPSILON = 1e-5


def _moments(xp: Any, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Mean, x less its mean, and variance over `axes` (kept, of size 1); two passes, so that nothing cancels."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    return mean, centred, xp.mean(centred * centred, axis=axes, keepdims=True)


def _per_channel(xp: Any, parameter: Any, rank: int) -> Any:
    """A vector of one element per channel, broadcastable to (N, C, D1, ...)."""
    return xp.reshape(widen(parameter), (-1,) + (1,) * (rank - 2))


@kernel("BatchNormalization")
def batch_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    """Normalisation per channel by given statistics, or by the batch's own in training.

    Training is `training_mode` from version 14 on, and asking for more than Y before. Version 7 with spatial=0 keeps
    statistics per element instead of per channel. The variance is the population's.
    """
    xp, epsilon = ctx.xp, ctx.attr("epsilon", _EPSILON)
    wide = widen(x)
    if x.ndim == 1:  # version 9 on: a batch of N elements of one channel
        wide = xp.reshape(wide, (-1, 1))
    per_element = ctx.version < 9 and not ctx.attr("spatial", 1)
    shape = tuple(wide.shape[1:]) if per_element else (wide.shape[1],) + (1,) * (wide.ndim - 2)
    w_scale, w_bias, w_mean, w_var = (xp.reshape(widen(p), shape) for p in (scale, bias, mean, var))
    if ctx.version >= 14:
        training = bool(ctx.attr("training_mode", 0))
    else:
        training = any(ctx.wants(i) for i in range(1, 5))
    if not training:
        factor = w_scale / xp.sqrt(w_var + epsilon)
        return result(xp, wide * factor + (w_bias - w_mean * factor), x.dtype).reshape(x.shape)
    axes = (0,) if per_element else (0, *range(2, wide.ndim))
    batch_mean, centred, batch_var = _moments(xp, wide, axes)
    y = result(xp, centred * (w_scale / xp.sqrt(batch_var + epsilon)) + w_bias, x.dtype).reshape(x.shape)
    momentum = ctx.attr("momentum", 0.9)
    batch_mean, batch_var = xp.reshape(batch_mean, shape), xp.reshape(batch_var, shape)
    running_mean = w_mean * momentum + batch_mean * (1 - momentum)
    running_var = w_var * momentum + batch_var * (1 - momentum)
    statistics = ((running_mean, mean), (running_var, var), (batch_mean, mean), (batch_var, var))
    return y, *(result(xp, s, p.dtype).reshape(p.shape) for s, p in statistics[: 2 if ctx.version >= 14 else 4])


def moved_by_mean(node: Node, x: Any, scale: Any, off: Callable[[int, tuple[int, ...]], np.ndarray]) -> Any:
    """How far the result of a normalisation by its own moments moves where the means are off; None for other operators.

    off: (how many elements a mean is of, shape of the means) -> the shares by which they are off.
    """
    ctx, wide = OpContext(node, np), widen(x)
    op, factor, epsilon = node.op_type, np.float32(1.0), ctx.attr("epsilon", _EPSILON)
    if op == "InstanceNormalization":
        axes, factor = tuple(range(2, x.ndim)), _per_channel(np, scale, x.ndim)
    elif op == "LayerNormalization":
        axes, factor = tuple(range(ctx.attr("axis", -1) % x.ndim, x.ndim)), widen(scale)
    elif op == "GroupNormalization":
        groups = ctx.attr("num_groups")
        wide, axes = wide.reshape(x.shape[0], groups, x.shape[1] // groups, -1), (2, 3)
        factor = widen(scale).reshape((groups, 1, 1) if ctx.version < 21 else (groups, -1, 1))
    elif op == "MeanVarianceNormalization":
        axes, epsilon = tuple(ctx.attr("axes", (0, 2, 3))), 1e-18
    else:
        return None
    mean, _, var = _moments(np, wide, axes)
    moved = mean * off(wide.size // max(mean.size, 1), mean.shape) / np.sqrt(var + epsilon) * factor
    return np.broadcast_to(moved, wide.shape).reshape(x.shape)


@kernel("InstanceNormalization")
def instance_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any) -> Any:
    """Normalisation of each channel of each instance over its spatial axes."""
    xp, wide = ctx.xp, widen(x)
    for what, parameter in (("scale", scale), ("bias", bias)):
        check_shape(parameter.shape, x.shape[1:2], f"InstanceNormalization: a {what}")
    _, centred, var = _moments(xp, wide, tuple(range(2, x.ndim)))
    factor = _per_channel(xp, scale, x.ndim) / xp.sqrt(var + ctx.attr("epsilon", _EPSILON))
    return result(xp, centred * factor + _per_channel(xp, bias, x.ndim), x.dtype)


@kernel("LayerNormalization")
def layer_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalisation over the axes from `axis` on; Mean and InvStdDev come in the type that `stash_type` names.

    Computed in float32 at least, from end to end.
    """
    xp, wide = ctx.xp, widen(x)
    axis = ctx.attr("axis", -1)
    mean, centred, var = _moments(xp, wide, tuple(range(axis + x.ndim if axis < 0 else axis, x.ndim)))
    inverse = 1 / xp.sqrt(var + ctx.attr("epsilon", _EPSILON))
    check_shape(scale.shape, x.shape, "LayerNormalization: a scale", broadcasts=True)
    out = centred * inverse * widen(scale)
    if bias is not None:
        check_shape(bias.shape, x.shape, "LayerNormalization: a bias", broadcasts=True)
        out = out + widen(bias)
    y = result(xp, out, x.dtype)
    if ctx.num_outputs == 1:
        return y
    stash = ONNX_TO_DTYPE[ctx.attr("stash_type", 1)]
    return y, result(xp, mean, stash), result(xp, inverse, stash)


@kernel("RMSNormalization")
def rms_normalization(ctx: OpContext, x: Any, scale: Any) -> Any:
    """x over its root mean square over the axes from `axis` on, times the scale, in the scale's dtype."""
    xp, wide = ctx.xp, widen(x)
    axis = ctx.attr("axis", -1)
    axes = tuple(range(axis + x.ndim if axis < 0 else axis, x.ndim))
    mean_square = xp.mean(wide * wide, axis=axes, keepdims=True)
    inverse = 1 / xp.sqrt(mean_square + ctx.attr("epsilon", _EPSILON))
    check_shape(scale.shape, x.shape, "RMSNormalization: a scale", broadcasts=True)
    return result(xp, wide * inverse * widen(scale), scale.dtype)


@kernel("GroupNormalization")
def group_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any) -> Any:
    """Normalisation of groups of channels; scale and bias go by group in version 18, by channel from 21 on."""
    xp, groups = ctx.xp, ctx.attr("num_groups")
    n, channels = x.shape[:2]
    grouped = xp.reshape(widen(x), (n, groups, channels // groups, math.prod(x.shape[2:])))
    _, centred, var = _moments(xp, grouped, (2, 3))
    normal = centred / xp.sqrt(var + ctx.attr("epsilon", _EPSILON))
    shape = (groups, 1, 1) if ctx.version < 21 else (groups, channels // groups, 1)
    out = normal * xp.reshape(widen(scale), shape) + xp.reshape(widen(bias), shape)
    return result(xp, xp.reshape(out, x.shape), x.dtype)


@kernel("LRN")
def lrn(ctx: OpContext, x: Any) -> Any:
    """x / (bias + alpha / size * s) ** beta, where s sums the squares of `size` neighbouring channels."""
    xp, wide, size = ctx.xp, widen(x), ctx.attr("size")
    before = (size - 1) // 2
    channels = x.shape[1]
    around = [(0, 0), (before, size - 1 - before)] + [(0, 0)] * (x.ndim - 2)
    squares = xp.pad(wide * wide, around)
    total = squares[:, :channels]
    for i in range(1, size):
        total = total + squares[:, i : i + channels]
    base = ctx.attr("bias", 1.0) + ctx.attr("alpha", 1e-4) / size * total
    return result(xp, wide / base ** ctx.attr("beta", 0.75), x.dtype)


@kernel("LpNormalization")
def lp_normalization(ctx: OpContext, x: Any) -> Any:
    """x over its L1 or L2 norm along `axis`; 0 where the norm is 0."""
    xp, wide, axis = ctx.xp, widen(x), ctx.attr("axis", -1)
    if ctx.attr("p", 2) == 1:
        norm = xp.sum(xp.abs(wide), axis=axis, keepdims=True)
    else:
        norm = xp.sqrt(xp.sum(wide * wide, axis=axis, keepdims=True))
    zero = norm == 0
    return result(xp, xp.where(zero, xp.zeros_like(wide), wide / xp.where(zero, xp.ones_like(norm), norm)), x.dtype)


@kernel("MeanVarianceNormalization")
def mean_variance_normalization(ctx: OpContext, x: Any) -> Any:
    """(x - mean) / (deviation + 1e-9) over `axes`."""
    xp = ctx.xp
    _, centred, var = _moments(xp, widen(x), tuple(ctx.attr("axes", (0, 2, 3))))
    return result(xp, centred / (xp.sqrt(var) + np.float32(1e-9)), x.dtype)
