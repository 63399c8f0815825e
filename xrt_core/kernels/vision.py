"""Kernels that sample and assemble images: GridSample, AffineGrid, Col2Im, DeformConv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.types import float_like
from xrt_core.kernels.movement import ints
from xrt_core.kernels.namespace import accumulate, is_jax, narrow, widen
from xrt_core.kernels.registry import OpContext, kernel

Tap = tuple[Any, Any, Any]
"""Along one axis: float positions of a pixel (batch, points), its weight or None for 1, its validity or None."""


def _pick(xp: Any, x: Any, flat: Any) -> Any:
    """x (batch, channels, pixels) at `flat` (batch, points): (batch, channels, points)."""
    if is_jax(xp):
        return xp.take_along_axis(x, flat[:, None, :], axis=2, mode="clip")
    out = xp.empty((x.shape[0], x.shape[1], flat.shape[1]), x.dtype)
    for b in range(x.shape[0]):
        out[b] = xp.take(x[b], flat[b], axis=1)
    return out


def _weighted(xp: Any, x: Any, dims: Sequence[int], taps: Sequence[Sequence[Tap]]) -> Any:
    """The sum over all combinations of one tap an axis; pixels that are not valid count as 0.

    x: (batch, channels, prod(dims)); result: (batch, channels, points).
    """
    total: Any = None
    for combination in itertools.product(*taps):
        flat: Any = 0
        weight: Any = None
        valid: Any = None
        for size, (at, w, ok) in zip(dims, combination, strict=True):
            inside = xp.fmin(xp.fmax(at, 0), size - 1).astype(np.int64)  # fmax turns NaN into 0
            flat = flat * size + inside
            if w is not None:
                weight = w if weight is None else weight * w
            if ok is not None:
                valid = ok if valid is None else valid & ok
        value = _pick(xp, x, flat)
        if valid is not None:
            value = xp.where(valid[:, None, :], value, xp.zeros((), value.dtype))
        if weight is not None:
            value = value * narrow(weight, np.dtype(np.float64) if x.dtype.kind == "c" else x.dtype)[:, None, :]
        total = value if total is None else total + value
    return narrow(total, x.dtype)


def _in_range(at: Any, size: int) -> Any:
    return (at >= 0) & (at <= size - 1)


def _linear_taps(xp: Any, at: Any) -> list[tuple[Any, Any]]:
    low = xp.floor(at)
    part = at - low
    return [(low, 1 - part), (low + 1, part)]


def _cubic_taps(xp: Any, at: Any) -> list[tuple[Any, Any]]:
    """Keys' cubic convolution with a = -0.75, over the four neighbours."""
    a, low = -0.75, xp.floor(at)
    t = at - low

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [(low - 1, far(1 + t)), (low, near(t)), (low + 1, near(1 - t)), (low + 2, far(2 - t))]


def _reflect(xp: Any, at: Any, low: float, high: float) -> Any:
    """Positions folded back at both borders as often as it takes."""
    span = high - low
    if span <= 0:
        return xp.zeros_like(at) + low
    turn = xp.abs(at - low) % (2 * span)
    return low + xp.where(turn > span, 2 * span - turn, turn)


@kernel("GridSample")
def grid_sample(ctx: OpContext, x: Any, grid: Any) -> Any:
    """GridSample in any number of spatial dimensions; modes nearest, linear, cubic (bilinear, bicubic in version 16).

    Positions outside the borders are reflected or, but for cubic, clamped before interpolating, neighbours after
    (for cubic with border ONNX's reference clamps positions too; other frameworks, PyTorch among them, do not).
    Integers are interpolated in float64 and cut.
    """
    xp = ctx.xp
    mode = ctx.attr("mode", "linear").removeprefix("bi")
    padding, corners = ctx.attr("padding_mode", "zeros"), bool(ctx.attr("align_corners", 0))
    dims, batch = x.shape[2:], x.shape[0]
    if grid.shape[-1] != len(dims):
        raise ShapeError(f"GridSample: the grid has {grid.shape[-1]} coordinates for {len(dims)} spatial dimensions")
    points = grid.shape[1:-1]
    where = xp.reshape(widen(grid), (batch, math.prod(points), len(dims)))
    taps: list[list[Tap]] = []
    for axis, size in enumerate(dims):
        unit = where[..., len(dims) - 1 - axis]  # the grid lists the innermost dimension first
        at = (unit + 1) / 2 * (size - 1) if corners else ((unit + 1) * size - 1) / 2
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        if mode == "nearest":
            at = xp.rint(at)
        if padding == "border" and mode != "cubic":
            at = xp.where((at < low) | (at > high), xp.clip(at, 0, size - 1), at)
        elif padding == "reflection":
            at = xp.where((at < low) | (at > high), _reflect(xp, at, low, high), at)
        if mode == "nearest":
            pixels = [(at, None)]
        elif mode in ("linear", "cubic"):
            pixels = _linear_taps(xp, at) if mode == "linear" else _cubic_taps(xp, at)
        else:
            raise ShapeError(f"GridSample: unknown mode {mode!r}; ONNX has nearest, linear and cubic")
        if padding == "reflection":
            taps.append([(xp.trunc(_reflect(xp, p, low, high)), w, None) for p, w in pixels])
        else:
            taps.append([(p, w, _in_range(p, size) if padding == "zeros" else None) for p, w in pixels])
    wide_x = x
    if mode != "nearest":
        wide_x = widen(x) if float_like(x.dtype) or x.dtype.kind == "c" else x.astype(np.float64)
    flat = xp.reshape(wide_x, (*x.shape[:2], math.prod(dims)))
    return narrow(xp.reshape(_weighted(xp, flat, dims, taps), (*x.shape[:2], *points)), x.dtype)


