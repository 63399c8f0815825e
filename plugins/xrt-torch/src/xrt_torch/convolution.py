"""Gradients of convolutions. That of the filter is an operator of its own, `xrt.conv_filter_grad`, which is XRT's
ConvFilterGrad: as a convolution with the images as channels, engines would take it in a form that is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from xrt_torch.pooling import widened

aten = torch.ops.aten


@torch.library.custom_op("xrt::conv_filter_grad", mutates_args=())
def conv_filter_grad(
    x: Tensor,
    grad: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution by its filter. x: its input [n, channels, ...]; grad: that of its result
    [n, filters, ...]; the others as of the convolution, one number for each axis.

    Returns [filters, channels / groups, *kernel].
    """
    like = x.new_empty([grad.shape[1], x.shape[1] // groups, *kernel])
    mask, none = [False, True, False], [0] * len(kernel)
    made = aten.convolution_backward(grad, x, like, None, stride, padding, dilation, False, none, groups, mask)[1]
    return made.contiguous()


@conv_filter_grad.register_fake
def _(
    x: Tensor,
    grad: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return x.new_empty([grad.shape[1], x.shape[1] // groups, *kernel])


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of the input is the transposed convolution."""
    n = x.dim() - 2
    stride, padding, dilation = (widened(a, n) for a in (stride, padding, dilation))
    kernel = weight.shape[2:]
    # windows that begin in what `output_padding` added, and stand for no element of the input
    more = [extra // s if transposed else 0 for extra, s in zip(widened(output_padding, n), stride, strict=True)]
    to_input = to_weight = to_bias = None
    if mask[0]:
        rest = [0] * n
        if not transposed:
            rest = [
                x.shape[2 + i]
                - ((grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1)
                for i in range(n)
            ]
        to_input = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, rest, groups)
        for i, m in enumerate(more):
            to_input = to_input.narrow(2 + i, 0, x.shape[2 + i]) if m else to_input
    if mask[1]:
        large, small = (grad, x) if transposed else (x, grad)
        if any(more):
            small = aten.constant_pad_nd(small, [side for m in reversed(more) for side in (0, m)])
        to_weight = torch.ops.xrt.conv_filter_grad.default(large, small, kernel, stride, padding, dilation, groups)
    if mask[2]:
        to_bias = grad.sum([0, *range(2, 2 + n)])
    return to_input, to_weight, to_bias


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operator -> function."""
    return {aten.convolution_backward.default: _backward}
