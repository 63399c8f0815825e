"""Kernels of object detection: RoiAlign, MaxRoiPool, NonMaxSuppression."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels.namespace import map_rows, narrow, widen
from xrt_core.kernels.registry import OpContext, kernel


def _samples(xp: Any, start: Any, length: Any, bins: int, count: int, size: int) -> tuple[Any, Any, Any, Any]:
    """Along one axis of a region: lower and upper pixel of each sample and their weights, all (bins * count,).

    Samples more than one pixel outside the image weigh 0; closer ones are moved to the border.
    """
    step = length / bins
    part = (np.arange(count) + 0.5) / max(count, 1)
    at = xp.reshape(start + xp.asarray(np.arange(bins)[:, None] + part[None, :], step.dtype) * step, (-1,))
    valid = ((at >= -1) & (at <= size)).astype(at.dtype)
    at = xp.clip(at, 0, size - 1)
    low = xp.floor(xp.fmax(at, 0)).astype(np.int64)
    upper = xp.minimum(low + 1, size - 1)
    part_up = at - low.astype(at.dtype)
    return low, upper, (1 - part_up) * valid, part_up * valid


def _fixed(node: Node) -> str | None:
    if node.attributes.get("sampling_ratio", 0):
        return None
    return "the number of samples depends on the regions' sizes; set the attribute sampling_ratio"


@kernel("RoiAlign", dynamic=_fixed)
def roi_align(ctx: OpContext, x: Any, rois: Any, batch_indices: Any) -> Any:
    """RoiAlign: regions are shifted by half a pixel from version 16 unless `output_half_pixel`; before they are
    not, and are at least 1 wide. Mode max takes the largest weighted corner, as ONNX's reference does."""
    xp = ctx.xp
    bins = ctx.attr("output_height", 1), ctx.attr("output_width", 1)
    ratio, average = ctx.attr("sampling_ratio", 0), ctx.attr("mode", "avg") == "avg"
    half = ctx.version >= 16 and ctx.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    channels, dims = x.shape[1], x.shape[2:]
    if rois.shape[0] == 0:
        return xp.zeros((0, channels, *bins), x.dtype)
    boxes = widen(rois) * ctx.attr("spatial_scale", 1.0) - (0.5 if half else 0.0)
    image = widen(x)

    def region(box: Any, which: Any) -> Any:
        picked = xp.take(image, which, axis=0)
        axes, counts = [], []
        for axis in (0, 1):
            start = box[1 - axis]
            length = box[3 - axis] - start
            if not half:
                length = xp.maximum(length, xp.asarray(1, length.dtype))
            count = ratio or max(int(np.ceil(length / bins[axis])), 0)
            counts.append(count)
            axes.append(_samples(xp, start, length, bins[axis], count, dims[axis]))
        if not all(counts):
            return xp.zeros((channels, *bins), image.dtype)
        (top, bottom, wt, wb), (left, right, wl, wr) = axes
        split = (channels, bins[0], counts[0], bins[1], counts[1])
        if average:
            rows = picked[:, top] * wt[:, None] + picked[:, bottom] * wb[:, None]
            both = rows[:, :, left] * wl + rows[:, :, right] * wr
            return xp.mean(xp.reshape(both, split), axis=(2, 4))
        corners = [
            picked[:, r][:, :, c] * (wr_[:, None] * wc) for r, wr_ in ((top, wt), (bottom, wb))
            for c, wc in ((left, wl), (right, wr))
        ]  # fmt: skip
        return xp.max(xp.reshape(functools.reduce(xp.maximum, corners), split), axis=(2, 4))

    return narrow(map_rows(xp, region, boxes, batch_indices), x.dtype)


@kernel("MaxRoiPool")
def max_roi_pool(ctx: OpContext, x: Any, rois: Any) -> Any:
    """MaxRoiPool: the maximum over each of `pooled_shape` cells of a region [batch, x1, y1, x2, y2]; empty ones are 0.

    Corners are scaled and rounded half away from zero, both included.
    """
    xp, bins, dims = ctx.xp, ctx.attr("pooled_shape"), x.shape[2:]
    if rois.shape[0] == 0:
        return xp.zeros((0, x.shape[1], *bins), x.dtype)
    image = widen(x)
    scaled = widen(rois)[:, 1:] * ctx.attr("spatial_scale", 1.0)
    corners = (xp.sign(scaled) * xp.floor(xp.abs(scaled) + 0.5)).astype(np.int64)

    def cells(box: Any, axis: int) -> tuple[Any, Any]:
        start = box[1 - axis]
        step = xp.maximum(box[3 - axis] - start + 1, 1) / bins[axis]
        first = xp.floor(xp.arange(bins[axis]) * step).astype(np.int64) + start
        last = xp.ceil(xp.arange(1, bins[axis] + 1) * step).astype(np.int64) + start
        return xp.clip(first, 0, dims[axis]), xp.clip(last, 0, dims[axis])

    def reduce(values: Any, first: Any, last: Any, axis: int) -> Any:
        """The maxima of values[..., first:last, ...] along `axis`, stacked there; -inf for an empty range."""
        lowest = xp.asarray(-np.inf, values.dtype)
        if xp is not np:  # ranges known on the device only
            at = xp.arange(values.shape[axis])
            inside = [((at >= a) & (at < b))[:, None] if axis == 1 else (at >= a) & (at < b)
                      for a, b in zip(first, last, strict=True)]  # fmt: skip
            return xp.stack([xp.max(xp.where(i, values, lowest), axis=axis) for i in inside], axis=axis)
        parts = [
            xp.max(values[(slice(None),) * axis + (slice(int(a), int(b)),)], axis=axis, initial=-np.inf)
            for a, b in zip(first, last, strict=True)
        ]
        return xp.stack(parts, axis=axis)

    def region(box: Any, which: Any) -> Any:
        (top, bottom), (left, right) = cells(box, 0), cells(box, 1)
        pooled = reduce(reduce(xp.take(image, which, axis=0), top, bottom, 1), left, right, 2)
        empty = (bottom <= top)[:, None] | (right <= left)[None, :]
        return xp.where(empty, xp.zeros((), pooled.dtype), pooled)

    return narrow(map_rows(xp, region, corners, rois[:, 0].astype(np.int64)), x.dtype)


