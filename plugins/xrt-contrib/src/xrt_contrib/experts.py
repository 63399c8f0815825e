"""Mixtures of experts: every expert computes every token, and the router's weights choose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_contrib.activation import fast_gelu, silu, wide
from xrt_contrib.attention import ints
from xrt_contrib.lowering import Call, lowering
from xrt_contrib.quantized import unpacked
from xrt_core import ops


def routing(n: Call, logits: Any, mixing: Any = None, normalise: bool = False) -> Any:
    """The weight of each expert for each token [tokens, experts]: softmax, of the k best where it is normalised.

    QMoE of ONNX Runtime normalises whatever its attribute says.
    """
    if n.attr("use_sparse_mixer", 0):
        raise n.refuse("use_sparse_mixer is of ONNX Runtime's kernels for CUDA, and not lowered")
    k, experts = n.attr("k", 1), logits.shape[1]
    n.check(1 <= k <= experts, f"k = {k} of {experts} experts")
    w = wide(logits)
    best, index = ops.TopK(w, ints(k), axis=-1)
    if mixing is not None:
        best = ops.GatherElements(wide(mixing), index, axis=1)
        if n.attr("normalize_routing_weights", 0):
            best = best / ops.ReduceSum(best, ints(-1), keepdims=1)
    elif normalise or n.attr("normalize_routing_weights", 0):
        best = ops.Softmax(best, axis=-1)
    else:
        best = ops.GatherElements(ops.Softmax(w, axis=-1), index, axis=1)
    zeros = ops.Expand(np.array(0, w.dtype), ints(*logits.shape))
    return ops.ScatterElements(zeros, index, best, axis=1)


def _gated(n: Call, gate: Any, up: Any) -> Any:
    if n.attr("swiglu_limit_after_activation", 0):
        raise n.refuse("swiglu_limit_after_activation is of ONNX Runtime's kernels for CUDA, and not lowered")
    limit = n.attr("swiglu_limit", math.inf)
    if limit is not None and math.isfinite(limit):
        gate = ops.Min(gate, np.array(limit, gate.dtype))
        up = ops.Clip(up, np.array(-limit, up.dtype), np.array(limit, up.dtype))
    return silu(gate, n.attr("activation_alpha", 1.0)) * (up + n.attr("activation_beta", 0.0))


def mixture(n: Call, x: Any, weights: Any, fc1: Any, b1: Any, fc2: Any, b2: Any, fc3: Any, b3: Any) -> Any:
    """sum over experts of weight * fc2(act(fc1 x) [* fc3 x]); weights [experts, out, in]."""
    kind, fusion = n.attr("activation_type", "relu"), n.attr("swiglu_fusion", 0)
    tokens = wide(x.reshape(-1, x.shape[-1])).unsqueeze(0)

    def layer(v: Any, w: Any, b: Any) -> Any:
        y = ops.MatMul(v, ops.Transpose(wide(w), perm=[0, 2, 1]))
        return y if b is None else y + wide(b).unsqueeze(1)

    h = layer(tokens, fc1, b1)
    if kind in ("swiglu", "geglu"):
        if fusion == 1:
            pairs = h.reshape(*h.shape[:-1], -1, 2)
            gate, up = (p.squeeze(-1) for p in ops.Split(pairs, axis=-1, num_outputs=2))
        elif fusion == 2:
            gate, up = ops.Split(h, axis=-1, num_outputs=2)
        else:
            n.check(fc3 is not None, "swiglu_fusion = 0 needs fc3_experts_weights")
            gate, up = h, layer(tokens, fc3, b3)
        h = _gated(n, gate, up) if kind == "swiglu" else ops.Gelu(gate, approximate="tanh") * up
    else:
        named = {"relu": ops.Relu, "gelu": fast_gelu, "silu": silu, "identity": lambda v: v}
        named["relu2"] = lambda v: ops.Relu(v) * ops.Relu(v)
        if kind not in named:
            raise n.refuse(f"activation_type = {kind!r}")
        h = named[kind](h)
        if fc3 is not None:
            h = h * layer(tokens, fc3, b3)
    y = layer(h, fc2, b2)  # [experts, tokens, hidden]
    share = ops.Transpose(weights, perm=[1, 0]).unsqueeze(2)
    return ops.ReduceSum(y * share, ints(0), keepdims=0).reshape(*x.shape).astype(x.dtype)


@lowering("MoE")
def _moe(n: Call, x: Any, router: Any, fc1: Any, b1: Any, fc2: Any, b2: Any, fc3: Any, b3: Any) -> Any:
    return mixture(n, x, routing(n, router), fc1, b1, fc2, b2, fc3, b3)


@lowering("QMoE")
def _q_moe(n: Call, x: Any, router: Any, *rest: Any) -> Any:
    if n.attr("quant_type", "int") != "int":
        raise n.refuse(f"quant_type = {n.attr('quant_type')!r} is of ONNX Runtime's kernels for CUDA, and not lowered")
    if n.attr("weights_prepacked", -1) > 0:
        raise n.refuse("weights_prepacked: the weights are in a layout of CUDA kernels")
    block = n.attr("block_size", 0) or 0
    common = n.attr("expert_weight_bits", 4)
    layers = []
    for i in range(3):  # the node's inputs 2, 5 and 8, their scales and biases beside; zero points from 11 on
        w, scale, bias, zero = rest[3 * i], rest[3 * i + 1], rest[3 * i + 2], rest[9 + i]
        if w is None:
            layers.append((None, None))
            continue
        bits = n.attr(f"fc{i + 1}_expert_weight_bits") or common
        if bits not in (2, 4, 8):
            raise n.refuse(f"experts of {bits} bits; 2, 4 and 8 are lowered")
        q = unpacked(n, 2 + 3 * i, w, bits).astype(np.float32)
        experts, rows, inner = q.shape
        blocks = inner // block if block else 1
        scale = wide(scale).reshape(experts, rows, blocks)
        if zero is None:
            z: Any = float(1 << (bits - 1))
        else:
            line = unpacked(n, 11 + i, zero, bits).astype(np.float32)
            z = line[:, :, :blocks] if block else line[:, :rows].unsqueeze(2)
            z = z.unsqueeze(3)
        grouped = q.reshape(experts, rows, blocks, inner // blocks)
        layers.append((((grouped - z) * scale.unsqueeze(3)).reshape(experts, rows, inner), bias))
    (w1, b1), (w2, b2), (w3, b3) = layers
    return mixture(n, x, routing(n, router, rest[12], normalise=True), w1, b1, w2, b2, w3, b3)
