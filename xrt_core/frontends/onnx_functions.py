"""Expansion of operators by the function body of the ONNX standard, or by a plugin's lowering."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.operator_set import find_operator, lowered

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, NodeProto


def function_body(node: Node) -> Graph | None:
    """Return the standard's function body, or a plugin's lowering, for a node of known input types, or None.

    The graph's inputs correspond to the node's given inputs in order, its outputs to the node's used ones. Nodes whose
    subgraphs capture outer values are not expanded. Source: `OpSchema.get_context_dependent_function`.
    """
    own = find_operator(node.domain, node.op_type, node.version)
    if own is not None:
        return None if own.lowering is None else lowered(node, own.lowering)
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(node.op_type, node.version, node.domain)
    except onnx.defs.SchemaError:
        return None
    if not (schema.has_function or schema.has_context_dependent_function) or node.captures:
        return None
    if any(v is not None and v.type is None for v in node.inputs):
        return None
    # bodies refer to attributes that are left out, and have no defaults of their own
    given = (a.default_value for a in schema.attributes.values())
    defaults = [a for a in given if a.type != onnx.AttributeProto.UNDEFINED]
    if schema.has_context_dependent_function:
        from xrt_core.ir.onnx_proto import type_to_proto

        types = [onnx.TypeProto() if v is None else type_to_proto(v.type) for v in node.inputs]
        try:
            raw = schema.get_context_dependent_function(
                _call_of(node, defaults).SerializeToString(), [t.SerializeToString() for t in types]
            )
        except Exception:  # of onnx's builder, for a node that it cannot expand
            return None
        return inlined(node, onnx.FunctionProto.FromString(raw), defaults)
    return inlined(node, schema.function_body, defaults)


def _call_of(node: Node, defaults: Iterable[AttributeProto] = ()) -> NodeProto:
    """The node in a graph of its own, whose inputs are called i0, i1, ... and whose outputs o0, o1, ..."""
    import onnx

    from xrt_core.frontends.onnx_export import export_model
    from xrt_core.ir.onnx_proto import attribute_to_proto

    names_in = ["" if v is None else f"i{k}" for k, v in enumerate(node.inputs)]
    names_out = ["" if v is None else f"o{k}" for k, v in enumerate(node.outputs)]
    call = onnx.helper.make_node(node.op_type, names_in, names_out, domain=node.domain)
    call.attribute.extend(
        attribute_to_proto(k, a, lambda g: _plainly_named(export_model(g).graph)) for k, a in node.attributes.items()
    )
    call.attribute.extend(a for a in defaults if a.name not in node.attributes)
    return call


def inlined(node: Node, body: FunctionProto, defaults: Iterable[AttributeProto] = ()) -> Graph | None:
    """Return a FunctionProto, called with a node's inputs and attributes, as a graph; None if the two do not fit."""
    import onnx

    from xrt_core.frontends.onnx_import import import_model
    from xrt_core.ir.onnx_proto import type_to_proto

    call = _call_of(node, defaults)
    names_in, names_out = list(call.input), list(call.output)
    body.domain, call.domain = "xrt.expanded", "xrt.expanded"
    body.name = call.op_type
    if not any(o.domain in ("", "ai.onnx") for o in body.opset_import):  # the body uses its model's opsets
        body.opset_import.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
    caller = onnx.helper.make_graph(
        [call],
        node.op_type,
        [
            onnx.ValueInfoProto(name=n, type=type_to_proto(v.type))
            for n, v in zip(names_in, node.inputs, strict=True)
            if v is not None
        ],
        [onnx.ValueInfoProto(name=n) for n in names_out if n],
    )
    imports = [*body.opset_import, onnx.helper.make_opsetid("xrt.expanded", 1)]
    model = onnx.helper.make_model(caller, opset_imports=imports, functions=[body])
    try:
        graph = import_model(model)
    except XRTError:
        return None
    # a node with more inputs than its operator has is left to the host, which names it
    return graph if _counts(graph) == (sum(map(bool, names_in)), sum(map(bool, names_out))) else None


def _counts(graph: Graph) -> tuple[int, int]:
    return len(graph.inputs), len(graph.outputs)


def _plainly_named(graph: Any) -> Any:
    """A GraphProto with other names: onnx writes a function's body as text, in which values of inlined functions
    ("outer/x") are no names."""
    names: dict[str, str] = {"": ""}

    def plain(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    graphs = [graph]
    while graphs:
        g = graphs.pop()
        for named in (*g.input, *g.output, *g.initializer, *g.value_info):
            named.name = plain(named.name)
        for n in g.node:
            n.name = ""
            n.input[:] = map(plain, n.input)
            n.output[:] = map(plain, n.output)
            graphs.extend(a.g for a in n.attribute if a.HasField("g"))
    return graph
