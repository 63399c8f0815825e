"""A node built by hand as a case without expected outputs, for checks against formulas and reference evaluators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from tests.kernels.node_cases import Case
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType


def node_case(op: str, version: int, inputs: list[Any], outputs: int = 1, **attributes: Any) -> Case:
    """A case of one node; None stands for an input left out."""
    ins = [None if x is None else Value(f"i{i}", TensorType(x.dtype, x.shape)) for i, x in enumerate(inputs)]
    node = Node(op, ins, [Value(f"o{i}") for i in range(outputs)], attributes, version=version)
    return Case(op, node, inputs, [], 1e-5, 1e-5)


def run_reference(case: Case) -> list[np.ndarray]:
    """What the reference evaluator of onnx gives for the case, at the case's version."""
    ins = [f"i{i}" if x is not None else "" for i, x in enumerate(case.inputs)]
    outs = [f"o{i}" for i in range(len(case.node.outputs))]
    node = onnx.helper.make_node(case.node.op_type, ins, outs, **case.node.attributes)
    given = {f"i{i}": x for i, x in enumerate(case.inputs) if x is not None}
    infos = [onnx.helper.make_tensor_value_info(n, DTYPE_TO_ONNX[x.dtype], None) for n, x in given.items()]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_empty_tensor_value_info(o) for o in outs])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", case.node.version)])
    return list(ReferenceEvaluator(model).run(None, given))
