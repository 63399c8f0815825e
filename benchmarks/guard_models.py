"""Every development and exported model through `engine="auto", guard=True`, beside each engine alone and the host.

    python benchmarks/guard_models.py [MODEL ...] [--seconds 8] [--engines xla onnxruntime openvino] [--keep FOLDER]

One process; the modules of a model take turns. Before each measured call there is a rest, as threads of some engines
spin for a while, and a call that is not measured. Then the best engine and "auto" take turns alone, some calls each: in
one process with all the others their threads get in each other's way. The ratio is the median of those rounds' ratios,
so that a machine that is slower for a while counts on both sides. Every module's results are held against the host's
first. `--keep` leaves the cache there, so that a second run has the verdicts of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import exported
import numpy as np
from cpu_engines import model_of

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tests.conformance import dev_models
from xrt_core.errors import XRTError
from xrt_core.module import XRTModule

ENGINES = ("xla", "onnxruntime", "openvino")
ACCEPTED = 1.03
REST = 0.05
"""Seconds of rest before each call."""
TIES = ("light_squeezenet",)
"""Models whose results differ by rounding alone: a Softmax over ties."""
CALLS = 9
"""Calls of each turn of the best engine and auto; their median counts."""
LEAST_ROUNDS, SLOW_SECONDS = 9, 1.0
"""Rounds in any case; a module whose second call takes longer than this many seconds is timed by that call alone."""


def rounds_of(
    modules: Mapping[str, XRTModule], inputs: Mapping[str, np.ndarray], seconds: float, calls: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of a call of each module (the median of so many calls), by round; all of them have run before."""
    times: dict[str, list[float]] = {name: [] for name in modules}
    racing = []
    for name, m in modules.items():
        m.run(inputs)
        start = time.perf_counter()
        m.run(inputs)
        took = time.perf_counter() - start
        if took > SLOW_SECONDS:
            times[name].append(took * 1e3)
        else:
            racing.append(name)
    end, shuffle = time.perf_counter() + seconds, random.Random(0)
    k = 0
    while time.perf_counter() < end or k < LEAST_ROUNDS:
        for name in shuffle.sample(racing, len(racing)):  # so that nobody always comes after the same neighbour
            time.sleep(REST)
            modules[name].run(inputs)
            found = []
            for _ in range(calls):
                start = time.perf_counter()
                modules[name].run(inputs)
                found.append((time.perf_counter() - start) * 1e3)
            times[name].append(statistics.median(found))
        k += 1
    return times


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over the rounds of how many times as long `one` took."""
    if len(one) != len(other):
        return statistics.median(one) / statistics.median(other)
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def wrong(name: str, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What differs by more than the model's tolerance, "" for nothing."""
    if name in TIES:
        return ""
    tolerance = dev_models.MODELS[name][3] if name in dev_models.MODELS else 1e-3
    for label, want in wanted.items():
        x, y = np.asarray(got[label]), np.asarray(want)
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{label} is {x.dtype}{list(x.shape)}"
        wide = y.astype(np.float64)
        scale = max(float(np.ptp(wide)), float(np.abs(wide).max()), 1e-12)
        off = float(np.abs(x.astype(np.float64) - wide).max()) / scale
        if not off <= tolerance:
            return f"{label} is off by {off:.2g} of its range"
    return ""


def row(name: str, names: Sequence[str], seconds: float, cache: str) -> tuple[str, float] | None:
    """The measurements of a model as a row, and auto's ratio to the best engine; None where the model is not there."""
    found = model_of(name)
    if found is None:
        return None
    file, inputs = found
    modules = {"host": XRTModule(file, engine="host")}
    modules |= {e: XRTModule(file, engine=[e], cache_dir=cache, guard=False) for e in names}
    modules["auto"] = XRTModule(file, engine="auto", guard=True, cache_dir=cache)
    with contextlib.ExitStack() as stack:
        for m in modules.values():
            stack.enter_context(m)
        start = time.perf_counter()
        wanted = modules["host"].run(inputs)
        host_first = time.perf_counter() - start
        start = time.perf_counter()
        got = modules["auto"].run(inputs)
        first = time.perf_counter() - start
        modules["auto"].wait()
        settled = time.perf_counter() - start
        faults = [f"first: {x}" for x in [wrong(name, got, wanted)] if x]
        for e, m in modules.items():
            for _ in range(2):  # control flow comes to new clusters with the second call
                fault = wrong(name, m.run(inputs), wanted)
                m.wait()
            faults += [f"{e}: {fault}"] if fault else []
        times = rounds_of(modules, inputs, seconds)
        clusters = modules["auto"].report().clusters
        medians = {e: statistics.median(t) for e, t in times.items()}
        best = min(names, key=medians.__getitem__)
        two = {e: modules.pop(e) for e in (best, "auto")}
        modules.clear()
        gc.collect()
        times = rounds_of(two, inputs, seconds, CALLS)
    to_best = ratio(times["auto"], times[best])
    chosen = Counter(c["chosen"] if c["state"] == "live" else f"host ({c['state']})" for c in clusters)
    said = ", ".join(f"{n} x {e}" if n > 1 else e for e, n in chosen.items())
    why = clusters[0]["reason"] if len(clusters) == 1 else ""
    turned_down = [x for c in clusters if c["outcome"] for x in c["outcome"]["errors"]]
    why += f"; turned down: {'; '.join(turned_down)}" if turned_down else ""
    cells = [name, *(f"{medians[e]:.2f}" for e in ("host", *names, "auto")), best, f"{to_best:.3f}"]
    cells += [f"{first / host_first:.2f}", f"{settled:.1f}", "; ".join(faults) or "right", said, why]
    return f"| {' | '.join(cells)} |", to_best


def main() -> None:
    """Print the table, and how many models are within what is accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--engines", nargs="*", default=ENGINES, help="engines to compare with")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing for each model")
    parser.add_argument("--keep", help="a folder for the cache")
    args = parser.parse_args()
    columns = ["model", "host (ms)", *(f"{e} (ms)" for e in args.engines), "auto (ms)", "best engine"]
    columns += [f"auto / best (at most {ACCEPTED})", "first call / host's", "settled (s)", "results", "chosen", "why"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    ratios: dict[str, float] = {}
    for name in args.models or [*dev_models.names(), *exported.NAMES]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                made = row(name, args.engines, args.seconds, args.keep or folder)
            except XRTError as e:
                made = f"| {name} | {type(e).__name__}: {e} |", float("inf")
        if made is not None:
            print(made[0], flush=True)
            ratios[name] = made[1]
        gc.collect()
    slower = {n: r for n, r in ratios.items() if r > ACCEPTED}
    print(f"\n{len(ratios) - len(slower)} of {len(ratios)} models are within {ACCEPTED} of their best engine")
    if slower:
        print("slower: " + ", ".join(f"{n} {r:.3f}" for n, r in slower.items()))


if __name__ == "__main__":
    main()
