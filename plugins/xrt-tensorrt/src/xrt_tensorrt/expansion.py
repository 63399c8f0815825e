"""Operators by the body that the standard gives them, written into a model in their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from xrt_core.ir.graph import Node
from xrt_core.ir.onnx_proto import type_to_proto

if TYPE_CHECKING:
    from onnx import ModelProto

_DOMAIN: Final = "xrt.expanded"


def has_body(node: Node) -> bool:
    """Whether the standard gives the operator a body."""
    schema = _schema(node)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def expand(model: ModelProto, nodes: Sequence[Node], which: Collection[int]) -> ModelProto:
    """`model`, whose nodes are those of `nodes` in the same order, with the bodies of the nodes of these indices.

    Raises ValueError where a body does not go with this node.
    """
    import onnx
    import onnx.inliner

    if not which:
        return model
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    for i in sorted(which):
        node, call = nodes[i], model.graph.node[i]
        schema = _schema(node)
        if schema is None:
            raise ValueError(f"{node.operator}-{node.version} is not an operator of the standard")
        if schema.has_context_dependent_function:
            types = [onnx.TypeProto() if v is None else type_to_proto(v.type) for v in node.inputs]
            raw = schema.get_context_dependent_function(
                call.SerializeToString(), [t.SerializeToString() for t in types]
            )
            body = onnx.FunctionProto.FromString(raw)
            del call.attribute[:]  # they are in the body already
        else:
            body = onnx.FunctionProto.FromString(schema.function_body.SerializeToString())
        body.domain = call.domain = _DOMAIN
        body.name = call.op_type = f"{node.op_type}_{i}"
        if not any(o.domain in ("", "ai.onnx") for o in body.opset_import):
            body.opset_import.append(onnx.helper.make_opsetid("", opset))
        model.functions.append(body)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    try:
        inlined: ModelProto = onnx.inliner.inline_local_functions(model)
    except Exception as e:  # the binding's exceptions have no common base
        raise ValueError(str(e).strip().partition("\n")[0]) from e
    return inlined


def _schema(node: Node) -> Any:
    import onnx

    try:
        return onnx.defs.get_schema(node.op_type, node.version, node.domain)
    except onnx.defs.SchemaError:
        return None
