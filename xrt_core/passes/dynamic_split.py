"""Split a specialised graph where shapes depend on data: what must wait for the run becomes one Late node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.types import STRING, TensorType, ValueType
from xrt_core.passes.pass_base import Pass


class SplitLate(Pass):
    """Moves what cannot be planned before the run into the body of one `xrt.Late` node at the end of the graph.

    static_inputs: node -> indices of its inputs that must be known before it can be compiled.

    1. A node waits when it reads a value that a node of this graph makes and whose shape or type is not known now.
    2. A node waits when an input that must be known is computed by a node of this graph.
    3. Every node that depends on a waiting node waits.
    4. Left alone: a graph in which nothing waits; nodes whose unknown inputs are inputs of the graph itself (waiting
       would teach nothing: the host runs them, and the split comes after them); a Late node.
    """

    name = "split_late"

    def __init__(self, static_inputs: Callable[[Node], Iterable[int]]) -> None:
        self.static_inputs = static_inputs

    def rewrite(self, graph: Graph) -> Graph:
        producers = graph.producers
        late: set[Value] = set()  # outputs of waiting nodes
        early_nodes: list[Node] = []
        late_nodes: list[Node] = []
        for node in graph.nodes:
            if not is_late(node) and _waits(node, late, producers, self.static_inputs):
                late_nodes.append(node)
                late.update(v for v in node.outputs if v is not None)
            else:
                early_nodes.append(node)
        if not late_nodes:
            return graph
        boundary = tuple(dict.fromkeys(v for n in late_nodes for v in n.uses() if v.data is None and v not in late))
        outputs = tuple(dict.fromkeys(v for v in graph.outputs if v in late))
        inner = {v: Value(v.name, v.type) for v in boundary}  # a body's inputs are its own
        body = Graph(
            inner.values(),
            outputs,
            [substitute(n, inner) for n in late_nodes],
            opsets=graph.opsets,
            name=f"{graph.name}.late",
        )
        outer = {v: Value(v.name, v.type) for v in outputs}  # and its outputs as well
        node = Node("Late", boundary, outer.values(), {"body": body}, domain="xrt", version=1, name="late")
        return graph.replace(nodes=[*early_nodes, node], outputs=[outer.get(v, v) for v in graph.outputs])


def is_late(node: Node) -> bool:
    """Whether the node stands for the part of the graph that is planned at run time."""
    return node.op_type == "Late" and node.domain == "xrt"


def _waits(
    node: Node,
    late: set[Value],
    producers: Mapping[Value, int],
    static_inputs: Callable[[Node], Iterable[int]],
) -> bool:
    for v in node.uses():
        if v in late or (v in producers and not _is_settled(v.type)):
            return True
    for i in static_inputs(node):
        fixed = node.inputs[i]
        if fixed is not None and fixed.data is None and fixed in producers:
            return True
    return False


def _is_settled(type_: ValueType | None) -> bool:
    """Whether the run would teach nothing about the type: static tensors, strings, and what is no tensor at all."""
    if type_ is None:
        return False
    return not isinstance(type_, TensorType) or type_.is_static or type_.dtype == STRING
