"""Layer normalisation with what is fused before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_contrib.activation import silu, wide
from xrt_contrib.lowering import Call, lowering
from xrt_core import ops
from xrt_core.ir.types import ONNX_TO_DTYPE

_LAST = np.array([-1], np.int64)


def rms(x: Any, scale: Any, epsilon: float) -> tuple[Any, Any]:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, and the divisor's inverse."""
    inverse = 1 / ops.Sqrt(ops.ReduceMean(x * x, _LAST, keepdims=1) + epsilon)
    y = x * inverse
    return (y if scale is None else y * scale), inverse


@lowering("SimplifiedLayerNormalization", domain="")
def _simplified(n: Call, x: Any, scale: Any, *more: Any) -> Any:
    axis = n.attr("axis", -1) % x.ndim
    stash = ONNX_TO_DTYPE[n.attr("stash_type", 1)]
    w = x.astype(stash) if x.dtype.name != "float64" else x
    axes = np.arange(axis, x.ndim, dtype=np.int64)
    inverse = 1 / ops.Sqrt(ops.ReduceMean(w * w, axes, keepdims=1) + n.attr("epsilon", 1e-5))
    y = (w * inverse).astype(scale.dtype) * scale
    return y, inverse


@lowering("SkipLayerNormalization")
def _skip(n: Call, x: Any, skip: Any, gamma: Any, beta: Any, bias: Any) -> Any:
    """The sum may be in one precision and its statistics in float32; the skip may lack the batch axis."""
    total = wide(x) + wide(skip)
    total = total if bias is None else total + wide(bias)
    mean = ops.ReduceMean(total, _LAST, keepdims=1)
    centred = total - mean
    variance = ops.ReduceMean(centred * centred, _LAST, keepdims=1)
    inverse = 1 / ops.Sqrt(variance + n.attr("epsilon", 1e-12))
    y = centred * inverse * wide(gamma)
    y = y if beta is None else y + wide(beta)
    return y.astype(x.dtype), mean, inverse, total.astype(x.dtype)


@lowering("SkipSimplifiedLayerNormalization")
def _skip_simplified(n: Call, x: Any, skip: Any, gamma: Any, bias: Any) -> Any:
    total = wide(x) + wide(skip)
    total = total if bias is None else total + wide(bias)
    y, inverse = rms(total, wide(gamma), n.attr("epsilon", 1e-12))
    return y.astype(x.dtype), ops.ReduceMean(total, _LAST, keepdims=1), inverse, total.astype(x.dtype)


@lowering("GatedRMSNorm")
def _gated_rms(n: Call, x: Any, scale: Any, gate: Any) -> Any:
    size = scale.shape[0]
    n.check(x.shape[-1] % size == 0, f"a scale of {size} for rows of {x.shape[-1]}")
    y, _ = rms(wide(x).reshape(*x.shape[:-1], -1, size), wide(scale), n.attr("epsilon", 1e-5))
    y = y.reshape(*x.shape)
    activation = n.attr("activation", "silu")
    if activation not in ("silu", "swish", "sigmoid"):
        raise n.refuse(f"activation = {activation!r}")
    g = wide(gate)
    return (y * (ops.Sigmoid(g) if activation == "sigmoid" else silu(g))).astype(x.dtype)


@lowering("GroupNorm", "SkipGroupNorm")
def _group_norm(n: Call, x: Any, gamma: Any, beta: Any, skip: Any = None, bias: Any = None) -> Any:
    """Groups of channels; activation 1 is x * sigmoid(x)."""
    last = bool(n.attr("channels_last", 1))
    channels = x.shape[-1] if last else x.shape[1]

    def fitted(v: Any) -> Any:  # [C] or [batch, C] along the channels
        if v.ndim >= x.ndim:
            return v
        lead = v.shape[0] if v.ndim == 2 else 1
        inner = (1,) * (x.ndim - 2)
        return v.reshape(lead, *inner, channels) if last else v.reshape(lead, channels, *inner)

    total = wide(x)
    total = total if skip is None else total + fitted(wide(skip))
    total = total if bias is None else total + fitted(wide(bias))
    flat = ops.Transpose(total, perm=[0, x.ndim - 1, *range(1, x.ndim - 1)]) if last else total
    grouped = flat.reshape(x.shape[0], n.attr("groups"), -1)
    centred = grouped - ops.ReduceMean(grouped, _LAST, keepdims=1)
    variance = ops.ReduceMean(centred * centred, _LAST, keepdims=1)
    y = (centred / ops.Sqrt(variance + n.attr("epsilon", 1e-5))).reshape(*flat.shape)
    y = ops.Transpose(y, perm=[0, *range(2, x.ndim), 1]) if last else y
    y = y * fitted(gamma) + fitted(beta)
    y = silu(y) if n.attr("activation") else y
    return y.astype(x.dtype), total.astype(x.dtype)


def embed(
    n: Call, ids: Any, segments: Any, words: Any, positions: Any, segment: Any, gamma: Any, beta: Any, mask: Any,
    position_ids: Any,
) -> Any:  # fmt: skip
    """Sum of the embeddings, normalised; with the mask's lengths."""
    length = ids.shape[1]
    total = ops.Gather(words, ids, axis=0)
    if position_ids is None:
        total = total + positions[:length].unsqueeze(0)
    else:
        total = total + ops.Gather(positions, position_ids, axis=0)
    if segments is not None and segment is not None:
        total = total + ops.Gather(segment, segments, axis=0)
    w = wide(total)
    centred = w - ops.ReduceMean(w, _LAST, keepdims=1)
    variance = ops.ReduceMean(centred * centred, _LAST, keepdims=1)
    y = centred / ops.Sqrt(variance + n.attr("epsilon", 1e-12)) * wide(gamma) + wide(beta)
    if mask is None:
        lengths = ops.Expand(np.array(0, np.int32), np.array([ids.shape[0]], np.int64))
    else:
        lengths = ops.ReduceSum(mask.astype(np.int32), np.array([1], np.int64), keepdims=0)
    return y.astype(total.dtype), lengths, total


@lowering("EmbedLayerNormalization")
def _embed(n: Call, *inputs: Any) -> Any:
    return embed(n, *inputs)


@lowering("QEmbedLayerNormalization")
def _q_embed(n: Call, ids: Any, segments: Any, *rest: Any) -> Any:
    words, positions, segment, gamma, beta, mask = rest[:6]
    scales, zeros = rest[6:11], rest[11:16]
    real = [
        None if q is None else ops.DequantizeLinear(q, s.reshape(()), None if z is None else z.reshape(()))
        for q, s, z in zip((words, positions, segment, gamma, beta), scales, zeros, strict=True)
    ]
    return embed(n, ids, segments, *real, mask, None)[:2]
