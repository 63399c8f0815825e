"""Acceleration: finds, for one session of the library, the calls that engines answer rightly and faster.

The session answers every call until then, and after that whenever an engine fails. A signature (names of results;
types, shapes and dtypes of feeds) goes from the program's thread to one thread of the process, where an XRTModule of
the model is compiled for it under XRT's guard. Then the session is the judge: both answer the same feeds, the results
must agree, and the engines must be faster. In the program they are timed again, against what the session took there,
and from time to time against what it takes now: other work on the machine may slow one and not the other.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pathlib
import queue
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core import events
from xrt_core.errors import XRTError, describe, is_from_program
from xrt_ort.report import SessionReport
from xrt_ort.settings import settings

_KINDS: Final = "fiub"
_MOST_BYTES: Final = 128 << 20  # of feeds that are copied for a trial
_MOST_SIGNATURES: Final = 256
_MOST_LIVE: Final = 4096
_MOST_REFUSED: Final = 8  # signatures that the session keeps, before the module is given up
_FASTER: Final = 0.97  # of the session's time, in the trial
_NO_SLOWER: Final = 1.03  # of the session's time, in the program
_SECONDS: Final = 0.6  # that the timing of a trial may take
_BLOCK: Final = 4  # calls of a trial in a row
_SKIPPED, _TIMED = 4, 12  # calls in the program: those that warm up, those that are timed
_AGAIN, _MOST_AGAIN = 32, 1024  # calls until the session is timed again: the first time, at most
_CHECK: Final = 6  # calls of the session that are timed then
_UNWATCHED: Final = 15  # calls that go to the session without a look, after one that engines are not to answer
_TRUSTED: Final = 2  # trials of different sizes after which a plan is taken for other sizes

Feeds = Mapping[str, Any]


class Acceleration:
    """Of one session. Thread-safe.

    live: signature -> the call by which engines answer. calls, offloaded: all calls, and those that engines answered.
    unwatched: so many of the next calls are the session's, of whatever signature: looking at one takes 4 us.
    state: what is done with the session, for people.
    """

    def __init__(
        self, session: Any, answer: Callable[..., Any], model: str | bytes, options: Mapping[str, Any]
    ) -> None:
        self.live: dict[Hashable, LiveSignature] = {}
        self.calls = self.offloaded = self.unwatched = 0
        self.seconds = 0.0
        self.state = "the library answers: not yet worth compiling for"
        self.engines: tuple[str, ...] = ()
        self.worst = 0.0
        self.name = model if isinstance(model, str) else "model"
        self.is_on = settings.on
        self.values: tuple[str, ...] = ()
        self._session = weakref.ref(session)
        self._answer = answer
        self._model: str | bytes | None = model
        self._options = dict(options)
        self._after = settings.after
        self._signatures: dict[Hashable, Signature] = {}
        self._pending = False
        self._module: Any = None
        self._refused = 0
        self._plans: dict[int, tuple[Any, int]] = {}
        _known.add(self)

    def row(self) -> SessionReport:
        """What the report has of the session."""
        name = pathlib.PurePath(self.name).name
        return SessionReport(name, self.calls, self.offloaded, self.engines, self.worst, self.state)

    def __del__(self) -> None:
        if self.calls:
            ended.append(self.row())

    # --- in the program's threads ---------------------------------------------------------------------------------

    def observe(self, key: Hashable, names: Sequence[str] | None, feeds: Feeds, seconds: float) -> None:
        """Note a call that the session answered. key: its signature."""
        self.seconds += seconds
        if not self.is_on:
            self.unwatched = _UNWATCHED
            return
        if key is None:
            return
        try:
            found = self._signatures.get(key)
        except TypeError:  # feeds with attributes of other kinds
            return
        if found is None:
            if len(self._signatures) >= _MOST_SIGNATURES:
                self._signatures.pop(next(iter(self._signatures)), None)
            found = self._signatures[key] = Signature()
        times = found.times
        times.append(seconds)
        if found.decided and not self.live and not self._pending:
            self.unwatched = _UNWATCHED
        if found.decided or self._pending or self.seconds < self._after:
            return
        if self._plans and self._served_by_known_plan(found, key, names, feeds):
            found.decided = True
            return
        copies = _copies(feeds)
        if copies is None:
            found.decided = True
            return
        self._pending = True
        _worker.submit(self, found, key, names, copies)

    def _served_by_known_plan(
        self, signature: Signature, key: Hashable, names: Sequence[str] | None, feeds: Feeds
    ) -> bool:
        """Whether a plan that was tried with other sizes answers these, and goes live."""
        module = self._module
        if (
            module is None
            or not any(n >= _TRUSTED for _, n in self._plans.values())
            or _copies(feeds, copy=False) is None
        ):
            return False
        try:
            call = module.live(feeds)
        except XRTError:
            return False
        if call is None or self._plans.get(id(call.plan), (None, 0))[1] < _TRUSTED:
            return False
        if len(self.live) >= _MOST_LIVE:
            self.live.clear()
        self.live[key] = LiveSignature(self, key, call, self._selected(names), signature, None)
        return True

    def drop(self, key: Hashable, reason: str) -> None:
        """Let the session answer a signature from now on."""
        if self.live.pop(key, None) is not None:
            self._refused += 1
            self.state = f"the library answers: {reason}"

    def failed(self, key: Hashable, engines: Sequence[str], error: BaseException) -> None:
        """An engine failed at run time: the session answers the call, and this signature from now on."""
        self.drop(key, f"engines failed: {describe(error)}")
        events.process_events.fallback(
            cluster=self.name, engine=", ".join(engines), stage="run", kind="raised", error=describe(error)
        )

    def stop(self, reason: str) -> None:
        """Let the session answer everything from now on, and free what was compiled."""
        self.is_on = False
        self.state = f"the library answers: {reason}"
        self.live = {}
        module, self._module, self._model = self._module, None, None
        self._plans.clear()
        self._signatures.clear()
        if module is not None:
            with contextlib.suppress(XRTError):
                module.close()

    # --- in the worker ----------------------------------------------------------------------------------------------

    def try_signature(self, signature: Signature, key: Hashable, names: Sequence[str] | None, feeds: Feeds) -> None:
        """Compile for a signature and let engines answer it, if they do so rightly and faster. Raises nothing."""
        try:
            self.state = "compiling"
            self._try(signature, key, names, feeds)
        except Exception as e:  # whatever fails here is no concern of the program
            if isinstance(e, XRTError) or self._module is None:
                self._give_up(e)
            else:
                self.state = f"the library answers: {describe(e)}"
        finally:
            signature.decided = True
            self._pending = False
            if self.is_on and self._refused >= _MOST_REFUSED and not self.live:
                self.stop(f"it is as fast as engines, or faster, for {self._refused} signatures")

    def _give_up(self, error: Exception) -> None:
        self.stop(f"XRT cannot run the model: {describe(error)}")
        events.process_events.fallback(
            cluster=self.name, engine="xrt", stage="plan", kind="unusable", error=describe(error), level=logging.INFO
        )

    def _try(self, signature: Signature, key: Hashable, names: Sequence[str] | None, feeds: Feeds) -> None:
        if self._module is None:
            from xrt_core import XRTModule

            model = self._model
            if model is None:
                return
            self._module = XRTModule(model, **self._options)
        module = self._module
        call = module.live(feeds)
        if call is None:
            module.prepare(feeds, background=True)
            while not module.wait(0.2):
                if _worker.closing or self._session() is None or not self.is_on:
                    return
            call = module.live(feeds)
        session = self._session()
        if session is None or _worker.closing or not self.is_on:
            return
        if call is None:
            self._refuse("no engine is faster than XRT's host, or none takes the model")
            return
        if set(call.by_value) - set(self.values):  # signatures are told apart by these values from now on
            self.values = tuple(sorted({*self.values, *call.by_value}))
            self.live, self._signatures = {}, {}
            self.state = "compiling"
            return
        why, ratio = self._judge(session, call, names, feeds)
        if why:
            self._refuse(why)
            return
        tried = self._plans.get(id(call.plan), (None, 0))[1]
        if getattr(call.plan, "symbolic", None) is not None:
            self._plans[id(call.plan)] = call.plan, tried + 1
        self.engines = tuple(dict.fromkeys((*self.engines, *call.engines)))
        self.state = f"{', '.join(self.engines)} answer, in {ratio:.2f} of the library's time"
        usual = statistics.median(signature.times) if len(signature.times) >= _SKIPPED else None
        self.live[key] = LiveSignature(self, key, call, self._selected(names), signature, usual)

    def _refuse(self, reason: str) -> None:
        self._refused += 1
        if not self.live:
            self.state = f"the library answers: {reason}"

    def _judge(self, session: Any, call: Any, names: Sequence[str] | None, feeds: Feeds) -> tuple[str, float]:
        """Return why engines must not answer, or "", and their time as a share of the session's."""
        arrays = [feeds[n] for n in call.names]
        select = self._selected(names)
        expected, made = self._answer(session, names, dict(feeds)), call.run(arrays)
        own: list[float] = []
        theirs: list[float] = []
        begin = time.perf_counter()
        while len(own) < 2 * _BLOCK or (len(own) < 10 * _BLOCK and time.perf_counter() - begin < _SECONDS):
            got = made if select is None else [made[i] for i in select]
            why = _difference(expected, got, arrays, self)
            if why:
                return f"engines differ: {why}", 1.0
            # one after the other for a while, as idle threads of either library may still turn
            for _ in range(_BLOCK):
                start = time.perf_counter()
                expected = self._answer(session, names, dict(feeds))
                own.append(time.perf_counter() - start)
            for _ in range(_BLOCK):
                start = time.perf_counter()
                made = call.run(arrays)
                theirs.append(time.perf_counter() - start)
            if _worker.closing:
                return "the process ends", 1.0
        ratio = min(theirs) / max(min(own), 1e-9)
        return ("" if ratio < _FASTER else f"it takes {1 / ratio:.2f} of the engines' time"), ratio

    def _selected(self, names: Sequence[str] | None) -> list[int] | None:
        """The indices of the results that are asked for; None for all."""
        if not names:
            return None
        there = list(self._module.output_names)
        return [there.index(n) for n in names]


