"""Turns at the interpreter: how long a thread waits for it while another one of XRT's computes in Python.

A thread that wants the interpreter's lock back waits for the switch interval, 5 ms by default, where another thread
has it. Each operator of NumPy's or torch's that takes a while gives the lock away: beside a compilation in Python, a
call of 150 such operators, 0.03 s by itself, took 0.7.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

from xrt_core.engine.forking import in_forked_process

_INTERVAL: Final = 2e-4
"""Seconds of a turn. With 5 ms the slowest call of a model beside its compilation took 18 to 20 times its own time,
with 1 ms 13 to 14, with this 8 to 10, and with a quarter of it 9."""
_lock = threading.RLock()  # a signal's handler may compute as well
_bodies: dict[object, float] = {}
"""The interval of each body."""
_before = 0.0
"""The interval that was found, while there are bodies."""
_set = 0.0
"""The one that is theirs, or was found to be shorter."""


@contextlib.contextmanager
def shorter_turns(interval: float = _INTERVAL) -> Iterator[None]:
    """In the body, threads wait less for each other's turns at the interpreter (`sys.setswitchinterval`).

    interval: seconds of a turn. Bodies may overlap; the shortest of their intervals holds. What was set is set back
    after the last one, unless somebody else set it meanwhile; a shorter interval than theirs is left as it is.
    """
    global _before, _set
    body = object()
    try:
        with _lock:
            if not _bodies:
                _before = _set = sys.getswitchinterval()
            _bodies[body] = interval
            _apply()
        yield
    finally:  # also where a signal ends the body before it began
        with _lock:
            _bodies.pop(body, None)
            _apply()


def usual_interval() -> float:
    """Seconds of the switch interval outside of such bodies."""
    with _lock:  # the last body may end while another thread waits
        now = sys.getswitchinterval()
        return _before if _bodies and _is_ours(now) else now


def _apply() -> None:
    """Set the interval that the bodies want, unless somebody else has set it."""
    global _set
    now = sys.getswitchinterval()
    if _is_ours(now):
        _set = min((_before, *_bodies.values()))
        if _set != now:
            sys.setswitchinterval(_set + 5e-7)  # it is kept in whole microseconds, rounded down


def _is_ours(interval: float) -> bool:
    return abs(interval - _set) < 5e-6


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    sys.setswitchinterval(usual_interval())
    _bodies.clear()


in_forked_process(_after_fork)
