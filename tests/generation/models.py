"""A small decoder as exporters write it, with caches or without, and what it should say, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS, HEADS, SIZE, LONGEST = 31, 2, 4, 256
WIDTH = HEADS * SIZE
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def weights() -> dict[str, np.ndarray]:
    """Of one layer of attention, with embeddings of tokens and positions."""
    rng = np.random.default_rng(7)
    shapes = {"words": (WORDS, WIDTH), "places": (LONGEST, WIDTH), "out": (WIDTH, WORDS)}
    shapes |= dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH))
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def decoder(caches: bool = True, extra: Sequence[onnx.NodeProto] = ()) -> onnx.ModelProto:
    """ids, mask, positions (and caches) -> scores (and caches). extra: further nodes."""
    nodes: list[Any] = []
    constants = {n: numpy_helper.from_array(w, n) for n, w in weights().items()}

    def constant(name: str, value: Any, dtype: Any = np.int64) -> str:
        constants[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def op(kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], name=f"{kind}_{len(nodes)}", **attributes))
        return name

    one, zero = constant("one", 1), constant("zero", 0)
    x = op("Add", op("Gather", "words", "input_ids"), op("Gather", "places", "position_ids"))
    split, merge = constant("split", [0, 0, HEADS, SIZE]), constant("merge", [0, 0, WIDTH])
    q, k, v = (op("Transpose", op("Reshape", op("MatMul", x, w), split), perm=[0, 2, 1, 3]) for w in "qkv")
    if caches:
        k = op("Concat", "past_key_values.0.key", k, out="present.0.key", axis=2)
        v = op("Concat", "past_key_values.0.value", v, out="present.0.value", axis=2)
    n = op("Gather", op("Shape", "input_ids"), one)
    total = op("Gather", op("Shape", "attention_mask"), one)
    rows = op("Unsqueeze", op("Range", op("Sub", total, n), total, one), constant("axis", [1]))
    causal = op("LessOrEqual", op("Range", zero, total, one), rows)
    seen = op("Unsqueeze", op("Cast", "attention_mask", to=TensorProto.BOOL), constant("axes", [1, 2]))
    scores = op("Div", op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2])), constant("root", SIZE**0.5, np.float32))
    masked = op("Where", op("And", seen, causal), scores, constant("least", -1e9, np.float32))
    mixed = op("Transpose", op("MatMul", op("Softmax", masked, axis=-1), v), perm=[0, 2, 1, 3])
    y = op("Add", x, op("MatMul", op("Reshape", mixed, merge), "o"))
    op("MatMul", y, "out", out="logits")
    info = helper.make_tensor_value_info
    inputs = [info(n, INT, ["batch", s]) for n, s in
              (("input_ids", "n"), ("attention_mask", "total"), ("position_ids", "n"))]  # fmt: skip
    outputs = [info("logits", FLOAT, ["batch", "n", WORDS])]
    if caches:
        for kind in ("key", "value"):
            inputs.append(info(f"past_key_values.0.{kind}", FLOAT, ["batch", HEADS, "past", SIZE]))
            outputs.append(info(f"present.0.{kind}", FLOAT, ["batch", HEADS, "total", SIZE]))
    graph = helper.make_graph([*nodes, *extra], "decoder", inputs, outputs, list(constants.values()))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def with_cross_cache() -> onnx.ModelProto:
    """The decoder, whose scores also depend on an encoder's states [batch, length, SIZE], as in Optimum's merged ones:
    the first step puts them into a cache, the others read that, and have nothing in its place among their results."""
    model = decoder()
    graph, info = model.graph, helper.make_tensor_value_info
    next(n for n in graph.node if n.output[0] == "logits").output[0] = "own_logits"
    name = "past_key_values.0.encoder.key"
    shape = ["batch", 1, "encoder", SIZE]

    def branch(nodes: list[onnx.NodeProto], out: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, out, [], [info(out, FLOAT, None)])

    fresh = helper.make_node("Unsqueeze", ["states", "at"], ["made"])
    same = helper.make_node("Identity", [name], ["kept"])
    none = helper.make_node("Slice", [name, "none", "none", "last"], ["empty"])
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v, d), n)
        for n, v, d in (("at", [1], np.int64), ("none", [0], np.int64), ("last", [2], np.int64),
                        ("wide", cross_weight(), np.float32), ("over", [1, 2], np.int64))
    )  # fmt: skip
    graph.node.extend([
        helper.make_node("If", ["use_cache_branch"], ["used"], then_branch=branch([same], "kept"),
                         else_branch=branch([fresh], "made")),
        helper.make_node("If", ["use_cache_branch"], ["present.0.encoder.key"], then_branch=branch([none], "empty"),
                         else_branch=branch([fresh], "made")),
        helper.make_node("ReduceSum", ["used", "over"], ["sums"], keepdims=0),
        helper.make_node("MatMul", ["sums", "wide"], ["more"]),
        helper.make_node("Unsqueeze", ["more", "at"], ["wider"]),
        helper.make_node("Add", ["own_logits", "wider"], ["logits"]),
    ])  # fmt: skip
    graph.input.extend([
        info(name, FLOAT, shape), info("states", FLOAT, ["batch", "encoder", SIZE]),
        info("use_cache_branch", TensorProto.BOOL, [1]),
    ])  # fmt: skip
    graph.output.extend([info("present.0.encoder.key", FLOAT, None)])
    return model


def cross_weight() -> np.ndarray:
    """float32 [SIZE, WORDS]: what the sum of the states adds to the scores."""
    return (np.random.default_rng(8).standard_normal((SIZE, WORDS)) * 3).astype(np.float32)


def scores_of(tokens: np.ndarray) -> np.ndarray:
    """The scores after a sequence, float64 [words], without padding or caches."""
    w = {n: a.astype(np.float64) for n, a in weights().items()}
    x = w["words"][tokens] + w["places"][: len(tokens)]
    q, k, v = ((x @ w[n]).reshape(-1, HEADS, SIZE).transpose(1, 0, 2) for n in "qkv")
    s = q @ k.transpose(0, 2, 1) / SIZE**0.5
    s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    mixed = (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(-1, WIDTH)
    return np.asarray(((x + mixed @ w["o"]) @ w["out"])[-1])


def continued(prompt: Sequence[int], count: int, more: float | np.ndarray = 0.0) -> list[int]:
    """A prompt and the best tokens after it. more: what is added to the scores."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int((scores_of(np.array(tokens)) + more).argmax()))
    return tokens


def with_loop_over_keys() -> onnx.ModelProto:
    """The decoder, whose scores go through a Loop that reads the keys, and adds nothing."""
    model = decoder()
    graph, info = model.graph, helper.make_tensor_value_info
    next(n for n in graph.node if n.output[0] == "logits").output[0] = "own_logits"
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("ReduceSum", ["present.0.key"], ["sum"], keepdims=0),
            helper.make_node("Mul", ["sum", "nothing"], ["none"]),
            helper.make_node("Add", ["x", "none"], ["y"]),
        ],
        "body", [info("i", INT, []), info("going", TensorProto.BOOL, []), info("x", FLOAT, None)],
        [info("goes_on", TensorProto.BOOL, []), info("y", FLOAT, None)],
    )  # fmt: skip
    graph.node.append(helper.make_node("Loop", ["one", "", "own_logits"], ["logits"], body=body))
    graph.initializer.append(numpy_helper.from_array(np.float32(0), "nothing"))
    return model
