"""Sampling of images as gathers and sums (GridSample, RoiAlign, DeformConv, MaxRoiPool); the gradient of Col2Im."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.training.gradient_context import Backward, Forward, sum_over, where, wide
from xrt_core.training.registry import composition, gradient

Taps = list[tuple[Tensor, Tensor | None]]
"""Along one axis: positions (batch, points) and their weights, None for 1."""

Bounded = list[tuple[Tensor, Tensor | None, Tensor | None]]
"""The same, and whether each position counts, None where all do."""


def _integers(at: Tensor, size: int) -> Tensor:
    made: Tensor = ops.Clip(at, 0.0, float(size - 1)).astype(np.int64)
    return made


def _inside(at: Tensor, size: int) -> Tensor:
    return (at >= 0.0) & (at <= float(size - 1))


def _linear(at: Tensor) -> Taps:
    low = ops.Floor(at)
    return [(low, 1.0 - (at - low)), (low + 1.0, at - low)]


def _cubic(at: Tensor) -> Taps:
    """Keys' cubic convolution with a = -0.75, over the four neighbours."""
    a, low = -0.75, ops.Floor(at)
    t = at - low

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1.0

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [(low - 1.0, far(t + 1.0)), (low, near(t)), (low + 1.0, near(1.0 - t)), (low + 2.0, far(2.0 - t))]


def _reflected(at: Tensor, low: float, high: float) -> Tensor:
    span = high - low
    if span <= 0:
        return at * 0.0 + low
    turn = ops.Abs(at - low)
    turn = turn - ops.Floor(turn / (2 * span)) * (2 * span)
    return where(turn > span, 2 * span - turn, turn) + low


@gradient("AffineGrid")
def affine_grid(ctx: Backward) -> Any:
    """The grid is linear in theta: dy' times the positions, which the identity's grid gives."""
    theta, dy = ctx.inputs[0], ctx.grad
    n, rank, _ = ctx.shape(theta)
    one = literal(np.broadcast_to(np.eye(rank, rank + 1), (n, rank, rank + 1)).copy(), theta.dtype)
    places: Tensor = ops.AffineGrid(one, ctx.inputs[1], align_corners=int(ctx.attr("align_corners", 0)))
    flat = places.reshape(n, -1, rank)
    by_theta = dy.reshape(n, -1, rank).mT @ flat
    return ops.Concat(by_theta, sum_over(dy.reshape(n, -1, rank), [1]).mT, axis=2), None


@composition("GridSample")
def grid_sample(ctx: Forward) -> Any:
    """The weighted sum of the pixels around each position, by gathers; see the kernel for the borders."""
    x, grid = ctx.inputs
    shape, lattice = ctx.shape(x), ctx.shape(grid)
    mode = str(ctx.attr("mode", "linear")).removeprefix("bi")
    padding, corners = ctx.attr("padding_mode", "zeros"), bool(ctx.attr("align_corners", 0))
    dims, points = shape[2:], lattice[1:-1]
    if 0 in shape or 0 in lattice:
        return None
    places = wide(grid).reshape((shape[0], math.prod(points), len(dims)))
    taps: list[Bounded] = []
    for axis, size in enumerate(dims):
        unit = ops.Gather(places, len(dims) - 1 - axis, axis=2)  # the grid lists the innermost dimension first
        at = (unit + 1.0) * ((size - 1) / 2) if corners else ((unit + 1.0) * float(size) - 1.0) * 0.5
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        if mode == "nearest":
            at = ops.Round(at)
        beyond = (at < low) | (at > high)
        if padding == "border" and mode != "cubic":
            at = where(beyond, ops.Clip(at, 0.0, float(size - 1)), at)
        elif padding == "reflection":
            at = where(beyond, _reflected(at, low, high), at)
        pixels: Taps = [(at, None)] if mode == "nearest" else _linear(at) if mode == "linear" else _cubic(at)
        if padding == "reflection":
            # positions are whole or half numbers, all at least 0 or cut to it, as the kernel does
            taps.append([(ops.Floor(ops.Max(_reflected(p, low, high), 0.0)), w, None) for p, w in pixels])
        else:
            taps.append([(p, w, _inside(p, size) if padding == "zeros" else None) for p, w in pixels])
    flat = wide(x).reshape((*shape[:2], math.prod(dims)))
    return _sampled(flat, dims, taps).reshape((*shape[:2], *points)).astype(x.dtype)


