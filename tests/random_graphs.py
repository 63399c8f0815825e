"""Random graphs of real operators, as a hypothesis strategy: what every pass, partition and engine is tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType

OPSET = 18
F32, I64, BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)


@dataclass(frozen=True)
class RandomGraph:
    """graph: its inputs have symbolic dimensions where `build` was told so. arrays: arguments that fit it."""

    graph: Graph
    arrays: tuple[np.ndarray, ...]


def node(op_type: str, inputs: Sequence[Value | None], outputs: Sequence[Value | None], **attributes: Any) -> Node:
    """A node of the ONNX domain, of the version that OPSET implies, named after its first output."""
    name = next((v.name for v in outputs if v is not None), "")
    return Node(op_type, inputs, outputs, attributes, version=since_version(op_type, "", OPSET), name=name)


def ints(*values: int) -> Value:
    """A constant int64 vector."""
    return Value.constant(np.array(values, np.int64))


def graph_of(inputs: Sequence[Value], outputs: Sequence[Value], nodes: Sequence[Node], name: str = "g") -> Graph:
    """A graph of opset OPSET."""
    return Graph(inputs, outputs, nodes, opsets={"": OPSET}, name=name)


@dataclass
class _Item:
    """A float32 value of the graph: its true shape, and whether it is computed without rounding."""

    value: Value
    shape: tuple[int, ...]
    exact: bool = True


@dataclass
class _Builder:
    draw: st.DrawFn
    prefix: str
    pool: list[_Item]
    flags: list[Value]
    depth: int
    nodes: list[Node] = field(default_factory=list)
    count: int = 0

    def fresh(self) -> Value:
        self.count += 1
        return Value(f"{self.prefix}{self.count}")

    def add(self, op_type: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any) -> Any:
        made = [self.fresh() for _ in range(outputs)]
        self.nodes.append(node(op_type, inputs, made, **attributes))
        return made[0] if outputs == 1 else made

    def pick(self, fits: Callable[[_Item], bool] = lambda item: True) -> _Item | None:
        found = [item for item in self.pool if fits(item)]
        return self.draw(st.sampled_from(found)) if found else None

    def put(self, value: Value, shape: Sequence[int], *sources: _Item, exact: bool = True) -> None:
        self.pool.append(_Item(value, tuple(shape), exact and all(s.exact for s in sources)))

    def constant(self, shape: Sequence[int]) -> Value:
        seed = self.draw(st.integers(0, 9))
        return Value.constant(np.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 2, np.float32))

    # --- one method per kind of step ---------------------------------------------------------------------------------

    def unary(self) -> None:
        x = self.pick()
        op = self.draw(st.sampled_from(["Relu", "Neg", "Abs", "Identity", "Tanh", "Sigmoid", "Dropout"]))
        self.put(self.add(op, [x.value]), x.shape, x, exact=op not in ("Tanh", "Sigmoid"))

    def binary(self) -> None:
        x = self.pick()
        y = self.pick(lambda i: i.shape in (x.shape, (), x.shape[-1:]))
        op = self.draw(st.sampled_from(["Add", "Sub", "Max", "Min"]))
        if y is None or self.draw(st.booleans()):
            self.put(self.add(op, [x.value, self.constant(x.shape[-1:])]), x.shape, x)
        else:
            self.put(self.add(op, [x.value, y.value]), x.shape, x, y)

    def constants(self) -> None:
        shape = self.draw(st.sampled_from([(), (3,), (2, 3)]))
        total = self.add("Add", [self.constant(shape), self.constant(shape)])
        self.put(self.add("Neg", [total]), shape)

    def softmax(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0)
        self.put(self.add("Softmax", [x.value], axis=-1), x.shape, x, exact=False)

    def reduce(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0)
        axis, keep = self.draw(st.integers(0, len(x.shape) - 1)), self.draw(st.integers(0, 1))
        shape = [1 if i == axis else d for i, d in enumerate(x.shape) if keep or i != axis]
        op = self.draw(st.sampled_from(["ReduceSum", "ReduceMax"]))
        self.put(self.add(op, [x.value, ints(axis)], keepdims=keep), shape, x)

    def matmul(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0)
        self.put(self.add("MatMul", [x.value, self.constant((x.shape[-1], 2))]), (*x.shape[:-1], 2), x)

    def concat(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0 and np.prod(i.shape) < 32)
        if x is None:
            return
        y = self.pick(lambda i: i.shape == x.shape)
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        shape = [2 * d if i == axis else d for i, d in enumerate(x.shape)]
        self.put(self.add("Concat", [x.value, y.value], axis=axis), shape, x, y)

    def slice(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0)
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        start, end, step = self.draw(st.sampled_from([(0, 99, 1), (1, 3, 1), (0, 99, 2), (-1, -99, -1), (0, 1, 1)]))
        parts: list[slice] = [slice(None)] * len(x.shape)
        parts[axis] = slice(start, None if end == -99 else end, step)
        shape = np.empty(x.shape)[tuple(parts)].shape
        self.put(self.add("Slice", [x.value, ints(start), ints(end), ints(axis), ints(step)]), shape, x)

    def transpose(self) -> None:
        x = self.pick()
        order = self.draw(st.permutations(range(len(x.shape))))
        self.put(self.add("Transpose", [x.value], perm=tuple(order)), [x.shape[p] for p in order], x)

    def reshape(self) -> None:
        """By a constant, or by arithmetic on the shape itself."""
        x = self.pick(lambda i: len(i.shape) > 0)
        if self.draw(st.booleans()):
            target = ints(-1)
        else:
            target = self.add("Mul", [self.add("Shape", [x.value]), ints(1)])
            target = self.add("Unsqueeze", [self.add("ReduceProd", [target], keepdims=0), ints(0)])
        self.put(self.add("Reshape", [x.value, target], allowzero=1), (int(np.prod(x.shape)),), x)

    def squeeze(self) -> None:
        x = self.pick()
        wide = self.add("Unsqueeze", [x.value, ints(0)])
        self.put(wide, (1, *x.shape), x)
        if self.draw(st.booleans()):
            self.put(self.add("Squeeze", [wide, ints(0)]), x.shape, x)

    def expand(self) -> None:
        x = self.pick(lambda i: np.prod(i.shape) < 32)
        if x is not None:
            self.put(self.add("Expand", [x.value, ints(2, *[1] * len(x.shape))]), (2, *x.shape), x)

    def split(self) -> None:
        x = self.pick(lambda i: len(i.shape) > 0 and i.shape[0] > 1)
        if x is not None:
            a, b = self.add("Split", [x.value, ints(1, x.shape[0] - 1)], outputs=2, axis=0)
            self.put(a, (1, *x.shape[1:]), x)
            self.put(b, (x.shape[0] - 1, *x.shape[1:]), x)

    def cast(self) -> None:
        x = self.pick(lambda i: i.exact)
        kind = self.draw(st.sampled_from([1, 6, 11]))  # float32 (an identity), int32, float64
        self.put(self.add("Cast", [self.add("Cast", [x.value], to=kind)], to=1), x.shape, x)

    def where(self) -> None:
        x = self.pick(lambda i: i.exact)
        y = self.pick(lambda i: i.shape == x.shape)
        positive = self.add("Greater", [x.value, Value.constant(np.float32(0.5).reshape(()))])
        self.put(self.add("Where", [positive, x.value, y.value]), x.shape, x, y)

    def dynamic(self) -> None:
        """Through a value whose shape depends on the data, and back to a scalar."""
        x = self.pick(lambda i: i.exact and len(i.shape) > 0)
        flat = self.add("Reshape", [x.value, ints(-1)])
        positive = self.add("Greater", [flat, Value.constant(np.float32(0).reshape(()))])
        some = self.add("Relu", [self.add("Compress", [flat, positive], axis=0)])
        self.put(self.add("ReduceSum", [some], keepdims=0), (), x)

    def branch(self) -> None:
        """An If whose branches use values from around it; one may hold another If."""
        x = self.pick(lambda i: i.exact)
        if self.flags and self.draw(st.booleans()):
            condition: Value = self.draw(st.sampled_from(self.flags))
        elif self.draw(st.booleans()):
            condition = Value.constant(np.array(self.draw(st.booleans())))
        else:
            total = self.add("ReduceSum", [x.value], keepdims=0)
            condition = self.add("Greater", [total, Value.constant(np.float32(0).reshape(()))])
        graphs = []
        for name in ("t", "e"):
            inner = _Builder(self.draw, f"{self.prefix}{self.count}{name}", list(self.pool), self.flags, self.depth - 1)
            inner.steps(self.draw(st.integers(0, 2)))
            same = [i for i in inner.pool if i.shape == x.shape]
            end = self.draw(st.sampled_from(same[::-1]))
            out = inner.add("Add", [end.value, self.constant(())])
            graphs.append((graph_of([], [out], inner.nodes, name), end))
        made = self.add("If", [condition], then_branch=graphs[0][0], else_branch=graphs[1][0])
        self.put(made, x.shape, graphs[0][1], graphs[1][1])

    def loop(self) -> None:
        """Three turns over one state and one captured value, with a scan output."""
        x = self.pick()
        y = self.pick(lambda i: i.shape == x.shape)
        turn, go, state = Value("", TensorType(I64, ())), Value("", TensorType(BOOL, ())), Value("", None)
        inner = _Builder(self.draw, f"{self.prefix}{self.count}l", [], [], 0)
        half = inner.add("Mul", [state, Value.constant(np.float32(0.5).reshape(()))])
        after = inner.add("Max", [half, y.value])
        still = inner.add("Identity", [go])
        scanned = inner.add("Neg", [after])
        body = graph_of([turn, go, state], [still, after, scanned], inner.nodes, "body")
        made, all_ = self.add("Loop", [Value.constant(np.array(3)), None, x.value], outputs=2, body=body)
        self.put(made, x.shape, x, y)
        self.put(all_, (3, *x.shape), x, y)

    def steps(self, count: int) -> None:
        kinds = [
            self.unary, self.binary, self.constants, self.softmax, self.reduce, self.matmul, self.concat, self.slice,
            self.transpose, self.reshape, self.squeeze, self.expand, self.split, self.cast, self.where,
        ]  # fmt: skip
        if self.depth > 0:
            kinds += [self.dynamic, self.branch, self.loop]
        for _ in range(count):
            self.draw(st.sampled_from(kinds))()


@st.composite
def graphs(
    draw: st.DrawFn, minimum: int = 1, maximum: int = 10, control: bool = True, symbolic: bool = False
) -> RandomGraph:
    """A random graph with arguments for it; control: with If, Loop and data-dependent shapes in it."""
    shapes = [draw(st.sampled_from([(2, 3), (4,), (1, 3), (2, 1, 3)])) for _ in range(draw(st.integers(1, 2)))]
    shapes.append(shapes[0])
    inputs, pool = [], []
    for i, shape in enumerate(shapes):
        declared = tuple(f"d{i}_{k}" for k in range(len(shape))) if symbolic else shape
        inputs.append(Value(f"x{i}", TensorType(F32, declared)))
        pool.append(_Item(inputs[-1], shape))
    pool.append(_Item(Value.constant(np.array([[1, -2, 0.5], [0, 2, -1]], np.float32)), (2, 3)))
    flag = Value("flag", TensorType(BOOL, ()))
    builder = _Builder(draw, "v", pool, [flag], 2 if control else 0)
    builder.steps(draw(st.integers(minimum, maximum)))
    made = [i.value for i in builder.pool[::-1]]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 5)))
    arrays = [(rng.integers(-8, 9, shape) / 4).astype(np.float32) for shape in shapes]
    graph = graph_of([*inputs, flag], outputs, builder.nodes, "random")
    return RandomGraph(graph, (*arrays, np.array(draw(st.booleans()))))
