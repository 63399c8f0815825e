"""Planning: what is planned with engines beside the callers of one module, and how that stands.

Imports little: it is there before a module's first answer, and what it needs beyond that comes after it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from xrt_core.events import EventLog, Kind
from xrt_core.guard import timeouts
from xrt_core.guard.policy import GuardSettings

if TYPE_CHECKING:
    from xrt_core.cache.disk import DiskCache
    from xrt_core.guard.capability import Asker
    from xrt_core.guard.worker_pool import WorkerSlot

_MOMENT: Final = 0.02
"""Seconds after a first answer until anything begins, so that the caller has it, and the interpreter, to himself."""
_LONGEST_RETRY: Final = 3600.0
_MOST_RECORDS: Final = 256
MOST_INPUT_BYTES: Final = 1 << 28
"""Inputs of calls that are larger than this together are not kept: not of one call, nor of all that wait."""
_here = threading.local()


def in_background() -> bool:
    """Whether this thread plans beside a caller: nobody waits for it."""
    return getattr(_here, "asker", None) is not None


def asker() -> Asker | None:
    """Through whom this thread asks engines in a child; None where it doesn't plan beside a caller."""
    return getattr(_here, "asker", None)


def later(first: float, attempts: int) -> float:
    """When (`time.monotonic` seconds) a failure is tried again: after `first` seconds, four times longer after each
    attempt, at most an hour; never (infinity) for 0."""
    return time.monotonic() + (min(first * 4.0 ** (attempts - 1), _LONGEST_RETRY) if first > 0 else float("inf"))


def check() -> None:
    """Raises Leaving where this thread plans beside a caller, and for nobody any more, or the interpreter is ending."""
    found = asker()
    if found is None:
        return
    timeouts.check()
    if not found.wanted():
        raise timeouts.Leaving("it was given up")


class Plannable(Protocol):
    """What can be planned with engines."""

    name: str

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Plan it."""

    def postpone(self, first: float) -> None:
        """Have it tried again."""


class CompilationRecord:
    """One signature that is planned beside its caller.

    state, reason: how it stands. since: seconds since the epoch. held: bytes of the inputs that are kept for it.
    """

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
    """Has plans made in threads of the guard's pool. engines: as the options have them, for people. disk: the cache.

    closed: nothing is begun any more.
    """

    def __init__(self, settings: GuardSettings, engines: str, disk: DiskCache | None, events: EventLog) -> None:
        self.settings = settings
        self._disk = disk
        self.events = events
        self._engines = engines
        self.closed = False
        self._records: list[CompilationRecord] = []
        self._lock = threading.Lock()

    def begin(self, plan: Plannable, inputs: Sequence[Any] | None) -> None:
        """Have a plan prepared beside the caller, a moment from now. It is forgotten if nobody holds it by then.

        inputs: copies of a call's, to rehearse the plan on; they are not kept where too many bytes wait already.
        """
        record = CompilationRecord(plan, inputs)
        with self._lock:
            if self.closed:
                return
            failed = [r for r in self._records if r.state == "failed" and r.plan() not in (None, plan)]
            under_way = [r for r in self._records if not r.done.is_set()]
            if record.held + sum(r.held for r in under_way) > MOST_INPUT_BYTES:
                inputs, record.held = None, 0
            self._records = [*failed[-_MOST_RECORDS:], *under_way, record]
        starter = threading.Timer(_MOMENT, self._submit, (record, inputs))
        starter.daemon = True
        try:
            starter.start()
        except RuntimeError as e:  # no more threads, or the interpreter is leaving
            self._fail(record, plan, "raised", f"no thread can be started: {e}")

    def harmful(self) -> Collection[str]:
        """Names of the engines that end a child process in which they are imported and probed; () where none can be
        asked there."""
        from xrt_core.engine import engines

        ask = asker()
        if ask is None or not self.settings.sandbox:
            return ()
        from xrt_core.guard.capability import keep_harmless, probe_key, tell, usable, was_harmless

        disk, keys = usable(self._disk), {}
        for line in engines.listing(probe=False):
            if line.version and disk is not None:  # else it is of this process, and may be another one in the next
                keys[line.name] = probe_key(line.name, line.package, line.version)
        names = [n for n in engines.names() if n not in keys or disk is None or not was_harmless(keys[n], disk)]
        said = ask.probe(names)
        check()
        for name, failure in said.items():
            if failure is not None:
                tell(self.events, name, "probe", failure)
            elif name in keys and disk is not None:
                keep_harmless(keys[name], name, disk)
        return [name for name, failure in said.items() if failure is not None]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything that was begun is planned, or failed; False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            records = list(self._records)
        return all(r.done.wait(None if deadline is None else max(deadline - time.monotonic(), 0)) for r in records)

    def rows(self) -> list[Mapping[str, Any]]:
        """What is under way, and what failed and has not been tried again."""
        with self._lock:
            return [r.to_json() for r in self._records if r.state in ("waiting", "planning", "failed")]

    def close(self) -> None:
        """Begin nothing any more, and wait for nothing."""
        with self._lock:
            self.closed = True
            records = list(self._records)
        if "xrt_core.guard.worker_pool" in sys.modules:  # without it nothing runs
            from xrt_core.guard.worker_pool import process_pool  # waits for a thread that is importing it just now

            process_pool().cancel(self)
        for r in records:
            r.done.set()

    def _submit(self, record: CompilationRecord, inputs: Sequence[Any] | None) -> None:
        try:
            from xrt_core.guard.worker_pool import Job, process_pool

            process_pool().submit(Job(lambda slot: self._work(record, inputs, slot), self))
        except Exception as e:
            self._fail(record, record.plan(), "raised", f"{type(e).__name__}: {e}")

    def _work(self, record: CompilationRecord, inputs: Sequence[Any] | None, slot: WorkerSlot) -> None:
        from xrt_core.guard.timeouts import TooLong

        plan = record.plan()
        if plan is None or self.closed:
            record.state = "given up"
            record.done.set()
            return
        record.state = "planning"
        try:
            from xrt_core.guard.capability import Asker
            from xrt_core.guard.worker_pool import WorkerProxy

            desk = WorkerProxy(slot)
            ask = Asker(desk, self.settings, lambda: not (self.closed or record.done.is_set()))
            desk.serve(self.settings.timeout, lambda: _beside(plan, inputs, ask))
            record.state = "planned"
            record.done.set()
        except TooLong as e:
            self._fail(record, plan, "hung", str(e))
        except timeouts.Leaving:
            record.state = "given up"
            record.done.set()
        except BaseException as e:  # a library may raise SystemExit
            memory = isinstance(e, MemoryError)
            self._fail(record, plan, "memory" if memory else "raised", f"{type(e).__name__}: {e}")

    def _fail(self, record: CompilationRecord, plan: Plannable | None, kind: Kind, message: str) -> None:
        record.state, record.reason = "failed", f"{kind}: {message}"
        if plan is not None and not self.closed and not timeouts.begun():
            plan.postpone(self.settings.retry)
            self.events.fallback(
                cluster=record.name, engine=self._engines, stage="plan", kind=kind, error=message
            )
        record.done.set()


def _bytes(x: Any) -> int:
    """Of an array; of a list, of all in it; 0 of None."""
    if isinstance(x, list | tuple):
        return sum(map(_bytes, x))
    return 0 if x is None else int(x.nbytes)


def _beside(plan: Plannable, inputs: Sequence[Any] | None, ask: Asker) -> None:
    _here.asker = ask
    try:
        plan.prepare(inputs)
    finally:
        _here.asker = None