def _sampled(flat: Tensor, dims: tuple[int, ...], taps: list[Bounded]) -> Tensor:
    """Sum over all combinations of one tap per axis; flat: (batch, channels, pixels) -> (batch, channels, points)."""
    total: Any = None
    for combination in itertools.product(*taps):
        index: Any = None
        weight: Any = None
        for size, (p, w, valid) in zip(dims, combination, strict=True):
            here = _integers(p, size)
            index = here if index is None else index * size + here
            for factor in (w, None if valid is None else valid.astype(flat.dtype)):
                if factor is not None:
                    weight = factor if weight is None else weight * factor
        spread = ops.Expand(index.unsqueeze(1), [*flat.shape[:2], index.shape[1]])
        value = ops.GatherElements(flat, spread, axis=2)
        if weight is not None:
            value = value * weight.astype(flat.dtype).unsqueeze(1)
        total = value if total is None else total + value
    made: Tensor = total
    return made


@composition("DeformConv")
def deform_conv(ctx: Forward) -> Any:
    """The offset samples, gathered, weighted and masked, then a product with the filter per group."""
    x, w, offset, bias, mask = (ctx.input(i) for i in range(5))
    shape, filters, places = ctx.shape(x), ctx.shape(w), ctx.shape(offset)[2:]
    rank, dims, window = len(shape) - 2, shape[2:], filters[2:]
    if 0 in (*shape, *filters, *places):
        return None
    group, shared = int(ctx.attr("group", 1)), int(ctx.attr("offset_group", 1))
    strides, dilations = (tuple(ctx.attr(k) or (1,) * rank) for k in ("strides", "dilations"))
    pads = ctx.attr("pads") or (0,) * (2 * rank)
    count, spots, batch = math.prod(window), math.prod(places), shape[0] * shared
    moved = wide(offset).reshape((batch, count, rank, spots))
    cells, corners = np.indices(window).reshape(rank, count, 1), np.indices(places).reshape(rank, 1, spots)
    taps: list[Bounded] = []
    for axis, size in enumerate(dims):
        regular = corners[axis] * strides[axis] - pads[axis] + cells[axis] * dilations[axis]
        at = ops.Gather(moved, axis, axis=2) + literal(regular, moved.dtype)
        taps.append([(p, t, _inside(p, size)) for p, t in _linear(at.reshape((batch, count * spots)))])
    columns = _sampled(wide(x).reshape((batch, shape[1] // shared, math.prod(dims))), dims, taps)
    if mask is not None:
        columns = columns * wide(mask).astype(columns.dtype).reshape((batch, 1, count * spots))
    columns = columns.reshape((shape[0], group, shape[1] // group * count, spots))
    kernels = wide(w).reshape((group, filters[0] // group, shape[1] // group * count))
    made = (kernels @ columns).reshape((shape[0], filters[0], *places))
    if bias is not None:
        made = made + wide(bias).reshape([-1] + [1] * rank)
    return made.astype(x.dtype)


@composition("MaxRoiPool")
def max_roi_pool(ctx: Forward) -> Any:
    """The maxima of a region's rows, then of its columns; equal maxima share the gradient; zero by the regions."""
    x, rois = ctx.inputs
    shape, regions, bins = ctx.shape(x), ctx.shape(rois)[0], tuple(map(int, ctx.attr("pooled_shape")))
    if not regions or 0 in shape:
        return None
    scaled = wide(rois)[:, 1:] * float(ctx.attr("spatial_scale", 1.0))
    boxes = ops.Sign(scaled) * ops.Floor(ops.Abs(scaled) + 0.5)
    made = ops.Gather(wide(x), ops.Gather(rois, 0, axis=1).astype(np.int64), axis=0)
    lowest = literal(-np.inf, made.dtype)
    for axis in (0, 1):  # made: regions, channels, height or its cells, width
        start = ops.Gather(boxes, [1 - axis], axis=1)
        step = ops.Max(ops.Gather(boxes, [3 - axis], axis=1) - start + 1.0, 1.0) / float(bins[axis])
        at = literal(np.arange(shape[2 + axis]).reshape(1, 1, -1), boxes.dtype)
        cell = literal(np.arange(bins[axis]).reshape(1, -1), boxes.dtype)
        first, last = (p.unsqueeze(2) for p in (ops.Floor(cell * step) + start, ops.Ceil((cell + 1.0) * step) + start))
        within = (at >= first) & (at < last)  # regions, cells, positions
        if axis == 0:
            cells = where(within.reshape((regions, 1, bins[0], shape[2], 1)), made.unsqueeze(2), lowest)
        else:
            cells = where(within.reshape((regions, 1, 1, bins[1], shape[3])), made.unsqueeze(3), lowest)
        made = cells.max((3 if axis == 0 else 4,))
    return where(made == lowest, 0.0, made).astype(x.dtype)


@composition("RoiAlign")
def roi_align(ctx: Forward) -> Any:
    """Rows and columns of the regions' samples, gathered and weighted; None if their number depends on data."""
    x, rois, which = ctx.inputs
    count = int(ctx.attr("sampling_ratio", 0))
    shape, regions = ctx.shape(x), ctx.shape(rois)[0]
    if not count or not regions or 0 in shape:
        return None
    bins = int(ctx.attr("output_height", 1)), int(ctx.attr("output_width", 1))
    half = ctx.version >= 16 and ctx.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    boxes = wide(rois) * float(ctx.attr("spatial_scale", 1.0)) - (0.5 if half else 0.0)
    picked = ops.Gather(wide(x), which.astype(np.int64), axis=0)
    part = (np.arange(count) + 0.5) / count
    axes: list[Taps] = []
    for axis in (0, 1):
        start, end = ops.Gather(boxes, [1 - axis], axis=1), ops.Gather(boxes, [3 - axis], axis=1)
        length = end - start
        if not half:
            length = ops.Max(length, literal(1.0, length.dtype))
        steps = (np.arange(bins[axis])[:, None] + part[None, :]).reshape(1, -1).astype(length.dtype)
        at = start + length * (1.0 / bins[axis]) * steps
        size = shape[2 + axis]
        valid = ((at >= -1.0) & (at <= float(size))).astype(at.dtype)
        at = ops.Clip(at, 0.0, float(size - 1))
        low = ops.Floor(at)
        axes.append([(low, (1.0 - (at - low)) * valid), (ops.Min(low + 1.0, float(size - 1)), (at - low) * valid)])

    def taken(source: Tensor, axis: int, at: Tensor) -> Tensor:
        sizes = [int(d) for d in source.shape]
        sizes[axis] = bins[axis - 2] * count
        index = _integers(at, shape[axis]).reshape([regions, 1, *(sizes[i] if i == axis else 1 for i in (2, 3))])
        made: Tensor = ops.GatherElements(source, ops.Expand(index, sizes), axis=axis)
        return made

    corners = []
    for top, by_row in axes[0]:
        rows = taken(picked, 2, top)
        for left, by_column in axes[1]:
            assert by_row is not None
            assert by_column is not None
            weight = by_row.reshape((regions, 1, -1, 1)) * by_column.reshape((regions, 1, 1, -1))
            corners.append(taken(rows, 3, left) * weight.astype(picked.dtype))
    split = (regions, shape[1], bins[0], count, bins[1], count)
    if ctx.attr("mode", "avg") == "avg":
        made = ops.Sum(*corners).reshape(split).mean((3, 5))
    else:
        made = ops.Max(*corners).reshape(split).max((3, 5))
    return made.astype(x.dtype)


@gradient("Col2Im")
def col2im(ctx: Backward) -> Any:
    """Each column gets the gradient of the pixels to which it was added."""
    x, dy = ctx.inputs[0], ctx.grad
    block = [int(d) for d in ctx.known(2, "block_shape").reshape(-1)]
    rank, shape, image = len(block), ctx.shape(x), ctx.shape(dy)
    strides, dilations = (tuple(ctx.attr(k) or (1,) * rank) for k in ("strides", "dilations"))
    pads = [int(p) for p in ctx.attr("pads") or (0,) * (2 * rank)]
    padded = ops.Pad(dy, [0, 0, *pads[:rank], 0, 0, *pads[rank:]], literal(0.0, dy.dtype))
    sizes = [n + pads[i] + pads[rank + i] for i, n in enumerate(image[2:])]
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(sizes, block, dilations, strides, strict=True)]
    index: Any = np.zeros((1,) * (2 * rank), np.int64)
    for i in range(rank):
        at = np.arange(block[i])[:, None] * dilations[i] + np.arange(counts[i])[None, :] * strides[i]
        place = [1] * (2 * rank)
        place[i], place[rank + i] = block[i], counts[i]
        index = index * sizes[i] + at.reshape(place)
    channels = image[1]
    flat = padded.reshape((image[0], channels, math.prod(sizes)))
    found = ops.Gather(flat, literal(index.reshape(-1), INT64), axis=2)
    return found.reshape(shape), None, None
