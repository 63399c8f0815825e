"""XRT over several processes: the hooks of this package, and what programs ask it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from xrt_core import hookimpl, subscribe
from xrt_core.events import Event, EventLog, process_events

__all__ = ["initialize", "is_first", "process_count", "rank"]
__version__ = "0.1.0"


def rank() -> int:
    """The number of this process, from 0; 0 in a program of one process."""
    return int(os.environ.get("RANK", "0")) if process_count() > 1 else 0


def process_count() -> int:
    """How many processes the program has, as `xrt launch` or torchrun said; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes files and prints for all."""
    return rank() == 0


def initialize() -> None:
    """Join the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, before JAX is used.

    `xrt launch` has done so before the program begins. Where the variables are missing, JAX looks for those of Slurm,
    MPI and Kubernetes, and for the context of a worker of Ray Train. Raises EngineUnavailableError where that fails, or
    comes too late.
    """
    from xrt_distributed import _toolkit

    if not _toolkit.is_joined():
        _toolkit.join()
        subscribe(_end_on_fallback)


def _end_on_fallback(event: Event) -> None:
    """End a process of several whose part of a mesh fell back to its host: the others would wait for it for ever."""
    if event.name == "fallback" and "on a mesh of several processes" in str(event.fields["error"]):
        print(f"xrt: rank {rank()} cannot go on with the others: {event}", file=sys.stderr, flush=True)
        os._exit(70)


@hookimpl
def xrt_commands() -> list[tuple[str, str, str]]:
    """The commands of this package."""
    return [
        ("launch", "xrt_distributed.command:launch", "Run a program in several processes on one mesh."),
        ("fleet", "xrt_distributed.fleet:app", "Collect and show what the jobs of a fleet report."),
        ("rollout", "xrt_distributed.rollout_command:app", "Show how new engines do on a share of the jobs."),
    ]


def _listeners() -> list[Callable[[Event], None]]:
    """Who hears events by the variables: the report of this process, and OpenTelemetry."""
    from xrt_core.engine.contract import WORKER_VARIABLE

    found: list[Callable[[Event], None]] = []
    if WORKER_VARIABLE in os.environ:  # of the guard: its process tells
        return found
    if os.environ.get("XRT_DISTRIBUTED_REPORTS"):
        from xrt_distributed.reports import reporter_from_environment

        if (reporter := reporter_from_environment()) is not None:
            found.append(reporter.hear)
    if os.environ.get("XRT_DISTRIBUTED_OTEL", "0") not in ("", "0"):
        try:
            from xrt_distributed.otel import Instrumentation

            found.append(Instrumentation().hear)
        except ImportError as e:
            reason = f"{e}; pip install xrt-distributed[otel]"
            process_events.emit("telemetry.unavailable", level=logging.WARNING, reason=reason)
    return found


if os.environ.get("XRT_DISTRIBUTED_REPORTS") or os.environ.get("XRT_DISTRIBUTED_OTEL"):
    _heard = _listeners()

    @hookimpl
    def xrt_event(event: Event) -> None:
        """Pass an event on. There is no such hook where nobody asked for one."""
        for hear in _heard:
            hear(event)


@hookimpl
def xrt_write_checkpoint(write: Callable[[], None]) -> bool:
    """Have the first process write, and the others wait until the file is there."""
    if process_count() == 1:
        return False
    from xrt_distributed import _toolkit

    if not _toolkit.is_joined():
        return False
    _toolkit.write_once(write)
    return True


@hookimpl
def xrt_rollout(rollout: Any, events: EventLog) -> Any:
    """Whether a new engine takes part in this job (`xrt_distributed.rollout`)."""
    from xrt_distributed.rollout import decide

    return decide(rollout, events)


@hookimpl
def xrt_open_cache(url: str) -> Any:
    """The shared cache at a URL of fsspec, with key, mode and limits as variables say."""
    from xrt_distributed.shared_cache import open_url

    return open_url(url)


@hookimpl
def xrt_shared_caches() -> list[Any]:
    """The shared cache that XRT_DISTRIBUTED_CACHE names, if it does."""
    if not os.environ.get("XRT_DISTRIBUTED_CACHE", "").strip():  # most programs: what follows is not imported for them
        return []
    from xrt_distributed.shared_cache import from_environment

    return from_environment()
