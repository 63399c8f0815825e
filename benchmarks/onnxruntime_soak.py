"""A long run through xrt-ort: four threads, sizes that differ at every call, sessions that are made and dropped.

    python benchmarks/onnxruntime_soak.py [--minutes 30] [--threads 4] [--rest SECONDS] [--engine auto]

Each thread has sessions of two models, an encoder of sentences (any batch and length) and PP-OCR's recogniser of lines
where rapidocr is installed (any width), which all threads share, and a small one of its own that it makes anew every
500 calls. Every answer is held against the library's own session: the largest difference as a share of the largest
number. Each line is a minute: calls, the worst difference, resident memory of this process and of its children, open
files, threads and children.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import random
import resource
import threading
import time
from typing import Any

import numpy as np
import onnxruntime
import xrt_ort
from varying_shapes import encoder

WORDS = 2000
TOLERANCE = 1e-3
REMADE = 500  # calls of a thread


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference as a share of the largest number; infinity for another shape or type."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return np.inf
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-12))


class Soak:
    """The models, the answers of the library, and what was counted."""

    def __init__(self, rest: float) -> None:
        self.rest = rest
        self.calls, self.worst, self.wrong = 0, 0.0, 0
        self.failures: list[str] = []
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.small = encoder(layers=1, width=32, heads=2, words=WORDS).SerializeToString()
        sources: list[Any] = [encoder(layers=2, width=128, heads=4, words=WORDS).SerializeToString()]
        found = importlib.util.find_spec("rapidocr")
        if found is not None and found.origin:
            sources += [str(p) for p in pathlib.Path(found.origin).parent.glob("models/*rec_small.onnx")]
        self.shared = [self.pair(s) for s in sources]

    def pair(self, source: Any) -> tuple[Any, Any]:
        """A session of the library, with one thread, and one through XRT."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(source, options), xrt_ort.InferenceSession(source)

    def feeds(self, session: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Inputs of random sizes."""
        if session.get_inputs()[0].name != "ids":
            width = 8 * int(rng.integers(8, 60))
            return {session.get_inputs()[0].name: rng.random((1, 3, 48, width), np.float32)}
        shape = (int(rng.integers(1, 9)), int(rng.integers(3, 128)))
        mask = (np.arange(shape[1]) < rng.integers(1, shape[1] + 1, shape[0])[:, None]).astype(np.int64)
        return {"ids": rng.integers(0, WORDS, shape), "mask": mask}

    def work(self, number: int) -> None:
        """Calls until the time is up."""
        rng, choice = np.random.default_rng(number), random.Random(number)
        count, own = 0, self.pair(self.small)
        while not self.done.is_set():
            library, session = choice.choice([*self.shared, own])
            feeds = self.feeds(library, rng)
            try:
                found, wanted = session.run(None, feeds), library.run(None, feeds)
                off = max(_difference(a, b) for a, b in zip(found, wanted, strict=True))
            except Exception as e:
                with self.lock:
                    self.failures.append(f"{type(e).__name__}: {e}"[:300])
                continue
            with self.lock:
                self.calls += 1
                self.worst = max(self.worst, off)
                self.wrong += not off <= TOLERANCE
            count += 1
            if count % REMADE == 0:
                own = self.pair(self.small)
            time.sleep(self.rest)


def _children(pid: str = "self") -> list[str]:
    """Process numbers of the children, theirs included (Linux)."""
    tasks = pathlib.Path(f"/proc/{pid}/task")
    try:
        found = [c for t in tasks.iterdir() for c in (t / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return found + [g for c in found for g in _children(c)]


def _resident(pid: str = "self") -> float:
    """Resident memory of a process, in MB."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    except OSError:
        return 0.0


def main() -> None:
    """Print a line a minute, and at the end what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between the calls of a thread")
    parser.add_argument("--engine", default="auto")
    args = parser.parse_args()
    xrt_ort.configure(engine=args.engine, after=1)
    soak = Soak(args.rest)
    threads = [threading.Thread(target=soak.work, args=(i,)) for i in range(args.threads)]
    for t in threads:
        t.start()
    print("| minute | calls | worst difference | memory, MB | children, MB | files | threads | children |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    start = time.monotonic()
    for minute in range(1, max(1, round(args.minutes)) + 1):
        time.sleep(max(0.0, start + min(minute, args.minutes) * 60 - time.monotonic()))
        children = _children()
        files, tasks = (len(list(pathlib.Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
        print(
            f"| {minute} | {soak.calls} | {soak.worst:.1e} | {_resident():.0f} | {sum(map(_resident, children)):.0f} "
            f"| {files} | {tasks} | {len(children)} |", flush=True
        )  # fmt: skip
    soak.done.set()
    for t in threads:
        t.join()
    print(f"\n{soak.calls} calls, {soak.wrong} answers off by more than {TOLERANCE}, {len(soak.failures)} failures")
    print(*soak.failures[:3], sep="\n")
    for row in xrt_ort.report()[-len(soak.shared) - args.threads :]:
        print(row)
    raise SystemExit(bool(soak.wrong or soak.failures))


if __name__ == "__main__":
    main()
