"""BackgroundCompiler: makes the plans of one module with engines while the host answers its calls.

Imports little, as it exists before the first answer; what compilation needs is imported after it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from msgspec import Struct

from xrt_core.engine.forking import each_in_forked_process
from xrt_core.errors import XRTError
from xrt_core.events import EventLog, Kind
from xrt_core.guard.timeouts import (
    BackgroundTask,
    CallTimeout,
    Cancelled,
    call_with_timeout,
    current_task,
    is_shutting_down,
    running,
)
from xrt_core.options.guard_settings import MAX_INPUT_BYTES, GuardSettings
from xrt_core.runtime.arrays import to_numpy

if TYPE_CHECKING:
    from xrt_core.cache.disk import DiskCache
    from xrt_core.guard.capability import Probed

_DELAY: Final = 0.02
"""Seconds before background compilation starts, so that it does not compete with the first call for the GIL."""
_MAX_RECORDS: Final = 256
_MOST_KEPT: Final = 1 << 26
"""Bytes of all calls of a module that are kept until they are compared."""


class Answered(Struct, frozen=True, eq=False, weakref=True):
    """A call that the host has answered: copies of the inputs and the results, and the seconds that it took."""

    inputs: list[np.ndarray]
    results: list[np.ndarray]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return _bytes(self.inputs) + _bytes(self.results)


class Plannable(Protocol):
    """A plan of the host that can be replaced by one with engines. is_dropped: nobody wants it any more."""

    name: str
    is_dropped: bool

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Make the plan with engines, and run it once on `inputs` if they are given."""

    def postpone(self, first: float) -> None:
        """Schedule a retry by a later call, `first` seconds from now at the first time."""


class CompilationRecord:
    """State of the background compilation of one signature. since: seconds since the epoch. held: bytes of the inputs
    that are kept for it."""

    def __init__(self, plan: Plannable, inputs: Sequence[Any] | None = None) -> None:
        self.name = plan.name
        self.held = _bytes(inputs)
        self.plan = weakref.ref(plan)
        self.state: Literal["waiting", "planning", "planned", "failed", "given up"] = "waiting"
        self.reason = ""
        self.since = time.time()
        self.done = threading.Event()

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"graph": self.name, "state": self.state, "reason": self.reason, "since": self.since}


