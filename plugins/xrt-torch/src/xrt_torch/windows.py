"""Windows: images unfolded into the patches of windows, patches added up to images, and the gradient of `unfold`.

Torch takes them apart into gathers and scatters by indices, one scatter for each element of a window; where windows are
small, slices and sums of what is shifted are what engines are quick at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from xrt_torch.pooling import widened

aten = torch.ops.aten
_MOST: Final = 64  # slices, or sums


def _added(x: Tensor, step: int) -> Tensor:
    """Windows [..., n, size] that begin at every step-th place, added up: [..., (n - 1) * step + size]."""
    n, size = x.shape[-2:]
    count = -(-size // step)
    blocks = torch.nn.functional.pad(x, (0, count * step - size)).unflatten(-1, (count, step))
    made: Any = None
    for i in range(count):
        shifted = torch.nn.functional.pad(blocks.select(-2, i).flatten(-2), (i * step, (count - 1 - i) * step))
        made = shifted if made is None else made + shifted
    return made.narrow(-1, 0, (n - 1) * step + size)  # type: ignore[no-any-return]


def _is_static(*numbers: Any) -> bool:
    return all(isinstance(n, int) for n in numbers)


def _unfold_backward(
    decomposition: Callable[..., Tensor], grad: Tensor, sizes: Sequence[int], dim: int, size: int, step: int
) -> Tensor:
    """grad: of the windows along a dimension, as `Tensor.unfold` gives them."""
    if not sizes or not grad.numel() or not _is_static(*sizes, *grad.shape) or size > _MOST * step:
        return decomposition(grad, sizes, dim, size, step)
    made = _added(grad.movedim(dim % len(sizes), -2), step)
    rest = sizes[dim] - made.shape[-1]
    return torch.nn.functional.pad(made, (0, rest)).movedim(-1, dim % len(sizes))


def _im2col(
    decomposition: Callable[..., Tensor],
    x: Tensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Images [n, c, h, w], or one without n -> patches [n, c * kernel, windows]."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (widened(a, 2) for a in (kernel_size, dilation, padding, stride))
    if kh * kw > _MOST or not _is_static(*x.shape):
        return decomposition(x, kernel_size, dilation, padding, stride)
    x = torch.nn.functional.pad(x, (pw, pw, ph, ph))
    oh, ow = (x.shape[-2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[-1] - dw * (kw - 1) - 1) // sw + 1
    parts = [
        x[..., i * dh : i * dh + sh * (oh - 1) + 1 : sh, j * dw : j * dw + sw * (ow - 1) + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return torch.stack(parts, -3).flatten(-2).flatten(-3, -2)


def _col2im(
    decomposition: Callable[..., Tensor],
    x: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Patches [n, c * kernel, windows], or of one image without n, added up to images [n, c, *output_size]."""
    (kh, kw), (ph, pw), (sh, sw) = (widened(a, 2) for a in (kernel_size, padding, stride))
    if any(d != 1 for d in dilation) or -(-kh // sh) * -(-kw // sw) > _MOST or not _is_static(*x.shape, *output_size):
        return decomposition(x, output_size, kernel_size, dilation, padding, stride)
    h, w = output_size[0] + 2 * ph, output_size[1] + 2 * pw
    oh, ow = (h - kh) // sh + 1, (w - kw) // sw + 1
    patches = x.unflatten(-1, (oh, ow)).unflatten(-3, (-1, kh, kw))  # [..., kh, kw, oh, ow]
    rows = _added(patches.transpose(-3, -2).transpose(-2, -1), sw)  # [..., kh, oh, columns]
    made = _added(rows.movedim(-1, -3).transpose(-2, -1), sh).transpose(-2, -1)
    made = torch.nn.functional.pad(made, (0, w - made.shape[-1], 0, h - made.shape[-2]))
    return made[..., ph : ph + output_size[0], pw : pw + output_size[1]]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of windows that are fewer operators than torch makes of them."""
    from torch._decomp import get_decompositions

    own = {
        aten.unfold_backward.default: _unfold_backward,
        aten.im2col.default: _im2col,
        aten.col2im.default: _col2im,
    }
    known = get_decompositions(list(own))
    return {operator: functools.partial(made, known[operator]) for operator, made in own.items()}
