"""Which inputs of a graph determine shapes by their values, and so belong to its signature by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from xrt_core.ir.graph import Graph, Node, Value

MAX_ELEMENTS = 64
"""Inputs larger than this are never taken by value."""

# shape arithmetic: the operators through which a shape's value is traced back to an input
_ARITHMETIC = frozenset({
    "Abs", "Add", "And", "BitShift", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Div",
    "Equal", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "Greater", "GreaterOrEqual", "Identity",
    "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin",
    "ReduceProd", "ReduceSum", "Reshape", "Round", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum",
    "Tile", "Transpose", "Unsqueeze", "Where", "Xor",
})  # fmt: skip

_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


def shape_inputs(graph: Graph, static_inputs: Callable[[Node], Iterable[int]]) -> tuple[int, ...]:
    """Indices of the graph's inputs that reach, through shape arithmetic alone, an input that must be known.

    What must be known: the inputs of a node that `static_inputs` names (shapes, axes, repeats, ...), also inside
    subgraphs. The condition of an If counts as well. A floating-point input that is compared with something on the way
    is data, and does not count.
    """
    wanted: list[Value] = []
    conditions: list[Value] = []

    def look(nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op_type == "If" and not node.domain and node.inputs[0] is not None:
                conditions.append(node.inputs[0])
            for i in static_inputs(node):
                v = node.inputs[i]
                if v is not None and v.data is None:
                    wanted.append(v)
            for body in node.subgraphs:
                look(body.nodes)

    look(graph.nodes)
    shapes = _behind(graph, wanted, _ARITHMETIC - _COMPARISONS)
    compared = [v for n in graph.nodes if n.op_type in _COMPARISONS and n.outputs[0] in shapes for v in n.uses()]
    tests = _behind(graph, conditions + compared, _ARITHMETIC)
    return tuple(
        i
        for i, v in enumerate(graph.inputs)
        if v in shapes or (v in tests and v.dtype is not None and v.dtype.kind in "biu")
    )


def _behind(graph: Graph, values: Iterable[Value], through: frozenset[str]) -> set[Value]:
    """The values that reach `values` through these operators alone."""
    producers = graph.producers
    seen: set[Value] = set()
    work = list(values)
    while work:
        v = work.pop()
        if v in seen or v.data is not None:
            continue
        seen.add(v)
        i = producers.get(v)
        if i is not None and graph.nodes[i].op_type in through:
            work.extend(u for u in graph.nodes[i].inputs if u is not None)
    return seen
