"""Short spellings for the ONNX models that the import and export tests build."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

N = helper.make_node
ATTR = helper.make_attribute


def info(name: str, shape: Any = (2, 3), kind: int = TensorProto.FLOAT) -> Any:
    """A ValueInfoProto."""
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name: str, array: Any) -> TensorProto:
    """A TensorProto of an array."""
    return numpy_helper.from_array(np.asarray(array), name)


def subgraph(nodes: list[NodeProto], outputs: list[str], inputs: list[str] = [], name: str = "body") -> GraphProto:  # noqa: B006
    """A GraphProto for an attribute."""
    return helper.make_graph(nodes, name, [info(i) for i in inputs], [info(o, None) for o in outputs])


def model(
    nodes: list[NodeProto],
    inputs: list[Any] = ["x"],  # noqa: B006
    outputs: list[Any] = ["y"],  # noqa: B006
    *,
    opset: int = 18,
    initializer: list[TensorProto] = [],  # noqa: B006
    functions: list[FunctionProto] = [],  # noqa: B006
    domains: tuple[str, ...] = (),
    value_info: list[Any] = [],  # noqa: B006
    **more: Any,
) -> ModelProto:
    """A ModelProto; inputs and outputs given by name are float32[2, 3]."""
    graph = helper.make_graph(
        nodes,
        "g",
        [info(i) if isinstance(i, str) else i for i in inputs],
        [info(o) if isinstance(o, str) else o for o in outputs],
        initializer,
        value_info=value_info,
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10, **more)


def function(
    name: str, inputs: list[str], outputs: list[str], nodes: list[NodeProto], *, opset: int = 18, domain: str = "f",
    **more: Any,
) -> FunctionProto:  # fmt: skip
    """A model-local function of domain "f", which imports that domain too."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("f", 1)]
    return helper.make_function(domain, name, inputs, outputs, nodes, imports, **more)
