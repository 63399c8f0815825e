"""Gradients of normalisations: batch, instance, layer, group, RMS; and compositions of the rest."""

from __future__ import annotations

import math
from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.gradient_context import (
    Backward,
    Forward,
    emit,
    filled,
    mean_over,
    reduced,
    reshaped,
    sum_over,
    where,
    wide,
)
from xrt_core.training.registry import composition, gradient


def _epsilon(ctx: Forward) -> float:
    return float(ctx.attr("epsilon", 1e-5))


def _inverse(variance: Tensor, epsilon: float) -> Tensor:
    made: Tensor = ops.Reciprocal(ops.Sqrt(variance + epsilon))
    return made


def _standard(x: Tensor, axes: list[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (x normalised over axes, 1 / its standard deviation)."""
    off = x - mean_over(x, axes)
    inverse = _inverse(mean_over(off * off, axes), epsilon)
    return off * inverse, inverse


def _through(g: Tensor, normal: Tensor, inverse: Tensor, axes: list[int]) -> Tensor:
    """Return the gradient by x, given the gradient by x normalised over axes."""
    return inverse * (g - mean_over(g, axes) - normal * mean_over(g * normal, axes))


def _channels(parameter: Tensor, rank: int) -> Tensor:
    """Reshape a parameter with one element per channel to be broadcastable to (N, C, ...)."""
    return parameter.reshape([-1] + [1] * (rank - 2)) if rank > 2 else parameter


def _first_only(ctx: Backward) -> Tensor:
    if any(g is not None for g in ctx.grads[1:]) or ctx.grads[0] is None:
        raise ctx.error("the loss depends on its statistics; its rule covers Y alone")
    return ctx.grads[0]


@gradient("BatchNormalization")
def batch_normalization(ctx: Backward) -> Any:
    """In training mode also through the batch statistics; else a scaling per channel."""
    x, scale, bias, mean, variance = ctx.inputs
    dy, rank = _first_only(ctx), x.ndim
    if rank < 2:
        raise ctx.error("its rule covers inputs of rank 2 and more")
    if ctx.version < 9 and not ctx.attr("spatial", 1):
        raise ctx.error("its rule covers spatial = 1")
    if bool(ctx.attr("training_mode", 0)) if ctx.version >= 14 else len(ctx.outputs) > 1:
        made = emit("BatchNormGrad", [dy, x, scale], domain="xrt", outputs=3, epsilon=_epsilon(ctx))
        return (*(g if ctx.wants(i) else None for i, g in enumerate(made)), None, None)
    dy, axes = wide(dy), [0, *range(2, rank)]
    factor = _channels(wide(scale), rank)
    inverse = _channels(_inverse(wide(variance), _epsilon(ctx)), rank)
    normal = (wide(x) - _channels(wide(mean), rank)) * inverse
    results: list[Tensor | None] = [None] * 5
    if ctx.wants(0):
        results[0] = (dy * (factor * inverse)).astype(x.dtype)
    if ctx.wants(1):
        results[1] = reshaped(sum_over(dy * normal, axes).astype(scale.dtype), scale)
    if ctx.wants(2):
        results[2] = reshaped(sum_over(dy, axes).astype(bias.dtype), bias)
    if ctx.wants(3):
        by_mean = -sum_over(dy, axes) * factor * inverse
        results[3] = reshaped(by_mean.astype(mean.dtype), mean)
    if ctx.wants(4):
        by_variance = sum_over(dy * normal, axes) * factor * inverse * inverse * -0.5
        results[4] = reshaped(by_variance.astype(variance.dtype), variance)
    return tuple(results)


@composition("BatchNormGrad", domain="xrt")
def batch_norm_grad(ctx: Forward) -> Any:
    """The formula of its kernel: the gradient through the batch statistics, of differentiable operators."""
    dy, x, scale = ctx.inputs
    back, axes = wide(dy), [0, *range(2, x.ndim)]
    normal, inverse = _standard(wide(x), axes, _epsilon(ctx))
    by_scale, by_bias = sum_over(back * normal, axes), sum_over(back, axes)
    count = float(max(math.prod(ctx.shape(x)[a] for a in axes), 1))
    by_x = _channels(wide(scale), x.ndim) * inverse * (back - by_bias / count - normal * (by_scale / count))
    return by_x.astype(x.dtype), *(reshaped(g.astype(scale.dtype), scale) for g in (by_scale, by_bias))


@gradient("InstanceNormalization")
def instance_normalization(ctx: Backward) -> Any:
    """Over the spatial axes of each channel of each instance."""
    x, scale, bias = ctx.inputs
    dy, rank = wide(ctx.grad), x.ndim
    axes = list(range(2, rank))
    normal, inverse = _standard(wide(x), axes, _epsilon(ctx))
    over = [0, *axes]
    by_x = by_scale = by_bias = None
    if ctx.wants(0):
        by_x = _through(dy * _channels(wide(scale), rank), normal, inverse, axes).astype(x.dtype)
    if ctx.wants(1):
        by_scale = reshaped(sum_over(dy * normal, over).astype(scale.dtype), scale)
    if ctx.wants(2):
        by_bias = reshaped(sum_over(dy, over).astype(bias.dtype), bias)
    return by_x, by_scale, by_bias


def _last_axes(ctx: Forward, rank: int) -> list[int]:
    return list(range(int(ctx.attr("axis", -1)) % rank, rank))


@gradient("LayerNormalization")
def layer_normalization(ctx: Backward) -> Any:
    """Over the axes from `axis` on."""
    x, scale, bias = ctx.inputs[0], ctx.inputs[1], ctx.input(2)
    axes = _last_axes(ctx, x.ndim)
    normal, inverse = _standard(wide(x), axes, _epsilon(ctx))
    by_y, by_mean, by_inverse = (*ctx.grads, None, None)[:3]
    dy = filled(normal) if by_y is None else wide(by_y)
    by_x = by_scale = by_bias = None
    if ctx.wants(0):
        by_x = _through(dy * wide(scale), normal, inverse, axes)
        count = math.prod(ctx.shape(x)[a] for a in axes)
        if by_mean is not None:
            by_x = by_x + by_mean.astype(by_x.dtype) / count
        if by_inverse is not None:
            by_x = by_x - by_inverse.astype(by_x.dtype) * inverse * inverse * normal / count
        by_x = by_x.astype(x.dtype)
    if ctx.wants(1):
        by_scale = reduced(dy * normal, scale, ctx.node).astype(scale.dtype)
    if ctx.wants(2):
        by_bias = reduced(dy, bias, ctx.node).astype(bias.dtype)
    return (by_x, by_scale, by_bias)[: len(ctx.inputs)]


@gradient("RMSNormalization")
def rms_normalization(ctx: Backward) -> Any:
    """x over its root mean square, times the scale."""
    x, scale = ctx.inputs
    dy, axes, full = wide(ctx.grad), _last_axes(ctx, x.ndim), wide(x)
    inverse = _inverse(mean_over(full * full, axes), _epsilon(ctx))
    normal = full * inverse
    by_x = by_scale = None
    if ctx.wants(0):
        g = dy.astype(full.dtype) * wide(scale).astype(full.dtype)
        by_x = (inverse * (g - normal * mean_over(g * normal, axes))).astype(x.dtype)
    if ctx.wants(1):
        by_scale = reduced(dy.astype(full.dtype) * normal, scale, ctx.node).astype(scale.dtype)
    return by_x, by_scale


@gradient("GroupNormalization")
def group_normalization(ctx: Backward) -> Any:
    """Over groups of channels; scale and bias go by group in version 18, by channel from 21 on."""
    x, scale, bias = ctx.inputs
    groups, shape = int(ctx.attr("num_groups")), ctx.shape(x)
    n, channels = shape[:2]
    grouped = [n, groups, channels // groups, math.prod(shape[2:])]
    factors = [groups, 1, 1] if ctx.version < 21 else [groups, channels // groups, 1]
    normal, inverse = _standard(wide(x).reshape(grouped), [2, 3], _epsilon(ctx))
    dy = wide(ctx.grad).reshape(grouped)
    over = [0, 2, 3] if ctx.version < 21 else [0, 3]
    by_x = by_scale = by_bias = None
    if ctx.wants(0):
        g = dy * wide(scale).reshape(factors)
        by_x = _through(g, normal, inverse, [2, 3]).reshape(shape).astype(x.dtype)
    if ctx.wants(1):
        by_scale = sum_over(dy * normal, over).reshape(ctx.shape(scale)).astype(scale.dtype)
    if ctx.wants(2):
        by_bias = sum_over(dy, over).reshape(ctx.shape(bias)).astype(bias.dtype)
    return by_x, by_scale, by_bias


@composition("MeanVarianceNormalization")
def mean_variance_normalization(ctx: Forward) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    x = ctx.inputs[0]
    axes = [int(a) for a in ctx.attr("axes", (0, 2, 3))]
    off = wide(x) - mean_over(wide(x), axes)
    made: Tensor = (off / (ops.Sqrt(mean_over(off * off, axes)) + 1e-9)).astype(x.dtype)
    return made


@composition("LpNormalization")
def lp_normalization(ctx: Forward) -> Tensor:
    """x / norm, 0 where the norm is 0."""
    x = ctx.inputs[0]
    full, axis = wide(x), [int(ctx.attr("axis", -1)) % x.ndim]
    one = int(ctx.attr("p", 2)) == 1
    total = sum_over(ops.Abs(full) if one else full * full, axis)
    zero = total == 0.0
    safe = where(zero, 1.0, total)
    return where(zero, 0.0, full / (safe if one else ops.Sqrt(safe))).astype(x.dtype)


@composition("LRN")
def local_response(ctx: Forward) -> Tensor:
    """x / (bias + alpha / size * s) ** beta, where s sums the squares of `size` neighbouring channels."""
    from xrt_core.training.rules.movement import pad

    x, size = ctx.inputs[0], int(ctx.attr("size"))
    full, shape = wide(x), ctx.shape(x)
    before = (size - 1) // 2
    around = [0] * (2 * x.ndim)
    around[1], around[x.ndim + 1] = before, size - 1 - before
    squares = pad(full * full, around)
    total = squares[:, : shape[1]]
    for i in range(1, size):
        total = total + squares[:, i : i + shape[1]]
    base = total * (float(ctx.attr("alpha", 1e-4)) / size) + float(ctx.attr("bias", 1.0))
    made: Tensor = (full / base ** float(ctx.attr("beta", 0.75))).astype(x.dtype)
    return made
