"""Two versions of XRT side by side: each installed in an environment of its own, a process for each, calls in turns.

    python benchmarks/two_versions.py PYTHON_BEFORE PYTHON_AFTER [FILE.onnx ...] [--seconds S]

For each model (a small MLP of `xrt_core.ops` and those of the command line), with the cache off and without the guard:
time to the first result on the host and on XLA, the import of XRT included (NumPy's and onnx's not), in new processes,
five of each version in turns; then warm calls in turns, for so many seconds. It uses names that both versions have.
Ratios are after/before, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = """
import json, os, sys, time
os.environ["XRT_GUARD"] = "0"
import numpy as np
import onnx
start = time.perf_counter()
import xrt_core as xrt
from xrt_core import XRTModule, ops

imported = time.perf_counter() - start

class MLP(xrt.Graph):
    def build(self, x):
        rng = np.random.default_rng(0)
        for _ in range(4):
            x = ops.Relu(ops.MatMul(x, rng.standard_normal((64, 64), dtype=np.float32)))
        return x

def inputs(file):
    rng = np.random.default_rng(0)
    if file == "mlp":
        return {"x": rng.standard_normal((8, 64), dtype=np.float32)}
    model = onnx.load(file, load_external_data=False)
    weights = {i.name for i in model.graph.initializer}
    found = {}
    for i in model.graph.input:
        if i.name in weights:
            continue
        t = i.type.tensor_type
        shape = [d.dim_value or 1 for d in t.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(t.elem_type)
        is_float = np.issubdtype(dtype, np.floating)
        found[i.name] = rng.standard_normal(shape).astype(dtype) if is_float else np.ones(shape, dtype)
    return found

live = {}
for line in sys.stdin:
    what, file, engine, count = json.loads(line)
    given = inputs(file)
    if what == "first":
        start = time.perf_counter()
        m = XRTModule(MLP() if file == "mlp" else file, engine=engine, guard=False, guard_async=False, cache=False)
        m(*given.values())
        seconds = imported + time.perf_counter() - start
        live[file, engine] = m
    else:
        m = live[file, engine]
        values = list(given.values())
        m(*values)
        start = time.perf_counter()
        for _ in range(count):
            m(*values)
        seconds = (time.perf_counter() - start) / count
    print("XRT", seconds, flush=True)
"""
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
ENGINES = ("host", "xla")
FIRST_ROUNDS, ROUNDS, BATCH = 5, 9, 0.1


class Version:
    """A process with one version, which waits while the other one works."""

    def __init__(self, python: str) -> None:
        command = [python, "-c", SERVER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=ENVIRONMENT
        )

    def seconds(self, *request: Any) -> float:
        """What it took for a request: what (first, calls), model, engine, number of calls."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("XRT "):
                return float(line.split()[1])
        raise SystemExit(f"the process ended at {request}")


def ratios(before: list[float], after: list[float]) -> str:
    """The median of the ratios of the rounds, and the quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(after, before, strict=True)], n=4)
    times = f"{statistics.median(before) * 1e3:10.3f} {statistics.median(after) * 1e3:10.3f}"
    return f"{times} {middle:6.2f} {low:5.2f}-{high:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    print(f"{'':34} before ms   after ms  ratio quartiles")
    for file in ("mlp", *(str(Path(m).resolve()) for m in given.models)):
        name = Path(file).stem
        for engine in ENGINES:
            firsts, versions = [], []
            for _ in range(FIRST_ROUNDS):
                for v in versions:
                    v.process.terminate()
                versions = [Version(given.before), Version(given.after)]
                firsts.append([v.seconds("first", file, engine, 0) for v in versions])
            print(f"{name:20} {engine:4} first    {ratios(*map(list, zip(*firsts, strict=True)))}", flush=True)
            count = max(1, int(BATCH / versions[0].seconds("calls", file, engine, 1)))
            rounds = max(ROUNDS, int(given.seconds / (2 * BATCH)))
            calls = [[v.seconds("calls", file, engine, count) for v in versions] for _ in range(rounds)]
            print(f"{name:20} {engine:4} calls    {ratios(*map(list, zip(*calls, strict=True)))}", flush=True)
            for v in versions:
                v.process.terminate()


if __name__ == "__main__":
    sys.exit(main())
