"""Functions for the tests of the contract: small graphs of operators that nearly every engine has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from xrt_core.engine.contract import Function, InputOutputAlias
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.kernels import static_inputs
from xrt_core.testing.node_cases import Case

OPSET = 21
"""The opset of the graphs that the kit writes itself."""

F32 = np.dtype(np.float32)


def value(name: str, *shape: int, dtype: Any = F32) -> Value:
    """A tensor of known shape."""
    return Value(name, TensorType(np.dtype(dtype), shape))


def node(op_type: str, inputs: Sequence[Value | None], outputs: Sequence[Value | None], **attributes: Any) -> Node:
    """A node of the ONNX domain, in the form that `OPSET` has."""
    return Node(
        op_type, inputs, outputs, attributes, version=since_version(op_type, "", OPSET), name=f"{op_type.lower()}_node"
    )


def function(
    name: str, inputs: Iterable[Value], nodes: Iterable[Node], outputs: Iterable[Value], *aliases: InputOutputAlias
) -> Function:
    """A Function of these nodes."""
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": OPSET}, name=name), aliases=aliases)


def binary(op_type: str = "Add", *shape: int, dtype: Any = F32) -> Function:
    """y = op(a, b)."""
    a, b, y = (value(n, *(shape or (2, 3)), dtype=dtype) for n in "aby")
    return function(f"{op_type.lower()}_only", [a, b], [node(op_type, [a, b], [y])], [y])


def chain() -> tuple[Function, np.ndarray]:
    """y = relu(x @ w + b) * x0 + ..., several operators and a constant; and an input."""
    rng = np.random.default_rng(5)
    x = value("x", 4, 8)
    w = Value.constant(rng.standard_normal((8, 8), np.float32), "w")
    b = Value.constant(rng.standard_normal(8, np.float32), "b")
    product, shifted, y = (value(n, 4, 8) for n in ("product", "shifted", "y"))
    nodes = [node("MatMul", [x, w], [product]), node("Add", [product, b], [shifted]), node("Mul", [shifted, x], [y])]
    return function("chain", [x], nodes, [y]), rng.standard_normal((4, 8), np.float32)


def update(size: int = 1024) -> Function:
    """total = p + g beside new = p - g, where `new` takes the storage of `p`."""
    p, g, new, total = (value(n, size) for n in ("p", "g", "new", "total"))
    nodes = [node("Add", [p, g], [total]), node("Sub", [p, g], [new])]
    return function("update", [p, g], nodes, [total, new], InputOutputAlias(1, 0))


def unknown_operator() -> Function:
    """A Function of an operator that no engine supports."""
    x, y = value("x", 2), value("y", 2)
    stranger = Node("NoSuchOperator", [x], [y], domain="xrt.kit", version=1, name="stranger")
    return Function.from_graph(Graph([x], [y], [stranger], opsets={"": OPSET, "xrt.kit": 1}, name="stranger"))


def forms_of(case: Case, engine: str) -> Iterable[tuple[Function, list[np.ndarray]]]:
    """The case as a Function and its arguments, in the forms that an engine may take it in.

    First only those inputs are constants whose values the operator's kernel must know (shapes, axes); then all but
    the first, as in a model where weights are known; then, for nodes of no other form, every input is an argument.
    """
    entry = op_kernels.find(engine, case.node.domain, case.node.op_type)
    static = set(static_inputs(case.node)) | set(entry.static if entry is not None else ())
    for known in dict.fromkeys((frozenset(static), frozenset(range(1, len(case.inputs))) | static, frozenset[int]())):
        yield _form(case, known)


def _form(case: Case, known: Iterable[int]) -> tuple[Function, list[np.ndarray]]:
    values: list[Value | None] = []
    given: dict[Value, np.ndarray] = {}
    same: dict[Value, Value] = {}  # one value may be read twice
    for i, (v, x) in enumerate(zip(case.node.inputs, case.inputs, strict=True)):
        if v is None or x is None:
            values.append(None)
        elif i in known:
            values.append(Value.constant(x, v.name if v not in same else f"{v.name}_known"))
        elif v in same:
            values.append(same[v])
        else:
            new = same[v] = Value(v.name, TensorType(x.dtype, x.shape))
            values.append(new)
            given[new] = x
    made = case.node.replace(inputs=values)
    outputs = [v for v in made.outputs if v is not None]
    graph = Graph(given, outputs, [made], opsets=case.opsets or {"": OPSET}, name=case.name)
    return Function.from_graph(graph), list(given.values())
