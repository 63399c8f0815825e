"""Types and shapes of a node's outputs, by the inference functions of the onnx package, remembered per operator.

Source: `onnx.shape_inference.infer_node_outputs`. Operators of the `xrt` dialect bring their own inference
(`ir/schema.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference_rules import corrected
from xrt_core.ir.rewrite import attribute_key
from xrt_core.ir.types import TensorType, ValueType

_MAX_DATA = 1024  # elements of a known input that inference is shown: shapes, axes, scales; never weights
_MEMO_SIZE = 4096
_memo: OrderedDict[Any, tuple[ValueType | None, ...]] = OrderedDict()


def infer_types(node: Node) -> tuple[ValueType | None, ...]:
    """The types of `node`'s outputs from the types and known data of its inputs; None where nothing follows.

    Raises ShapeError, naming the node, where the inputs do not fit the operator.
    Nodes with subgraphs are not for this function: their types follow from their bodies.
    """
    key = _memo_key(node)
    if key is not None:
        found = _memo.get(key)
        if found is not None:
            return found
    result = corrected(node, _infer(node))
    if key is not None:
        _memo[key] = result
        if len(_memo) > _MEMO_SIZE:
            _memo.popitem(last=False)
    return result


def forget() -> None:
    """Forget every remembered result (for measurements)."""
    _memo.clear()


def is_small_data(value: Value) -> bool:
    """Whether the value is known and small enough to be shown to inference."""
    data = value.data
    return data is not None and data.size <= _MAX_DATA and data.dtype.kind in "iufb"


def _memo_key(node: Node) -> Any:
    parts: list[Any] = [node.domain, node.op_type, node.version, tuple([v is None for v in node.outputs])]
    for v in node.inputs:
        if v is None:
            parts.append(None)
            continue
        parts.append(v.type)
        data = v.data
        if data is not None and data.size <= _MAX_DATA and data.dtype.kind in "iufb":
            parts.append(data.tobytes())
    attributes = attribute_key(node)
    if attributes is None:
        return None
    parts.append(attributes)
    return tuple(parts)


def _infer(node: Node) -> tuple[ValueType | None, ...]:
    from xrt_core.ir import schema

    own = schema.dialect_inference(node)
    if own is not None:
        return own(node)

    import onnx
    import onnx.shape_inference

    from xrt_core.ir.onnx_proto import (
        attribute_to_proto,
        tensor_from_array,
        type_from_proto,
        type_to_proto,
    )

    try:
        definition = onnx.defs.get_schema(node.op_type, node.version, node.domain)
    except onnx.defs.SchemaError:
        return (None,) * len(node.outputs)
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    types: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for i, v in enumerate(node.inputs):
        if v is None:
            proto.input.append("")
            continue
        name = f"i{i}"
        proto.input.append(name)
        types[name] = type_to_proto(v.type)
        if is_small_data(v):
            data[name] = tensor_from_array(v.data, name)  # type: ignore[arg-type]
    proto.output.extend("" if v is None else f"o{i}" for i, v in enumerate(node.outputs))
    for key, a in node.attributes.items():
        proto.attribute.append(attribute_to_proto(key, a))
    opset = onnx.helper.make_opsetid(node.domain, node.version)
    imports = [opset] if not node.domain else [opset, onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    try:
        found = onnx.shape_inference.infer_node_outputs(definition, proto, types, data, None, imports)
    except Exception as e:
        given = ", ".join("_" if v is None else str(v.type or "?") for v in node.inputs)
        raise ShapeError(
            f"node {node.name!r}: {node.operator}({given}) does not fit the operator: {_first_line(e)}"
        ) from e
    return tuple(
        None if v is None or f"o{i}" not in found else type_from_proto(found[f"o{i}"], node.name)
        for i, v in enumerate(node.outputs)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def merged(known: ValueType | None, inferred: ValueType | None) -> ValueType | None:
    """The more exact of two types of one value; where they contradict each other the inferred one holds."""
    if inferred is None:
        return known
    if not isinstance(known, TensorType) or not isinstance(inferred, TensorType):
        return inferred
    if inferred.shape is None and known.shape is not None:
        return TensorType(inferred.dtype or known.dtype, known.shape)
    if inferred.dtype is None and known.dtype is not None:
        return TensorType(known.dtype, inferred.shape)
    return inferred
