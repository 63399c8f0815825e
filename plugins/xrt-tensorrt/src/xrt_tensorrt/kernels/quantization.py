"""Quantisation that TensorRT has no layers for: zero points, 8-bit integers without a sign, products of integers.

Integers of 8 bits are float32 inside (`NetworkContext`), and every product of them is exact: its sums are cut where
they could reach 2^24, the first integers that float32 leaves out, and the pieces are added up in int32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.types import ONNX_TO_DTYPE, dtype_name
from xrt_core.kernels import OpContext
from xrt_core.kernels.windows import windows_of
from xrt_tensorrt.kernels.context import EIGHT_BITS, FLOATS, NetworkContext, shapes, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, INT32, Operand, Tensor

EXACT: Final = 2**24
"""Below it every integer is a float32."""

_PIECES: Final = 64
_WIDEST: Final = 255  # of a difference of two integers of 8 bits


def spread(parameter: Operand, rank: int, axis: int, block: int, length: int) -> Operand:
    """A scale or zero point with `rank` axes, to be broadcast: of the tensor, of each index of an axis, or of blocks.

    length: of the axis.
    """
    if isinstance(parameter, Tensor):
        if parameter.rank == 0 or parameter.shape == (1,):
            return parameter.reshape((1,) * rank)
        shape = [1] * rank
        shape[axis] = parameter.size(0)
        return parameter.reshape(shape)
    data = np.asarray(parameter)
    if data.size == 1 and data.ndim <= 1:
        return data.reshape((1,) * rank)
    if block > 0:
        return np.take(np.repeat(data, block, axis=axis), range(length), axis=axis)
    shape = [1] * rank
    shape[axis] = data.size
    return data.reshape(shape)


def rounded(x: Tensor, zero: Operand | None, dtype: np.dtype) -> Tensor:
    """`x` (float32) as integers of `dtype`: rounded half to even, shifted, saturated; still float32."""
    limits = np.iinfo(dtype)
    whole = x.unary("ROUND")
    return (whole if zero is None else whole + zero).clip(float(limits.min), float(limits.max))


def plain(x: Operand) -> Operand:
    """8-bit integers, or any numbers, as float32."""
    return x.astype(F32) if isinstance(x, Tensor) else np.asarray(x).astype(F32)


def _quantize_check(node: Node) -> str:
    made = node.outputs[0]
    if made is None or made.dtype not in EIGHT_BITS:
        wanted = "an unknown type" if made is None or made.dtype is None else dtype_name(made.dtype)
        return f"tensorrt quantises to int8, uint8 and float8_e4m3fn, not to {wanted}"
    if ONNX_TO_DTYPE.get(OpContext(node, np).attr("precision", 0), F32) not in FLOATS:
        return "tensorrt divides by the scale in float32 or float16"
    return _blocks(node)


def _blocks(node: Node) -> str:
    scale = node.inputs[1]
    known = all(v is None or v.data is not None for v in node.inputs[1:3])
    if not known and scale is not None and scale.shape not in ((), (1,)) and node.attributes.get("block_size", 0):
        return f"the scale {scale.name!r} of {node.operator} is of blocks and not known when the engine is built"
    return ""


@tensorrt_kernel("QuantizeLinear", dtypes=FLOATS, of=(0,), arrays=(1, 2), check=_quantize_check)
def quantize_linear(ctx: NetworkContext, x: Tensor, scale: Operand, zero_point: Operand | None = None) -> Tensor:
    """saturate(round(x / scale) + zero point), the quotient in the scale's precision."""
    made, given = ctx.node.outputs[0], ctx.node.inputs[1]
    assert made is not None
    assert made.dtype is not None
    assert given is not None
    axis, block, length = _along(ctx, x)
    precision = ONNX_TO_DTYPE.get(ctx.attr("precision", 0), given.dtype or F32)
    if precision != F32:  # both sides are of it
        x = x.astype(precision)
        scale = scale.astype(precision) if isinstance(scale, Tensor) else np.asarray(scale).astype(precision)
    divisor = spread(plain(scale), x.rank, axis, block, length)
    quotient = x.astype(F32) / divisor
    if precision != F32:  # rounded to it, as it would be there
        quotient = quotient.astype(precision).astype(F32)
    zero = None if zero_point is None else spread(plain(zero_point), x.rank, axis, block, length)
    return rounded(quotient, zero, made.dtype)


