"""Buckets: requests of random sizes to an encoder through an engine of static shapes, beside one ONNX Runtime session.

    python benchmarks/buckets.py [ENGINE [BUCKETS [REQUESTS]]]   # xla auto 60; BUCKETS as the option's text

The model is the MiniLM encoder of `tests/conformance/dev_models.py`. Batch sizes are drawn from 1 to 8, lengths from 3
to 256. The first round makes the buckets; the steady times are the best of later rounds, the two runtimes in turns.
ONNX Runtime's threads spin after a run and take a processor from the side that comes next, so that each side is also
timed in processes of its own, in turns.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import onnxruntime

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "conformance"))

import dev_models

from xrt_core import XRTModule
from xrt_core.options.kinds import BUCKETS

ROUNDS = 2
"""Steady rounds; of each request the fastest counts."""


def requests(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Inputs of random batch and length, a part of each row masked."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        b, s = int(rng.integers(1, 9)), int(rng.integers(3, 257))
        mask = (np.arange(s) < rng.integers(1, s + 1, (b, 1))).astype(np.int64)
        ids = rng.integers(1000, 30000, (b, s))
        found.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
    return found


def padding(caller: Any, given: list[dict[str, np.ndarray]]) -> float:
    """The share of padding of these requests by the buckets that are there."""
    buckets = caller.buckets
    found = [buckets.known([r[n] for n in caller.names]) for r in given] if buckets is not None else []
    whole = sum(f.bucket.spent(f.sizes) for f in found if f is not None and f.bucket is not None)
    return 1 - sum(r["input_ids"].size for r, f in zip(given, found, strict=True) if f is not None) / max(1, whole)


def alone(side: str, engine: str, choice: str, count: int) -> float:
    """Seconds for all requests, each by the fastest of the steady rounds of one side, with nothing else running."""
    path, given = str(dev_models.path("minilm_int8")), requests(count)
    run: Any
    if side == "onnxruntime":
        session = onnxruntime.InferenceSession(path)
        run = lambda r: session.run(None, r)  # noqa: E731
    else:
        run = XRTModule(path, engine=engine, buckets=BUCKETS.parse(choice), guard=False, cache="off").run
    times: list[list[float]] = []
    for _ in range(ROUNDS + 2):
        times.append([])
        for r in given:
            start = time.perf_counter()
            run(r)
            times[-1].append(time.perf_counter() - start)
    return float(np.array(times[2:]).min(0).sum())


def apart(*arguments: str) -> None:
    """Print the steady times of both sides in processes of their own, in turns."""
    found: dict[str, list[float]] = {"onnxruntime": [], "xrt": []}
    for _ in range(3):
        for side, seconds in found.items():
            command = [sys.executable, __file__, "--side", side, *arguments]
            seconds.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    ours, theirs = (statistics.median(found[s]) for s in ("xrt", "onnxruntime"))
    each = ", ".join(f"{a / b:.2f}" for a, b in zip(found["xrt"], found["onnxruntime"], strict=True))
    print(f"each in its own process: {ours * 1e3:.0f} ms, {theirs * 1e3:.0f} ms: ratio {ours / theirs:.2f} ({each})")


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["--side"]:
        side, engine, choice, count = sys.argv[2:6]
        print(json.dumps(alone(side, engine, choice, int(count))))
        return
    engine, choice, count = [*sys.argv[1:], "xla", "auto", "60"][len(sys.argv) - 1 :][:3] if len(sys.argv) < 4 else (
        sys.argv[1:4]
    )  # fmt: skip
    path = str(dev_models.path("minilm_int8"))
    session = onnxruntime.InferenceSession(path)
    module = XRTModule(path, engine=engine, buckets=BUCKETS.parse(choice), guard=False, cache="off")
    given = requests(int(count))
    worst = 0.0
    start = time.perf_counter()
    for r in given:
        (want,) = session.run(None, r)
        (got,) = module.run(r).values()
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    first = time.perf_counter() - start
    caller = module._source.caller
    assert caller is not None
    made = caller._buckets.buckets if caller._buckets is not None else []
    print(f"first round {first:.1f} s; {len(made)} buckets, {len(caller.plans.plans())} exact; error {worst:.1e}")
    for b in made:
        print(f"  {b}")
    print(f"padding of these requests: {padding(caller, given):.0%}")
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        for r in given:
            t0 = time.perf_counter()
            session.run(None, r)
            t1 = time.perf_counter()
            module.run(r)
            theirs.append(t1 - t0)
            ours.append(time.perf_counter() - t1)
    a, b = np.array(ours).reshape(ROUNDS, -1).min(0), np.array(theirs).reshape(ROUNDS, -1).min(0)
    print(f"steady: {a.sum() * 1e3:.0f} ms, ONNX Runtime {b.sum() * 1e3:.0f} ms: ratio {a.sum() / b.sum():.2f}")
    print(f"{len(made)} buckets at the end; padding of these requests: {padding(caller, given):.0%}")
    print(module.explain(given[-1]).padding)
    module.close()
    apart(engine, choice, count)


if __name__ == "__main__":
    main()
