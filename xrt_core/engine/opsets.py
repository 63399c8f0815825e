"""One opset for a function whose nodes are of several: a pass may have put newer versions among older ones."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.schema import find_schema

__all__ = ["aligned", "same_but_types", "schema_of"]

_NEW_ATTRIBUTES: Final = {
    "Cast": ("saturate", "round_mode"),
    "CastLike": ("saturate", "round_mode"),
    "QuantizeLinear": ("saturate", "block_size", "output_dtype", "precision"),
    "DequantizeLinear": ("block_size", "output_dtype"),
    "Range": ("stash_type",),
    **dict.fromkeys(("ArgMax", "ArgMin"), ("select_last_index",)),
    "AveragePool": ("dilations",),
    "Reshape": ("allowzero",),
    "Shape": ("start", "end"),
    **dict.fromkeys(("ScatterElements", "ScatterND"), ("reduction",)),
}
"""Attributes that later versions added, whose default is what earlier ones did, or in 16 bits is more precise."""

_REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip
_INPUT_SINCE: Final = {
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), ("axes", 13)),
    **dict.fromkeys(_REDUCTIONS, ("axes", 18)),
    "Split": ("split", 13),
}
"""Attributes that are the second input from a version on."""
_ONE_AXIS_SINCE: Final = dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), 13)
"""Operators that were over all axes from one on, and are over that one from a version on."""


def aligned(function: Function, newest_opset: int | None = None) -> Function:
    """`function` with the standard's nodes in the versions of one opset, that of its newest node.

    A node changes its version where the two differ in nothing but the types that they take, where an attribute became
    an input, and where all the axes that an old Softmax is over are one and others of size 1. `function` itself comes
    back where its nodes are of one opset already, where one of them differs in more, and where the opset would be above
    `newest_opset`, which is the newest that the library knows.
    """
    body = function.body
    versions = {n.version for n in body.nodes if not n.domain}
    opset = body.opsets.get("", 0)
    if not versions or all(_since(n, opset) == n.version for n in body.nodes if not n.domain):
        return function
    newest = max(versions)
    if newest_opset is not None and newest > newest_opset:
        return function
    nodes = []
    for n in body.nodes:
        since = n.version if n.domain else _since(n, newest)
        new = n if since == n.version else _of_version(n, since)
        if new is None:
            return function
        nodes.append(new)
    opsets = {**body.opsets, "": newest}
    return Function(
        function.name, function.params, function.returns, body.replace(nodes=nodes, opsets=opsets), function.aliases
    )


def _of_version(n: Node, version: int) -> Node | None:
    """The node in a later version with the same meaning; None where there is none."""
    inputs, attributes = n.inputs, dict(n.attributes)
    name, since = _INPUT_SINCE.get(n.op_type, ("", 0))
    if n.version < since <= version:
        if name in attributes:
            values = np.atleast_1d(np.asarray(attributes.pop(name), np.int64))
            inputs = (*inputs, Value.constant(values, f"{n.name}/{name}"))
    elif n.version < _ONE_AXIS_SINCE.get(n.op_type, 0) <= version:
        axis = _one_axis(n)
        if axis is None:
            return None
        attributes["axis"] = axis
    elif not (version and same_but_types(n.op_type, n.version, version)) and n.op_type != "Split":
        return None
    if n.op_type == "Split" and n.version < 18 <= version and len(inputs) < 2:
        attributes["num_outputs"] = len(n.outputs)
    return Node(
        n.op_type, inputs, n.outputs, attributes, domain=n.domain, version=version, name=n.name,
        annotations=n.annotations,
    )  # fmt: skip


def _one_axis(n: Node) -> int | None:
    """The axis that an old Softmax is over, None where it is over several, or its shape is not known."""
    shape = n.inputs[0].shape if n.inputs[0] is not None else None
    axis = n.attributes.get("axis", 1)
    if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    long = [i for i in range(axis, len(shape)) if shape[i] != 1]
    return None if len(long) > 1 else long[0] if long else axis


def schema_of(op_type: str, opset: int, domain: str = "") -> Any:
    """The `onnx.defs.OpSchema` of an operator in an opset, None where the standard has none there."""
    found = find_schema(op_type, domain, opset)
    return None if found is None else found.onnx


def same_but_types(op_type: str, opset: int, other: int) -> bool:
    """Whether an operator of the standard has the same inputs, outputs and attributes in two opsets."""
    first, second = schema_of(op_type, opset), schema_of(op_type, other)
    if first is None or second is None:
        return False
    return bool(first.since_version == second.since_version) or _form(first) == _form(second)


def _since(node: Node, opset: int) -> int:
    """The version of the node's operator in an opset, 0 where it has none there."""
    schema = schema_of(node.op_type, opset, node.domain)
    return 0 if schema is None else int(schema.since_version)


def _form(schema: Any) -> Any:
    attributes = {
        name: (str(a.type), a.required, a.default_value.SerializeToString())
        for name, a in schema.attributes.items()
        if name not in _NEW_ATTRIBUTES.get(schema.name, ())
    }
    ports = [[(p.name, str(p.option)) for p in side] for side in (schema.inputs, schema.outputs)]
    return attributes, ports
