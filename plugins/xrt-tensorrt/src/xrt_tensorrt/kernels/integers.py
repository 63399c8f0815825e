"""Integers: shifts and bits, arithmetic of uint8, remainders, what is asked of booleans, and casts to eight bits."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels import OpContext
from xrt_tensorrt.kernels.context import BOOLEANS, EIGHT_BITS, FLOATS, INTEGERS, NetworkContext, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, INT32, UINT8, Tensor

FP8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_NIBBLE: Final = 16


def _dtype(ctx: NetworkContext) -> np.dtype:
    """The dtype of the first input, as the node has it."""
    first = ctx.node.inputs[0]
    assert first is not None
    assert first.dtype is not None
    return first.dtype


def wrapped(x: Tensor, dtype: np.dtype) -> Tensor:
    """Integers in float32 as 8 bits hold them: modulo 256, from the least of the dtype on."""
    least = float(np.iinfo(dtype).min)
    shifted = x - least
    return shifted - (shifted / 256.0).unary("FLOOR") * 256.0 + least


@tensorrt_kernel("Add", "Sub", "Mul", dtypes=frozenset([UINT8]))
def arithmetic(ctx: NetworkContext, a: Tensor, b: Tensor) -> Tensor:
    """Sums, differences and products of uint8, which wrap around."""
    x, y = a.astype(F32), b.astype(F32)
    found = {"Add": x.__add__, "Sub": x.__sub__, "Mul": x.__mul__}[ctx.node.op_type](y)
    return wrapped(found, UINT8)


@tensorrt_kernel("Div", dtypes=frozenset([UINT8]))
def divide(ctx: NetworkContext, a: Tensor, b: Tensor) -> Tensor:
    """Quotients of uint8, without what is left over."""
    return a.astype(INT32).__truediv__(b.astype(INT32)).astype(F32)


@tensorrt_kernel("Mod", dtypes=EIGHT_BITS)
def remainder(ctx: NetworkContext, a: Tensor, b: Tensor) -> Tensor:
    """What is left over, with the sign of the divisor; with fmod of the dividend."""
    x, y = a.astype(INT32), b.astype(INT32)
    whole = x / y if ctx.attr("fmod", 0) else x // y
    return (x - whole * y).astype(F32)


# --- bits -----------------------------------------------------------------------------------------------------------


@tensorrt_kernel("BitShift", dtypes=INTEGERS | EIGHT_BITS)
def bit_shift(ctx: NetworkContext, x: Tensor, amount: Tensor) -> Tensor:
    """Bits moved up or down: a product with, or a quotient by, a power of two; down the sign stays."""
    dtype = _dtype(ctx)
    wide = dtype if dtype in INTEGERS else INT32
    bits = np.dtype(dtype).itemsize * 8
    value, count = x.astype(wide), amount.astype(wide)
    # one step less than asked for, and the last by itself: 2^bits - 1 is no number of a signed type
    some = count.minimum(bits - 1).maximum(0)
    powers = np.array([2**i for i in range(bits - 1)] + [2 ** (bits - 2)], wide)
    factor = ctx.layers.tensor(powers).take(some, 0)
    last = ctx.layers.where(some.equals(bits - 1), 2, ctx.layers.where(some.equals(some), 1, some))
    beyond = (count > bits - 1) | (count < 0)  # a negative count is a large one without a sign
    if ctx.attr("direction") == "LEFT":
        made = ctx.layers.where(beyond, 0, value * factor * last)
    else:
        made = value // factor // last
        rest = ctx.layers.where(value < 0, -1, value * 0)
        made = ctx.layers.where(beyond, rest, made)
    return made if dtype in INTEGERS else wrapped(made.astype(F32), dtype)


@tensorrt_kernel("BitwiseNot", dtypes=INTEGERS | EIGHT_BITS)
def bitwise_not(ctx: NetworkContext, x: Tensor) -> Tensor:
    """Every bit the other way: -1 - x, or 255 - x."""
    dtype = _dtype(ctx)
    if dtype in INTEGERS:
        return -x - 1
    return (255.0 if dtype == UINT8 else -1.0) - x.astype(F32)


_TABLES: Final = {
    "BitwiseAnd": np.bitwise_and.outer(np.arange(_NIBBLE), np.arange(_NIBBLE)),
    "BitwiseOr": np.bitwise_or.outer(np.arange(_NIBBLE), np.arange(_NIBBLE)),
    "BitwiseXor": np.bitwise_xor.outer(np.arange(_NIBBLE), np.arange(_NIBBLE)),
}


@tensorrt_kernel("BitwiseAnd", "BitwiseOr", "BitwiseXor", dtypes=INTEGERS | EIGHT_BITS)
def bitwise(ctx: NetworkContext, a: Tensor, b: Tensor) -> Tensor:
    """Four bits at a time, from a table of what becomes of two fours."""
    dtype = _dtype(ctx)
    wide = dtype if dtype in INTEGERS else INT32
    x, y = a.astype(wide), b.astype(wide)
    table = ctx.layers.tensor(_TABLES[ctx.node.op_type].reshape(-1).astype(wide))
    fours = np.dtype(dtype).itemsize * 2
    total = None
    for i in range(fours):
        above = [v // _NIBBLE for v in (x, y)]
        low = [v - up * _NIBBLE for v, up in zip((x, y), above, strict=True)]
        part = table.take(low[0] * _NIBBLE + low[1], 0)
        if i == fours - 1 and wide == dtype:  # the highest four bits have the sign
            part = ctx.layers.where(part > 7, part - _NIBBLE, part)
        part = part * int(16**i) if i else part
        total = part if total is None else total + part
        x, y = above
    assert total is not None
    return total if wide == dtype else wrapped(total.astype(F32), dtype)


# --- casts to and from eight bits ----------------------------------------------------------------------------------


def _cast_check(node: Node) -> str:
    source, made = node.inputs[0], node.outputs[0]
    if source is None or made is None or source.dtype is None or made.dtype is None:
        return f"{node.operator} of an unknown type"
    pair = {source.dtype, made.dtype}
    if FP8 in pair:
        if not pair - {FP8} <= FLOATS:
            return f"tensorrt has no kernel for {node.operator} from {source.dtype.name} to {made.dtype.name}"
        saturates = OpContext(node, np).attr("saturate", 1)
        return "" if saturates or made.dtype != FP8 else "TensorRT saturates where it makes float8_e4m3fn"
    if made.dtype in EIGHT_BITS and source.dtype in FLOATS | INTEGERS | EIGHT_BITS:
        return ""
    return f"tensorrt has no kernel for {node.operator} from {source.dtype.name} to {made.dtype.name}"


@tensorrt_kernel("Cast", "CastLike", dtypes=FLOATS | INTEGERS | EIGHT_BITS | {FP8}, of=(0,), check=_cast_check)
def cast(ctx: NetworkContext, x: Tensor, like: Tensor | None = None) -> Tensor:
    """To integers of 8 bits, which wrap around, and to and from float8_e4m3fn, which saturates: by a scale of 1."""
    made = ctx.node.outputs[0]
    assert made is not None
    assert made.dtype is not None
    network, layers = ctx.layers.network, ctx.layers
    if made.dtype == x.dtype:
        return x
    if made.dtype == FP8:
        one = layers.constant(np.ones((), np.float32))
        return layers.of(network.add_quantize(x.astype(F32).raw, one.raw, layers.toolkit.data_type(FP8)))
    if x.dtype == FP8:
        one = layers.constant(np.ones((), np.float32))
        wide = layers.of(network.add_dequantize(x.raw, one.raw, layers.toolkit.data_type(F32)))
        return wide.astype(made.dtype)
    whole = x if x.dtype in INTEGERS else x.astype(INT32)  # cuts off what is behind the point
    least = int(np.iinfo(made.dtype).min)
    shifted = whole - least
    return (shifted - shifted // 256 * 256 + least).astype(F32)


# --- booleans -------------------------------------------------------------------------------------------------------


@tensorrt_kernel("ReduceMax", "ReduceMin", dtypes=BOOLEANS, of=(0,), static=(1,))
def any_or_all(ctx: NetworkContext, x: Tensor, axes: np.ndarray | None = None) -> Tensor:
    """Whether any, or all, of the elements hold."""
    found = list(map(int, ctx.attr("axes", ()) if axes is None else np.asarray(axes).reshape(-1)))
    if not found and ctx.attr("noop_with_empty_axes", 0):
        return x
    operation = "MAX" if ctx.node.op_type == "ReduceMax" else "MIN"
    made = x.astype(INT32).reduce(operation, found or range(x.rank), keep=bool(ctx.attr("keepdims", 1)))
    return made.astype(x.dtype)
