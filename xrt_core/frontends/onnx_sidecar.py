"""Data of a Function that an ONNX file cannot express, stored separately: types of inner values, and annotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from xrt_core.errors import ModelLoadError
from xrt_core.files import Size, reading
from xrt_core.ir.function import Function
from xrt_core.ir.graph import NO_ANNOTATIONS, Graph, Node, Phase, Value, every_node
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


def describe_nodes(function: Function) -> list[dict[str, Any]]:
    """Describe every node of a function, each followed by those of its subgraphs."""
    return [describe_node(n) for n in every_node(function.body)]


def restore_types(function: Function, described: Sequence[NodeRow]) -> Function:
    """Return the function with the described types on its inner values, and annotations on its nodes.

    Raises ModelLoadError where the description is that of another function.
    """
    count = sum(1 for _ in every_node(function.body))
    if len(described) != count:
        raise ModelLoadError(f"{count} nodes were received, {len(described)} were sent")
    with reading("the description of the function's nodes", ModelLoadError):
        return _restored(function, described)


def _restored(function: Function, described: Sequence[NodeRow]) -> Function:
    body = function.body
    new: dict[Value, Value] = {}
    for entry, p in zip(body.inputs, function.params, strict=True):
        new[entry] = entry if entry.type == p.type else Value(entry.name, p.type)
    graph = _restored_graph(body, iter(described), new)
    return Function(function.name, function.params, function.returns, graph, function.aliases)


def _restored_graph(graph: Graph, described: Iterator[NodeRow], new: dict[Value, Value]) -> Graph:
    """The graph with values of the described types; `new` holds those for values that it has or captures."""
    nodes = []
    for node in graph.nodes:
        row = next(described)
        attributes = node.attributes
        if attributes and node.subgraphs:
            attributes = {
                k: _restored_graph(a, described, new) if isinstance(a, Graph) else a for k, a in attributes.items()
            }
        outputs: list[Value | None] = []
        for v, text in zip(node.outputs, row.outputs, strict=True):
            found = None if v is None else Value(v.name, v.type if text is None else type_from_text(text))
            if v is not None and found is not None:
                new[v] = found
            outputs.append(found)
        more = {} if row.annotations is None else {f.name: getattr(row.annotations, f.name) for f in _ROW}
        annotations = replace(node.annotations, **more) if more else node.annotations
        inputs = [None if v is None else new.get(v, v) for v in node.inputs]
        nodes.append(node.replace(inputs=inputs, outputs=outputs, attributes=attributes, annotations=annotations))
    return graph.replace(
        inputs=[new.get(v, v) for v in graph.inputs], outputs=[new.get(v, v) for v in graph.outputs], nodes=nodes
    )
