"""Operators that compute each element by itself, and the two kernels, flat and strided, that all of them share."""

# device code states no types: numba finds them
# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_toy._toolkit import Scalar, cuda, device_function, library
from xrt_toy.kernels.context import (
    ANY,
    BOOL,
    FLOATS,
    NUMBERS,
    Buffer,
    ToyOpContext,
    compute_type,
    toy_kernel,
)  # fmt: skip

Make = Callable[..., Callable[..., Any]]
"""Makes the function of one element: `make(m, *parameters)`, where m holds the mathematical functions on type m.T."""

# --- the kernels --------------------------------------------------------------------------------------------------


@device_function
def offset(index, shape, strides):
    """Where element `index` (row-major) of an array of `shape` lies, when its axes have `strides`."""
    at = 0
    for axis in range(len(shape) - 1, 0, -1):
        at += index % shape[axis] * strides[axis]
        index //= shape[axis]
    return at + index * strides[0]


@functools.cache
def _kernels(make: Make, parameters: tuple[Any, ...], types: tuple[Scalar, ...]) -> tuple[Any, Any]:
    """The flat and the strided kernel for a function of one to three operands, calculated in `types`.

    Both take three operands; the compiler drops loads that the function does not use.
    """
    m = library(types[0])
    given = device_function(make(m, *parameters))
    ta, tb, tc = (*types, *types[-1:] * 2)[:3]
    if len(types) == 1:
        f = device_function(lambda a, b, c: given(a))
    elif len(types) == 2:
        f = device_function(lambda a, b, c: given(a, b))
    else:
        f = given

    def flat(out, a, b, c, n, sa, sb, sc):
        # four loads are under way before the first store; neighbouring threads touch neighbouring elements
        i, step = cuda.grid(1), cuda.gridsize(1)
        while i + 3 * step < n:
            j, k, p = i + step, i + 2 * step, i + 3 * step
            y0 = f(ta(a[i * sa]), tb(b[i * sb]), tc(c[i * sc]))
            y1 = f(ta(a[j * sa]), tb(b[j * sb]), tc(c[j * sc]))
            y2 = f(ta(a[k * sa]), tb(b[k * sb]), tc(c[k * sc]))
            y3 = f(ta(a[p * sa]), tb(b[p * sb]), tc(c[p * sc]))
            out[i], out[j], out[k], out[p] = y0, y1, y2, y3
            i += 4 * step
        while i < n:
            out[i] = f(ta(a[i * sa]), tb(b[i * sb]), tc(c[i * sc]))
            i += step

    def strided(out, a, b, c, n, start, shape, so, sa, sb, sc):
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            y = f(ta(a[offset(i, shape, sa)]), tb(b[offset(i, shape, sb)]), tc(c[offset(i, shape, sc)]))
            out[start + offset(i, shape, so)] = y

    return flat, strided


# --- from shapes to strides ---------------------------------------------------------------------------------------


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    strides, step = [], 1
    for d in reversed(shape):
        strides.append(step)
        step *= d
    return tuple(reversed(strides))


