"""Gemm, whose second matrix torch's exports give transposed, in the forms that XLA runs fast."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.types import float_like
from xrt_core.kernels.linear import scaled
from xrt_core.kernels.namespace import narrow, wide, widen
from xrt_xla.kernels.context import Layout, XlaContext, layout, portable, xla_kernel
from xrt_xla.kernels.convolution import static_shape


def _transposed(xp: Any, w: Any) -> Any:
    return xp.transpose(w)


@layout("Gemm", 1)
def _matrix(node: Node, kind: str) -> Layout | None:
    """A transposed constant the other way round, on the CPU, for more than one row (8 rows: a third of the time; 512:
    nine tenths). One row takes it as it is."""
    if kind != "cpu" or not node.attributes.get("transB", 0):
        return None
    rows = static_shape(node, 0)[1 if node.attributes.get("transA", 0) else 0]
    return Layout("IO", _transposed) if rows > 1 else None


@xla_kernel("Gemm")
def gemm(ctx: XlaContext, a: Any, b: Any, c: Any = None) -> Any:
    """Gemm as one product over the axes that meet: XLA turns a transposed matrix round in each call where the other has
    one row (4096 x 9216: 144 ms where the product takes 5)."""
    if not float_like(np.dtype(a.dtype)):
        return portable(ctx, a, b, c)
    transposed = bool(ctx.attr("transB", 0)) and 1 not in ctx.laid_out
    product = ctx.lax.dot_general(
        a, b, (((0 if ctx.attr("transA", 0) else 1,), (1 if transposed else 0,)), ((), ())),
        precision=ctx.lax.Precision.HIGHEST, preferred_element_type=wide(np.dtype(a.dtype)),
    )  # fmt: skip
    out = scaled(ctx.xp, ctx.attr("alpha", 1.0), product)
    beta = ctx.attr("beta", 1.0)
    if c is not None and beta != 0:
        out = out + scaled(ctx.xp, beta, widen(c))
    return narrow(out, a.dtype)
