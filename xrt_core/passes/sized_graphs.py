"""Symbolic graphs at given sizes of their symbols, and what must hold of the sizes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from xrt_core.ir.attribute_limits import fault_at, waits_for_sizes
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Attribute, Graph, Node, Value, every_node, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.symbols import Expr, Symbol, expression, shape_for
from xrt_core.ir.types import TensorType
from xrt_core.passes.symbolic_elements import MOST_ELEMENTS


def dimension_guards(graph: Graph) -> list[Expr]:
    """What must not be negative for every symbolic dimension of a graph to be 1 at least: libraries differ in what they
    make of empty tensors, and engines are asked about other ones."""
    texts = {
        d
        for v in {*graph.inputs, *(v for n in graph.nodes for v in n.outputs)}
        if v is not None and v.shape is not None
        for d in v.shape
        if isinstance(d, str)
    }
    return [e - 1 for d in sorted(texts) if (e := expression(d)) is not None]


def reflection_guards(graph: Graph) -> list[Expr]:
    """What must not be negative for no reflected edge (Pad) to be wider than what there is to reflect: NumPy reflects
    that once more, and libraries fail."""
    found: dict[Expr, None] = {}
    for n in graph.nodes:
        if n.op_type != "Pad" or n.domain or n.attributes.get("mode") != "reflect":
            continue
        x, given, _, axes = (*n.inputs, None, None, None)[:4]
        pads: Any = n.attributes.get("pads") if n.version < 11 else None if given is None else given.data
        if x is None or x.shape is None or pads is None or (axes is not None and axes.data is None):
            continue
        where = range(len(x.shape)) if axes is None or axes.data is None else axes.data.tolist()
        for axis, *ends in zip(where, pads[: len(where)], pads[len(where) :], strict=True):
            d = x.shape[axis]
            if isinstance(d, str) and (e := expression(d)) is not None and max(ends) > 0:
                found[e - 1 - int(max(ends))] = None
    return list(found)


class Agreement(Struct, frozen=True):
    """The nodes of a symbolic graph whose sizes may not agree in a call: nothing is promised for such sizes, and
    libraries may follow them into foreign memory."""

    nodes: tuple[Node, ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the nodes allow these sizes of the symbols."""
        return not any(_fault_for(n, sizes) for n in self.nodes)


def agreement(
    graph: Graph, symbols: Mapping[str, Symbol], sizes: Mapping[str, int], guards: Sequence[Expr] = ()
) -> Agreement | None:
    """What must hold of sizes beside `guards`: the nodes that do not allow some other size of a symbol, of those that
    are alike one. sizes: of the first call, which are allowed. None where there are none."""
    others = []
    for name, size in sizes.items():
        of = symbols[name]
        tried = {max(of.min, of.multiple), size + of.multiple, 2 * size + of.multiple}
        others += [{**sizes, name: s} for s in sorted(tried) if of.min <= s and (of.max is None or s <= of.max)]
    others = [at for at in others if all(g.evaluate(at) >= 0 for g in guards)]
    nodes = {_form(n): n for n in every_node(graph) if waits_for_sizes(n)}
    found = tuple(n for n in nodes.values() if any(_fault_for(n, at) for at in others))
    return Agreement(found) if found else None


def _form(node: Node) -> Hashable:
    """What two nodes have in common of which the one allows all sizes that the other does."""
    inputs = tuple(None if v is None else (v.shape, v.dtype, _integers(v)) for v in node.inputs)
    return node.operator, inputs, repr(sorted(node.attributes.items())), len(node.outputs)


def _integers(v: Value) -> Hashable:
    return v.data.tobytes() if v.data is not None and v.data.dtype.kind in "iu" and v.data.ndim < 2 else None


def _fault_for(node: Node, sizes: Mapping[str, int]) -> str | None:
    return fault_at(node, [None if v is None or v.shape is None else shape_for(v.shape, sizes) for v in node.inputs])


def graph_at(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The graph with the same nodes, its types for these sizes of the symbols, in subgraphs as well."""
    return _at(graph, sizes, {})


def _at(graph: Graph, sizes: Mapping[str, int], new: dict[Value, Value]) -> Graph:
    def at(v: Value) -> Value:
        t = v.type
        if v not in new:
            symbolic = isinstance(t, TensorType) and t.shape is not None and any(isinstance(d, str) for d in t.shape)
            new[v] = Value(v.name, TensorType(t.dtype, shape_for(t.shape, sizes))) if symbolic else v  # type: ignore[union-attr, arg-type]
        return new[v]

    def node_for(n: Node) -> Node:
        made = substitute(n, new)
        if n.subgraphs:
            made = made.replace(attributes={k: _at_attribute(a, sizes, new) for k, a in n.attributes.items()})
        return made.replace(outputs=[None if v is None else at(v) for v in n.outputs])

    inputs = [at(v) for v in graph.inputs]
    nodes = [node_for(n) for n in graph.nodes]
    return graph.replace(inputs=inputs, outputs=[new.get(v, v) for v in graph.outputs], nodes=nodes)


def _at_attribute(a: Attribute, sizes: Mapping[str, int], new: dict[Value, Value]) -> Attribute:
    if isinstance(a, Graph):
        return _at(a, sizes, new)
    if type(a) is tuple and a and isinstance(a[0], Graph):
        return tuple(_at(g, sizes, new) for g in a)
    return a


def node_at(node: Node, sizes: Mapping[str, int]) -> Node:
    """The node for inputs of these sizes of the symbols."""
    given = dict.fromkeys(v for v in node.uses() if v.data is None)
    return graph_at(Graph(given, (), [node], opsets={node.domain: node.version}), sizes).nodes[0]


def function_at(function: Function, sizes: Mapping[str, int]) -> Function:
    """The static function that a symbolic one is for these sizes of its symbols, with the same nodes."""
    if not function.is_symbolic:
        return function
    body = graph_at(function.body, sizes)
    params, returns = ([_parameter_at(p, sizes) for p in ports] for ports in (function.params, function.returns))
    return Function(function.name, params, returns, body, function.aliases)


def _parameter_at(p: Parameter, sizes: Mapping[str, int]) -> Parameter:
    elements = None if p.elements is None else shape_for(p.elements, sizes)
    return Parameter(p.name, p.dtype, shape_for(p.dims, sizes), elements)


def is_shape_arithmetic(node: Node) -> bool:
    """Whether a node computes on shapes: integers of no more elements than a shape has, or such floats made of such."""
    if traits_of(node).shape_query:
        return True
    results = [v for v in node.outputs if v is not None]
    return all(_is_small(v, "iub") for v in results) or (
        not node.subgraphs and all(_is_small(v, "iubf") for v in (*results, *(v for v in node.inputs if v is not None)))
    )


def _is_small(v: Value, kinds: str) -> bool:
    t = v.type
    known = isinstance(t, TensorType) and t.dtype is not None and t.dtype.kind in kinds and t.is_static
    return known and math.prod(t.shape) <= MOST_ELEMENTS  # type: ignore[union-attr, arg-type]
