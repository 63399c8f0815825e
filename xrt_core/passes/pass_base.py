"""Pass: the base class of graph rewrites, which checks what each pass promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from xrt_core.errors import InternalError, ShapeError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.inference import infer_types


class Pass(ABC):
    """An engine-independent rewrite of a graph.

    A pass never mutates the given graph (graphs are frozen). It returns the same object if it changes nothing, keeps
    the number and order of inputs and outputs, and is idempotent.
    """

    name: ClassVar[str]

    @abstractmethod
    def rewrite(self, graph: Graph) -> Graph:
        """The rewritten graph, or `graph` itself."""

    def __call__(self, graph: Graph) -> Graph:
        """Run the pass. Raises InternalError if it violates the rules above."""
        result = self.rewrite(graph)
        if result is graph:
            return graph
        if not isinstance(result, Graph):
            raise InternalError(
                f"pass {self.name!r} returned a {type(result).__name__} instead of a graph. "
                "Pass author: return the graph you were given where there is nothing to change"
            )
        if result.inputs != graph.inputs:
            raise InternalError(
                f"pass {self.name!r} changed the graph's inputs, {_names(graph.inputs)}, to {_names(result.inputs)}. "
                "Pass author: return a graph with the same input values; what they become inside is yours to choose"
            )
        if len(result.outputs) != len(graph.outputs):
            raise InternalError(
                f"pass {self.name!r} changed the number of outputs from {len(graph.outputs)} to {len(result.outputs)}. "
                "Pass author: keep one output per output, in order"
            )
        return result


def run_passes(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Apply the passes in order."""
    for p in passes:
        graph = p(graph)
    return graph


def typed(graph: Graph) -> Graph:
    """`graph` with inferred types for the node outputs that have none."""
    new: dict[Value, Value] = {}
    nodes = []
    for old in graph.nodes:
        node = substitute(old, new) if new else old
        if not node.subgraphs and any(v is not None and v.type is None for v in node.outputs):
            try:
                types = infer_types(node)
            except ShapeError:  # the host says what is wrong when it runs the node
                types = ()
            for v, t in zip(node.outputs, types, strict=False):
                if v is not None and v.type is None and t is not None:
                    new[v] = v.with_type(t)
            node = node.replace(outputs=[v if v is None else new.get(v, v) for v in node.outputs])
        nodes.append(node)
    return graph.replace(nodes=nodes, outputs=[new.get(v, v) for v in graph.outputs]) if new else graph


def rebuild(graph: Graph, nodes: Iterable[Node], new: dict[Value, Value]) -> Graph:
    """`graph` with these nodes, every use of a value in `new` replaced; `new` may chain (a -> b -> c)."""
    flat = {v: _end(v, new) for v in new}
    return graph.replace(
        nodes=[substitute(n, flat) for n in nodes] if flat else nodes,
        outputs=[flat.get(v, v) for v in graph.outputs],
    )


def _end(value: Value, new: dict[Value, Value]) -> Value:
    while value in new:
        value = new[value]
    return value


def _names(values: Iterable[Value]) -> str:
    return ", ".join(v.name or "?" for v in values)
