"""Buckets: requests of random sizes to an encoder through an engine of static shapes, beside one ONNX Runtime session.

    python benchmarks/buckets.py [ENGINE [BUCKETS [REQUESTS]]]   # xla auto 60; BUCKETS as the option's text

The model is the MiniLM encoder of `tests/conformance/dev_models.py`. Batch sizes are drawn from 1 to 8, lengths from 3
to 256. The first round makes the buckets; the steady times are the best of later rounds, the two runtimes in turns.
"""

from __future__ import annotations

import pathlib
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
    whole = sum(f[0].whole for f in found if f is not None)
    return 1 - sum(r["input_ids"].size for r, f in zip(given, found, strict=True) if f is not None) / max(1, whole)


def main() -> None:
    """Print the figures."""
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


if __name__ == "__main__":
    main()