def broadcast(shape: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Strides with which a contiguous array of `shape` is read as one of shape `to`: 0 along axes it repeats."""
    lead = len(to) - len(shape)
    return (0,) * lead + tuple(0 if d == 1 else s for d, s in zip(shape, row_major(shape), strict=True))


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same walk over fewer axes: those of length 1 go, neighbours that all operands step through evenly merge."""
    axes: list[tuple[int, ...]] = []
    for d, *s in zip(shape, *strides, strict=True):
        if d == 1:
            continue
        if axes and all(before == d * now for before, now in zip(axes[-1][1:], s, strict=True)):
            axes[-1] = (axes[-1][0] * d, *s)
        else:
            axes.append((d, *s))
    return tuple(zip(*(axes or [(1,) + (0,) * len(strides)]), strict=True))


def walk(
    ctx: ToyOpContext, make: Make, operands: Sequence[Buffer], out: Buffer, *, parameters: tuple[Any, ...] = (),
    shape: Sequence[int] | None = None, strides: Sequence[Sequence[int]] | None = None,
    out_strides: Sequence[int] | None = None, start: int = 0,
) -> Buffer:  # fmt: skip
    """Launch `out[start + ...] = make(...)(*operands)` over `shape`, and return `out`.

    By default over the shape of `out`, with the operands broadcast to it; strides say otherwise.
    """
    shape = out.shape if shape is None else shape
    inner = strides or [broadcast(x.shape, shape) for x in operands]
    outer = row_major(shape) if out_strides is None else out_strides
    axes, so, *sx = collapse(shape, outer, *inner)
    flat, strided = _kernels(make, parameters, tuple(compute_type(x.dtype) for x in operands))
    arrays = (list(operands) + [operands[0]] * 2)[:3]
    sx = (sx + sx[:1] * 2)[:3]
    n = int(np.prod(shape, dtype=np.int64))
    # operands that are walked in step with `out`: the arguments after it
    pointwise = [i for i, s in enumerate(sx, 1) if s == so and start == 0]
    if len(axes) == 1 and so[0] in (0, 1) and start == 0:
        ctx.launch(flat, n, out, *arrays, n, *(s[0] for s in sx), pointwise=pointwise)
    else:
        ctx.launch(strided, n, out, *arrays, n, start, axes, so, *sx, pointwise=pointwise)
    return out


def same(m: SimpleNamespace) -> Callable[..., Any]:
    """x itself: what remains of copies, transposes and concatenations."""
    return lambda x: x


def copy(ctx: ToyOpContext, x: Buffer, out: Buffer) -> Buffer:
    """Copy all of x."""
    return walk(ctx, same, [ctx.view(x, (x.size,))], out, shape=(x.size,))


# --- the functions ------------------------------------------------------------------------------------------------


def relu(m: SimpleNamespace) -> Callable[..., Any]:
    """0 where x is not positive; a NaN is not <= 0 and stays."""
    zero = m.T(0)
    return lambda x: zero if x <= zero else x


def leaky_relu(m: SimpleNamespace, alpha: float) -> Callable[..., Any]:
    """alpha x below 0."""
    zero, slope = m.T(0), m.T(alpha)
    return lambda x: x * slope if x < zero else x


def elu(m: SimpleNamespace, alpha: float) -> Callable[..., Any]:
    """alpha (exp(x) - 1) below 0."""
    zero, one, scale, exp = m.T(0), m.T(1), m.T(alpha), m.exp
    return lambda x: scale * (exp(x) - one) if x < zero else x


def sigmoid(m: SimpleNamespace) -> Callable[..., Any]:
    """1 / (1 + exp(-x))."""
    one, exp = m.T(1), m.exp
    return lambda x: one / (one + exp(-x))


def softplus(m: SimpleNamespace) -> Callable[..., Any]:
    """log(1 + exp(x)), without an overflow for large x."""
    zero, one, exp, log = m.T(0), m.T(1), m.exp, m.log
    return lambda x: (x if x > zero else zero) + log(one + exp(-abs(x)))


def sign(m: SimpleNamespace) -> Callable[..., Any]:
    """-1, 0 or 1; NaN stays."""
    zero, one = m.T(0), m.T(1)
    return lambda x: one if x > zero else -one if x < zero else x


def reciprocal(m: SimpleNamespace) -> Callable[..., Any]:
    """1 / x."""
    one = m.T(1)
    return lambda x: one / x


def divide(m: SimpleNamespace) -> Callable[..., Any]:
    """a / b; quotients of integers are truncated toward zero, where // rounds down."""
    if issubclass(m.T, np.floating):
        return lambda a, b: a / b

    def truncated(a, b):
        q = a // b
        if q * b != a and (a < 0) != (b < 0):
            q += 1
        return q

    return truncated


def maximum(m: SimpleNamespace) -> Callable[..., Any]:
    """The larger; a NaN wins (it is the only value that is not equal to itself)."""
    return lambda a, b: a if a >= b or a != a else b


def minimum(m: SimpleNamespace) -> Callable[..., Any]:
    """The smaller; a NaN wins."""
    return lambda a, b: a if a <= b or a != a else b


def power(m: SimpleNamespace) -> Callable[..., Any]:
    """a ** b in the type of a."""
    T, pow_ = m.T, m.pow
    return lambda a, b: pow_(a, T(b))


def clip(m: SimpleNamespace) -> Callable[..., Any]:
    """x between low and high; high where low is above it."""
    return lambda x, low, high: high if low > high or x > high else low if x < low else x


def cast(m: SimpleNamespace, kind: str) -> Callable[..., Any]:
    """x as it is stored in an array of another kind: any number but 0 is true, floats are cut off."""
    if kind == "b":
        return lambda x: x != 0
    if kind == "i" and issubclass(m.T, np.floating):
        integer = m.integer
        return lambda x: integer(x)
    if kind == "f" and not issubclass(m.T, np.floating):
        return lambda x: np.float64(x)
    return lambda x: x


_UNARY: Final[dict[str, tuple[Make, frozenset[np.dtype]]]] = {
    "Abs": (lambda m: lambda x: abs(x), NUMBERS),
    "Ceil": (lambda m: m.ceil, FLOATS),
    "Cos": (lambda m: m.cos, FLOATS),
    "Erf": (lambda m: m.erf, FLOATS),
    "Exp": (lambda m: m.exp, FLOATS),
    "Floor": (lambda m: m.floor, FLOATS),
    "Log": (lambda m: m.log, FLOATS),
    "Neg": (lambda m: lambda x: -x, NUMBERS),
    "Not": (lambda m: lambda x: not x, BOOL),
    "Reciprocal": (reciprocal, FLOATS),
    "Relu": (relu, NUMBERS),
    "Round": (lambda m: m.rint, FLOATS),
    "Sigmoid": (sigmoid, FLOATS),
    "Sign": (sign, NUMBERS),
    "Sin": (lambda m: m.sin, FLOATS),
    "Softplus": (softplus, FLOATS),
    "Sqrt": (lambda m: m.sqrt, FLOATS),
    "Tanh": (lambda m: m.tanh, FLOATS),
}  # fmt: skip

_BINARY: Final[dict[str, tuple[Make, frozenset[np.dtype]]]] = {
    "Add": (lambda m: lambda a, b: a + b, NUMBERS),
    "And": (lambda m: lambda a, b: a and b, BOOL),
    "Div": (divide, NUMBERS),
    "Equal": (lambda m: lambda a, b: a == b, ANY),
    "Greater": (lambda m: lambda a, b: a > b, NUMBERS),
    "GreaterOrEqual": (lambda m: lambda a, b: a >= b, NUMBERS),
    "Less": (lambda m: lambda a, b: a < b, NUMBERS),
    "LessOrEqual": (lambda m: lambda a, b: a <= b, NUMBERS),
    "Mul": (lambda m: lambda a, b: a * b, NUMBERS),
    "Or": (lambda m: lambda a, b: a or b, BOOL),
    "Sub": (lambda m: lambda a, b: a - b, NUMBERS),
    "Xor": (lambda m: lambda a, b: a != b, BOOL),
}  # fmt: skip


def _old_broadcast(node: Node) -> str:
    """Before version 7 the second operand lined up with an axis that an attribute named."""
    return "toy broadcasts as ONNX does since opset 7" if "axis" in node.attributes else ""


def _register(op_type: str, make: Make, dtypes: frozenset[np.dtype]) -> None:
    def kernel(ctx: ToyOpContext, *inputs: Buffer) -> Buffer:
        return walk(ctx, make, inputs, ctx.output())

    toy_kernel(op_type, dtypes=dtypes, check=_old_broadcast)(kernel)


for _op_type, (_make, _dtypes) in {**_UNARY, **_BINARY}.items():
    _register(_op_type, _make, _dtypes)


@toy_kernel("LeakyRelu", "Elu", dtypes=FLOATS)
def with_alpha(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """Activations with a parameter, which becomes a constant of the kernel."""
    make, default = (leaky_relu, 0.01) if ctx.node.op_type == "LeakyRelu" else (elu, 1.0)
    return walk(ctx, make, [x], ctx.output(), parameters=(float(ctx.attr("alpha", default)),))


@toy_kernel("Pow", dtypes=FLOATS, of=(0,))
def pow_(ctx: ToyOpContext, x: Buffer, y: Buffer) -> Buffer:
    """x ** y of floats, in the dtype of x."""
    return walk(ctx, power, [x, y], ctx.output())


@toy_kernel("Max", "Min", "Sum", dtypes=NUMBERS)
def variadic(ctx: ToyOpContext, *inputs: Buffer) -> Buffer:
    """Any number of operands: two at a time, with the running result in the output."""
    make = {"Max": maximum, "Min": minimum, "Sum": _BINARY["Add"][0]}[ctx.node.op_type]
    out = walk(ctx, same, inputs[:1], ctx.output())
    for x in inputs[1:]:
        walk(ctx, make, [out, x], out)
    return out


@toy_kernel("Clip", dtypes=NUMBERS, check=lambda n: "toy takes the bounds of Clip as inputs" if n.version < 11 else "")
def clip_(ctx: ToyOpContext, x: Buffer, low: Buffer | None = None, high: Buffer | None = None) -> Buffer:
    """x between two scalars; either may be missing."""
    bounds = [b for b in (low, high) if b is not None]
    if len(bounds) == 2:
        return walk(ctx, clip, [x, *(ctx.view(b, ()) for b in bounds)], ctx.output())
    make = maximum if low is not None else minimum
    return walk(ctx, make if bounds else same, [x, *(ctx.view(b, ()) for b in bounds)], ctx.output())


@toy_kernel("Where", dtypes=BOOL, of=(0,))
def where(ctx: ToyOpContext, condition: Buffer, x: Buffer, y: Buffer) -> Buffer:
    """x where the condition holds, else y."""
    return walk(ctx, choose, [condition, x, y], ctx.output())


def choose(m: SimpleNamespace) -> Callable[..., Any]:
    """The choice of Where."""
    return lambda condition, x, y: x if condition else y


@toy_kernel("Cast", dtypes=ANY)
def cast_(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """x in another dtype."""
    out = ctx.output()
    return walk(ctx, cast, [x], out, parameters=(out.dtype.kind,))
