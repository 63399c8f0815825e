"""One-node Functions of the ONNX backend cases, and running them through the whole engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.engine.contract import CompileOptions, Engine, Function, Support
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

if TYPE_CHECKING:
    from tests.kernels.node_cases import Case


def function_of(case: Case) -> tuple[Function, list[np.ndarray]]:
    """The case as a Function and the arrays it is called with; inputs that must be known are constants of it."""
    entry = op_kernels.find("xla", case.node.domain, case.node.op_type)
    static = entry.static if entry is not None else ()
    values: list[Value | None] = []
    given: list[Value] = []
    arrays: list[np.ndarray] = []
    for i, (v, x) in enumerate(zip(case.node.inputs, case.inputs, strict=True)):
        if v is None or x is None:
            values.append(None)
        elif i in static:
            values.append(Value.constant(x, v.name))
        else:
            value = Value(v.name, TensorType(x.dtype, x.shape))
            values.append(value)
            given.append(value)
            arrays.append(x)
    node = case.node.replace(inputs=values)
    outputs = [v for v in node.outputs if v is not None]
    return Function.from_graph(Graph(given, outputs, [node], opsets={}, name=case.name)), arrays


def support_of(engine: Engine, case: Case) -> Support:
    """What the engine says about the case's node."""
    engine.prepare()
    return engine.supports(function_of(case)[0].body.nodes[0], "cpu", "inference")


def run_case(engine: Engine, case: Case) -> list[Any]:
    """The case's results, None for outputs that it does not ask for."""
    function, arrays = function_of(case)
    compiler = engine.compiler("cpu", CompileOptions())
    results = compiler.compile(function, function.params, function.returns, ()).run(arrays)
    left = iter(results)
    return [None if v is None else np.asarray(next(left)) for v in case.node.outputs]


def compile_nodes(engine: Engine, inputs: list[Value], nodes: list[Node], outputs: list[Value], **options: Any) -> Any:
    """An executable of a hand-written graph."""
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    compiler = engine.compiler("cpu", CompileOptions(**options))
    return compiler.compile(function, function.params, function.returns, ())
