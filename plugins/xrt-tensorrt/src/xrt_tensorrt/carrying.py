"""uint8 inside a network, where TensorRT has none: float32 carries it through operators that only move or compare."""

from __future__ import annotations

from typing import Final

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

UINT8: Final = np.dtype(np.uint8)
_CARRIER: Final = np.dtype(np.float32)
_FLOAT: Final = 1  # ONNX's number of float32
_SAFE: Final = frozenset(map(np.dtype, ("float32", "float16", "int32", "int64", "bool", "uint8")))

CARRIED: Final = frozenset(
    (
        "ArgMax", "ArgMin", "CenterCropPad", "Clip", "Concat", "DepthToSpace", "Equal", "Expand", "Flatten", "Gather",
        "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "MaxPool",
        "Min", "Pad", "ReduceMax", "ReduceMin", "Reshape", "ReverseSequence", "Shape", "Size", "Slice", "SpaceToDepth",
        "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
    )
)  # fmt: skip
"""Operators that give the same elements, or the same answers, for integers of 8 bits in float32."""


def has_uint8(node: Node) -> bool:
    """Whether a tensor of uint8 that is no constant enters or leaves the node."""
    return any(v is not None and v.data is None and v.dtype == UINT8 for v in (*node.inputs, *node.outputs))


def why_not_carried(node: Node) -> str:
    """Why a node of uint8 does not compute the same in float32, "" where it does."""
    if node.domain == "" and (node.op_type in CARRIED or _is_plain_cast(node)):
        return ""
    return f"{node.operator} of uint8: TensorRT has uint8 only where tensors enter and leave"


def _is_plain_cast(node: Node) -> bool:
    if node.op_type != "Cast":
        return False
    source, made = node.inputs[0], node.outputs[0]
    if source is None or made is None or made.dtype not in _SAFE:
        return False
    return source.dtype == UINT8 or (made.dtype == UINT8 and source.dtype == np.bool_)


def carrier(v: Value) -> Value:
    """A value of uint8 as the float32 that carries it, a constant as well."""
    assert isinstance(v.type, TensorType)
    return Value(v.name, TensorType(_CARRIER, v.type.shape), None if v.data is None else v.data.astype(_CARRIER))


def carried(node: Node) -> Node:
    """A node of uint8 with float32 in its place."""
    inputs, outputs = (
        [carrier(v) if v is not None and v.dtype == UINT8 else v for v in values]
        for values in (node.inputs, node.outputs)
    )
    attributes = dict(node.attributes)
    if node.op_type == "Cast" and outputs[0] is not None and outputs[0].dtype == _CARRIER:
        attributes["to"] = _FLOAT
    return node.replace(inputs=inputs, outputs=outputs, attributes=attributes)
