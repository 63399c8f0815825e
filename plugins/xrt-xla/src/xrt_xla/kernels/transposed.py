"""ConvTranspose, which is also the gradient of Conv by its input, in the forms that XLA runs fast.

That is XLA's convolution of the input spread by its strides; on the CPU there are better ones for some shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.windows import Windows, spatial_attribute
from xrt_xla.kernels import winograd
from xrt_xla.kernels.context import Layout, XlaContext, layout, portable, xla_kernel
from xrt_xla.kernels.convolution import channels_last, correlate, form_of, is_unit, static_shape

_DEEP, _CACHED = 256, 4 << 20
"""Scattering writes the product of every tap: worth it for sums over many channels, while these bytes stay cached."""

_MAX_TAPS = 256
"""Scattering is for so many kernel positions: the program grows with them."""


def transposed_form(node: Node, kind: str) -> str:
    """How to compute a ConvTranspose on a kind of device.

    spread: XLA's convolution of the input spread by its strides.
    winograd: 3 x 3 without strides, as Conv's form of that name.
    scatter: one product for all taps, added up where they go (half the time over deep, small images).
    blocks: the same where no two taps meet, as kernel and strides are equal: the products are the result (nine tenths
        of the time, while they stay cached).
    phases: with groups, and of three axes or more, for each remainder of a position by the strides the convolution by
        the taps that meet it, in the forms of Conv (depthwise: a tenth of the time, and far less for large kernels;
        16x16 by strides of 8 takes 2 s to compile and 10 ms to run, spread 0.2 s and 1.4 s; of three axes, for which
        XLA has no fast convolution of a spread input, a hundredth).
    """
    x, (channels, filters, *kernel) = static_shape(node, 0), static_shape(node, 1)
    taps = math.prod(kernel)
    if kind != "cpu":
        return "spread"
    strides, dilations = (set(node.attributes.get(a) or (1,)) for a in ("strides", "dilations"))  # type: ignore[arg-type]
    if int(node.attributes.get("group", 1)) > 1:  # type: ignore[arg-type]
        return "phases" if strides == {1} or dilations == {1} else "spread"
    products = x[0] * math.prod(x[2:]) * taps * filters * 4
    if dilations == {1} and strides != {1}:
        is_cut = tuple(kernel) == tuple(node.attributes["strides"])  # type: ignore[arg-type]
        if is_cut and (len(kernel) > 2 or products <= _CACHED):
            return "blocks"
        if len(kernel) > 2:
            return "phases"
    if 1 < taps <= _MAX_TAPS and channels >= _DEEP and products <= _CACHED:
        return "scatter"
    fast = is_unit(node) and winograd.pays((filters, channels, *kernel), x[0] * math.prod(x[2:]))
    return "winograd" if fast else "spread"


@layout("ConvTranspose", 1)
def _filter(node: Node, kind: str) -> Layout | None:
    groups = int(node.attributes.get("group", 1))  # type: ignore[arg-type]
    if 0 in static_shape(node, 1):
        return None
    form = transposed_form(node, kind)
    if form == "winograd":
        return Layout("flipped winograd", lambda xp, w: winograd.laid_out(_flipped(xp, w, 1)))
    if form in ("scatter", "blocks"):

        def taps(xp: Any, w: Any) -> Any:  # I O * -> I (* O)
            w = xp.reshape(w, (*w.shape[:2], -1))
            return xp.reshape(xp.swapaxes(w, 1, 2), (w.shape[0], -1))

        return Layout("I*O", taps)

    return Layout(f"flip{groups}", lambda xp, w: _flipped(xp, w, groups))


def _flipped(xp: Any, w: Any, groups: int) -> Any:  # I O/g * -> (flipped *) I/g O
    rank = w.ndim
    if groups == 1:
        return xp.flip(xp.transpose(w, (*range(2, rank), 0, 1)), tuple(range(rank - 2)))
    w = xp.flip(w, tuple(range(2, rank)))
    w = xp.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
    w = xp.transpose(w, (*range(3, rank + 1), 1, 0, 2))
    return xp.reshape(w, (*w.shape[: rank - 1], -1))


@xla_kernel("ConvTranspose")
def conv_transpose(ctx: XlaContext, x: Any, w: Any, bias: Any = None) -> Any:
    """ConvTranspose of any rank, channels last inside; half floats are summed in float32."""
    shape, groups, dtype = static_shape(ctx.node, 1), int(ctx.attr("group", 1)), x.dtype
    if x.ndim < 3 or 0 in x.shape or 0 in shape:
        return portable(ctx, x, w, bias)
    xp, rank, out = ctx.xp, x.ndim - 2, ctx.node.outputs[0]
    assert out is not None
    assert out.shape is not None
    size = tuple(int(d) for d in out.shape[2:])  # type: ignore[arg-type]
    strides, dilations = (spatial_attribute(ctx, name, rank, 1) for name in ("strides", "dilations"))
    begin = _crop(ctx, x.shape[2:], shape[2:], strides, dilations)
    to = wide(np.dtype(dtype))
    x = xp.transpose(x.astype(to), (0, *range(2, rank + 2), 1))
    form = transposed_form(ctx.node, ctx.kind)
    w = (w if form == "winograd" else ctx.in_layout(1, w)).astype(to)
    if form == "winograd":
        y = winograd.correlate(ctx, x, _flipped(xp, w, 1) if w.shape == shape else w, [2 - b for b in begin], size)
    elif form == "blocks":
        y = _blocks(ctx, x, w, begin, size, shape[2:])
    elif form == "scatter":
        y = _scatter(ctx, x, w, strides, dilations, begin, size, shape[2:])
    elif form == "phases":
        y = _phases(ctx, x, w, strides, dilations, begin, size, groups)
    else:
        y = _spread(ctx, x, w, strides, dilations, begin, size, groups)
    if bias is not None:
        y = y + bias.astype(to)
    return narrow(xp.transpose(y, (0, rank + 1, *range(1, rank + 1))), dtype)


Ints = Sequence[int]


def _spread(
    ctx: XlaContext, x: Any, w: Any, strides: Ints, dilations: Ints, begin: Ints, size: Ints, groups: int
) -> Any:
    pads = []
    for i, n in enumerate(x.shape[1:-1]):
        reach, spread = (w.shape[i] - 1) * dilations[i], (n - 1) * strides[i] + 1
        pads.append((reach - begin[i], size[i] - spread + begin[i]))
    return ctx.lax.conv_general_dilated(
        x, w, (1,) * len(size), pads, lhs_dilation=strides, rhs_dilation=dilations,
        dimension_numbers=channels_last(ctx, x.ndim), feature_group_count=groups, precision=ctx.lax.Precision.HIGHEST,
    )  # fmt: skip


def _products(ctx: XlaContext, x: Any, w: Any, kernel: Ints) -> Any:
    """Every element by every tap: (batch, *, taps, filters)."""
    products = ctx.lax.dot(ctx.xp.reshape(x, (-1, x.shape[-1])), w, precision=ctx.lax.Precision.HIGHEST)
    return ctx.xp.reshape(products, (*x.shape[:-1], math.prod(kernel), -1))


def _blocks(ctx: XlaContext, x: Any, w: Any, begin: Ints, size: Ints, kernel: Ints) -> Any:
    xp, rank = ctx.xp, len(size)
    y = xp.reshape(_products(ctx, x, w, kernel), (*x.shape[:-1], *kernel, -1))
    y = xp.transpose(y, (0, *(a for i in range(rank) for a in (1 + i, 1 + rank + i)), 2 * rank + 1))
    whole = [n * k for n, k in zip(x.shape[1:-1], kernel, strict=True)]
    y = xp.reshape(y, (x.shape[0], *whole, y.shape[-1]))
    if [*begin] == [0] * rank and [*size] == whole:
        return y
    sides = [(-b, b + n - full, 0) for b, n, full in zip(begin, size, whole, strict=True)]
    return ctx.lax.pad(y, xp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)])


def _scatter(
    ctx: XlaContext, x: Any, w: Any, strides: Ints, dilations: Ints, begin: Ints, size: Ints, kernel: Ints
) -> Any:
    xp, lax = ctx.xp, ctx.lax
    products = _products(ctx, x, w, kernel)
    total, zero = None, xp.zeros((), x.dtype)
    for i, tap in enumerate(np.ndindex(*kernel)):
        sides = []
        for axis, n in enumerate(x.shape[1:-1]):
            low = tap[axis] * dilations[axis] - begin[axis]  # negative: cut, after the spreading
            sides.append((low, size[axis] - low - ((n - 1) * strides[axis] + 1), strides[axis] - 1))
        part = lax.pad(products[..., i, :], zero, [(0, 0, 0), *sides, (0, 0, 0)])
        total = part if total is None else total + part
    return total


def _phases(
    ctx: XlaContext, x: Any, w: Any, strides: Ints, dilations: Ints, begin: Ints, size: Ints, groups: int
) -> Any:
    xp, kernel, rank = ctx.xp, w.shape[:-2], len(size)
    out = tuple(-(-n // s) for n, s in zip(size, strides, strict=True))  # of one phase, along each axis
    parts = []
    for phase in itertools.product(*map(range, strides)):
        taps, lows = [], []  # position `phase + s j` sums x[j + low' + u] by the flipped taps that its remainder meets
        for i, at in enumerate(phase):
            first, k = (at + begin[i]) % strides[i], kernel[i]
            count = len(range(first, k, strides[i]))
            taps.append(slice(k - 1 - first - strides[i] * (count - 1), k, strides[i]) if count else slice(0, 0))
            lows.append((count - 1) * dilations[i] - (at + begin[i]) // strides[i])
        part = w[tuple(taps)]
        if 0 in part.shape:
            parts.append(xp.zeros((x.shape[0], *out, w.shape[-1]), x.dtype))
            continue
        ends = (
            o - 1 + (k - 1) * d + 1 - n - low
            for o, k, d, n, low in zip(out, part.shape, dilations, x.shape[1:], lows, strict=False)
        )
        windows = Windows(x.shape[1:-1], part.shape[:-2], (1,) * rank, tuple(dilations), tuple(lows), tuple(ends), out)
        shape = (w.shape[-1], w.shape[-2], *part.shape[:-2])
        form = form_of(shape, groups, ctx.kind)
        parts.append(correlate(ctx, x, _laid_out(xp, part, groups, form), windows, groups, form))
    if len(parts) == 1:
        return parts[0]
    y = xp.reshape(xp.stack(parts), (*strides, *parts[0].shape))
    y = xp.transpose(y, (rank, *(a for i in range(rank) for a in (rank + 1 + i, i)), 2 * rank + 1))
    y = xp.reshape(y, (x.shape[0], *(o * s for o, s in zip(out, strides, strict=True)), w.shape[-1]))
    return y[(slice(None), *(slice(n) for n in size))]


def _laid_out(xp: Any, w: Any, groups: int, form: str) -> Any:
    """A filter (* I/g O) as `filter_layout` has it for a form."""
    filters = w.shape[-1]
    if form == "matmul":
        return xp.reshape(w, w.shape[-2:])
    if form == "depthwise":
        return xp.reshape(w, (-1, filters))
    if form == "patches":
        w = xp.reshape(w, (-1, groups, filters // groups))
        return xp.transpose(w, (1, 0, 2))
    return w


def _crop(
    ctx: XlaContext, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """How much the padding takes off the beginning of each axis of the full result (ONNX: ConvTranspose)."""
    rank = len(size)
    auto_pad = ctx.attr("auto_pad", "NOTSET") or "NOTSET"
    extra = spatial_attribute(ctx, "output_padding", rank, 0)
    wanted = ctx.attr("output_shape")
    if wanted:
        target = [int(d) for d in wanted][-rank:]
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        target = [n * s for n, s in zip(size, strides, strict=True)]
    elif auto_pad == "VALID":
        return [0] * rank
    else:
        return [int(p) for p in (ctx.attr("pads") or (0,) * (2 * rank))[:rank]]
    crops = []
    for i in range(rank):
        full = (size[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        total = max(0, full + extra[i] - target[i])
        crops.append(total // 2 if auto_pad == "SAME_UPPER" else total - total // 2)
    return crops
