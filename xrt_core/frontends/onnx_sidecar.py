"""Data of a Function that an ONNX file cannot express, stored separately: types of inner values, and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from xrt_core.errors import ModelLoadError
from xrt_core.files import Size, reading
from xrt_core.ir.function import Function
from xrt_core.ir.graph import NO_ANNOTATIONS, Node, Phase, Value
from xrt_core.ir.types import type_from_text


@dataclass(frozen=True, slots=True)
class AnnotationsRow:
    """The fields of `Annotations` that engines read."""

    engine: str | None = None
    region: str = ""
    device: str | None = None
    sbp: tuple[str, ...] | None = None
    placement: tuple[str, ...] | None = None
    phase: Phase | None = None
    model_update: bool = False
    aliases: tuple[tuple[Size, Size], ...] = ()


_ROW = fields(AnnotationsRow)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What `describe_node` gives, as `decoding` reads it. outputs: their types as texts."""

    outputs: tuple[str | None, ...]
    annotations: AnnotationsRow | None = None


def describe_node(node: Node) -> dict[str, Any]:
    """Return what ONNX does not store for a node: the types of its outputs, and the annotations that engines read."""
    a = node.annotations
    return {
        "outputs": [None if v is None or v.type is None else str(v.type) for v in node.outputs],
        "annotations": None if a is NO_ANNOTATIONS else {f.name: getattr(a, f.name) for f in _ROW},
    }


def restore_types(function: Function, described: Sequence[NodeRow]) -> Function:
    """Return the function with the described types on its inner values, and annotations on its nodes.

    Raises ModelLoadError where the description is that of another function.
    """
    with reading("the description of the function's nodes", ModelLoadError):
        return _restored(function, described)


def _restored(function: Function, described: Sequence[NodeRow]) -> Function:
    body = function.body
    new: dict[Value, Value] = {}
    for entry, p in zip(body.inputs, function.params, strict=True):
        new[entry] = entry if entry.type == p.type else Value(entry.name, p.type)
    nodes = []
    for node, row in zip(body.nodes, described, strict=True):
        outputs: list[Value | None] = []
        for v, text in zip(node.outputs, row.outputs, strict=True):
            found = None if v is None else Value(v.name, v.type if text is None else type_from_text(text))
            if v is not None and found is not None:
                new[v] = found
            outputs.append(found)
        more = {} if row.annotations is None else {f.name: getattr(row.annotations, f.name) for f in _ROW}
        annotations = replace(node.annotations, **more) if more else node.annotations
        inputs = [None if v is None else new.get(v, v) for v in node.inputs]
        nodes.append(node.replace(inputs=inputs, outputs=outputs, annotations=annotations))
    graph = body.replace(
        inputs=[new[v] for v in body.inputs], outputs=[new.get(v, v) for v in body.outputs], nodes=nodes
    )
    return Function(function.name, function.params, function.returns, graph, function.aliases)
