"""Resampling of images: Resize and Upsample, one axis after the other, with taps and weights computed on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import float_like
from xrt_core.kernels.namespace import has_float64, is_cupy, wide
from xrt_core.kernels.registry import OpContext, kernel

_UNROLLED_TAPS = 8
"""Up to this number of taps are gathered and summed one by one; more use a single gather with an axis of taps."""


class AxisResize(Struct, frozen=True):
    """How one axis is resampled: output length, exact scale, and the part of the input shown (tf_crop_and_resize)."""

    axis: int
    size: int
    out: int
    scale: float
    start: float = 0.0
    stop: float = 1.0


class Sampling(Struct, frozen=True):
    """The sampling attributes of Resize; the defaults are those of Upsample and Resize 10."""

    mode: str
    coordinates: str = "asymmetric"
    nearest: str = "simple"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    antialias: bool = False


def source_coordinates(step: AxisResize, mode: str) -> np.ndarray:
    """Coordinates in the input, float64[out], of the output's elements. Source: Resize's table of transformations.

    `output_width`, which some transformations use, is the unrounded scale * size, as the backend tests have it.
    """
    x = np.arange(step.out, dtype=np.float64)
    width = step.scale * step.size
    if mode == "asymmetric":
        return x / step.scale
    if mode == "tf_half_pixel_for_nn":  # of Resize-11 alone; exporters of TensorFlow write it in later versions too
        return (x + 0.5) / step.scale
    if mode == "align_corners":
        return np.zeros_like(x) if width == 1 else x * (step.size - 1) / (width - 1)
    if mode == "tf_crop_and_resize":
        last = step.size - 1
        if width == 1:
            return np.full_like(x, 0.5 * (step.start + step.stop) * last)
        return step.start * last + x * (step.stop - step.start) * last / (width - 1)
    if mode == "pytorch_half_pixel" and step.out <= 1:
        return np.zeros_like(x)
    half = (x + 0.5) / step.scale - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return half
    if mode == "half_pixel_symmetric":
        return half + step.size / 2 * (1 - step.out / width)
    raise ShapeError(f"Resize: coordinate_transformation_mode = {mode!r} is not defined by ONNX")


def nearest_indices(step: AxisResize, coordinates: np.ndarray, mode: str) -> np.ndarray:
    """Index of the input element that each output element copies, int64[out]."""
    if mode == "simple":  # Resize 10 names no rule: floor, but ceil when it shrinks, as other frameworks read it
        mode = "ceil" if step.scale < 1 else "floor"
    if mode == "round_prefer_floor":
        index = np.ceil(coordinates - 0.5)
    elif mode == "round_prefer_ceil":
        index = np.floor(coordinates + 0.5)
    elif mode in ("floor", "ceil"):
        index = np.floor(coordinates) if mode == "floor" else np.ceil(coordinates)
    else:
        raise ShapeError(
            f"Resize: nearest_mode = {mode!r}; it takes round_prefer_floor, round_prefer_ceil, floor or ceil"
        )
    return np.clip(index, 0, step.size - 1).astype(np.int64)


def _triangle(x: np.ndarray) -> np.ndarray:
    tent: np.ndarray = np.maximum(1 - np.abs(x), 0)
    return tent


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel (IEEE Trans. ASSP 29, 1981, equation 4)."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def interpolation_taps(step: AxisResize, coordinates: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Input indices int64[out, taps] and weights float64[out, taps] of every output element.

    Taps beyond the border take the border's element, or weigh nothing under `exclude_outside`. Antialiasing widens
    the filter by 1 / scale when it shrinks, and makes the weights add up to one.
    """
    shrink = min(step.scale, 1.0) if sampling.antialias else 1.0
    support = (1 if sampling.mode == "linear" else 2) / shrink
    reach = math.ceil(support)
    index = np.floor(coordinates)[:, None] + np.arange(1 - reach, reach + 1)
    distance = (index - coordinates[:, None]) * shrink
    weights = _triangle(distance) if sampling.mode == "linear" else _cubic(distance, sampling.cubic_a)
    if sampling.exclude_outside:
        weights = np.where((index < 0) | (index > step.size - 1), 0.0, weights)
    if sampling.exclude_outside or sampling.antialias:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(index, 0, step.size - 1).astype(np.int64), weights


