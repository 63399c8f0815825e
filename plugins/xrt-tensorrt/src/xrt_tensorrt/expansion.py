"""Operators by the body that the standard gives them, written into a model in their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from xrt_core.engine.onnx_bridge import same_but_types, schema_of
from xrt_core.ir.graph import Node
from xrt_core.ir.onnx_proto import type_to_proto

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto

_DOMAIN: Final = "xrt.expanded"


def has_body(node: Node) -> bool:
    """Whether the standard gives the operator a body."""
    schema = schema_of(node.op_type, node.version, node.domain)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def expand(model: ModelProto, nodes: Sequence[Node], which: Collection[int]) -> ModelProto:
    """`model`, whose nodes are those of `nodes` in the same order, with the bodies of the nodes of these indices.

    Raises ValueError where a body does not go with this node, or with the model's opset.
    """
    import onnx
    import onnx.inliner

    if not which:
        return model
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    for i in sorted(which):
        call = model.graph.node[i]
        body = _body(nodes[i], call, opset)
        body.domain = call.domain = _DOMAIN
        body.name = call.op_type = f"{nodes[i].op_type}_{i}"
        model.functions.append(body)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    try:
        inlined: ModelProto = onnx.inliner.inline_local_functions(model)
    except Exception as e:  # the binding's exceptions have no common base
        raise ValueError(str(e).strip().partition("\n")[0]) from e
    return inlined


def _body(node: Node, call: NodeProto, opset: int) -> FunctionProto:
    """The body that the standard gives `node` in a model of this opset."""
    import onnx

    schema = schema_of(node.op_type, node.version, node.domain)
    if schema is None:
        raise ValueError(f"{node.operator}-{node.version} is not an operator of the standard")
    # versions of a body are opsets of the operator's own domain
    own = node.version if node.domain else opset
    if schema.has_context_dependent_function:
        version = _fitting(schema.context_dependent_function_opset_versions, own, node)
        types = [onnx.TypeProto() if v is None else type_to_proto(v.type) for v in node.inputs]
        given = call.SerializeToString(), [t.SerializeToString() for t in types]
        raw = schema.get_context_dependent_function_with_opset_version(version, *given)
        body: FunctionProto = onnx.FunctionProto.FromString(raw)
        del call.attribute[:]  # they are in the body already
    else:
        version = _fitting(schema.function_opset_versions, own, node)
        body = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(version))
    version = next(
        (o.version for o in body.opset_import if o.domain in ("", "ai.onnx")), opset if node.domain else version
    )
    for n in body.node:  # the model knows one opset, and so does the inliner
        if n.domain in ("", "ai.onnx") and not same_but_types(n.op_type, version, opset):
            raise ValueError(f"the body of {node.operator} is of opset {version}, where {n.op_type} was another")
    kept = [o for o in body.opset_import if o.domain not in ("", "ai.onnx")]
    del body.opset_import[:]
    body.opset_import.extend([*kept, onnx.helper.make_opsetid("", opset)])
    return body


def _fitting(versions: Sequence[int], opset: int, node: Node) -> int:
    """The newest of a body's versions that an opset has."""
    found: list[Any] = [v for v in versions if v <= opset]
    if not found:
        raise ValueError(f"the body of {node.operator} is of opset {min(versions)}, the model of {opset}")
    return int(max(found))