def _extents(boxes: np.ndarray, centered: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper corners (boxes, 2), from any two opposite corners or from centre and size."""
    if centered:
        centre, half = boxes[:, :2], boxes[:, 2:] / 2
        return centre - half, centre + half
    return np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])


_BEST: Final = 128
"""Boxes that are compared with all that are left at a time."""
_PAIRS: Final = 1 << 21
"""Pairs that are compared at a time."""


def _apart(low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """The boxes in parts, each in their order, of which none shares anything with another: what lies between gaps along
    the first axis. Detectors move the boxes of each class to a place of their own."""
    by = np.argsort(low[:, 0], kind="stable")
    reach = np.maximum.accumulate(high[by, 0])  # NaN reaches everywhere
    parts = np.split(by, np.flatnonzero(low[by[1:], 0] >= reach[:-1]) + 1)
    return [np.sort(p) for p in parts]


def _selected(low: np.ndarray, high: np.ndarray, limit: int, overlap: float) -> np.ndarray:
    """The boxes that `_suppress` selects, part by part where that takes fewer comparisons."""
    count = len(low)
    if count > _BEST:
        parts = _apart(low, high)
        if len(parts) > 1 and sum(p.size**2 for p in parts) < count * min(count, 2 * limit):
            found = np.concatenate([p[_suppress(low[p], high[p], limit, overlap)] for p in parts])
            return np.sort(found)[:limit]
    return np.array(_suppress(low, high, limit, overlap), np.int64)


def _suppress(low: np.ndarray, high: np.ndarray, limit: int, overlap: float) -> list[int]:
    """Greedy selection from boxes, the best first: the best one left, then without those that overlap it by more than
    `overlap`."""
    area = np.prod(high - low, axis=1)

    def hits(some: np.ndarray, others: np.ndarray) -> np.ndarray:
        shared = np.ones((), low.dtype)
        for k in range(2):
            side = np.minimum(high[some, k, None], high[others, k]) - np.maximum(low[some, k, None], low[others, k])
            shared = shared * np.maximum(side, 0)
        union = area[some, None] + area[others] - shared
        real = (shared > 0) & (area[others] > 0) & (area[some, None] > 0) & (union > 0)
        hit: np.ndarray = real & (shared > overlap * union)
        return hit

    kept: list[int] = []
    order = np.arange(len(low))
    while order.size and len(kept) < limit:
        count = max(1, min(_BEST, _PAIRS // order.size))
        best, order = order[:count], order[count:]
        rows = np.packbits(hits(best, best), axis=1, bitorder="little")
        gone, chosen = 0, []
        for i, row in enumerate(rows):
            if not gone >> i & 1:
                chosen.append(i)
                gone |= int.from_bytes(row.tobytes(), "little")
        best = best[chosen]
        kept.extend(best.tolist())
        if order.size and len(kept) < limit:
            order = order[~hits(best, order).any(axis=0)]
    return kept[:limit]


@kernel("NonMaxSuppression", dynamic="the output's shape depends on the data")
def non_max_suppression(
    ctx: OpContext, boxes: Any, scores: Any, limit: Any = None, overlap: Any = None, floor: Any = None
) -> Any:
    """NonMaxSuppression: rows [batch, class, box] by falling score, the earlier box first among equals.

    Without `max_output_boxes_per_class` nothing is selected; a box of exactly the IOU threshold stays.
    """
    count = 0 if limit is None else int(np.asarray(limit).reshape(-1)[0])
    share = 0.0 if overlap is None else float(np.asarray(overlap).reshape(-1)[0])
    least = None if floor is None else float(np.asarray(floor).reshape(-1)[0])
    rows: list[tuple[int, int, int]] = []
    for b in range(scores.shape[0] if count > 0 else 0):
        low, high = _extents(boxes[b], bool(ctx.attr("center_point_box", 0)))
        for c in range(scores.shape[1]):
            order = np.argsort(-scores[b, c], kind="stable")
            if least is not None:
                order = order[scores[b, c][order] > least]
            chosen = order[_selected(low[order], high[order], count, share)]
            rows.extend((b, c, i) for i in chosen.tolist())
    return np.array(rows, np.int64).reshape(-1, 3)
