"""XRT over several processes: the hooks of this package, and what programs ask it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from xrt_core import hookimpl
from xrt_core.events import Event

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
    MPI and Kubernetes. Raises EngineUnavailableError where that fails, or comes too late.
    """
    from xrt_distributed import _toolkit

    _toolkit.join()


@hookimpl
def xrt_commands() -> list[tuple[str, Any]]:
    """The command `xrt launch`."""
    from xrt_distributed.command import launch

    return [("launch", launch)]


@hookimpl
def xrt_event(event: Event) -> None:
    """End a process of several whose part of a mesh fell back to its host: the others would wait for it for ever."""
    if event.name == "fallback" and process_count() > 1:
        from xrt_distributed import _toolkit

        if _toolkit.is_joined():
            print(f"xrt: rank {rank()} cannot go on with the others: {event}", file=sys.stderr, flush=True)
            os._exit(70)


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
def xrt_shared_caches() -> list[Any]:
    """The shared cache that XRT_DISTRIBUTED_CACHE names, if it does."""
    from xrt_distributed.shared_cache import from_environment

    return from_environment()