@tensorrt_kernel("DequantizeLinear", dtypes=EIGHT_BITS | {INT32}, of=(0,), arrays=(1, 2), check=_blocks)
def dequantize_linear(ctx: NetworkContext, x: Tensor, scale: Operand, zero_point: Operand | None = None) -> Tensor:
    """(x - zero point) * scale."""
    made = ctx.node.outputs[0]
    assert made is not None
    assert made.dtype is not None
    axis, block, length = _along(ctx, x)
    y = x.astype(F32)
    if zero_point is not None and not _is_zero(zero_point):
        y = y - spread(plain(zero_point), x.rank, axis, block, length)
    return (y * spread(plain(scale), x.rank, axis, block, length)).astype(made.dtype)


def _along(ctx: NetworkContext, x: Tensor) -> tuple[int, int, int]:
    """The axis of the scales, the size of their blocks, and the axis' length (only blocks need it)."""
    axis, block = int(ctx.attr("axis", 1)), int(ctx.attr("block_size", 0))
    axis = axis % x.rank if x.rank else 0
    return axis, block, x.size(axis) if block else 0


def _is_zero(parameter: Operand) -> bool:
    return not isinstance(parameter, Tensor) and not np.any(np.asarray(parameter).astype(F32))


@tensorrt_kernel("DynamicQuantizeLinear", dtypes=frozenset([F32]))
def dynamic_quantize_linear(ctx: NetworkContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 with the scale and the zero point that the range of x (0 included) gives; an all-zero x gets scale 1."""
    axes = range(x.rank)
    low = (x.reduce("MIN", axes) if axes else x).minimum(0.0)
    high = (x.reduce("MAX", axes) if axes else x).maximum(0.0)
    scale = (high - low) / 255.0
    scale = ctx.layers.where(scale.equals(0.0), 1.0, scale)
    zero = (-low / scale).unary("ROUND").clip(0.0, 255.0)
    one = (1,) * x.rank
    return rounded(x / scale.reshape(one), zero.reshape(one), np.dtype(np.uint8)), scale, zero


# --- products of integers -------------------------------------------------------------------------------------------


def pieces(length: int, heaviest: np.ndarray | None, each: int) -> list[tuple[int, int]]:
    """Where a sum over `length` products is cut, so that no piece reaches 2^24: (start, size) of each.

    heaviest: the largest factor of the constant at each index (int64), None where it is not known. each: the largest
    sum of products of two unknown factors at one index, or of one unknown factor and the constant's 1.
    """
    found, start, total = [], 0, 0
    for i in range(length):
        more = each if heaviest is None else int(heaviest[i]) * each
        if total + more >= EXACT and i > start:
            found.append((start, i - start))
            start, total = i, 0
        total += more
    return [*found, (start, length - start)]


def _product_check(b: int, zeros: tuple[int, ...]) -> Any:
    def check(node: Node) -> str:
        given = shapes(node)
        if len(given[0]) < 2 or len(given[b]) < 2:
            return f"tensorrt's kernel for {node.operator} multiplies matrices, and an input has one axis"
        for i in zeros:
            if i < len(given) and len(given[i]) > 1:
                return f"input {i} of {node.operator} has {len(given[i])} axes; tensorrt's kernel takes one"
        length = given[0][-1]
        if -(-length * _WIDEST * _WIDEST // EXACT) > _PIECES:
            return f"sums of {length} products take more than {_PIECES} pieces that are exact in float32"
        return ""

    return check


def _less_zero(x: Operand, zero: Operand | None, axis: int) -> Operand:
    """x - zero in float32, exactly; zero: of the tensor, or of each index of an axis."""
    x = plain(x)
    if zero is None or _is_zero(zero):
        return x
    rank = x.rank if isinstance(x, Tensor) else x.ndim  # type: ignore[union-attr]
    shift = spread(plain(zero), rank, axis % rank, 0, 0)
    if isinstance(shift, Tensor) and not isinstance(x, Tensor):
        return shift.layers.tensor(x) - shift
    return x - shift


def integer_product(
    ctx: NetworkContext, a: Operand, b: Operand, a_zero: Operand | None, b_zero: Operand | None
) -> Tensor:
    """(a - a_zero) @ (b - b_zero) in int32, exact."""
    left, right = _less_zero(a, a_zero, -2), _less_zero(b, b_zero, -1)
    layers = ctx.layers
    heavy = None
    for side, axis in ((left, -1), (right, -2)):
        if not isinstance(side, Tensor):
            axes = tuple(i for i in range(side.ndim) if i != axis % side.ndim)  # type: ignore[union-attr]
            heavy = np.abs(side).max(axis=axes).astype(np.int64)
    left, right = layers.tensor(left), layers.tensor(right)
    length = left.size(-1)
    total: Tensor | None = None
    for start, size in pieces(length, heavy, _WIDEST if heavy is not None else _WIDEST**2):
        rows = left.window((left.rank - 1,), (start,), (size,))
        part = rows.matmul(right.window((right.rank - 2,), (start,), (size,))).astype(INT32)
        total = part if total is None else total + part
    assert total is not None
    return total


@tensorrt_kernel("MatMulInteger", dtypes=EIGHT_BITS, arrays=(0, 1, 2, 3), check=_product_check(1, (2, 3)))
def matmul_integer(
    ctx: NetworkContext, a: Operand, b: Operand, a_zero: Operand | None = None, b_zero: Operand | None = None
) -> Tensor:
    """(A - a_zero_point) @ (B - b_zero_point) in int32; zero points per tensor, row of A or column of B."""
    return integer_product(ctx, a, b, a_zero, b_zero)


@tensorrt_kernel(
    "QLinearMatMul", dtypes=EIGHT_BITS, of=(0, 3), arrays=tuple(range(8)), check=_product_check(3, (1, 2, 4, 5, 6, 7))
)
def qlinear_matmul(
    ctx: NetworkContext, a: Operand, a_scale: Operand, a_zero: Operand, b: Operand, b_scale: Operand, b_zero: Operand,
    y_scale: Operand, y_zero: Operand,
) -> Tensor:  # fmt: skip
    """Matrix product of quantised tensors, quantised again."""
    made = ctx.node.outputs[0]
    assert made is not None
    assert made.dtype is not None
    product = integer_product(ctx, a, b, a_zero, b_zero).astype(F32)
    rank = product.rank

    def along(parameter: Operand, axis: int) -> Operand:
        return spread(plain(parameter), rank, rank + axis, 0, 0)

    factor = _ratio(ctx, _times(along(a_scale, -2), along(b_scale, -1)), along(y_scale, -2))
    return rounded(product * factor, along(y_zero, -2), made.dtype)


def _times(a: Operand, b: Operand) -> Operand:
    return b * a if isinstance(b, Tensor) else a * b


def _ratio(ctx: NetworkContext, a: Operand, b: Operand) -> Operand:
    if isinstance(b, Tensor):
        return ctx.layers.tensor(a).with_rank(b.rank) / b
    return a / b


# --- convolutions of integers ---------------------------------------------------------------------------------------


def _convolution_check(w: int) -> Any:
    def check(node: Node) -> str:
        kernel = shapes(node)[w]
        if not 3 <= len(kernel) <= 5:
            return f"tensorrt convolves over one to three axes; {node.operator} has another number"
        taps = math.prod(kernel[2:])
        if taps * _WIDEST * _WIDEST >= EXACT:
            return f"sums over {taps} positions of the filter are not exact in float32"
        channels = kernel[1]
        if node.attributes.get("group", 1) != 1 and channels * taps * _WIDEST * _WIDEST >= EXACT:
            return f"sums over {channels * taps} products in a group are not exact in float32"
        if -(-channels * taps * _WIDEST * _WIDEST // EXACT) > _PIECES:
            return f"sums of {channels * taps} products take more than {_PIECES} pieces that are exact in float32"
        return ""

    return check


def integer_convolution(
    ctx: NetworkContext, x: Operand, x_zero: Operand | None, w: Operand, w_zero: Operand | None
) -> Tensor:
    """Conv(x - x_zero, w - w_zero) in int32, exact; w_zero: of the filter, or of each output channel."""
    layers, groups = ctx.layers, int(ctx.attr("group", 1))
    image = layers.tensor(_less_zero(x, x_zero, 1))
    kernel = _less_zero(w, w_zero, 0)
    heavy = None
    if not isinstance(kernel, Tensor):
        data = np.abs(np.asarray(kernel))
        heavy = data.sum(axis=tuple(range(2, data.ndim))).max(axis=0).astype(np.int64)
    kernel = layers.tensor(kernel)
    spatial = tuple(kernel.size(i) for i in range(2, kernel.rank))
    windows = windows_of(ctx, [image.size(i) for i in range(2, image.rank)], spatial)
    channels = kernel.size(1)
    each = _WIDEST if heavy is not None else _WIDEST**2 * int(np.prod(spatial))
    cuts = [(0, channels)] if groups > 1 else pieces(channels, heavy, each)
    end = [windows.reach(i) - windows.size[i] - b for i, b in enumerate(windows.begin)]
    if min(end, default=0) < 0:  # what no window reaches
        keep = [n + min(e, 0) for n, e in zip(windows.size, end, strict=True)]
        image = image.window(range(2, image.rank), (0,) * len(keep), keep)
        end = [max(e, 0) for e in end]
    total: Tensor | None = None
    for start, size in cuts:
        seen = image if groups > 1 else image.window((1,), (start,), (size,))
        part = seen.convolve(
            kernel.window((1,), (start,), (size,)), strides=windows.strides, dilations=windows.dilations,
            begin=windows.begin, end=end, groups=groups,
        ).astype(INT32)  # fmt: skip
        total = part if total is None else total + part
    assert total is not None
    return total


@tensorrt_kernel("ConvInteger", dtypes=EIGHT_BITS, arrays=(0, 1, 2, 3), check=_convolution_check(1))
def conv_integer(
    ctx: NetworkContext, x: Operand, w: Operand, x_zero: Operand | None = None, w_zero: Operand | None = None
) -> Tensor:
    """Convolution of integers; the filter's zero point is a scalar or one for each output channel."""
    return integer_convolution(ctx, x, x_zero, w, w_zero)


@tensorrt_kernel("QLinearConv", dtypes=EIGHT_BITS, of=(0, 3), arrays=tuple(range(9)), check=_convolution_check(3))
def qlinear_conv(
    ctx: NetworkContext, x: Operand, x_scale: Operand, x_zero: Operand, w: Operand, w_scale: Operand, w_zero: Operand,
    y_scale: Operand, y_zero: Operand, bias: Operand | None = None,
) -> Tensor:  # fmt: skip
    """Convolution of quantised tensors, quantised again; the bias is int32 at scale x_scale * w_scale."""
    made = ctx.node.outputs[0]
    assert made is not None
    assert made.dtype is not None
    sums = integer_convolution(ctx, x, x_zero, w, w_zero)
    if bias is not None:
        sums = sums + spread(bias, sums.rank, 1, 0, 0)
    one: Sequence[Operand] = [spread(plain(p), sums.rank, 1, 0, 0) for p in (x_scale, w_scale, y_scale)]
    factor = _ratio(ctx, _times(one[0], one[1]), one[2])
    return rounded(sums.astype(F32) * factor, spread(plain(y_zero), sums.rank, 1, 0, 0), made.dtype)
