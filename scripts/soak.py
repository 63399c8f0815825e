"""Runs modules on every installed engine while everything around them goes wrong, and says whether anything grew.

    python scripts/soak.py [--minutes 30] [--seed 0] [--threads 4]

Threads make modules (guarded, isolated, automatic, raw), call them on random inputs, and drop them. Meanwhile worker
processes are killed, and the cache is deleted, filled with garbage, made read-only, or put on a full disk (`/dev/full`
in the place of its folder). Every result is compared with the host's. Once a minute memory, open files, threads, child
processes and files in shared memory are noted; the notes of the first fifth are warm-up. Exit status 1 where a result
differed, a call raised, or a figure of the last fifth is beyond that of the second fifth (memory: by 15 % and 64 MB).
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import pathlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.engine import engines
from xrt_core.guard.worker_pool import process_pool

PAUSE = 2.0
"""Seconds between two misfortunes."""


class Net(xrt.Graph):
    """A product, an activation, an index and a sum."""

    def __init__(self, width: int) -> None:
        generator = np.random.default_rng(width)
        self.w = xrt.Variable(generator.normal(size=(width, width)).astype(np.float32))

    def build(self, x: Any) -> Any:
        """Softmax(tanh(x w)) w."""
        return xrt.ops.Softmax(xrt.ops.Tanh(x @ self.w)) @ self.w


def children() -> list[int]:
    """The child processes of this one that are no zombies."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(stat.parent.name))
    return found


def figures() -> dict[str, float]:
    """What must not grow. memory: MB of private memory."""
    gc.collect()
    resident, shared = (int(n) for n in pathlib.Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "memory (MB)": (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(children()),
        "shared memory": len(os.listdir("/dev/shm")),
        "temporary folders": len(list(pathlib.Path(tempfile.gettempdir()).glob(f"xrt-guard-{os.getpid()}-*/*"))),
    }


def replace(folder: pathlib.Path) -> None:
    """Put a link to a full disk in the place of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.symlink_to("/dev/full")


class Soak:
    """The threads, and what they found."""

    def __init__(self, seed: int, cache: pathlib.Path) -> None:
        self.cache = cache
        self.seed = seed
        self.calls: collections.Counter[str] = collections.Counter()
        self.misfortunes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.over = threading.Event()

    def call_modules(self, number: int) -> None:
        """Make modules, call them, drop them, until it is over."""
        choose = random.Random(f"{self.seed} {number}")
        generator = np.random.default_rng([self.seed, number])
        # not one that is there to learn from: the toy on its simulator takes seconds for a call
        names = [n for n in engines.names() if engines.get(n).automatic and engines.status(n).available]
        while not self.over.is_set():
            engine = choose.choice([*names, "auto"])
            guard = choose.choice([None, None, True, "isolated", False]) if engine != "auto" else None
            width, rows = choose.choice([8, 33, 64]), choose.choice([1, 4, 7])
            what = f"{engine} guard={guard} {rows}x{width}"
            try:
                host = xrt.XRTModule(Net(width), engine="host")
                with xrt.XRTModule(Net(width), engine=engine, guard=guard, prune=False) as m:
                    for k in range(choose.choice([3, 50, 400])):
                        x = generator.normal(size=(rows, width)).astype(np.float32)
                        got, want = np.asarray(m(x)), np.asarray(host(x))
                        if not np.allclose(got, want, rtol=1e-4, atol=1e-5):
                            self.wrong.append(f"{what}: call {k} is off by {np.abs(got - want).max()}")
                        self.calls[engine] += 1
                        if k == 1:
                            m.wait(choose.choice([0, 2, 10]))
                        if self.over.is_set():
                            break
            except BaseException as e:
                self.wrong.append(f"{what}: {type(e).__name__}: {e}")
                self.over.wait(1)

    def misfortune(self, choose: random.Random) -> None:
        """Let one thing go wrong."""
        folder = self.cache
        deeds: dict[str, Callable[[], object]] = {
            "a worker is killed": lambda: [os.kill(p, signal.SIGKILL) for p in process_pool().pids()],
            "any child is killed": lambda: [os.kill(p, signal.SIGKILL) for p in children()[:1]],
            "the cache is deleted": lambda: shutil.rmtree(folder, ignore_errors=True),
            "the cache is garbage": lambda: [
                p.write_bytes(os.urandom(choose.randrange(5000))) for p in folder.rglob("*") if p.is_file()
            ],
            "the cache is read-only": lambda: folder.chmod(0o500),
            "the cache is writable": lambda: folder.chmod(0o700),
            "the cache is no folder": lambda: replace(folder),
            "the cache is a folder": lambda: folder.unlink(),
        }
        name = choose.choice(sorted(deeds))
        try:
            deeds[name]()
            self.misfortunes[name] += 1
        except OSError:  # it was not there
            pass


def main() -> int:
    """Run, print the notes and the verdict. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    given = parser.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(prefix="xrt-soak-"))
    os.environ["XRT_CACHE_DIR"] = str(root / "cache")
    soak = Soak(given.seed, root / "cache")
    threads = [threading.Thread(target=soak.call_modules, args=(k,), daemon=True) for k in range(given.threads)]
    for t in threads:
        t.start()
    notes: list[dict[str, float]] = []
    choose = random.Random(given.seed)
    end, note_at = time.monotonic() + 60 * given.minutes, 0.0
    while time.monotonic() < end:
        time.sleep(PAUSE)
        soak.misfortune(choose)
        if time.monotonic() >= note_at:
            note_at = time.monotonic() + min(60.0, 3 * given.minutes)
            notes.append(figures())
            print({k: round(v) for k, v in notes[-1].items()}, f"{sum(soak.calls.values())} calls", flush=True)
    soak.over.set()
    for t in threads:
        t.join(120)
    stuck = [t.name for t in threads if t.is_alive()]
    fifth = max(len(notes) // 5, 1)
    grown = []
    for name in notes[-1]:
        early = statistics.median(n[name] for n in notes[fifth : 2 * fifth] or notes)
        late = statistics.median(n[name] for n in notes[-fifth:])
        room = max(0.15 * early, 64) if name == "memory (MB)" else max(0.5 * early, 8)
        if late > early + room:
            grown.append(f"{name}: {early:.0f} -> {late:.0f}")
    print(f"calls: {dict(soak.calls)}\nmisfortunes: {dict(soak.misfortunes)}")
    print(*soak.wrong[:20], sep="\n")
    print(f"{len(soak.wrong)} wrong results or errors; stuck threads: {stuck}; grown: {grown or 'nothing'}")
    shutil.rmtree(root, ignore_errors=True)
    return 1 if soak.wrong or stuck or grown else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
