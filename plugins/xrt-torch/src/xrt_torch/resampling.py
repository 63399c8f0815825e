"""Resampling of images and volumes at any places: `grid_sample` and its gradients, and resizing with antialiasing.

A sample is a sum over taps, elements of the input beside its place: along each axis one (nearest), two (linear) or four
(cubic), whose weights are multiplied.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_NARROW: Final = (torch.float16, torch.bfloat16)
"""Floats in which torch rounds the places of a grid, so that only torch finds its samples."""
_LINEAR: Final = 0
_NEAREST: Final = 1
_BORDER: Final = 1
_REFLECTION: Final = 2
_CUBIC: Final = -0.75
"""The parameter of torch's cubic convolution."""


class _Tap(NamedTuple):
    place: Tensor
    weight: Any
    slope: Any
    """The derivative of the weight by the grid's number."""


def _reflected(place: Tensor, low: float, span: float) -> tuple[Tensor, Any]:
    """Places mirrored at both ends, and the derivative by the place."""
    if not span:
        return torch.zeros_like(place), 0.0
    away = place - low
    distance = away.abs()
    extra = torch.fmod(distance, span)
    odd = torch.floor(distance / span) % 2 == 1
    direction = torch.where(away < 0, -1.0, 1.0).to(place.dtype)
    return torch.where(odd, span - extra, extra) + low, torch.where(odd, -direction, direction)


def _bounded(place: Tensor, size: int, padding: int, align: bool) -> tuple[Tensor, Any]:
    """Places within the input, as the padding wants it, and the derivative by the place."""
    slope: Any = 1.0
    if padding == _REFLECTION:
        low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
        place, slope = _reflected(place, low, span)
    if padding in (_BORDER, _REFLECTION):
        within = (place > 0) & (place < size - 1)
        place, slope = torch.clamp(place, 0, size - 1), torch.where(within, slope, 0.0)
        place = torch.where(torch.isnan(place), 0.0, place)
    return place, slope


def _taps(grid: Tensor, size: int, interpolation: int, padding: int, align: bool) -> list[_Tap]:
    """The taps along one axis. grid: numbers from -1 to 1."""
    scale = (size - 1) / 2 if align else size / 2
    place = (grid + 1) * scale if align else ((grid + 1) * size - 1) / 2
    if interpolation in (_LINEAR, _NEAREST):
        place, slope = _bounded(place, size, padding, align)
        if interpolation == _NEAREST:
            return [_Tap(torch.round(place), 1.0, None)]
        low = torch.floor(place)
        part = place - low
        return [_Tap(low, 1 - part, -scale * slope), _Tap(low + 1, part, scale * slope)]
    low = torch.floor(place)
    part, a = place - low, _CUBIC
    made = []
    for i in range(-1, 3):
        d = (part - i) if i <= 0 else (i - part)
        if i in (0, 1):
            weight = ((a + 2) * d - (a + 3)) * d * d + 1
            slope = (3 * (a + 2) * d - 2 * (a + 3)) * d
        else:
            weight = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            slope = (3 * a * d - 10 * a) * d + 8 * a
        sign = scale if i <= 0 else -scale
        made.append(_Tap(_bounded(low + i, size, padding, align)[0], weight, slope * sign))
    return made


def _combined(x: Tensor, grid: Tensor, interpolation: int, padding: int, align: bool) -> Any:
    """For each combination of taps: its taps, by the axes of x, where it is in x made flat, and whether it is there."""
    sizes = x.shape[2:]
    n = len(sizes)
    flat = grid.reshape(grid.shape[0], -1, n)
    axes = [_taps(flat.select(-1, n - 1 - d), sizes[d], interpolation, padding, align) for d in range(n)]
    for taps in itertools.product(*axes):
        index: Any = 0
        inside: Any = True
        for tap, size in zip(taps, sizes, strict=True):
            here = (tap.place >= 0) & (tap.place < size)
            inside = here if inside is True else inside & here
            index = index * size + torch.where(here, tap.place, 0.0).to(torch.int64)
        yield taps, index.unsqueeze(1).expand(-1, x.shape[1], -1), inside.unsqueeze(1)


def _weight(taps: Sequence[_Tap], slope_of: int | None = None) -> Any:
    """The product of the weights; with the slope of one axis in place of its weight."""
    made: Any = None
    for d, tap in enumerate(taps):
        factor = tap.slope if d == slope_of else tap.weight
        made = factor if made is None else made * factor
    return made


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Narrow floats as float32: torch's kernels compute with those."""
    return [t.to(torch.float32) if t.dtype in _NARROW else t for t in tensors]


def grid_sampler(x: Tensor, grid: Tensor, interpolation: int, padding: int, align: bool) -> Tensor:
    """Samples of x at the places of the grid. x: floats [n, c, ...]; grid: [n, ..., axes] -> [n, c, ...]."""
    values = x.reshape(x.shape[0], x.shape[1], -1)
    made: Any = None
    for taps, index, inside in _combined(x, grid, interpolation, padding, align):
        value = torch.where(inside, torch.gather(values, 2, index), 0.0)
        weight = _weight(taps)
        value = value * weight.unsqueeze(1) if isinstance(weight, Tensor) else value
        made = value if made is None else made + value
    return made.reshape(x.shape[0], x.shape[1], *grid.shape[1:-1])  # type: ignore[no-any-return]


