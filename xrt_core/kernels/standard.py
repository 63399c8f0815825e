"""Kernels over the Python array API standard (2024.12): for libraries whose arrays are not like NumPy's, such as torch.

    register_standard_kernels("acme", ("cpu",))     # xrt_core.engine

A kernel calls nothing of an array but its operators and `shape`, and of the namespace (`ctx.xp`) what the standard
has (https://data-apis.org/array-api); for torch and CuPy array-api-compat is that namespace. Inputs in `static` are
NumPy arrays. Element types are those of `DTYPES`, which all such libraries have; there is no widening. Shapes are
static: what an operator's result looks like, the node says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import Struct

from xrt_core.errors import RegistrationError
from xrt_core.ir.graph import Node, Support
from xrt_core.ir.types import TensorType
from xrt_core.kernels.movement import axes_of, axis_of, ints
from xrt_core.kernels.reduction import reduced_axes
from xrt_core.kernels.registry import OpContext

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Node], Support]

FLOATS: Final = frozenset(map(np.dtype, (np.float32, np.float64)))
INTEGERS: Final = frozenset(map(np.dtype, (np.int8, np.int16, np.int32, np.int64, np.uint8)))
NUMBERS: Final = FLOATS | INTEGERS
BOOL: Final = frozenset((np.dtype(np.bool_),))
DTYPES: Final = NUMBERS | BOOL
"""The element types of these kernels: others are not in every library, or without operators there."""


class StandardKernel(Struct, frozen=True):
    """A kernel. static: inputs that it gets as NumPy arrays. dtypes: of its tensor inputs. check: a further test."""

    op_type: str
    function: Callable[..., Any]
    static: tuple[int, ...] = ()
    dtypes: frozenset[np.dtype] = DTYPES
    check: Check | None = None


_KERNELS: dict[str, StandardKernel] = {}


def standard_kernels() -> Mapping[str, StandardKernel]:
    """Return every kernel by its operator of the ONNX domain; read-only."""
    return MappingProxyType(_KERNELS)


def _kernel(
    *op_types: str,
    static: tuple[int, ...] = (),
    dtypes: frozenset[np.dtype] = DTYPES,
    check: Check | None = None,
) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for op_type in op_types:
            if op_type in _KERNELS:
                raise RegistrationError(f"the standard kernel of {op_type} is registered twice")
            _KERNELS[op_type] = StandardKernel(op_type, function, static, dtypes, check)
        return function

    return decorate


def _of(ctx: OpContext, index: int = 0) -> tuple[int, ...]:
    """The shape of an output."""
    out = ctx.node.outputs[index]
    t = out.type if out is not None else None
    assert isinstance(t, TensorType)
    return tuple(d for d in t.shape or () if isinstance(d, int))


def _not_empty(node: Node) -> Support:
    """Refuse inputs without elements: extrema of them are errors."""
    t = node.inputs[0].type if node.inputs[0] is not None else None
    empty = isinstance(t, TensorType) and 0 in (t.shape or ())
    return Support.no(f"{node.operator} of no elements") if empty else Support.yes()


def _since(version: int) -> Check:
    def check(node: Node) -> Support:
        if node.version >= version:
            return Support.yes()
        return Support.no(f"{node.operator}-{node.version}: the kernel is of version {version} and later")

    return check


# --- one array --------------------------------------------------------------------------------------------------------

_UNARY: Final = MappingProxyType(
    {
        "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan", "Atanh": "atanh",
        "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Exp": "exp", "Floor": "floor", "Log": "log", "Round": "round",
        "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt", "Tan": "tan", "Tanh": "tanh",
    }
)  # fmt: skip


def _register_unary(op_type: str, name: str, dtypes: frozenset[np.dtype]) -> None:
    @_kernel(op_type, dtypes=dtypes)
    def unary(ctx: OpContext, x: Any) -> Any:
        return getattr(ctx.xp, name)(x)

    unary.__doc__ = f"{op_type}: `{name}` of the standard."


for _op_type, _name in _UNARY.items():
    _register_unary(_op_type, _name, FLOATS)
for _op_type, _name in (("Abs", "abs"), ("Neg", "negative"), ("Sign", "sign")):
    _register_unary(_op_type, _name, NUMBERS)
_register_unary("Not", "logical_not", BOOL)
_register_unary("BitwiseNot", "bitwise_invert", INTEGERS)
_register_unary("IsNaN", "isnan", FLOATS)


@_kernel("Identity", "Dropout", check=lambda n: Support.yes() if n.op_type == "Identity" else _inference(n))
def identity(ctx: OpContext, x: Any, *_: Any) -> Any:
    """The input; Dropout in inference, without its mask."""
    return x


def _inference(node: Node) -> Support:
    if len(node.inputs) > 2 or len(node.outputs) > 1 or node.version < 7:
        return Support.no(f"{node.operator}: the kernel is of inference, without a mask")
    return Support.yes()


@_kernel("Reciprocal", dtypes=FLOATS)
def reciprocal(ctx: OpContext, x: Any) -> Any:
    """1 / x."""
    return 1.0 / x


@_kernel("IsInf", dtypes=FLOATS)
def is_inf(ctx: OpContext, x: Any) -> Any:
    """Which elements are infinite, of the signs that are asked for."""
    found = ctx.xp.isinf(x)
    if not ctx.attr("detect_positive", 1):
        found = ctx.xp.logical_and(found, x < 0)
    if not ctx.attr("detect_negative", 1):
        found = ctx.xp.logical_and(found, x > 0)
    return found


def _clamped(xp: Any, x: Any, low: float, high: float) -> Any:
    return xp.minimum(xp.maximum(x, xp.full_like(x, low)), xp.full_like(x, high))


@_kernel("Relu", dtypes=NUMBERS)
def relu(ctx: OpContext, x: Any) -> Any:
    """max(x, 0); NaN stays NaN."""
    return ctx.xp.maximum(x, ctx.xp.zeros_like(x))


@_kernel("Sigmoid", dtypes=FLOATS)
def sigmoid(ctx: OpContext, x: Any) -> Any:
    """1 / (1 + exp(-x)); exp overflows to infinity, whose reciprocal is 0."""
    return 1.0 / (1.0 + ctx.xp.exp(-x))


@_kernel("Swish", dtypes=FLOATS)
def swish(ctx: OpContext, x: Any) -> Any:
    """x / (1 + exp(-alpha x))."""
    return x / (1.0 + ctx.xp.exp(-ctx.attr("alpha", 1.0) * x))


@_kernel("LeakyRelu", dtypes=FLOATS)
def leaky_relu(ctx: OpContext, x: Any) -> Any:
    """x, or alpha x where x is negative."""
    return ctx.xp.where(x < 0, ctx.attr("alpha", 0.01) * x, x)


@_kernel("PRelu", dtypes=FLOATS)
def prelu(ctx: OpContext, x: Any, slope: Any) -> Any:
    """x, or slope x where x is negative."""
    return ctx.xp.where(x < 0, slope * x, x)


@_kernel("ThresholdedRelu", dtypes=FLOATS)
def thresholded_relu(ctx: OpContext, x: Any) -> Any:
    """x where it exceeds alpha, else 0."""
    return ctx.xp.where(x > ctx.attr("alpha", 1.0), x, ctx.xp.zeros_like(x))


@_kernel("Elu", dtypes=FLOATS)
def elu(ctx: OpContext, x: Any) -> Any:
    """x, or alpha (exp(x) - 1) where x is negative."""
    return ctx.xp.where(x < 0, ctx.attr("alpha", 1.0) * ctx.xp.expm1(x), x)


@_kernel("Celu", dtypes=FLOATS)
def celu(ctx: OpContext, x: Any) -> Any:
    """x, or alpha (exp(x / alpha) - 1) where x is negative."""
    alpha = ctx.attr("alpha", 1.0)
    return ctx.xp.where(x < 0, alpha * ctx.xp.expm1(x / alpha), x)


@_kernel("Selu", dtypes=FLOATS)
def selu(ctx: OpContext, x: Any) -> Any:
    """gamma x, or gamma alpha (exp(x) - 1) where x is not positive."""
    alpha, gamma = ctx.attr("alpha", 1.67326319217681884765625), ctx.attr("gamma", 1.05070102214813232421875)
    return gamma * ctx.xp.where(x > 0, x, alpha * ctx.xp.expm1(x))


@_kernel("Softplus", dtypes=FLOATS)
def softplus(ctx: OpContext, x: Any) -> Any:
    """log(1 + exp(x))."""
    return ctx.xp.logaddexp(x, ctx.xp.zeros_like(x))


@_kernel("Softsign", dtypes=FLOATS)
def softsign(ctx: OpContext, x: Any) -> Any:
    """x / (1 + |x|)."""
    return x / (1.0 + ctx.xp.abs(x))


@_kernel("Mish", dtypes=FLOATS)
def mish(ctx: OpContext, x: Any) -> Any:
    """x tanh(log(1 + exp(x)))."""
    return x * ctx.xp.tanh(softplus(ctx, x))


@_kernel("HardSigmoid", dtypes=FLOATS)
def hard_sigmoid(ctx: OpContext, x: Any) -> Any:
    """alpha x + beta between 0 and 1."""
    return _clamped(ctx.xp, ctx.attr("alpha", 0.2) * x + ctx.attr("beta", 0.5), 0.0, 1.0)


@_kernel("HardSwish", dtypes=FLOATS)
def hard_swish(ctx: OpContext, x: Any) -> Any:
    """x times x / 6 + 1 / 2 between 0 and 1."""
    return x * _clamped(ctx.xp, x / 6.0 + 0.5, 0.0, 1.0)


@_kernel("Clip", dtypes=NUMBERS, check=_since(11))
def clip(ctx: OpContext, x: Any, low: Any = None, high: Any = None) -> Any:
    """x between low and high; high where low is above it."""
    xp = ctx.xp
    if low is not None:
        x = xp.maximum(x, xp.reshape(low, ()))
    if high is not None:
        x = xp.minimum(x, xp.reshape(high, ()))
    return x


def _is_castable(node: Node) -> Support:
    out = node.outputs[0]
    dtype = out.dtype if out is not None else None
    return Support.yes() if dtype in DTYPES else Support.no(f"{node.operator} to {dtype} is in no standard")


@_kernel("Cast", "CastLike", check=_is_castable)
def cast(ctx: OpContext, x: Any, *_: Any) -> Any:
    """The elements in another type; a number is true where it is not 0."""
    dtype = ctx.output_dtype()
    assert dtype is not None
    if dtype == np.bool_:
        return x != ctx.xp.zeros_like(x)
    return ctx.xp.astype(x, getattr(ctx.xp, dtype.name))


# --- several arrays ---------------------------------------------------------------------------------------------------


def _register_binary(op_type: str, name: str, dtypes: frozenset[np.dtype], check: Check | None = None) -> None:
    @_kernel(op_type, dtypes=dtypes, check=check)
    def binary(ctx: OpContext, a: Any, b: Any) -> Any:
        return getattr(ctx.xp, name)(a, b)

    binary.__doc__ = f"{op_type}: `{name}` of the standard, with broadcasting."


for _op_type, _name in (("Add", "add"), ("Sub", "subtract"), ("Mul", "multiply")):
    _register_binary(_op_type, _name, NUMBERS, _since(7))
for _op_type, _name in (
    ("Less", "less"), ("Greater", "greater"), ("LessOrEqual", "less_equal"), ("GreaterOrEqual", "greater_equal"),
):  # fmt: skip
    _register_binary(_op_type, _name, NUMBERS, _since(7))
_register_binary("Equal", "equal", DTYPES, _since(7))
for _op_type, _name in (("And", "logical_and"), ("Or", "logical_or"), ("Xor", "logical_xor")):
    _register_binary(_op_type, _name, BOOL, _since(7))
for _op_type, _name in (
    ("BitwiseAnd", "bitwise_and"), ("BitwiseOr", "bitwise_or"), ("BitwiseXor", "bitwise_xor"),
):  # fmt: skip
    _register_binary(_op_type, _name, INTEGERS)


def _quotient(xp: Any, a: Any, b: Any) -> Any:
    """Of integers, truncated toward zero; 0 where the divisor is 0."""
    safe = xp.where(b == 0, xp.ones_like(b), b)
    down = xp.floor_divide(a, safe)
    rest = a - down * safe
    inexact = xp.logical_and(rest != 0, xp.logical_xor(a < 0, safe < 0))
    down = xp.where(inexact, down + xp.ones_like(down), down)
    return xp.where(b == 0, xp.zeros_like(down), down)


@_kernel("Div", dtypes=NUMBERS, check=_since(7))
def div(ctx: OpContext, a: Any, b: Any) -> Any:
    """a / b; the quotient of integers is truncated toward zero."""
    return a / b if ctx.xp.isdtype(a.dtype, "real floating") else _quotient(ctx.xp, a, b)


@_kernel("Mod", dtypes=INTEGERS, check=lambda n: _unless(n, "fmod"))
def mod(ctx: OpContext, a: Any, b: Any) -> Any:
    """The remainder with the sign of the divisor, of integers."""
    xp = ctx.xp
    safe = xp.where(b == 0, xp.ones_like(b), b)
    return xp.where(b == 0, xp.zeros_like(safe), xp.remainder(a, safe))


def _unless(node: Node, attribute: str) -> Support:
    return Support.no(f"{node.operator} with {attribute}") if node.attributes.get(attribute) else Support.yes()


@_kernel("Pow", dtypes=FLOATS, check=_since(7))
def pow_(ctx: OpContext, x: Any, y: Any) -> Any:
    """x ** y of floats, in the type of x."""
    wide = x if x.dtype == y.dtype else ctx.xp.astype(x, ctx.xp.float64)
    return ctx.xp.astype(ctx.xp.pow(wide, ctx.xp.astype(y, wide.dtype)), x.dtype)


@_kernel("BitShift", dtypes=frozenset((np.dtype(np.uint8),)))
def bit_shift(ctx: OpContext, a: Any, b: Any) -> Any:
    """Shifts to the left or to the right."""
    left = ctx.attr("direction") == "LEFT"
    return ctx.xp.bitwise_left_shift(a, b) if left else ctx.xp.bitwise_right_shift(a, b)


@_kernel("Max", dtypes=NUMBERS, check=_since(8))
def max_(ctx: OpContext, *inputs: Any) -> Any:
    """The largest, with broadcasting; NaN wins."""
    return functools.reduce(ctx.xp.maximum, inputs)


@_kernel("Min", dtypes=NUMBERS, check=_since(8))
def min_(ctx: OpContext, *inputs: Any) -> Any:
    """The smallest, with broadcasting; NaN wins."""
    return functools.reduce(ctx.xp.minimum, inputs)


@_kernel("Sum", dtypes=FLOATS, check=_since(8))
def sum_(ctx: OpContext, *inputs: Any) -> Any:
    """The sum, with broadcasting."""
    return functools.reduce(ctx.xp.add, inputs)


@_kernel("Mean", dtypes=FLOATS, check=_since(8))
def mean(ctx: OpContext, *inputs: Any) -> Any:
    """The mean, with broadcasting."""
    return functools.reduce(ctx.xp.add, inputs) / float(len(inputs))


@_kernel("Where")
def where(ctx: OpContext, condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    return ctx.xp.where(condition, a, b)


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduction(
    op_type: str, dtypes: frozenset[np.dtype], check: Check | None = None
) -> Callable[[Callable[[Any, Any, Any], Any]], Callable[[Any, Any, Any], Any]]:
    """Register `reduce(xp, x, axes)`, which keeps the reduced axes, of size 1."""

    def wrap(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        @_kernel(op_type, static=(1,), dtypes=dtypes | INTEGERS, check=_inputs_of(dtypes, check))
        def reduce(ctx: OpContext, x: Any, axes: Any = None) -> Any:
            xp, over = ctx.xp, reduced_axes(ctx, x.ndim, axes)
            if over:
                return xp.reshape(function(xp, x, over), _of(ctx))
            return xp.reshape(function(xp, xp.expand_dims(x, axis=-1), (x.ndim,)), _of(ctx))  # each element by itself

        reduce.__doc__ = function.__doc__
        return function

    return wrap


def _inputs_of(dtypes: frozenset[np.dtype], check: Check | None) -> Check:
    """The first input must be of the dtypes; the other ones are axes."""

    def checked(node: Node) -> Support:
        first = node.inputs[0].dtype if node.inputs[0] is not None else None
        if first not in dtypes:
            return Support.no(f"{node.operator} of {first} has no kernel here")
        return Support.yes() if check is None else check(node)

    return checked


@_reduction("ReduceSum", NUMBERS)
def reduce_sum(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The sum; integers keep their type and wrap."""
    return xp.sum(x, axis=axes, keepdims=True, dtype=x.dtype)


