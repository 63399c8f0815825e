"""One-node cases that between them reach every kernel of the engine with every dtype it claims."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrt_core.engine.contract import CompileOptions, Engine, Function, InputOutputAlias
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel

FLOATS = ("float16", "float32", "float64")
NUMBERS = (*FLOATS, "int32", "int64")
ANY = (*NUMBERS, "bool")

_UNARY_FLOATS = ("Ceil", "Cos", "Erf", "Exp", "Floor", "Reciprocal", "Round", "Sigmoid", "Sin", "Softplus", "Tanh")
_COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_REDUCE = ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin")


@dataclass(frozen=True)
class Case:
    """A node, its inputs (None for one left out) and what NumPy makes of them."""

    op_type: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    domain: str = ""

    def __repr__(self) -> str:
        first = next(x for x in self.inputs if x is not None)
        attributes = "-".join(f"{k}={v}" for k, v in self.attributes.items()).replace(" ", "")
        return f"{self.op_type}-{first.dtype}{list(first.shape)}-{attributes}-{self.opset}"

    def expected(self) -> list[np.ndarray]:
        """The results of the core's portable kernel."""
        found = find_kernel(self.domain, self.op_type)
        assert found is not None
        with np.errstate(all="ignore"):
            results = found.function(OpContext(self._node([None]), np), *self.inputs)
        return [np.asarray(r) for r in (results if isinstance(results, tuple) else (results,)) if r is not None]

    def _node(self, outputs: Sequence[Value | None]) -> Node:
        entry = op_kernels.find("toy", self.domain, self.op_type)
        static = entry.static if entry is not None else ()
        inputs = [
            None if x is None else Value.constant(x, f"x{i}") if i in static else value(f"x{i}", x.dtype, *x.shape)
            for i, x in enumerate(self.inputs)
        ]
        version = since_version(self.op_type, self.domain, self.opset)
        return Node(self.op_type, inputs, outputs, self.attributes, domain=self.domain, version=version, name="n")

    def function(self) -> tuple[Function, list[np.ndarray]]:
        """The case as a Function, and the arrays to call it with."""
        outputs = [value(f"y{i}", y.dtype, *y.shape) for i, y in enumerate(self.expected())]
        node = self._node(outputs)
        given = [(v, x) for v, x in zip(node.inputs, self.inputs, strict=True) if v is not None and v.data is None]
        graph = Graph([v for v, _ in given], outputs, [node], opsets={"": self.opset, "xrt": 1}, name=self.op_type)
        return Function.from_graph(graph), [x for _, x in given]


def value(name: str, dtype: Any, *shape: int) -> Value:
    """A tensor of known shape."""
    return Value(name, TensorType(np.dtype(dtype), shape))


def compiled(engine: Engine, function: Function) -> Any:
    """The executable of a Function."""
    compiler = engine.compiler("cuda:0", CompileOptions())
    return compiler.compile(function, function.params, function.returns, function.aliases)


def of_nodes(
    engine: Engine, inputs: list[Value], nodes: list[Node], outputs: list[Value], *aliases: InputOutputAlias
) -> Any:
    """An executable of a hand-written graph."""
    graph = Graph(inputs, outputs, nodes, opsets={"": 21}, name="test")
    return compiled(engine, Function.from_graph(graph, aliases=aliases))


def data(dtype: str, *shape: int, low: float = -4, high: float = 4) -> np.ndarray:
    """Numbers at random, always the same for the same arguments."""
    rng = np.random.default_rng(zlib.crc32(f"{dtype}{shape}{low}".encode()))
    if dtype == "bool":
        return rng.random(shape) < 0.5
    return np.asarray(rng.uniform(low, high, shape)).astype(dtype)


def cases() -> Iterator[Case]:
    """Every case."""
    yield from _elementwise()
    yield from _movement()
    yield from _reductions()
    yield from _products()
    yield from _windows()


def _elementwise() -> Iterator[Case]:
    for dtype in NUMBERS:
        for op_type in ("Abs", "Neg", "Relu", "Sign"):
            yield Case(op_type, (data(dtype, 3, 5),))
        for op_type in ("Add", "Div", "Mul", "Sub"):
            yield Case(op_type, (data(dtype, 2, 3), data(dtype, 2, 3, low=1)))
            yield Case(op_type, (data(dtype, 2, 1, 3), data(dtype, 4, 1, low=1)))
        for op_type in ("Max", "Min", "Sum"):
            yield Case(op_type, (data(dtype, 2, 3), data(dtype, 3, low=-3), data(dtype, low=-2)))
        low, high = np.array(-1, dtype), np.array(2, dtype)
        for bounds in ((low, high), (low,), (None, high), (high, low)):
            yield Case("Clip", (data(dtype, 7), *bounds))
    for dtype in FLOATS:
        for op_type in _UNARY_FLOATS:
            yield Case(op_type, (data(dtype, 3, 5),))
        for op_type in ("Log", "Sqrt"):
            yield Case(op_type, (data(dtype, 3, 5, low=0.1),))
        yield Case("LeakyRelu", (data(dtype, 6),), {"alpha": 0.25})
        yield Case("Elu", (data(dtype, 6),), {"alpha": 0.5})
        yield Case("Pow", (data(dtype, 6, low=0.1), data(dtype, 6)))
        for exponent in ("int32", "int64", "float64"):
            yield Case("Pow", (data(dtype, 6), np.array(3, exponent)))
    for dtype in ANY:
        for op_type in _COMPARE[: 1 if dtype == "bool" else None]:
            yield Case(op_type, (np.round(data(dtype, 2, 6)) if dtype != "bool" else data(dtype, 2, 6), data(dtype, 6)))
        yield Case("Where", (data("bool", 3, 1), data(dtype, 4), data(dtype, 3, 4)))
        for to, code in (("float16", 10), ("float32", 1), ("float64", 11), ("int32", 6), ("int64", 7), ("bool", 9)):
            x = data(dtype, 5) if dtype == to else np.append(data(dtype, 4), np.zeros(1, dtype))
            yield Case("Cast", (x,), {"to": code})
    for op_type in ("And", "Or", "Xor"):
        yield Case(op_type, (data("bool", 4, 4), data("bool", 4)))
    yield Case("Not", (data("bool", 5),))


