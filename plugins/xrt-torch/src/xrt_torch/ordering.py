"""Order and counting: sorts whose equal elements keep their order, what is made of them, and histograms.

Where torch leaves open which of equal elements comes first, here the first one does, as in ONNX's TopK. That is one of
the orders that torch may give, and the graph that runs in eager has the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_MOST_COMPARED: Final = 1 << 24
_TOPK: Final = (torch.float32, torch.float64)
"""What torchlib's TopK takes as it is: equal elements are rare."""


def _without_dimensions(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.zeros([], dtype=torch.int64, device=x.device)


OF_ANY_ORDER = (aten.topk.default, aten.sort.stable)
"""Operators, of what the decompositions here leave, in whose place torch may give equal elements another order."""


def chooses_order(graph: torch.fx.Graph) -> bool:
    """Whether torch chooses the order of equal elements anywhere in a graph."""
    return any(n.target in OF_ANY_ORDER for n in graph.nodes)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """The stable sort."""
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def sort_stable(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    """The stable sort, of integers where ONNX does not sort the type."""
    if not x.dim():
        return _without_dimensions(x)
    if x.dtype is torch.bool:
        values, indices = aten.sort.stable(x.to(torch.int32), stable=True, dim=dim, descending=descending)
        return values.to(torch.bool), indices
    if x.dtype is torch.bfloat16:
        values, indices = aten.sort.stable(x.to(torch.float32), stable=True, dim=dim, descending=descending)
        return values.to(torch.bfloat16), indices
    return NotImplemented if stable else aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Of types with many equal elements the first of a stable sort."""
    if not x.dim():
        return _without_dimensions(x)
    if x.dtype in _TOPK:
        return NotImplemented
    values, indices = aten.sort.stable(x, stable=True, dim=dim, descending=largest)
    return values.narrow(dim, 0, k).clone(), indices.narrow(dim, 0, k).clone()


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent element, of several the least, and the last place where it stands: all pairs are compared."""
    if not x.dim():
        return _without_dimensions(x)
    n = x.shape[dim]
    if not n or n * x.numel() > _MOST_COMPARED:
        return NotImplemented
    last = x.movedim(dim, -1)
    kind = last.to(torch.int32) if x.dtype is torch.bool else last
    counts = (kind.unsqueeze(-1) == kind.unsqueeze(-2)).sum(-1)
    frequent = counts == counts.amax(-1, keepdim=True)
    largest = math.inf if kind.dtype.is_floating_point else torch.iinfo(kind.dtype).max
    least = torch.where(frequent, kind, largest).amin(-1, keepdim=True)
    place = torch.where(kind == least, torch.arange(n, device=x.device), -1).amax(-1, keepdim=True)
    found = torch.gather(last, -1, place).movedim(-1, dim), place.movedim(-1, dim)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _counted(place: Tensor, inside: Tensor, weight: Tensor | None, bins: int, dtype: torch.dtype) -> Tensor:
    """Weights added up by bin."""
    each = inside.to(dtype) if weight is None else torch.where(inside, weight.reshape(-1), 0.0).to(dtype)
    return torch.zeros([bins], dtype=dtype).scatter_add(0, torch.clamp(place, 0, bins - 1), each)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Elements counted in bins of one width; those outside are not."""
    if not x.numel() or not x.dtype.is_floating_point:
        return NotImplemented
    flat = x.reshape(-1) if x.dtype in _TOPK else x.reshape(-1).to(torch.float32)
    low, high = torch.full([], min, dtype=flat.dtype), torch.full([], max, dtype=flat.dtype)
    if min == max:
        low, high = flat.amin(), flat.amax()
        same = (low == high).to(flat.dtype)
        low, high = low - same, high + same
    place = ((flat - low) * bins / (high - low)).to(torch.int64)
    return _counted(place, (flat >= low) & (flat <= high), None, bins, flat.dtype).to(x.dtype)


def _edges(x: Tensor, bins: int, range: Sequence[float] | None) -> Tensor:
    """Edges at equal distances, from the least to the largest element where no range is given."""
    if range is None and not x.numel():
        range = (0.0, 1.0)
    if range is not None:
        low, high = range
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
        return torch.linspace(low, high, bins + 1, dtype=x.dtype)
    first, last = x.amin(), x.amax()
    half = (first == last).to(x.dtype) / 2
    first, last = first - half, last + half
    step, at = (last - first) / bins, torch.arange(bins + 1, dtype=x.dtype)
    return torch.where(at < (bins + 1) // 2, first + step * at, last - step * (bins - at))


def _place(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each element, and whether it is within the edges. The last bin has its upper edge too."""
    place = torch.clamp((edges <= x.unsqueeze(1)).sum(1) - 1, 0, edges.numel() - 2)
    return place, (x >= edges[0]) & (x <= edges[-1])


def histogram_of_bins(x: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False) -> Any:
    """Elements counted between edges that are given: all are compared with all."""
    flat = x.reshape(-1)
    if bins.numel() * flat.numel() > _MOST_COMPARED:
        return NotImplemented
    place, inside = _place(flat, bins)
    made = _counted(place, inside, weight, bins.numel() - 1, x.dtype)
    return made / made.sum() / (bins[1:] - bins[:-1]) if density else made, bins.clone()


def histogram(
    x: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    """The same with edges at equal distances."""
    return histogram_of_bins(x, _edges(x, bins, range), weight=weight, density=density)


def histogramdd_of_bins(
    x: Tensor, bins: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Any:
    """Points counted in a grid of bins. x: floats [..., axes]; bins: the edges along each axis."""
    points = x.reshape(-1, x.shape[-1])
    if sum(b.numel() for b in bins) * points.shape[0] > _MOST_COMPARED:
        return NotImplemented
    place, inside = _place(points.select(1, 0), bins[0])
    for d, edges in list(enumerate(bins))[1:]:
        along, within = _place(points.select(1, d), edges)
        place, inside = place * (edges.numel() - 1) + along, inside & within
    sizes = [b.numel() - 1 for b in bins]
    made = _counted(place, inside, weight, math.prod(sizes), x.dtype).reshape(sizes)
    if not density:
        return made
    made = made / made.sum()
    for d, edges in enumerate(bins):
        made = made / (edges[1:] - edges[:-1]).reshape([-1, *[1] * (len(bins) - 1 - d)])
    return made


def histogramdd_edges(
    x: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    """The edges along each axis."""
    points = x.reshape(-1, x.shape[-1])
    return [
        _edges(points.select(1, d), n, None if range is None else range[2 * d : 2 * d + 2]) for d, n in enumerate(bins)
    ]


def histogramdd(
    x: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    """Points counted in a grid whose edges have equal distances along each axis."""
    return histogramdd_of_bins(x, histogramdd_edges(x, bins, range=range), weight=weight, density=density)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of order and counting."""
    return {
        aten._histogramdd_bin_edges.default: histogramdd_edges,
        aten._histogramdd_from_bin_cts.default: histogramdd,
        aten._histogramdd_from_bin_tensors.default: histogramdd_of_bins,
        aten.histc.default: histc,
        aten.histogram.bin_ct: histogram,
        aten.histogram.bins_tensor: histogram_of_bins,
        aten.mode.default: mode,
        aten.sort.default: sort,
        aten.sort.stable: sort_stable,
        aten.topk.default: topk,
    }
