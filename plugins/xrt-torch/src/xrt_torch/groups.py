"""Groups of rows: sums, means and extremes over rows that belong together: bags of embeddings, segments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_MOST_COMPARED: Final = 1 << 24
_SUM, _MEAN, _MAX = range(3)
"""What torch calls the modes of its embedding bags."""


def _bag_of(indices: Tensor, offsets: Tensor, bags: int) -> Tensor:
    """The bag that each index is in: as many bags begin at or before it. The last offset may be the end of all."""
    n = indices.shape[0]
    begins = torch.zeros([n + 1], dtype=torch.int64).scatter_add(
        0, offsets.to(torch.int64), torch.ones_like(offsets, dtype=torch.int64)
    )
    return torch.clamp(torch.cumsum(begins, 0).narrow(0, 0, n) - 1, 0, bags - 1)


def _added(count: int, places: Tensor, rows: Tensor) -> Tensor:
    """Rows added up by their places, `count` of them."""
    return torch.zeros([count, *rows.shape[1:]], dtype=rows.dtype).index_add(0, places, rows)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Rows of a table, weight, added up, averaged or compared by bags. indices: [n]; offsets: where the bags begin.

    Returns [bags, width], the bag of each index, the sizes of the bags, and, of maxima, the rows that they are from.
    """
    bags, n = offsets.shape[0] - int(include_last_offset), indices.shape[0]
    if not bags or not n or not weight.shape[1]:
        return NotImplemented
    bag = _bag_of(indices, offsets, bags)
    rows, kept = weight.index_select(0, indices), (indices != padding_idx).unsqueeze(1)
    size = _added(bags, bag, kept.to(torch.int64)).squeeze(1)
    if mode == _MAX:
        at = bag.unsqueeze(1).expand(rows.shape)
        lowest = torch.full([bags, weight.shape[1]], -math.inf, dtype=weight.dtype)
        most = lowest.scatter_reduce(0, at, torch.where(kept, rows, -math.inf).to(rows.dtype), "amax")
        found = kept & (rows == most.index_select(0, bag))
        place = torch.where(found, torch.arange(n).unsqueeze(1), n - 1)
        first = torch.full(most.shape, n - 1, dtype=torch.int64).scatter_reduce(0, at, place, "amin")
        sources = indices.index_select(0, first.reshape(-1)).reshape(most.shape)
        return torch.where(size.unsqueeze(1) > 0, most, 0.0).to(rows.dtype), bag, size, sources
    wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.to(torch.float32)
    wide = wide if per_sample_weights is None else wide * per_sample_weights.unsqueeze(1)
    made = _added(bags, bag, torch.where(kept, wide, 0.0).to(wide.dtype))
    made = made / torch.clamp(size, min=1).unsqueeze(1) if mode == _MEAN else made
    return made.to(weight.dtype), bag, size, torch.zeros_like(size)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table. grad: [bags, width]; indices: [n] -> [num_weights, width]."""
    if sparse or scale_grad_by_freq or not grad.numel():  # torch divides by frequencies of other rows, on CPUs
        return NotImplemented
    bags = grad.shape[0]
    if mode == _MAX:
        given = torch.where((bag_size > 0).unsqueeze(1), grad, 0.0).to(grad.dtype)
        zeros = torch.zeros([num_weights, grad.shape[1]], dtype=grad.dtype)
        return zeros.scatter_add(0, torch.clamp(maximum_indices.to(torch.int64), min=0), given)
    bag, indices = _bag_of(indices, offsets, bags), indices.to(torch.int64)
    kept = (indices != padding_idx).to(grad.dtype)
    share = kept if per_sample_weights is None else kept * per_sample_weights
    if mode == _MEAN:
        share = share / torch.clamp(_added(bags, bag, kept), min=1).index_select(0, bag)
    return _added(num_weights, indices, grad.index_select(0, bag) * share.unsqueeze(1))


def embedding_bag_per_sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Any:
    """The gradient of the weights that sums multiply rows with. Returns [n]."""
    if not grad.numel():
        return NotImplemented
    bag = _bag_of(indices, offsets, grad.shape[0])
    made = (grad.index_select(0, bag) * weight.index_select(0, indices)).sum(1)
    return torch.where(indices != padding_idx, made, 0.0).to(grad.dtype)


def _members(data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> Tensor | None:
    """Which rows belong to which segment: bool [..., segments, rows, 1...]; None where that were too many."""
    if offsets is not None:
        starts, ends = (
            offsets.narrow(axis, 0, offsets.shape[axis] - 1),
            offsets.narrow(axis, 1, offsets.shape[axis] - 1),
        )
    else:
        assert lengths is not None
        ends = torch.cumsum(lengths, axis)
        starts = ends - lengths
    if starts.numel() * data.numel() > _MOST_COMPARED * math.prod(data.shape[:axis]):
        return None
    at = torch.arange(data.shape[axis])
    made = (at >= starts.unsqueeze(-1)) & (at < ends.unsqueeze(-1))
    return made.reshape([*made.shape, *[1] * (data.dim() - axis - 1)])


_NEUTRAL: Final = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    """Consecutive rows along an axis reduced. data: floats [..., rows, ...] -> [..., segments, ...]."""
    members = _members(data, lengths, offsets, axis)
    if members is None:
        return NotImplemented
    first = _NEUTRAL[reduce] if initial is None else float(initial)
    each = torch.where(members, data.unsqueeze(axis), _NEUTRAL[reduce]).to(data.dtype)
    if reduce in ("max", "min"):
        made = (each.amax if reduce == "max" else each.amin)(axis + 1)
        return torch.where(torch.isnan(made), made, made.clamp(**{"min" if reduce == "max" else "max": first}))
    if reduce == "prod":
        return each.prod(axis + 1) * first
    made = each.sum(axis + 1) + first
    if reduce == "sum":
        return made
    count = members.sum(axis + 1).to(data.dtype)
    empty = math.nan if initial is None else first
    return torch.where(count > 0, made / torch.clamp(count, min=1), empty).to(data.dtype)


def segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Any:
    """The gradient by the data; equal extremes share it, and a product's is the product of the others."""
    members = _members(data, lengths, offsets, axis)
    if members is None:
        return NotImplemented
    grad, output, rows = grad.unsqueeze(axis + 1), output.unsqueeze(axis + 1), data.unsqueeze(axis)
    if reduce in ("max", "min"):
        takes = members & ((rows == output) | torch.isnan(rows))
        made = grad / torch.clamp(takes.sum(axis + 1, keepdim=True), min=1) * takes
    elif reduce == "prod":
        nil = members & (rows == 0)
        others = torch.where(members & ~nil, rows, 1.0).prod(axis + 1, keepdim=True)
        others = others * (1.0 if initial is None else float(initial))
        count = nil.sum(axis + 1, keepdim=True)
        share = torch.where(nil, others, others / torch.where(nil, 1.0, rows))
        made = grad * torch.where((count == 0) | (nil & (count == 1)), share, 0.0)
    else:
        count = members.sum(axis + 1, keepdim=True) if reduce == "mean" else torch.ones_like(grad)
        made = grad / count
    return torch.where(members, made, 0.0).sum(axis).to(data.dtype)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of bags and segments."""
    return {
        aten._embedding_bag.default: embedding_bag,
        aten._embedding_bag_forward_only.default: embedding_bag,
        aten._embedding_bag_backward.default: embedding_bag_backward,
        aten._embedding_bag_per_sample_weights_backward.default: embedding_bag_per_sample_weights_backward,
        aten._segment_reduce_backward.default: segment_reduce_backward,
        aten.segment_reduce.default: segment_reduce,
    }
