"""Nodes whose shapes depend on data: a region of the graph for an engine that takes them, and the rest at run time.

`SplitLate` finds them. Those that an engine of such shapes takes stay in the graph and are marked for it, as one region
(`OPEN_REGION`), so that what selects boxes or rows runs as one launch. The others move into the body of an `xrt.Late`
node, which is planned when their shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from xrt_core.ir.graph import OPEN_REGION, Graph, Node, Value, nodes_within, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.passes.partitioning.cost_model import is_below_launch
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.shape_specialization import is_settled
from xrt_core.passes.simplify import DeadNodes
from xrt_core.passes.size_nodes import SizeNodes
from xrt_core.passes.sized_graphs import is_shape_arithmetic
from xrt_core.passes.symbolic_elements import Elements

_STANDARD: Final = ("", "ai.onnx.ml")

Taken = Callable[[Graph, Sequence[Node]], tuple[str, Collection[Node]]]
"""The engine that takes nodes whose shapes depend on data, and those of these nodes that it takes."""


def taken_by_none(graph: Graph, nodes: Sequence[Node]) -> tuple[str, Collection[Node]]:
    """No engine takes such nodes."""
    return "", ()


class SplitLate(Pass):
    """Marks nodes that depend on data-dependent shapes for an engine that takes them, and moves the others, which can
    only be planned at run time, into the body of one `xrt.Late` node at the end of the graph.

    static_inputs: node -> indices of its inputs that must be known before it can be compiled. symbolic: dimensions
    that are expressions count as known. taken: which engine takes nodes of any shapes, and which of them. elements: of
    small tensors of integers, as expressions over symbols.

    1. A node is late if it reads a value that a node of this graph computes and whose shape or type is unknown.
    2. A node is late if an input that must be known is computed by a node of this graph.
    3. Every node that depends on a late node is late.
    4. Unchanged: a graph without late nodes; nodes whose unknown inputs are inputs of the graph (they stay unknown at
       run time: the host runs these nodes, and the split comes after them); a Late node.
    5. In the region are late nodes that the engine takes, as far as all late nodes before them are in it too and none
       is a contraction, and the nodes that make their open shapes. Contractions are left to all engines, on the shapes
       that the call has; and what they compute, rounded as each library does, does not decide within the region how
       many rows there are, which the host would have to confirm. In a graph without contractions, all that the engine
       takes is in the region.
    6. What the body of the Late node reads of the graph, and is known to be sizes of its inputs, is computed in the
       body from their shapes: as values they would be others at each call, for each of which it would be planned. So
       is what follows from shapes of other values that it reads, which only a call tells.
    """

    name = "split_late"

    def __init__(
        self,
        static_inputs: Callable[[Node], Iterable[int]],
        symbolic: bool = False,
        taken: Taken = taken_by_none,
        elements: Callable[[Value], Elements | None] = lambda v: None,
    ) -> None:
        self.static_inputs, self.symbolic, self.taken, self.elements = static_inputs, symbolic, taken, elements

    def rewrite(self, graph: Graph) -> Graph:
        producers = graph.producers
        late: set[Value] = set()  # outputs of late nodes
        late_nodes: list[Node] = []
        for node in graph.nodes:
            if is_late(node) or node.annotations.region == OPEN_REGION:
                continue
            if _must_wait(node, late, producers, self.static_inputs, self.symbolic):
                late_nodes.append(node)
                late.update(v for v in node.outputs if v is not None)
        if not late_nodes:
            return graph
        region = self._region(graph, late_nodes, late)
        if region:
            graph = graph.replace(nodes=[region.get(n, n) for n in graph.nodes])
            late_nodes = [n for n in late_nodes if n not in region]
            late = {v for n in late_nodes for v in n.outputs if v is not None}
        if not late_nodes:
            return graph
        sizes = SizeNodes(graph.inputs, graph.opsets.get("", 0))
        read = dict.fromkeys(v for n in late_nodes for v in n.uses() if v in producers and v not in late)
        sized = {v: made for v in read if (made := sizes.value(v, self.elements(v))) is not None}
        copies = _shape_arithmetic(graph, [v for v in read if v not in sized], late) if self.symbolic else []
        sized |= {v: Value(v.name, v.type) for n in copies for v in n.outputs if v is not None}
        first = [*sizes.nodes, *(_copy(n, sized) for n in copies)]
        parted = _split(graph, late_nodes, late, sized, first)
        return DeadNodes()(parted) if sized else parted  # what made the values that are made anew

    def _region(self, graph: Graph, late_nodes: Sequence[Node], late: Collection[Value]) -> dict[Node, Node]:
        """The nodes of the region, each with its marked copy."""
        waiting = set(late_nodes)
        if any(n.annotations.region == OPEN_REGION for n in graph.nodes):
            return {}
        early = [n for n in graph.nodes if n not in waiting and not is_late(n)]
        if any(map(_is_contraction, early)):
            early = [n for n in early if not self._is_settled(n)]
        wanted = waiting.union(early)
        engine, taken = self.taken(graph, [n for n in graph.nodes if n in wanted and not _is_contraction(n)])
        made: set[Value] = set()
        inside: dict[Node, Node] = {}
        producers = graph.producers
        for node in graph.nodes:
            if node not in taken:
                continue
            reads = (v for v in node.uses() if v.data is None and v not in made)
            if all(v not in late and (v not in producers or is_settled(v.type, self.symbolic)) for v in reads):
                made.update(v for v in node.outputs if v is not None)
                inside[node] = node.replace(annotations=node.annotations.replace(engine=engine, region=OPEN_REGION))
        if not any(n in waiting for n in inside) or is_below_launch(inside):
            return {}
        return inside

    def _is_settled(self, node: Node) -> bool:
        return all(v is None or is_settled(v.type, self.symbolic) for v in node.outputs)


def closed(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Those of some nodes of a graph, in its order, whose open inputs are made by others of them."""
    wanted, found = set(nodes), []
    made: set[Value] = set()
    for node in graph.nodes:
        if node in wanted and all(v in made or not _is_open(v) for v in node.uses()):
            made.update(v for v in node.outputs if v is not None)
            found.append(node)
    return found