class Signature:
    """What is known of calls with one signature. times: seconds that the session took lately. decided: whether it was
    tried, or is not to be."""

    __slots__ = ("decided", "times")

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=8)
        self.decided = False


class LiveSignature:
    """A signature that engines answer. usual: seconds that the session took in the program; None: not known yet.

    After `_AGAIN` calls, then after twice as many each time, the session answers `_CHECK` of them, and the engines are
    timed against that. They are left when they are slower twice in a row.
    """

    __slots__ = (
        "_call", "_doubt", "_key", "_left", "_library", "_names", "_owner", "_period", "_run", "_select", "_signature",
        "_times", "_usual",
    )  # fmt: skip

    def __init__(
        self, owner: Acceleration, key: Hashable, call: Any, select: list[int] | None, signature: Signature,
        usual: float | None,
    ) -> None:  # fmt: skip
        self._owner, self._key, self._call, self._select, self._usual = owner, key, call, select, usual
        self._signature = signature
        self._names: tuple[str, ...] = call.names
        self._run = call.run
        self._times: list[float] | None = [] if usual is not None else None
        self._left = self._period = _AGAIN  # calls until the session is asked again
        self._library = 0  # calls that it has yet to answer for that
        self._doubt = usual is not None  # the next time that engines are slower they are left

    def __call__(self, feeds: Feeds) -> list[Any] | None:
        """Return the results; None where the session has to answer."""
        if self._library > 0:
            self._library -= 1
            return None
        owner, times = self._owner, self._times
        for launch in self._call.launches:
            if launch.executable is None:
                owner.drop(self._key, "an engine went back to XRT's host")
                return None
        try:
            if times is None:
                results = self._run([feeds[n] for n in self._names])
                self._left -= 1
                if self._left <= 0:
                    self._time_again()
            else:
                start = time.perf_counter()
                results = self._run([feeds[n] for n in self._names])
                times.append(time.perf_counter() - start)
                if len(times) >= _SKIPPED + _TIMED:
                    self._end_timing(times)
        except BaseException as e:
            if is_from_program(e):
                raise
            owner.failed(self._key, self._call.engines, e)
            return None
        owner.offloaded += 1
        select = self._select
        return results if select is None else [results[i] for i in select]

    def _time_again(self) -> None:
        self._signature.times.clear()
        self._times, self._usual, self._library = [], None, _CHECK

    def _end_timing(self, times: list[float]) -> None:
        self._times = None
        took = statistics.median(times[_SKIPPED:])
        usual = self._usual
        if usual is None and len(self._signature.times) >= _CHECK:
            usual = statistics.median(list(self._signature.times)[_CHECK // 3 :])
        if usual is None or took <= _NO_SLOWER * usual:
            self._period = min(2 * self._period, _MOST_AGAIN)
            self._left, self._doubt = self._period, False
        elif self._doubt:
            self._owner.drop(self._key, f"engines took {took / usual:.2f} of its time in the program")
        else:
            self._doubt = True
            self._time_again()


def _copies(feeds: Feeds, *, copy: bool = True) -> dict[str, np.ndarray] | None:
    """Return copies of feeds that engines may answer; None for others, and for too many bytes."""
    size = 0
    for a in feeds.values():
        if type(a) is not np.ndarray or a.dtype.kind not in _KINDS or not a.dtype.isnative:
            return None
        size += a.nbytes
    if size > _MOST_BYTES:
        return None
    return {n: a.copy() if copy else a for n, a in feeds.items()}


def _difference(expected: Sequence[Any], got: Sequence[Any], arrays: Sequence[np.ndarray], owner: Acceleration) -> str:
    """Return how results differ from the session's, or ""."""
    if len(expected) != len(got):
        return f"{len(got)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if type(a) is not np.ndarray or type(b) is not np.ndarray or a.dtype.kind not in _KINDS:
            return f"result {i} is no tensor of numbers"
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"result {i} is {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        if not b.flags.writeable or any(np.may_share_memory(b, x) for x in arrays):
            return f"result {i} is not the caller's own"
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return f"result {i}: other {a.dtype} values"
            continue
        if not a.size:
            continue
        finite = np.isfinite(a)
        if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return f"result {i}: other values that are not finite"
        x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
        if not x.size:
            continue
        scale = max(float(np.abs(x).max()), 1e-30)
        error = float(np.abs(x - y).max()) / scale
        if error > (1e-2 if a.dtype.itemsize == 2 else 1e-4):
            return f"result {i}: by {error:.1e} of its largest value"
        owner.worst = max(owner.worst, error)
    return ""


class _Worker:
    """The thread in which signatures are tried, one after the other; made when it is needed."""

    def __init__(self) -> None:
        self.closing = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._left = 0
        self._idle = threading.Condition()

    def submit(self, owner: Acceleration, *trial: Any) -> None:
        if self.closing:
            return
        with self._idle:
            self._left += 1
        self._queue.put((weakref.ref(owner), trial))
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._serve, name="xrt-ort", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # the interpreter is shutting down, or there are too many
                        self.closing = True
                        return
                    self._thread = thread

    def wait(self, timeout: float | None) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._left == 0 or self.closing, timeout)

    def close(self) -> None:
        self.closing = True
        for owner in list(_known):
            owner.is_on = False
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(5.0)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None and not self.closing:
            owner, trial = item[0](), item[1]
            del item
            if owner is not None:
                owner.try_signature(*trial)
            del owner, trial
            with self._idle:
                self._left -= 1
                self._idle.notify_all()


_known: weakref.WeakSet[Acceleration] = weakref.WeakSet()
ended: Final[deque[SessionReport]] = deque(maxlen=256)
"""What became of sessions that the program dropped."""
_worker = _Worker()


def rows() -> list[SessionReport]:
    """A row for each session, those that the program dropped first."""
    return [*ended, *(a.row() for a in list(_known))]


def wait(timeout: float | None = None) -> bool:
    """Block until every compilation that sessions began is decided. Returns False after `timeout` seconds."""
    return _worker.wait(timeout)


def _after_fork() -> None:
    """Threads do not survive a fork: in the child the library answers."""
    global _worker
    _worker = _Worker()
    for owner in list(_known):
        owner.is_on, owner.live, owner._module = False, {}, None
        owner.state = "the library answers: the process was forked"


atexit.register(lambda: _worker.close())
os.register_at_fork(after_in_child=_after_fork)
