"""States of loops that every turn hands on as they are, as TensorFlow's while loops hand weights and sizes on.

To engines they are variables: a weight is no constant, a table of embeddings has no known size.

1. A state of a Loop or Scan whose output in the body is its input is a captured value: the body reads what is outside,
   and the node has neither the state nor its result. So in bodies of bodies.
2. Unchanged: states that any turn may change, and Scans before version 9, whose sequences have lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.passes.pass_base import Pass

_VERSION = 13  # of Identity, whose later versions only take more types


class LoopInvariants(Pass):
    """Captures the states of loops that never change, as the module's text has it."""

    name = "loop_invariants"

    def rewrite(self, graph: Graph) -> Graph:
        made: list[Node] = []
        changed = False
        for old in graph.nodes:
            node = self._with_bodies(old) if old.attributes and old.subgraphs else old
            head = _states(node)
            kept, results = (node, ()) if head is None else _captured(node, *head)
            changed |= kept is not old
            made += [kept, *results]
        return graph.replace(nodes=made) if changed else graph

    def _with_bodies(self, node: Node) -> Node:
        bodies = {k: self.rewrite(b) for k, b in node.attributes.items() if isinstance(b, Graph)}
        if all(b is node.attributes[k] for k, b in bodies.items()):
            return node
        return node.replace(attributes={**node.attributes, **bodies})


def _states(node: Node) -> tuple[int, int, int] | None:
    """How many inputs of a loop stand before its states, how many more inputs than outputs its body has before them,
    and how many states there are; None for other nodes."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return None
    if node.op_type == "Loop":
        return 2, 1, len(node.inputs) - 2
    scans = node.attributes.get("num_scan_inputs")
    return (0, 0, len(node.inputs) - scans) if node.version >= 9 and isinstance(scans, int) else None


def _captured(node: Node, first: int, before: int, states: int) -> tuple[Node, list[Node]]:
    """A loop without the states that never change, and the nodes of their results."""
    body = node.attributes["body"]
    assert isinstance(body, Graph)
    outer = {
        i: v
        for i in range(states)
        if (v := node.inputs[first + i]) is not None and body.inputs[first + i] is body.outputs[before + i]
    }
    if not outer:
        return node, []
    new: Mapping[Value, Value] = {body.inputs[first + i]: v for i, v in outer.items()}
    copies = {v: Value(f"{v.name}/handed_on", v.type) for v in body.inputs if v in new}
    gone = {before + i for i in outer}
    outputs = [copies.get(v, v) for k, v in enumerate(body.outputs) if k not in gone]
    handed_on = [
        Node("Identity", [new[v]], [c], version=_VERSION, name=c.name) for v, c in copies.items() if c in outputs
    ]
    inside = body.replace(
        inputs=[v for k, v in enumerate(body.inputs) if k - first not in outer],
        nodes=[*(substitute(n, new) for n in body.nodes), *handed_on],
        outputs=outputs,
    )
    made = node.replace(
        inputs=[v for k, v in enumerate(node.inputs) if k - first not in outer],
        outputs=[v for k, v in enumerate(node.outputs) if k not in outer],
        attributes={**node.attributes, "body": inside},
    )
    results = [
        Node("Identity", [v], [result], version=_VERSION, name=f"{node.name}/{result.name}")
        for i, v in outer.items()
        if i < len(node.outputs) and (result := node.outputs[i]) is not None
    ]
    return made, results
