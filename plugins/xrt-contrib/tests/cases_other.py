"""Cases of convolutions, movement, experts, recurrences and kernels of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from ort_comparison import Case

R = np.random.default_rng(13)


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (R.standard_normal(shape) * scale).astype(dtype)


def i64(*values: int) -> np.ndarray:
    """A vector of int64."""
    return np.array(values, np.int64)


SPATIAL = [
    *(
        Case("FusedConv", [f(2, 4, 6, 7), f(6, 4 // g, 3, 3), b, z], {"activation": a, **({"activation_params": p} if p else {}), "group": g,
             "pads": [1, 1, 1, 1], "strides": [2, 1]})
        for a, p in (("Relu", []), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.7]), ("HardSigmoid", [0.3, 0.4]), ("Sigmoid", []), ("Tanh", []))
        for b, z, g in ((f(6), None, 1), (f(6), f(2, 6, 3, 7), 2))
        if not (z is not None and a != "Relu")
    ),
    *(
        Case("NhwcMaxPool", [R.integers(-128, 127, (1, 7, 6, 3)).astype(t)], {"kernel_shape": [3, 2], **a}, note=str(np.dtype(t)))
        for t in (np.int8, np.uint8) for a in ({}, {"pads": [1, 0, 1, 1], "strides": [2, 1]}, {"dilations": [2, 1]})
    ),
    *(
        Case("GridSample", [f(2, 3, 5, 6), f(2, 4, 3, 2, scale=0.7)], {"mode": m, "padding_mode": p, "align_corners": c})
        for m in ("bilinear", "nearest", "bicubic") for p in ("zeros", "border", "reflection") for c in (0, 1)
    ),
    *(
        Case("CropAndResize", [f(2, 3, 6, 7), np.array([[0, 0, 1, 1], [0.1, 0.2, 0.6, 0.9], [0.5, -0.3, 1.2, 0.4]], np.float32),
             np.array([0, 1, 1], np.int32), np.array([h, w], np.int32)], {"mode": m, "extrapolation_value": 0.5}, constants=(3,))
        for m in ("bilinear", "nearest") for h, w in ((4, 5), (1, 3))
    ),
    Case("ConvTransposeWithDynamicPads", [f(1, 2, 4, 5), f(2, 3, 3, 3), i64(1, 0, 1, 0), f(3)], {"strides": [2, 2]}, constants=(2,)),
    Case("ConvTransposeWithDynamicPads", [f(1, 2, 4, 5), f(2, 3, 3, 3), i64(1, 1, 0, 0)], {"strides": [2, 1], "kernel_shape": [3, 3]}),
    *(
        Case("MaxpoolWithMask", [f(2, 3, *s), (R.random((2, 3, *s)) > 0.4).astype(np.int32)],
             {"kernel_shape": [2] * len(s), "strides": [1] * len(s), "pads": [1] * (2 * len(s))})
        for s in ((8,), (5, 6), (3, 4, 4))
    ),
    Case("WordConvEmbedding", [np.array([[3, 1, 4, 1, 5, 0], [2, 6, 0, 0, 0, 0]], np.int32), f(5, 1, 2, 3), f(5), f(9, 3)],
         {"embedding_size": 5, "conv_window_size": 2, "char_embedding_size": 3}),
    Case("WordConvEmbedding", [np.array([[3, 0, 0, 0], [4, 2, 0, 0], [7, 7, 7, 7]], np.int32), f(4, 1, 3, 2), f(4), f(9, 2)],
         {"embedding_size": 4, "conv_window_size": 3, "char_embedding_size": 2}),
]  # fmt: skip


def conv_state(length: int, past: bool, bias: bool, k: int = 4, **attributes: Any) -> Case:
    """A CausalConvWithState of one dimension."""
    dilation, last = attributes.get("dilation", 1), attributes.get("channels_last", 0)
    span = (k - 1) * dilation
    x = f(2, length, 3) if last else f(2, 3, length)
    window = attributes.get("state_window", 0)
    slots = (window,) if window else ()
    state = f(*slots, *((2, span, 3) if last else (2, 3, span))) if past else None
    return Case("CausalConvWithState", [x, f(3, 1, k), f(3) if bias else None, state], attributes, (0, 1))


def linear_attention(
    rule: str, length: int, past: bool, heads: int = 2, shared: int = 2, wide: bool = False, window: int = 0
) -> Case:
    """A LinearAttention."""
    q = f(2, length, heads * 4)
    k, v = f(2, length, shared * 4, scale=0.3), f(2, length, shared * 6)
    g = -R.random((2, length, shared * (4 if wide else 1))).astype(np.float32) if "gated" in rule else None
    b = R.random((2, length, shared)).astype(np.float32) if "delta" in rule else None
    s = f(*(window,) if window else (), 2, shared, 4, 6) if past else None
    said = {"q_num_heads": heads, "kv_num_heads": shared, "update_rule": rule, "state_window": window}
    return Case("LinearAttention", [q, k, v, s, g, b], said, (0, 1), atol=1e-4, types=["FLOAT", "FLOAT"])


RECURRENT = [
    *(conv_state(n, p, b, activation=a) for n, p, b, a in ((5, True, True, "silu"), (1, True, False, "none"), (6, False, True, "swish"))),
    conv_state(5, True, True, dilation=2),
    conv_state(5, True, True, channels_last=1),
    *(linear_attention(r, n, p) for r in ("linear", "gated", "delta", "gated_delta") for n, p in ((1, True), (5, False))),
    linear_attention("gated_delta", 5, True, heads=4),
    linear_attention("gated", 5, True, wide=True),
    linear_attention("gated_delta", 40, True),
]  # fmt: skip

WINDOWED = [
    *(linear_attention("gated_delta", n, p, window=w)
      for n, p, w in ((5, True, 3), (2, True, 4), (1, False, 1), (40, True, 8))),
    *(conv_state(n, p, True, state_window=w) for n, p, w in ((5, True, 3), (2, True, 4), (1, False, 2))),
    conv_state(5, True, True, state_window=2, channels_last=1),
]  # fmt: skip
"""Nodes whose states have a window, which ONNX Runtime has on GPUs alone."""

MOVEMENT = [
    *(Case("Trilu", [f(2, 4, 5), k], {"upper": u}) for u in (0, 1) for k in (None, np.array(1, np.int64), np.array(-2, np.int64))),
    *(Case("ExpandDims", [f(2, 3), np.array(a, np.int32)], constants=(1,)) for a in (0, 1, 2, -1)),
    Case("ExpandDims", [f(2, 3), np.array(1, np.int32)]),
    Case("GatherND", [f(3, 4, 5), np.array([[0, 1], [2, 3]], np.int32)]),
    Case("GatherND", [f(3, 4, 5), np.array([[[0], [2]]], np.int64)]),
    Case("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], {}, (0, 1, 2)),
    *(Case("Range", [np.array([1], t), np.array([9], t), d], note=str(np.dtype(t)), types=[n])
      for t, n in ((np.float32, "FLOAT"), (np.int64, "INT64"), (np.int32, "INT32")) for d in (None, np.array([3], t))),
    Case("Range", [np.array(9, np.float32), np.array(1, np.float32), np.array(-2.5, np.float32)], constants=(0, 1, 2)),
    *(Case("Pad", [f(3, 4), i64(1, 0, 2, 1), np.array([2.5], np.float32) if m == "constant" else None], {"mode": m}, constants=(1,))
      for m in ("constant", "reflect", "edge")),
    *(Case("UnfoldTensor", [f(3, 9, 4)], {"dim": d, "size": 3, "step": s}) for d, s in ((1, 1), (1, 2), (-1, 1), (0, 1))),
    Case("SampleOp", [f(3, 4)]),
    Case("BranchwiseRMSNorm", [f(2, 3, 8), f(8)], {"epsilon": 1e-3}),
    Case("BranchwiseRMSNorm", [f(2, 24), f(24)], {"num_branches": 3}),
    Case("BranchwiseRMSNorm", [f(2, 24)], {"num_branches": 3}),
    Case("GatedRMSNorm", [f(2, 3, 8), f(8), f(2, 3, 8)]),
    Case("GatedRMSNorm", [f(2, 3, 8), f(4), f(2, 3, 8)], {"activation": "sigmoid"}),
    Case("GatedAdd", [f(2, 3, 8), f(2, 3, 8), f(2, 3, 1)]),
    Case("LinearAttentionGate", [f(2, 3, 4), f(4), f(4), f(2, 3, 4)], {}, (0, 1)),
    Case("LinearAttentionGate", [f(2, 3, 4), f(4), f(4)], {}, (0,)),
    Case("HyperConnectionPreMix", [f(2, 3, 4, 8), f(2, 3, 4)], {"reduction_scale": 0.5}),
    Case("HyperConnectionPreMix", [f(2, 3, 32), f(2, 3, 32)], {"num_branches": 4}),
    Case("HyperConnectionPreMix", [f(2, 3, 4, 8), f(2, 3, 4, 1)]),
    Case("HyperConnectionPostMix", [f(2, 3, 4, 8), f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4)]),
    Case("HyperConnectionPostMix", [f(2, 3, 32), f(2, 3, 8), f(2, 3, 4, 8)], {"num_branches": 4}),
    Case("EngramGate", [f(2, 3, 2, 8), f(2, 3, 2, 8), f(2, 3, 8), f(2, 8), f(2, 8), f(2, 8)], {}, (0, 1)),
]  # fmt: skip


def moe(kind: str, k: int = 2, *, bias: bool = True, fusion: int = 0, fc3: bool = False, **attributes: Any) -> Case:
    """A MoE of 4 experts."""
    hidden, inter, e = 6, 8, 4
    double = 2 if kind == "swiglu" and fusion else 1
    inputs = [f(2, 3, hidden), f(6, e), f(e, double * inter, hidden), f(e, double * inter) if bias else None,
              f(e, hidden, inter), f(e, hidden) if bias else None, f(e, inter, hidden) if fc3 else None]  # fmt: skip
    said = {"k": k, "activation_type": kind, **({"swiglu_fusion": fusion} if fusion else {}), **attributes}
    return Case("MoE", inputs, said, atol=1e-4)


def q_moe(bits: int, block: int = 0, zero: bool = False, kind: str = "silu", **attributes: Any) -> Case:
    """A QMoE of 4 experts."""
    hidden, inter, e = 32, 32, 4
    double = 2 if kind == "swiglu" else 1
    part = 8 // bits

    def layer(rows: int, inner: int) -> list[Any]:
        w = R.integers(0, 256, (e, rows, inner // part)).astype(np.uint8)
        s = (R.random((e, rows, inner // block) if block else (e, rows)) * 0.02 + 0.01).astype(np.float32)
        return [w, s, f(e, rows)]

    def zeros(rows: int, inner: int) -> Any:
        if not zero:
            return None
        shape = (e, rows, -(-(inner // block) // part)) if block else (e, rows // part)
        return R.integers(0, 256, shape).astype(np.uint8)

    inputs = [f(5, hidden), f(5, e), *layer(double * inter, hidden), *layer(hidden, inter), None, None, None,
              zeros(double * inter, hidden), zeros(hidden, inter)]  # fmt: skip
    said = {
        "k": 2,
        "activation_type": kind,
        "expert_weight_bits": bits,
        **({"block_size": block} if block else {}),
        **attributes,
    }
    return Case("QMoE", inputs, said, constants=(2, 3, 4, 5, 6, 7, 11, 12), atol=3e-2, rtol=3e-2)


EXPERTS = [
    *(moe(kind) for kind in ("relu", "gelu", "silu", "identity")),
    moe("relu", 1, bias=False),
    moe("silu", normalize_routing_weights=1),
    moe("swiglu", fusion=1),
    moe("swiglu", fusion=1, swiglu_limit=0.7, activation_alpha=1.7, activation_beta=1.0, normalize_routing_weights=1),
    *(q_moe(bits, kind=kind, **({"swiglu_fusion": 1} if kind == "swiglu" else {})) for bits in (4, 8) for kind in ("silu", "swiglu")),
    q_moe(4, 16),
    q_moe(4, 16, True),
    q_moe(4, 0, True),
    q_moe(8, 0, True, normalize_routing_weights=1),
]  # fmt: skip

TEXT = np.array([["hello big world", "a bc def"], ["", "one,two three"]], object)
KERNELS = [
    Case("Tokenizer", [TEXT], {"separators": [" ", ","], "mark": 0, "mincharnum": 1, "pad_value": "#"}),
    Case("Tokenizer", [TEXT[0]], {"separators": [" "], "mark": 1, "mincharnum": 2, "pad_value": "#"}),
    Case("Tokenizer", [TEXT[0]], {"separators": [""], "mark": 1, "mincharnum": 1, "pad_value": "#"}),
    Case("Tokenizer", [TEXT[0]], {"tokenexp": "[a-z]+", "mark": 0, "mincharnum": 1, "pad_value": "#"}),
    Case("Tokenizer", [TEXT[0]], {"tokenexp": "[aeo].", "mark": 0, "mincharnum": 2, "pad_value": "#"}),
    *(Case("MurmurHash3", [x], {"positive": p, "seed": s}) for p in (0, 1) for s in (0, 42)
      for x in (np.array([3, -7, 2**30], np.int32), np.array([1, 2], np.uint32), f(3), np.array([5, -6], np.int64), f(2, dtype=np.float64),
                np.array(["hello", "a", "", "abcdefg"], object))),
    *(Case("NGramRepeatBlock", [R.integers(0, 4, (3, 12)), f(3, 9)], {"ngram_size": n}) for n in (2, 3)),
    *(
        Case("BifurcationDetector", [i64(*a), i64(*b), np.array(c, np.int64), None if d is None else i64(*d)], {"min_ngram_size": 1, "max_ngram_size": 3},
             (0, 1))
        for a, b, c, d in (([2, 2, 5, 3, 4], [2], 0, [2, 2, 5, 1, 4, 9]), ([2, 2, 5, 3, 4], [7, 2, 5], 0, None), ([1, 2, 3, 4, 5], [9], 2, [3, 4, 8, 1]),
                          ([1, 5, 3, 4, 2], [0], 0, [1, 5, 3, 4, 2, 7]), ([1, 2, 1, 2], [2], 0, None))
    ),
    *(Case("DynamicTimeWarping", [f(*s)]) for s in ((4, 6), (1, 5, 3))),
]  # fmt: skip

ALL = [*SPATIAL, *RECURRENT, *MOVEMENT, *EXPERTS, *KERNELS]
