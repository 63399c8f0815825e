"""Time limits, cancellation and interpreter shutdown for threads that run native code of engines.

Python can neither stop a thread that is inside native code nor finish while one is: when such a daemon thread returns
after finalization, the interpreter unwinds its stack, which C++ answers with abort(). Hence a call that exceeds its
limit is abandoned on its daemon thread, cancelled work ends at the next `check_cancelled`, and shutdown waits up to
five seconds until no thread is inside a `native_call`, while no new one may begin.

The watchdog finds runs that hang where a time limit of their own, which takes another thread, would cost too much.
Whoever runs an executable marks a byte of its thread for the time of the run, with another mark for each run. One
thread looks at the marks of all: one that stays for as long as a run may take is of a run that hangs. Such a run cannot
be ended; but others can be kept from it, it can be told, and be noted for the next process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from xrt_core.engine.boundary import beside_the_program
from xrt_core.engine.forking import in_forked_process

T = TypeVar("T")

_SHUTDOWN_SECONDS: Final = 5.0
_LONGEST_PAUSE: Final = 1.0  # seconds between two looks of the watchdog
_LOOKS: Final = 8
"""Looks within the shortest limit. A mark that is the same at all of them is of one run: there are 128 marks."""
_SHORTEST_WAIT: Final = 0.01  # seconds; while a limit is suspended its waiter looks no more often than this


class CallTimeout(Exception):
    """A call exceeded its time limit. It goes on in its thread, and its result is dropped."""


class Cancelled(Exception):
    """The interpreter is shutting down, or the task was cancelled."""


class BackgroundTask(Struct, frozen=True):
    """Work that no caller waits for. owner: of the worker jobs that it submits. is_wanted: False once it is
    cancelled."""

    owner: object
    is_wanted: Callable[[], bool]


class _ThreadState(threading.local):
    limit: _TimeLimit | None = None
    task: BackgroundTask | None = None
    native_depth = 0


_state = _ThreadState()


# --- time limits ------------------------------------------------------------------------------------------------------


class _TimeLimit:
    """The time that is left of one call. It stands still while the call is suspended (see `suspended`)."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._since: float | None = time.monotonic()
        self._lock = threading.Lock()

    def left(self) -> float:
        with self._lock:
            return self._left - (0.0 if self._since is None else time.monotonic() - self._since)

    def pause(self) -> None:
        with self._lock:
            if self._since is not None:
                self._left -= time.monotonic() - self._since
                self._since = None

    def resume(self) -> None:
        with self._lock:
            self._since = time.monotonic()


class TimedCaller(Generic[T]):
    """Runs calls on daemon threads of its own, each with a time limit of `seconds`. Thread-safe.

    A thread whose call came back is used again; one whose call exceeded the limit, or whose caller was interrupted,
    ends after that call. Idle threads end with the caller. Costs about 20 us a call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._idle: queue.SimpleQueue[_CallThread] = queue.SimpleQueue()
        self._process = os.getpid()

    def __call__(self, call: Callable[..., T], *args: Any) -> T:
        """What `call` returns or raises. Raises CallTimeout."""
        if self._process != os.getpid():  # a forked process has none of the threads
            self._idle, self._process = queue.SimpleQueue(), os.getpid()
        try:
            thread = self._idle.get_nowait()
        except queue.Empty:
            thread = _CallThread()
        limit = _TimeLimit(self.seconds)
        thread.calls.put((call, args, limit))
        while True:
            try:
                result, error = thread.results.get(timeout=max(limit.left(), _SHORTEST_WAIT))
                break
            except queue.Empty:
                if limit.left() <= 0:
                    del thread
                    raise CallTimeout(f"it did not return within {self.seconds:g} s") from None
        self._idle.put(thread)
        del thread  # a traceback keeps what its frames hold
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the idle threads."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait()


_Calls = queue.SimpleQueue[Any]
_Results = queue.SimpleQueue["tuple[Any, BaseException | None]"]


class _CallThread:
    """A thread that makes the calls it is given. It ends with this object, after the call that it is in."""

    def __init__(self) -> None:
        self.calls: _Calls = queue.SimpleQueue()
        self.results: _Results = queue.SimpleQueue()
        # the thread's last item is this reference; no Python code is involved that an interrupt could cut off
        life = weakref.ref(self, partial(self.calls.put))
        arguments = self.calls, self.results, life
        threading.Thread(target=_make_calls, args=arguments, name="xrt-timed-call", daemon=True).start()


def _make_calls(calls: _Calls, results: _Results, life: weakref.ref[_CallThread]) -> None:
    while (item := calls.get()) is not life:
        call, args, _state.limit = item
        try:
            results.put((call(*args), None))
        except BaseException as e:
            results.put((None, e))
        del item, call, args


def call_with_timeout(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """Call with a time limit. On expiry raises CallTimeout, and the call is abandoned on its daemon thread."""
    caller: TimedCaller[T] = TimedCaller(seconds)
    try:
        return caller(call, *args)
    finally:
        caller.close()


# --- the watchdog -----------------------------------------------------------------------------------------------------


class _Watched:
    """The marks of one executable. seconds: that a run may take. hangs: is told of a run that takes longer, once."""

    def __init__(self, marks: memoryview, seconds: float, hangs: weakref.WeakMethod[Callable[[Any], object]]) -> None:
        self.seconds = seconds
        self._marks = marks
        self._hangs = hangs
        self._since: dict[int, tuple[int, float]] = {}  # byte -> its mark, and when it was first seen

    def look(self, executable: object, now: float) -> bool:
        """Tell of a run that hangs. Returns whether there is more to look for."""
        hangs = self._hangs()
        if hangs is None:
            return False
        for i, mark in enumerate(self._marks.tobytes()):
            known = self._since.get(i)
            if not mark:
                self._since.pop(i, None)
            elif known is None or known[0] != mark:
                self._since[i] = mark, now
            elif now - known[1] > self.seconds:
                hangs(executable)
                return False
        return True


class Watchdog:
    """One thread, which is there as long as there is something to look at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[weakref.ref[Any], _Watched]] = []
        self._thread: threading.Thread | None = None

    def watch(self, executable: object, marks: memoryview, seconds: float, hangs: Callable[[Any], object]) -> None:
        """Look at the marks of an executable as long as it lives. hangs: a method of an object that may end; it is
        called with the executable, in the thread of the watchdog, when a run takes longer than `seconds`."""
        entry = weakref.ref(executable), _Watched(marks, seconds, weakref.WeakMethod(hangs))
        with self._lock:
            self._watched.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="xrt-watchdog", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                if not watched:
                    self._thread = None
                    return
            now = time.monotonic()
            over = [e for e in watched if (made := e[0]()) is None or not e[1].look(made, now)]
            made = None
            with self._lock:
                self._watched = [e for e in self._watched if e not in over]
            pause = min([_LONGEST_PAUSE, *(w.seconds / _LOOKS for _, w in watched)])
            del watched, over
            time.sleep(pause)


