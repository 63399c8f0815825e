"""Signals that a program handles in Python, held back while a training step may have half happened."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_HELD: Final = tuple(
    getattr(signal, n)
    for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGBREAK")
    if hasattr(signal, n)
)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Run a block as a whole: Python's signal handlers, which may raise (Ctrl-C), are called when it has ended.

    They run in the main thread between any two operations; elsewhere nothing is to be done. Only signals with a handler
    in Python are held. Each is called once, however often its signal came. Costs about 25 us.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, FrameType | None] = {}
    before = {}
    try:
        for number in _HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, came.__setitem__)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.ExitStack() as calls:  # all of them, even if one raises
            for number, frame in came.items():
                calls.callback(before[number], number, frame)
