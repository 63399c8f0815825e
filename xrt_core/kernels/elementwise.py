"""Arithmetic and mathematical functions, element by element."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.cast import cast_array
from xrt_core.kernels.namespace import divide_integers, erf, is_jax, remainder_of_integers, result, widen
from xrt_core.kernels.registry import OpContext, kernel

# Functions of one array that every namespace has; narrow floats are computed in float32.
_UNARY = {
    "Abs": "abs", "Acos": "arccos", "Acosh": "arccosh", "Asin": "arcsin", "Asinh": "arcsinh", "Atan": "arctan",
    "Atanh": "arctanh", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Exp": "exp", "Floor": "floor", "Log": "log",
    "Neg": "negative", "Round": "rint", "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt", "Tan": "tan",
    "Tanh": "tanh",
}  # fmt: skip


def _register_unary(op_type: str, function: str) -> None:
    @kernel(op_type, ufunc=function)
    def unary(ctx: OpContext, x: Any) -> Any:
        xp = ctx.xp
        return result(xp, getattr(xp, function)(widen(x)), x.dtype)

    unary.__doc__ = f"{op_type}: `{function}` of the namespace; Round takes halves to the even neighbour."


for _op_type, _function in _UNARY.items():
    _register_unary(_op_type, _function)


@kernel("Identity")
def identity(ctx: OpContext, x: Any) -> Any:
    """The input itself, of any type (sequences and optionals too)."""
    return x


@kernel("EngineInputConvert", "EngineOutputConvert", domain="xrt")
def convert(ctx: OpContext, x: Any) -> Any:
    """The input itself: where all arrays are of one namespace there is nothing to convert (`runtime.converters`)."""
    return x


@kernel("Reciprocal")
def reciprocal(ctx: OpContext, x: Any) -> Any:
    """1 / x, of floats."""
    return result(ctx.xp, 1 / widen(x), x.dtype)


@kernel("Erf")
def erf_(ctx: OpContext, x: Any) -> Any:
    """The error function; integers are allowed and give erf truncated to their type."""
    wide = widen(x) if float_like(x.dtype) else x.astype(np.float64)
    return result(ctx.xp, erf(ctx.xp, wide), x.dtype)


def _arithmetic(ctx: OpContext, function: Any, a: Any, b: Any) -> Any:
    """`function(a, b)` of two arrays of one dtype, in that dtype."""
    if is_jax(ctx.xp):
        return result(ctx.xp, function(a, b), a.dtype)
    return result(ctx.xp, function(widen(a), widen(b)), a.dtype)


@kernel("Add", ufunc="add")
def add(ctx: OpContext, a: Any, b: Any) -> Any:
    """a + b with broadcasting; integers wrap."""
    return _arithmetic(ctx, ctx.xp.add, a, b)


@kernel("Sub", ufunc="subtract")
def sub(ctx: OpContext, a: Any, b: Any) -> Any:
    """a - b with broadcasting; integers wrap."""
    return _arithmetic(ctx, ctx.xp.subtract, a, b)


@kernel("Mul", ufunc="multiply")
def mul(ctx: OpContext, a: Any, b: Any) -> Any:
    """a * b with broadcasting; integers wrap."""
    return _arithmetic(ctx, ctx.xp.multiply, a, b)


@kernel("Div", ufunc="true_divide")
def div(ctx: OpContext, a: Any, b: Any) -> Any:
    """a / b with broadcasting; the quotient of integers is truncated toward zero."""
    if float_like(a.dtype):
        return _arithmetic(ctx, ctx.xp.true_divide, a, b)
    return result(ctx.xp, divide_integers(ctx.xp, a, b), a.dtype)


@kernel("Mod")
def mod(ctx: OpContext, a: Any, b: Any) -> Any:
    """Remainder with the sign of the divisor, or with fmod=1 (the rule for floats before version 28) the dividend's."""
    xp = ctx.xp
    wa, wb = widen(a), widen(b)
    if ctx.attr("fmod", 0):
        return result(xp, xp.fmod(wa, wb) if float_like(a.dtype) else remainder_of_integers(xp, wa, wb), a.dtype)
    out = xp.mod(wa, wb)
    if float_like(a.dtype):
        out = xp.where((out == 0) & (wb != 0), xp.copysign(xp.zeros_like(wb), wb), out)
        if is_jax(xp):  # jax.numpy.mod leaves a finite dividend's sign against an infinite divisor
            beyond = xp.isinf(wb) & xp.isfinite(wa) & (wa != 0)
            out = xp.where(beyond, xp.where((wa < 0) == (wb < 0), wa, wb), out)
    return result(xp, out, a.dtype)


