"""Random graphs over inputs of two varying sizes, `b` and `s`: what padding is tried on.

`soup` joins operators at random, also such as work for some sizes alone; `encoder` makes transformers in the many ways
in which exporters write them. Both are functions of a NumPy generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrt_core.errors import XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType

OPSET = 18
HIDDEN = 8
F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
SHAPES = (("b", "s", HIDDEN), ("b", "s"), ("b", "s"))
"""Of the inputs x (float32), ids (int64, 0 to 15) and mask (int64, 0 or 1)."""


def arguments(rng: np.random.Generator, b: int, s: int) -> list[np.ndarray]:
    """Arguments for these sizes; the first place of each row is not masked."""
    mask = (rng.random((b, s)) < 0.7).astype(np.int64)
    mask[:, 0] = 1
    return [rng.standard_normal((b, s, HIDDEN)).astype(np.float32), rng.integers(0, 16, (b, s)), mask]


@dataclass
class Builder:
    """A graph under construction. rng: decides. Every node is run on arguments of one size as it is added."""

    rng: np.random.Generator
    sizes: tuple[int, int] = (3, 7)
    nodes: list[Node] = field(default_factory=list)
    arrays: dict[Value, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtypes = (F32, I64, I64)
        self.inputs = [Value(n, TensorType(t, s)) for n, t, s in zip(("x", "ids", "mask"), dtypes, SHAPES, strict=True)]
        self.x, self.ids, self.mask = self.inputs
        self.arrays.update(zip(self.inputs, arguments(self.rng, *self.sizes), strict=True))

    def add(self, op_type: str, *inputs: Value | None, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; returns its output, or a list of them. Raises XRTError where it fails on the arguments."""
        name = f"v{len(self.nodes)}"
        made = [Value(f"{name}_{i}") for i in range(outputs)]
        node = Node(op_type, inputs, made, attributes, version=since_version(op_type, "", OPSET), name=name)
        given = [None if v is None else v.data if v.data is not None else self.arrays[v] for v in inputs]
        with np.errstate(all="ignore"):
            found = run_node(node, given)
        if any(np.size(a) > 100_000 for a in found):
            raise XRTError("too large")
        self.nodes.append(node)
        self.arrays.update(zip(made, found, strict=False))
        return made[0] if outputs == 1 else made

    def ints(self, *values: int) -> Value:
        return Value.constant(np.array(values, np.int64))

    def scalar(self, value: int) -> Value:
        return Value.constant(np.array(value, np.int64))

    def number(self, value: float) -> Value:
        return Value.constant(np.array(value, np.float32))

    def weight(self, *shape: int) -> Value:
        return Value.constant((self.rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def size(self, v: Value, axis: int) -> Value:
        """The size of an axis as a vector of one."""
        if self.rng.random() < 0.5:
            return self.add("Shape", v, start=axis, end=axis + 1)
        return self.add("Gather", self.add("Shape", v), self.ints(axis), axis=0)

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def graph(self, outputs: Sequence[Value]) -> Graph:
        return Graph(self.inputs, outputs, self.nodes, opsets={"": OPSET}, name="varying")


# --- encoders ---------------------------------------------------------------------------------------------------------


def _norm(g: Builder, x: Value) -> Value:
    scale, shift = g.weight(HIDDEN), g.weight(HIDDEN)
    kind = g.rng.integers(3)
    if kind == 0:
        return g.add("LayerNormalization", x, scale, shift, axis=-1)
    if kind == 1:  # as written out by older exporters
        away = g.add("Sub", x, g.add("ReduceMean", x, g.ints(-1)))
        var = g.add("ReduceMean", g.add("Mul", away, away), g.ints(-1))
        y = g.add("Div", away, g.add("Sqrt", g.add("Add", var, g.number(1e-5))))
        return g.add("Add", g.add("Mul", y, scale), shift)
    mean = g.add("ReduceMean", g.add("Pow", x, g.number(2.0)), g.ints(-1))
    return g.add("Mul", g.add("Mul", x, g.add("Reciprocal", g.add("Sqrt", g.add("Add", mean, g.number(1e-5))))), scale)


def _split_heads(g: Builder, x: Value, heads: int) -> Value:
    one = HIDDEN // heads
    shape = g.one_of(
        lambda: g.ints(0, 0, heads, one),
        lambda: g.ints(0, -1, heads, one),
        lambda: g.add("Concat", g.size(x, 0), g.size(x, 1), g.ints(heads), g.ints(one), axis=0),
        lambda: g.add("Concat", g.size(x, 0), g.ints(-1, heads, one), axis=0),
    )()
    return g.add("Transpose", g.add("Reshape", x, shape), perm=(0, 2, 1, 3))


def _merge_heads(g: Builder, x: Value) -> Value:
    y = g.add("Transpose", x, perm=(0, 2, 1, 3))
    shape = g.one_of(
        lambda: g.ints(0, 0, HIDDEN),
        lambda: g.ints(0, 0, -1),
        lambda: g.add("Concat", g.size(y, 0), g.size(y, 1), g.ints(HIDDEN), axis=0),
    )()
    return g.add("Reshape", y, shape)


def looked_up(g: Builder, way: str) -> Value:
    """The mask as [b, 1, 1, s]: `mask[rows, places]` as torch's two exporters write it, or its axes with others
    between them."""
    mask = g.add("Cast", g.mask, to=1)
    if not way:
        return g.add("Unsqueeze", mask, g.ints(1, 2))
    b, s = (g.add("Squeeze", g.size(g.ids, axis)) for axis in (0, 1))
    rows = g.add("Unsqueeze", g.add("Range", g.scalar(0), b, g.scalar(1)), g.ints(1, 2, 3))
    count = g.add("Range", g.scalar(0), s, g.scalar(1))
    places = g.add("Unsqueeze", g.add("Unsqueeze", count, g.ints(0)), g.ints(1, 2))
    if way == "Gather":
        flat = g.add("Reshape", g.add("Flatten", mask, axis=2), g.ints(-1))
        return g.add("Gather", flat, g.add("Add", places, g.add("Mul", rows, s)), axis=0)
    shape = g.add("Shape", g.add("Max", rows, places))
    both = [g.add("Unsqueeze", g.add("Expand", i, shape), g.ints(-1)) for i in (rows, places)]
    return g.add("GatherND", mask, g.add("Concat", *both, axis=-1))


def _bias(g: Builder) -> Value | None:
    """What is added to the scores: of the mask, causal, both or none."""
    kind = g.rng.integers(4)
    found: Value | None = None
    if kind in (1, 3):
        m = looked_up(g, g.one_of("", "GatherND", "Gather"))
        low = g.one_of(-1e4, -3.4e38)
        found = g.add("Mul", g.add("Sub", g.number(1.0), m), g.number(low))
    if kind in (2, 3):
        n = g.add("Squeeze", g.size(g.ids, 1))
        if g.rng.random() < 0.5:
            places = g.add("Range", g.scalar(0), n, g.scalar(1))
            rows = g.add("Unsqueeze", places, g.ints(1))
            later = g.add("Greater", g.add("Unsqueeze", places, g.ints(0)), rows)
        else:
            n1 = g.add("Unsqueeze", n, g.ints(0))
            ones = g.add(
                "ConstantOfShape", g.add("Concat", n1, n1, axis=0), value=np.array([1.0], np.float32)
            )  # fmt: skip
            later = g.add("Cast", g.add("Trilu", ones, g.scalar(1), upper=1), to=9)
        low = g.number(g.one_of(-np.inf, -1e9))
        causal = g.add("Where", later, low, g.number(0.0))
        found = causal if found is None else g.add("Add", found, causal)
    return found


def _attention(g: Builder, x: Value, bias: Value | None) -> Value:
    heads = int(g.one_of(1, 2, 4))
    q, k, v = (
        _split_heads(g, g.add("Add", g.add("MatMul", x, g.weight(HIDDEN, HIDDEN)), g.weight(HIDDEN)), heads)
        for _ in range(3)
    )
    scale = g.number((HIDDEN // heads) ** -0.5)
    if g.rng.random() < 0.3:
        scores = g.add("Mul", g.add("Einsum", q, k, equation="bhqd,bhkd->bhqk"), scale)
    else:
        scores = g.add("Mul", g.add("MatMul", q, g.add("Transpose", k, perm=(0, 1, 3, 2))), scale)
    if bias is not None:
        scores = g.add("Add", scores, bias)
    weights = g.add("Softmax", scores, axis=-1)
    if g.rng.random() < 0.3:
        weights = g.add("Where", g.add("IsNaN", weights), g.number(0.0), weights)
    mixed = g.add("Einsum", weights, v, equation="bhqk,bhkd->bhqd") if g.rng.random() < 0.3 else g.add(
        "MatMul", weights, v
    )  # fmt: skip
    return g.add("MatMul", _merge_heads(g, mixed), g.weight(HIDDEN, HIDDEN))


def _feed_forward(g: Builder, x: Value) -> Value:
    flat = g.rng.random() < 0.3
    y = g.add("Reshape", x, g.ints(-1, HIDDEN)) if flat else x
    w1, w2 = g.weight(HIDDEN, 2 * HIDDEN), g.weight(2 * HIDDEN, HIDDEN)
    if flat:
        y = g.add("Gemm", y, w1, g.weight(2 * HIDDEN))
    else:
        y = g.add("MatMul", y, w1)
    kind = g.rng.integers(3)
    if kind == 0:
        y = g.add("Relu", y)
    elif kind == 1:
        y = g.add("Mul", y, g.add("Sigmoid", y))
    else:
        y = g.add("Mul", y, g.add("Add", g.add("Erf", g.add("Mul", y, g.number(0.7))), g.number(1.0)))
    y = g.add("MatMul", y, w2)
    return g.add("Reshape", y, g.add("Shape", x)) if flat else y


def _convolution(g: Builder, x: Value) -> Value:
    """Over the places, as in a Conformer."""
    y = g.add("Transpose", x, perm=(0, 2, 1))
    y = g.add("Conv", y, g.weight(HIDDEN, HIDDEN, 3), pads=(1, 1), kernel_shape=(3,))
    if g.rng.random() < 0.5:  # squeeze and excite
        y = g.add("Mul", y, g.add("Sigmoid", g.add("GlobalAveragePool", y)))
    return g.add("Transpose", g.add("Relu", y), perm=(0, 2, 1))


def _positions(g: Builder, x: Value) -> Value:
    table = g.weight(64, HIDDEN)
    kind = g.rng.integers(4)
    if kind == 0:
        return x
    if kind == 1:  # a slice of a table of indices
        at = g.add("Slice", Value.constant(np.arange(64)[None]), g.ints(0), g.size(g.ids, 1), g.ints(1))
        return g.add("Add", x, g.add("Gather", table, at, axis=0))
    if kind == 2:
        at = g.add("Range", g.scalar(0), g.add("Squeeze", g.size(g.ids, 1)), g.scalar(1))
        return g.add("Add", x, g.add("Gather", table, at, axis=0))
    at = g.add("Mul", g.add("CumSum", g.mask, g.scalar(1)), g.mask)  # RoBERTa counts places that are not masked
    return g.add("Add", x, g.add("Gather", table, at, axis=0))


def _head(g: Builder, x: Value) -> Value:
    kind = g.rng.integers(8)
    if kind == 0:
        return x
    if kind == 1:
        return g.add("MatMul", g.add("Gather", x, g.scalar(0), axis=1), g.weight(HIDDEN, 5))
    if kind == 2:  # the mean over places that are not masked
        m = g.add("Unsqueeze", g.add("Cast", g.mask, to=1), g.ints(-1))
        total = g.add("ReduceSum", g.add("Mul", x, m), g.ints(1), keepdims=0)
        return g.add("Div", total, g.add("ReduceSum", m, g.ints(1), keepdims=0))
    if kind == 3:
        return g.add("ReduceMean", x, g.ints(1), keepdims=0)
    if kind == 4:
        return g.add("ReduceMax", x, g.ints(1), keepdims=0)
    if kind == 5:
        return g.add("Softmax", g.add("MatMul", x, g.weight(HIDDEN, 11)), axis=-1)
    if kind == 6:
        return g.add("ArgMax", g.add("MatMul", x, g.weight(HIDDEN, 11)), axis=-1, keepdims=0)
    return g.add("Slice", x, g.ints(-1), g.ints(2**63 - 1), g.ints(1))  # the last place


def encoder(rng: np.random.Generator) -> Graph:
    """A transformer of one to three layers."""
    g = Builder(rng)
    x = g.x if rng.random() < 0.3 else g.add("Gather", g.weight(16, HIDDEN), g.ids, axis=0)
    x = _norm(g, _positions(g, x))
    bias = _bias(g)
    for _ in range(rng.integers(1, 4)):
        x = _norm(g, g.add("Add", x, _attention(g, x, bias)))
        if rng.random() < 0.2:
            x = g.add("Add", x, _convolution(g, x))
        x = _norm(g, g.add("Add", x, _feed_forward(g, x)))
    return g.graph([_head(g, x), x] if rng.random() < 0.3 else [_head(g, x)])


# --- soup -------------------------------------------------------------------------------------------------------------


def _soup_step(g: Builder, pick: Callable[..., Value]) -> Value | None:
    """Add an operator, drawn at random, to values drawn at random."""
    rng = g.rng
    x = pick()
    shape = g.arrays[x].shape
    rank = len(shape)

    def axis() -> int:
        return int(rng.integers(rank)) if rank else 0

    def some_axes() -> Value:
        count = int(rng.integers(1, rank + 1))
        return g.ints(*(int(a) for a in rng.choice(rank, count, replace=False)))

    kind = int(rng.integers(40))
    if kind < 3:
        return g.add(g.one_of("Relu", "Sigmoid", "Exp", "Neg", "Sqrt", "Log", "Tanh", "Reciprocal", "Abs", "Erf"), x)
    if kind < 6:
        y = g.one_of(lambda: pick(), lambda: g.number(0.5), lambda: pick(shape))()
        return g.add(g.one_of("Add", "Mul", "Sub", "Div", "Max", "Min"), x, y)
    if rank == 0:
        return None
    if kind < 8:
        return g.add(g.one_of("Softmax", "LogSoftmax", "Hardmax"), x, axis=axis())
    if kind < 11:
        op = g.one_of(
            "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
            "ReduceLogSumExp", "ReduceSumSquare", "ReduceLogSum",
        )  # fmt: skip
        return g.add(op, x, some_axes(), keepdims=int(rng.integers(2)))
    if kind == 11:
        return g.add("Cast", g.add(g.one_of("ArgMax", "ArgMin"), x, axis=axis(), keepdims=int(rng.integers(2))), to=1)
    if kind == 12:
        return g.add("CumSum", x, g.scalar(axis()), reverse=int(rng.integers(2)), exclusive=int(rng.integers(2)))
    if kind < 16:
        return g.add("Transpose", x, perm=tuple(int(a) for a in rng.permutation(rank)))
    if kind < 19:
        target = g.one_of(
            lambda: g.ints(-1), lambda: g.ints(0, -1), lambda: g.ints(-1, shape[-1]), lambda: g.ints(-1, 2),
            lambda: g.ints(0, 0, 2, -1), lambda: g.ints(0, 2, -1), lambda: g.ints(1, -1, *shape[-1:]),
            lambda: g.add("Concat", g.size(x, 0), g.ints(-1), axis=0),
            lambda: g.add("Concat", g.ints(-1), g.size(x, rank - 1), axis=0),
        )()  # fmt: skip
        return g.add("Reshape", x, target)
    if kind == 19:
        return g.add("Unsqueeze", x, g.ints(axis()))
    if kind == 20:
        return g.add("Flatten", x, axis=axis())
    if kind == 21:
        ones = [i for i, n in enumerate(shape) if n == 1]
        return g.add("Squeeze", x, g.ints(*ones[:1])) if ones else None
    if kind == 22:
        return g.add("MatMul", x, g.weight(shape[-1], 3))
    if kind == 23 and rank >= 2:
        perm = [*range(rank - 2), rank - 1, rank - 2]
        y = g.add("Transpose", x, perm=tuple(perm))
        return g.add("MatMul", x, y) if rng.random() < 0.5 else g.add("MatMul", y, x)
    if kind == 24:
        other = g.one_of(lambda: x, lambda: pick(shape), lambda: pick(), lambda: g.weight(*(1, *shape[1:])))()
        return g.add("Concat", *g.one_of((x, other), (other, x), (other, x, other)), axis=axis())
    if kind in (25, 26):
        starts, ends = g.one_of(
            (0, 1), (0, -1), (1, 2**63 - 1), (-1, 2**63 - 1), (-2, 2**63 - 1), (0, 2), (1, 3), (-3, -1), (1, -1)
        )
        return g.add("Slice", x, g.ints(starts), g.ints(ends), g.ints(axis()), g.ints(int(g.one_of(1, 1, 1, 2))))
    if kind == 27:
        return g.add("Slice", x, g.ints(-1), g.ints(-(2**63)), g.ints(axis()), g.ints(-1))  # reversed
    if kind == 28:
        index = g.one_of(g.scalar(0), g.scalar(-1), g.ints(1, 0), g.ints(0, -1))
        return g.add("Gather", x, index, axis=axis())
    if kind == 29:
        pads = g.ints(*(int(rng.integers(3)) for _ in range(2 * rank)))
        return g.add("Pad", x, pads, g.number(float(g.one_of(0.0, 1.5))))
    if kind == 30:
        return g.add("Tile", x, g.ints(*(int(rng.integers(1, 3)) for _ in range(rank))))
    if kind == 31:
        target = g.add("Concat", g.ints(2), g.add("Shape", x), axis=0)
        return g.add("Expand", x, target)
    if kind == 32:
        return g.add("LayerNormalization", x, g.weight(shape[-1]), axis=-1)
    if kind == 33 and rank == 3:
        stride, pad = int(g.one_of(1, 2)), int(g.one_of(0, 1))
        if rng.random() < 0.5:
            op = g.one_of("MaxPool", "AveragePool")
            return g.add(op, x, kernel_shape=(2,), strides=(stride,), pads=(pad, pad))
        w = g.weight(4, shape[1], 3)
        return g.add("Conv", x, w, kernel_shape=(3,), strides=(stride,), pads=(pad, pad))
    if kind == 34 and rank == 3:
        if rng.random() < 0.5:
            return g.add("GlobalAveragePool", x)
        return g.add("ConvTranspose", x, g.weight(shape[1], 2, 3), kernel_shape=(3,), strides=(2,), pads=(1, 0))
    if kind == 35:
        count = g.add("Cast", g.size(x, axis()), to=1)
        return g.add(g.one_of("Mul", "Div", "Add"), x, count)
    if kind == 36 and rank >= 2:
        return g.add("Trilu", x, upper=int(rng.integers(2)))
    if kind == 37:
        y, scale, zero = g.add("DynamicQuantizeLinear", x, outputs=3)
        return g.add("DequantizeLinear", y, scale, zero)
    if kind == 38 and rank == 3:
        weights = g.weight(1, 12, shape[2]), g.weight(1, 12, 3), g.weight(1, 24)
        y, last, _ = g.add("LSTM", x, *weights, outputs=3, hidden_size=3)
        return g.one_of(last, g.add("Squeeze", y, g.ints(1)))
    if kind == 39:
        at = g.add("Range", g.scalar(0), g.add("Squeeze", g.size(x, axis())), g.scalar(1))
        return g.one_of(lambda: g.add("Cast", at, to=1), lambda: g.add("Gather", x, at, axis=axis()))()
    return None


def soup(rng: np.random.Generator, steps: int = 10) -> Graph:
    """A graph of about so many operators; some sizes may not fit it."""
    g = Builder(rng)
    pool = [g.x, g.add("Cast", g.ids, to=1), g.add("Cast", g.mask, to=1), g.add("Gather", g.weight(16, 4), g.ids)]

    def pick(shape: Sequence[int] | None = None) -> Value:
        fits = [v for v in pool if shape is None or g.arrays[v].shape == tuple(shape)]
        recent = fits[-4:] if rng.random() < 0.7 else fits
        return recent[int(rng.integers(len(recent)))]

    made = 0
    for _ in range(6 * steps):
        if made == steps:
            break
        before = len(g.nodes)
        try:
            v = _soup_step(g, pick)
        except XRTError:
            v = None
        if v is None or g.arrays[v].size == 0 or g.arrays[v].dtype != np.float32:
            del g.nodes[before:]
            continue
        pool.append(v)
        made += 1
    return g.graph(list(dict.fromkeys([pool[-1], pool[int(rng.integers(len(pool)))]])))