def _take(xp: Any, x: Any, index: np.ndarray, axis: int) -> Any:
    """`x` at indices known to be in range, along `axis`."""
    if is_cupy(xp):
        return xp.take(x, xp.asarray(index), axis=axis)
    return xp.take(x, index, axis=axis, mode="clip")  # clip: no bounds checks, no buffering


def _weighted(xp: Any, x: Any, step: AxisResize, index: np.ndarray, weights: np.ndarray) -> Any:
    """Sum over taps of weight * element along the step's axis."""
    trailing = (1,) * (x.ndim - step.axis - 1)
    weights = weights.astype(x.real.dtype)
    used = np.flatnonzero(weights.any(axis=0))
    index, weights = index[:, used], weights[:, used]
    if len(used) <= _UNROLLED_TAPS:
        y: Any = None
        for tap in range(len(used)):
            part = _take(xp, x, index[:, tap], step.axis) * xp.asarray(weights[:, tap].reshape(-1, *trailing))
            y = part if y is None else y + part
        if y is not None:
            return y
    gathered = _take(xp, x, index, step.axis)
    return xp.sum(gathered * xp.asarray(weights.reshape(*weights.shape, *trailing)), axis=step.axis + 1)


def resample(xp: Any, x: Any, steps: Sequence[AxisResize], sampling: Sampling) -> Any:
    """`x` resampled along the steps' axes; integers are interpolated in floats, rounded half to even and saturated."""
    if sampling.mode not in ("nearest", "linear", "cubic"):
        raise ShapeError(f"Resize: mode = {sampling.mode!r}; it takes nearest, linear or cubic")
    crops = sampling.coordinates == "tf_crop_and_resize"
    steps = [s for s in steps if s.out != s.size or s.scale != 1.0 or (crops and (s.start, s.stop) != (0.0, 1.0))]
    for step in steps:
        if step.size == 0 and step.out:
            raise ShapeError(f"Resize: axis {step.axis} is empty and cannot be resized to {step.out} elements")
    # what shrinks goes first, so that later axes have less to do
    steps = sorted(steps, key=lambda s: s.out / max(s.size, 1))
    dtype = x.dtype
    if sampling.mode != "nearest" and dtype.kind != "c":
        x = x.astype(wide(dtype) if float_like(dtype) else _exact_float(xp, dtype))
    for step in steps:
        if step.out == 0 or step.size == 0:
            x = x[(slice(None),) * step.axis + (slice(0, 0),)]
            continue
        coordinates = source_coordinates(step, sampling.coordinates)
        if sampling.mode == "nearest":
            x = _take(xp, x, nearest_indices(step, coordinates, sampling.nearest), step.axis)
        else:
            x = _weighted(xp, x, step, *interpolation_taps(step, coordinates, sampling))
        if crops:
            outside = (coordinates < 0) | (coordinates > step.size - 1)
            if outside.any():
                mask = outside.reshape((-1,) + (1,) * (x.ndim - step.axis - 1))
                x = xp.where(xp.asarray(mask), xp.asarray(sampling.extrapolation).astype(x.dtype), x)
    if x.dtype == dtype:
        return x
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        # a float64 bound may round up past the type: compare, then pick the exact limit
        x = xp.round(x)
        low, high = xp.asarray(limits.min, dtype=dtype), xp.asarray(limits.max, dtype=dtype)
        inside = xp.where((x > limits.min) & (x < float(limits.max)), x, xp.zeros_like(x)).astype(dtype)
        return xp.where(x >= float(limits.max), high, xp.where(x <= limits.min, low, inside))
    return x.astype(dtype)


def _exact_float(xp: Any, dtype: np.dtype) -> np.dtype:
    """A float that holds the integers of `dtype` (64-bit ones as well as any float does)."""
    return np.dtype(np.float64 if dtype.itemsize >= 4 and has_float64(xp) else np.float32)


def _steps_of_scales(shape: Sequence[int], axes: Sequence[int], scales: np.ndarray, roi: Any) -> list[AxisResize]:
    """One step an axis; the output length is floor(length * scale), the product in float64 as inference has it."""
    steps = []
    for i, axis in enumerate(axes):
        size, scale = int(shape[axis]), float(scales[i])
        steps.append(AxisResize(axis, size, math.floor(size * scale), scale, *_crop(roi, i, len(axes))))
    return steps


