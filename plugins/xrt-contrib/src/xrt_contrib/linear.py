"""Products of matrices in floating point with what is fused to them, and spectra."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_contrib.activation import activate, wide
from xrt_contrib.lowering import Call, lowering
from xrt_core import ops


def transposed(x: Any, last_two: bool, batch: bool = False) -> Any:
    """`x` with its first axis moved before the last (`batch`), and then its last two swapped."""
    rank = x.ndim
    if rank < 2 or not (last_two or batch):
        return x
    axes = list(range(rank))
    if batch:
        axes = [*axes[1:-1], 0, rank - 1]
    if last_two:
        axes[-2:] = axes[:-3:-1]
    return ops.Transpose(x, perm=axes)


def _fused(n: Call, a: Any, b: Any, batch: bool = True) -> Any:
    flip_a, flip_b = n.attr("transA", 0), n.attr("transB", 0)
    batch_a, batch_b = (n.attr("transBatchA", 0), n.attr("transBatchB", 0)) if batch else (0, 0)
    y = ops.MatMul(transposed(a, bool(flip_a), bool(batch_a)), transposed(b, bool(flip_b), bool(batch_b)))
    alpha = n.attr("alpha", 1.0)
    return y if alpha == 1.0 else y * alpha


@lowering("FusedMatMul")
def _fused_matmul(n: Call, a: Any, b: Any) -> Any:
    return _fused(n, a, b)


@lowering("TransposeMatMul", "SparseToDenseMatMul")
def _transpose_matmul(n: Call, a: Any, b: Any) -> Any:
    return _fused(n, a, b, batch=False)


@lowering("FusedMatMulActivation")
def _fused_matmul_activation(n: Call, a: Any, b: Any) -> Any:
    return activate(
        n, _fused(n, a, b), n.attr("activation"), n.attr("activation_alpha"), n.attr("activation_beta"),
        gamma=n.attr("activation_gamma"), axis=n.attr("activation_axis", -1),
    )  # fmt: skip


@lowering("FusedGemm")
def _fused_gemm(n: Call, a: Any, b: Any, c: Any) -> Any:
    y = ops.Gemm(a, b, c, **n.given("alpha", "beta", "transA", "transB"))
    return activate(
        n, y, n.attr("activation", ""), n.attr("activation_alpha"), n.attr("activation_beta"),
        gamma=n.attr("activation_gamma"),
    )  # fmt: skip


@lowering("GemmFloat8")
def _gemm_float8(n: Call, a: Any, b: Any, c: Any, scale_a: Any, scale_b: Any, scale_y: Any) -> Any:
    """A product of float8 matrices in float32; the scales multiply the operands, and divide the result."""
    from xrt_core.ir.types import ONNX_TO_DTYPE

    x, w = a.astype(np.float32), b.astype(np.float32)
    x = x if scale_a is None else x * scale_a
    w = w if scale_b is None else w * scale_b
    y = ops.MatMul(transposed(x, bool(n.attr("transA", 0))), transposed(w, bool(n.attr("transB", 0))))
    y = y * n.attr("alpha", 1.0)
    if c is not None and n.attr("beta", 0.0):
        y = y + n.attr("beta") * c.astype(np.float32)
    y = activate(
        n, y, {"RELU": "Relu", "GELU": "Gelu", "NONE": ""}.get(n.attr("activation", "NONE"), n.attr("activation", ""))
    )
    y = y if scale_y is None else y / scale_y
    return y.astype(ONNX_TO_DTYPE[n.attr("dtype", 1)])


@lowering("MatMulInteger16")
def _matmul_integer16(n: Call, a: Any, b: Any) -> Any:
    return ops.MatMul(a.astype(np.int32), b.astype(np.int32)).astype(n_output(n, np.int32))


def n_output(n: Call, default: Any) -> Any:
    """The dtype that the model declares for the first output."""
    out = n.node.outputs[0]
    return default if out is None or out.dtype is None else out.dtype


@lowering("ComplexMul", "ComplexMulConj")
def _complex_mul(n: Call, a: Any, b: Any) -> Any:
    """Numbers are pairs (real, imaginary) along the last axis."""
    ar, ai = ops.Split(a, axis=-1, num_outputs=2)
    br, bi = ops.Split(b, axis=-1, num_outputs=2)
    if n.node.op_type == "ComplexMulConj":
        bi = -bi
    return ops.Concat(ar * br - ai * bi, ar * bi + ai * br, axis=-1)


def _angles(rows: int, columns: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    turns = np.outer(np.arange(rows), np.arange(columns)) % length * (2 * math.pi / length)
    return np.cos(turns), np.sin(turns)


@lowering("Rfft")
def _rfft(n: Call, x: Any) -> Any:
    """The one-sided spectrum along the last `signal_ndim` axes as a product with cosines and sines, pairs last."""
    rank = n.attr("signal_ndim", 1)
    dtype = x.dtype
    n.check(1 <= rank <= x.ndim and bool(n.attr("onesided", 1)), "signal_ndim and onesided do not fit")
    shape = x.shape
    length = shape[-1]
    bins = length // 2 + 1
    cos, sin = _angles(length, bins, length)
    w = wide(x)
    real, imaginary = ops.MatMul(w, cos.astype(w.dtype)), ops.MatMul(w, (-sin).astype(w.dtype))
    for axis in range(x.ndim - 2, x.ndim - 1 - rank, -1):
        real, imaginary = _dft(real, imaginary, axis, -1)
    if n.attr("normalized", 0):
        scale = 1 / math.sqrt(math.prod(shape[x.ndim - rank :]))
        real, imaginary = real * scale, imaginary * scale
    return ops.Concat(real.unsqueeze(-1), imaginary.unsqueeze(-1), axis=-1).astype(dtype)


def _dft(real: Any, imaginary: Any, axis: int, sign: int) -> tuple[Any, Any]:
    """The two-sided transform along one axis of real and imaginary parts."""
    length = real.shape[axis]
    cos, sin = (m.astype(real.dtype) for m in _angles(length, length, length))
    sin = sin * np.array(sign, sin.dtype)

    def along(x: Any, m: np.ndarray) -> Any:
        moved = x.swapaxes(axis, -1)
        return ops.MatMul(moved, m).swapaxes(axis, -1)

    return along(real, cos) - along(imaginary, sin), along(real, sin) + along(imaginary, cos)


@lowering("Irfft")
def _irfft(n: Call, x: Any) -> Any:
    """The real signal of a one-sided spectrum of even length, divided by the length unless `normalized` is set."""
    rank = n.attr("signal_ndim")
    n.check(1 <= rank <= x.ndim - 1 and bool(n.attr("onesided", 1)), "signal_ndim and onesided do not fit")
    w = wide(x)
    parts = ops.Split(w, axis=-1, num_outputs=2)
    real, imaginary = (p.squeeze(-1) for p in parts)
    for axis in range(real.ndim - rank, real.ndim - 1):
        real, imaginary = _dft(real, imaginary, axis, 1)
    bins = real.shape[-1]
    length = 2 * (bins - 1)
    weight = np.full((bins, 1), 2.0)
    weight[0] = weight[-1] = 1.0
    cos, sin = _angles(bins, length, length)
    total = ops.MatMul(real, (weight * cos).astype(w.dtype)) - ops.MatMul(imaginary, (weight * sin).astype(w.dtype))
    size = length * math.prod(real.shape[real.ndim - rank : -1])
    return (total / (math.sqrt(size) if n.attr("normalized", 0) else size)).astype(x.dtype)


@lowering("Inverse")
def _inverse(n: Call, x: Any) -> Any:
    """Gauss-Jordan elimination with pivoting by rows, a column a step."""
    size = x.shape[-1]
    n.check(x.ndim >= 2 and x.shape[-2] == size, f"a matrix of {x.shape} is not square")
    eye = np.eye(size, dtype=np.float32 if x.dtype.name in ("float16", "bfloat16") else x.dtype)
    w = wide(x)
    batch = tuple(x.shape[:-2])
    work = ops.Concat(w, ops.Expand(eye, np.array((*batch, size, size), np.int64)), axis=-1)
    index = np.arange(size)
    for k in range(size):
        column = ops.Abs(work[..., k : k + 1].squeeze(-1))
        allowed = ops.Where(index >= k, column, np.array(-1, w.dtype))
        pivot = ops.ArgMax(allowed, axis=-1, keepdims=1)  # [..., 1]
        chosen = ops.Equal(pivot, index)  # [..., size], one-hot
        one_hot = chosen.astype(w.dtype)
        row = ops.MatMul(one_hot.unsqueeze(-2), work)  # the pivot's row
        old = work[..., k : k + 1, :]
        work = ops.Where(chosen.unsqueeze(-1), old, work)
        row = row / row[..., k : k + 1]
        factor = work[..., k : k + 1]
        here = (index == k).reshape(size, 1)
        work = ops.Where(here, row, work - factor * row)
    return work[..., size:].astype(x.dtype)


@lowering("CDist")
def _cdist(n: Call, a: Any, b: Any) -> Any:
    """Distances of the rows of two matrices, by their differences: no cancellation."""
    metric = n.attr("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise n.refuse(f"metric = {metric!r}; it may be 'euclidean' or 'sqeuclidean'")
    difference = a.unsqueeze(1) - b.unsqueeze(0)
    total = ops.ReduceSum(difference * difference, np.array([2], np.int64), keepdims=0)
    return ops.Sqrt(total) if metric == "euclidean" else total
