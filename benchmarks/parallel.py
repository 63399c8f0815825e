"""Two independent branches on two engines: one after another, and side by side (`parallel=True`).

    python benchmarks/parallel.py [--engines xla onnxruntime] [--timeline FOLDER] [--spinning]

For each size of the branches: median milliseconds of a call, modes in turns, the ratio of the two, and for how long
both engines were at work at once in a run that was timed step by step. --timeline: write that run for perfetto.
--spinning: let ONNX Runtime's threads spin between runs, as they do by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from functools import partial

import numpy as np
from rounds import interleaved

from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

CASES = {  # (size of the matrices, products in a row in each branch)
    "large": ((768, 6), (768, 6)),
    "medium": ((256, 8), (256, 8)),
    "narrow": ((64, 60), (64, 60)),  # small operators in a row, which engines do not spread over cores
    "uneven": ((512, 8), (64, 20)),
    "tiny": ((16, 1), (16, 1)),
}
MODES = (False, True)


def two_branches(engines: tuple[str, str], branches: tuple[tuple[int, int], tuple[int, int]]) -> Graph:
    """For each engine a branch of MatMul and Tanh in turns over an input of its own; the host adds up their sums."""
    rng = np.random.default_rng(0)
    f32 = np.dtype(np.float32)
    nodes, inputs, ends = [], [], []
    for engine, (size, depth) in zip(engines, branches, strict=True):
        mark = Annotations(engine=engine)
        t = TensorType(f32, (size, size))
        v = Value(f"x_{engine}", t)
        inputs.append(v)
        for i in range(depth):
            w = Value.constant((rng.standard_normal((size, size)) / np.sqrt(size)).astype(f32))
            product, v_next = Value(f"{engine}_p{i}", t), Value(f"{engine}_t{i}", t)
            nodes.append(Node("MatMul", [v, w], [product], version=13, name=f"{engine}_mm{i}", annotations=mark))
            nodes.append(Node("Tanh", [product], [v_next], version=13, name=f"{engine}_tanh{i}", annotations=mark))
            v = v_next
        end = Value(f"sum_{engine}", TensorType(f32, ()))
        axes = Value.constant(np.array([0, 1], np.int64))
        nodes.append(
            Node("ReduceSum", [v, axes], [end], {"keepdims": 0}, version=13, name=f"{engine}_sum", annotations=mark)
        )
        ends.append(end)
    y = Value("y", TensorType(f32, ()))
    nodes.append(Node("Add", ends, [y], version=14, name="add", annotations=Annotations(engine="host")))
    return Graph(inputs, [y], nodes, opsets={"": 18}, name="two_branches")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", nargs=2, default=("xla", "onnxruntime"))
    parser.add_argument("--timeline", type=pathlib.Path)
    parser.add_argument("--spinning", action="store_true")
    arguments = parser.parse_args()
    engines: tuple[str, str] = (arguments.engines[0], arguments.engines[1])
    print(f"{os.cpu_count()} cores; {engines[0]} and {engines[1]}")
    spins = {"onnxruntime": {"session": {"session.intra_op.allow_spinning": "1"}}} if arguments.spinning else None
    columns = "case", "sequential (ms)", "side by side (ms)", "side by side", "overlap (ms)"
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|")
    for name, branches in CASES.items():
        graph = two_branches(engines, branches)
        rng = np.random.default_rng(1)
        arrays = [rng.standard_normal(v.shape, np.float32) for v in graph.inputs]
        modules = [
            XRTModule(graph, engine=engines, parallel=mode, prune=False, cache="off", engine_options=spins, guard=False)
            for mode in MODES
        ]
        wanted = modules[0](*arrays)
        for m in modules:
            for _ in range(10):
                np.testing.assert_array_equal(m(*arrays), wanted)
            assert len(m.explain().report.clusters) == 2
        times = interleaved([partial(m, *arrays) for m in modules], rounds=20, seconds=4.0)
        sequential, parallel = (t.median * 1e3 for t in times)
        inputs = dict(zip((v.name for v in graph.inputs), arrays, strict=True))
        _, timeline = modules[1].run_timed(inputs)
        print(
            f"| {name} | {sequential:.3f} | {parallel:.3f} | {parallel / sequential:.2f}x | "
            f"{timeline.overlap * 1e3:.3f} |"
        )
        if arguments.timeline is not None:
            arguments.timeline.mkdir(parents=True, exist_ok=True)
            (arguments.timeline / f"{name}.json").write_text(json.dumps(timeline.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