def _movement() -> Iterator[Case]:
    for dtype in ANY:
        x = data(dtype, 2, 3, 4)
        yield Case("Transpose", (x,), {"perm": (2, 0, 1)})
        yield Case("Concat", (x, data(dtype, 2, 1, 4), x), {"axis": -2})
        yield Case("Gather", (x, np.array([[0, -1], [2, 1]], np.int64)), {"axis": 1})
        yield Case("Gather", (x, np.array(1, np.int32)), {"axis": -1})
        yield Case("Expand", (data(dtype, 3, 1), np.array([2, 3, 2])))
        yield Case("Identity", (x,))
        yield Case("Assign", (x, x[::-1].copy()), domain="xrt")
    yield Case("Reshape", (data("float32", 2, 6), np.array([3, -1])))
    yield Case("Flatten", (data("float32", 2, 3, 2),), {"axis": 2})
    yield Case("Squeeze", (data("float32", 1, 3, 1), np.array([0])))
    yield Case("Unsqueeze", (data("float32", 3), np.array([0, 2])))


def _reductions() -> Iterator[Case]:
    for op_type in _REDUCE:
        for dtype in FLOATS if op_type == "ReduceMean" else NUMBERS:
            yield Case(op_type, (data(dtype, 3, 5, low=1, high=3), np.array([-1])))
        yield Case(op_type, (data("float32", 3, 2, 2), np.array([0, 2])), {"keepdims": 0})
        yield Case(op_type, (data("float32", 3, 2),))
        yield Case(op_type, (data("float32", 3, 2),), {"axes": (0,)}, opset=11)
    for dtype in FLOATS:
        yield Case("Softmax", (data(dtype, 2, 5, 2),), {"axis": 1})
        yield Case("LogSoftmax", (data(dtype, 2, 5),))
        yield Case("LayerNormalization", (data(dtype, 2, 5), data(dtype, 5), data(dtype, 5, low=0)))
        yield Case("GlobalAveragePool", (data(dtype, 1, 2, 3, 3),))
    yield Case("Softmax", (data("float32", 2, 3, 2),), opset=11)
    yield Case("LayerNormalization", (data("float32", 2, 3, 2), data("float32", 3, 2)), {"axis": 1, "epsilon": 0.1})


def _products() -> Iterator[Case]:
    for dtype in NUMBERS:
        yield Case("MatMul", (data(dtype, 5, 6), data(dtype, 6, 3)))
        yield Case("Gemm", (data(dtype, 6, 3), data(dtype, 5, 6), data(dtype, 5)), {"transA": 1, "transB": 1})
        yield Case("Gemm", (data(dtype, 2, 3), data(dtype, 3, 2), data(dtype, 2, 1)), {"alpha": 3.0, "beta": 2.0})
    yield Case("Gemm", (data("float32", 2, 3), data("float32", 3, 2)), {"alpha": 0.5})
    yield Case("MatMul", (data("float32", 2, 1, 2, 3), data("float32", 2, 3, 2)))
    yield Case("MatMul", (data("float32", 5), data("float32", 2, 5, 2)))
    yield Case("MatMul", (data("float32", 2, 5), data("float32", 5)))
    yield Case("MatMul", (data("float32", 5), data("float32", 5)))


def _windows() -> Iterator[Case]:
    for dtype in FLOATS:
        yield Case("Conv", (data(dtype, 1, 2, 4, 5), data(dtype, 3, 2, 3, 3)), {"pads": (1, 1, 1, 1)})
        window = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
        yield Case("MaxPool", (data(dtype, 1, 2, 5, 5),), window)
        norm = [data(dtype, 3), data(dtype, 3, low=0), data(dtype, 3, low=1), data(dtype, 3, low=2)]
        yield Case("BatchNormalization", (data(dtype, 2, 3, 2, 2), *norm))
    grouped = (data("float32", 2, 4, 5, 4), data("float32", 4, 2, 2, 3), data("float32", 4))
    yield Case("Conv", grouped, {"group": 2, "strides": (2, 1), "dilations": (2, 1), "pads": (0, 1, 2, 0)})
    yield Case("Conv", (data("float32", 1, 2, 6), data("float32", 2, 2, 3)), {"auto_pad": "SAME_UPPER"})
    yield Case("MaxPool", (data("float32", 1, 2, 7),), {"kernel_shape": (2,), "strides": (3,), "ceil_mode": 1})
