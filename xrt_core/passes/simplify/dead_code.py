"""Dead nodes: what nobody reads is not computed."""

from __future__ import annotations

from xrt_core.ir.graph import Graph
from xrt_core.passes.pass_base import Pass


class DeadNodes(Pass):
    """Removes nodes none of whose outputs is read.

    1. A node whose outputs are neither graph outputs nor read by a node that stays goes.
    2. Left alone: a node with at least one output that is read, and every graph input.
    """

    name = "dead_nodes"

    def rewrite(self, graph: Graph) -> Graph:
        live = set(graph.outputs)
        kept = []
        for node in reversed(graph.nodes):
            if any(v in live for v in node.outputs if v is not None):
                live.update(node.uses())
                kept.append(node)
        if len(kept) == len(graph.nodes):
            return graph
        return graph.replace(nodes=reversed(kept))
