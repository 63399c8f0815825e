"""Conv in the forms that XLA runs fast: channels last on the CPU, 1x1 as a matrix product, depthwise as shifted sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels.namespace import narrow, wide
from xrt_core.kernels.windows import Windows, windows_of
from xrt_xla.kernels.context import Layout, XlaContext, layout, xla_kernel

_MAX_TAPS = 64
"""Depthwise kernels with more positions than this go to XLA's own convolution: the program would grow too long."""


def _form(node: Node, kind: str) -> str:
    """How a Conv runs: "lax" (XLA's own, channels first), or on the CPU "matmul", "depthwise" or "nhwc"."""
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None and w is not None
    if kind != "cpu" or w.dtype is None or w.dtype.kind == "c":
        return "lax"
    shape = w.shape
    assert shape is not None
    groups = int(node.attributes.get("group", 1))  # type: ignore[arg-type]
    taps = math.prod(int(d) for d in shape[2:])  # type: ignore[arg-type]
    if groups == 1:
        return "matmul" if taps == 1 else "nhwc"
    if shape[1] == 1 and shape[0] == groups and taps <= _MAX_TAPS:
        return "depthwise"
    return "nhwc"


def _last(xp: Any, w: Any) -> Any:
    """OI... to ...IO."""
    return xp.transpose(w, (*range(2, w.ndim), 1, 0))


def _matrix(xp: Any, w: Any) -> Any:
    return xp.transpose(xp.reshape(w, w.shape[:2]))


def _taps(xp: Any, w: Any) -> Any:
    """[C, 1, *kernel] to [taps, C]."""
    return xp.transpose(xp.reshape(w, (w.shape[0], -1)))


_LAYOUTS = {"nhwc": Layout("OI->IO", _last), "matmul": Layout("O,I->I,O", _matrix), "depthwise": Layout("C->C", _taps)}


@layout("Conv", 1)
def conv_weight(node: Node, kind: str) -> Layout | None:
    """The weight's layout for the form the convolution takes."""
    return _LAYOUTS.get(_form(node, kind))


@xla_kernel("Conv")
def conv(ctx: XlaContext, x: Any, w: Any, b: Any = None) -> Any:
    """Conv of any rank; half floats are summed in float32."""
    weight = ctx.node.inputs[1]
    assert weight is not None and weight.shape is not None
    windows = windows_of(ctx, x.shape[2:], [int(d) for d in weight.shape[2:]])  # type: ignore[arg-type]
    groups, dtype = ctx.attr("group", 1), x.dtype
    to = wide(np.dtype(dtype))
    x, w = x.astype(to), ctx.in_layout(1, w).astype(to)
    form = _form(ctx.node, ctx.kind)
    n = x.ndim
    if form == "lax":
        y = _xla_conv(ctx, x, w, windows, groups, channels_last=False)
        if b is not None:
            y = y + ctx.xp.reshape(b.astype(to), (-1,) + (1,) * (n - 2))
        return narrow(y, dtype)
    x = ctx.xp.transpose(x, (0, *range(2, n), 1))
    if form == "matmul":
        y = _pointwise(ctx, x, w, windows)
    elif form == "depthwise":
        y = _depthwise(ctx, x, w, windows)
    else:
        y = _xla_conv(ctx, x, w, windows, groups, channels_last=True)
    if b is not None:
        y = y + b.astype(to)
    return narrow(ctx.xp.transpose(y, (0, n - 1, *range(1, n - 1))), dtype)


def _xla_conv(ctx: XlaContext, x: Any, w: Any, windows: Windows, groups: int, *, channels_last: bool) -> Any:
    n = x.ndim
    spatial = tuple(range(n - 2))
    if channels_last:
        axes = ctx.lax.ConvDimensionNumbers(
            (0, n - 1, *(1 + i for i in spatial)), (n - 1, n - 2, *spatial), (0, n - 1, *(1 + i for i in spatial))
        )
    else:
        order = tuple(range(n))
        axes = ctx.lax.ConvDimensionNumbers(order, order, order)
    return ctx.lax.conv_general_dilated(
        x, w, windows.strides, list(zip(windows.begin, windows.end, strict=True)), rhs_dilation=windows.dilations,
        dimension_numbers=axes, feature_group_count=groups, precision=ctx.lax.Precision.HIGHEST,
    )  # fmt: skip


def _pad(ctx: XlaContext, x: Any, windows: Windows) -> Any:
    """Channels-last `x` padded as the windows need it."""
    if not windows.is_padded:
        return x
    widths = [(0, 0), *zip(windows.begin, windows.overhang, strict=True), (0, 0)]
    return ctx.xp.pad(x, widths)


def _pointwise(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    x = _pad(ctx, x, windows)
    x = x[(slice(None), *(windows.span(i, 0) for i in range(windows.rank)))]
    flat = ctx.xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = ctx.lax.dot(flat, w, precision=ctx.lax.Precision.HIGHEST)
    return ctx.xp.reshape(y, (*x.shape[:-1], w.shape[1]))


def _depthwise(ctx: XlaContext, x: Any, w: Any, windows: Windows) -> Any:
    x = _pad(ctx, x, windows)
    total = None
    for i, tap in enumerate(windows.taps()):
        part = x[(slice(None), *tap)] * w[i]
        total = part if total is None else total + part
    return total
