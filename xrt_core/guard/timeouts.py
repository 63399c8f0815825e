"""Calls with a time limit inside this process: what does not come back in time is left to a daemon thread.

The interpreter's end while a thread of the guard is within an engine's library.

A daemon thread that comes back from C++ when the interpreter is gone is ended by unwinding its stack, which C++ answers
by aborting the process. So the end waits until such a thread is out of the library, some seconds at most, and none goes
in any more. Importing a library, asking about nodes and loading executables is over that soon; who hangs is left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

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


def call_with_timeout(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """What `call` returns or raises; TooLong after `seconds`."""
    watched: Watched[T] = Watched(seconds)
    try:
        return watched(call, *args)
    finally:
        watched.close()


_LIMIT: Final = 5.0  # seconds that the interpreter's end waits at most
_condition = threading.Condition()
_here = threading.local()
_inside = 0
_begun = False
_registered = False


class Leaving(Exception):
    """The interpreter is ending."""


def begin() -> None:
    """Say that the interpreter is ending."""
    global _begun
    _begun = True


def begun() -> bool:
    """Whether the interpreter is ending: its main thread is through, and so are all others that are no daemons."""
    main = threading.main_thread()
    return _begun or not (main.is_alive() or any(t is not main and not t.daemon for t in threading.enumerate()))


def check() -> None:
    """Raises Leaving where the interpreter is ending."""
    if begun():
        raise Leaving("the interpreter is ending")


@contextlib.contextmanager
def native_call() -> Iterator[None]:
    """While this lasts the interpreter does not end. Raises Leaving where it has begun to."""
    global _inside, _registered
    with _condition:
        check()
        _inside += 1
        _here.depth = getattr(_here, "depth", 0) + 1
        if not _registered:
            _registered = True
            atexit.register(_leave)
    try:
        yield
    finally:
        with _condition:
            _inside -= 1
            _here.depth -= 1
            _condition.notify_all()


@contextlib.contextmanager
def outside_library() -> Iterator[None]:
    """For while a thread that is `native_call` waits for something else. Raises Leaving where the end has begun."""
    global _inside
    inside = getattr(_here, "depth", 0)
    with _condition:
        _inside -= inside
        _condition.notify_all()
    try:
        yield
    finally:
        with _condition:
            _inside += inside
    check()


def _leave() -> None:
    with _condition:
        begin()
        _condition.wait_for(lambda: not _inside, _LIMIT)


def _forked() -> None:
    """A forked process has none of the parent's threads."""
    global _condition, _inside
    _condition, _inside = threading.Condition(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
