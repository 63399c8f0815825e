"""BLAS threads: how many NumPy's matrix products use while something else of XRT's needs processors too.

The threads of a BLAS wait for each other by spinning. Where more of them spin than there are processors, a product
waits for whole time slices of the system: calls that take 50 ms beside an idle worker took 1 to 8 s beside a busy one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from xrt_core.engine.forking import in_forked_process

_lock = threading.Lock()
_users = 0
_before: list[tuple[Any, int]] = []
"""The libraries whose threads were limited, and how many they had."""


@contextlib.contextmanager
def fewer_blas_threads() -> Iterator[None]:
    """In the body, matrix products of this process use at most half of its processors, on whichever thread.

    Bodies may overlap: the first one sets it, the last one sets back what is still as it was set. For threads that no
    signal interrupts.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _limit()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore()


def use_fewer_blas_threads() -> None:
    """The same for good, for a process of XRT's own."""
    with _lock:
        _limit()


def _half() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // 2)


def _limit() -> None:
    from threadpoolctl import ThreadpoolController  # 10 ms

    most = _half()
    for library in ThreadpoolController().lib_controllers:
        if library.user_api == "blas" and (count := library.get_num_threads() or 0) > most:
            _before.append((library, count))
            library.set_num_threads(most)


def _restore() -> None:
    most = _half()
    for library, count in _before:
        if library.get_num_threads() == most:
            library.set_num_threads(count)
    _before.clear()


def _after_fork() -> None:
    global _lock, _users
    _lock, _users = threading.Lock(), 0
    _restore()


in_forked_process(_after_fork)
