"""Overhead of calling a module whose graph is one Launch, over calling its compiled executable directly.

    python benchmarks/call_overhead.py

For 1, 5 and 25 inputs. First the median time of a call through XRTModule on XLA, without and under guard, and of the
jax executable inside it, all with the same NumPy arrays and ending in NumPy results, measured interleaved; the
difference is the overhead. Then the same under guard, by name (`m.run`) and bound to its arrays (`m.bind`), over a
session of ONNX Runtime with one thread: the least processor time of the calling thread in 300 turns of 50 calls, which
neighbours disturb little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rounds import interleaved

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

TURNS, CALLS = 300, 50


def graph_of(count: int) -> Graph:
    """Minus the sum of `count` float32[8] inputs."""
    t = TensorType(np.dtype(np.float32), (8,))
    inputs = [Value(f"x{i}", t) for i in range(count)]
    total, y = Value("total", t), Value("y", t)
    nodes = [Node("Sum", inputs, [total], version=13), Node("Neg", [total], [y], version=13)]
    return Graph(inputs, [y], nodes, opsets={"": 13}, name=f"sum{count}")


def main() -> None:
    """Print the tables."""
    import jax
    import onnxruntime

    print(f"jax {jax.__version__}, onnxruntime {onnxruntime.__version__}, numpy {np.__version__}")
    print("| inputs | executable (us) | added (us) | of its time | added under guard (us) | of its time |")
    print("|---|---|---|---|---|---|")
    for count in (1, 5, 25):
        own, plain, guarded = measure(count)
        added = [f"{t - own:.1f} | {(t - own) / own:.2f}" for t in (plain, guarded)]
        print(f"| {count} | {own:.1f} | {' | '.join(added)} |")
    print("\n| inputs | session (us) | added by m.run under guard (us) | added by m.bind (us) |\n|---|---|---|---|")
    for count in (1, 5, 25):
        session, run, bound = measure_guarded(count)
        print(f"| {count} | {session:.1f} | {run - session:.1f} | {bound - session:.1f} |")


def measure(count: int) -> list[float]:
    """Microseconds of a call of the executable itself, through XRTModule without guard, and under guard."""
    import jax

    module = XRTModule(graph_of(count), engine="xla", guard=False)
    guarded = live_module(graph_of(count), "xla", {})
    arrays = [np.random.default_rng(i).standard_normal(8, dtype=np.float32) for i in range(count)]
    np.testing.assert_allclose(module(*arrays), -np.sum(arrays, axis=0), rtol=1e-4, atol=1e-5)
    assert module.explain().node_share == 1.0
    compiled = jax.jit(lambda *xs: -sum(xs[1:], xs[0])).lower(*arrays).compile()
    calls = [lambda: np.asarray(compiled(*arrays)), lambda: module(*arrays), lambda: guarded(*arrays)]
    return [t.median * 1e6 for t in interleaved(calls, rounds=50, calls=200)]


def live_module(graph: Graph, engine: str, options: Mapping[str, Any]) -> XRTModule:
    """A module under guard that is through probation and its first comparisons."""
    # the cluster is so small that the cost model, or the race with the host, would leave it there
    m = XRTModule(graph, engine=engine, guard_tune=False, prune=False, cache=False, **options)
    arrays = {v.name: np.ones(v.type.shape, v.type.dtype) for v in graph.inputs}
    for _ in range(200):
        m.run(arrays)
        m.wait()
    assert m.report().clusters[0]["state"] == "live"
    return m


def measure_guarded(count: int) -> list[float]:
    """Microseconds of a session's own call, of `run` and of a bound call under guard, of the calling thread."""
    import onnxruntime

    from xrt_core.frontends.onnx_export import export_model

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graph = graph_of(count)
    model = export_model(graph).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    arrays = {f"x{i}": np.random.default_rng(i).standard_normal(8, dtype=np.float32) for i in range(count)}
    with live_module(graph, "onnxruntime", {"threads": 1}) as m:
        return least(
            {"session": lambda: session.run(None, arrays), "run": lambda: m.run(arrays), "bound": m.bind(arrays)}
        )


def least(calls: Mapping[str, Callable[[], Any]]) -> list[float]:
    """The least microseconds of the calling thread for a call of each, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            call()
            start = time.thread_time_ns()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.thread_time_ns() - start) / CALLS / 1e3)
    return list(best.values())


if __name__ == "__main__":
    main()
