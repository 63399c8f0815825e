"""Convolutions, pooling and sampling over space, and recurrences over time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_contrib.activation import activate, silu, wide
from xrt_contrib.attention import ints
from xrt_contrib.lowering import Call, lowering
from xrt_contrib.quantized import channels_first, channels_last
from xrt_core import ops

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _activated(n: Call, y: Any) -> Any:
    alpha, beta = (*n.attr("activation_params", ()), None, None)[:2]
    return activate(n, y, n.attr("activation", ""), alpha, beta)


@lowering("FusedConv")
def _fused_conv(n: Call, x: Any, w: Any, b: Any, z: Any) -> Any:
    y = ops.Conv(x, w, b, **n.given(*_CONV))
    return _activated(n, y if z is None else y + z)


@lowering("NhwcConv", "NhwcFusedConv")
def _nhwc_conv(n: Call, x: Any, w: Any, b: Any, z: Any = None) -> Any:
    """Channels last in the images; the filters are as Conv has them."""
    y = channels_last(ops.Conv(channels_first(x), w, b, **n.given(*_CONV)))
    y = y if z is None else y + z
    return _activated(n, y) if n.node.op_type == "NhwcFusedConv" else y


@lowering("NhwcMaxPool")
def _nhwc_max_pool(n: Call, x: Any) -> Any:
    names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    return channels_last(ops.MaxPool(channels_first(x), **n.given(*names)))


@lowering("ConvTransposeWithDynamicPads", static=(2,))
def _conv_transpose(n: Call, x: Any, w: Any, pads: Any, b: Any) -> Any:
    given = n.given("auto_pad", "dilations", "group", "kernel_shape", "output_padding", "strides")
    if pads is not None:
        given["pads"] = [int(p) for p in n.known(2).reshape(-1)]
    return ops.ConvTranspose(x, w, b, **given)


@lowering("GridSample")
def _grid_sample(n: Call, x: Any, grid: Any) -> Any:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(n.attr("mode", "bilinear"), n.attr("mode", "bilinear"))
    return ops.GridSample(
        x, grid, mode=mode, padding_mode=n.attr("padding_mode", "zeros"), align_corners=n.attr("align_corners", 0)
    )


@lowering("CropAndResize", static=(3,))
def _crop_and_resize(n: Call, x: Any, rois: Any, batch: Any, size: Any) -> Any:
    """Boxes [y1, x1, y2, x2] of images, as fractions of their sides, sampled with corners aligned."""
    height, width = (int(v) for v in n.known(3).reshape(-1))
    rows, columns = x.shape[2], x.shape[3]
    images = ops.Transpose(x, perm=[0, 2, 3, 1])
    count = rois.shape[0]

    def places(low: Any, high: Any, steps: int, length: int) -> Any:  # [boxes, steps]
        if steps == 1:
            return (low + high) * (0.5 * (length - 1))
        return low * float(length - 1) + np.arange(steps, dtype=x.dtype)[None, :] * (
            (high - low) * ((length - 1) / (steps - 1))
        )

    y1, x1, y2, x2 = ops.Split(rois, axis=1, num_outputs=4)
    ys, xs = places(y1, y2, height, rows), places(x1, x2, width, columns)

    def inside(p: Any, length: int) -> Any:
        return ops.And(ops.GreaterOrEqual(p, np.array(0, x.dtype)), ops.LessOrEqual(p, np.array(length - 1, x.dtype)))

    valid = ops.And(inside(ys, rows).unsqueeze(2), inside(xs, columns).unsqueeze(1)).unsqueeze(3)
    shape = ints(count, height, width, 1)
    image = ops.Expand(batch.astype(np.int64).reshape(-1, 1, 1, 1), shape)

    def at(row: Any, column: Any) -> Any:
        r = ops.Clip(row, np.array(0, x.dtype), np.array(rows - 1, x.dtype)).astype(np.int64)
        c = ops.Clip(column, np.array(0, x.dtype), np.array(columns - 1, x.dtype)).astype(np.int64)
        index = ops.Concat(
            image, ops.Expand(r.unsqueeze([2, 3]), shape), ops.Expand(c.unsqueeze([1, 3]), shape), axis=3
        )
        return ops.GatherND(images, index)

    if n.attr("mode", "bilinear") == "nearest":
        found = at(ops.Floor(ys + 0.5), ops.Floor(xs + 0.5))
    else:
        top, left = ops.Floor(ys), ops.Floor(xs)
        bottom, right = ops.Ceil(ys), ops.Ceil(xs)
        down, across = (ys - top).unsqueeze([2, 3]), (xs - left).unsqueeze([1, 3])
        upper = at(top, left) * (1 - across) + at(top, right) * across
        lower = at(bottom, left) * (1 - across) + at(bottom, right) * across
        found = upper * (1 - down) + lower * down
    y = ops.Where(valid, found, np.array(n.attr("extrapolation_value", 0.0), x.dtype))
    return ops.Transpose(y, perm=[0, 3, 1, 2])


@lowering("WordConvEmbedding")
def _word_conv_embedding(n: Call, words: Any, w: Any, bias: Any, embedding: Any) -> Any:
    """The largest tanh of a convolution over the characters of each word, whose id 0 pads; 0 for a word of none."""
    shape = words.shape
    chars, window = shape[-1], w.shape[2]
    n.check(chars >= window, f"words of {chars} characters for a window of {window}")
    flat = words.reshape(-1, chars)
    is_char = ops.Greater(flat, np.array(0, flat.dtype))
    lengths = ops.ReduceSum(is_char.astype(np.int32), ints(1), keepdims=1)
    ends = ops.Max(lengths, np.array(window, np.int32))  # a shorter word goes on with the vectors of its padding
    used = ops.Less(np.arange(chars, dtype=np.int32)[None, :], ends)
    vectors = ops.Gather(embedding, flat, axis=0) * used.astype(embedding.dtype).unsqueeze(2)
    y = ops.Tanh(ops.Conv(vectors.unsqueeze(1), w, bias).squeeze(3))  # [words, filters, positions]
    last = ops.Max(lengths - window, np.array(0, np.int32))
    seen = ops.LessOrEqual(np.arange(chars - window + 1, dtype=np.int32)[None, :], last).unsqueeze(1)
    best = ops.ReduceMax(ops.Where(seen, y, np.array(-math.inf, y.dtype)), ints(2), keepdims=0)
    best = ops.Where(ops.Greater(lengths, np.array(0, np.int32)), best, np.array(0, y.dtype))
    return best.reshape(*shape[:-1], w.shape[0])


@lowering("CausalConvWithState")
def _causal_conv(n: Call, x: Any, w: Any, bias: Any, past: Any) -> Any:
    """A depthwise convolution that sees the past alone; the state is its last inputs."""
    ndim, dilation, window = n.attr("ndim", 1), n.attr("dilation", 1), n.attr("state_window", 0)
    n.check(0 <= window <= _WINDOW, f"state_window = {window}; it may be 0 to {_WINDOW}")
    for name, plain in (
        ("state_update_capacity", 0), ("state_channels_last", -1), ("state_length", 0), ("input_channel_offset", 0),
        ("input_channels", 0),
    ):  # fmt: skip
        if n.attr(name, plain) != plain:
            raise n.refuse(f"{name} = {n.attr(name)} is of ONNX Runtime's kernels for CUDA, and not lowered")
    last = bool(n.attr("channels_last", 0))
    original = x.shape
    channels = w.shape[0]
    if last:
        n.check(ndim == 1, "channels_last needs ndim = 1")
        x = ops.Transpose(x.reshape(original[0], original[1], channels), perm=[0, 2, 1])
    span = (w.shape[-1] - 1) * dilation
    carried = past
    if past is not None:
        carried = past[window - 1] if window else past
        if last:
            carried = ops.Transpose(carried.reshape(original[0], span, channels), perm=[0, 2, 1])
    else:
        carried = ops.Expand(np.array(0, x.dtype), ints(*x.shape[:-1], span))
    whole = ops.Concat(carried, x, axis=-1) if span else x
    sides = w.shape[2:-1]
    pads = [(k - 1) // 2 for k in sides] + [0] + [k - 1 - (k - 1) // 2 for k in sides] + [0]
    y = ops.Conv(whole, w, bias, group=channels, dilations=[1] * (ndim - 1) + [dilation], pads=pads)
    activation = n.attr("activation", "none")
    if activation in ("silu", "swish"):
        y = silu(wide(y)).astype(x.dtype)
    elif activation != "none":
        raise n.refuse(f"activation = {activation!r}")
    length = x.shape[-1]

    def state(end: int) -> Any:  # after `end` positions of this call
        part = ops.Slice(whole, ints(end), ints(end + span), ints(-1))
        if not last:
            return part
        trailing = original[2:]
        return ops.Transpose(part, perm=[0, 2, 1]).reshape(original[0], span, *trailing)

    if not window:
        present = state(length)
    else:
        slots = []
        for j in range(window):
            end = length - window + j + 1
            slot = state(max(end, 1))
            slots.append((slot if end > 0 else ops.Expand(np.array(0, slot.dtype), ints(*slot.shape))).unsqueeze(0))
        present = slots[0] if window == 1 else ops.Concat(*slots, axis=0)
    if last:
        y = ops.Transpose(y, perm=[0, 2, 1]).reshape(*original)
    return y, present


_UNROLLED = 32
"""Steps up to which a recurrence is written out; longer ones become a Scan."""
_WINDOW = 8
"""States that a window may hold."""


@lowering("LinearAttention")
def _linear_attention(n: Call, query: Any, key: Any, value: Any, past: Any, decay: Any, beta: Any) -> Any:
    """A state of keys times values for each head, updated token by token by one of four rules."""
    heads, shared, rule = n.attr("q_num_heads"), n.attr("kv_num_heads"), n.attr("update_rule", "gated_delta")
    n.check(rule in ("linear", "gated", "delta", "gated_delta"), f"update_rule = {rule!r}")
    n.check("gated" not in rule or decay is not None, f"update_rule = {rule!r} needs decay")
    n.check("delta" not in rule or beta is not None, f"update_rule = {rule!r} needs beta")
    window = n.attr("state_window", 0)
    n.check(0 <= window <= _WINDOW, f"state_window = {window}; it may be 0 to {_WINDOW}")
    if past is not None and window:
        past = past[window - 1]
    batch, length = query.shape[:2]
    size, width = query.shape[2] // heads, value.shape[2] // shared
    keys = key.shape[2] // size
    dtype = query.dtype
    scale = n.attr("scale", 0.0) or 1 / math.sqrt(size)

    def sequence(x: Any, count: int) -> Any:  # [length, batch, count, size]
        return ops.Transpose(wide(x).reshape(batch, length, count, -1), perm=[1, 0, 2, 3])

    def repeated(x: Any, count: int) -> Any:  # heads of the state
        return x if x.shape[2] == count else ops.Gather(x, np.arange(count) * x.shape[2] // count, axis=2)

    total = max(heads, shared)
    q = sequence(query, heads) * scale
    k, v = repeated(sequence(key, keys), shared), sequence(value, shared)
    parts = [q, k, v]
    if "gated" in rule:
        parts.append(ops.Exp(sequence(decay, shared)))  # [length, batch, heads, size or 1]
    if "delta" in rule:
        b = sequence(beta, beta.shape[2])
        parts.append(b if b.shape[2] == shared else ops.Expand(b, ints(length, batch, shared, 1)))
    start = ops.Expand(np.array(0, q.dtype), ints(batch, shared, size, width)) if past is None else wide(past)

    def step(state: Any, q: Any, k: Any, v: Any, *more: Any) -> tuple[Any, Any]:
        rest = list(more)
        if "gated" in rule:
            state = state * rest.pop(0).unsqueeze(3)
        if "delta" in rule:
            seen = ops.MatMul(k.unsqueeze(2), state).squeeze(2)
            v = (v - seen) * rest.pop(0)
        state = state + k.unsqueeze(3) * v.unsqueeze(2)
        read = state if total == shared else ops.Gather(state, np.arange(total) * shared // total, axis=1)
        asked = q if total == heads else ops.Gather(q, np.arange(total) * heads // total, axis=1)
        return state, ops.MatMul(asked.unsqueeze(2), read).squeeze(2)

    scanned = max(length - window, 0) if length > _UNROLLED else 0
    state, results, states = start, [], []
    if scanned:
        first = [p[:scanned] for p in parts] if scanned < length else parts
        state, y = ops.Scan(state, *first, body=step, num_scan_inputs=len(parts))
        results.append(y)
    for t in range(scanned, length):
        state, y = step(state, *(p[t] for p in parts))
        results.append(y.unsqueeze(0))
        states.append(state.unsqueeze(0))
    found = results[0] if len(results) == 1 else ops.Concat(*results, axis=0)
    if window:
        missing = window - min(window, length)
        none = [ops.Expand(np.array(0, state.dtype), ints(missing, *state.shape))] if missing else []
        slots = none + states[-window:]
        state = slots[0] if len(slots) == 1 else ops.Concat(*slots, axis=0)
    y = ops.Transpose(found, perm=[1, 0, 2, 3]).reshape(batch, length, total * width)
    return y.astype(dtype), state.astype(np.float32 if past is None else past.dtype)
