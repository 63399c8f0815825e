"""Gradients of element-wise arithmetic, of Where, Clip and Cast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import is_float
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.gradient_context import Backward, Forward, filled, reduced, reshaped, where
from xrt_core.training.registry import composition, gradient

Factor = Callable[[Any, Any], Any]


def _back(ctx: Backward, index: int, make: Callable[[], Any]) -> Tensor | None:
    """Return the gradient by one broadcast input, summed to its shape; None if it is not needed."""
    return reduced(make(), ctx.inputs[index], ctx.node) if ctx.wants(index) else None


@gradient("Identity")
def identity(ctx: Backward) -> Any:
    """dx = dy."""
    return ctx.grad


@gradient("Add", "Sum")
def add(ctx: Backward) -> Any:
    """Every term gets dy."""
    return tuple(_back(ctx, i, lambda: ctx.grad) for i in range(len(ctx.inputs)))


@gradient("Range")
def range_(ctx: Backward) -> Any:
    """Of start + i delta for each i; how many there are is constant."""
    g = ctx.grad
    turns = ops.Range(0, ops.Size(g), 1).astype(g.dtype)
    start = ops.ReduceSum(g, keepdims=0) if ctx.wants(0) else None
    return start, None, ops.ReduceSum(g * turns, keepdims=0) if ctx.wants(2) else None


@gradient("Mean")
def mean(ctx: Backward) -> Any:
    """Every term gets dy divided by the number of terms."""
    share = ctx.grad / float(len(ctx.inputs))
    return tuple(_back(ctx, i, lambda: share) for i in range(len(ctx.inputs)))


@gradient("Sub")
def sub(ctx: Backward) -> Any:
    """d(a - b) = da - db."""
    return _back(ctx, 0, lambda: ctx.grad), _back(ctx, 1, lambda: -ctx.grad)


@gradient("Mul")
def mul(ctx: Backward) -> Any:
    """d(ab) = b da + a db."""
    a, b = ctx.inputs
    return _back(ctx, 0, lambda: ctx.grad * b), _back(ctx, 1, lambda: ctx.grad * a)


@gradient("Div")
def div(ctx: Backward) -> Any:
    """d(a / b) = da / b - (a / b) db / b."""
    b = ctx.inputs[1]
    return _back(ctx, 0, lambda: ctx.grad / b), _back(ctx, 1, lambda: -(ctx.grad * ctx.outputs[0] / b))


@gradient("Pow")
def power(ctx: Backward) -> Any:
    """d(x^y) = y x^(y-1) dx + x^y log(x) dy; 0 where y is 0, and by y where x is not positive."""
    x, y = ctx.inputs
    exponent = ctx.data(1)

    def base() -> Any:
        if exponent is not None and exponent.size == 1:
            n = float(exponent.reshape(()))
            if n == 2:
                return ctx.grad * x * 2.0
            if n == 0.5:
                return ctx.grad * 0.5 / ctx.outputs[0]
            if n == 0:
                return filled(ctx.grad)
        scale = y.astype(x.dtype)
        slope = ctx.grad * scale * ops.Pow(x, y - 1)
        return where(scale == 0.0, 0.0, slope)

    def over() -> Any:
        positive = x > 0.0
        logarithm = ops.Log(where(positive, x, 1.0))
        return (ctx.grad * where(positive, ctx.outputs[0] * logarithm, 0.0)).astype(y.dtype)

    return _back(ctx, 0, base), _back(ctx, 1, over)


@gradient("Mod")
def mod(ctx: Backward) -> Any:
    """d(x - n y) = dx - n dy, where the integer n is constant almost everywhere."""
    x, y = ctx.inputs

    def over() -> Any:
        return -ctx.grad * ops.Round((x - ctx.outputs[0]) / y)

    return _back(ctx, 0, lambda: ctx.grad), _back(ctx, 1, over)


@gradient("Min", "Max")
def extreme(ctx: Backward) -> Any:
    """dy goes to the inputs that equal the extremum, divided among equal ones."""
    y = ctx.outputs[0]
    hits = [(x == y).astype(y.dtype) for x in ctx.inputs]
    share = ctx.grad if len(hits) == 1 else ctx.grad / (ops.Sum(*hits) if len(hits) > 2 else hits[0] + hits[1])
    return tuple(_back(ctx, i, lambda h=h: share * h) for i, h in enumerate(hits))  # type: ignore[misc]


@gradient("Where")
def where_(ctx: Backward) -> Any:
    """dy goes to the selected input, 0 to the other."""
    condition = ctx.inputs[0]
    return (
        None,
        _back(ctx, 1, lambda: where(condition, ctx.grad, 0.0)),
        _back(ctx, 2, lambda: where(condition, 0.0, ctx.grad)),
    )


@gradient("Clip")
def clip(ctx: Backward) -> Any:
    """dy goes to x within the bounds (inclusive), and to the bound elsewhere."""
    x = ctx.inputs[0]
    low: Any = ctx.input(1) if ctx.version >= 11 else ctx.attr("min")
    high: Any = ctx.input(2) if ctx.version >= 11 else ctx.attr("max")
    below = None if low is None else x < low
    above = None if high is None else x > high
    inside = ctx.grad
    for outside in (below, above):
        if outside is not None:
            inside = where(outside, 0.0, inside)
    results: list[Tensor | None] = [inside]
    for i, outside in ((1, below), (2, above)):
        bound = None
        if ctx.wants(i) and outside is not None:
            taken = where(outside, ctx.grad, 0.0)
            bound = reshaped(taken.sum(), ctx.inputs[i])
        results.append(bound)
    return tuple(results[: len(ctx.inputs)])


@gradient("Cast", "CastLike")
def cast(ctx: Backward) -> Any:
    """dy cast to the input's dtype."""
    x = ctx.inputs[0]
    return (ctx.grad.astype(x.dtype) if is_float(x.dtype) else None, *[None] * (len(ctx.inputs) - 1))


