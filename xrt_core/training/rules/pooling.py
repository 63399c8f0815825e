"""Gradients of windowed and global pooling."""

from __future__ import annotations

import math
from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.gradient_context import Backward, Forward, dialect, expanded, sum_over, wide
from xrt_core.training.registry import composition, gradient

_WINDOW = ("kernel_shape", "strides", "dilations", "pads", "auto_pad", "ceil_mode")


def _attributes(ctx: Forward, *more: str) -> dict[str, Any]:
    return {k: ctx.attr(k) for k in (*_WINDOW, *more) if ctx.attr(k) is not None}


@gradient("MaxPool")
def max_pool(ctx: Backward) -> Any:
    """dy goes to the first maximum of each window."""
    if len(ctx.grads) > 1 and ctx.grads[1] is not None:
        raise ctx.error("its Indices are no smooth function of its input")
    return dialect("MaxPoolGrad", ctx.grad, ctx.inputs[0], ctx.outputs[0], **_attributes(ctx))


@gradient("MaxPoolGrad", domain="xrt")
def max_pool_grad(ctx: Backward) -> Any:
    """The operator is linear in dy: by dy the gradient gathered at the maxima; by x and y zero."""
    if not ctx.wants(0):
        return None, None, None
    dy, x, _ = ctx.inputs
    attributes = {k: v for k, v in _attributes(ctx).items() if v is not None}
    _, indices = ops.MaxPool(x, outputs=2, **attributes)
    flat = ops.Gather(ctx.grad.reshape(-1), indices.reshape(-1), axis=0)  # indices count over the whole tensor
    return flat.reshape(ctx.shape(dy)), None, None


@gradient("AveragePool")
def average_pool(ctx: Backward) -> Any:
    """dy divided by the window's count goes to every element of the window."""
    size = ctx.shape(ctx.inputs[0])[2:]
    return dialect("AveragePoolGrad", ctx.grad, size=size, **_attributes(ctx, "count_include_pad"))


@gradient("AveragePoolGrad", domain="xrt")
def average_pool_grad(ctx: Backward) -> Any:
    """The operator is linear: its gradient is AveragePool."""
    made: Tensor = ops.AveragePool(ctx.grad, **_attributes(ctx, "count_include_pad"))
    return made


@gradient("GlobalAveragePool")
def global_average_pool(ctx: Backward) -> Any:
    """dy divided by the number of elements goes to every element."""
    x = ctx.inputs[0]
    return expanded(ctx.grad / float(max(math.prod(ctx.shape(x)[2:]), 1)), x)


@gradient("GlobalMaxPool")
def global_max_pool(ctx: Backward) -> Any:
    """dy goes to the maxima, divided among equal ones."""
    x = ctx.inputs[0]
    hit = (x == ctx.outputs[0]).astype(x.dtype)
    return hit * (ctx.grad / sum_over(hit, list(range(2, x.ndim))))


@composition("GlobalLpPool")
def global_lp_pool(ctx: Forward) -> Tensor:
    """(sum of |x|^p)^(1/p)."""
    x, p = ctx.inputs[0], float(ctx.attr("p", 2))
    powers = ops.Abs(wide(x)) ** p
    made: Tensor = (sum_over(powers, list(range(2, x.ndim))) ** (1 / p)).astype(x.dtype)
    return made


@composition("LpPool")
def lp_pool(ctx: Forward) -> Tensor:
    """The p-norm of each window, from the average of powers."""
    x, p = ctx.inputs[0], float(ctx.attr("p", 2))
    count = float(math.prod(ctx.attr("kernel_shape")))
    attributes = _attributes(ctx)
    powers = ops.AveragePool(ops.Abs(wide(x)) ** p, count_include_pad=1, **attributes)
    made: Tensor = ((powers * count) ** (1 / p)).astype(x.dtype)
    return made


@gradient("MaxUnpool")
def max_unpool(ctx: Backward) -> Any:
    """dy gathered at the positions of the maxima. Raises GradientError with an output_shape, which changes them."""
    x, indices = ctx.inputs[:2]
    if ctx.input(2) is not None:
        raise ctx.error("the rule covers nodes without output_shape")
    found = ops.Gather(ctx.grad.reshape(-1), indices.reshape(-1), axis=0)
    return found.reshape(ctx.shape(x)), None
