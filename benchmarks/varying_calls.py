"""Calls of shapes that vary, beside one session of ONNX Runtime: images, threads, and what a hot call costs.

    python benchmarks/varying_calls.py [ocr|threads|hot ...]

ocr: the detector and the recogniser of PP-OCR (`tests/conformance/dev_models.py`) over 40 sizes of images, each once to
both sides in turn, with shapes that are discovered and declared; then the first call of sizes that were not seen. What
both sides import is imported before. threads: 1, 2 and 4 threads that call an encoder with random batches and lengths,
in interleaved slices of time. hot: microseconds of a call of a small model by a symbolic plan, and by an exact one. All
through the engine `onnxruntime` with `guard=False`.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from rounds import interleaved
from varying_shapes import encoder, requests

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "conformance"))

import dev_models

import xrt_core as xrt

PLAIN: dict[str, Any] = {"engine": "onnxruntime", "guard": False, "cache": "off"}
SLICE, SLICES = 4.0, 3  # seconds of calls of one side, and how many of them


def _session(model: Any) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(model, settings)


def _images(name: str, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {
        "ppocr_det": lambda: (int(rng.integers(5, 16)) * 32, int(rng.integers(5, 16)) * 32),
        "ppocr_rec": lambda: (48, int(rng.integers(60, 640))),
    }
    seen: dict[tuple[int, int], None] = {}
    while len(seen) < count:
        seen[sizes[name]()] = None
    return [rng.standard_normal((1, 3, *s)).astype(np.float32) for s in seen]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def ocr() -> None:
    """Print total time, the second pass, and the first call of unseen sizes, as ratios to one session."""
    _imports()
    for name, declared in itertools.product(("ppocr_det", "ppocr_rec"), (False, True)):
        path = str(dev_models.path(name))
        images = _images(name, 50)
        key, *_ = (i.name for i in _session(path).get_inputs())
        shapes = {key: (1, 3, "h" if name == "ppocr_det" else 48, "w")}
        more = {"shapes": shapes} if declared else {}
        theirs, session = _timed(lambda path=path: _session(path))
        ours, module = _timed(lambda path=path, more=more: xrt.XRTModule(path, **PLAIN, **more))

        def both(x: np.ndarray, first: bool, m: Any = module, s: Any = session, key: str = key) -> tuple[float, float]:
            calls = [lambda: m.run({key: x}), lambda: s.run(None, {key: x})]
            found: list[Any] = [None, None]
            for k in (0, 1) if first else (1, 0):
                found[k] = _timed(calls[k])
            got, want = next(iter(found[0][1].values())), found[1][1][0]
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * float(np.abs(want).max()))
            return found[0][0], found[1][0]

        first = [both(x, i % 2 == 0) for i, x in enumerate(images[:40])]
        again = [both(x, i % 2 == 0) for i, x in enumerate(images[:40])]
        new = [both(x, i % 2 == 0) for i, x in enumerate(images[40:])]
        total = [sum(t) for t in zip(*first, strict=True)]
        print(
            f"{name}, shapes {'declared' if declared else 'discovered'}: 40 sizes "
            f"{(total[0] + ours) / (total[1] + theirs):.2f} of one session, second pass "
            f"{statistics.median(a / b for a, b in again):.2f}, first call of an unseen size "
            f"{statistics.median(a / b for a, b in new):.2f} (medians); "
            f"{sum(e.name == 'compile' for e in module.events)} compilations"
        )


def _imports() -> None:
    """Let both sides import what they need: a process does that once, and how long it takes is told elsewhere."""
    model = encoder(1).SerializeToString()
    session, module = _session(model), xrt.XRTModule(model, **PLAIN)
    for r in requests(2):
        session.run(None, r)
        module.run(r)


def threads() -> None:
    """Print the throughput of XRT as a share of the session's, for 1, 2 and 4 threads."""
    model = encoder(2).SerializeToString()
    session, module = _session(model), xrt.XRTModule(model, **PLAIN)
    work = [r for r in requests(60) if r["ids"].size < 512]
    for r in work:
        module.run(r)
    calls = [lambda r: module.run(r), lambda r: session.run(None, r)]

    def rate(call: Callable[[Any], Any], count: int) -> float:
        done, until = [0] * count, time.perf_counter() + SLICE

        def loop(k: int) -> None:
            while time.perf_counter() < until:
                call(work[(done[k] * 7 + k) % len(work)])
                done[k] += 1

        running = [threading.Thread(target=loop, args=(k,)) for k in range(count)]
        start = time.perf_counter()
        for t in running:
            t.start()
        for t in running:
            t.join()
        return sum(done) / (time.perf_counter() - start)

    for count in (1, 2, 4):
        rates = [[rate(c, count) for c in (calls if k % 2 else calls[::-1])] for k in range(SLICES)]
        pairs = [r if k % 2 else r[::-1] for k, r in enumerate(rates)]
        print(f"{count} threads: {statistics.median(a / b for a, b in pairs):.2f} of the session's throughput")


def hot() -> None:
    """Print what a call costs by a symbolic and by an exact plan of the same model."""
    from onnx import TensorProto, helper

    names = ("batch", "n")
    ports = [helper.make_tensor_value_info(p, TensorProto.FLOAT, names) for p in "xyz"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "y"], ["z"])], "add", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    x = np.ones((4, 8), np.float32)
    exact, symbolic = xrt.XRTModule(model, prune=False, **PLAIN), xrt.XRTModule(model, prune=False, **PLAIN)
    for n in (8, 9, 10):
        symbolic(np.ones((4, n), np.float32), np.ones((4, n), np.float32))
    exact(x, x)
    assert symbolic.explain({"x": x, "y": x}).symbols
    assert not exact.explain({"x": x, "y": x}).symbols

    def many(m: Any) -> Callable[[], None]:
        def call() -> None:
            for _ in range(1000):
                m(x, x)

        return call

    times = interleaved([many(exact), many(symbolic)], rounds=15, warm=2, rest=0.01)
    a, b = (min(t.wall) * 1e3 for t in times)
    print(f"hot call: {a:.2f} us by an exact plan, {b:.2f} us by a symbolic one: {b - a:+.2f} us")


if __name__ == "__main__":
    for what in sys.argv[1:] or ("hot", "ocr", "threads"):
        {"ocr": ocr, "threads": threads, "hot": hot}[what]()
