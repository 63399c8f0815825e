"""Conv in the forms that XLA runs fast.

On CUDA and TPU that is XLA's own convolution. On the CPU everything is channels-last inside (the transposes between two
convolutions cancel), and the measured best of several forms is taken; see `form_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.windows import Windows, windows_of
from xrt_xla.kernels import winograd
from xrt_xla.kernels.context import Layout, XlaContext, layout, portable, xla_kernel

MAX_TAPS = 64
"""Forms that write out each kernel position are for kernels up to this size: the program grows with it."""

_SHORT_SUM = 32
"""XLA's own convolution is slow where each result is a sum of so few products: the first layer of a network."""


_SMALL: Final = 1 << 14
"""Elements of all windows up to which a product of them takes no longer than XLA's own convolution, and for some shapes
a third (129 positions, 64 channels, windows of 3 by strides of 2)."""


def form_of(shape: Sequence[int], groups: int, kind: str, positions: int | None = None, unit: bool = False) -> str:
    """How to convolve with a filter of `shape` (OI...) on a kind of device. positions: of all results, where known.
    unit: of float32, without strides and dilations.

    xla: XLA's own, channels first. The others are for the CPU, channels last:
    matmul: 1x1 as a matrix product.
    depthwise: one multiply-add for each kernel position (0.2 ms where XLA's own takes 9; of one channel, as the first
        layer of a network, half the time of "patches").
    patches: windows written out and one product for each group (half the time of XLA's own; also for short sums, and
        where there is little to compute).
    columns: the filter as it lies by the windows, as columns, for deep layers of small images: no more positions than
        filters, where the filter is the most of what is read (512 channels by 3 x 3: 8 images of 2 x 2 in 1.2 ms, 71 in
        XLA's own, an image of 7 x 7 in 2.3, which were 4.6).
    winograd: 3 x 3 over many channels, with fewer products (half to two thirds of the time).
    planes: 3D as a sum of 2D ones (a sixth).
    last: XLA's own, channels last.
    """
    if kind != "cpu":
        return "xla"
    taps = math.prod(shape[2:])
    if groups == 1:
        if taps == 1:
            return "matmul"
        if taps * shape[1] <= _SHORT_SUM:
            return "depthwise" if shape[1] == 1 else "patches"
        if positions is not None and positions * taps * shape[1] <= _SMALL and taps <= MAX_TAPS:
            return "patches"
        if positions is not None and positions <= shape[0] and taps <= MAX_TAPS:
            return "columns"
        if unit and positions is not None and winograd.pays(shape, positions):
            return "winograd"
        return "planes" if len(shape) == 5 and shape[2] <= MAX_TAPS else "last"
    if taps > MAX_TAPS:
        return "last"
    return "depthwise" if shape[1] == 1 and shape[0] == groups else "patches"


def _last(xp: Any, w: Any) -> Any:
    return xp.transpose(w, (*range(2, w.ndim), 1, 0))


def _matrix(xp: Any, w: Any) -> Any:
    return xp.transpose(xp.reshape(w, w.shape[:2]))


def _taps(xp: Any, w: Any) -> Any:
    return xp.transpose(xp.reshape(w, (w.shape[0], -1)))


