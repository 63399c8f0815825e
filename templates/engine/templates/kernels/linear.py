"""Kernels of linear algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
from xrt_core.engine.op_kernels import op_kernel
from xrt_core.ir.graph import Node, Support
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext

from {{ cookiecutter.__module }}.kernels.elementwise import DEVICES

FLOATS = frozenset(map(np.dtype, (np.float32, np.float64)))


def _are_matrices(node: Node) -> Support:
    """What the registry cannot ask by itself is asked by a check: here that no operand is a vector."""
    for value in node.inputs:
        if value is not None and isinstance(value.type, TensorType) and len(value.type.shape or ()) < 2:
            return Support.no(f"{value.name!r} of MatMul is a vector; the kernel takes matrices and stacks of them")
    return Support.yes()


@op_kernel(
    "MatMul", engine="{{ cookiecutter.engine }}", devices=DEVICES, train=True, dtypes=FLOATS, check=_are_matrices
)
def matmul(ctx: OpContext, a: Any, b: Any) -> Any:
    """a @ b over stacks of matrices, broadcast."""
    return ctx.xp.matmul(a, b)
