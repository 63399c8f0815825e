"""The first result under the asynchronous guard beside the plain host: making the module and its first call.

    python benchmarks/first_result.py [MODEL ...] [--rounds 9] [--engine auto] [--threads 1]

Every measurement is a process of its own with an empty cache of its own, and the two take turns; a model is a
development model or an exported one (see cpu_engines.py). The core and NumPy have been imported before the clock
starts. Wall-clock times are medians; processor times of the process until then are the least of all, which with one
thread for NumPy's products (`--threads 1`: theirs spin) tell more on a machine that is busy. "host / host" is how far
two halves of the host's own runs are apart. Goal: 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

DEFAULT = ("ppocr_cls", "silero_vad", "minilm_int8", "light_squeezenet", "mobilenetv2")
GOAL = 1.05
MEASURE = """
import json, os, sys, time
sys.path.insert(0, {folder!r})
from cpu_engines import model_of
from xrt_core.module import XRTModule
found = model_of({name!r})
if found is None:
    os._exit(0)
file, inputs = found
engines = {{"jax", "onnxruntime", "openvino"}}
before = engines & set(sys.modules)
wall, busy = time.perf_counter(), time.process_time()
m = XRTModule(file, engine={engine!r}, guard={guard!r})
m.run(inputs)
wall, busy = time.perf_counter() - wall, time.process_time() - busy
print(json.dumps([wall, busy, sorted(engines & set(sys.modules) - before)]), flush=True)
m.close()
os._exit(0)  # the end is not measured
"""

Times = tuple[list[float], list[float]]
"""Seconds of wall clock, and of processor time."""


def measured(name: str, engine: str, guard: bool, threads: int) -> tuple[float, float, list[str]] | None:
    """Seconds, processor seconds and engine libraries that were imported by the first result; None: no such model."""
    code = MEASURE.format(folder=str(pathlib.Path(__file__).parent), name=name, engine=engine, guard=guard)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XRT_CACHE_DIR": cache}
        if threads:
            environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    if not done.stdout:
        return None
    wall, busy, imported = json.loads(done.stdout.splitlines()[-1])
    return wall, busy, imported


def row(name: str, engine: str, rounds: int, threads: int) -> tuple[str, float] | None:
    """A line of the table and the ratio of processor time; None where the model is not there."""
    host: Times = ([], [])
    guarded: Times = ([], [])
    touched: set[str] = set()
    for _ in range(rounds):
        for times, chosen, guard in ((host, "host", False), (guarded, engine, True)):
            found = measured(name, chosen, guard, threads)
            if found is None:
                return None
            times[0].append(found[0])
            times[1].append(found[1])
            touched.update(found[2])
    cells = [name]
    ratios = []
    for h, g, of in zip(host, guarded, (statistics.median, min), strict=True):
        ratios.append(of(g) / of(h))
        cells += [f"{of(h) * 1e3:.1f}", f"{of(g) * 1e3:.1f}", f"{ratios[-1]:.3f}", f"{of(h[::2]) / of(h[1::2]):.3f}"]
    cells.append(", ".join(sorted(touched)) or "none")
    return f"| {' | '.join(cells)} |", ratios[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and which models are over the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=DEFAULT, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=9, help="processes of each kind and model (at least 2)")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of NumPy's products (0: as many as it likes)")
    args = parser.parse_args(arguments)
    kinds = ("", "CPU ")
    each = ("host (ms)", "guarded (ms)", f"ratio (at most {GOAL})", "host / host")
    columns = [f"{k}{c}" for k in kinds for c in each]
    columns = ["model", *columns, "engine libraries imported by then"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    over = []
    for name in args.models:
        made = row(name, args.engine, max(args.rounds, 2), args.threads)
        if made is not None:
            print(made[0], flush=True)
            if made[1] > GOAL:
                over.append(f"{name} {made[1]:.3f}")
    print(f"\nprocessor time over {GOAL}: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
