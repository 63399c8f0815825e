"""One model on each engine, and on all of them: how fast, how far off, and how much of it runs there.

    python examples/compare_engines.py [model.onnx] [--repeat 50]

Without a model it takes a small convolutional network. The last row is `engine="auto"`: every engine and the host are
timed for each cluster, and the fastest of those that are right gets it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.engine import engines


class Net(xrt.Graph):
    """Three convolutions, a pooling and a classifier."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        sizes = (3, 16, 32, 32)
        self.kernels = [
            (rng.standard_normal((o, i, 3, 3)) / (3 * i**0.5)).astype(np.float32)
            for i, o in itertools.pairwise(sizes)
        ]
        self.w = rng.standard_normal((32, 10)).astype(np.float32)

    def build(self, image: Any) -> Any:
        """image: float32[N, 3, 32, 32]. Returns float32[N, 10]."""
        x = image
        for kernel in self.kernels:
            x = xrt.ops.Relu(xrt.ops.Conv(x, kernel, pads=[1, 1, 1, 1]))
        return xrt.ops.Softmax(xrt.ops.Flatten(xrt.ops.GlobalAveragePool(x)) @ self.w)


def measured(module: xrt.XRTModule, inputs: Mapping[str, Any], repeat: int) -> tuple[dict[str, np.ndarray], float]:
    """The results once everything is compiled and verified, and the median time of a call in milliseconds."""
    module.run(inputs)
    module.wait()
    results = {n: np.asarray(r) for n, r in module.run(inputs).items()}
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        module.run(inputs)
        times.append(time.perf_counter() - begun)
    return results, statistics.median(times) * 1e3


def off(results: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest number of that result."""
    return max(
        float(np.abs(r.astype(np.float64) - expected[n]).max() / max(np.abs(expected[n]).max(), 1e-30))
        for n, r in results.items()
    )


def who(module: xrt.XRTModule) -> str:
    """What runs the clusters, and the share of the work."""
    chosen = sorted({c["chosen"] for c in module.report().clusters})
    return f"{module.explain().flop_share:.0%} on {', '.join(chosen)}" if chosen else "host"


def compare(model: Any, inputs: Mapping[str, Any], repeat: int) -> list[tuple[str, float, float, str]]:
    """Rows of name, milliseconds, how far off the host's results, and what ran where."""
    expected: dict[str, np.ndarray] = {}
    rows = []
    ready = [e.name for e in engines.listing() if e.status == "ready" and engines.get(e.name).automatic]
    for name in ("host", *ready, "auto"):
        with xrt.XRTModule(model, engine=name) as module:
            results, milliseconds = measured(module, inputs, repeat)
            expected = expected or results
            rows.append((name, milliseconds, off(results, expected), who(module)))
    return rows


def inputs_of(module: xrt.XRTModule) -> dict[str, np.ndarray]:
    """Random inputs of the declared types; a dimension without a size is 1."""
    rng = np.random.default_rng(0)
    made = {}
    for name, t in module.input_types.items():
        shape = [d if isinstance(d, int) else 1 for d in t.shape]
        made[name] = np.asarray(rng.random(shape) if t.dtype.kind == "f" else rng.integers(0, 10, shape), t.dtype)
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="an ONNX file")
    parser.add_argument("--repeat", type=int, default=50)
    given = parser.parse_args()
    model = xrt.trace(Net(), "float32[8, 3, 32, 32]") if given.model is None else given.model
    inputs = inputs_of(xrt.XRTModule(model, engine="host"))
    print("engine           ms  off by  where")
    for name, milliseconds, difference, where in compare(model, inputs, given.repeat):
        print(f"{name:<12} {milliseconds:>6.2f} {difference:>7.0e}  {where}")


if __name__ == "__main__":
    main()