def grid_sampler_backward(
    grad: Tensor, x: Tensor, grid: Tensor, interpolation: int, padding: int, align: bool, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor]:
    """The gradients of `grid_sampler` by x, where output_mask wants it, and by the grid."""
    n, axes = x.shape[0], x.dim() - 2
    grad = grad.reshape(n, x.shape[1], -1)
    values = x.reshape(n, x.shape[1], -1)
    to_x = torch.zeros_like(values)
    to_grid: list[Any] = [0.0] * axes
    for taps, index, inside in _combined(x, grid, interpolation, padding, align):
        masked = torch.where(inside, grad, 0.0)
        weight = _weight(taps)
        if output_mask[0]:
            part = masked * weight.unsqueeze(1) if isinstance(weight, Tensor) else masked
            to_x = torch.scatter_add(to_x, 2, index, part)
        if interpolation != _NEAREST:
            along = (masked * torch.gather(values, 2, index)).sum(1)
            for d in range(axes):
                to_grid[d] = to_grid[d] + along * _weight(taps, d)
    if interpolation == _NEAREST:
        by_grid = torch.zeros_like(grid)
    else:
        by_grid = torch.stack(to_grid[::-1], -1).reshape(grid.shape)
    return to_x.reshape(x.shape) if output_mask[0] else None, by_grid


def _triangle(x: Tensor) -> Tensor:
    return torch.clamp(1 - x.abs(), min=0)


def _cubic(x: Tensor) -> Tensor:
    """The cubic convolution of R. Keys (1981), whose parameter is -0.5 where torch resizes with antialiasing."""
    a, d = -0.5, x.abs()
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, (((d - 5) * d + 8) * d - 4) * a
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _antialiased(size: int, wanted: int, cubic: bool, align: bool, factor: float | None, dtype: torch.dtype) -> Tensor:
    """The matrix that resizes `size` elements to `wanted`: filters, stretched to elements of the longer side."""
    if align:
        scale = (size - 1) / (wanted - 1) if wanted > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / wanted
    stretch = max(scale, 1.0)
    support = stretch * (2 if cubic else 1)
    centre = (torch.arange(wanted, dtype=torch.float64) + 0.5).unsqueeze(1) * scale
    first = torch.clamp(torch.floor(centre - support + 0.5), min=0)
    last = torch.clamp(torch.floor(centre + support + 0.5), max=size)
    at = torch.arange(size, dtype=torch.float64)
    weight = (_cubic if cubic else _triangle)((at - centre + 0.5) / stretch)
    weight = torch.where((at >= first) & (at < last), weight, 0.0)
    return (weight / weight.sum(1, keepdim=True)).to(dtype)


def _matrices(
    size: Sequence[int], wanted: Sequence[int], cubic: bool, align: bool, factors: Any, dtype: torch.dtype
) -> list[Tensor]:
    return [_antialiased(n, m, cubic, align, f, dtype) for n, m, f in zip(size, wanted, factors, strict=True)]


def _resized(
    cubic: bool,
    x: Tensor,
    size: Sequence[int],
    align: bool,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> Any:
    """Resizing of [n, c, h, w] with antialiasing: a matrix along each axis."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    (wide,) = _widened(x)
    rows, columns = _matrices(x.shape[-2:], size, cubic, align, (scale_h, scale_w), wide.dtype)
    return torch.matmul(torch.matmul(rows, wide), columns.t()).to(x.dtype)


def _resized_backward(
    cubic: bool,
    grad: Tensor,
    size: Sequence[int],
    given: Sequence[int],
    align: bool,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> Tensor:
    """The gradient of `_resized`: the matrices transposed."""
    (wide,) = _widened(grad)
    rows, columns = _matrices(given[-2:], size, cubic, align, (scale_h, scale_w), wide.dtype)
    return torch.matmul(torch.matmul(rows.t(), wide), columns).to(grad.dtype)


def _forward(x: Tensor, grid: Tensor, interpolation: int, padding: int, align: bool) -> Any:
    """Whole, as one operator of ONNX, where libraries agree on what it is: the nearest pixel of a place between two is
    that of torch's own roundings, and so is where a place is reflected to."""
    is_whole = x.dim() == 4 and interpolation == _LINEAR and padding != _REFLECTION
    if is_whole or not math.prod(x.shape) or x.dtype in _NARROW:
        return NotImplemented
    return grid_sampler(x, grid, interpolation, padding, align)


def _backward(grad: Tensor, x: Tensor, grid: Tensor, *how: Any) -> Any:
    return grid_sampler_backward(grad, x, grid, *how) if x.dtype not in _NARROW else NotImplemented


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of resampling that torchlib lacks, or gets wrong."""
    return {
        aten._upsample_bilinear2d_aa.default: functools.partial(_resized, False),
        aten._upsample_bilinear2d_aa_backward.default: functools.partial(_resized_backward, False),
        aten._upsample_bicubic2d_aa.default: functools.partial(_resized, True),
        aten._upsample_bicubic2d_aa_backward.default: functools.partial(_resized_backward, True),
        aten.grid_sampler_2d.default: _forward,
        aten.grid_sampler_2d_backward.default: _backward,
        aten.grid_sampler_3d.default: _forward,
        aten.grid_sampler_3d_backward.default: _backward,
    }