class BackgroundCompiler:
    """Runs the background compilations of one module on the process's planning thread. engines: as named in the
    options, for messages. disk: the disk cache, None where it is off. closed: nothing is started any more."""

    def __init__(self, settings: GuardSettings, engines: str, disk: DiskCache | None, events: EventLog) -> None:
        self.settings = settings
        self._disk = disk
        self.events = events
        self._engines = engines
        self.closed = False
        self._records: list[CompilationRecord] = []
        self._answered: weakref.WeakSet[Answered] = weakref.WeakSet()
        self._lock = threading.Lock()
        _compilers.add(self)

    def after_fork(self) -> None:
        """In a process that was just forked: what was pending goes on in the parent only; later calls begin again."""
        self._lock = threading.Lock()
        for r in self._records:
            if not r.done.is_set():
                r.state, r.done = "given up", threading.Event()
                r.done.set()
                if (plan := r.plan()) is not None:
                    plan.postpone(_DELAY)

    def begin(self, plan: Plannable, inputs: Sequence[Any] | None) -> None:
        """Prepare a plan in the background. It is dropped if nothing refers to it by then.

        inputs: copies of a call's, for a warm-up run; dropped where too many bytes are waiting already.
        """
        record = CompilationRecord(plan, inputs)
        with self._lock:
            if self.closed:
                return
            failed = [r for r in self._records if r.state == "failed" and r.plan() not in (None, plan)]
            pending = [r for r in self._records if not r.done.is_set()]
            if record.held + sum(r.held for r in pending) > MAX_INPUT_BYTES:
                inputs, record.held = None, 0
            self._records = [*failed[-_MAX_RECORDS:], *pending, record]
        starter = threading.Timer(_DELAY, self._submit, (record, inputs))
        starter.daemon = True
        try:
            starter.start()
        except RuntimeError as e:  # no more threads, or the interpreter is shutting down
            self._fail(record, plan, "raised", f"no thread can be started: {e}")

    @property
    def room(self) -> int:
        """Bytes of calls that may be kept (`keep`), beside those that are."""
        with self._lock:
            return max(_MOST_KEPT - sum(a.nbytes for a in self._answered), 0)

    def keep(self, answered: Answered) -> Answered:
        """Count a call among those that are kept, until nothing refers to it."""
        with self._lock:
            self._answered.add(answered)
        return answered

    def probed(self) -> Probed:
        """See `capability.probed`."""
        from xrt_core.guard.capability import probed

        return probed(self.settings, self._disk, self.events)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all compilations that were started have ended. Returns False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            records = list(self._records)
        return all(r.done.wait(None if deadline is None else max(deadline - time.monotonic(), 0)) for r in records)

    @property
    def is_pending(self) -> bool:
        """Whether a compilation that was started has not ended."""
        with self._lock:
            return any(not r.done.is_set() for r in self._records)

    def rows(self) -> list[Mapping[str, Any]]:
        """The pending compilations, and those that failed and were not retried."""
        with self._lock:
            return [r.to_json() for r in self._records if r.state in ("waiting", "planning", "failed")]

    def close(self) -> None:
        """Cancel all compilations, without waiting for them."""
        with self._lock:
            self.closed = True
            records = list(self._records)
        if "xrt_core.guard.worker_pool" in sys.modules:  # otherwise nothing runs
            from xrt_core.guard.worker_pool import process_pool  # waits for a thread that is importing it

            process_pool().cancel(self)
        for r in records:
            r.done.set()

    def _submit(self, record: CompilationRecord, inputs: Sequence[Any] | None) -> None:
        try:
            from xrt_core.guard.worker_pool import Job, planning_pool

            planning_pool().submit(Job(lambda slot: self._compile(record, inputs), self))
        except Exception as e:
            self._fail(record, record.plan(), "raised", f"{type(e).__name__}: {e}")

    def _compile(self, record: CompilationRecord, inputs: Sequence[Any] | None) -> None:
        plan = record.plan()
        if plan is None or self.closed or plan.is_dropped:
            record.state = "given up"
            record.done.set()
            return
        record.state = "planning"
        task = BackgroundTask(self, lambda: not (self.closed or record.done.is_set() or plan.is_dropped))
        try:
            with beside_the_caller():  # a worker starts, and is asked what engines take
                call_with_timeout(self.settings.timeout, _prepare, plan, inputs, task)
            record.state = "planned"
            record.done.set()
        except CallTimeout as e:
            self._fail(record, plan, "hung", str(e))
        except Cancelled:
            record.state = "given up"
            record.done.set()
        except BaseException as e:  # a library may raise SystemExit
            memory = isinstance(e, MemoryError)
            self._fail(record, plan, "memory" if memory else "raised", f"{type(e).__name__}: {e}")

    def _fail(self, record: CompilationRecord, plan: Plannable | None, kind: Kind, message: str) -> None:
        record.state, record.reason = "failed", f"{kind}: {message}"
        if plan is not None and not self.closed and not is_shutting_down():
            plan.postpone(self.settings.retry)
            self.events.fallback(cluster=record.name, engine=self._engines, stage="plan", kind=kind, error=message)
        record.done.set()


@contextlib.contextmanager
def beside_the_caller() -> Iterator[None]:
    """In the body, which may compute for seconds, calls of other threads get processors and the interpreter soon."""
    from xrt_core.engine.interpreter_turns import shorter_turns
    from xrt_core.host.blas_threads import fewer_blas_threads

    with fewer_blas_threads(), shorter_turns():
        yield


def warming_up() -> BackgroundCompiler | None:
    """The compiler whose warm-up run this thread is at, if any."""
    task = current_task()
    return task.owner if task is not None and isinstance(task.owner, BackgroundCompiler) else None


_compilers: weakref.WeakSet[BackgroundCompiler] = weakref.WeakSet()
each_in_forked_process(_compilers, BackgroundCompiler.after_fork)


def _prepare(plan: Plannable, inputs: Sequence[Any] | None, task: BackgroundTask) -> None:
    with running(task):
        plan.prepare(inputs)


def copies(arrays: Sequence[Any], most: int = MAX_INPUT_BYTES) -> list[Any] | None:
    """Return copies of a call's arguments; None if they exceed `most` bytes or the available memory."""
    held = 0

    def copy(x: Any) -> Any:
        nonlocal held
        if x is None:
            return None
        if isinstance(x, list):
            return [copy(e) for e in x]
        if isinstance(x, dict):
            return dict(x)
        array = to_numpy(x)
        held += array.nbytes
        return np.array(array) if held <= most else None

    with contextlib.suppress(MemoryError, XRTError):  # a call that has its results must not fail here
        found = [copy(a) for a in arrays]
        return found if held <= most else None
    return None


def _bytes(x: Any) -> int:
    """Bytes of an array, or of all arrays in a list; 0 for None."""
    if isinstance(x, list | tuple):
        return sum(map(_bytes, x))
    return int(getattr(x, "nbytes", 0))
