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
from xrt_core.errors import describe
from xrt_core.events import logger

_lock = threading.RLock()  # a signal's handler may compute as well
_wanted: dict[object, int] = {}
"""The most threads that each body which runs now allows."""
_libraries: list[Any] = []
"""The BLAS libraries, as `threadpoolctl` knows them, once they were looked for: reading them takes 0.4 to 10 ms."""
_limited: dict[int, tuple[int, int]] = {}
"""The libraries whose threads were limited, by their place in `_libraries`: how many they had, and have now."""


@contextlib.contextmanager
def fewer_blas_threads(most: int = 0) -> Iterator[None]:
    """In the body, matrix products of this process use at most so many threads, on whichever thread they are called.

    most: 0 for half of the processors. With 1, no thread of the BLAS spins after the last product, as OpenBLAS's do for
    some 80 ms. Bodies may overlap: the fewest count, and what was set is set back after the last one, unless somebody
    else set it meanwhile.
    """
    body = object()
    try:
        with _lock:
            _wanted[body] = most or _half()
            _limit(min(_wanted.values()))
        yield
    finally:  # also where a signal ends the body before it began
        with _lock:
            _wanted.pop(body, None)
            if _wanted:
                _limit(min(_wanted.values()))
            else:
                _restore()


def fewer_on_busy_machine() -> contextlib.AbstractContextManager[None]:
    """`fewer_blas_threads` where more wants to run on this machine than it has processors, else nothing."""
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)
    return fewer_blas_threads() if busy else contextlib.nullcontext()


def use_fewer_blas_threads() -> None:
    """At most half of the processors for good, for a process of XRT's own."""
    with _lock:
        _wanted[object()] = _half()
        _limit(min(_wanted.values()))


def _half() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // 2)


def _limit(most: int) -> None:
    try:
        if not _libraries:
            from threadpoolctl import ThreadpoolController  # 10 ms

            _libraries.extend(x for x in ThreadpoolController().lib_controllers if x.user_api == "blas")
        for i, library in enumerate(_libraries):
            now = library.get_num_threads() or 0
            before, ours = _limited.get(i, (now, now))
            target = min(before, most)
            if now == ours and target != now:
                _set(library, target)
                _limited[i] = before, target
    except Exception as e:  # it reads what other libraries have loaded; slower is better than not at all
        logger.debug("the threads of NumPy's BLAS stay as they are: %s", describe(e))


def _set(library: Any, count: int) -> None:
    """Set the threads of a library, on whichever thread. From 3.7 on, threadpoolctl lets the first thread that sets
    OpenBLAS's, and silently no other, until that one is cleared; here a lock is held. The next may be anybody again."""
    clear = getattr(library, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)
    library.set_num_threads(count)
    if clear is not None:
        clear()


def _restore() -> None:
    for i, (before, ours) in _limited.items():
        with contextlib.suppress(Exception):
            if _libraries[i].get_num_threads() == ours:
                _set(_libraries[i], before)
    _limited.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _wanted.clear()
    _restore()


in_forked_process(_after_fork)
