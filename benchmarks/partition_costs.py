"""Measures the constants of the cost model (`xrt_core/passes/partitioning/cost_model.py`) on this machine's CPU.

Run as `python benchmarks/partition_costs.py [--engine xla] [--repeats N]`. It times single operators on the host and
through an engine, small ones for what a call costs and large ones for rates, and prints one line for each constant with
the value that the module holds. The best of the repeats counts: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rounds import interleaved

from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.partitioning.cost_model import CPU, flops, passes_of

F32 = np.dtype(np.float32)
OPSET = 20
Case = tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]

SMALL: tuple[Case, ...] = (
    ("Add", ((4,), (4,)), {}),
    ("Relu", ((4,),), {}),
    ("Exp", ((4,),), {}),
    ("Transpose", ((2, 2),), {}),
    ("Concat", ((4,), (4,)), {"axis": 0}),
    ("MatMul", ((2, 2), (2, 2)), {}),
    ("Gemm", ((2, 2), (2, 2)), {}),
    ("Softmax", ((2, 2),), {}),
    ("Sigmoid", ((4,),), {}),
    ("Gelu", ((4,),), {}),
    ("LayerNormalization", ((2, 4), (4,)), {}),
    ("ReduceMean", ((2, 4),), {}),
    ("BatchNormalization", ((1, 4, 2, 2), (4,), (4,), (4,), (4,)), {}),
    ("MaxPool", ((1, 4, 4, 4),), {"kernel_shape": (2, 2)}),
    ("AveragePool", ((1, 4, 4, 4),), {"kernel_shape": (2, 2)}),
    ("Conv", ((1, 4, 4, 4), (4, 4, 3, 3)), {}),
)
STREAMS: tuple[Case, ...] = tuple(
    (op, ((1024, 1024),) * count, {})
    for op, count in (("Add", 2), ("Relu", 1), ("Exp", 1), ("Softmax", 1), ("Gelu", 1))
)
PRODUCTS: tuple[Case, ...] = (
    ("MatMul", ((512, 512), (512, 512)), {}),
    ("Conv", ((1, 64, 56, 56), (64, 64, 3, 3)), {}),
    ("Conv", ((1, 256, 14, 14), (256, 256, 3, 3)), {}),
)


def case(op: str, shapes: Sequence[tuple[int, ...]], attributes: dict[str, Any]) -> tuple[Node, list[np.ndarray]]:
    """A typed node and arrays for it."""
    draw = np.random.default_rng(0)
    arrays = [np.abs(draw.standard_normal(s)).astype(F32) for s in shapes]

    inputs = [Value(f"x{i}", TensorType(F32, a.shape)) for i, a in enumerate(arrays)]
    draft = Node(op, inputs, [Value("y")], attributes, version=since_version(op, "", OPSET), name="n")
    return draft.replace(outputs=[Value("y", infer_types(draft)[0])]), arrays


def best(call: Callable[[], Any], repeats: int, seconds: float = 0.02) -> float:
    """Seconds of one call: the best of `repeats` batches of about `seconds`."""
    return min(interleaved([call], rounds=repeats, batch=seconds)[0].wall)


def on_host(node: Node, arrays: list[np.ndarray], repeats: int) -> float:
    """Seconds of the host's kernel."""
    kernel = host_kernel(node)
    return best(lambda: kernel(arrays), repeats)


def on_engine(node: Node, arrays: list[np.ndarray], engine: str, repeats: int) -> float:
    """Seconds of a call of the node alone on the engine, through a module."""
    graph = Graph([v for v in node.inputs if v], [v for v in node.outputs if v], [node], opsets={"": OPSET}, name="g")
    module = XRTModule(graph, engine=engine, cache="off", guard=False)
    return best(lambda: module(*arrays), repeats)


def moved(node: Node) -> int:
    """Bytes of the node's inputs and outputs."""
    return sum(
        int(np.prod(v.shape, dtype=np.int64)) * 4 for v in (*node.inputs, *node.outputs) if v and v.shape is not None
    )  # type: ignore[arg-type]


def main() -> None:
    """Print the measurements, and the constants beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="xla")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{'small':<22}{'passes':>7}{'host us':>9}{'engine us':>11}")
    for c in SMALL:
        node, arrays = case(*c)
        host = on_host(node, arrays, arguments.repeats) * 1e6
        engine = on_engine(node, arrays, arguments.engine, arguments.repeats) * 1e6
        print(f"{node.op_type:<22}{passes_of(node):>7}{host:>9.1f}{engine:>11.1f}", flush=True)
    print(
        f"cost_model.CPU: host {CPU.host.call * 1e6:.1f} us a pass; launch {CPU.launch * 1e6:.1f} us, "
        f"{CPU.transfer * 1e6:.1f} us a tensor"
    )
    print(f"\n{'stream, 4 MB arrays':<22}{'passes':>7}{'host GB/s a pass':>18}{'engine GB/s':>13}")
    for c in STREAMS:
        node, arrays = case(*c)
        size = moved(node) / 1e9
        host = passes_of(node) * size / on_host(node, arrays, arguments.repeats)
        engine = size / on_engine(node, arrays, arguments.engine, arguments.repeats)
        print(f"{node.op_type:<22}{passes_of(node):>7}{host:>18.1f}{engine:>13.1f}", flush=True)
    print(f"cost_model.CPU: host {CPU.host.bandwidth / 1e9:.0f} GB/s, engine {CPU.engine.bandwidth / 1e9:.0f} GB/s")
    print(f"\n{'product':<22}{'host GFLOP/s':>14}{'engine GFLOP/s':>16}")
    for c in PRODUCTS:
        node, arrays = case(*c)
        work = flops(node) / 1e9
        host, engine = (
            on_host(node, arrays, arguments.repeats),
            on_engine(node, arrays, arguments.engine, arguments.repeats),
        )
        print(f"{node.op_type:<22}{work / host:>14.0f}{work / engine:>16.0f}", flush=True)
    print(f"cost_model.CPU: host {CPU.host.flops / 1e9:.0f} GFLOP/s, engine {CPU.engine.flops / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
