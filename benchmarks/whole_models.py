"""Whole models: XRT on XLA beside ONNX Runtime and the same graph hand-jitted in JAX, interleaved in one process.

    python benchmarks/whole_models.py [NAME ...]      # exported models (see exported.py) and installed light_* models

"Hand-jitted" is what a JAX user would write: one `jax.jit` of a function that calls each operator's jax.numpy form with
the weights as constants, without XRT's graph, plan or launch around it. Ratios are medians of interleaved calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from exported import NAMES, inputs_for, path

from xrt_core.ir.function import Function
from xrt_core.module import XRTModule

TARGETS = {"mobilenetv2": 2.0, "resnet50": 1.7, "bert": 1.25, "gpt2": 1.25, "vit": 1.25}
"""Largest accepted ratio to ONNX Runtime."""


def interleaved(functions: Sequence[Callable[[], Any]], seconds: float = 12.0) -> list[float]:
    """Median milliseconds of each function; calls alternate until the time is used up (at least 7 rounds)."""
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 7:
        for f, found in zip(functions, times, strict=True):
            start = time.perf_counter()
            f()
            found.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(t) for t in times]


def hand_jitted(module: XRTModule, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
    """The whole graph as one jitted JAX function, called with NumPy arrays."""
    import jax
    from xrt_xla.compiler import jax_function

    caller = module._source.caller
    assert caller is not None
    graph = caller.partition(arrays).graph
    (node,) = graph.nodes
    function = node.attributes["function"]
    assert isinstance(function, Function)
    with jax.enable_x64(True):
        compiled = jax.jit(jax_function(function)).lower(*arrays).compile()

    def call() -> Any:
        with jax.enable_x64(True):
            return [np.asarray(r) for r in compiled(*arrays)]

    return call


def main() -> None:
    """Print the table."""
    import jax
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    print(f"jax {jax.__version__}, onnxruntime {ort.__version__}, numpy {np.__version__}; batch 1, 2 threads")
    print("| model | nodes | on XLA | load + compile (s) | XRT (ms) | hand-jitted (ms) | ORT (ms) | XRT/hand | XRT/ORT |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or NAMES:
        inputs = inputs_for(name)
        arrays = list(inputs.values())
        session = ort.InferenceSession(str(path(name)), options, providers=["CPUExecutionProvider"])
        start = time.perf_counter()
        module = XRTModule(path(name), engine="xla")
        got = module(*arrays)
        ready = time.perf_counter() - start
        want = session.run(None, inputs)[0]
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(np.abs(want).max()))
        hand = hand_jitted(module, arrays)
        ours, theirs, peer = interleaved([lambda: module(*arrays), hand, lambda: session.run(None, inputs)])
        e = module.explain()
        print(
            f"| {name} | {e.node_count} | {e.node_share:.0%} | {ready:.1f} | {ours:.1f} | {theirs:.1f} | {peer:.1f} "
            f"| {ours / theirs:.2f} | {ours / peer:.2f} (at most {TARGETS.get(name, '-')}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
