"""Low-rank adaptation (LoRA, arXiv 2106.09685) of an ONNX file: small matrices beside its weights learn a new task.

    python examples/lora.py adapted.onnx --rank 4 --engine xla

A network that reads upright digits (scikit-learn's) becomes a file; adapters teach it digits that lie on their side.
Merged into the file's weights, which stay as they are until then, they leave its graph as it was.
"""

from __future__ import annotations

import argparse
import fnmatch
import pathlib
import tempfile
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import xrt_core as xrt
from xrt_core.frontends.onnx_export import save
from xrt_core.ir.graph import Graph, Node, Value, substitute


class Reader(xrt.Graph):
    """64 pixels -> 128 -> 128 -> 10 scores."""

    def __init__(self, rng: np.random.Generator) -> None:
        sizes = (64, 128), (128, 128), (128, 10)
        self.w = [(rng.standard_normal((i, o)) * np.sqrt(2 / i)).astype(np.float32) for i, o in sizes]

    def build(self, image: Any) -> Any:
        """image: float32[N, 64]. Returns float32[N, 10]."""
        return xrt.ops.Relu(xrt.ops.Relu(image @ self.w[0]) @ self.w[1]) @ self.w[2]


def with_adapters(graph: Graph, pattern: str, rank: int, rng: np.random.Generator) -> Graph:
    """The graph with x W + (x A) B for each product x W with a weight of that name; B is zero at first."""
    nodes = []
    for node in graph.nodes:
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or weight.data is None or not fnmatch.fnmatch(weight.name, pattern):
            nodes.append(node)
            continue
        rows, columns = weight.data.shape
        first = (rng.standard_normal((rows, rank)) / np.sqrt(rows)).astype(np.float32)
        a = Value.constant(first, f"{weight.name}.lora_a")
        b = Value.constant(np.zeros((rank, columns), np.float32), f"{weight.name}.lora_b")
        plain, low, added = (Value(f"{node.name}.{part}") for part in ("plain", "low", "added"))
        nodes += [
            node.replace(outputs=[plain]),
            Node("MatMul", [node.inputs[0], a], [low], version=13, name=f"{node.name}.lora_a"),
            Node("MatMul", [low, b], [added], version=13, name=f"{node.name}.lora_b"),
            Node("Add", [plain, added], node.outputs, version=14, name=f"{node.name}.lora"),
        ]
    return graph.replace(nodes=nodes)


def merged(graph: Graph, adapters: dict[str, np.ndarray]) -> Graph:
    """The graph with W + A B in the place of each W that has adapters."""
    new = {}
    for v in graph.constants:
        if f"{v.name}.lora_a" in adapters and v.data is not None:
            new[v] = Value.constant(v.data + adapters[f"{v.name}.lora_a"] @ adapters[f"{v.name}.lora_b"], v.name)
    return graph.replace(nodes=[substitute(n, new) for n in graph.nodes])


def run(path: pathlib.Path, rank: int = 4, epochs: int = 30, engine: str | None = None) -> dict[str, float]:
    """Train the file, adapt it, write it to `path`; returns accuracies and the share of numbers that were adapted."""
    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.target))
    upright, labels = (found.images[order] / 16).astype(np.float32), found.target[order]
    lying, half = upright.transpose(0, 2, 1)[:, :, ::-1].reshape(-1, 64), 14 * 64
    options = {"loss": "cross_entropy", "optimizer": xrt.optim.Adam(2e-3), "engine": engine}
    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder) / "upright.onnx"
        t = xrt.training.TrainModule(Reader(rng), **options)
        t.fit((upright.reshape(-1, 64)[:half], labels[:half]), min(epochs, 10), batch_size=64)
        t.export(base)
        graph = xrt.import_model(base)
        t = xrt.training.TrainModule(with_adapters(graph, "*", rank, rng), trainable="*.lora_*", **options)
        test = (np.ascontiguousarray(lying[half:]), labels[half:])
        before = t.evaluate(test, batch_size=1024, metrics="accuracy")
        t.fit((np.ascontiguousarray(lying[:half]), labels[:half]), epochs, batch_size=64)
        adapters = t.parameters()
        save(merged(graph, adapters), path)
    share = sum(a.size for a in adapters.values()) / sum(v.data.size for v in graph.constants if v.data is not None)
    after = t.evaluate(test, batch_size=1024, metrics="accuracy")
    return {"before": before["accuracy"], "after": after["accuracy"], "share": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--engine")
    given = parser.parse_args()
    said = run(given.output, given.rank, engine=given.engine)
    print(f"read right: {said['before']:.1%} before, {said['after']:.1%} after; {said['share']:.1%} of numbers learnt")
