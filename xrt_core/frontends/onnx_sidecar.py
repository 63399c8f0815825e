"""Data of a Function that an ONNX file cannot express, stored separately: types of inner values, and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from xrt_core.ir.function import Function
from xrt_core.ir.graph import NO_ANNOTATIONS, Node, Value
from xrt_core.ir.types import type_from_text

_ANNOTATIONS: Final = ("engine", "region", "device", "sbp", "placement", "phase", "model_update", "aliases")


def describe_node(node: Node) -> dict[str, Any]:
    """Return what ONNX does not store for a node: the types of its outputs, and the annotations that engines read."""
    a = node.annotations
    return {
        "outputs": [None if v is None or v.type is None else str(v.type) for v in node.outputs],
        "annotations": None if a is NO_ANNOTATIONS else {name: getattr(a, name) for name in _ANNOTATIONS},
    }


def restore_types(function: Function, described: Sequence[dict[str, Any]]) -> Function:
    """Return the function with the described types on its inner values, and annotations on its nodes."""
    body = function.body
    new: dict[Value, Value] = {}
    for entry, p in zip(body.inputs, function.params, strict=True):
        new[entry] = entry if entry.type == p.type else Value(entry.name, p.type)
    nodes = []
    for node, row in zip(body.nodes, described, strict=True):
        outputs: list[Value | None] = []
        for v, text in zip(node.outputs, row["outputs"], strict=True):
            found = None if v is None else Value(v.name, v.type if text is None else type_from_text(text))
            if v is not None and found is not None:
                new[v] = found
            outputs.append(found)
        more = {k: _tuples(x) for k, x in (row["annotations"] or {}).items()}
        annotations = replace(node.annotations, **more) if more else node.annotations
        inputs = [None if v is None else new.get(v, v) for v in node.inputs]
        nodes.append(node.replace(inputs=inputs, outputs=outputs, annotations=annotations))
    graph = body.replace(
        inputs=[new[v] for v in body.inputs], outputs=[new.get(v, v) for v in body.outputs], nodes=nodes
    )
    return Function(function.name, function.params, function.returns, graph, function.aliases)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
