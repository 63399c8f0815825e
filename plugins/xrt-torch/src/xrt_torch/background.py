"""Background work: the threads on which XRT compiles and tunes while a program of torch's runs.

Torch's operators divide their work among a team of OpenMP threads, one for each processor, which wait for each other by
spinning. Beside a thread that compiles, one of a team waits for a processor while the others spin on theirs, so that
each operator takes a time slice of the system: decoding that takes 2 ms a token took 20 to 130. GNU's OpenMP, which
torch is built with on Linux, spins for a moment only where a process has more OpenMP threads than processors
(https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html); so it gets a second team for that time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch

from xrt_core.engine.forking import in_forked_process
from xrt_core.engine.interpreter_turns import shorter_turns

_DIVIDED: Final = 1 << 17
"""Elements that torch divides among several threads: it gives each 32768 at least."""

ending: Final = threading.Event()
"""Set when the program ends, before its threads are joined: what they wait for is of no use any more."""


class BackgroundThread:
    """Work that is done in order, one piece at a time, on a thread that ends when there is none: with it ends the team
    of its operators, beside which those of other threads would take twice their time (MobileNetV2: 19 ms, and 38)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.renew()

    def renew(self) -> None:
        """Begin without a thread and without work: a forked process has its parent's in name alone."""
        self._waiting: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        """Have `work(*args)` done. Raises RuntimeError where the interpreter is ending."""
        future: Future[None] = Future()
        future.add_done_callback(lambda _: _busy.end())
        _busy.begin()
        try:
            with self._lock:
                if ending.is_set():
                    raise RuntimeError("no work is taken any more: the interpreter is ending")
                if not self._runs:  # it finds no work before the lock is free
                    threading.Thread(target=self._run, name=self._name).start()
                    self._runs = True
                self._waiting.append((future, functools.partial(work, *args)))
        except BaseException:
            future.cancel()
            raise
        return future

    def _run(self) -> None:
        with shorter_turns():
            while self._next():
                pass

    def _next(self) -> bool:
        """Do one piece of work; whether there was one."""
        with self._lock:
            if not self._waiting:
                self._runs = False
                return False
            future, work = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                work()
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(None)
        return True


class _Busy:
    """How much work is queued or done. While there is some, a thread with an OpenMP team exists."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def begin(self) -> None:
        with self._lock:
            self.count += 1
            if self.count > 1:
                return
            self._done = threading.Event()
            if not ending.is_set():
                with contextlib.suppress(RuntimeError):  # there may be no more threads
                    # no daemon: in an operator when the interpreter ends it would abort the process
                    threading.Thread(target=_hold_team, args=(self._done,), name="xrt-torch-team").start()

    def end(self) -> None:
        with self._lock:
            self.count -= 1
            if not self.count:
                self._done.set()

    def leave(self) -> None:
        """Let the thread go, whatever is still done."""
        self._done.set()


def _hold_team(done: threading.Event) -> None:
    torch.ones(_DIVIDED, device="cpu").add_(1)  # the team stays as long as the thread whose operator made it
    done.wait()


_busy: Final = _Busy()
compiler: Final = BackgroundThread("xrt-torch")
tuner: Final = BackgroundThread("xrt-torch-tuner")
for _one in (_busy, compiler, tuner):
    in_forked_process(_one.renew)


def _end() -> None:
    ending.set()
    _busy.leave()


threading._register_atexit(_end)  # type: ignore[attr-defined]


def is_busy() -> bool:
    """Whether XRT compiles or tunes for any graph of torch's, so that what is timed now says little."""
    return _busy.count > 0
