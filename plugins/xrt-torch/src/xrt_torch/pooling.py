"""Pooling: averages and maxima over windows, with their gradients, as far as torchlib has no translation of them.

Averages over windows of any sizes are products with matrices, one along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def widened(given: Sequence[int], n: int) -> list[int]:
    """One number for each of n axes; a single one holds for all."""
    return list(given) * n if len(given) == 1 else list(given)


def _windows(n: int, starts: Tensor, ends: Tensor, x: Tensor) -> Tensor:
    """The matrix with a row of ones per window over n elements. starts, ends: of the windows."""
    at = torch.arange(n, device=x.device)
    return ((at >= starts.unsqueeze(1)) & (at < ends.unsqueeze(1))).to(x.dtype)


def _adaptive(n: int, m: int, x: Tensor) -> Tensor:
    """The matrix that averages n elements to m."""
    i = torch.arange(m, device=x.device)
    starts, ends = i * n // m, ((i + 1) * n + m - 1) // m
    return _windows(n, starts, ends, x) / (ends - starts).unsqueeze(1).to(x.dtype)


def along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """A matrix applied along a dimension."""
    return torch.matmul(x.movedim(dim, -1), matrix.t()).movedim(-1, dim)


def _adaptive_avg_pool3d(x: Tensor, size: Sequence[int]) -> Tensor:
    sides = [(x.shape[d], m) for d, m in zip((-3, -2, -1), size, strict=True)]
    is_wide = x.dtype in (torch.float32, torch.float64)  # torch averages no others so
    if is_wide and x.numel() and all(m and n % m == 0 for n, m in sides):  # windows of one size
        return aten.avg_pool3d.default(x, [n // m for n, m in sides])
    for d, m in zip((-3, -2, -1), size, strict=True):
        x = along(x, d, _adaptive(x.shape[d], m, x))
    return x


def _adaptive_avg_pool_backward(grad: Tensor, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Each gradient spread over its window: at once where all windows are of one size."""
    if not any(x.shape[d] % grad.shape[d] for d in dims):
        sizes = [x.shape[d] // grad.shape[d] for d in dims]
        return _repeated(grad / float(math.prod(sizes)), sizes)
    for d in dims:
        grad = along(grad, d, _adaptive(x.shape[d], grad.shape[d], grad).t())
    return grad


def _repeated(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each element so many times, along each of the last dimensions."""
    lead, last = list(x.shape[: -len(sizes)]), x.shape[-len(sizes) :]
    pairs = list(zip(last, sizes, strict=True))
    wide = x.reshape([*lead, *(n for m, _ in pairs for n in (m, 1))])
    return wide.expand([*lead, *(n for pair in pairs for n in pair)]).reshape([*lead, *(m * k for m, k in pairs)])


def _adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _adaptive_avg_pool_backward(grad, x, (-2, -1))


def _adaptive_avg_pool3d_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _adaptive_avg_pool_backward(grad, x, (-3, -2, -1))


def _avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Only of integers, and with a divisor, which ONNX's operator does not have."""
    n = len(kernel)
    if x.dtype.is_floating_point and divisor_override is None:
        return NotImplemented
    if x.dtype.is_floating_point and not ceil_mode and n in (2, 3):  # all windows have as many elements
        pool = aten.avg_pool2d.default if n == 2 else aten.avg_pool3d.default
        return pool(x, kernel, stride, padding) * (math.prod(widened(kernel, n)) / divisor_override)
    counts = torch.ones([], dtype=x.dtype, device=x.device)
    for i, (k, s, p, size) in enumerate(_pooling(x, kernel, stride, padding, n)):
        starts = torch.arange(_pooled(size, k, s, p, ceil_mode), device=x.device) * s - p
        x = along(x, i - n, _windows(size, starts, starts + k, x))
        counted = _counted(starts, starts + k, size, p, count_include_pad).to(x.dtype)
        counts = counts.unsqueeze(-1) * counted
    divisor = counts if divisor_override is None else divisor_override
    if x.dtype.is_floating_point:
        return x / divisor
    divisor = torch.clamp(divisor, min=1) if isinstance(divisor, Tensor) else divisor  # which tells that it is no 0
    return torch.div(x, divisor, rounding_mode="trunc")


def _counted(starts: Tensor, ends: Tensor, size: int, p: int, count_include_pad: bool) -> Tensor:
    """The numbers of elements of windows."""
    if count_include_pad:
        return torch.clamp(ends, max=size + p) - starts
    return torch.clamp(ends, max=size) - torch.clamp(starts, min=0)


def _pooling(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], n: int
) -> list[tuple[int, int, int, int]]:
    kernel = widened(kernel, n)
    stride = widened(stride, n) if stride else kernel
    return list(zip(kernel, stride, widened(padding, n), x.shape[-n:], strict=True))


def _pooled(size: int, k: int, s: int, p: int, ceil_mode: bool) -> int:
    """The number of windows; the last one begins within the input or the padding before it."""
    made = (size + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
    return made - 1 if ceil_mode and (made - 1) * s >= size + p else made


def _avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Each gradient, divided by the size of its window, spread over it."""
    n = len(kernel)
    sides = _pooling(x, kernel, stride, padding, n)
    if all(k == s and not p and size % k == 0 for k, s, p, size in sides):  # windows side by side
        sizes = [k for k, *_ in sides]
        return _repeated(grad / float(divisor_override or math.prod(sizes)), sizes)
    for i, (k, s, p, size) in enumerate(sides):
        starts = torch.arange(grad.shape[i - n], device=x.device) * s - p
        ends = starts + k
        matrix = _windows(size, starts, ends, grad)
        if divisor_override is None:
            counted = _counted(starts, ends, size, p, count_include_pad)
            matrix = matrix / counted.unsqueeze(1).to(grad.dtype)
        grad = along(grad, i - n, matrix.t())
    return grad if divisor_override is None else grad / divisor_override


def _scatter_at_indices(grad: Tensor, x: Tensor, indices: Tensor, dims: int) -> Tensor:
    """The gradient of a maximum over windows of the last dimensions, whose places are known."""
    flat = [*x.shape[:-dims], math.prod(x.shape[-dims:])]
    at = indices.reshape([*x.shape[:-dims], -1])
    zeros = torch.zeros(flat, dtype=grad.dtype, device=grad.device)
    return zeros.scatter_add(-1, at, grad.reshape(at.shape)).reshape(x.shape)


def _max_pool2d_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return _scatter_at_indices(grad, x, rest[-1], 2)


def _max_pool3d_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return _scatter_at_indices(grad, x, rest[-1], 3)


def _adaptive_max_pool(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The elements of each window side by side, the last one repeated in those that are shorter than others."""
    n = len(size)
    lead, shape = list(x.shape[:-n]), list(x.shape[-n:])
    places, longest = [], []
    for total, m in zip(shape, size, strict=True):
        i = torch.arange(m, device=x.device)
        starts, ends = i * total // m, ((i + 1) * total + m - 1) // m
        longest.append(max(((j + 1) * total + m - 1) // m - j * total // m for j in range(m)))
        places.append(
            torch.minimum(starts.unsqueeze(1) + torch.arange(longest[-1], device=x.device), (ends - 1).unsqueeze(1))
        )
    flat: Any = 0
    for d in range(n):
        where = [1] * (2 * n)
        where[d], where[n + d] = size[d], longest[d]
        flat = flat * shape[d] + places[d].reshape(where)
    flat = flat.reshape([*size, -1])
    windows = x.reshape([*lead, -1]).index_select(-1, flat.reshape(-1)).reshape([*lead, *flat.shape])
    at = torch.argmax(windows, -1, keepdim=True)
    values = torch.gather(windows, -1, at).squeeze(-1)
    return values, torch.gather(flat.expand(windows.shape), -1, at).squeeze(-1)


def fractional_max_pool(x: Tensor, kernel: Sequence[int], size: Sequence[int], samples: Tensor) -> Any:
    """Windows whose places are drawn: samples has a number for each axis, of two axes that of the last one first."""
    if x.dtype not in (torch.float32, torch.float64):  # places are rounded as the type rounds
        return NotImplemented
    n = len(size)
    lead, shape = list(x.shape[:-n]), list(x.shape[-n:])
    samples = samples.reshape([*lead, n])
    flat: Any = 0
    for d, (total, k, m) in enumerate(zip(shape, kernel, size, strict=True)):
        sample = samples.narrow(-1, n - 1 - d if n == 2 else d, 1)
        ratio = torch.full([], (total - k) / max(m - 1, 1), dtype=x.dtype)
        at = torch.arange(m - 1, dtype=x.dtype)
        starts = torch.trunc((at + sample) * ratio) - torch.trunc(sample * ratio)
        starts = torch.cat([starts.to(torch.int64), torch.full([*lead, 1], total - k, dtype=torch.int64)], -1)
        where = [1] * (2 * n)
        where[d], where[n + d] = m, k
        flat = flat * shape[d] + (starts.unsqueeze(-1) + torch.arange(k)).reshape([*lead, *where])
    flat = flat.reshape([*lead, math.prod(size), math.prod(kernel)])
    windows = torch.gather(x.reshape([*lead, -1]), -1, flat.reshape([*lead, -1])).reshape(flat.shape)
    at = torch.argmax(windows, -1, keepdim=True)
    values, indices = (torch.gather(t, -1, at).reshape([*lead, *size]) for t in (windows, flat))
    return values, indices


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of pooling."""
    return {
        aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
        aten._adaptive_avg_pool3d.default: _adaptive_avg_pool3d,
        aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool3d_backward,
        aten.adaptive_max_pool2d.default: _adaptive_max_pool,
        aten.adaptive_max_pool3d.default: _adaptive_max_pool,
        aten.adaptive_max_pool2d_backward.default: _max_pool2d_backward,
        aten.adaptive_max_pool3d_backward.default: _max_pool3d_backward,
        aten.avg_pool2d.default: _avg_pool,
        aten.avg_pool2d_backward.default: _avg_pool_backward,
        aten.avg_pool3d.default: _avg_pool,
        aten.avg_pool3d_backward.default: _avg_pool_backward,
        aten.fractional_max_pool2d.default: fractional_max_pool,
        aten.fractional_max_pool3d.default: fractional_max_pool,
        aten.fractional_max_pool2d_backward.default: _max_pool2d_backward,
        aten.fractional_max_pool3d_backward.default: _max_pool3d_backward,
        aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
        aten.max_pool3d_with_indices_backward.default: _max_pool3d_backward,
    }