def _integer_power(xp: Any, x: Any, y: Any) -> Any:
    work = np.dtype(np.uint64 if x.dtype == np.uint64 else np.int64)
    base, negative = x.astype(work), y < 0
    # of a negative power only whether it is odd matters, see below
    exponent = xp.where(negative, y.astype(np.int64) & 1, y.astype(np.int64)) if y.dtype.kind == "i" else y
    power = xp.power(base, exponent.astype(work))
    if y.dtype.kind == "u":
        return power
    # 1 / x**n is 0 for every integer but 1 and -1, whose powers are their own reciprocals
    return xp.where(negative & (base != 1) & (base + 1 != 0), xp.zeros_like(base), power)


@kernel("Pow")
def pow_(ctx: OpContext, x: Any, y: Any) -> Any:
    """x ** y in the dtype of x, whatever that of y; negative powers of integers truncate toward zero."""
    xp = ctx.xp
    if not float_like(x.dtype):
        if not float_like(y.dtype):
            return result(xp, _integer_power(xp, x, y), x.dtype)
        power = xp.asarray(xp.power(x.astype(np.float64), y.astype(np.float64)))
        return cast_array(xp, power, x.dtype)  # what x's type does not hold is the same on every engine
    wx, wy = widen(x), widen(y)
    if xp is np and wy.size == 1 and wy.ndim <= wx.ndim and wy.item() in (2, 3):
        out = wx * wx  # NumPy's power is an order of magnitude slower
        return result(xp, out if wy.item() == 2 else out * wx, x.dtype).reshape(np.broadcast_shapes(x.shape, y.shape))
    work = wy.dtype if wy.dtype == np.float64 else wx.dtype
    return result(xp, xp.power(wx.astype(work), wy.astype(work)), x.dtype)


@kernel("Max", ufunc="maximum")
def max_(ctx: OpContext, *inputs: Any) -> Any:
    """Largest of any number of arrays, with broadcasting; NaN wins."""
    return result(ctx.xp, functools.reduce(ctx.xp.maximum, [widen(x) for x in inputs]), inputs[0].dtype)


@kernel("Min", ufunc="minimum")
def min_(ctx: OpContext, *inputs: Any) -> Any:
    """Smallest of any number of arrays, with broadcasting; NaN wins."""
    return result(ctx.xp, functools.reduce(ctx.xp.minimum, [widen(x) for x in inputs]), inputs[0].dtype)


@kernel("Sum", ufunc="add")
def sum_(ctx: OpContext, *inputs: Any) -> Any:
    """Sum of any number of arrays, with broadcasting."""
    return result(ctx.xp, functools.reduce(ctx.xp.add, [widen(x) for x in inputs]), inputs[0].dtype)


@kernel("Mean")
def mean(ctx: OpContext, *inputs: Any) -> Any:
    """Mean of any number of arrays, with broadcasting."""
    total = functools.reduce(ctx.xp.add, [widen(x) for x in inputs])
    return result(ctx.xp, total / len(inputs), inputs[0].dtype)


@kernel("Clip")
def clip(ctx: OpContext, x: Any, low: Any = None, high: Any = None) -> Any:
    """x between low and high (high where low is above it); the bounds were attributes before version 11."""
    xp = ctx.xp
    out = widen(x)
    if ctx.version < 11:
        largest = 3.4028234663852886e38
        low, high = (out.dtype.type(ctx.attr(n, d)) for n, d in (("min", -largest), ("max", largest)))
    else:
        low, high = (None if b is None else xp.reshape(widen(b), ()) for b in (low, high))
    if low is not None:
        out = xp.maximum(out, low)
    if high is not None:
        fresh = low is not None and type(out) is np.ndarray  # made here: one array less in memory
        out = xp.minimum(out, high, out=out) if fresh else xp.minimum(out, high)
    return result(xp, out, x.dtype)
