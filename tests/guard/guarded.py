"""Modules under guard for tests, conditions to wait for, and checks that no process or file is left behind."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator
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

QUICK = {"guard_timeout": 60.0, "guard_retry": 0.0}
"""Options that bound the time of a test whatever fails."""


@contextmanager
def registered(*classes: type[Engine]) -> Iterator[None]:
    """Register engines in this process while the body runs."""
    for c in classes:
        engines.register(c)
    try:
        yield
    finally:
        for c in classes:
            engines.unregister(c.name)


@contextmanager
def not_registered(*classes: type[Engine]) -> Iterator[None]:
    """Take engines out of this process while the body runs."""
    for c in classes:
        engines.unregister(c.name)
    try:
        yield
    finally:
        for c in classes:
            engines.register(c)


def chain(rows: int = 4) -> tuple[Graph, np.ndarray, np.ndarray]:
    """A small graph, an input, and the host's result for it."""
    function, _ = functions.chain()
    x = np.random.default_rng(0).uniform(0.5, 1.5, function.params[0].shape).astype(np.float32)
    with XRTModule(function.body, engine="host") as host:
        return function.body, x, host(x)


@contextmanager
def captured_events() -> Iterator[list[Event]]:
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
    """The states that the module's first cluster has had."""
    return [m["state"] for m in module.report().clusters[0]["history"]]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for a condition. Returns whether it came true within a limit that a slow machine does not exceed."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def gone(pids: list[int]) -> bool:
    """Whether all these processes end."""
    return eventually(lambda: not any(map(is_running, pids)))


@contextmanager
def timed_calls_end() -> Iterator[None]:
    """After the body, wait until the time-limited calls that it started have returned, abandoned ones included."""
    before = set(threading.enumerate())
    yield
    new = "xrt-timed-call"
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name == new and t not in before])


def leftovers() -> list[str]:
    """Temporary folders of this process's jobs."""
    return sorted(p.name for p in process_folder().glob("job-*"))


def fresh() -> None:
    """Drop the workers and the verdicts of earlier tests."""
    process_pool().close()
    forget_verdicts()


def module(graph: Any, engine: Any, **options: Any) -> XRTModule:
    """A module under guard."""
    return XRTModule(graph, engine=engine, **{"guard": True, **QUICK, **options})
