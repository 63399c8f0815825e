"""What `xrt.profile()` costs: calls within it beside calls without, in turns, on models that take milliseconds.

    python benchmarks/profiling.py [--seconds S]

Three models: SqueezeNet (it comes with the onnx package) on ONNX Runtime, one launch a call; the same on the host, a
step for each node; and 30 layers whose products are on XLA and whose activations are kept on the host, with
conversions. A turn is 40 ms of calls, after one that does not count, with the profile begun before. Prints the
medians, their ratio, and the time of beginning and ending a profile. What it costs while it is off is measured by
`two_versions.py`.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

import xrt_core as xrt

TURN = 0.04  # seconds


class Layers(xrt.Graph):
    """Products and activations in turns."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = [rng.standard_normal((256, 256), dtype=np.float32) / 16 for _ in range(30)]

    def build(self, x: Any) -> Any:
        for w in self.weights:
            x = xrt.ops.Relu(xrt.ops.MatMul(x, w))
        return x


def calls() -> dict[str, Callable[[], Any]]:
    """Name -> a call."""
    squeezenet = next(pathlib.Path(onnx.__file__).parent.rglob("light_squeezenet.onnx"))
    image = np.zeros((1, 3, 224, 224), np.float32)
    rows = np.ones((64, 256), np.float32)
    found: dict[str, Callable[[], Any]] = {}
    for name, engine in (("SqueezeNet, one launch", "onnxruntime"), ("SqueezeNet, the host", "host")):
        m = xrt.XRTModule(squeezenet, engine=engine, guard=False)
        found[name] = lambda m=m: m.run({"data_0": image})  # type: ignore[misc]
    layers = xrt.XRTModule(Layers(), engine="xla", guard=False, prune=False, marks=[("op:Relu", "host")])
    found["30 clusters on XLA"] = lambda: layers(rows)
    return found


def main() -> None:
    """Print the table."""
    a = argparse.ArgumentParser()
    a.add_argument("--seconds", type=float, default=10.0, help="for each model")
    seconds = a.parse_args().seconds
    print("| model | steps | off (us) | on (us) | ratio | begin and end (us) |\n|---|---|---|---|---|---|")
    for name, call in calls().items():
        for _ in range(5):
            call()
        start = time.perf_counter()
        call()
        count = max(3, int(TURN / (time.perf_counter() - start)))

        def turn(call: Callable[[], Any] = call, count: int = count) -> float:
            call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count

        off: list[float] = []
        on: list[float] = []
        around: list[float] = []
        steps = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for recording in (False, True) if len(off) % 2 else (True, False):
                if not recording:
                    off.append(turn())
                    continue
                start = time.perf_counter()
                with xrt.profile() as p:
                    begun = time.perf_counter()
                    on.append(turn())
                    ended = time.perf_counter()
                around.append(begun - start + time.perf_counter() - ended)
                steps = steps or (len(p.timeline.spans) - p.calls) // p.calls
        ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
        times = [f"{statistics.median(x) * 1e6:.1f}" for x in (off, on, around)]
        print(f"| {name} | {steps} | {times[0]} | {times[1]} | {ratio:.3f} | {times[2]} |")


if __name__ == "__main__":
    main()