@kernel("AffineGrid", static=(1,))
def affine_grid(ctx: OpContext, theta: Any, size: Any) -> Any:
    """AffineGrid (N, *spatial, r): theta (N, r, r + 1) applied to positions in [-1, 1], innermost axis first."""
    xp, dims = ctx.xp, ints(size)[2:]
    rank, matrix = len(dims), widen(theta)
    lift = (slice(None),) + (None,) * rank
    out = matrix[..., rank][lift]
    for i, d in enumerate(reversed(dims)):
        if ctx.attr("align_corners", 0):
            line = np.linspace(-1, 1, d) if d > 1 else np.zeros(d)
        else:
            line = (2 * np.arange(d) + 1) / max(d, 1) - 1
        axis = rank - 1 - i
        place = line.reshape((1,) * (axis + 1) + (d,) + (1,) * (rank - axis)).astype(matrix.dtype)
        out = out + matrix[..., i][lift] * xp.asarray(place)
    return narrow(xp.broadcast_to(out, (theta.shape[0], *dims, rank)), theta.dtype)


@kernel("Col2Im", static=(1, 2))
def col2im(ctx: OpContext, x: Any, image_shape: Any, block_shape: Any) -> Any:
    """Col2Im: adds columns (N, C * block, positions) up into an image (N, C, *image_shape)."""
    xp, image, block = ctx.xp, ints(image_shape), ints(block_shape)
    rank = len(image)
    strides, dilations = ctx.attr("strides", (1,) * rank), ctx.attr("dilations", (1,) * rank)
    pads = ctx.attr("pads", (0,) * (2 * rank))
    padded = tuple(s + pads[i] + pads[i + rank] for i, s in enumerate(image))
    counts = tuple((p - (k - 1) * d - 1) // s + 1 for p, k, d, s in zip(padded, block, dilations, strides, strict=True))
    batch, channels = x.shape[0], x.shape[1] // max(math.prod(block), 1)
    summands = x.astype(np.int32) if x.dtype == np.bool_ else widen(x)  # of booleans any one counts
    columns = xp.reshape(summands, (batch, channels, math.prod(block), *counts))
    out = xp.zeros((batch, channels, *padded), columns.dtype)
    for k, tap in enumerate(itertools.product(*map(range, block))):
        index = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilations, counts, strides, strict=True)
        )
        out = accumulate(xp, out, (slice(None), slice(None), *index), columns[:, :, k])
    inner = tuple(slice(pads[i], pads[i] + s) for i, s in enumerate(image))
    return narrow(out[(slice(None), slice(None), *inner)], x.dtype)


@kernel("DeformConv")
def deform_conv(ctx: OpContext, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None) -> Any:
    """DeformConv: a convolution whose samples are moved by `offset` (interpolated, 0 outside) and scaled by `mask`."""
    xp, dims = ctx.xp, x.shape[2:]
    rank, window, places = len(dims), w.shape[2:], offset.shape[2:]
    group, shared = ctx.attr("group", 1), ctx.attr("offset_group", 1)
    strides, dilations = ctx.attr("strides", (1,) * rank), ctx.attr("dilations", (1,) * rank)
    pads = ctx.attr("pads", (0,) * (2 * rank))
    (batch, channels), taps_count, spots = x.shape[:2], math.prod(window), math.prod(places)
    moved = xp.reshape(widen(offset), (batch * shared, taps_count, rank, spots))
    cells = np.indices(window).reshape(rank, taps_count, 1)
    corners = np.indices(places).reshape(rank, 1, spots)
    taps: list[list[Tap]] = []
    for axis, size in enumerate(dims):
        regular = corners[axis] * strides[axis] - pads[axis] + cells[axis] * dilations[axis]
        at = xp.reshape(moved[:, :, axis] + xp.asarray(regular, moved.dtype), (batch * shared, taps_count * spots))
        taps.append([(p, t, _in_range(p, size)) for p, t in _linear_taps(xp, at)])
    image = xp.reshape(widen(x), (batch * shared, channels // shared, math.prod(dims)))
    columns = _weighted(xp, image, dims, taps)
    if mask is not None:
        scale = xp.reshape(widen(mask), (batch * shared, 1, taps_count * spots))
        columns = columns * scale
    columns = xp.reshape(columns, (batch, group, channels // group * taps_count, spots))
    kernels = xp.reshape(widen(w), (group, w.shape[0] // group, channels // group * taps_count))
    out = xp.reshape(xp.matmul(kernels, columns), (batch, w.shape[0], *places))
    if bias is not None:
        out = out + xp.reshape(widen(bias), (-1,) + (1,) * rank)
    return narrow(out, x.dtype)
