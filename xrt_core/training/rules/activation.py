"""Gradients of activation functions, and of Softmax and LogSoftmax. The docstring of a rule is the derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.gradient_context import Backward, Forward, reduced, sum_over, where
from xrt_core.training.registry import composition, gradient

_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _activation(*op_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `f(ctx, dy, x, y)`."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @gradient(*op_types)
        def rule(ctx: Backward) -> Any:
            return function(ctx, ctx.grad, ctx.inputs[0], ctx.outputs[0])

        rule.__doc__ = function.__doc__
        return function

    return wrap


@_activation("Relu")
def relu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """1 above zero."""
    return where(y > 0.0, dy, 0.0)


@_activation("LeakyRelu")
def leaky_relu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """1 above zero, else alpha (at zero as well, as PyTorch has it)."""
    return where(x > 0.0, dy, dy * float(ctx.attr("alpha", 0.01)))


@gradient("PRelu")
def prelu(ctx: Backward) -> Any:
    """1 above zero, else the slope (at zero as well, as PyTorch has it); by the slope x up to zero."""
    x, slope = ctx.inputs
    positive = x > 0.0
    by_slope = reduced(where(positive, 0.0, ctx.grad * x), slope, ctx.node) if ctx.wants(1) else None
    return where(positive, ctx.grad, ctx.grad * slope), by_slope


@_activation("Elu")
def elu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """alpha exp(x) below zero, else 1."""
    return where(x < 0.0, dy * (y + float(ctx.attr("alpha", 1.0))), dy)


@_activation("Selu")
def selu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """gamma alpha exp(x) up to zero, gamma above."""
    gamma = float(ctx.attr("gamma", _SELU_GAMMA))
    return where(x > 0.0, dy * gamma, dy * (y + gamma * float(ctx.attr("alpha", _SELU_ALPHA))))


@_activation("Celu")
def celu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """exp(x / alpha) below zero, else 1."""
    return dy * ops.Exp(where(x < 0.0, x, 0.0) / float(ctx.attr("alpha", 1.0)))


@_activation("Sigmoid")
def sigmoid(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """y (1 - y)."""
    return dy * y * (1.0 - y)


@_activation("HardSigmoid")
def hard_sigmoid(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """alpha between the ends."""
    return where((y > 0.0) & (y < 1.0), dy * float(ctx.attr("alpha", 0.2)), 0.0)


@_activation("HardSwish")
def hard_swish(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """x / 3 + 1/2 between -3 and 3, 0 below and 1 above."""
    return where(x < -3.0, 0.0, where(x > 3.0, dy, dy * (x / 3.0 + 0.5)))


@_activation("Softplus")
def softplus(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """sigmoid(x)."""
    return dy * ops.Sigmoid(x)


@_activation("Softsign")
def softsign(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """1 / (1 + |x|)^2."""
    below = ops.Abs(x) + 1.0
    return dy / (below * below)


@_activation("ThresholdedRelu")
def thresholded_relu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """1 above alpha."""
    return where(x > float(ctx.attr("alpha", 1.0)), dy, 0.0)


@_activation("Shrink")
def shrink(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """1 where |x| > lambd."""
    return where(ops.Abs(x) > float(ctx.attr("lambd", 0.5)), dy, 0.0)


@_activation("Mish")
def mish(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """t + x (1 - t^2) sigmoid(x), where t = tanh(softplus(x))."""
    t = ops.Tanh(ops.Softplus(x))
    return dy * (t + x * (1.0 - t * t) * ops.Sigmoid(x))


@_activation("Swish")
def swish(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """s + alpha y (1 - s), where s = sigmoid(alpha x)."""
    alpha = float(ctx.attr("alpha", 1.0))
    s = ops.Sigmoid(x * alpha)
    return dy * (s + y * (1.0 - s) * alpha)


@composition("SwiGLU")
def swiglu(ctx: Forward) -> Tensor:
    """a sigmoid(alpha a) b."""
    a, b = ctx.inputs
    made: Tensor = a * ops.Sigmoid(a * float(ctx.attr("alpha", 1.0))) * b
    return made


@_activation("Gelu")
def gelu(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """Phi(x) + x phi(x), of the normal distribution; or the derivative of its tanh approximation."""
    if ctx.attr("approximate", "none") == "tanh":
        c = math.sqrt(2 / math.pi)
        square = x * x
        t = ops.Tanh(x * (square * (0.044715 * c) + c))
        return dy * ((t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * (square * (3 * 0.044715 * c) + c))
    phi = ops.Exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return dy * ((ops.Erf(x * math.sqrt(0.5)) + 1.0) * 0.5 + x * phi)


def softmax_axes(ctx: Forward, rank: int) -> list[int]:
    """The axes over which Softmax sums: one, and before version 13 all from `axis` on."""
    if ctx.version >= 13:
        return [int(ctx.attr("axis", -1)) % max(rank, 1)]
    return list(range(int(ctx.attr("axis", 1)) % max(rank, 1), rank))


@_activation("Softmax")
def softmax(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """y (dy - sum(dy y)); 0 where y is not a number and dy is 0: rows that are masked as a whole, in whose place the
    standard's body of Attention puts zeros."""
    y = where(ops.IsNaN(y), 0.0, y)
    return y * (dy - sum_over(dy * y, softmax_axes(ctx, x.ndim)))


@_activation("LogSoftmax")
def log_softmax(ctx: Backward, dy: Tensor, x: Tensor, y: Tensor) -> Any:
    """dy - softmax sum(dy)."""
    return dy - ops.Exp(y) * sum_over(dy, softmax_axes(ctx, x.ndim))
