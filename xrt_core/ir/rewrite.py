"""Substitution of values: the one operation by which passes rewire a frozen graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from xrt_core.ir.graph import Attribute, Graph, Node, Value

Substitution = Mapping[Value, Value]


def substitute(node: Node, new: Substitution) -> Node:
    """`node` reading `new[v]` where it read `v`, also inside its subgraphs; `node` itself where nothing changes."""
    inputs = node.inputs
    changed = False
    for v in inputs:
        if v in new:
            inputs = tuple(v if v is None else new.get(v, v) for v in node.inputs)
            changed = True
            break
    attributes = node.attributes
    if attributes and node.subgraphs and any(v in new for v in node.captures):
        attributes = {k: _substitute_attribute(a, new) for k, a in attributes.items()}
        changed = True
    return node.replace(inputs=inputs, attributes=attributes) if changed else node


def substitute_graph(graph: Graph, new: Substitution) -> Graph:
    """A subgraph reading `new[v]` where it captured `v`; the graph itself where it captures nothing that changed."""
    if not any(v in new for v in graph.captures):
        return graph
    nodes = [substitute(n, new) for n in graph.nodes]
    return graph.replace(nodes=nodes, outputs=[new.get(v, v) for v in graph.outputs])


def _substitute_attribute(a: Attribute, new: Substitution) -> Attribute:
    if isinstance(a, Graph):
        return substitute_graph(a, new)
    if type(a) is tuple and a and isinstance(a[0], Graph):
        return tuple(substitute_graph(g, new) for g in a)
    return a


def bind_defaults(graph: Graph, given: Collection[int] = ()) -> Graph:
    """The graph with the defaults of its inputs made constants, except those of the inputs in `given` (by index).

    The bound inputs are gone; inputs in `given` are plain inputs, without a default.
    """
    if not graph.defaults:
        return graph
    bound = {
        v: Value.constant(graph.defaults[v], v.name)
        for i, v in enumerate(graph.inputs)
        if v in graph.defaults and i not in given
    }
    nodes = [substitute(n, bound) for n in graph.nodes]
    outputs = [bound.get(v, v) for v in graph.outputs]
    return graph.replace(inputs=[v for v in graph.inputs if v not in bound], outputs=outputs, nodes=nodes, defaults={})


def closed(graph: Graph) -> Graph:
    """A subgraph with the values it captures made inputs, after its own inputs, in order of first use."""
    captures = graph.captures
    if not captures:
        return graph
    names = {v.name for v in graph.inputs}
    renamed: dict[Value, Value] = {}
    for v in captures:  # a value of the graph around may have the name of one of the subgraph's own inputs
        if v.name and v.name in names:
            renamed[v] = Value("", v.type)
        names.add(v.name)
    graph = substitute_graph(graph, renamed) if renamed else graph
    return graph.replace(inputs=(*graph.inputs, *[renamed.get(v, v) for v in captures]))


def attribute_key(node: Node, limit: int = 4096) -> Any:
    """A hashable key of the node's attributes, or None where they hold graphs or arrays over `limit` elements."""
    import numpy as np

    if not node.attributes:
        return ()
    parts = []
    for name, a in sorted(node.attributes.items()):
        if isinstance(a, np.ndarray):
            if a.size > limit:
                return None
            a = (a.dtype, a.shape, tuple(a.reshape(-1)) if a.dtype == object else a.tobytes())
        elif isinstance(a, float) or (type(a) is tuple and a and isinstance(a[0], float)):
            a = repr(a)  # 0.0 and -0.0 are equal, and not the same
        parts.append((name, type(a), a))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return None if node.subgraphs else key
