"""Gradients of convolutions: by the input a transposed convolution, by the filter the dialect's ConvFilterGrad."""

from __future__ import annotations

from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.kernels.registry import OpContext
from xrt_core.kernels.windows import Windows, windows_of
from xrt_core.training.gradient_context import Backward, Forward, dialect, filled, sum_over
from xrt_core.training.registry import gradient


def windows(ctx: Forward, size: tuple[int, ...], kernel: tuple[int, ...]) -> Windows:
    """The windows of a node over spatial axes of static sizes."""
    import numpy as np

    return windows_of(OpContext(ctx.node, np), size, kernel)


def _attributes(w: Windows, group: int) -> dict[str, Any]:
    """Return the equivalent attributes with explicit padding."""
    return {
        "kernel_shape": w.kernel,
        "strides": w.strides,
        "dilations": w.dilations,
        "pads": (*w.begin, *w.end),
        "group": group,
    }


def input_gradient(dy: Tensor, w: Tensor, over: Windows, group: int) -> Tensor:
    """Return the gradient of Conv by its input of size `over.size`; elements outside every window get zeros."""
    rest = [
        over.size[i] + over.begin[i] + over.end[i] - over.reach(i) for i in range(over.rank)
    ]  # rows at the end that no window covers
    made: Tensor = ops.ConvTranspose(dy, w, output_padding=rest, **_attributes(over, group))
    return made


def _bias(ctx: Backward, dy: Tensor) -> Tensor | None:
    if not ctx.wants(2):
        return None
    return sum_over(dy, [0, *range(2, dy.ndim)], keepdims=False).astype(ctx.inputs[2].dtype)


@gradient("Conv")
def conv(ctx: Backward) -> Any:
    """By the input a transposed convolution; by the filter a correlation of input and gradient."""
    x, w, dy = ctx.inputs[0], ctx.inputs[1], ctx.grad
    group = int(ctx.attr("group", 1))
    by_x = by_w = None
    over = windows(ctx, ctx.shape(x)[2:], ctx.shape(w)[2:])
    empty = 0 in ctx.shape(dy)
    if ctx.wants(0):
        by_x = filled(x) if empty else input_gradient(dy, w, over, group)
    if ctx.wants(1):
        by_w = dialect("ConvFilterGrad", x, dy, **_attributes(over, group))
    return (by_x, by_w, _bias(ctx, dy))[: len(ctx.inputs)]


@gradient("ConvTranspose")
def conv_transpose(ctx: Backward) -> Any:
    """By the input a convolution, by the filter a correlation with the two sides exchanged."""
    x, w, dy = ctx.inputs[0], ctx.inputs[1], ctx.grad
    size, out = ctx.shape(x)[2:], ctx.shape(dy)[2:]
    kernel, group, rank = ctx.shape(w)[2:], int(ctx.attr("group", 1)), x.ndim - 2
    strides = tuple(ctx.attr("strides") or (1,) * rank)
    dilations = tuple(ctx.attr("dilations") or (1,) * rank)
    begin = _crop(ctx, size, kernel, strides, dilations, out)
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, strides, kernel, dilations, strict=True)]
    end = tuple(r - o - b for r, o, b in zip(reach, out, begin, strict=True))
    # output beyond the reach of the input is zero for every x: a negative padding crops it
    from xrt_core.training.rules.movement import pad

    cut = [min(e, 0) for e in end]
    if any(cut):
        dy = pad(dy, [0, 0, *[0] * rank, 0, 0, *cut])
        end = tuple(max(e, 0) for e in end)
        out = ctx.shape(dy)[2:]
    over = Windows(out, kernel, strides, dilations, begin, end, size)
    by_x = by_w = None
    if ctx.wants(0):
        by_x = ops.Conv(dy, w, **_attributes(over, group))
    if ctx.wants(1):
        by_w = dialect("ConvFilterGrad", dy, x, **_attributes(over, group))
    return (by_x, by_w, _bias(ctx, ctx.grad))[: len(ctx.inputs)]


def _crop(
    ctx: Forward,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    out: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the elements that a ConvTranspose crops at the beginning of each axis of its full result."""
    rank = len(size)
    auto = str(ctx.attr("auto_pad", "NOTSET") or "NOTSET")
    if not ctx.attr("output_shape") and auto in ("NOTSET", "VALID"):
        return tuple((ctx.attr("pads") or (0,) * rank)[:rank]) if auto == "NOTSET" else (0,) * rank
    extra = ctx.attr("output_padding") or (0,) * rank
    total = [
        max(0, (n - 1) * s + (k - 1) * d + 1 + e - o)
        for n, s, k, d, e, o in zip(size, strides, kernel, dilations, extra, out, strict=True)
    ]
    return tuple(t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total)


@gradient("ConvFilterGrad", domain="xrt")
def conv_filter_grad(ctx: Backward) -> Any:
    """The operator is linear in each of its inputs, as Conv is."""
    x, dy = ctx.inputs
    shape = ctx.shape(ctx.outputs[0])
    group = int(ctx.attr("group", 1))
    over = windows(ctx, ctx.shape(x)[2:], shape[2:])
    by_x = input_gradient(dy, ctx.grad, over, group) if ctx.wants(0) else None
    by_dy = ops.Conv(x, ctx.grad, **_attributes(over, group)) if ctx.wants(1) else None
    return by_x, by_dy
