"""Operators that move, select and generate elements, and mixes of streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_contrib.activation import wide
from xrt_contrib.attention import ints
from xrt_contrib.lowering import Call, lowering
from xrt_contrib.normalization import rms
from xrt_core import ops


@lowering("SampleOp")
def _sample_op(n: Call, x: Any) -> Any:
    return ops.Identity(x)


@lowering("Trilu")
def _trilu(n: Call, x: Any, k: Any) -> Any:
    return ops.Trilu(x, k, upper=n.attr("upper", 1))


@lowering("ExpandDims", static=(1,))
def _expand_dims(n: Call, x: Any, axis: Any) -> Any:
    return ops.Unsqueeze(x, ints(int(n.known(1).reshape(()))))


@lowering("GatherND")
def _gather_nd(n: Call, data: Any, indices: Any) -> Any:
    return ops.GatherND(data, indices.astype(np.int64))


@lowering("Unique")
def _unique(n: Call, x: Any) -> Any:
    """In the order of the first occurrences."""
    values, _, inverse, counts = ops.Unique(x, sorted=0, outputs=4)
    return values, inverse, counts


@lowering("Range", static=(0, 1, 2))
def _range(n: Call, start: Any, limit: Any, delta: Any) -> Any:
    step = np.array(1, start.dtype) if delta is None else delta.reshape(())
    return ops.Range(start.reshape(()), limit.reshape(()), step)


@lowering("Pad", static=(1,))
def _pad(n: Call, x: Any, pads: Any, value: Any) -> Any:
    return ops.Pad(x, pads.reshape(-1), None if value is None else value.reshape(()), mode=n.attr("mode", "constant"))


@lowering("UnfoldTensor")
def _unfold(n: Call, x: Any) -> Any:
    """Windows of `size` along an axis, `step` apart, as a new last axis."""
    axis, size, step = n.attr("dim", -1) % x.ndim, n.attr("size"), n.attr("step", 1)
    n.check(1 <= size <= x.shape[axis] and step >= 1, f"windows of {size} every {step} of {x.shape[axis]}")
    count = (x.shape[axis] - size) // step + 1
    index = np.arange(count)[:, None] * step + np.arange(size)
    y = ops.Gather(x, index.astype(np.int64), axis=axis)
    rank = x.ndim
    return ops.Transpose(y, perm=[*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@lowering("RemovePadding")
def _remove_padding(n: Call, x: Any, counts: Any) -> Any:
    """The tokens that are no padding, with their places; the places of the padding follow."""
    batch, length, hidden = x.shape
    valid = ops.Less(np.arange(length, dtype=np.int32)[None, :], counts.unsqueeze(1)).reshape(-1)
    places = np.arange(batch * length, dtype=np.int32)
    kept, left = ops.Compress(places, valid, axis=0), ops.Compress(places, ops.Not(valid), axis=0)
    tokens = ops.Compress(x.reshape(batch * length, hidden), valid, axis=0)
    ends = ops.Concat(np.zeros(1, np.int32), ops.CumSum(counts, np.array(0, np.int64)), axis=0)
    offsets = ops.Concat(kept, left, axis=0).reshape(batch, length)
    return tokens, offsets, ends, ops.ReduceMax(counts, keepdims=1)


# --- streams and gates ---


@lowering("BranchwiseRMSNorm")
def _branchwise_rms(n: Call, x: Any, scale: Any) -> Any:
    branches = n.attr("num_branches", 0)
    w = wide(x)
    if branches:
        w = w.reshape(*x.shape[:-1], branches, x.shape[-1] // branches)
    y, _ = rms(w, None, n.attr("epsilon", 1e-5))
    if scale is not None:
        s = wide(scale)
        y = y * (s if scale.ndim == 2 or scale.shape[0] == w.shape[-1] else s.reshape(*w.shape[-2:]))
    return y.reshape(*x.shape).astype(x.dtype)


@lowering("GatedAdd")
def _gated_add(n: Call, x: Any, y: Any, gate: Any, weight: Any) -> Any:
    if weight is None:
        return x + y * gate
    total = ops.MatMul(wide(gate), wide(weight)).astype(x.dtype)
    return x + (wide(y) * wide(ops.Sigmoid(wide(total)).astype(x.dtype))).astype(x.dtype)


@lowering("LinearAttentionGate")
def _linear_attention_gate(n: Call, a: Any, bias: Any, scale: Any, b: Any) -> Any:
    decay = (scale * ops.Softplus(wide(a) + bias)).astype(a.dtype)
    return decay, None if b is None else ops.Sigmoid(wide(b)).astype(b.dtype)


def _grouped(n: Call, x: Any) -> Any:
    branches = n.attr("num_branches", 0)
    return x.reshape(*x.shape[:-1], branches, x.shape[-1] // branches) if branches else x


def _mix(m: Any, streams: Any) -> Any:
    """Gates of branches, or of each of their features, for streams [..., branches, features]."""
    w = wide(m)
    if m.ndim == streams.ndim - 1:
        return w.unsqueeze(-1) if m.shape[-1] == streams.shape[-2] else w.reshape(*streams.shape)
    return w


@lowering("HyperConnectionPreMix")
def _pre_mix(n: Call, streams: Any, mix: Any) -> Any:
    x = _grouped(n, streams)
    y = ops.ReduceSum(wide(x) * _mix(mix, x), ints(-2), keepdims=0) * n.attr("reduction_scale", 1.0)
    return y.astype(streams.dtype)


@lowering("HyperConnectionPostMix")
def _post_mix(n: Call, streams: Any, block: Any, post: Any, matrix: Any) -> Any:
    x = _grouped(n, streams)
    w = wide(x)
    mixed = w if matrix is None else ops.MatMul(wide(matrix).swapaxes(-1, -2), w)
    return (mixed + _mix(post, x) * wide(block).unsqueeze(-2)).reshape(*streams.shape).astype(streams.dtype)


@lowering("EngramGate")
def _engram_gate(n: Call, key: Any, query: Any, value: Any, k_scale: Any, q_scale: Any, v_scale: Any) -> Any:
    epsilon = n.attr("epsilon", 1e-5)
    k, q = rms(wide(key), wide(k_scale), epsilon)[0], rms(wide(query), wide(q_scale), epsilon)[0]
    dot = ops.ReduceSum(k * q, ints(-1), keepdims=1) / float(key.shape[-1]) ** 0.5
    gate = ops.Sigmoid(ops.Sign(dot) * ops.Sqrt(ops.Max(ops.Abs(dot), np.array(1e-6, dot.dtype))))
    y = gate * wide(value).unsqueeze(2)
    normed = None if v_scale is None else rms(y, wide(v_scale), epsilon)[0].astype(key.dtype)
    return y.astype(key.dtype), normed


@lowering("TorchEmbedding")
def _torch_embedding(n: Call, weight: Any, indices: Any, padding: Any, by_frequency: Any) -> Any:
    """Rows of a table; the other inputs are about gradients."""
    return ops.Gather(weight, indices, axis=0)


@lowering("IsAllFinite")
def _is_all_finite(n: Call, *given: Any) -> Any:
    """Whether no element of any tensor is infinite or not a number."""
    n.check(not (n.attr("isinf_only", 0) and n.attr("isnan_only", 0)), "isinf_only and isnan_only exclude one another")
    found = []
    for x in given:
        w = wide(x).reshape(-1)
        kinds = [] if n.attr("isinf_only", 0) else [ops.IsNaN(w)]
        kinds += [] if n.attr("isnan_only", 0) else [ops.IsInf(w)]
        found += [ops.ReduceMax(k.astype(np.float32), ints(0), keepdims=0) for k in kinds]
    worst = found[0] if len(found) == 1 else ops.Max(*found)
    return ops.Less(worst, np.array(0.5, np.float32))
