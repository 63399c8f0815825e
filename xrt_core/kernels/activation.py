"""Activation functions; narrow floats are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import erf, result, widen
from xrt_core.kernels.registry import OpContext, kernel

Formula = Callable[[OpContext, Any, Any], Any]


def sigmoid(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of a float32 or float64 array; exact at both ends, as exp may overflow to infinity."""
    return 1 / (1 + xp.exp(-x))


def softplus(xp: Any, x: Any) -> Any:
    """log(1 + exp(x)) of a float32 or float64 array, without overflow."""
    return xp.log1p(xp.exp(-xp.abs(x))) + xp.maximum(x, 0)


def _register(op_type: str) -> Callable[[Formula], Formula]:
    """Register `formula(ctx, xp, x)`, which sees its input widened and whose result takes the input's dtype."""

    def wrap(formula: Formula) -> Formula:
        @kernel(op_type)
        def activation(ctx: OpContext, x: Any) -> Any:
            return result(ctx.xp, formula(ctx, ctx.xp, widen(x)), x.dtype)

        activation.__doc__ = formula.__doc__
        return formula

    return wrap


@_register("Relu")
def relu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """max(x, 0), of signed integers too."""
    return xp.maximum(x, 0)


@_register("LeakyRelu")
def leaky_relu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """alpha x below zero, else x."""
    return xp.where(x < 0, ctx.attr("alpha", 0.01) * x, x)


@_register("Sigmoid")
def sigmoid_(ctx: OpContext, xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return sigmoid(xp, x)


@_register("HardSigmoid")
def hard_sigmoid(ctx: OpContext, xp: Any, x: Any) -> Any:
    """alpha x + beta, clipped to [0, 1]."""
    return xp.clip(ctx.attr("alpha", 0.2) * x + ctx.attr("beta", 0.5), 0, 1)


@_register("HardSwish")
def hard_swish(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x times (x / 6 + 1/2) clipped to [0, 1]."""
    return x * xp.clip(x / 6 + 0.5, 0, 1)


@_register("Elu")
def elu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """alpha (exp(x) - 1) below zero, else x."""
    return xp.where(x < 0, ctx.attr("alpha", 1.0) * xp.expm1(x), x)


@_register("Selu")
def selu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """gamma alpha (exp(x) - 1) up to zero, gamma x above."""
    alpha = ctx.attr("alpha", 1.67326319217681884765625)
    return ctx.attr("gamma", 1.05070102214813232421875) * xp.where(x > 0, x, alpha * xp.expm1(x))


@_register("Celu")
def celu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1))."""
    alpha = ctx.attr("alpha", 1.0)
    return xp.maximum(x, 0) + xp.minimum(alpha * xp.expm1(x / alpha), 0)


@_register("Gelu")
def gelu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x times the normal distribution's cumulative function, or its tanh approximation."""
    if ctx.attr("approximate", "none") == "tanh":
        return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + erf(xp, x * math.sqrt(0.5)))


@_register("Mish")
def mish(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x tanh(softplus(x))."""
    return x * xp.tanh(softplus(xp, x))


@_register("Swish")
def swish(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x sigmoid(alpha x)."""
    return x * sigmoid(xp, ctx.attr("alpha", 1.0) * x)


@_register("Softplus")
def softplus_(ctx: OpContext, xp: Any, x: Any) -> Any:
    """log(1 + exp(x))."""
    return softplus(xp, x)


@_register("Softsign")
def softsign(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x / (1 + |x|)."""
    return x / (1 + xp.abs(x))


@_register("ThresholdedRelu")
def thresholded_relu(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x above alpha, else 0."""
    return xp.where(x > ctx.attr("alpha", 1.0), x, xp.zeros_like(x))


@_register("Shrink")
def shrink(ctx: OpContext, xp: Any, x: Any) -> Any:
    """x moved toward zero by `bias` where |x| > lambd, else 0; integers are computed in float64."""
    if not float_like(x.dtype):
        x = x.astype(np.float64)
    limit, bias = ctx.attr("lambd", 0.5), ctx.attr("bias", 0.0)
    return xp.where(x < -limit, x + bias, xp.where(x > limit, x - bias, xp.zeros_like(x)))


@kernel("PRelu")
def prelu(ctx: OpContext, x: Any, slope: Any) -> Any:
    """slope x below zero, else x; the slope broadcasts to x."""
    wide = widen(x)
    return result(ctx.xp, ctx.xp.where(wide < 0, widen(slope) * wide, wide), x.dtype)


@kernel("SwiGLU")
def swiglu(ctx: OpContext, a: Any, b: Any) -> Any:
    """Swish of the gate `a` times the value `b`, of the same shape."""
    return result(ctx.xp, swish(ctx, ctx.xp, widen(a)) * widen(b), a.dtype)


def log_softmax(xp: Any, x: Any, axis: int) -> Any:
    """Logarithm of softmax along an axis of a float32 or float64 array."""
    shifted = x - xp.max(x, axis=axis, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))


def softmax(xp: Any, x: Any, axis: int) -> Any:
    """Softmax along an axis of a float32 or float64 array."""
    powers = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return powers / xp.sum(powers, axis=axis, keepdims=True)


def hardmax(xp: Any, x: Any, axis: int) -> Any:
    """1 at the first maximum along an axis, 0 elsewhere."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    first = xp.expand_dims(xp.argmax(x, axis=axis), axis)
    return (xp.arange(x.shape[axis]).reshape(shape) == first).astype(x.dtype)


def _along(ctx: OpContext, function: Callable[[Any, Any, int], Any], x: Any) -> Any:
    """Apply `function` along `axis`; before version 13 to the matrix that x flattens to at `axis`."""
    xp = ctx.xp
    if x.size == 0:
        return x
    wide = widen(x)
    if ctx.version >= 13:
        return result(xp, function(xp, wide, ctx.attr("axis", -1)), x.dtype)
    axis = ctx.attr("axis", 1)
    rows = math.prod(x.shape[: axis + x.ndim if axis < 0 else axis])
    return result(xp, function(xp, wide.reshape(rows, x.size // rows), 1), x.dtype).reshape(x.shape)


@kernel("Softmax")
def softmax_(ctx: OpContext, x: Any) -> Any:
    """exp(x) over its sum along `axis` (before version 13: along all axes from `axis` on)."""
    return _along(ctx, softmax, x)


@kernel("LogSoftmax")
def log_softmax_(ctx: OpContext, x: Any) -> Any:
    """Logarithm of Softmax."""
    return _along(ctx, log_softmax, x)


@kernel("Hardmax")
def hardmax_(ctx: OpContext, x: Any) -> Any:
    """1 at the first maximum along `axis`, 0 elsewhere."""
    return _along(ctx, hardmax, x)
