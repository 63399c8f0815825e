"""Guard: what one module's clusters go through, from the queue to being live, and back to the host at any trouble."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.model_file import ModelFile, StoredExecutable
from xrt_core.errors import XRTError
from xrt_core.events import EventLog, Kind
from xrt_core.guard import timeouts
from xrt_core.guard.background import MOST_INPUT_BYTES
from xrt_core.guard.build_job import BuildJob, kind_of
from xrt_core.guard.capability import Inquiry
from xrt_core.guard.ipc import ArtifactExchange
from xrt_core.guard.launch import GuardedLaunch, HostRun
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.record import ClusterRecord, State
from xrt_core.guard.timeouts import TooLong, call_with_timeout
from xrt_core.guard.worker_pool import Job, WorkerFailure, WorkerSlot, process_pool
from xrt_core.ir.function import Function
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.engine_compiler import Compilation
from xrt_core.runtime.launch import Launch, operators_of
from xrt_core.verify.checker import ResultChecker
from xrt_core.verify.repro import Stage, bundle_of, leave_bundle
from xrt_core.verify.verdict import Outcome

_MOST_RECORDS: Final = 4096
_MOMENT: Final = 10.0  # longest time that a call waits for an executable that was examined before


class GuardManager:
    """Guards the clusters of one module.

    compilation: where executables come from. disk: the cache on disk, None where it is off: then executables cross
    from the child through a folder of this process. auto: the launches' engine is a name for whichever engine is best.
    trusted: outcomes that came with the model, by the fingerprints of their functions; they hold at once.
    """

    def __init__(
        self,
        settings: GuardSettings,
        compilation: Compilation,
        disk: DiskCache | None,
        events: EventLog,
        *,
        auto: bool = False,
        trusted: Mapping[str, Outcome] | None = None,
    ) -> None:
        self.settings = settings
        self.events = events
        self.records: list[ClusterRecord] = []
        self.inquiry = Inquiry(settings, compilation, disk, events)
        self.closed = False
        self._crossing = ArtifactExchange(disk, events)
        self._way = BuildJob(settings, self.inquiry, self._crossing, self, events, auto, trusted or {})
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._launches: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()
        self._begun: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()  # a job is queued for them, or runs

    # --- for the pipeline -----------------------------------------------------------------------------------------

    def launch(
        self, function: Function, engine: str, host: Callable[[], HostRun], shared: bool = False
    ) -> GuardedLaunch:
        """The launch of a cluster. Nothing is compiled yet: its first call, or `start`, sets that going. shared: see
        `CompileOptions`."""
        record = ClusterRecord(function.name, engine, len(function.body.nodes), operators_of(function))
        record.number = next(self._numbers)
        launch = GuardedLaunch(function, engine, host, self, record)
        launch.shares_cores = shared
        with self._lock:
            self.records.append(record)
            del self.records[:-_MOST_RECORDS]
            self._launches.add(launch)
        return launch

    def start(self) -> None:
        """Set going what has not been called yet."""
        for launch in self._all():
            if launch.record.state is State.QUEUED:
                self.begin(launch, None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every cluster that was set going is live, failed or rejected; False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for launch in self._all():
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if launch in self._begun and not launch.record.settled.wait(left):
                return False
        return True

    def begin_all(self, launches: Sequence[Launch]) -> None:
        """Set these launches going, as far as they are not."""
        for launch in launches:
            if isinstance(launch, GuardedLaunch):
                self.begin(launch, None)

    def count(self, launches: Sequence[Launch], calls: int) -> None:
        """Count so many calls that the host answered before the launches were there."""
        for launch in launches:
            if isinstance(launch, GuardedLaunch):
                launch.record.calls += calls
                launch.record.host_calls += calls

    def known(self) -> list[ClusterRecord]:
        """The record of every cluster."""
        with self._lock:
            return list(self.records)

    def outcomes(self) -> dict[str, Outcome]:
        """What was decided about every cluster that is live or was turned down, by its function's fingerprint."""
        return {
            launch.function.fingerprint: outcome
            for launch in self._all()
            if (outcome := launch.record.outcome) is not None and launch.record.state in (State.LIVE, State.REJECTED)
        }

    def missing(self, file: ModelFile) -> list[str]:
        """What the clusters need that is not in the file which the model was loaded from."""
        found = []
        for launch in self._all():
            function = launch.function
            if not self._way.trusts(function):
                key = self._way.key(launch)
                if file.executable(key) is None:
                    found.append(file.why_missing(key, function.name))
        return found

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that crossed from a child through a folder of this process, serialised."""
        return self._crossing.stored()

    def close(self) -> None:
        """Compile nothing any more. What is live stays so; nothing is waited for."""
        if not self.closed:
            self.closed = True
            process_pool().cancel(self)
            for launch in self._all():
                launch.record.settled.set()

    def _all(self) -> list[GuardedLaunch]:
        with self._lock:
            return list(self._launches)

    # --- for the launches ------------------------------------------------------------------------------------------

    def knows(self, launch: GuardedLaunch) -> bool:
        """See `launch.Keeper`."""
        return self._way.knows(launch)

    def begin(self, launch: GuardedLaunch, arrays: Sequence[Any] | None, at_once: bool = False) -> None:
        """See `launch.Keeper`."""
        record = launch.record
        with self._lock:
            if self.closed or launch in self._begun or record.state not in (State.QUEUED, State.FAILED):
                return
            self._begun.add(launch)
        if record.state is State.FAILED:
            record.move(State.QUEUED, "tried again")
        inputs = self._inputs(arrays)
        reference = weakref.ref(launch)  # a plan that is forgotten meanwhile needs no executable

        def work(slot: WorkerSlot) -> None:
            found = reference()
            if found is not None:
                self._bring_up(found, inputs, slot)

        job = Job(work, self)
        try:
            process_pool().submit(job)
        except WorkerFailure as e:
            with self._lock:
                self._begun.discard(launch)
            self._fail(launch, "compile", e.kind, str(e))
            return
        if not self.settings.asynchronous or self._way.trusts(launch.function):
            job.done.wait()
        elif at_once:
            job.done.wait(_MOMENT)

    def fell_back(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
        """See `launch.Keeper`: one structured event for every failure."""
        launch.record.fault(stage, kind, message, log, exit_code)
        more: dict[str, Any] = {} if exit_code is None else {"exit_code": exit_code}
        if log:
            more["log"] = log
        if (left := self._leave_bundle(launch, stage, kind, message, log)) is not None:
            more["bundle"] = str(left)
        self.events.fallback(
            cluster=launch.function.name, engine=launch.engine, stage=stage, kind=kind, error=message, **more
        )

    def compare(
        self, launch: GuardedLaunch, inputs: Sequence[Any], results: Sequence[Any], expected: Sequence[Any]
    ) -> str:
        """See `launch.Keeper`. Where the two differ, the host runs again to say whether it is rounding."""
        engine = self.inquiry.compilation.engines.get(launch.record.chosen)
        referee = ResultChecker(launch.function, inputs, results=[to_numpy(r) for r in expected])
        check = referee.judge_results([to_numpy(r) for r in results], {} if engine is None else engine[0].tolerance)
        return "" if check.is_doubtful else check.reason

    # --- the way of a cluster ---------------------------------------------------------------------------------------

    def _bring_up(self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: WorkerSlot) -> None:
        """All the way to LIVE, REJECTED or FAILED, in a thread of the pool; nowhere if the guard is closed."""
        record = launch.record
        start = time.perf_counter()
        try:
            if self.closed:
                return
            outcome, known = self._way.outcome(launch, inputs, slot)
            record.outcome = outcome
            if outcome.verdict in ("wrong", "slower"):
                self._turn_down(launch, outcome)
            elif outcome.verdict == "failed":
                stage = "examine" if record.state is State.VERIFYING else "compile"
                self._fail(launch, stage, kind_of(outcome), outcome.reason)
            else:
                record.move(State.READY, outcome.reason)
                executable = call_with_timeout(self.settings.timeout, self._way.realise, launch, outcome, known)
                launch.go_live(executable, outcome.reason)
                self._tell(record, start)
        except timeouts.Leaving:
            pass
        except WorkerFailure as e:
            if not self.closed:
                stage = "examine" if record.state is State.VERIFYING else "compile"
                self._fail(launch, stage, e.kind, str(e), e.log, e.exit_code)
        except TooLong as e:
            self._fail(launch, "load" if record.state is State.READY else "compile", "hung", str(e))
        except BaseException as e:  # a library may raise SystemExit
            memory = isinstance(e, MemoryError)
            stage = "load" if record.state is State.READY else "compile"
            self._fail(launch, stage, "memory" if memory else "raised", f"{type(e).__name__}: {e}")
        finally:
            record.settled.set()  # also where it was given up on the way
            with self._lock:
                self._begun.discard(launch)

    def _turn_down(self, launch: GuardedLaunch, outcome: Outcome) -> None:
        self.fell_back(launch, "examine", kind_of(outcome), outcome.reason)
        launch.record.move(State.REJECTED, f"{outcome.verdict}: {outcome.reason}")

    def _fail(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
        if timeouts.begun():  # what ends now ends because of that
            return
        record = launch.record
        self.fell_back(launch, stage, kind, message, log, exit_code)
        record.postpone(self.settings.retry)
        record.move(State.FAILED, f"{kind}: {message}")

    def _tell(self, record: ClusterRecord, start: float) -> None:
        self.events.emit(
            "guard.live",
            level=logging.INFO,
            seconds=time.perf_counter() - start,
            cluster=record.name,
            chosen=record.chosen,
            reason=record.reason,
        )

    # --- what is kept -----------------------------------------------------------------------------------------------

    def _leave_bundle(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str
    ) -> pathlib.Path | None:
        """Leave a reproducer of a failure before the cluster was live; its path, or None where none can be written."""
        disk = self._crossing.usable() if stage in ("compile", "examine") and kind != "slower" else None
        engines = self.inquiry.every.engines
        name = launch.engine if launch.engine in engines else next(iter(engines))
        if disk is None or disk.mode != "readwrite":
            return None
        engine, device = engines[name]
        options = self.inquiry.every.options_for(name)
        what: Stage = "compile" if stage == "compile" else "wrong"
        try:
            bundle = bundle_of(launch.function, engine, device, options, what, f"{kind}: {message}", log=log)
            return leave_bundle(bundle, disk.folder / "bundles")
        except Exception as e:  # a reproducer is a courtesy
            self.events.emit("guard.no_bundle", cluster=launch.function.name, reason=f"{type(e).__name__}: {e}")
            return None

    def _inputs(self, arrays: Sequence[Any] | None) -> list[np.ndarray] | None:
        """Copies of a call's inputs to examine with, where that is allowed and they are not too many bytes."""
        if arrays is None or not self.settings.real_inputs:
            return None
        with contextlib.suppress(XRTError):
            found = [to_numpy(a) for a in arrays]
            if sum(a.nbytes for a in found) <= MOST_INPUT_BYTES:
                return [a.copy() for a in found]
        return None
