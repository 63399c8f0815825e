"""Training: updates of variables, losses, normalisation by the batch's statistics and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_tensorrt.kernels.context import BOOLEANS, FLOATS, INTEGERS, NetworkContext, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, Tensor

_PREVIEW: Final = "ai.onnx.preview.training"
_TINY: Final = 1e-30  # stands for a decay of 0, which has no logarithm
_SATURATED: Final = 20.0  # 1 - exp(-2 * 20) is 1 in float32


@tensorrt_kernel("StopGradient", domain="xrt", dtypes=FLOATS | INTEGERS | BOOLEANS, train=True)
def stop_gradient(ctx: NetworkContext, x: Tensor) -> Tensor:
    """The input itself."""
    return x


@tensorrt_kernel("Assign", domain="xrt", dtypes=FLOATS | INTEGERS | BOOLEANS, train=True)
def assign(ctx: NetworkContext, variable: Tensor, value: Tensor) -> Tensor:
    """The new value; the executable writes it into the variable's storage where that was donated."""
    return value


# --- updates --------------------------------------------------------------------------------------------------------


def _all(tensors: tuple[Tensor, ...], kinds: int, one: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
    """`one(x, gradient, *states)` for each variable; inputs and outputs stand by kind: all X, all G, ..."""
    count = len(tensors) // kinds
    made = [one(*(tensors[i + k * count].astype(F32) for k in range(kinds))) for i in range(count)]
    states = [0, *range(2, kinds)]
    return [
        row[k].astype(tensors[i + states[k] * count].dtype) for k in range(len(states)) for i, row in enumerate(made)
    ]


def _number(x: Tensor, like: Tensor) -> Tensor:
    """A tensor of one element as float32, to be broadcast."""
    return x.astype(F32).reshape((1,) * like.rank)


def _decayed(ctx: NetworkContext, x: Tensor, gradient: Tensor) -> Tensor:
    decay = float(ctx.attr("norm_coefficient", 0.0))
    return x * decay + gradient if decay else gradient


def _less_than_one(step: Tensor, base: float) -> Tensor:
    """1 - base^step; as -2 sinh(z) exp(z) with z = step log(base) / 2, which loses no digits where it is small."""
    half = (step * (math.log(max(base, _TINY)) / 2)).maximum(-_SATURATED)  # far below, SINH is infinite
    return half.unary("SINH") * half.unary("EXP") * -2.0


@tensorrt_kernel("Adam", domain=_PREVIEW, dtypes=FLOATS | INTEGERS, train=True)
def adam(ctx: NetworkContext, rate: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
    """One step of Adam; the rate is corrected for bias where the count of updates is above 0, in float32."""
    alpha, beta = float(ctx.attr("alpha", 0.9)), float(ctx.attr("beta", 0.999))
    epsilon, after = float(ctx.attr("epsilon", 1e-6)), float(ctx.attr("norm_coefficient_post", 0.0))
    step = count.astype(F32).reshape(())
    correction = _less_than_one(step, beta).unary("SQRT")
    if alpha:
        correction = correction / _less_than_one(step, alpha)
    correction = ctx.layers.where(step > 0.0, correction, 1.0)

    def one(x: Tensor, gradient: Tensor, velocity: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        g = _decayed(ctx, x, gradient)
        v = velocity * alpha + g * (1 - alpha)
        h = square * beta + g * g * (1 - beta)
        new = x - _number(rate, x) * _number(correction, x) * v / (h.unary("SQRT") + epsilon)
        return new * (1 - after) if after else new, v, h

    return _all(tensors, 4, one)


@tensorrt_kernel("Momentum", domain=_PREVIEW, dtypes=FLOATS | INTEGERS, train=True)
def momentum(ctx: NetworkContext, rate: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
    """One step with momentum, standard or Nesterov's; beta counts as 1 in the first update."""
    alpha, beta = float(ctx.attr("alpha")), float(ctx.attr("beta"))
    later = count.astype(F32).reshape(()) > 0.0
    share = ctx.layers.where(later, beta, ctx.layers.tensor(np.ones((), np.float32)))

    def one(x: Tensor, gradient: Tensor, velocity: Tensor) -> tuple[Tensor, ...]:
        g = _decayed(ctx, x, gradient)
        v = velocity * alpha + _number(share, x) * g
        return x - _number(rate, x) * (g + v * alpha if ctx.attr("mode") == "nesterov" else v), v

    return _all(tensors, 3, one)


@tensorrt_kernel("Adagrad", domain=_PREVIEW, dtypes=FLOATS | INTEGERS, train=True)
def adagrad(ctx: NetworkContext, rate: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
    """One step of Adagrad; the rate falls as 1 / (1 + count * decay_factor)."""
    epsilon, decay = float(ctx.attr("epsilon", 1e-6)), float(ctx.attr("decay_factor", 0.0))

    def one(x: Tensor, gradient: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        slowed = _number(rate, x) / (_number(count, x) * decay + 1.0)
        g = _decayed(ctx, x, gradient)
        h = square + g * g
        return x - slowed * g / (h.unary("SQRT") + epsilon), h

    return _all(tensors, 3, one)


# --- losses ---------------------------------------------------------------------------------------------------------


def log_softmax(x: Tensor, axis: int) -> Tensor:
    """Logarithm of the softmax along an axis."""
    shifted = x - x.reduce("MAX", (axis,), keep=True)
    return shifted - shifted.unary("EXP").reduce("SUM", (axis,), keep=True).unary("LOG")


@tensorrt_kernel("SoftmaxCrossEntropyLoss", dtypes=FLOATS, of=(0, 2), train=True)
def softmax_cross_entropy_loss(
    ctx: NetworkContext, scores: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of `labels` under the softmax of the scores (N, C, d1, ...), and the log-probabilities.

    Labels equal to `ignore_index` weigh nothing; "mean" divides by the sum of weights. The loss of others that are no
    classes is NaN.
    """
    layers, dtype, reduction = ctx.layers, scores.dtype, ctx.attr("reduction", "mean")
    found = log_softmax(scores.astype(F32), 1)
    ignored = None
    if ctx.attr("ignore_index") is not None:
        ignored = labels.equals(int(ctx.attr("ignore_index")))
        labels = layers.where(ignored, 0, labels)
    outside = (labels < 0) | (labels > scores.size(1) - 1)  # a gather must not read there
    labels = layers.where(outside, 0, labels)
    column = labels.reshape((labels.shape[0], 1, *labels.shape[1:]))
    loss = layers.where(outside, math.nan, -found.take_along(column, 1).reshape(labels.shape))
    weight = None if weights is None else weights.astype(F32).take(labels, 0)
    if ignored is not None:
        loss = layers.where(ignored, 0.0, loss)
        ones = layers.constant(np.ones((1,) * labels.rank, np.float32))
        weight = layers.where(ignored, 0.0, ones if weight is None else weight)
    if weight is not None:
        loss = loss * weight
    if reduction != "none":
        axes = range(loss.rank)
        if reduction == "sum":
            loss = loss.reduce("SUM", axes)
        elif weight is None:
            loss = loss.reduce("AVG", axes)
        else:
            loss = loss.reduce("SUM", axes) / weight.reduce("SUM", axes)
    return loss.astype(dtype), found.astype(dtype)


# --- normalisation --------------------------------------------------------------------------------------------------


def _is_training(node: Node) -> bool:
    if node.version >= 14:
        return bool(node.attributes.get("training_mode", 0))
    return any(v is not None for v in node.outputs[1:])


def _batch_norm_check(node: Node) -> str:
    x = node.inputs[0]
    if x is not None and x.shape is not None and len(x.shape) < 2:
        return "tensorrt normalises tensors of two axes and more"
    return "statistics for each element, not for each channel" if node.version < 9 else ""


def _channels(p: Tensor, rank: int) -> Tensor:
    return p.astype(F32).reshape((1, p.shape[0], *(1,) * (rank - 2)))


@tensorrt_kernel("BatchNormalization", dtypes=FLOATS, train=True, check=_batch_norm_check)
def batch_normalization(
    ctx: NetworkContext, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, ...]:
    """Normalisation per channel by statistics that are tensors, or by the batch's own in training."""
    epsilon, wide = float(ctx.attr("epsilon", 1e-5)), x.astype(F32)
    w_scale, w_bias, w_mean, w_var = (_channels(p, x.rank) for p in (scale, bias, mean, var))
    if not _is_training(ctx.node):
        factor = w_scale / (w_var + epsilon).unary("SQRT")
        return ((wide * factor + (w_bias - w_mean * factor)).astype(x.dtype),)
    axes = (0, *range(2, x.rank))
    own_mean = wide.reduce("AVG", axes, keep=True)
    centred = wide - own_mean
    own_var = (centred * centred).reduce("AVG", axes, keep=True)
    y = centred * (w_scale / (own_var + epsilon).unary("SQRT")) + w_bias
    keep = float(ctx.attr("momentum", 0.9))
    running = [w_mean * keep + own_mean * (1 - keep), w_var * keep + own_var * (1 - keep), own_mean, own_var]
    statistics = [s.reshape(mean.shape).astype(mean.dtype) for s in running[: 2 if ctx.version >= 14 else 4]]
    return (y.astype(x.dtype), *statistics)


@tensorrt_kernel("BatchNormGrad", domain="xrt", dtypes=FLOATS, train=True)
def batch_norm_grad(ctx: NetworkContext, dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of BatchNormalization by the statistics of the batch: by x, by the scale, by the bias."""
    wide, back, axes = x.astype(F32), dy.astype(F32), (0, *range(2, x.rank))
    count = float(max(math.prod(x.size(a) for a in axes), 1))
    centred = wide - wide.reduce("AVG", axes, keep=True)
    variance = (centred * centred).reduce("AVG", axes, keep=True)
    inverse = (variance + float(ctx.attr("epsilon", 1e-5))).unary("SQRT").unary("RECIP")
    by_bias = back.reduce("SUM", axes, keep=True)
    by_scale = (back * centred).reduce("SUM", axes, keep=True) * inverse
    rest = back - by_bias / count - centred * (by_scale * inverse / count)
    by_x = _channels(scale, x.rank) * inverse * rest
    return by_x.astype(x.dtype), *(p.reshape(scale.shape).astype(scale.dtype) for p in (by_scale, by_bias))  # type: ignore[return-value]
