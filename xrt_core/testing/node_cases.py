"""The single-node backend tests of the installed onnx package as cases, made in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.onnx_proto import array_from_tensor, attribute_from_proto, type_from_proto
from xrt_core.ir.types import STRING, TensorType


@dataclass(frozen=True)
class Case:
    """One node, the arrays it gets (None for an input left out) and the arrays it must give.

    rtol, atol: as the backend test asks for. opsets: of the model that the node stood in.
    """

    name: str
    node: Node
    inputs: list[Any]
    outputs: list[Any]
    rtol: float
    atol: float
    opsets: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_numeric(self) -> bool:
        """Whether every input and output is an array of numbers."""
        return all(
            x is None or (isinstance(x, np.ndarray) and x.dtype != STRING) for x in (*self.inputs, *self.outputs)
        )

    def __repr__(self) -> str:
        return self.name


@functools.cache
def all_cases() -> list[Case]:
    """Every single-node backend test whose inputs and outputs are tensors. Takes seconds the first time."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return [case for test in load_model_tests(kind="node") for case in _cases(test)]


def cases_for(*op_types: str, domain: str = "") -> list[Case]:
    """The cases of these operators."""
    return [c for c in all_cases() if c.node.op_type in op_types and c.node.domain == domain]


def _cases(test: Any) -> list[Case]:
    model = test.model
    if len(model.graph.node) != 1 or model.functions:
        return []
    proto = model.graph.node[0]
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in proto.attribute):
        return []
    opsets = {o.domain: o.version for o in model.opset_import}
    schema = onnx.defs.get_schema(proto.op_type, opsets[proto.domain], proto.domain)
    types = {v.name: type_from_proto(v.type, v.name) for v in [*model.graph.input, *model.graph.output]}
    if not all(isinstance(t, TensorType) for t in types.values()):
        return []
    cases = []
    for given, expected in test.data_sets:
        arrays = {v.name: _array(x) for v, x in zip(model.graph.input, given, strict=True)}
        arrays |= {v.name: _array(x) for v, x in zip(model.graph.output, expected, strict=True)}
        values = {n: Value(n, TensorType(arrays[n].dtype, arrays[n].shape)) for n in arrays}
        node = Node(
            proto.op_type,
            [values[n] if n else None for n in proto.input],
            [values[n] if n else None for n in proto.output],
            {a.name: attribute_from_proto(a, _no_graph, proto.op_type) for a in proto.attribute},
            domain=proto.domain,
            version=schema.since_version,
        )
        ins, outs = ([arrays[n] if n else None for n in names] for names in (proto.input, proto.output))
        cases.append(Case(test.name, node, ins, outs, test.rtol, test.atol, opsets))
    return cases


def _no_graph(_: onnx.GraphProto) -> Any:
    raise NotImplementedError("cases of control flow are not kernel cases")


def _array(x: Any) -> np.ndarray:
    if isinstance(x, onnx.TensorProto):
        return array_from_tensor(x, x.name)
    array = np.asarray(x)
    return array.astype(object) if array.dtype.kind in "US" else array