def _steps_of_sizes(
    shape: Sequence[int], axes: Sequence[int], sizes: np.ndarray, policy: str, roi: Any
) -> list[AxisResize]:
    """One step an axis; policies other than "stretch" take one scale for all axes and round lengths half up."""
    lengths = [int(shape[axis]) for axis in axes]
    outs = [int(n) for n in sizes]
    scales = [out / max(size, 1) for out, size in zip(outs, lengths, strict=True)]
    if policy in ("not_larger", "not_smaller"):
        scale = min(scales) if policy == "not_larger" else max(scales)
        scales = [scale] * len(axes)
        outs = [math.floor(scale * size + 0.5) for size in lengths]
    elif policy != "stretch":
        raise ShapeError(f"Resize: keep_aspect_ratio_policy = {policy!r}; it takes stretch, not_larger or not_smaller")
    return [
        AxisResize(axis, size, out, scale, *_crop(roi, i, len(axes)))
        for i, (axis, size, out, scale) in enumerate(zip(axes, lengths, outs, scales, strict=True))
    ]


def _crop(roi: Any, i: int, count: int) -> tuple[float, float]:
    return (0.0, 1.0) if roi is None else (float(roi[i]), float(roi[count + i]))


def resize_steps(ctx: OpContext, shape: Sequence[int], *rest: Any) -> tuple[list[AxisResize], Sampling]:
    """The per-axis steps and the sampling of a Resize or Upsample of an input of `shape`. rest: its further inputs."""
    rank = len(shape)
    if ctx.node.op_type == "Upsample":
        scales = rest[0] if rest else None
        factors = np.asarray(ctx.attr("scales") if scales is None else scales, np.float32)
        mode = ctx.attr("mode", "nearest")
        sampling = Sampling("linear" if mode == "bilinear" else mode, nearest="floor")
        return _steps_of_scales(shape, range(rank), factors, None), sampling
    mode = ctx.attr("mode", "nearest")
    if ctx.version < 11:
        return _steps_of_scales(shape, range(rank), rest[0], None), Sampling(mode)
    roi, scales, sizes = (np.asarray(r) if r is not None and r.size else None for r in (*rest, None, None, None)[:3])
    axes = [a % rank for a in ctx.attr("axes") or range(rank)]
    sampling = Sampling(
        mode,
        ctx.attr("coordinate_transformation_mode", "half_pixel"),
        ctx.attr("nearest_mode", "round_prefer_floor"),
        ctx.attr("cubic_coeff_a", -0.75),
        bool(ctx.attr("exclude_outside", 0)),
        ctx.attr("extrapolation_value", 0.0),
        bool(ctx.attr("antialias", 0)),
    )
    crop = roi if sampling.coordinates == "tf_crop_and_resize" else None
    given = sizes if sizes is not None else scales
    if given is None or len(given) != len(axes):
        raise ShapeError(
            f"Resize {ctx.node.name!r}: scales or sizes must be given with one entry for each of {len(axes)} axes, "
            f"got scales {None if scales is None else scales.tolist()}, "
            f"sizes {None if sizes is None else sizes.tolist()}"
        )
    if sizes is not None:
        steps = _steps_of_sizes(shape, axes, sizes, ctx.attr("keep_aspect_ratio_policy", "stretch"), crop)
    else:
        steps = _steps_of_scales(shape, axes, given, crop)
    return steps, sampling


def interpolated_elsewhere(node: Node, x: np.ndarray, rest: Sequence[Any], off: Callable[[], float]) -> Any:
    """What a Resize or Upsample that interpolates floats makes of scales that are off; None for another one.

    rest: the further inputs. off: for each axis, the share by which its scale is off.
    """
    steps, sampling = resize_steps(OpContext(node, np), x.shape, *rest)
    if sampling.mode == "nearest" or sampling.coordinates == "tf_crop_and_resize" or not float_like(x.dtype):
        return None
    moved = [s if s.scale == 1.0 else replace(s, scale=s.scale * (1.0 + off())) for s in steps]
    return resample(np, x, moved, sampling)


@kernel("Resize", static=(1, 2, 3))
def resize(ctx: OpContext, x: Any, *rest: Any) -> Any:
    """Resize: version 10 is (X, scales) with asymmetric coordinates; later ones are (X, roi, scales, sizes)."""
    return resample(ctx.xp, x, *resize_steps(ctx, x.shape, *rest))


@kernel("Upsample", static=(1,))
def upsample(ctx: OpContext, x: Any, scales: Any = None) -> Any:
    """Upsample: scales are an attribute before version 9; asymmetric coordinates, nearest rounds down."""
    return resample(ctx.xp, x, *resize_steps(ctx, x.shape, scales))
