"""Elementwise operators that the library computes better than a portable kernel does."""

from __future__ import annotations

from typing import Any

from xrt_core.engine.op_kernels import op_kernel
from xrt_core.kernels import OpContext


# YOUR ENGINE: write a kernel like this one where the library has a better way: a fused function, a tuned library call.
# `ctx.xp` is the library's namespace (that of the array API standard where it is not like NumPy), `ctx.attr(name,
# default)` reads an attribute, `ctx.version` tells the operator's version; inputs are the library's arrays (None where
# one is left out), the result is one array or a tuple of them.
@op_kernel("Relu", engine="{{ cookiecutter.engine }}", devices={{ cookiecutter.__devices }}, train=True)
def relu(ctx: OpContext, x: Any) -> Any:
    """max(x, 0); NaN stays NaN."""
    return ctx.xp.maximum(x, ctx.xp.zeros_like(x))
