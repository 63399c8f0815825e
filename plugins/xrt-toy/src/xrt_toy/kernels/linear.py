"""Matrix products, tile by tile in shared memory: MatMul and Gemm."""

# device code states no types: numba finds them
# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_toy._toolkit import TILE, Scalar, cuda, element_type
from xrt_toy.kernels.context import FLOATS, NUMBERS, Buffer, ToyOpContext, accumulator_type, toy_kernel
from xrt_toy.kernels.elementwise import broadcast, collapse, offset, row_major


@functools.cache
def _tiled(scalar: Scalar, alpha: float, beta: float, tile: int) -> Any:
    """The kernel out = alpha a @ b + beta c, which sums in `scalar`; without c where beta is 0."""
    zero, area, element = scalar(0), tile * tile, element_type(scalar)
    scaled, with_c = alpha != 1, beta != 0
    factor, factor_c = scalar(alpha), scalar(beta)

    def matmul(out, a, b, c, m, n, k, am, ak, bk, bn, cm, cn, batches, shape, sa, sb):
        memory = cuda.shared.array(0, element)  # a tile of a, then a tile of b
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        here = ty * tile + tx
        across, down = (n + tile - 1) // tile, (m + tile - 1) // tile
        for block in range(cuda.blockIdx.x, batches * down * across, cuda.gridDim.x):
            batch = block // (down * across)
            row, col = block // across % down * tile + ty, block % across * tile + tx
            a0, b0 = offset(batch, shape, sa) + row * am, offset(batch, shape, sb) + col * bn
            total = zero
            for k0 in range(0, k, tile):
                memory[here] = scalar(a[a0 + (k0 + tx) * ak]) if row < m and k0 + tx < k else zero
                memory[area + here] = scalar(b[b0 + (k0 + ty) * bk]) if col < n and k0 + ty < k else zero
                cuda.syncthreads()
                for j in range(tile):
                    total += memory[ty * tile + j] * memory[area + j * tile + tx]
                cuda.syncthreads()  # nobody may fill the next tiles while others still read these
            if row < m and col < n:
                y = factor * total if scaled else total
                if with_c:
                    y += factor_c * c[row * cm + col * cn]
                out[(batch * m + row) * n + col] = y

    return matmul


def product(
    ctx: ToyOpContext, a: Buffer, b: Buffer, out: Buffer, *, transpose: tuple[bool, bool] = (False, False),
    c: Buffer | None = None, alpha: float = 1.0, beta: float = 0.0,
) -> Buffer:  # fmt: skip
    """Launch the product of two stacks of matrices, and return `out`."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (am, ak), (bk, bn) = row_major(a.shape)[-2:], row_major(b.shape)[-2:]
    (m, k), (_, n) = a.shape[-2:], b.shape[-2:]
    if transpose[0]:
        m, k, am, ak = k, m, ak, am
    if transpose[1]:
        n, bk, bn = b.shape[-2], bn, bk
    cm, cn = broadcast(c.shape, (m, n)) if c is not None else (0, 0)
    shape, sa, sb = collapse(lead, *(_stack(x, lead) for x in (a, b)))
    scalar, batches = accumulator_type(out.dtype), math.prod(lead)
    tiles = batches * -(-m // TILE) * -(-n // TILE)
    ctx.launch(
        _tiled(scalar, alpha, beta if c is not None else 0.0, TILE), tiles,
        out, a, b, a if c is None else c, m, n, k, am, ak, bk, bn, cm, cn, batches, shape, sa, sb,
        block=(TILE, TILE), shared=2 * TILE * TILE * np.dtype(scalar).itemsize,
    )  # fmt: skip
    return out


def _stack(x: Buffer, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Strides from matrix to matrix of x, broadcast to the stack `lead`."""
    size = math.prod(x.shape[-2:])
    return tuple(s * size for s in broadcast(x.shape[:-2], lead))


@toy_kernel("MatMul", dtypes=NUMBERS)
def matmul(ctx: ToyOpContext, a: Buffer, b: Buffer) -> Buffer:
    """Matrix product with NumPy's rules for vectors and stacks."""
    left = ctx.view(a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = ctx.view(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    return product(ctx, left, right, ctx.output())


def _whole_factors(node: Node) -> str:
    x = node.inputs[0]
    fraction = any(float(node.attributes.get(name, 1)) % 1 for name in ("alpha", "beta"))  # type: ignore[arg-type]
    return "toy scales integers by whole numbers only" if fraction and x is not None and x.dtype not in FLOATS else ""


@toy_kernel("Gemm", dtypes=NUMBERS, check=_whole_factors)
def gemm(ctx: ToyOpContext, a: Buffer, b: Buffer, c: Buffer | None = None) -> Buffer:
    """alpha A' B' + beta C, where transA and transB transpose, and C broadcasts to the product."""
    transpose = bool(ctx.attr("transA", 0)), bool(ctx.attr("transB", 0))
    alpha, beta = float(ctx.attr("alpha", 1.0)), float(ctx.attr("beta", 1.0))
    return product(ctx, a, b, ctx.output(), transpose=transpose, c=c, alpha=alpha, beta=beta)