watchdog = Watchdog()


# --- cancellation -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(task: BackgroundTask) -> Iterator[None]:
    """Mark what this thread does as a background task."""
    _state.task = task
    try:
        with beside_the_program():
            yield
    finally:
        _state.task = None


def current_task() -> BackgroundTask | None:
    """The background task of this thread; None where a caller waits for what it does."""
    return _state.task


def in_background() -> bool:
    """Whether this thread runs a background task."""
    return _state.task is not None


def check_cancelled() -> None:
    """Raises Cancelled if this thread runs a background task that is no longer wanted, or the interpreter shuts down
    meanwhile. Does nothing in a thread that a caller waits for."""
    task = _state.task
    if task is not None:
        check_shutdown()
        if not task.is_wanted():
            raise Cancelled("the task was cancelled")


# --- interpreter shutdown ---------------------------------------------------------------------------------------------

_no_native_call = threading.Condition()
_native_calls = 0
_shutdown = False
_registered = False


def begin_shutdown() -> None:
    """Say that the interpreter is shutting down."""
    global _shutdown
    _shutdown = True


def is_shutting_down() -> bool:
    """Whether the interpreter is shutting down: its main thread has ended, and so have all non-daemon threads."""
    main = threading.main_thread()
    return _shutdown or not (main.is_alive() or any(t is not main and not t.daemon for t in threading.enumerate()))


def check_shutdown() -> None:
    """Raises Cancelled if the interpreter is shutting down."""
    if is_shutting_down():
        raise Cancelled("the interpreter is shutting down")


@contextlib.contextmanager
def native_call() -> Iterator[None]:
    """Keep the interpreter from finishing while the body runs. Raises Cancelled if shutdown has begun."""
    global _native_calls, _registered
    with _no_native_call:
        check_shutdown()
        _native_calls += 1
        _state.native_depth += 1
        if not _registered:
            _registered = True
            atexit.register(_wait_for_native_calls)
    try:
        yield
    finally:
        with _no_native_call:
            _native_calls -= 1
            _state.native_depth -= 1
            _no_native_call.notify_all()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """While this thread only waits for another one: it counts as outside of native code, and its time limit stands
    still. Raises Cancelled at the end if shutdown has begun."""
    global _native_calls
    depth, limit = _state.native_depth, _state.limit
    with _no_native_call:
        _native_calls -= depth
        _no_native_call.notify_all()
    if limit is not None:
        limit.pause()
    try:
        yield
    finally:
        if limit is not None:
            limit.resume()
        with _no_native_call:
            _native_calls += depth
    if depth:
        check_shutdown()


def _wait_for_native_calls() -> None:
    with _no_native_call:
        begin_shutdown()
        _no_native_call.wait_for(lambda: not _native_calls, _SHUTDOWN_SECONDS)


def _after_fork() -> None:
    """The threads of the parent do not exist in a forked process."""
    global _no_native_call, _native_calls
    _no_native_call, _native_calls = threading.Condition(), 0
    watchdog.__init__()  # type: ignore[misc]


in_forked_process(_after_fork)
