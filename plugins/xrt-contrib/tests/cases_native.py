"""Cases of operators that run in a session of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from ort_comparison import Case

R = np.random.default_rng(17)
VOCABULARY, HEADS, SIZE = 11, 2, 4


def f(*shape: int) -> np.ndarray:
    """Normal numbers."""
    return R.standard_normal(shape).astype(np.float32)


def i32(values: Any) -> np.ndarray:
    """An array of int32."""
    return np.array(values, np.int32)


def decoder() -> onnx.GraphProto:
    """A language model of one layer with a cache, as GPT-2's decoder looks to a search."""
    hidden = HEADS * SIZE
    weights = {
        "words": f(VOCABULARY, hidden), "places": f(40, hidden), "project": f(hidden, 3 * hidden),
        "heads": np.array([0, 0, HEADS, SIZE]), "zero": np.array([0]), "axes": np.array([0, 3]),
        "flat": np.array([0, 1, -1]), "head": f(hidden, VOCABULARY),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        node("Gather", ["words", "input_ids"], ["word"]),
        node("Gather", ["places", "position_ids"], ["place"]),
        node("Add", ["word", "place"], ["x"]),
        node("MatMul", ["x", "project"], ["qkv"]),
        node("Split", ["qkv"], ["q", "k", "v"], axis=2, num_outputs=3),
        *(node("Reshape", [n, "heads"], [f"{n}4"]) for n in "kv"),
        *(node("Transpose", [f"{n}4"], [f"{n}t"], perm=[0, 2, 1, 3]) for n in "kv"),
        *(node("Unsqueeze", [f"{n}t", "zero"], [f"{n}u"]) for n in "kv"),
        node("Concat", ["ku", "vu"], ["kv"], axis=0),
        node("Concat", ["past_0", "kv"], ["present_0"], axis=3),
        node("ReduceMean", ["present_0", "axes"], ["mean"], keepdims=0),
        node("Reshape", ["mean", "flat"], ["row"]),
        node("Add", ["x", "row"], ["y"]),
        node("MatMul", ["y", "head"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    entries = [
        *(info(n, TensorProto.INT32, ["batch", "length"]) for n in ("input_ids", "position_ids")),
        info("attention_mask", TensorProto.INT32, ["batch", "total"]),
        info("past_0", TensorProto.FLOAT, [2, "batch", HEADS, "past", SIZE]),
    ]
    results = [
        info("logits", TensorProto.FLOAT, ["batch", "length", VOCABULARY]),
        info("present_0", TensorProto.FLOAT, [2, "batch", HEADS, "total", SIZE]),
    ]
    constants = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    return helper.make_graph(nodes, "decoder", entries, results, constants)


PROMPT, ONE = i32([[1, 2, 3], [4, 5, 6]]), np.array([1.0], np.float32)
SEARCH = {"decoder": decoder(), "eos_token_id": 0, "pad_token_id": 0, "model_type": 0}

ALL = [
    Case("GreedySearch", [PROMPT, i32([9]), i32([1]), ONE], SEARCH),
    Case("BeamSearch", [PROMPT, i32([9]), i32([1]), i32([3]), i32([2]), ONE, ONE], SEARCH, (0, 1)),
    Case("Sampling", [PROMPT, i32([9]), i32([1]), ONE, None, None, None, None, i32([7])], {**SEARCH, "top_p": 1e-4}),
    Case("MoEGroupRouter", [f(5, 8), f(8)], {"top_k": 2, "n_group": 2, "topk_group": 1}),
]
