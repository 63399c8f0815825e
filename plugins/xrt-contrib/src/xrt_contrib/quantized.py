"""Operators on quantised numbers: products, the QLinear family, weights in blocks of a few bits.

What ONNX Runtime calculates in integers is calculated in integers; the rest dequantises, calculates and quantises again
with the standard's operators, a form that engines know and fuse.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from xrt_contrib.attention import ints, self_attention
from xrt_contrib.linear import transposed
from xrt_contrib.lowering import Call, lowering
from xrt_core import ops
from xrt_core.ir.types import TensorType, dtype_from_name


def scalar(x: Any) -> Any:
    """`x` without axes where it has one element."""
    if x is None or x.ndim == 0 or math.prod(x.shape) != 1:
        return x
    return x.reshape(())


def zero_of(x: Any, zero: Any) -> Any:
    """The zero point, 0 of the dtype of `x` where it is left out."""
    return np.array(0, x.dtype) if zero is None else scalar(zero)


def real(x: Any, scale: Any, zero: Any, axis: int = 0) -> Any:
    """Quantised numbers as floating point; scales along an axis, or one."""
    scale, zero = scalar(scale), scalar(zero)
    if zero is not None and zero.ndim < scale.ndim:
        zero = ops.Expand(zero, ints(*scale.shape))
    return ops.DequantizeLinear(x, scale, zero, axis=axis if scale.ndim else 0)


def coded(y: Any, scale: Any, zero: Any, like: Any = None, axis: int = 0) -> Any:
    """Floating point as quantised numbers of the zero point's dtype, that of `like` where it is left out."""
    scale = scalar(scale)
    return ops.QuantizeLinear(y, scale, zero_of(like, zero), axis=axis if scale.ndim else 0)


# --- products ---


