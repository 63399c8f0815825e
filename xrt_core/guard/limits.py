"""Calls with a time limit inside this process: what does not come back in time is left to a daemon thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TooLong(Exception):
    """A call did not come back within its limit. It goes on in its thread; nobody waits for it any more."""


class Watched(Generic[T]):
    """Runs calls in daemon threads of its own and waits for each at most `seconds`. Safe from many threads.

    A thread that came back is used again; one that hangs is left. Costs about 20 us a call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._idle: queue.SimpleQueue[_Runner] = queue.SimpleQueue()

    def __call__(self, call: Callable[..., T], *args: Any) -> T:
        """What `call` returns or raises. Raises TooLong."""
        try:
            runner = self._idle.get_nowait()
        except queue.Empty:
            runner = _Runner()
        runner.jobs.put((call, args))
        try:
            result, error = runner.results.get(timeout=self.seconds)
        except queue.Empty:
            runner.jobs.put(None)  # should it come back after all, it ends
            raise TooLong(f"it did not come back within {self.seconds:g} s") from None
        self._idle.put(runner)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the idle threads end."""
        while True:
            try:
                self._idle.get_nowait().jobs.put(None)
            except queue.Empty:
                return


class _Runner:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="xrt-watched", daemon=True).start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            call, args = job
            try:
                self.results.put((call(*args), None))
            except BaseException as e:
                self.results.put((None, e))
            del job, call, args


def within(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """What `call` returns or raises; TooLong after `seconds`."""
    watched: Watched[T] = Watched(seconds)
    try:
        return watched(call, *args)
    finally:
        watched.close()