@_reduction("ReduceMean", FLOATS, _not_empty)
def reduce_mean(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The mean."""
    return xp.mean(x, axis=axes, keepdims=True)


@_reduction("ReduceProd", NUMBERS)
def reduce_prod(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The product; integers keep their type and wrap."""
    return xp.prod(x, axis=axes, keepdims=True, dtype=x.dtype)


@_reduction("ReduceMax", NUMBERS, _not_empty)
def reduce_max(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The largest element."""
    return xp.max(x, axis=axes, keepdims=True)


@_reduction("ReduceMin", NUMBERS, _not_empty)
def reduce_min(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The smallest element."""
    return xp.min(x, axis=axes, keepdims=True)


@_reduction("ReduceL1", NUMBERS)
def reduce_l1(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The sum of absolute values."""
    return reduce_sum(xp, xp.abs(x), axes)


@_reduction("ReduceL2", FLOATS)
def reduce_l2(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The root of the sum of squares."""
    return xp.sqrt(reduce_sum(xp, x * x, axes))


@_reduction("ReduceSumSquare", NUMBERS)
def reduce_sum_square(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The sum of squares."""
    return reduce_sum(xp, x * x, axes)


@_reduction("ReduceLogSum", FLOATS)
def reduce_log_sum(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The logarithm of the sum."""
    return xp.log(reduce_sum(xp, x, axes))


@_reduction("ReduceLogSumExp", FLOATS, _not_empty)
def reduce_log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The logarithm of the sum of exponentials, less their largest before it is added again."""
    top = reduce_max(xp, x, axes)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    return xp.log(reduce_sum(xp, xp.exp(x - top), axes)) + top


@_kernel("CumSum", static=(1,), check=_inputs_of(NUMBERS, None))
def cum_sum(ctx: OpContext, x: Any, axis: Any) -> Any:
    """Sums of the elements up to each, from either end, with or without it."""
    xp = ctx.xp
    over = axis_of(int(axis.reshape(-1)[0]), x.ndim, "CumSum")
    if ctx.attr("reverse", 0):
        x = xp.flip(x, axis=over)
    found = xp.cumulative_sum(x, axis=over, dtype=x.dtype)
    if ctx.attr("exclusive", 0) and x.shape[over]:
        shifted = found[(slice(None),) * over + (slice(0, x.shape[over] - 1), ...)]
        nothing = xp.zeros_like(x[(slice(None),) * over + (slice(0, 1), ...)])
        found = xp.concat([nothing, shifted], axis=over)
    return xp.flip(found, axis=over) if ctx.attr("reverse", 0) else found


def _softmax_check(node: Node) -> Support:
    modern = _since(13)(node)
    return _not_empty(node) if modern else modern


@_kernel("Softmax", dtypes=FLOATS, check=_softmax_check)
def softmax(ctx: OpContext, x: Any) -> Any:
    """Exponentials along an axis, divided by their sum."""
    xp, axis = ctx.xp, ctx.attr("axis", -1)
    powers = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return powers / xp.sum(powers, axis=axis, keepdims=True)


@_kernel("LogSoftmax", dtypes=FLOATS, check=_softmax_check)
def log_softmax(ctx: OpContext, x: Any) -> Any:
    """The logarithm of Softmax."""
    xp, axis = ctx.xp, ctx.attr("axis", -1)
    centred = x - xp.max(x, axis=axis, keepdims=True)
    return centred - xp.log(xp.sum(xp.exp(centred), axis=axis, keepdims=True))


# --- products and normalisations --------------------------------------------------------------------------------------


@_kernel("MatMul", dtypes=FLOATS)
def matmul(ctx: OpContext, a: Any, b: Any) -> Any:
    """Products of matrices, with broadcasting of what comes before the last two axes."""
    return ctx.xp.matmul(a, b)


@_kernel("Gemm", dtypes=FLOATS, check=_since(7))
def gemm(ctx: OpContext, a: Any, b: Any, c: Any = None) -> Any:
    """alpha a b + beta c, of matrices that may be transposed."""
    xp = ctx.xp
    a, b = (xp.matrix_transpose(m) if ctx.attr(t, 0) else m for m, t in ((a, "transA"), (b, "transB")))
    out = ctx.attr("alpha", 1.0) * xp.matmul(a, b)
    return out if c is None else out + ctx.attr("beta", 1.0) * c


def _moments(xp: Any, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The mean, x less its mean, and the variance, over axes that stay, of size 1."""
    middle = xp.mean(x, axis=axes, keepdims=True)
    centred = x - middle
    return middle, centred, xp.mean(centred * centred, axis=axes, keepdims=True)


@_kernel("LayerNormalization", dtypes=frozenset((np.dtype(np.float32),)), check=_not_empty)
def layer_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalisation over the axes from `axis` on, with Mean and InvStdDev."""
    xp, axis = ctx.xp, axis_of(ctx.attr("axis", -1), x.ndim, "LayerNormalization")
    middle, centred, variance = _moments(xp, x, tuple(range(axis, x.ndim)))
    inverse = 1.0 / xp.sqrt(variance + ctx.attr("epsilon", 1e-5))
    out = centred * inverse * scale
    out = out if bias is None else out + bias
    return (out, middle, inverse)[: max(ctx.num_outputs, 1)] if ctx.num_outputs > 1 else out


@_kernel("RMSNormalization", dtypes=frozenset((np.dtype(np.float32),)), check=_not_empty)
def rms_normalization(ctx: OpContext, x: Any, scale: Any) -> Any:
    """x over the root of its mean square, over the axes from `axis` on."""
    xp, axis = ctx.xp, axis_of(ctx.attr("axis", -1), x.ndim, "RMSNormalization")
    square = xp.mean(x * x, axis=tuple(range(axis, x.ndim)), keepdims=True)
    return x / xp.sqrt(square + ctx.attr("epsilon", 1e-5)) * scale


def _is_inference_of_batches(node: Node) -> Support:
    if node.version < 9 or node.attributes.get("training_mode") or len(node.outputs) > 1:
        return Support.no(f"{node.operator}: the kernel is of inference, of version 9 and later")
    first = node.inputs[0]
    rank = len(first.type.shape or ()) if first is not None and isinstance(first.type, TensorType) else 0
    return Support.yes() if rank > 1 else Support.no(f"{node.operator} of an array without channels")


@_kernel("BatchNormalization", dtypes=FLOATS, check=_is_inference_of_batches)
def batch_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    """Normalisation of each channel by given statistics."""
    xp = ctx.xp
    shape = (-1,) + (1,) * (x.ndim - 2)
    scale, bias, mean, variance = (xp.reshape(p, shape) for p in (scale, bias, mean, variance))
    factor = scale / xp.sqrt(variance + ctx.attr("epsilon", 1e-5))
    return x * factor + (bias - mean * factor)


@_kernel("InstanceNormalization", dtypes=FLOATS, check=_not_empty)
def instance_normalization(ctx: OpContext, x: Any, scale: Any, bias: Any) -> Any:
    """Normalisation of each channel of each instance over its spatial axes."""
    xp, shape = ctx.xp, (-1,) + (1,) * (x.ndim - 2)
    _, centred, variance = _moments(xp, x, tuple(range(2, x.ndim)))
    factor = xp.reshape(scale, shape) / xp.sqrt(variance + ctx.attr("epsilon", 1e-5))
    return centred * factor + xp.reshape(bias, shape)


# --- movement of elements ---------------------------------------------------------------------------------------------


@_kernel("Flatten")
def flatten(ctx: OpContext, x: Any) -> Any:
    """The elements as a matrix."""
    return ctx.xp.reshape(x, _of(ctx))


@_kernel("Reshape", "Squeeze", "Unsqueeze", static=(1,))
def reshape(ctx: OpContext, x: Any, _: Any = None) -> Any:
    """The elements in the shape of the output."""
    return ctx.xp.reshape(x, _of(ctx))


@_kernel("Transpose")
def transpose(ctx: OpContext, x: Any) -> Any:
    """The axes in another order, by default reversed."""
    perm = ctx.attr("perm")
    return ctx.xp.permute_dims(x, tuple(range(x.ndim))[::-1] if perm is None else tuple(perm))


@_kernel("Concat", check=_since(4))
def concat(ctx: OpContext, *inputs: Any) -> Any:
    """The arrays one behind the other, along an axis."""
    return ctx.xp.concat(list(inputs), axis=axis_of(ctx.attr("axis"), inputs[0].ndim, "Concat"))


def _whole(node: Node) -> Support:
    """Refuse a Split whose outputs do not tell all sizes."""
    return Support.yes() if all(v is not None for v in node.outputs) else Support.no(f"{node.operator} with gaps")


@_kernel("Split", static=(1,), check=_whole)
def split(ctx: OpContext, x: Any, _: Any = None) -> Any:
    """Parts of the array, of the outputs' sizes."""
    axis, start, parts = axis_of(ctx.attr("axis", 0), x.ndim, "Split"), 0, []
    for k in range(ctx.num_outputs):
        stop = start + _of(ctx, k)[axis]
        parts.append(x[(slice(None),) * axis + (slice(start, stop), ...)])
        start = stop
    return tuple(parts) if len(parts) > 1 else parts[0]


@_kernel("Slice", static=(1, 2, 3, 4), check=_since(10))
def slice_(ctx: OpContext, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Every step-th element from start to end of the axes; a negative step goes over the array turned round."""
    firsts, lasts = ints(starts), ints(ends)
    over = axes_of(range(len(firsts)) if axes is None else ints(axes), x.ndim, "Slice")
    index = [slice(None)] * x.ndim
    by = (1,) * len(over) if steps is None else ints(steps)
    for a, first, last, step in zip(over, firsts, lasts, by, strict=True):
        size = x.shape[a]
        if step > 0:
            begin, end, _ = slice(first, last, step).indices(size)
        else:  # the same elements, counted from the other end
            x = ctx.xp.flip(x, axis=a)
            begin, end, _ = slice(first, None if last < -size else last, step).indices(size)
            begin, end, step = size - 1 - begin, size - 1 - end, -step
        index[a] = slice(begin, max(begin, end), step)
    return x[tuple(index)]


@_kernel("Expand", static=(1,))
def expand(ctx: OpContext, x: Any, _: Any) -> Any:
    """The array repeated along axes of size 1, and along new ones before them."""
    return ctx.xp.broadcast_to(x, _of(ctx))


@_kernel("Tile", static=(1,), check=_since(6))
def tile(ctx: OpContext, x: Any, repeats: Any) -> Any:
    """The array repeated along its axes."""
    return ctx.xp.tile(x, ints(repeats))


def _wrapped(xp: Any, indices: Any, size: int) -> Any:
    """Indices counted from the front, as int64."""
    indices = xp.astype(indices, xp.int64)
    return xp.where(indices < 0, indices + size, indices)


@_kernel("Gather", check=lambda n: _indexed(n))
def gather(ctx: OpContext, x: Any, indices: Any) -> Any:
    """Elements along an axis, by an array of indices."""
    xp, axis = ctx.xp, axis_of(ctx.attr("axis", 0), x.ndim, "Gather")
    flat = xp.reshape(_wrapped(xp, indices, x.shape[axis]), (math.prod(indices.shape),))
    return xp.reshape(xp.take(x, flat, axis=axis), _of(ctx))


def _indexed(node: Node) -> Support:
    """Refuse indices that are no integers of the standard, and arrays without elements."""
    indices = node.inputs[1]
    if indices is None or indices.dtype not in INTEGERS:
        return Support.no(f"{node.operator} by indices of {indices and indices.dtype}")
    return _not_empty(node)


@_kernel("GatherElements", check=_indexed)
def gather_elements(ctx: OpContext, x: Any, indices: Any) -> Any:
    """For each index the element at its place but for one axis, where the index says."""
    axis = axis_of(ctx.attr("axis", 0), x.ndim, "GatherElements")
    size = x.shape[axis]
    index = tuple(slice(0, d) if a != axis else slice(None) for a, d in enumerate(indices.shape))
    return ctx.xp.take_along_axis(x[index], _wrapped(ctx.xp, indices, size), axis=axis)


@_kernel("Trilu", static=(1,), dtypes=NUMBERS)
def trilu(ctx: OpContext, x: Any, k: Any = None) -> Any:
    """The upper or lower triangle of matrices."""
    offset = 0 if k is None else int(k.reshape(-1)[0])
    return (ctx.xp.triu if ctx.attr("upper", 1) else ctx.xp.tril)(x, k=offset)


@_kernel("DepthToSpace")
def depth_to_space(ctx: OpContext, x: Any) -> Any:
    """Channels to blocks of the image."""
    xp, b, (n, c, h, w) = ctx.xp, ctx.attr("blocksize"), x.shape
    depth = c // (b * b)
    if ctx.attr("mode", "DCR") == "DCR":
        blocks = xp.permute_dims(xp.reshape(x, (n, b, b, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        blocks = xp.permute_dims(xp.reshape(x, (n, depth, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return xp.reshape(blocks, (n, depth, h * b, w * b))


@_kernel("Shape", "Size")
def shape(ctx: OpContext, x: Any) -> Any:
    """The shape, or the number of elements: known before anything runs."""
    dims = x.shape if ctx.node.op_type == "Shape" else (math.prod(x.shape),)
    if ctx.node.op_type == "Shape":
        dims = dims[slice(ctx.attr("start", 0), ctx.attr("end"))]
    made = ctx.xp.asarray(list(dims), dtype=ctx.xp.int64)
    return ctx.xp.reshape(made, _of(ctx))