def _integer_product(a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    """(a - a_zero) (b - b_zero) in int32; zero points of the columns of b, or one."""
    a_zero, b_zero = scalar(a_zero), scalar(b_zero)
    if b_zero is not None and b_zero.ndim:  # an array for each column is no input of every library's MatMulInteger
        left = a.astype(np.int32) if a_zero is None else a.astype(np.int32) - a_zero.astype(np.int32)
        right = b.astype(np.int32) - b_zero.astype(np.int32)
        return ops.MatMul(left, right)
    return ops.MatMulInteger(a, b, a_zero, b_zero)


@lowering("MatMulIntegerToFloat")
def _matmul_integer_to_float(
    n: Call, a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any, b_zero: Any, bias: Any
) -> Any:
    y = _integer_product(a, b, a_zero, b_zero).astype(a_scale.dtype) * (scalar(a_scale) * scalar(b_scale))
    return y if bias is None else y + bias


@lowering("DynamicQuantizeMatMul")
def _dynamic_quantize_matmul(n: Call, a: Any, b: Any, b_scale: Any, b_zero: Any, bias: Any) -> Any:
    q, scale, zero = ops.DynamicQuantizeLinear(a)
    y = _integer_product(q, b, zero, b_zero).astype(np.float32) * (scale * scalar(b_scale))
    return y if bias is None else y + bias


@lowering("QGemm")
def _q_gemm(
    n: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, c: Any, y_scale: Any, y_zero: Any
) -> Any:
    y = _integer_product(
        transposed(a, bool(n.attr("transA", 0))), transposed(b, bool(n.attr("transB", 0))), a_zero, b_zero
    )
    y = y if c is None else y + c
    y = y.astype(np.float32) * (scalar(a_scale) * scalar(b_scale) * n.attr("alpha", 1.0))
    return y if y_scale is None else coded(y, y_scale, y_zero, a)


@lowering("QAttention")
def _q_attention(
    n: Call, x: Any, weight: Any, bias: Any, x_scale: Any, w_scale: Any, mask: Any, x_zero: Any, w_zero: Any, past: Any
) -> Any:
    if n.attr("past_present_share_buffer", 0):
        raise n.refuse("past_present_share_buffer is not lowered")
    y = _integer_product(x, weight, x_zero, w_zero).astype(bias.dtype) * (scalar(x_scale) * scalar(w_scale)) + bias
    return self_attention(n, y, mask, past, None)


@lowering("DynamicQuantizeLSTM")
def _dynamic_quantize_lstm(
    n: Call, x: Any, w: Any, r: Any, bias: Any, lengths: Any, h: Any, c: Any, p: Any, w_scale: Any, w_zero: Any,
    r_scale: Any, r_zero: Any,
) -> Any:  # fmt: skip
    """LSTM on the weights that the quantised ones stand for. ONNX Runtime quantises the inputs of each step to 8 bits
    beside; that error, of about a percent, is not made here."""

    def weights(q: Any, scale: Any, zero: Any) -> Any:  # [directions, in, 4 hidden] -> [directions, 4 hidden, in]
        lead = (q.shape[0], 1, -1 if scale.ndim == 2 else 1)
        y = (q.astype(np.float32) - zero.astype(np.float32).reshape(*lead)) * scale.reshape(*lead)
        return ops.Transpose(y, perm=[0, 2, 1])

    given = n.given("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size")
    given |= n.given("input_forget")
    real_w, real_r = weights(w, w_scale, w_zero), weights(r, r_scale, r_zero)
    return ops.LSTM(x, real_w, real_r, bias, lengths, h, c, p, outputs=3, **given)


@lowering("MulInteger")
def _mul_integer(n: Call, a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    left, right = a.astype(np.int32), b.astype(np.int32)
    left = left if a_zero is None else left - a_zero.astype(np.int32)
    return left * (right if b_zero is None else right - b_zero.astype(np.int32))


@lowering("ReduceSumInteger")
def _reduce_sum_integer(n: Call, x: Any) -> Any:
    dtype = np.int32 if x.dtype.kind == "i" else np.uint32
    return ops.ReduceSum(x.astype(dtype), ints(*n.attr("axes")), keepdims=n.attr("keepdims"))


# --- the QLinear family ---


@lowering("QLinearAdd", "QLinearMul")
def _q_binary(
    n: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    x, y = real(a, a_scale, zero_of(a, a_zero)), real(b, b_scale, zero_of(b, b_zero))
    return coded(x + y if n.node.op_type == "QLinearAdd" else x * y, y_scale, y_zero, a)


@lowering("QLinearSigmoid", "QLinearLeakyRelu")
def _q_unary(n: Call, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any) -> Any:
    value = real(x, x_scale, zero_of(x, x_zero))
    if n.node.op_type == "QLinearSigmoid":
        return coded(ops.Sigmoid(value), y_scale, y_zero, x)
    return coded(ops.LeakyRelu(value, alpha=n.attr("alpha", 0.01)), y_scale, y_zero, x)


@lowering("QLinearSoftmax")
def _q_softmax(n: Call, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any) -> Any:
    """Of opset 12 and before over all axes from `axis` on, later over the one."""
    value = real(x, x_scale, zero_of(x, x_zero))
    opset = n.attr("opset")
    axis = n.attr("axis", -1 if opset >= 13 else 1) % max(x.ndim, 1)
    if opset >= 13:
        y = ops.Softmax(value, axis=axis)
    else:
        rows = math.prod(x.shape[:axis])
        y = ops.Softmax(value.reshape(rows, -1), axis=-1).reshape(*x.shape)
    return coded(y, y_scale, y_zero, x)


@lowering("QLinearConcat")
def _q_concat(n: Call, y_scale: Any, y_zero: Any, *given: Any) -> Any:
    parts = [real(*given[i : i + 3]) for i in range(0, len(given), 3)]
    return coded(ops.Concat(*parts, axis=n.attr("axis")), y_scale, y_zero)


@lowering("QLinearWhere")
def _q_where(
    n: Call, condition: Any, x: Any, x_scale: Any, x_zero: Any, y: Any, y_scale: Any, y_zero: Any, z_scale: Any,
    z_zero: Any,
) -> Any:  # fmt: skip
    left = coded(real(x, x_scale, x_zero), z_scale, z_zero)
    return ops.Where(condition, left, coded(real(y, y_scale, y_zero), z_scale, z_zero))


@lowering("QLinearReduceMean")
def _q_reduce_mean(n: Call, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any) -> Any:
    value = real(x, x_scale, zero_of(x, x_zero))
    axes = n.attr("axes") or tuple(range(x.ndim))
    return coded(ops.ReduceMean(value, ints(*axes), keepdims=n.attr("keepdims")), y_scale, y_zero, x)


def channels_first(x: Any) -> Any:
    """[batch, ..., channels] -> [batch, channels, ...]."""
    return ops.Transpose(x, perm=[0, x.ndim - 1, *range(1, x.ndim - 1)])


def channels_last(x: Any) -> Any:
    """[batch, channels, ...] -> [batch, ..., channels]."""
    return ops.Transpose(x, perm=[0, *range(2, x.ndim), 1])


@lowering("QLinearAveragePool", "QLinearGlobalAveragePool")
def _q_average_pool(n: Call, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any) -> Any:
    last = bool(n.attr("channels_last", 0))
    value = real(x, x_scale, zero_of(x, x_zero))
    value = channels_first(value) if last else value
    if n.node.op_type == "QLinearGlobalAveragePool":
        y = ops.GlobalAveragePool(value)
    else:
        names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
        y = ops.AveragePool(value, **n.given(*names))
    return coded(channels_last(y) if last else y, y_scale, y_zero, x)


@lowering("QLinearConv")
def _q_conv(
    n: Call, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any, bias: Any
) -> Any:
    last = bool(n.attr("channels_last", 0))
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = ops.QLinearConv(
        channels_first(x) if last else x, scalar(x_scale), scalar(x_zero), w, scalar(w_scale), scalar(w_zero),
        scalar(y_scale), scalar(y_zero), bias, **n.given(*names),
    )  # fmt: skip
    return channels_last(y) if last else y


def _axis(n: Call, rank: int, scale: Any) -> int:
    """The axis of a vector of scales."""
    axis: int = n.attr("axis", 1)
    n.check(not scale.ndim or -rank <= axis < rank, f"axis = {axis} of {rank} dimensions")
    return axis


@lowering("QuantizeLinear")
def _quantize(n: Call, x: Any, scale: Any, zero: Any) -> Any:
    zero = np.array(0, np.uint8) if zero is None else scalar(zero)
    scale = scalar(scale)
    return ops.QuantizeLinear(x, scale, zero, axis=_axis(n, x.ndim, scale) if scale.ndim else 0)


@lowering("DequantizeLinear")
def _dequantize(n: Call, x: Any, scale: Any, zero: Any) -> Any:
    return real(x, scale, zero, _axis(n, x.ndim, scalar(scale)))


# --- weights in blocks ---

_UINT4: Final = dtype_from_name("uint4")


def literal(data: np.ndarray, dtype: np.dtype) -> Any:
    """A constant of a dtype."""
    return ops.Constant(value=data.astype(dtype))


def _parts(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of `bits` bits, the low ones of a byte first, a byte each."""
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    parts = [(data >> shift) & mask for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*data.shape[:-1], -1)


def unpacked(n: Call, index: int, x: Any, bits: int) -> Any:
    """Input `index`, packed along its last axis, as a tensor: of uint4 where it is known and of 4 bits, else uint8."""
    known = n.data(index)
    if known is not None:
        data = _parts(known, bits)
        return literal(data.astype(_UINT4) if bits == 4 else data, _UINT4 if bits == 4 else np.dtype(np.uint8))
    if bits == 8:
        return x
    mask = np.array((1 << bits) - 1, np.uint8)
    parts = [
        ops.BitwiseAnd(x if not s else ops.BitShift(x, np.array(s, np.uint8), direction="RIGHT"), mask).unsqueeze(-1)
        for s in range(0, 8, bits)
    ]
    return ops.Concat(*parts, axis=-1).reshape(*x.shape[:-1], -1)


def _product_type(n: Call) -> tuple[TensorType | None, ...]:
    a = n.node.inputs[0]
    if a is None or a.shape is None:
        return (TensorType(None if a is None else a.dtype),)
    rows = a.shape[:-1]
    return (TensorType(a.dtype, (*rows, n.attr("N"))),)


@lowering("MatMulNBits", types=_product_type)
def _matmul_nbits(n: Call, a: Any, b: Any, scales: Any, zeros: Any, groups: Any, bias: Any) -> Any:
    bits, block, rows, inner = n.attr("bits", 4), n.attr("block_size"), n.attr("N"), n.attr("K")
    if bits not in (2, 4, 8):
        raise n.refuse(f"bits = {bits}; 2, 4 and 8 are lowered")
    if n.attr("weight_prepacked", 0):
        raise n.refuse("weight_prepacked: the weights are in a layout of CUDA kernels")
    n.check(block >= 16 and block & (block - 1) == 0, f"block_size = {block} is no power of 2 from 16 on")
    n.check(a.shape[-1] == inner, f"K = {inner} for an input of {a.shape}")
    count = -(-inner // block)
    if 0 in b.shape:
        y = ops.Expand(np.array(0, a.dtype), ints(*a.shape[:-1], rows))
        return y if bias is None else y + bias
    size = rows * count * block * bits // 8
    n.check(math.prod(b.shape) == size, f"B of {b.shape} does not hold N = {rows} times K = {inner} of {bits} bits")
    n.check(math.prod(scales.shape) == rows * count, f"scales of {scales.shape} for {rows} x {count} blocks")
    n.check(bias is None or bias.shape == (rows,), f"bias of {bias is not None and bias.shape} for N = {rows}")
    n.check(groups is None or groups.shape in ((inner,), (count * block,)), f"g_idx does not have K = {inner} entries")
    if (known := n.data(4) if groups is not None else None) is not None and known.size:
        n.check(0 <= known.min() <= known.max() < count, f"g_idx is not within 0 to {count - 1}")
    if zeros is not None:
        per = 8 // bits if zeros.dtype == np.uint8 else 1
        n.check(math.prod(zeros.shape) == rows * -(-count // per), f"zero_points of {zeros.shape} for {rows} x {count}")
    scales = scales.reshape(rows, count)
    q = unpacked(n, 1, b, bits).reshape(rows, count * block)
    whole = count * block == inner
    packed = zeros is None or zeros.dtype == np.uint8
    if zeros is None:
        zero: Any = literal(np.full((rows, count), 1 << (bits - 1), np.uint8).astype(q.dtype), q.dtype)
    elif packed:
        known = n.data(3)
        line = zeros.reshape(rows, -1)
        if known is not None:
            data = _parts(known.reshape(rows, -1), bits)[:, :count]
            zero = literal(np.ascontiguousarray(data).astype(q.dtype), q.dtype)
        else:
            zero = unpacked(n, 3, line, bits)[:, :count]
            zero = zero if zero.dtype == q.dtype else zero.astype(q.dtype)
    else:
        zero = zeros.reshape(rows, count)
    if groups is None and packed:
        w = ops.DequantizeLinear(q, scales, zero, axis=1, block_size=block)
    else:
        if groups is None:
            at: Any = np.arange(count * block, dtype=np.int64) // block
        else:
            at = groups if groups.shape[0] == count * block or whole else ops.Pad(
                groups, ints(0, count * block - groups.shape[0])
            )  # fmt: skip
        w = (q.astype(scales.dtype) - ops.Gather(zero.astype(scales.dtype), at, axis=1)) * ops.Gather(
            scales, at, axis=1
        )
    w = w if whole else w[:, :inner]
    y = ops.MatMul(a, ops.Transpose(w, perm=[1, 0]))
    return y if bias is None else y + bias


_FP4: Final = (
    0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
    -0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
_NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _bnb4_type(n: Call) -> tuple[TensorType | None, ...]:
    a = n.node.inputs[0]
    if a is None or a.shape is None:
        return (TensorType(None if a is None else a.dtype),)
    return (TensorType(a.dtype, (*a.shape[:-1], n.attr("N") if n.attr("transB", 1) else n.attr("K"))),)


@lowering("MatMulBnb4", types=_bnb4_type)
def _matmul_bnb4(n: Call, a: Any, b: Any, absmax: Any) -> Any:
    """Each number names one of 16 values (FP4 or NF4), which the largest of its block scales; the high bits first."""
    rows, inner, block = n.attr("N"), n.attr("K"), n.attr("block_size")
    kind = n.attr("quant_type")
    n.check(kind in (0, 1), f"quant_type = {kind}; it is 0 (FP4) or 1 (NF4)")
    n.check(block in (16, 32, 64, 128, 256), f"block_size = {block}; it is 16, 32, 64, 128 or 256")
    count = rows * inner
    n.check(math.prod(b.shape) == -(-count // 2), f"B of {b.shape} does not hold N = {rows} times K = {inner}")
    n.check(math.prod(absmax.shape) == -(-count // block), f"absmax of {absmax.shape} for blocks of {block}")
    values = np.array(_NF4 if kind else _FP4, np.float32).astype(a.dtype)
    size = rows * inner
    flat = b.reshape(-1)
    high = ops.BitShift(flat, np.array(4, np.uint8), direction="RIGHT").unsqueeze(-1)
    low = ops.BitwiseAnd(flat, np.array(15, np.uint8)).unsqueeze(-1)
    codes = ops.Concat(high, low, axis=-1).reshape(-1)[:size].astype(np.int64)
    scale = ops.Gather(absmax, np.arange(size, dtype=np.int64) // block, axis=0)
    w = (ops.Gather(values, codes, axis=0) * scale).reshape(rows, inner)
    return ops.MatMul(a, ops.Transpose(w, perm=[1, 0]) if n.attr("transB", 1) else w)


@lowering("GatherBlockQuantized")
def _gather_block_quantized(n: Call, data: Any, indices: Any, scales: Any, zeros: Any) -> Any:
    """Rows are taken while they are quantised, and dequantised then; an index that is out of range gives zeros."""
    bits, block = n.attr("bits", 4), n.attr("block_size", 128)
    rank = data.ndim
    n.check(block >= 16 and block & (block - 1) == 0, f"block_size = {block} is no power of 2 from 16 on")
    n.check(bits in (2, 4, 8), f"bits = {bits}; it is 2, 4 or 8")
    for name in ("gather_axis", "quantize_axis"):
        at = n.attr(name, int(name == "quantize_axis"))
        n.check(-rank <= at < rank, f"{name} = {at} of {rank} dimensions")
    axis, along = n.attr("gather_axis", 0) % rank, n.attr("quantize_axis", 1) % rank
    count = data.shape[axis]
    dtype = scales.dtype
    integer = data.dtype.kind in "iu" or data.dtype.name in ("int4", "uint4", "int2", "uint2")
    packed, halved = data.dtype == np.uint8 and bits < 8, data.dtype == np.uint8
    if not halved and integer:  # Gather takes no elements of less than a byte
        signed = data.dtype.name.startswith("int")
        data, zeros = (None if x is None else x.astype(np.int8 if signed else np.uint8) for x in (data, zeros))
    limit = np.array(count, indices.dtype)
    valid = ops.And(ops.GreaterOrEqual(indices, -count), ops.Less(indices, limit))
    safe = ops.Where(valid, indices, np.array(0, indices.dtype))

    def taken(x: Any) -> Any:
        return ops.Gather(x, safe, axis=axis)

    moved = along if along < axis else along + indices.ndim - 1

    def spread(x: Any, length: int, at: int) -> Any:  # blocks -> elements
        if x.shape[at] == 1:
            return x
        return ops.Gather(x, np.arange(length, dtype=np.int64) // block, axis=at)

    def numbers(x: Any) -> Any:
        if not packed:
            return x.astype(dtype)
        mask = np.array((1 << bits) - 1, np.uint8)
        parts = [
            ops.BitwiseAnd(ops.BitShift(x, np.array(s, np.uint8), direction="RIGHT"), mask).unsqueeze(-1)
            for s in range(0, 8, bits)
        ]
        return ops.Concat(*parts, axis=-1).reshape(*x.shape[:-1], -1).astype(dtype)

    if axis == along:
        q = numbers(data)
        length, at = q.shape[along], along
        s, z = scales, zeros
    else:
        q = numbers(taken(data))
        length, at = q.shape[moved], moved
        s = taken(scales) if scales.shape[axis] == count else scales
        z = None if zeros is None else taken(zeros)
    if z is not None:
        z = numbers(z)
        blocks = s.shape[at]
        if z.shape[at] != blocks:
            z = ops.Slice(z, ints(0), ints(blocks), ints(at))
        q = q - spread(z, length, at)
    elif halved:
        q = q - float(1 << (bits - 1))
    y = q * spread(s, length, at)
    if axis == along:
        y = taken(y)
    shape = (*(1,) * axis, *indices.shape, *(1,) * (rank - axis - 1))
    return ops.Where(valid.reshape(*shape), y, np.array(0, dtype))
