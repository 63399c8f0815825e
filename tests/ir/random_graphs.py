"""Random small graphs with every part that a fingerprint depends on, as a hypothesis strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType

OPSET = 18
F32 = np.dtype(np.float32)
MATRIX = TensorType(F32, (2, 3))

_UNARY = ("Relu", "Neg", "Exp", "Identity")
_BINARY = ("Add", "Sub", "Mul", "Max")


def node(
    op_type: str, inputs: list[Value | None], outputs: list[Value | None], version: int | None = None, **attributes: Any
) -> Node:
    """A node of the version that OPSET implies, or of the version given."""
    return Node(
        op_type, inputs, outputs, attributes, version=version or since_version(op_type, "", OPSET), name=op_type
    )


@st.composite
def graphs(draw: st.DrawFn, minimum: int = 1, maximum: int = 8, mixed: bool = True) -> Graph:
    """A valid graph over float32[2, 3]: unary, binary, Softmax (of two versions), Clip, Dropout, If, constants."""
    inputs = [Value(f"x{i}", MATRIX) for i in range(draw(st.integers(1, 3)))]
    flag = Value("flag", TensorType(np.dtype(np.bool_), ()))
    pool = list(inputs)
    nodes: list[Node] = []
    for i in range(draw(st.integers(minimum, maximum))):
        out = Value(draw(st.sampled_from(["", f"v{i}", f"a:{i}/b"])), MATRIX)
        kind = draw(st.sampled_from(["unary", "binary", "constant", "softmax", "clip", "dropout", "if"]))
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        if kind == "unary":
            nodes.append(node(draw(st.sampled_from(_UNARY)), [a], [out]))
        elif kind == "binary":
            nodes.append(node(draw(st.sampled_from(_BINARY)), [a, b], [out]))
        elif kind == "constant":
            data = np.array(draw(st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3)), np.float32)
            nodes.append(node("Add", [a, Value.constant(data, f"c{i}")], [out]))
        elif kind == "softmax":
            version = draw(st.sampled_from([11, 13])) if mixed else 13
            nodes.append(node("Softmax", [a], [out], version, axis=draw(st.sampled_from([0, 1, -1]))))
        elif kind == "clip":
            nodes.append(node("Clip", [a, None, Value.constant(np.array(1.5, np.float32))], [out]))
        elif kind == "dropout":
            mask = draw(st.sampled_from([None, Value(f"mask{i}")]))
            nodes.append(node("Dropout", [a], [out, mask], seed=draw(st.integers(0, 3))))
        else:
            nodes.append(_branch(draw, flag, a, b, out, mixed))
        pool.append(out)
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    return Graph([*inputs, flag], outputs, nodes, opsets={"": OPSET}, name="random")


def _branch(draw: st.DrawFn, flag: Value, a: Value, b: Value, out: Value, mixed: bool) -> Node:
    version = draw(st.sampled_from([11, 16])) if mixed else 16
    inner = Value("inner", MATRIX)
    constant = Value.constant(np.full((2, 3), draw(st.integers(0, 5)), np.float32), "k")
    then = Graph([], [inner], [node("Mul", [a, constant], [inner])], opsets={"": OPSET}, name="then")
    last = Value("", MATRIX)
    softmax = node("Softmax", [b], [last], 11 if mixed else 13, axis=1)
    other = Graph([], [draw(st.sampled_from([last, b, constant]))], [softmax], opsets={"": OPSET}, name="else")
    return node("If", [flag], [out], version, then_branch=then, else_branch=other)


def renamed(graph: Graph, label: str = "n") -> Graph:
    """The same graph with every name changed and its constants copied."""
    return _Copy(label).graph(graph)


class _Copy:
    def __init__(self, label: str) -> None:
        self._label = label
        self._values: dict[Value, Value] = {}

    def value(self, v: Value | None) -> Value | None:
        if v is None:
            return None
        if v not in self._values:
            data = None if v.data is None else v.data.copy()
            self._values[v] = Value(f"{self._label}{len(self._values)}", v.type, data)
        return self._values[v]

    def graph(self, g: Graph) -> Graph:
        inputs = [self.value(v) for v in g.inputs]
        nodes = []
        for n in g.nodes:
            attributes = {k: self.graph(a) if isinstance(a, Graph) else a for k, a in n.attributes.items()}
            nodes.append(
                Node(
                    n.op_type,
                    [self.value(v) for v in n.inputs],
                    [self.value(v) for v in n.outputs],
                    attributes,
                    domain=n.domain,
                    version=n.version,
                    name=f"{self._label}_{len(nodes)}",
                )
            )
        outputs = [self.value(v) for v in g.outputs]
        defaults = {self._values[v]: a for v, a in g.defaults.items()}
        return Graph(inputs, outputs, nodes, opsets=g.opsets, name=self._label, defaults=defaults)  # type: ignore[arg-type]