def _unary(op_type: str, derivative: Factor) -> None:
    """Register f(x) with f'(x) as a function of x and y = f(x)."""

    @gradient(op_type)
    def rule(ctx: Backward) -> Any:
        made: Tensor = ctx.grad * derivative(ctx.inputs[0], ctx.outputs[0])
        return made

    rule.__doc__ = f"The derivative of {op_type}, times dy."


@gradient("Neg")
def neg(ctx: Backward) -> Any:
    """dx = -dy."""
    return -ctx.grad


@gradient("Log")
def log(ctx: Backward) -> Any:
    """1 / x."""
    return ctx.grad / ctx.inputs[0]


@gradient("Sqrt")
def sqrt(ctx: Backward) -> Any:
    """1 / (2 sqrt(x))."""
    return ctx.grad * 0.5 / ctx.outputs[0]


@gradient("Tan")
def tan(ctx: Backward) -> Any:
    """1 + tan(x)^2."""
    y = ctx.outputs[0]
    return ctx.grad * (y * y + 1.0)


_unary("Abs", lambda x, y: ops.Sign(x))
_unary("Exp", lambda x, y: y)
_unary("Reciprocal", lambda x, y: -(y * y))
_unary("Sin", lambda x, y: ops.Cos(x))
_unary("Cos", lambda x, y: -ops.Sin(x))
_unary("Sinh", lambda x, y: ops.Cosh(x))
_unary("Cosh", lambda x, y: ops.Sinh(x))
_unary("Tanh", lambda x, y: 1.0 - y * y)
_unary("Asin", lambda x, y: ops.Reciprocal(ops.Sqrt(1.0 - x * x)))
_unary("Acos", lambda x, y: -ops.Reciprocal(ops.Sqrt(1.0 - x * x)))
_unary("Atan", lambda x, y: ops.Reciprocal(x * x + 1.0))
_unary("Asinh", lambda x, y: ops.Reciprocal(ops.Sqrt(x * x + 1.0)))
_unary("Acosh", lambda x, y: ops.Reciprocal(ops.Sqrt(x * x - 1.0)))
_unary("Atanh", lambda x, y: ops.Reciprocal(1.0 - x * x))
_unary("Erf", lambda x, y: ops.Exp(-(x * x)) * (2.0 / math.sqrt(math.pi)))


@gradient("CumSum")
def cumsum(ctx: Backward) -> Any:
    """The cumulative sum of dy in the opposite direction."""
    flags = {k: int(ctx.attr(k, 0)) for k in ("exclusive", "reverse")}
    back = ops.CumSum(ctx.grad, ctx.inputs[1], exclusive=flags["exclusive"], reverse=1 - flags["reverse"])
    return back, None


@composition("DequantizeLinear")
def dequantize(ctx: Forward) -> Any:
    """(x - zero point) * scale, per tensor or per axis; None for blocks."""
    x, scale, zero = ctx.inputs[0], ctx.inputs[1], ctx.input(2)
    if ctx.attr("block_size", 0) or ctx.attr("output_dtype", 0):
        return None
    if scale.ndim == 1 and x.ndim > 1:
        place = [1] * x.ndim
        place[int(ctx.attr("axis", 1)) % x.ndim] = -1
        scale = scale.reshape(place)
        zero = None if zero is None else zero.reshape(place)
    value = x.astype(scale.dtype)
    return (value if zero is None else value - zero.astype(scale.dtype)) * scale
