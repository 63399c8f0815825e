"""One opset for a function whose nodes are of several: a pass may have put a newer operator among others."""

from __future__ import annotations

from typing import Any, Final

from xrt_core.engine.contract import Function
from xrt_core.ir.graph import Node

_NEW_ATTRIBUTES: Final = {
    "Cast": ("saturate", "round_mode"),
    "CastLike": ("saturate", "round_mode"),
    "QuantizeLinear": ("saturate", "block_size", "output_dtype", "precision"),
    "DequantizeLinear": ("block_size", "output_dtype"),
}
"""Attributes that later versions added, and whose default is what earlier versions did."""


def aligned(function: Function) -> Function:
    """`function` with the standard's nodes in the versions of one opset, where they only differ from that in the types
    that they take; as it is where they do already, or where they differ in more."""
    body = function.body
    versions = {n.version for n in body.nodes if not n.domain}
    opset = body.opsets.get("", 0)
    if not versions or all(_since(n, opset) == n.version for n in body.nodes if not n.domain):
        return function
    newest = max(versions)
    nodes = []
    for n in body.nodes:
        since = n.version if n.domain else _since(n, newest)
        if since != n.version and not _same_but_types(n, since):
            return function
        nodes.append(n if since == n.version else _of_version(n, since))
    opsets = {**body.opsets, "": newest}
    return Function(
        function.name, function.params, function.returns, body.replace(nodes=nodes, opsets=opsets), function.aliases
    )


def _of_version(n: Node, version: int) -> Node:
    return Node(
        n.op_type, n.inputs, n.outputs, n.attributes, domain=n.domain, version=version, name=n.name,
        annotations=n.annotations,
    )  # fmt: skip


def _schema(node: Node, opset: int) -> Any:
    import onnx

    try:
        return onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None


def _since(node: Node, opset: int) -> int:
    """The version of the node's operator in an opset, 0 where it has none there."""
    schema = _schema(node, opset)
    return 0 if schema is None else int(schema.since_version)


def _same_but_types(node: Node, version: int) -> bool:
    """Whether another version of the node's operator has the same inputs, outputs and attributes."""
    mine, other = _schema(node, node.version), _schema(node, version)
    return mine is not None and other is not None and _form(mine) == _form(other)


def _form(schema: Any) -> Any:
    attributes = {
        name: (str(a.type), a.required, a.default_value.SerializeToString())
        for name, a in schema.attributes.items()
        if name not in _NEW_ATTRIBUTES.get(schema.name, ())
    }
    ports = [[(p.name, str(p.option)) for p in side] for side in (schema.inputs, schema.outputs)]
    return attributes, ports
