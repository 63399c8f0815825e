"""One decoder written twice, with the same weights: as an ONNX model as exporters write it, and by hand in JAX.

Blocks of attention and of two dense layers behind RMS norms, learned positions, caches. `benchmarks/generation.py`
compares what runs the first with the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    layers: int = 2
    width: int = 256
    heads: int = 4
    words: int = 4000
    longest: int = 512

    @property
    def each(self) -> int:
        """The width of a head."""
        return self.width // self.heads


def weights(s: Sizes) -> dict[str, np.ndarray]:
    """Random ones, by name."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"words": (s.words, s.width), "places": (s.longest, s.width)}
    shapes |= {"norm": (s.width,), "out": (s.width, s.words)}
    for i in range(s.layers):
        shapes |= {f"{i}.{n}": (s.width, s.width) for n in "qkvo"}
        shapes |= {f"{i}.up": (s.width, 4 * s.width), f"{i}.down": (4 * s.width, s.width)}
        shapes |= {f"{i}.norm1": (s.width,), f"{i}.norm2": (s.width,)}
    return {n: (rng.standard_normal(z) * (1.0 if len(z) == 1 else z[0] ** -0.5)).astype(np.float32)
            for n, z in shapes.items()}  # fmt: skip


def onnx_decoder(s: Sizes) -> onnx.ModelProto:
    """ids, mask, positions and caches -> scores and caches, with the names that exporters give them."""
    nodes: list[Any] = []
    constants = {n: numpy_helper.from_array(w, n) for n, w in weights(s).items()}

    def constant(name: str, value: Any, dtype: Any = np.int64) -> str:
        constants[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def op(kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], name=f"{kind}_{len(nodes)}", **attributes))
        return name

    def norm(x: str, weight: str) -> str:
        mean = op("ReduceMean", op("Mul", x, x), axes=[-1], keepdims=1)
        return op("Mul", op("Div", x, op("Sqrt", op("Add", mean, constant("eps", EPSILON, np.float32)))), weight)

    one, zero = constant("one", 1), constant("zero", 0)
    split, merge = constant("split", [0, 0, s.heads, s.each]), constant("merge", [0, 0, s.width])
    n = op("Gather", op("Shape", "input_ids"), one)
    total = op("Gather", op("Shape", "attention_mask"), one)
    rows = op("Unsqueeze", op("Range", op("Sub", total, n), total, one), constant("axis", [1]))
    causal = op("LessOrEqual", op("Range", zero, total, one), rows)
    seen = op("Unsqueeze", op("Cast", "attention_mask", to=TensorProto.BOOL), constant("axes", [1, 2]))
    open_ = op("And", seen, causal)
    x = op("Add", op("Gather", "words", "input_ids"), op("Gather", "places", "position_ids"))
    root, least = constant("root", s.each**0.5, np.float32), constant("least", -1e9, np.float32)
    for i in range(s.layers):
        h = norm(x, f"{i}.norm1")
        q, k, v = (
            op("Transpose", op("Reshape", op("MatMul", h, f"{i}.{w}"), split), perm=[0, 2, 1, 3]) for w in "qkv"
        )
        k = op("Concat", f"past_key_values.{i}.key", k, out=f"present.{i}.key", axis=2)
        v = op("Concat", f"past_key_values.{i}.value", v, out=f"present.{i}.value", axis=2)
        scores = op("Div", op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2])), root)
        mixed = op("MatMul", op("Softmax", op("Where", open_, scores, least), axis=-1), v)
        joined = op("Reshape", op("Transpose", mixed, perm=[0, 2, 1, 3]), merge)
        x = op("Add", x, op("MatMul", joined, f"{i}.o"))
        inner = op("Relu", op("MatMul", norm(x, f"{i}.norm2"), f"{i}.up"))
        x = op("Add", x, op("MatMul", inner, f"{i}.down"))
    op("MatMul", norm(x, "norm"), "out", out="logits")
    info = helper.make_tensor_value_info
    names = (("input_ids", "n"), ("attention_mask", "total"), ("position_ids", "n"))
    inputs = [info(name, INT, ["batch", d]) for name, d in names]
    outputs = [info("logits", FLOAT, ["batch", "n", s.words])]
    for i in range(s.layers):
        for kind in ("key", "value"):
            inputs.append(info(f"past_key_values.{i}.{kind}", FLOAT, ["batch", s.heads, "past", s.each]))
            outputs.append(info(f"present.{i}.{kind}", FLOAT, ["batch", s.heads, "total", s.each]))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, list(constants.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def jax_loop(s: Sizes) -> Callable[[np.ndarray, int], np.ndarray]:
    """A greedy loop by hand in JAX: prompts [batch, n] and how many tokens -> all tokens.

    One compiled program for prompts and one for steps, on caches with room for all tokens, which are donated and
    updated in place; the best token is chosen in the program and read at each step.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    w = {n: jnp.asarray(a) for n, a in weights(s).items()}

    def norm(x: Any, weight: Any) -> Any:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight

    def forward(w: Any, caches: Any, ids: Any, start: Any) -> tuple[Any, Any]:
        batch, n = ids.shape
        places = start + jnp.arange(n)
        x = w["words"][ids] + w["places"][places]
        is_open = jnp.arange(caches[0][0].shape[2]) <= places[:, None]
        made = []
        for i, (ks, vs) in enumerate(caches):
            h = norm(x, w[f"{i}.norm1"])
            q, k, v = ((h @ w[f"{i}.{p}"]).reshape(batch, n, s.heads, s.each).transpose(0, 2, 1, 3) for p in "qkv")
            ks = lax.dynamic_update_slice(ks, k, (0, 0, start, 0))
            vs = lax.dynamic_update_slice(vs, v, (0, 0, start, 0))
            made.append((ks, vs))
            scores = jnp.where(is_open, q @ ks.transpose(0, 1, 3, 2) / s.each**0.5, -1e9)
            mixed = (jax.nn.softmax(scores, -1) @ vs).transpose(0, 2, 1, 3).reshape(batch, n, s.width)
            x = x + mixed @ w[f"{i}.o"]
            x = x + jax.nn.relu(norm(x, w[f"{i}.norm2"]) @ w[f"{i}.up"]) @ w[f"{i}.down"]
        logits = norm(x[:, -1:], w["norm"]) @ w["out"]
        return logits[:, -1].argmax(-1)[:, None], made

    step = jax.jit(forward, donate_argnums=(1,))

    def loop(ids: np.ndarray, count: int) -> np.ndarray:
        capacity = -(-(ids.shape[1] + count) // 64) * 64
        empty = partial(jnp.zeros, (len(ids), s.heads, capacity, s.each), jnp.float32)
        caches = [(empty(), empty()) for _ in range(s.layers)]
        new, caches = step(w, caches, jnp.asarray(ids, jnp.int32), 0)
        tokens = [ids, np.asarray(new)]
        for i in range(count - 1):
            new, caches = step(w, caches, new, ids.shape[1] + i)
            tokens.append(np.asarray(new))
        return np.concatenate(tokens, 1)

    return loop