def filter_layout(form: str, groups: int) -> Layout | None:
    """The layout of the filter for a form, or None for OI... as it is."""
    if form in ("last", "planes"):
        return Layout("*IO", _last)
    if form == "matmul":
        return Layout("IO", _matrix)
    if form == "winograd":
        return Layout("winograd", lambda xp, w: winograd.laid_out(_last(xp, w)))
    if form == "depthwise":
        return Layout("*C", _taps)
    if form == "patches":

        def make(xp: Any, w: Any) -> Any:  # O I/g * -> g (* I/g) O/g
            filters, depth = w.shape[:2]
            w = xp.reshape(w, (groups, filters // groups, depth, -1))
            return xp.reshape(xp.transpose(w, (0, 3, 2, 1)), (groups, -1, filters // groups))

        return Layout(f"{groups}*IO", make)
    return None


def static_shape(node: Node, index: int) -> tuple[int, ...]:
    """The shape of an input, all of it known."""
    value = node.inputs[index]
    assert value is not None
    assert value.shape is not None
    return tuple(int(d) for d in value.shape)  # type: ignore[arg-type]


def _form(node: Node, kind: str) -> tuple[str, int]:
    """The form of a Conv, and its groups."""
    groups, out = int(node.attributes.get("group", 1)), node.outputs[0]  # type: ignore[arg-type]
    assert out is not None
    assert out.shape is not None
    positions = math.prod(int(d) for i, d in enumerate(out.shape) if i != 1)  # type: ignore[arg-type]
    return form_of(static_shape(node, 1), groups, kind, positions, is_unit(node)), groups


def is_unit(node: Node) -> bool:
    """Whether a Conv or its kin is of float32, without strides and dilations."""
    steps = (node.attributes.get(name) or (1,) for name in ("strides", "dilations"))
    value = node.inputs[0]
    return value is not None and value.dtype == np.float32 and all(set(s) == {1} for s in steps)  # type: ignore[arg-type]


@layout("Conv", 1)
def _conv_filter(node: Node, kind: str) -> Layout | None:
    return None if 0 in static_shape(node, 1) else filter_layout(*_form(node, kind))


@xla_kernel("Conv")
def conv(ctx: XlaContext, x: Any, w: Any, bias: Any = None) -> Any:
    """Conv of any rank; half floats are summed in float32."""
    shape, dtype = static_shape(ctx.node, 1), x.dtype
    if x.ndim < 3 or 0 in x.shape or 0 in shape:  # empty arrays have no fast forms
        return portable(ctx, x, w, bias)
    to = wide(np.dtype(dtype))
    windows = windows_of(ctx, x.shape[2:], shape[2:])
    form, groups = _form(ctx.node, ctx.kind)
    w = w if form == "winograd" else ctx.in_layout(1, w)
    y = convolve(ctx, x.astype(to), w.astype(to), windows, groups, form, shape, bias)
    return narrow(y, dtype)


def convolve(
    ctx: XlaContext, x: Any, w: Any, windows: Windows, groups: int, form: str, shape: tuple[int, ...], bias: Any = None
) -> Any:
    """Correlate x[N, C, *size] with a filter of `shape` (OI...) that lies as `filter_layout` says, and add the bias."""
    xp, rank = ctx.xp, x.ndim
    if form == "xla":
        order = tuple(range(rank))
        y = _xla(ctx, x, w, windows, groups, ctx.lax.ConvDimensionNumbers(order, order, order))
        return y if bias is None else y + xp.reshape(bias.astype(y.dtype), (-1,) + (1,) * (rank - 2))
    if form == "columns":
        y = _columns(ctx, x, w, windows)
        return y if bias is None else y + xp.reshape(bias.astype(y.dtype), (-1,) + (1,) * (rank - 2))
    x = xp.transpose(x, (0, *range(2, rank), 1))
    if form == "winograd":
        y = winograd.correlate(ctx, x, _last(xp, w) if w.shape == shape else w, windows.begin, windows.out)
    else:
        y = correlate(ctx, x, w, windows, groups, form)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return xp.transpose(y, (0, rank - 1, *range(1, rank - 1)))


def correlate(ctx: XlaContext, x: Any, w: Any, windows: Windows, groups: int, form: str) -> Any:
    """Correlate x[N, *size, C] with a filter that lies as `filter_layout` says, in a form of channels last."""
    if form == "matmul":
        return _pointwise(ctx, x, w, windows)
    if form == "depthwise":
        return _depthwise(ctx, x, w, windows)
    if form == "patches":
        return _patches(ctx, x, w, windows, groups)
    if form == "planes":
        return _planes(ctx, x, w, windows)
    return _xla(ctx, x, w, windows, groups, channels_last(ctx, x.ndim))


def channels_last(ctx: XlaContext, rank: int) -> Any:
    """Dimension numbers: data N...C, filters ...IO."""
    data = (0, rank - 1, *range(1, rank - 1))
    return ctx.lax.ConvDimensionNumbers(data, (rank - 1, rank - 2, *range(rank - 2)), data)


def _xla(ctx: XlaContext, x: Any, w: Any, windows: Windows, groups: int, axes: Any) -> Any:
    return ctx.lax.conv_general_dilated(
        x,
        w,
        windows.strides,
        list(zip(windows.begin, windows.end, strict=True)),
        rhs_dilation=windows.dilations,
        dimension_numbers=axes,
        feature_group_count=groups,
        precision=ctx.lax.Precision.HIGHEST,
    )


def pad(ctx: XlaContext, x: Any, windows: Windows, first: int = 1) -> Any:
    """`x` padded (or, by a negative begin, cut) as the windows need it. first: the axis where they begin; 1 where
    channels are last."""
    if not windows.is_padded:
        return x
    whole = ((0, 0, 0),)
    sides = ((b, e, 0) for b, e in zip(windows.begin, windows.overhang, strict=True))
    padding = [*whole * first, *sides, *whole * (x.ndim - first - windows.rank)]
    return ctx.lax.pad(x, ctx.xp.zeros((), x.dtype), padding)


def _pointwise(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    x = pad(ctx, x, windows)
    x = x[(slice(None), *(windows.span(i, 0) for i in range(windows.rank)))]
    flat = ctx.xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = ctx.lax.dot(flat, w, precision=ctx.lax.Precision.HIGHEST)
    return ctx.xp.reshape(y, (*x.shape[:-1], w.shape[1]))


def _depthwise(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    x = pad(ctx, x, windows)
    total = None
    for i, tap in enumerate(windows.taps()):
        part = x[(slice(None), *tap)] * w[i]
        total = part if total is None else total + part
    return total


def _patches(ctx: XlaContext, x: Any, w: Any, windows: Windows, groups: int) -> Any:
    xp, (n, channels) = ctx.xp, (x.shape[0], x.shape[-1])
    x = pad(ctx, x, windows)
    positions, depth = n * math.prod(windows.out), channels // groups
    parts = [xp.reshape(x[(slice(None), *tap)], (positions, groups, depth)) for tap in windows.taps()]
    patches = xp.transpose(xp.stack(parts, axis=2), (1, 0, 2, 3))  # group, position, tap, channel
    patches = xp.reshape(patches, (groups, positions, len(parts) * depth))
    y = xp.matmul(patches, w, precision=ctx.lax.Precision.HIGHEST)
    return xp.reshape(xp.swapaxes(y, 0, 1), (n, *windows.out, groups * w.shape[2]))


def _columns(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    xp, (n, filters) = ctx.xp, (x.shape[0], w.shape[0])
    y = xp.matmul(xp.reshape(w, (filters, -1)), columns(ctx, x, windows), precision=ctx.lax.Precision.HIGHEST)
    return xp.swapaxes(xp.reshape(y, (filters, n, *windows.out)), 0, 1)


def columns(ctx: XlaContext, x: Any, windows: Windows) -> Any:
    """The windows of x[N, C, *size] as columns: rows are channels and taps, columns images and positions."""
    xp, rows = ctx.xp, pad(ctx, ctx.xp.transpose(x, (1, 0, *range(2, x.ndim))), windows, 2)
    parts = [rows[(slice(None), slice(None), *tap)] for tap in windows.taps()]
    return xp.reshape(xp.stack(parts, axis=1), (x.shape[1] * len(parts), -1))


def _planes(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    xp, flat = ctx.xp, plane(windows)
    sides = [(0, 0, 0), (windows.begin[0], windows.overhang[0], 0), *[(0, 0, 0)] * windows.rank]
    x = ctx.lax.pad(x, xp.zeros((), x.dtype), sides)
    n, depth, total = x.shape[0], windows.out[0], None
    for tap in range(windows.kernel[0]):
        part = x[:, windows.span(0, tap)]
        part = xp.reshape(part, (n * depth, *part.shape[2:]))
        y = _xla(ctx, part, w[tap], flat, 1, channels_last(ctx, part.ndim))
        total = y if total is None else total + y
    assert total is not None
    return xp.reshape(total, (n, depth, *total.shape[1:]))


def plane(windows: Windows) -> Windows:
    """The windows without their first axis."""
    return Windows(*(field[1:] for field in (
        windows.size, windows.kernel, windows.strides, windows.dilations, windows.begin, windows.end, windows.out
    )))  # fmt: skip
