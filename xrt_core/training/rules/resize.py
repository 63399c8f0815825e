"""Gradients of Resize and Upsample: resampling is linear per axis, its gradient the transposed matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from xrt_core.frontends.tensor import literal
from xrt_core.kernels.registry import OpContext
from xrt_core.kernels.resize import resample, resize_steps
from xrt_core.training.gradient_context import Backward, filled
from xrt_core.training.registry import gradient


@gradient("Resize", "Upsample")
def resize(ctx: Backward) -> Any:
    """dy times the transposed resampling matrix of each axis, which is obtained by resampling the identity."""
    x, g, rest = ctx.inputs[0], ctx.grad, ctx.node.inputs[1:]
    shape = ctx.shape(x)
    nothing = [None] * len(rest)
    if not g.size or not x.size:
        return (filled(x), *nothing)
    known = [None if v is None else ctx.known(1 + i, "scales or sizes") for i, v in enumerate(rest)]
    steps, sampling = resize_steps(OpContext(ctx.node, np), shape, *known)
    if sampling.coordinates == "tf_crop_and_resize":
        raise ctx.error("its rule does not cover tf_crop_and_resize")
    for step in steps:
        matrix = resample(np, np.eye(step.size), [replace(step, axis=0)], sampling)
        if step.size == step.out and np.array_equal(matrix, np.eye(step.size)):
            continue
        order = [i for i in range(x.ndim) if i != step.axis] + [step.axis]
        g = (g.transpose(order) @ literal(matrix, g.dtype)).transpose([int(i) for i in np.argsort(order)])
    return (g, *nothing)
