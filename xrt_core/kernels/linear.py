"""Matrix products and linear algebra: MatMul, Gemm, Einsum, Det and their integer forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.kernels.movement import check_shape
from xrt_core.kernels.namespace import is_jax, result, widen
from xrt_core.kernels.quantization import plain, quantize
from xrt_core.kernels.registry import OpContext, kernel


def matmul(xp: Any, a: Any, b: Any) -> Any:
    """a @ b in their dtype; narrow floats accumulate in float32."""
    if is_jax(xp):  # operands stay narrow: matrix units take them as they are
        accumulate = np.float32 if float_like(a.dtype) and a.dtype.itemsize < 4 else None
        return xp.matmul(a, b, preferred_element_type=accumulate).astype(a.dtype)
    return result(xp, xp.matmul(widen(a), widen(b)), a.dtype)


@kernel("MatMul")
def matmul_(ctx: OpContext, a: Any, b: Any) -> Any:
    """Matrix product with NumPy's rules for vectors and stacks."""
    return matmul(ctx.xp, a, b)


def scaled(xp: Any, factor: float, x: Any) -> Any:
    """factor * x in the dtype of x; integers are multiplied in float64 and cut off."""
    if factor == 1:
        return x
    return factor * x if float_like(x.dtype) else (factor * x.astype(np.float64)).astype(x.dtype)


@kernel("Gemm")
def gemm(ctx: OpContext, a: Any, b: Any, c: Any = None) -> Any:
    """alpha A' B' + beta C, where transA and transB transpose, and C broadcasts to the product."""
    xp, dtype = ctx.xp, a.dtype
    if ctx.attr("transA", 0):
        a = a.T
    if ctx.attr("transB", 0):
        b = b.T
    if is_jax(xp) and float_like(dtype) and dtype.itemsize < 4:
        product = xp.matmul(a, b, preferred_element_type=np.float32)
    else:
        product = xp.matmul(widen(a), widen(b))
    out = scaled(xp, ctx.attr("alpha", 1.0), product)
    beta = ctx.attr("beta", 1.0)
    if c is not None and beta != 0:
        check_shape(c.shape, out.shape, "Gemm: C", broadcasts=True)
        out = out + scaled(xp, beta, widen(c))
    return result(xp, out, dtype)


@kernel("Einsum")
def einsum(ctx: OpContext, *inputs: Any) -> Any:
    """Einstein's summation, ellipsis and implicit output included."""
    xp, dtype = ctx.xp, inputs[0].dtype
    equation = str(ctx.attr("equation")).replace(" ", "")
    if is_jax(xp):
        accumulate = np.float32 if float_like(dtype) and dtype.itemsize < 4 else None
        return xp.einsum(equation, *inputs, preferred_element_type=accumulate).astype(dtype)
    return result(xp, xp.einsum(equation, *(widen(x) for x in inputs), optimize=True), dtype)


@kernel("Det")
def det(ctx: OpContext, x: Any) -> Any:
    """Determinant of the matrices in the last two axes."""
    return result(ctx.xp, ctx.xp.linalg.det(widen(x)), x.dtype)


def _per_row(xp: Any, parameter: Any) -> Any:
    """A scale or zero point of the left matrix or the product: a scalar, or one element per row."""
    if parameter.size == 1:
        return xp.reshape(parameter, ())
    return xp.reshape(parameter, (-1, 1)) if parameter.ndim == 1 else parameter


def _per_column(xp: Any, parameter: Any) -> Any:
    """A scale or zero point of the right matrix: a scalar, or one element per column."""
    return xp.reshape(parameter, ()) if parameter.size == 1 else parameter


def _integer_product(xp: Any, a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    """(a - a_zero) @ (b - b_zero) of 8-bit integers, as int32 under JAX and as exact float64 elsewhere."""
    work = np.dtype(np.int32 if is_jax(xp) else np.float64)  # BLAS has floats only; 2**53 is far away
    a, b = a.astype(work), b.astype(work)
    if a_zero is not None:
        a = a - _per_row(xp, a_zero.astype(work))
    if b_zero is not None:
        b = b - _per_column(xp, b_zero.astype(work))
    return xp.asarray(xp.matmul(a, b))


@kernel("MatMulInteger")
def matmul_integer(ctx: OpContext, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """(A - a_zero_point) @ (B - b_zero_point) in int32; zero points per tensor, row of A or column of B."""
    product = _integer_product(ctx.xp, a, b, a_zero, b_zero)
    return product if product.dtype == np.int32 else product.astype(np.int64).astype(np.int32)


@kernel("QLinearMatMul")
def qlinear_matmul(
    ctx: OpContext, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    """Matrix product of quantised arrays, quantised again; float8 arrays are multiplied in float32."""
    xp = ctx.xp
    if float_like(a.dtype) or float_like(b.dtype):
        left = plain(xp, a) - _per_row(xp, plain(xp, a_zero))
        product = xp.asarray(xp.matmul(left, plain(xp, b) - _per_column(xp, plain(xp, b_zero))))
    else:
        product = _integer_product(xp, a, b, a_zero, b_zero)
    scale = _per_row(xp, widen(a_scale)) * _per_column(xp, widen(b_scale)) / _per_row(xp, widen(y_scale))
    scaled = xp.asarray(product.astype(np.float32) * scale)
    return xp.asarray(quantize(xp, scaled, _per_row(xp, plain(xp, y_zero)), y_zero.dtype))
