"""Decompositions: which ATen operators are taken apart before translation, and into what.

Core ATen operators stay whole, because torchlib translates them and graphs stay small. What torchlib lacks is written
here in terms of operators that it has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_KEPT = (aten.bernoulli,)  # run by torch itself, so that a seed gives the numbers of eager


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Operator -> its decomposition."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    made = dict(core_aten_decompositions().items())
    made.update(
        get_decompositions(
            [
                aten._adaptive_avg_pool2d,
                aten._native_batch_norm_legit_functional,
                aten._scaled_dot_product_flash_attention_for_cpu,
                aten.embedding_dense_backward,
                aten.native_group_norm_backward,
                aten.native_layer_norm_backward,
                aten.var.correction,
                aten.var_mean.correction,
            ]
        )
    )
    for packet in _KEPT:
        for name in packet.overloads():
            made.pop(getattr(packet, name), None)
    made[aten.native_dropout.default] = _dropout
    made[aten.native_layer_norm.default] = _layer_norm
    made[aten.squeeze.dims] = _squeeze
    made[aten.convolution_backward.default] = _convolution_backward
    made[aten.max_pool2d_with_indices_backward.default] = _max_pool2d_backward
    made[aten.avg_pool2d_backward.default] = _avg_pool2d_backward
    made[aten._adaptive_avg_pool2d_backward.default] = _adaptive_avg_pool2d_backward
    made[aten.copy.default] = _copy
    made[aten.empty_permuted.default] = _empty_permuted
    return made


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The mask depends on no data, so that all masks of a graph are drawn before the rest runs."""
    if train is False or p == 0:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool, device=x.device)
    drawn = aten.bernoulli.p(torch.empty(x.shape, dtype=x.dtype, device=x.device), 1 - p)
    return x * drawn * (1 / (1 - p) if p < 1 else 0.0), drawn.to(torch.bool)


def _layer_norm(x: Tensor, *rest: Any) -> Any:
    """ONNX's operator gives mean and deviation in float32: it is for narrower inputs."""
    if x.dtype is not torch.float64:
        return NotImplemented
    from torch._refs import native_layer_norm

    return native_layer_norm(x, *rest)


def _squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    gone = {d % x.dim() for d in dims} if x.dim() else set()
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone or n != 1])


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape).clone()


def _empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **given: Any) -> Tensor:
    order = [physical_layout.index(i) for i in range(len(size))]
    return torch.empty([size[d] for d in physical_layout], **given).permute(order)


def _convolution_backward(
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
    """The gradient of the input is the transposed convolution, that of the weight a convolution of the input with the
    gradient, with stride and dilation exchanged."""
    n = x.dim() - 2
    stride, padding, dilation = (_wide(a, n) for a in (stride, padding, dilation))
    kernel = weight.shape[2:]
    to_input = to_weight = to_bias = None
    if mask[0]:
        if transposed:
            to_input = aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * n, groups)
        else:
            rest = [
                x.shape[2 + i]
                - ((grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1)
                for i in range(n)
            ]
            to_input = aten.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups)
    if mask[1]:
        large, small = (grad, x) if transposed else (x, grad)
        batch, channels = large.shape[:2]
        one = large.reshape(batch, groups, channels // groups, *large.shape[2:])
        one = one.permute(2, 1, 0, *range(3, 3 + n)).reshape(channels // groups, groups * batch, *large.shape[2:])
        made = aten.convolution(one, small.transpose(0, 1), None, dilation, padding, stride, False, [0] * n, groups)
        for i in range(n):
            made = made.narrow(2 + i, 0, kernel[i])
        to_weight = made.transpose(0, 1)
    if mask[2]:
        to_bias = grad.sum([0, *range(2, 2 + n)])
    return to_input, to_weight, to_bias


def _wide(given: Sequence[int], n: int) -> list[int]:
    return list(given) * n if len(given) == 1 else list(given)


def _max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    flat = [*x.shape[:-2], x.shape[-2] * x.shape[-1]]
    at = indices.reshape([*x.shape[:-2], -1])
    zeros = torch.zeros(flat, dtype=grad.dtype, device=grad.device)
    return zeros.scatter_add(-1, at, grad.reshape(at.shape)).reshape(x.shape)


def _avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """A transposed depthwise convolution with ones."""
    kernel, padding = _wide(kernel, 2), _wide(padding, 2)
    stride = _wide(stride, 2) if stride else kernel
    if ceil_mode or (any(padding) and not count_include_pad and divisor_override is None):
        return NotImplemented  # windows of different sizes: torch runs it
    channels = x.shape[-3]
    ones = torch.ones([channels, 1, *kernel], dtype=grad.dtype, device=grad.device)
    scaled = grad / float(divisor_override or math.prod(kernel))
    whole = scaled if x.dim() == 4 else scaled.unsqueeze(0)
    rest = [x.shape[i - 2] - ((grad.shape[i - 2] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in range(2)]
    made = aten.convolution(whole, ones, None, stride, padding, [1, 1], True, rest, channels)
    return made.reshape(x.shape)


def _adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Any:
    """Where all windows are of one size: each gradient spread over its window."""
    sizes = [(x.shape[d], grad.shape[d]) for d in (-2, -1)]
    if any(n % m for n, m in sizes):
        return NotImplemented
    (h, oh), (w, ow) = sizes
    lead = list(x.shape[:-2])
    spread = (grad / float((h // oh) * (w // ow))).reshape([*lead, oh, 1, ow, 1])
    return spread.expand([*lead, oh, h // oh, ow, w // ow]).reshape(x.shape)
