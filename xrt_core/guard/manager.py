"""GuardManager: builds the clusters of one module in worker processes, and records their states and failures.

("Guard" here is protection against engines; it has nothing to do with the guards of a tracing compiler.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.model_file import ModelFile, StoredExecutable
from xrt_core.cache.store import Compilation
from xrt_core.engine.contract import Executable
from xrt_core.engine.device_kinds import device_kind, is_host
from xrt_core.engine.forking import each_in_forked_process
from xrt_core.errors import XRTError, describe
from xrt_core.events import EventLog, Kind
from xrt_core.guard.background import beside_the_caller
from xrt_core.guard.builder import ClusterBuilder, kind_of, runs_alike
from xrt_core.guard.capability import Capabilities
from xrt_core.guard.ipc import ArtifactExchange
from xrt_core.guard.isolation import IsolatedExecutable
from xrt_core.guard.launch import GuardedLaunch, HostRun
from xrt_core.guard.record import ClusterRecord, FailureRecord, State
from xrt_core.guard.timeouts import CallTimeout, Cancelled, call_with_timeout, in_background, is_shutting_down
from xrt_core.guard.worker_pool import Job, WorkerFailure, WorkerSlot, process_pool
from xrt_core.host.freed_memory import give_back
from xrt_core.host.place import HostPlace, synchronize
from xrt_core.ir.function import Function, operators_of
from xrt_core.ir.graph import engine_and_device
from xrt_core.options.guard_settings import MAX_INPUT_BYTES, GuardSettings
from xrt_core.runtime.arrays import Range, ranges_of, to_numpy
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.transfers import Adapt, numpy_executable
from xrt_core.verify.reference import ON_CPU
from xrt_core.verify.repro import Stage, make_bundle, save_bundle
from xrt_core.verify.verdict import HOST, Outcome

_MAX_RECORDS: Final = 4096
_LONGEST_LOAD: Final = 10.0  # seconds that a first call waits for an executable with a cached verdict
_LONG: Final = 2e-3  # seconds of a call of the host from which on its temporary arrays may be large
_SHORTEST_LOAD: Final = 2.0  # seconds that loading an executable has at least, whatever its verification took


class GuardManager:
    """Guards the clusters of one module. Thread-safe.

    compilation: of all engines. disk: the disk cache, None where it is off. auto: the launches' engine is a name for
    whichever engine is fastest. trusted: outcomes that came with a saved model, by fingerprint of the function; they
    hold without verification. adapt: makes the executable of one engine fit a launch of another. place: where the host
    computes. capabilities: answers queries about the engines.
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
        adapt: Adapt = numpy_executable,
        place: HostPlace = ON_CPU,
    ) -> None:
        self.settings = settings
        self.events = events
        self.records: list[ClusterRecord] = []
        self.capabilities = Capabilities(settings, compilation, disk, events)
        self.closed = False
        self._place = place
        self._exchange = ArtifactExchange(disk, events)
        self._builder = ClusterBuilder(
            settings, self.capabilities, self._exchange, self, events, auto, trusted or {}, adapt, place
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._launches: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()
        self._building: weakref.WeakKeyDictionary[GuardedLaunch, Job] = weakref.WeakKeyDictionary()  # queued or running
        self._searched: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()  # those whose faults were looked for
        _managers.add(self)

    def after_fork(self) -> None:
        """In a process that was just forked: no build goes on here."""
        self._lock = threading.Lock()
        self._building = weakref.WeakKeyDictionary()
        for launch in self._all():
            launch.judged = None
        self._builder.after_fork()

    # --- used by the pipeline --------------------------------------------------------------------------------------

    def launch(
        self,
        function: Function,
        engine: str,
        host: Callable[[], HostRun],
        shared: bool = False,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> GuardedLaunch:
        """The launch of a cluster. Its first call, or `start`, starts the build. shared: see `CompileOptions`. sizes:
        see `GuardedLaunch`."""
        record = ClusterRecord(function.name, engine, len(function.body.nodes), operators_of(function))
        record.number = next(self._numbers)
        launch = GuardedLaunch(function, engine, host, record, self.settings, self, self._build)
        launch.shares_cores = shared
        record.sizes = sizes
        launch.synchronize = self._synchronizer(engine)
        with self._lock:
            self.records.append(record)
            del self.records[:-_MAX_RECORDS]
            self._launches.add(launch)
        return launch

    def _synchronizer(self, engine: str) -> Callable[[], None] | None:
        """What waits for all work on the device of a launch; None for one on the CPU."""
        _, device = self.capabilities.compilation.engines.get(engine, (None, self._place.device))
        device = engine_and_device(engine)[1] or device
        return None if device_kind(device).streams is None else partial(synchronize, device)

    def start(self) -> None:
        """Start the builds of all clusters that have not been called yet."""
        for launch in self._all():
            if launch.record.state is State.QUEUED:
                self.begin(launch, None)

    @property
    def is_building(self) -> bool:
        """Whether an executable is being built that nothing answers for yet."""
        return any(x.is_pending for x in self._all() if x in self._building)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every started build has ended: live, failed or rejected, engines that were left for later were
        compared, and first results judged for which no caller waits. Returns False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0)

        for launch in self._all():
            if (judged := launch.judged) is not None and not judged.wait(left()):
                return False
            if launch in self._building and not launch.record.settled.wait(left()):
                return False
        for launch in self._all():
            while launch.untried:
                self.drifted(launch, f"{', '.join(launch.untried)} had not been tried")  # unless it is going on
                job = self._building.get(launch)
                if job is None or self.closed:
                    break
                if not job.done.wait(left()):
                    return False
        return True

    def begin_all(self, launches: Sequence[Launch], ranges: Mapping[Function, tuple[Range | None, ...]]) -> None:
        """Start the builds of these launches, unless they have been started. ranges: of the inputs of a call, for each
        function."""
        for launch in launches:
            if isinstance(launch, GuardedLaunch):
                launch.ranges = launch.ranges or ranges.get(launch.function, ())
                self.begin(launch, None)

    def count(self, launches: Sequence[Launch], calls: int) -> None:
        """Add calls that the host answered before the launches existed."""
        for launch in launches:
            if isinstance(launch, GuardedLaunch):
                launch.record.calls += calls
                launch.record.host_calls += calls

    def known(self) -> list[ClusterRecord]:
        """The record of every cluster."""
        with self._lock:
            return list(self.records)

    def outcomes(self) -> dict[str, Outcome]:
        """The outcomes of live and rejected clusters, by fingerprint of the function."""
        return {
            launch.function.fingerprint: outcome
            for launch in self._all()
            if (outcome := launch.record.outcome) is not None and launch.record.state in (State.LIVE, State.REJECTED)
        }

    def missing(self, file: ModelFile) -> list[str]:
        """Why executables that the clusters need are not in the file that the model was loaded from."""
        found = []
        for launch in self._all():
            function = launch.function
            if not self._builder.trusts(function):
                key = self._builder.key(launch)
                if file.executable(key) is None:
                    found.append(file.why_missing(key, function.name))
        return found

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that a worker passed through a temporary folder, serialised."""
        return self._exchange.stored()

    def close(self) -> None:
        """Cancel all builds, without waiting for them. Live clusters stay live."""
        if not self.closed:
            self.closed = True
            process_pool().cancel(self)
            for launch in self._all():
                launch.record.settled.set()

    def _all(self) -> list[GuardedLaunch]:
        with self._lock:
            return list(self._launches)

    # --- builds ----------------------------------------------------------------------------------------------------

    def begin(self, launch: GuardedLaunch, arrays: Sequence[Any] | None, seconds: float | None = 0.0) -> None:
        """Queue the build of a cluster that is queued or failed. arrays: inputs of a call. seconds: how long to wait
        for it, None for no limit; a synchronous guard, and what came with the model, are always waited for."""
        record = launch.record
        reference = weakref.ref(launch)  # a plan that is evicted meanwhile needs no executable
        inputs: list[np.ndarray] | None = None

        def work(slot: WorkerSlot) -> None:
            found = reference()
            if found is not None:
                # the caller of a synchronous guard waits; that of another one computes meanwhile
                with beside_the_caller() if self.settings.asynchronous else contextlib.nullcontext():
                    self._run_build(found, inputs, slot)

        with self._lock:
            states = (State.QUEUED, State.FAILED, State.REJECTED)
            if self.closed or launch.unwanted or launch in self._building or record.state not in states:
                return
            job = self._building[launch] = Job(work, self)
        record.retry_at = math.inf
        if record.state is not State.QUEUED:
            record.move(State.QUEUED, "retry")
        inputs = self._inputs(arrays)
        if arrays is not None and self.settings.verify:
            launch.ranges = ranges_of(arrays)

        launch.cancel = partial(process_pool().cancel_job, job)
        try:
            process_pool().submit(job)
        except WorkerFailure as e:
            with self._lock:
                self._building.pop(launch, None)
            self._fail(launch, FailureRecord("compile", e.kind, str(e)))
            return
        if not self.settings.asynchronous or self._builder.trusts(launch.function):
            seconds = None
        if seconds != 0.0:
            job.done.wait(seconds)

    def _build(self, launch: GuardedLaunch, arrays: Sequence[Any] | None, before_answer: bool) -> None:
        """Start a build for a call. A synchronous guard does it before the answer; an asynchronous one after it, so
        that the host's result is not delayed, unless a cached executable will answer sooner than the host."""
        if not self.settings.asynchronous:
            is_time = before_answer
        elif before_answer:  # a warm-up run in the background waits for nothing
            is_first = launch.record.calls == 0 and not in_background()
            is_time = is_first and self._builder.is_worth_waiting_for(launch)
        else:
            is_time = True
        if is_time:
            self.begin(launch, arrays, _LONGEST_LOAD if before_answer else 0.0)

    def _run_build(self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: WorkerSlot) -> None:
        """Build a cluster on a thread of the pool, up to LIVE, REJECTED or FAILED; nothing if the guard is closed."""
        record = launch.record
        start = time.perf_counter()
        until = time.monotonic() + self.settings.timeout
        try:
            if self.closed or launch.unwanted:
                return
            outcome, cached = self._builder.outcome(launch, inputs, slot, until)
            record.outcome = outcome
            if launch.unwanted:  # the verdict is kept on the disk, for whoever needs it
                return
            if outcome.verdict in ("wrong", "slower"):
                failure = FailureRecord("examine", kind_of(outcome), outcome.reason)
                self.record_failure(record, launch.function, failure)
                record.move(State.REJECTED, f"{outcome.verdict}: {outcome.reason}")
                if outcome.provisional and self.settings.asynchronous:
                    record.postpone(self.settings.retry)
                launch.lost(record.reason)
            elif outcome.verdict == "failed":
                self._fail(launch, FailureRecord(_stage(record), kind_of(outcome), outcome.reason))
            else:
                record.move(State.READY, outcome.reason)
                build = self._builder.executable
                left = max(until - time.monotonic(), _SHORTEST_LOAD)
                executable = call_with_timeout(left, build, launch, outcome, cached, until)
                self._go_live(launch, executable, start)
        except Cancelled:
            pass
        except WorkerFailure as e:
            if not (self.closed or launch.unwanted):
                self._fail(launch, FailureRecord(_stage(record), e.kind, str(e), e.log, e.exit_code))
        except CallTimeout as e:
            self._fail(launch, FailureRecord(_stage(record), "hung", str(e)))
        except BaseException as e:  # a library may raise SystemExit
            kind: Kind = "memory" if isinstance(e, MemoryError) else "raised"
            self._fail(launch, FailureRecord(_stage(record), kind, f"{type(e).__name__}: {e}"))
        finally:
            launch.cancel = None
            if record.state is not State.LIVE:
                launch.answered = None
            record.settled.set()  # also if it was cancelled
            with self._lock:
                self._building.pop(launch, None)
        known = record.outcome.timings.get(HOST, 0.0) if record.outcome is not None else 0.0
        if self.settings.asynchronous and record.state is State.LIVE and known > _LONG:
            give_back()  # when nobody waits any more

    def _search(self, launch: GuardedLaunch, inputs: list[np.ndarray], slot: WorkerSlot) -> None:
        """Look for the nodes of a disproved cluster that are at fault, and let an engine have the others."""
        record, start = launch.record, time.perf_counter()
        until = time.monotonic() + self.settings.timeout
        self.events.emit("guard.search", cluster=record.name, engine=record.engine)
        try:
            outcome = self._builder.search(launch, inputs, slot, until)
            if outcome is None:
                record.add_reason("no nodes were found that are at fault")
                return
            left = max(until - time.monotonic(), _SHORTEST_LOAD)
            executable = call_with_timeout(left, self._builder.executable, launch, outcome, False, until)
        except (Cancelled, WorkerFailure, CallTimeout) as e:
            record.add_reason(f"the search for nodes that are at fault ended early: {e}")
        except BaseException as e:  # a library may raise SystemExit
            record.add_reason(f"the search for nodes that are at fault failed: {describe(e)}")
        else:
            record.outcome = outcome
            record.move(State.READY, outcome.reason)
            self._go_live(launch, executable, start)

    def _race(self, launch: GuardedLaunch, why: str, slot: WorkerSlot) -> None:
        """Let the candidates of a live cluster race again; the caller of a call notices nothing, but for its speed."""
        record, before, start = launch.record, launch.record.outcome, time.perf_counter()
        until = time.monotonic() + self.settings.timeout
        self.events.emit("guard.race", cluster=record.name, engine=record.engine, chosen=record.chosen, reason=why)
        provisional = True
        try:
            outcome = self._builder.race(launch, slot, until)
            provisional = outcome.provisional
            record.races += 1
            if before is not None and runs_alike(outcome, before):
                record.outcome = outcome
                record.restate(outcome.reason)
                launch.expectation.begin(0.0, provisional)
            elif outcome.verdict == "ready":
                left = max(until - time.monotonic(), _SHORTEST_LOAD)
                executable = call_with_timeout(left, self._builder.executable, launch, outcome, False, until)
                if record.move_from(State.LIVE, State.READY, f"{why}: {outcome.reason}"):
                    record.outcome = outcome
                    self._go_live(launch, executable, start)
            elif outcome.verdict == "failed":
                record.add_reason(f"a race that was re-opened failed: {outcome.reason}")
            elif launch.retire(State.REJECTED, f"{outcome.verdict}: {outcome.reason}"):
                record.outcome = outcome
                if outcome.provisional and self.settings.asynchronous:
                    record.postpone(self.settings.retry)
        except (Cancelled, WorkerFailure, CallTimeout) as e:
            record.add_reason(f"a race that was re-opened ended early: {e}")
        except BaseException as e:  # a library may raise SystemExit
            record.add_reason(f"a race that was re-opened failed: {describe(e)}")
        finally:
            launch.answered = None
            launch.expectation.raced(time.perf_counter() - start, provisional)
            if record.outcome is not None and record.outcome.untried:  # it failed, and is not repeated for their sake
                record.outcome = dataclasses.replace(record.outcome, untried=())
            with self._lock:
                self._building.pop(launch, None)

    def _go_live(self, launch: GuardedLaunch, executable: Executable, start: float) -> None:
        record, outcome = launch.record, launch.record.outcome
        if launch.unwanted:
            return
        assert outcome is not None
        name, compilation = outcome.pieces[0].engine, self.capabilities.compilation
        engine = compilation.on(name) if engine_and_device(name)[0] in compilation.engines else None
        alone = engine is not None and len(outcome.pieces) == 1
        declared = self.capabilities.compilation.tolerance(outcome.pieces[0].engine) if alone else {}
        launch.tolerance = {**declared, **(executable.tolerance or {})}
        on_host = engine is None or is_host(engine[1])  # elsewhere, streams belong to threads
        where = ", in a child process" if isinstance(executable, IsolatedExecutable) else ""
        launch.expectation.begin(outcome.timings.get(outcome.timed, 0.0), outcome.provisional)
        launch.go_live(executable, f"{outcome.reason}{where}", any_thread=on_host)
        self.events.emit(
            "guard.live",
            level=logging.INFO,
            seconds=time.perf_counter() - start,
            cluster=record.name,
            chosen=record.chosen,
            reason=record.reason,
            timings=outcome.timings,
        )

    def _inputs(self, arrays: Sequence[Any] | None) -> list[np.ndarray] | None:
        """Copies of a call's inputs to verify on; None if that is off, or they are too large."""
        if arrays is None or not self.settings.real_inputs:
            return None
        with contextlib.suppress(XRTError):
            found = [to_numpy(a) for a in arrays]
            if sum(a.nbytes for a in found) <= MAX_INPUT_BYTES:
                return [a.copy() for a in found]
        return None

    # --- failures --------------------------------------------------------------------------------------------------

    def record_failure(self, record: ClusterRecord, function: Function, failure: FailureRecord) -> None:
        """See `FailureSink`."""
        record.add(failure)
        if failure.stage == "run" and failure.kind == "crashed":
            self._builder.crashed(function)
        more: dict[str, Any] = {} if failure.exit_code is None else {"exit_code": failure.exit_code}
        if failure.log:
            more["log"] = failure.log
        if (bundle := self._write_bundle(record, function, failure)) is not None:
            more["bundle"] = str(bundle)
        self.events.fallback(
            cluster=function.name,
            engine=record.engine,
            stage=failure.stage,
            kind=failure.kind,
            error=failure.message,
            level=logging.INFO if failure.kind == "slower" else logging.WARNING,  # that is a choice, nothing to mend
            **more,
        )

    def drifted(self, launch: GuardedLaunch, reason: str) -> None:
        """See `FailureSink`. A choice that came with the model stays, and each where nothing is built in the
        background."""
        if not self.settings.asynchronous or self._builder.trusts(launch.function):
            return
        reference = weakref.ref(launch)

        def work(slot: WorkerSlot) -> None:
            found = reference()
            if found is not None and not self.closed:
                with beside_the_caller():
                    self._race(found, reason, slot)

        with self._lock:
            if self.closed or launch in self._building:
                return
            job = self._building[launch] = Job(work, self)
        try:
            process_pool().submit(job)
        except WorkerFailure:  # the pool is closed
            with self._lock:
                self._building.pop(launch, None)

    def disproved(self, launch: GuardedLaunch, reason: str, inputs: Sequence[np.ndarray]) -> None:
        """See `FailureSink`. The search is made once for each cluster. A symbolic one, whose plan goes with it, is not
        lost before another engine has been tried."""
        self._builder.disprove(launch, reason)
        with self._lock:
            is_searched = not (self.closed or not self.settings.verify or launch in self._searched)
            self._searched.add(launch)
        may_go_on = is_searched and launch.function.is_symbolic and self._builder.has_choice(launch)
        if not may_go_on:
            launch.lost(launch.record.reason)
        if not is_searched:
            return
        reference, given = weakref.ref(launch), list(inputs)

        def work(slot: WorkerSlot) -> None:
            found = reference()
            if found is not None and not self.closed:
                try:
                    with beside_the_caller():
                        self._search(found, given, slot)
                finally:
                    if may_go_on and found.record.state is State.REJECTED:
                        found.lost(found.record.reason)

        with contextlib.suppress(WorkerFailure):  # the pool is closed
            process_pool().submit(Job(work, self))

    def _fail(self, launch: GuardedLaunch, failure: FailureRecord) -> None:
        if is_shutting_down():  # which is why it failed
            return
        record = launch.record
        self.record_failure(record, launch.function, failure)
        record.postpone(self.settings.retry)
        record.move(State.FAILED, f"{failure.kind}: {failure.message}")
        launch.lost(record.reason)

    def _write_bundle(self, record: ClusterRecord, function: Function, failure: FailureRecord) -> pathlib.Path | None:
        """Write a repro bundle of a failed build or of wrong numbers into the disk cache; its path, or None."""
        is_written = failure.stage in ("compile", "examine", "shadow") and failure.kind != "slower"
        disk = self._exchange.disk_cache() if is_written else None
        if disk is None or disk.mode != "readwrite":
            return None
        compilation = self.capabilities.all_engines
        known = engine_and_device(record.engine)[0] in compilation.engines
        blamed = (n for n in compilation.engines if failure.message.startswith(f"{n}: "))
        name = record.engine if known else next(blamed, next(iter(compilation.engines)))
        engine, device = compilation.on(name)
        stage: Stage = "compile" if failure.stage == "compile" else "wrong"
        error = f"{failure.kind}: {failure.message}"
        try:
            options = compilation.options_for(name)
            bundle = make_bundle(function, engine, device, options, stage, error, log=failure.log, sizes=record.sizes)
            return save_bundle(bundle, disk.folder / "bundles")
        except Exception as e:  # a bundle is optional
            self.events.emit("guard.no_bundle", cluster=function.name, reason=f"{type(e).__name__}: {e}")
            return None


_managers: weakref.WeakSet[GuardManager] = weakref.WeakSet()
each_in_forked_process(_managers, GuardManager.after_fork)


def _stage(record: ClusterRecord) -> str:
    """The stage of the build that a record's state stands for."""
    return {State.READY: "load", State.VERIFYING: "examine"}.get(record.state, "compile")
