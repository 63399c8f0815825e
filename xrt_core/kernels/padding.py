"""Kernels that pad, crop, mask and reverse: Pad, CenterCropPad, Trilu, ReverseSequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.kernels.movement import axes_of, check_lengths, check_shape, check_size, ints
from xrt_core.kernels.namespace import pad_with
from xrt_core.kernels.registry import OpContext, kernel


def _zero(xp: Any, dtype: np.dtype) -> Any:
    """The padding of a dtype: 0, False or the empty string."""
    return np.array("", object) if dtype.kind == "O" else xp.zeros((), dtype)


def _source(mode: str, before: int, size: int, after: int) -> np.ndarray:
    """The index of the source element, on an axis of `size`, of each position of the padded axis."""
    if size == 0 and before + after:
        raise ShapeError(f"Pad: mode {mode!r} cannot pad an axis of size 0; use mode 'constant'")
    at = np.arange(-before, size + after)
    if mode == "edge":
        return np.clip(at, 0, size - 1)
    if mode == "wrap":
        return at % max(size, 1)
    if mode != "reflect":
        raise ShapeError(f"Pad: unknown mode {mode!r}; ONNX has constant, reflect, edge and wrap")
    period = max(2 * (size - 1), 1)
    return (size - 1) - np.abs(at % period - (size - 1)) if size > 1 else np.zeros_like(at)


@kernel("Pad", static=(1, 3))
def pad(ctx: OpContext, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    """Pad: pads and value are attributes before version 11, `axes` an input from 18; negative pads crop first."""
    xp = ctx.xp
    if ctx.version < 11:
        pads, value = ctx.attr("pads"), np.array(ctx.attr("value", 0.0)).astype(x.dtype)
    where = range(x.ndim) if axes is None else axes_of(ints(axes), x.ndim, "Pad")
    given, count = ints(pads), len(where)
    if len(given) != 2 * count:
        raise ShapeError(f"Pad: {len(given)} pads for {count} axes; give a begin and an end for each")
    widths = [(0, 0)] * x.ndim
    for i, a in enumerate(where):
        widths[a] = (given[i], given[i + count])
    sides = list(zip(widths, x.shape, strict=True))
    if len(set(where)) != count or any(d + min(b, 0) + min(e, 0) < 0 for (b, e), d in sides):
        raise ShapeError(f"Pad: pads {list(given)} crop more than there is of {list(x.shape)}, or an axis comes twice")
    check_size((d + b + e for (b, e), d in sides), x.dtype, "Pad")
    if any(min(w) < 0 for w in widths):
        x = x[tuple(slice(max(0, -b), d - max(0, -e)) for (b, e), d in zip(widths, x.shape, strict=True))]
        widths = [(max(0, b), max(0, e)) for b, e in widths]
    mode = ctx.attr("mode", "constant")
    if mode == "constant":
        value = _zero(xp, x.dtype) if value is None else xp.reshape(value, ())
        return pad_with(xp, x, widths, value)
    for a, (before, after) in enumerate(widths):
        if before or after:
            x = xp.take(x, xp.asarray(_source(mode, before, x.shape[a], after)), axis=a)
    return x


@kernel("CenterCropPad", static=(1,))
def center_crop_pad(ctx: OpContext, x: Any, shape: Any) -> Any:
    """CenterCropPad: an odd difference crops and pads one more at the end."""
    axes = ctx.attr("axes")
    where = range(x.ndim) if axes is None else axes_of(axes, x.ndim, "CenterCropPad")
    index, widths = [slice(None)] * x.ndim, [(0, 0)] * x.ndim
    for a, target in zip(where, ints(shape), strict=True):
        extra = x.shape[a] - target
        if extra > 0:
            index[a] = slice(extra // 2, extra // 2 + target)
        else:
            widths[a] = (-extra // 2, -extra - -extra // 2)
    return pad_with(ctx.xp, x[tuple(index)], widths, _zero(ctx.xp, x.dtype))


@kernel("Trilu")
def trilu(ctx: OpContext, x: Any, k: Any = None) -> Any:
    """Trilu: the upper (default) or lower triangle from diagonal `k` on, over the last two axes."""
    xp = ctx.xp
    rows, columns = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])[None, :]
    distance = xp.asarray(columns - rows)
    diagonal = 0 if k is None else xp.reshape(k, ())
    keep = distance >= diagonal if ctx.attr("upper", 1) else distance <= diagonal
    return xp.where(keep, x, xp.zeros((), x.dtype))


@kernel("ReverseSequence")
def reverse_sequence(ctx: OpContext, x: Any, lengths: Any) -> Any:
    """ReverseSequence: the first `lengths[b]` steps of each batch entry run backwards, the others stay."""
    xp, batch, time = ctx.xp, ctx.attr("batch_axis", 1), ctx.attr("time_axis", 0)
    check_shape(lengths.shape, (x.shape[batch],), "ReverseSequence: sequence_lens")
    check_lengths(xp, lengths, x.shape[time], "ReverseSequence: sequence_lens")
    steps = xp.arange(x.shape[time])[None, :]
    ends = xp.reshape(lengths, (-1, 1))
    source = xp.where(steps < ends, ends - 1 - steps, steps)
    rows = xp.arange(x.shape[batch])[:, None]
    if batch == 0:
        return x[rows, source]
    return x[source.T, rows.T]
