"""Model updates of "ai.onnx.preview.training": Adam, Momentum, Adagrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.kernels.namespace import result, widen
from xrt_core.kernels.registry import OpContext, kernel

_DOMAIN = "ai.onnx.preview.training"


def _update(ctx: OpContext, tensors: tuple[Any, ...], kinds: int, states: int, one: Callable[..., Any]) -> Any:
    """Apply `one(x, gradient, *states)` to each variable; inputs and outputs are grouped by kind: all X, all G, ...

    Raises ShapeError where the inputs do not come in `kinds` equal parts.
    """
    count, rest = divmod(len(tensors), kinds)
    if rest:
        raise ShapeError(f"{ctx.node.operator} got {len(tensors)} tensors, not a multiple of {kinds} (X, G, states)")
    new: list[list[Any]] = [[] for _ in range(1 + states)]
    for i in range(count):
        parts = [tensors[i + k * count] for k in range(kinds)]
        results = one(*(widen(p) for p in parts))
        for k, value in enumerate(results):
            new[k].append(result(ctx.xp, value, parts[0 if k == 0 else k + 1].dtype))
    return tuple(v for kind in new for v in kind)


def _scalar(xp: Any, x: Any, like: Any) -> Any:
    """A one-element input as a 0-d array that does not promote `like`."""
    return xp.reshape(x, ()).astype(like.dtype)


@kernel("Adam", domain=_DOMAIN)
def adam(ctx: OpContext, rate: Any, count: Any, *tensors: Any) -> Any:
    """One step of Adam; the rate is corrected for bias where the update count is above 0."""
    xp = ctx.xp
    alpha, beta = ctx.attr("alpha", 0.9), ctx.attr("beta", 0.999)
    epsilon = ctx.attr("epsilon", 1e-6)
    decay, decay_after = ctx.attr("norm_coefficient", 0.0), ctx.attr("norm_coefficient_post", 0.0)
    step = xp.reshape(count, ()).astype(np.float64)
    started = step > 0
    correction = xp.where(started, xp.sqrt(1 - beta**step) / xp.where(started, 1 - alpha**step, 1.0), 1.0)

    def one(x: Any, gradient: Any, velocity: Any, square: Any) -> tuple[Any, Any, Any]:
        adjusted = _scalar(xp, rate, x) * correction.astype(x.dtype)
        g = decay * x + gradient if decay else gradient
        v = alpha * velocity + (1 - alpha) * g
        h = beta * square + (1 - beta) * (g * g)
        return (1 - decay_after) * (x - adjusted * v / (xp.sqrt(h) + epsilon)), v, h

    return _update(ctx, tensors, 4, 2, one)


@kernel("Momentum", domain=_DOMAIN)
def momentum(ctx: OpContext, rate: Any, count: Any, *tensors: Any) -> Any:
    """One step of gradient descent with momentum, standard or Nesterov's; beta counts as 1 in the first update."""
    xp = ctx.xp
    alpha, beta, decay = ctx.attr("alpha"), ctx.attr("beta"), ctx.attr("norm_coefficient")
    nesterov = ctx.attr("mode") == "nesterov"

    def one(x: Any, gradient: Any, velocity: Any) -> tuple[Any, Any]:
        r = _scalar(xp, rate, x)
        g = decay * x + gradient if decay else gradient
        v = alpha * velocity + xp.where(xp.reshape(count, ()) > 0, beta, 1.0).astype(x.dtype) * g
        return x - r * (g + alpha * v if nesterov else v), v

    return _update(ctx, tensors, 3, 1, one)


@kernel("Adagrad", domain=_DOMAIN)
def adagrad(ctx: OpContext, rate: Any, count: Any, *tensors: Any) -> Any:
    """One step of Adagrad; the rate falls as 1 / (1 + count * decay_factor)."""
    xp = ctx.xp
    epsilon, decay = ctx.attr("epsilon", 1e-6), ctx.attr("norm_coefficient", 0.0)

    def one(x: Any, gradient: Any, square: Any) -> tuple[Any, Any]:
        r = _scalar(xp, rate, x) / (1 + _scalar(xp, count, x) * ctx.attr("decay_factor", 0.0))
        g = decay * x + gradient if decay else gradient
        h = square + g * g
        return x - r * g / (xp.sqrt(h) + epsilon), h

    return _update(ctx, tensors, 3, 1, one)
