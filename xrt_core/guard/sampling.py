"""Which calls are compared with a reference while results go out, and the thread that compares them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Final

from xrt_core.engine.forking import in_forked_process
from xrt_core.engine.interpreter_turns import shorter_turns
from xrt_core.guard.timeouts import Cancelled, native_call
from xrt_core.host.blas_threads import fewer_blas_threads

log = logging.getLogger("xrt")

_SHARE: Final = 0.01
"""Part of the time of the calls that comparisons may take."""
_LIGHT: Final = 0.5
"""Of the mean bytes of calls: those of less are compared while comparisons cost more than their share."""
_PATIENCE: Final = 16
"""Calls for which a light one is waited for at least: a heavy one among the first may take as long as all of them."""
_SPARSER: Final = 3
"""Times as many calls pass until the next comparison, where calls differ in size: so much does the host take for each,
and beside the callers' threads."""
_MOST_WAITING: Final = 2  # comparisons; each holds copies of a call's arrays
_NICE: Final = 10
"""By how much the thread's priority is lower than that of its callers: it takes what they leave."""


def bytes_of(arrays: Sequence[Any]) -> int:
    """Bytes of arrays; 0 for what does not say."""
    return sum(getattr(a, "nbytes", 0) for a in arrays)


class SamplingSchedule:
    """Which calls of a live executable are compared with the host's.

    every: each N-th one, before its results are returned; 0: none; None: the 1st, 2nd, 4th, 8th, ..., then so many that
    the comparisons take at most `_SHARE` of the time of the calls. begin: the number of calls so far. due: from which
    number of calls on the next sampled one is compared. is_confirmed: whether a comparison has been right, or none
    is made. is_trusted: the first comparison is judged, and calls go on meanwhile; none is made until `postpone`.
    last_right: the last call that was found right. taker: the thread that is at a sampled comparison, until
    the background has it; 0 for none.

    Where calls differ in size, and as long as comparisons cost more than their share, there are half as many, and they
    are made of light calls: the first that is lighter than most, or whichever comes when half as many calls again have
    passed, and `_PATIENCE`.
    """

    __slots__ = (
        "_every", "_is_dear", "_least", "_lock", "_looked", "_mean", "begin", "due", "is_confirmed", "is_on",
        "is_trusted", "last_right", "taker",
    )  # fmt: skip

    def __init__(self, every: int | None, begin: int = 0) -> None:
        self._every = every
        self.begin = begin
        self._lock = threading.Lock()
        self.is_on = every != 0
        self.due: float = begin if every != 0 else math.inf
        self.is_confirmed = not self.is_on
        self.last_right = begin
        self.taker = 0
        self.is_trusted = False
        self._is_dear = False
        # calls that might have been compared, their mean bytes, and those of the lightest
        self._looked, self._mean, self._least = 0, 0.0, math.inf

    @property
    def is_periodic(self) -> bool:
        """Whether each N-th call is compared."""
        return bool(self._every)

    @property
    def is_synchronous(self) -> bool:
        """Whether the caller waits for the comparison."""
        return self._every is not None or not self.is_confirmed

    @property
    def is_first_under_way(self) -> bool:
        """Whether no comparison has been right yet, and another thread is at one: the host answers meanwhile."""
        return not self.is_confirmed and not self.is_trusted and math.isinf(self.due)

    def confirm(self, number: int) -> None:
        """A comparison was right. number: of the last call whose results that vouches for."""
        self.is_confirmed = True
        self.last_right = max(self.last_right, number)

    def is_due(self, calls: int, arrays: Sequence[Any] = ()) -> bool:
        """Whether the calling thread compares the call after `calls` others. arrays: of that call; none where all calls
        are alike.

        Of the sampled ones only one is compared at a time: none is due until `postpone`.
        """
        if self._every:
            return calls % self._every == self._every - 1
        if calls < self.due or self.is_trusted:
            return False
        with self._lock:
            if math.isinf(self.due) or (arrays and self._is_left_out(calls, arrays)):
                return False
            self.taker = get_ident()
            self.due = math.inf
            return True

    def _is_left_out(self, calls: int, arrays: Sequence[Any]) -> bool:
        weight = bytes_of(arrays)
        self._looked += 1
        self._mean += (weight - self._mean) / self._looked
        self._least = min(self._least, weight)
        light = _LIGHT * self._mean
        patience = max((self.due - self.begin) / 2, _PATIENCE if self._differ else 0)
        return self._is_dear and weight > light and calls - self.due < patience

    @property
    def _differ(self) -> bool:
        """Whether calls were not all of one size."""
        return self._least < self._mean

    def release(self) -> None:
        """The comparison that this thread is at, if any, has ended without an answer: the next call is compared."""
        if self.taker == get_ident():
            self.taker = 0
            self.due = self.begin

    def postpone(self, number: int, cost: float, seconds: float) -> None:
        """Set the next comparison. number: of the call that was compared. cost: seconds that the comparison took, with
        the copies that it was made of. seconds: that the call took."""
        since = number - self.begin
        wanted = max(round(cost / (_SHARE * seconds)), 1) if cost and seconds else since
        with self._lock:
            self.taker = 0
            self.is_trusted = False
            most = _SPARSER * since if self._differ else since
            self.due = number + min(most, wanted) - 1
            self._is_dear = wanted > since


class ComparisonThread:
    """Compares results in the background, one after another; what comes meanwhile beyond a few is dropped.

    Matrix products of the host use one thread meanwhile. More would spin for some time after the last product, beside
    the calls that follow: for 25 times as long as a short comparison takes, unseen by `SamplingSchedule`.
    """

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> bool:
        """Queue a comparison. Returns False if there is no room, or no thread can be started."""
        try:
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._serve, name="xrt-shadow", daemon=True)
                    self._thread.start()
            self._work.put_nowait(work)
        except (queue.Full, RuntimeError):
            return False
        return True

    @property
    def is_busy(self) -> bool:
        """Whether something that was submitted is not done: calls take longer meanwhile."""
        return self._work.unfinished_tasks > 0

    def wait(self) -> None:
        """Wait until what was submitted is done."""
        self._work.join()

    def _serve(self) -> None:
        _lower_priority()
        while True:
            work = self._work.get()
            try:
                with native_call(), fewer_blas_threads(1), shorter_turns():
                    work()
            except Cancelled:
                return
            except Exception:
                log.exception("a comparison with the host failed")
            finally:
                self._work.task_done()
                del work


def _lower_priority() -> None:
    """Lower the priority of this thread alone, where the system has priorities of threads (Linux)."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


_comparisons = ComparisonThread()


def comparisons() -> ComparisonThread:
    """The one thread of this process that compares results."""
    return _comparisons


def _after_fork() -> None:
    """The thread of the parent does not exist in a forked process."""
    global _comparisons
    _comparisons = ComparisonThread()


in_forked_process(_after_fork)
