"""Constant folding: what depends on constants alone is computed once per model, not once per signature."""

from __future__ import annotations

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.rewrite import substitute
from xrt_core.passes.evaluate import (
    DEFAULT_FOLD_LIMIT,
    HostRun,
    constant_like,
    evaluate,
    freed_bytes,
    is_known,
    last_uses,
)
from xrt_core.passes.infra import Pass


class ConstantFold(Pass):
    """Replaces nodes whose inputs are all constants by their results.

    1. A node of known inputs whose results take at most the limit becomes constants.
    2. So does one whose results take no more than those of its inputs that nobody else reads.
    3. Left alone: larger results (a model never grows), random draws, control flow, and what the host fails on.
    """

    name = "constant_fold"

    def __init__(self, run: HostRun, limit: int = DEFAULT_FOLD_LIMIT) -> None:
        self.run = run
        self.limit = limit

    def rewrite(self, graph: Graph) -> Graph:
        new: dict[Value, Value] = {}
        last = last_uses(graph)
        kept = []
        for old in graph.nodes:
            node = substitute(old, new) if new else old
            arrays = None
            if is_known(node):
                try:
                    types = infer_types(node) if not node.subgraphs else (None,) * len(node.outputs)
                    arrays = evaluate(node, types, self.run, self.limit, freed_bytes(old, node, last))
                except ShapeError:
                    arrays = None
            if arrays is None:
                kept.append(node)
                continue
            for v, data in zip(node.outputs, arrays, strict=False):
                if v is not None and data is not None:
                    new[v] = constant_like(v, data)
        if len(kept) == len(graph.nodes):
            return graph
        return graph.replace(nodes=kept, outputs=[new.get(v, v) for v in graph.outputs])
