"""Overhead of calling a module whose graph is one Launch, over calling its compiled executable directly.

    python benchmarks/call_overhead.py

Prints, for 1 and 25 inputs, the median time of a call through XRTModule and of the jax executable inside it, both with
the same NumPy arrays and both ending in NumPy results, measured interleaved; the difference is the overhead.
"""

from __future__ import annotations

import numpy as np
from rounds import interleaved

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule


def graph_of(count: int) -> Graph:
    """Minus the sum of `count` float32[8] inputs."""
    t = TensorType(np.dtype(np.float32), (8,))
    inputs = [Value(f"x{i}", t) for i in range(count)]
    total, y = Value("total", t), Value("y", t)
    nodes = [Node("Sum", inputs, [total], version=13), Node("Neg", [total], [y], version=13)]
    return Graph(inputs, [y], nodes, opsets={"": 13}, name=f"sum{count}")


def main() -> None:
    """Print the table."""
    import jax

    print(f"jax {jax.__version__}, numpy {np.__version__}")
    print("| inputs | XRTModule (us) | executable (us) | overhead (us) |\n|---|---|---|---|")
    for count in (1, 5, 25):
        ours, theirs = measure(count)
        print(f"| {count} | {ours:.1f} | {theirs:.1f} | {ours - theirs:.1f} |")


def measure(count: int) -> list[float]:
    """Microseconds of a call through XRTModule and of the executable itself."""
    import jax

    module = XRTModule(graph_of(count), engine="xla", guard=False)
    arrays = [np.random.default_rng(i).standard_normal(8, dtype=np.float32) for i in range(count)]
    np.testing.assert_allclose(module(*arrays), -np.sum(arrays, axis=0), rtol=1e-4, atol=1e-5)
    assert module.explain().node_share == 1.0
    compiled = jax.jit(lambda *xs: -sum(xs[1:], xs[0])).lower(*arrays).compile()
    both = [lambda: module(*arrays), lambda: np.asarray(compiled(*arrays))]
    return [t.median * 1e6 for t in interleaved(both, rounds=50, calls=200)]


if __name__ == "__main__":
    main()
