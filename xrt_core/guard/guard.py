"""Guard: what one module's clusters go through, from the queue to being live, and back to the host at any trouble."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import pathlib
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.executables import ExecutableStore
from xrt_core.cache.key import CacheKey
from xrt_core.cache.model_file import ModelFile, StoredExecutable
from xrt_core.engine.contract import Executable
from xrt_core.errors import XRTError
from xrt_core.events import EventLog
from xrt_core.guard.build import Build
from xrt_core.guard.bundle import Stage, bundle_of, leave_bundle
from xrt_core.guard.examine import ExamineSettings
from xrt_core.guard.inquiry import Inquiry
from xrt_core.guard.launch import GuardedLaunch, HostRun
from xrt_core.guard.leaving import Leaving, within_library
from xrt_core.guard.limits import TooLong, within
from xrt_core.guard.outcome import Outcome, Piece
from xrt_core.guard.pool import Job, Slot, WorkerFailure, process_pool
from xrt_core.guard.salvage import examined_in_child
from xrt_core.guard.scratch import new_folder
from xrt_core.guard.settings import GuardSettings
from xrt_core.guard.state import ClusterRecord, Kind, State
from xrt_core.guard.transport import write_arrays, write_function
from xrt_core.guard.verdicts import find_verdict, keep_verdict, verdict_key
from xrt_core.guard.verification import Referee
from xrt_core.guard.worker import examined
from xrt_core.ir.function import Function
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.compilation import Compilation
from xrt_core.runtime.launch import Launch, operators_of

_MOST_RECORDS: Final = 4096
_QUICK_BYTES: Final = 4 << 20  # hashing so many bytes takes some ten milliseconds
_WORTH_SECONDS: Final = 0.1  # a host that takes as long for one call has its answer later than a load would have it
_MOMENT: Final = 10.0  # longest time that a call waits for an executable that was examined before
_MOST_INPUT_BYTES: Final = 1 << 28
"""Inputs of a call that are larger than this together are not written down to be examined with."""


class Guard:
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
        self._disk = disk
        self._auto = auto
        self._trusted = dict(trusted or {})
        self._closed = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._launches: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()
        self._begun: weakref.WeakSet[GuardedLaunch] = weakref.WeakSet()  # a job is queued for them, or runs
        # a little less than the limit, so that an examination that takes long ends with what it has found
        self._examine = ExamineSettings(settings.verify, settings.tune, deadline_seconds=0.8 * settings.timeout)
        self._store: ExecutableStore | None = None
        self._between: DiskCache | None = None

    @property
    def _compilation(self) -> Compilation:
        return self.inquiry.compilation

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
            if function.fingerprint not in self._trusted:
                key = self._compiles(launch).key(function, self._candidates(launch)[0])
                if file.executable(key) is None:
                    found.append(file.why_missing(key, function.name))
        return found

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that crossed from a child through a folder of this process, serialised."""
        with self._lock:
            store = self._store
        return [] if store is None else store.stored()

    def close(self) -> None:
        """Compile nothing any more. What is live stays so; nothing is waited for."""
        if not self._closed:
            self._closed = True
            process_pool().cancel(self)
            for launch in self._all():
                launch.record.settled.set()

    def _all(self) -> list[GuardedLaunch]:
        with self._lock:
            return list(self._launches)

    # --- for the launches ------------------------------------------------------------------------------------------

    def knows(self, launch: GuardedLaunch) -> bool:
        """See `launch.Keeper`. Nothing is compiled or hashed for the answer."""
        function, disk = launch.function, self._usable_disk()
        if disk is None or disk.mode == "verify" or self._nothing_to_examine:
            return False
        if self._compilation.unhashed_bytes(function) > _QUICK_BYTES:
            return False
        known = find_verdict(self._question(launch)[1], function, disk)
        return known is not None and known.verdict == "ready" and known.timings.get("host", 0.0) >= _WORTH_SECONDS

    def begin(self, launch: GuardedLaunch, arrays: Sequence[Any] | None, at_once: bool = False) -> None:
        """See `launch.Keeper`."""
        record = launch.record
        with self._lock:
            if self._closed or launch in self._begun or record.state not in (State.QUEUED, State.FAILED):
                return
            self._begun.add(launch)
        if record.state is State.FAILED:
            record.move(State.QUEUED, "tried again")
        inputs = self._inputs(arrays)
        reference = weakref.ref(launch)  # a plan that is forgotten meanwhile needs no executable

        def work(slot: Slot) -> None:
            found = reference()
            if found is not None and not self._closed:
                self._bring_up(found, inputs, slot)

        job = Job(work, self)
        process_pool().submit(job)
        if not self.settings.asynchronous or launch.function.fingerprint in self._trusted:
            job.done.wait()
        elif at_once:
            job.done.wait(_MOMENT)

    def fell_back(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
        """See `launch.Keeper`: one structured event for every failure."""
        launch.record.fault(stage, kind, message, log, exit_code)
        fields: dict[str, Any] = {"cluster": launch.function.name, "engine": launch.engine, "stage": stage}
        fields |= {"kind": kind, "error": message}
        if exit_code is not None:
            fields["exit_code"] = exit_code
        if log:
            fields["log"] = log
        if (left := self._leave_bundle(launch, stage, kind, message, log)) is not None:
            fields["bundle"] = str(left)
        self.events.emit("guard.fallback", level=logging.WARNING, **fields)

    def compare(
        self, launch: GuardedLaunch, inputs: Sequence[Any], results: Sequence[Any], expected: Sequence[Any]
    ) -> str:
        """See `launch.Keeper`. Where the two differ, the host runs again to say whether it is rounding."""
        engine = self._compilation.engines.get(launch.record.chosen)
        referee = Referee(launch.function, inputs, results=[to_numpy(r) for r in expected])
        check = referee.judge_results([to_numpy(r) for r in results], {} if engine is None else engine[0].tolerance)
        return "" if check.is_doubtful else check.reason

    # --- the way of a cluster ---------------------------------------------------------------------------------------

    def _bring_up(self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: Slot) -> None:
        """All the way to LIVE, REJECTED or FAILED, in a thread of the pool."""
        record = launch.record
        start = time.perf_counter()
        try:
            outcome, known = self._outcome(launch, inputs, slot)
            record.outcome = outcome
            if outcome.verdict in ("wrong", "slower"):
                self._turn_down(launch, outcome)
            elif outcome.verdict == "failed":
                stage = "examine" if record.state is State.VERIFYING else "compile"
                self._fail(launch, stage, kind_of(outcome), outcome.reason)
            else:
                record.move(State.READY, outcome.reason)
                executable = within(self.settings.timeout, self._realise, launch, outcome, known)
                launch.go_live(executable, outcome.reason)
                self._tell(record, start)
        except Leaving:
            pass
        except WorkerFailure as e:
            if not self._closed:
                stage = "examine" if record.state is State.VERIFYING else "compile"
                self._fail(launch, stage, e.kind, str(e), e.log, e.exit_code)
        except TooLong as e:
            self._fail(launch, "load" if record.state is State.READY else "compile", "hung", str(e))
        except Exception as e:
            memory = isinstance(e, MemoryError)
            stage = "load" if record.state is State.READY else "compile"
            self._fail(launch, stage, "memory" if memory else "raised", f"{type(e).__name__}: {e}")
        finally:
            with self._lock:
                self._begun.discard(launch)

    def _outcome(
        self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: Slot
    ) -> tuple[Outcome, bool]:
        """The outcome for a cluster, and whether it was known, or needs none: then executables come the plain way."""
        function, record = launch.function, launch.record
        if (saved := self._trusted.get(function.fingerprint)) is not None:
            return dataclasses.replace(saved, reason=f"it came with the model: {saved.reason}"), True
        if self._nothing_to_examine:
            names = self._candidates(launch)
            record.move(State.COMPILING)
            whole = tuple(range(len(function.body.nodes)))
            return Outcome("ready", (Piece(names[0], whole),), "nothing is examined"), True
        with within_library():
            names, key = self._question(launch)
        disk = self._usable_disk()
        known = None if disk is not None and disk.mode == "verify" else find_verdict(key, function, disk)
        if known is not None:
            self.events.emit("guard.known", cluster=function.name, engine=launch.engine, verdict=known.verdict)
            return known, True
        record.move(State.COMPILING)
        self.events.emit("guard.begin", cluster=function.name, engine=launch.engine, candidates=", ".join(names))
        if self.settings.sandbox:
            outcome = self._in_child(launch, names, inputs, slot)
        else:
            compilation = self._compiles(launch).through(self._crossing_store())
            outcome = within(
                self.settings.timeout,
                lambda: examined(
                    function, compilation, names, self._examine, inputs, lambda: self._compiled(record)
                ),
            )
        if outcome.verdict == "wrong" and kind_of(outcome) in ("raised", "memory"):
            outcome = dataclasses.replace(outcome, verdict="failed")  # it may not happen again
        keep_verdict(key, function, disk, outcome)
        return outcome, False

    @property
    def _nothing_to_examine(self) -> bool:
        return not (self.settings.verify or self.settings.tune or self.settings.sandbox)

    def _compiles(self, launch: GuardedLaunch) -> Compilation:
        return self._compilation.sharing() if launch.shares_cores else self._compilation

    def _candidates(self, launch: GuardedLaunch) -> tuple[str, ...]:
        names = Build(self._compilation).candidates(launch.function, None if self._auto else launch.engine)
        return names if self.settings.tune else names[:1]

    def _question(self, launch: GuardedLaunch) -> tuple[tuple[str, ...], CacheKey]:
        """The engines that a cluster is tried on, and the key of the verdict on them."""
        names = self._candidates(launch)
        keys = [self._compiles(launch).key(launch.function, n) for n in self._needed(names)]
        return names, verdict_key(keys, self._examine)

    def _needed(self, names: Sequence[str]) -> list[str]:
        """The engines that take part in an examination: in auto mode one that takes half a cluster shares it."""
        return list(self._compilation.engines) if self._auto else list(names)

    def _in_child(
        self, launch: GuardedLaunch, names: Sequence[str], inputs: list[np.ndarray] | None, slot: Slot
    ) -> Outcome:
        function, settings, options = launch.function, self.settings, self._compiles(launch).options
        folder = new_folder("job")
        try:
            write_function(function, folder)
            disk = self._crossing()
            request = {
                "folder": str(folder),
                "fingerprint": function.fingerprint,
                "inputs": None if inputs is None else write_arrays(inputs, folder),
                "engines": [
                    {"name": e.name, "module": type(e).__module__, "class": type(e).__qualname__, "device": device}
                    for e, device in (self._compilation.engines[n] for n in self._needed(names))
                ],
                "options": {
                    **{f.name: getattr(options, f.name) for f in dataclasses.fields(options)},
                    "extra": {engine: dict(own) for engine, own in options.extra.items()},
                },
                "cache": {"folder": str(disk.folder), "limit": disk.limit, "mode": disk.mode},
            }

            def ask(extra: Mapping[str, Any], timeout: float, stage: Callable[[str], None]) -> dict[str, Any]:
                limited = dataclasses.replace(self._examine, deadline_seconds=0.8 * timeout)
                asked = {**request, **extra, "timeout": timeout, "settings": dataclasses.asdict(limited)}
                return slot.run(asked, timeout, settings.memory, stage)

            outcome, failures = examined_in_child(
                function.body,
                names,
                ask,
                settings.timeout,
                lambda: self._compiled(launch.record),
                salvage=not launch.record.faults,
                is_wanted=lambda: not self._closed,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for engine, (stage, e) in failures.items():
            self.fell_back(launch, stage, e.kind, f"{engine}: {e}", e.log, e.exit_code)
        return outcome

    def _compiled(self, record: ClusterRecord) -> None:
        record.move_from(State.COMPILING, State.VERIFYING)

    def _realise(self, launch: GuardedLaunch, outcome: Outcome, known: bool) -> Executable:
        """The executable of an outcome, in this process: the disk has what the child made, where its engine serialises.

        Others are compiled once more here, now that they have been compiled without harm.
        """
        plain = known or (self._crossing() is self._disk and self._disk.mode == "readwrite")
        compilation = self._compiles(launch)
        compilation = compilation if plain else compilation.through(self._crossing_store())
        with within_library():
            made = Build(compilation).pieces(launch.function, outcome.pieces)
        whole = outcome.pieces[0] if len(outcome.pieces) == 1 else None
        return made if whole is not None and whole.engine == launch.engine else _AsNumpy(made)

    def _turn_down(self, launch: GuardedLaunch, outcome: Outcome) -> None:
        self.fell_back(launch, "examine", kind_of(outcome), outcome.reason)
        launch.record.move(State.REJECTED, f"{outcome.verdict}: {outcome.reason}")

    def _fail(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
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

    # --- what crosses -----------------------------------------------------------------------------------------------

    def _leave_bundle(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str
    ) -> pathlib.Path | None:
        """Leave a reproducer of a failure before the cluster was live; its path, or None where none can be written."""
        disk = self._usable_disk() if stage in ("compile", "examine") and kind != "slower" else None
        engines = self.inquiry.every.engines
        name = launch.engine if launch.engine in engines else next(iter(engines))
        if disk is None or disk.mode != "readwrite":
            return None
        engine, device = engines[name]
        options = self._compilation.options_for(name)
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
            if sum(a.nbytes for a in found) <= _MOST_INPUT_BYTES:
                return [a.copy() for a in found]
        return None

    def _usable_disk(self) -> DiskCache | None:
        """The cache on disk, where its folder may be used."""
        with contextlib.suppress(XRTError):
            if self._disk is not None:
                self._disk.prepare()
                return self._disk
        return None

    def _crossing(self) -> DiskCache:
        """The cache through which executables come from the child: the one on disk, or where that cannot be written, a
        folder of this guard, which goes with it."""
        with self._lock:
            if self._between is None:
                disk = self._usable_disk()
                if disk is not None and disk.mode != "read" and disk.prepare():
                    self._between = disk
                else:
                    folder = new_folder("cache")
                    self._between = DiskCache(folder, 1 << 40)
                    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return self._between

    def _crossing_store(self) -> ExecutableStore:
        disk = self._crossing()
        with self._lock:
            if self._store is None:
                reading = DiskCache(disk.folder, disk.limit) if disk.mode == "verify" else disk
                self._store = ExecutableStore(reading, self.events)
            return self._store


class _AsNumpy(Executable):
    """What another engine than the launch's own gives, as arrays that every engine takes."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner

    def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> Sequence[Any]:
        """Run the inner executable. Raises what it raises."""
        results = self._inner.run([to_numpy(x) for x in inputs], *args, **options)
        return [to_numpy(r) for r in results]

    def as_text(self) -> str:
        """The inner executable's."""
        return self._inner.as_text()


_TYPES: Final = re.compile(r"is (\w+)\[[^]]*\], expected (\w+)\[")


def kind_of(outcome: Outcome) -> Kind:
    """What kind of failure turned the first candidate down, by what the examination says about it."""
    if outcome.verdict == "slower":
        return "slower"
    said = outcome.errors[0] if outcome.errors else outcome.reason
    if "MemoryError" in said:
        return "memory"
    if "it raised" in said or outcome.verdict == "failed":
        return "raised"
    if "it returned" in said:
        return "wrong count"
    types = _TYPES.search(said)
    if types is None:
        return "wrong numbers"
    return "wrong shape" if types[1] == types[2] else "wrong dtype"
