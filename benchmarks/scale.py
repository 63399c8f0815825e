"""What docs/scale.md extrapolates from: parts of a large job, each measured alone on one machine.

    python benchmarks/scale.py [--seconds S]

- a shared cache: the time to compile an executable, against fetching, checking and loading it from a store;
- the launcher: how many heartbeats and lines it takes in a second;
- the fleet: bytes of a report, and how many reports `xrt fleet show` sums in a second;
- the draw of a rollout by calls.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import xrt_core as xrt
from tests.training import peers

KEY = b"k" * 32
HOSTS, RANKS = 100, 8
PLACE = "0.5 train.py:14 (step), in JAX"


def rate(function: Callable[[], Any], seconds: float, each: int = 1) -> float:
    """How often something is done in a second; each: how often by a call."""
    function()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        function()
        count += each
    return count / (time.perf_counter() - start)


def show_cache(seconds: float) -> None:
    """Compile once, and load from a store, with nothing on the own disk: single runs."""
    from xrt_distributed.shared_cache import SharedCache

    from xrt_core.cache import store

    model = peers.bert(4, 256, 4, 64, 8, 8192)
    batch = model.batch(0)
    graph = xrt.trace(model.xrt(model.parameters), *batch.values())
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedCache(f"file://{folder}/shared", KEY)
        found = {}
        for which in ("compile", "fetch"):
            store.forget_all()
            with xrt.XRTModule(graph, engine="xla", guard=False, cache=f"file://{folder}/shared",
                               cache_dir=f"{folder}/{which}") as m:  # fmt: skip
                start = time.perf_counter()
                m.run(batch)
                found[which] = time.perf_counter() - start
                origins = sorted({e.name for e in m.events.recent("cache.")})
            shared.flush()
            time.sleep(1)
            print(f"{which}: {found[which]:.2f} s to the first result ({', '.join(origins)})")
        sizes = [p.stat().st_size for p in pathlib.Path(folder, "shared").rglob("*") if p.is_file()]
        print(f"entries: {len(sizes)}, {sum(sizes) / 2**20:.2f} MiB")
        content = np.random.default_rng(0).bytes(1 << 20)
        shared.offer("ab" * 32, content)
        shared.flush()
        print(f"1 MiB fetched and checked: {rate(lambda: shared.fetch('ab' * 32), seconds):.0f} a second")


def show_launcher(seconds: float) -> None:
    """Frames of agents, which the launcher reads one after the other for all hosts."""
    from msgspec import json as fast
    from xrt_distributed import __version__
    from xrt_distributed.agent import Order
    from xrt_distributed.hosts import Host

    host = Host("here", ["sh", "-c", "read x; read x"], "python", lambda rank, line: None)
    host.begin(Order(("x",), "/", {n: {} for n in range(8)}, {}, {}))
    beat, line = fast.encode((3, "beat", PLACE)), fast.encode((3, "line", "step 100: loss 2.345, 123.4 ms"))
    for name, frame in (("heartbeats", beat), ("lines", line)):
        count = rate(lambda f=frame: host._hear(*fast.decode(f)), seconds)
        print(f"{name} taken by the launcher: {count:.0f} a second")
    host.join()
    hosts, start, before = [], time.perf_counter(), resident()
    with tempfile.TemporaryDirectory() as folder:
        agent = pathlib.Path(folder, "agent")
        beats = "\\n".join(f'[{n},"beat","{PLACE}"]' for n in range(RANKS))
        agent.write_text(
            f"#!/bin/sh\necho '[-1,\"hello\",1,\"{__version__}\"]'\nread order\n"
            f"while printf '{beats}\\n'; do sleep 0.5; done & cat > /dev/null\n"
            "kill $!\n"
        )
        agent.chmod(0o755)
        try:
            for n in range(HOSTS):
                hosts.append(Host(f"h{n}", [str(agent)], "python", lambda rank, line: None))
            for h in hosts:
                if why := h.connected():
                    raise SystemExit(why)
            took = time.perf_counter() - start
            for h in hosts:
                h.begin(Order(("x",), "/", {k: {} for k in range(RANKS)}, {}, {}))
            time.sleep(1)
            used, begun = time.process_time(), time.perf_counter()
            time.sleep(max(seconds, 5.0))
            share = (time.process_time() - used) / (time.perf_counter() - begun)
            grown = resident() - before
            heard = sum(p.alive for h in hosts for p in h.processes.values())
        finally:
            for h in hosts:
                h.release()
            for h in hosts:
                h.join()
    print(f"{HOSTS} hosts of {RANKS} ranks with stand-in agents: {took:.2f} s to start, {heard} ranks heard, "
          f"{share:.1%} of a core, {grown / HOSTS / 2**10:.0f} KiB each")  # fmt: skip


def resident() -> int:
    """Bytes of resident memory of this process."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def show_fleet(seconds: float) -> None:
    """Reports as a job writes them."""
    from xrt_distributed.fleet import read_fleet
    from xrt_distributed.reports import Reporter

    from xrt_core.events import EventLog

    with tempfile.TemporaryDirectory() as folder:
        log = EventLog()
        for _ in range(200):
            reporter = Reporter(folder)
            for k in range(4):
                reporter.hear(log.emit("specialised", model=f"model {k}"))
                reporter.hear(log.emit("guard.live", chosen="xla", timings={"host": 0.3, "xla": 0.1}))
                reporter.hear(log.emit("cache.hit"))
            reporter.write()
        size = sum(p.stat().st_size for p in pathlib.Path(folder).glob("*.jsonl")) / 200
        print(f"a report: {size:.0f} bytes; summed by `xrt fleet show`: "
              f"{rate(lambda: read_fleet(folder), seconds, 200):.0f} a second")  # fmt: skip


def show_draw(seconds: float) -> None:
    """What a rollout asks at each call."""
    from xrt_distributed.jobs import falls_on

    print(f"draws of a rollout: {rate(lambda: falls_on(0.05, 'job', 'engine==1', 7), seconds):.0f} a second")


def main() -> None:
    """See the module."""
    os.environ.setdefault("XRT_DISTRIBUTED_CACHE_KEY", KEY.decode())
    parser = argparse.ArgumentParser(description="parts of a large job")
    parser.add_argument("--seconds", type=float, default=2.0)
    a = parser.parse_args()
    for show in (show_cache, show_launcher, show_fleet, show_draw):
        show(a.seconds)


if __name__ == "__main__":
    main()
