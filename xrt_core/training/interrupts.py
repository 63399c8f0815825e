"""Signals that a program handles in Python, held back while a training step may have half happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

try:  # the functions that `signal` wraps; it looks each number and handler up among its enumerations, ten times as slow
    import _signal as _functions  # type: ignore[import-not-found]
except ImportError:
    _functions = signal
_handler_of: Final[Callable[[int], Any]] = _functions.getsignal
_set_handler: Final[Callable[[int, Any], Any]] = _functions.signal

_HELD: Final = tuple(
    int(getattr(signal, n))
    for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGBREAK")
    if hasattr(signal, n)
)


class held_back:
    """Run a block as a whole: Python's signal handlers, which may raise (Ctrl-C), are called when it has ended.

    They run in the main thread between any two operations; elsewhere nothing is to be done. Only signals with a handler
    in Python are held. Each is called once, however often its signal came. Costs about 2 us.
    """

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._came: dict[int, FrameType | None] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _HELD:
                handler = _handler_of(number)
                if callable(handler):
                    self._before[number] = handler
                    _set_handler(number, self._came.__setitem__)
        except BaseException:  # of a handler that is not held yet
            self._release()
            raise

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        """Give the signals back, then call the handlers of those that came, each of them even if one raises."""
        before, left = self._before, list(self._before)
        try:
            while left:
                _set_handler(left[-1], before[left[-1]])
                left.pop()
        finally:
            if left:  # one that was given back raised
                self._release()
            self._call()

    def _call(self) -> None:
        came = self._came
        if came:
            number, frame = came.popitem()
            try:
                self._before[number](number, frame)
            finally:
                self._call()
