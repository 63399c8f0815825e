"""Kernels of elementwise operators."""

from __future__ import annotations

from typing import Any

import numpy as np
from xrt_core.engine.op_kernels import op_kernel
from xrt_core.kernels import OpContext

DEVICES = {{ cookiecutter.__devices }}
NUMBERS = frozenset(map(np.dtype, (np.float16, np.float32, np.float64, np.int32, np.int64)))
"""Element dtypes that these kernels take. A node of any other is refused with the reason, and the host runs it."""


# YOUR ENGINE: launch your kernel where these call NumPy. A kernel gets the node (`ctx.node`, `ctx.attr`, `ctx.version`)
# and one array per input, None where an input is left out; it returns one new array, or a tuple of them. It must not
# write into its inputs. `train=True` says that it may be used in training; `static=(1,)` that input 1 must be known
# when the graph is compiled, and comes as a NumPy array.
@op_kernel("Relu", engine="{{ cookiecutter.engine }}", devices=DEVICES, train=True, dtypes=NUMBERS)
def relu(ctx: OpContext, x: Any) -> Any:
    """max(x, 0); NaN stays NaN."""
    return ctx.xp.maximum(x, x.dtype.type(0))


@op_kernel("Neg", engine="{{ cookiecutter.engine }}", devices=DEVICES, train=True, dtypes=NUMBERS)
def negative(ctx: OpContext, x: Any) -> Any:
    """-x."""
    return ctx.xp.negative(x)


@op_kernel("Identity", engine="{{ cookiecutter.engine }}", devices=DEVICES, train=True)
def identity(ctx: OpContext, x: Any) -> Any:
    """x itself: the executable copies it where it is a result, so that no two arrays share memory."""
    return x


@op_kernel("Add", "Sub", "Mul", engine="{{ cookiecutter.engine }}", devices=DEVICES, train=True, dtypes=NUMBERS)
def binary(ctx: OpContext, a: Any, b: Any) -> Any:
    """a op b, broadcast; integers wrap around. One function may serve a family of operators."""
    name = {"Add": "add", "Sub": "subtract", "Mul": "multiply"}[ctx.node.op_type]
    return getattr(ctx.xp, name)(a, b)
