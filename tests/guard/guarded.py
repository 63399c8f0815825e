"""Modules under guard for tests, and what watches that nothing is left behind."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from xrt_core.engine import engines
from xrt_core.engine.contract import Engine
from xrt_core.events import Event, FallbackEvent, subscribe
from xrt_core.guard.ipc import process_folder
from xrt_core.guard.verdict_cache import forget_all as forget_verdicts
from xrt_core.guard.worker_pool import process_pool
from xrt_core.ir.graph import Graph
from xrt_core.module import XRTModule
from xrt_core.testing import functions

QUICK = {"guard_timeout": 20.0, "guard_retry": 0.0}
"""Options under which a test ends soon, whatever goes wrong."""


@contextmanager
def registered(*classes: type[Engine]) -> Iterator[None]:
    """Engines of this process, for a while."""
    for c in classes:
        engines.register(c)
    try:
        yield
    finally:
        for c in classes:
            engines.unregister(c.name)


def chain(rows: int = 4) -> tuple[Graph, np.ndarray, np.ndarray]:
    """A small graph, an input, and the host's result for it."""
    function, _ = functions.chain()
    x = np.random.default_rng(0).uniform(0.5, 1.5, function.params[0].shape).astype(np.float32)
    with XRTModule(function.body, engine="host") as host:
        return function.body, x, host(x)


@contextmanager
def heard() -> Iterator[list[Event]]:
    """The guard's events while the body runs."""
    found: list[Event] = []
    undo = subscribe(lambda e: found.append(e) if e.name.startswith("guard.") or isinstance(e, FallbackEvent) else None)
    try:
        yield found
    finally:
        undo()


def fallbacks(events: list[Event]) -> list[tuple[str, str]]:
    """Stage and kind of every `FallbackEvent`."""
    return [(e.stage, e.kind) for e in events if isinstance(e, FallbackEvent)]


def states(module: XRTModule) -> list[str]:
    """The states that the module's first cluster went through."""
    return [m["state"] for m in module.report().clusters[0]["history"]]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def leftovers() -> list[str]:
    """Temporary folders of this process's jobs."""
    return sorted(p.name for p in process_folder().glob("job-*"))


def fresh() -> None:
    """No worker and no verdict of an earlier test."""
    process_pool().close()
    forget_verdicts()


def module(graph: Any, engine: Any, **options: Any) -> XRTModule:
    """A module under guard."""
    return XRTModule(graph, engine=engine, **{"guard": True, **QUICK, **options})