def _is_open(value: Value) -> bool:
    return value.data is None and not is_settled(value.type, symbolic=True)


def is_late(node: Node) -> bool:
    """Whether the node holds the part of a graph that is planned at run time."""
    return node.op_type == "Late" and node.domain == "xrt"


def _is_contraction(node: Node) -> bool:
    """Whether a node, or one in its bodies, is a contraction, or of a plugin, whose operators may be anything."""
    return any(traits_of(n).contraction or n.domain not in _STANDARD for n in (node, *nodes_within(node)))


def _shape_arithmetic(graph: Graph, read: Sequence[Value], late: Collection[Value]) -> list[Node]:
    """The nodes that make some of these values from shapes of others of them, or of values of open shapes: rows and
    boxes that were selected, which a launch gives for next to nothing. None of the nodes is late."""
    tensors, known = set(read), set[Value]()
    found: list[Node] = []
    for node in graph.nodes:
        uses = [v for v in node.uses() if v.data is None]
        is_query = traits_of(node).shape_query and all(v in tensors or _is_open(v) for v in uses)
        is_step = known.issuperset(uses) and is_shape_arithmetic(node) and not node.subgraphs
        if uses and (is_query or is_step) and not any(v in late for v in node.outputs):
            found.append(node)
            known.update(v for v in node.outputs if v is not None)
    wanted = known.intersection(read)
    needed = []
    for node in reversed(found):
        if wanted.intersection(node.outputs):
            needed.append(node)
            wanted.update(node.uses())
    return needed[::-1]


def _copy(node: Node, inside: Mapping[Value, Value]) -> Node:
    """The node with these values in the place of others, also of its results, and in no region."""
    a = node.annotations
    a = a.replace(engine=None, region="") if a.region == OPEN_REGION else a
    return substitute(node, inside).replace(outputs=[v and inside[v] for v in node.outputs], annotations=a)


def _split(
    graph: Graph,
    late_nodes: Sequence[Node],
    late: Collection[Value],
    sized: Mapping[Value, Value],
    first: Sequence[Node],
) -> Graph:
    """The graph with these nodes, whose outputs are `late`, in a Late node. sized: what stands in it for values of the
    graph; first: the nodes that make it."""
    apart = set(late_nodes)
    within = [*first, *(substitute(n, sized) for n in late_nodes)]
    made = {v for n in within for v in n.outputs}
    boundary = tuple(dict.fromkeys(v for n in within for v in n.uses() if v.data is None and v not in made))
    outputs = tuple(dict.fromkeys(v for v in graph.outputs if v in late))
    inner = {v: Value(v.name, v.type) for v in boundary}  # a body has inputs of its own
    body = Graph(
        inner.values(),
        outputs,
        [substitute(n, inner) for n in within],
        opsets=graph.opsets,
        name=f"{graph.name}.late",
    )
    outer = {v: Value(v.name, v.type) for v in outputs}  # and the node outputs of its own
    node = Node("Late", boundary, outer.values(), {"body": body}, domain="xrt", version=1, name="late")
    rest = [n for n in graph.nodes if n not in apart]
    return graph.replace(nodes=[*rest, node], outputs=[outer.get(v, v) for v in graph.outputs])


def _must_wait(
    node: Node,
    late: set[Value],
    producers: Mapping[Value, int],
    static_inputs: Callable[[Node], Iterable[int]],
    symbolic: bool,
) -> bool:
    for v in (*node.inputs, *node.captures) if node.attributes else node.inputs:
        if v is not None and (v in late or (v in producers and not is_settled(v.type, symbolic))):
            return True
    for i in static_inputs(node):
        fixed = node.inputs[i]
        if fixed is not None and fixed.data is None and fixed in producers:
            return True
    return False
