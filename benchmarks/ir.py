"""Speed of the IR: import of 100 000 nodes, a pass that changes one of them, and specialising BERT-base.

    python benchmarks/ir.py            # needs the exported models for the last line, see exported.py
"""

from __future__ import annotations

import numpy as np
import onnx
from exported import inputs_for, path
from rounds import median

from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir import inference
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.verifier import verify
from xrt_core.module import XRTModule
from xrt_core.passes.pass_base import Pass, rebuild
from xrt_core.passes.simplify import DeadNodes

COUNT = 100_000


def chain(count: int) -> onnx.ModelProto:
    """A model of `count` nodes, Relu and Add by turns."""
    h = onnx.helper
    nodes = [
        h.make_node("Relu", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}")
        if i % 2
        else h.make_node("Add", [f"v{i}", "x"], [f"v{i + 1}"], name=f"n{i}")
        for i in range(count)
    ]
    info = h.make_tensor_value_info
    graph = h.make_graph(nodes, "chain", [info("x", 1, [4]), info("v0", 1, [4])], [info(f"v{count}", 1, [4])])
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 18)])


class RemoveOne(Pass):
    """Takes one node out of the middle."""

    name = "remove_one"

    def rewrite(self, graph: Graph) -> Graph:
        middle = len(graph.nodes) // 2 | 1
        node = graph.nodes[middle]
        new: dict[Value, Value] = {node.outputs[0]: node.inputs[0]}  # type: ignore[dict-item]
        return rebuild(graph, (*graph.nodes[:middle], *graph.nodes[middle + 1 :]), new)


def main() -> None:
    """Print the table."""
    model = chain(COUNT)
    graph = import_model(model)
    rows = [
        ("import 100 000 nodes from a ModelProto", median(lambda: import_model(model)), 1.0),
        ("a pass that changes one of 100 000 nodes", median(lambda: RemoveOne()(graph)), 0.3),
        ("dead-node pass over 100 000 nodes", median(lambda: DeadNodes()(graph)), None),
        ("verify 100 000 nodes", median(lambda: verify(import_model(model), "bench")), None),
    ]
    bert = XRTModule(path("bert"), engine="xla", guard=False)
    arrays = [np.asarray(a) for a in inputs_for("bert").values()]
    caller = bert._source.caller
    assert caller is not None

    def as_if_new() -> None:
        inference.forget()  # a new signature finds none of its types remembered
        caller.partition(arrays)

    rows.append(("specialise and partition BERT-base", median(as_if_new), 0.15))
    print("| what | median (s) | target (s) |\n|---|---|---|")
    for what, seconds, target in rows:
        print(f"| {what} | {seconds:.3f} | {target or ''} |")
    print(f"\nBERT-base: {caller.partition(arrays).explain().summary()}")


if __name__ == "__main__":
    main()
