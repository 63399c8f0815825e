"""ClusterBuilder: from a cluster to its verdict and its executable.

A cached verdict is used if there is one. Otherwise the candidates are compiled and verified, in a worker process where
the sandbox is on, and the verdict is cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.cache.key import CacheKey
from xrt_core.cache.live_notes import LiveNotes, live_notes
from xrt_core.cache.store import Compilation
from xrt_core.engine.boundary import is_inherited
from xrt_core.engine.contract import Executable
from xrt_core.engine.device_kinds import is_host
from xrt_core.errors import CompileError, ExecutionError, InputError, XRTError
from xrt_core.events import EventLog, Kind
from xrt_core.guard.capability import Capabilities
from xrt_core.guard.composite import CompositeBuilder, evaluate_candidates
from xrt_core.guard.ipc import ArtifactExchange, Message, describe_engine, new_folder, write_arrays, write_function
from xrt_core.guard.isolation import IS_SUPPORTED, IsolatedExecutable, IsolatedProcess
from xrt_core.guard.launch import GuardedLaunch
from xrt_core.guard.record import ClusterRecord, FailureRecord, FailureSink, State
from xrt_core.guard.stress import SIDE_EFFECT, SerialExecutable
from xrt_core.guard.timeouts import call_with_timeout, check_shutdown, is_shutting_down, native_call
from xrt_core.guard.verdict_cache import find_verdict, keep_verdict, verdict_key
from xrt_core.guard.worker_pool import WorkerFailure, WorkerSlot
from xrt_core.host.place import HostPlace
from xrt_core.ir.function import Function
from xrt_core.ir.graph import engine_and_device
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.runtime.transfers import Adapt
from xrt_core.verify.evaluate import EvaluationSettings
from xrt_core.verify.verdict import HOST, Outcome, Piece

_QUICKLY_HASHED: Final = 4 << 20  # bytes of constants, which take some ten milliseconds
_WORTH_WAITING: Final = 0.1  # seconds of a host call; loading an executable takes about as long
_OF_AN_ATTEMPT: Final = 0.6  # part of the time that is left, while there are other candidates for another attempt
_SHORTEST: Final = 0.5  # seconds that an attempt, or the loading of an executable, has at least
_WORTH_A_CHANGE: Final = 1.05  # times as fast as what runs now
_CLEAR_LEAD: Final = 2.0  # times as fast as the host while it was checked: it needs no race
_DEADLINE: Final = 0.8  # part of the time limit after which a verification concludes with what it has found


class _Examination(NamedTuple):
    """Candidates for a cluster, to be examined.

    inputs: of a call, first; None: made-up ones alone. slot: of the worker pool. until: `time.monotonic` seconds.
    right, current: as for `evaluate`.
    """

    launch: GuardedLaunch
    names: tuple[str, ...]
    inputs: list[np.ndarray] | None
    slot: WorkerSlot
    until: float
    right: tuple[str, ...] = ()
    current: str = ""


class ClusterBuilder:
    """Builds the clusters of one module.

    capabilities: has the compilation with the engines that may take part. failures: takes those of engines that crashed
    the worker where another engine is left. auto: the engine of a launch is a name for whichever engine is fastest.
    trusted: outcomes that came with a saved model, by fingerprint of the function; they hold without verification.
    adapt: makes the executable of one engine fit a launch of another. place: where the host computes.
    """

    def __init__(
        self,
        settings: GuardSettings,
        capabilities: Capabilities,
        exchange: ArtifactExchange,
        failures: FailureSink,
        events: EventLog,
        auto: bool,
        trusted: Mapping[str, Outcome],
        adapt: Adapt,
        place: HostPlace,
    ) -> None:
        self._settings = settings
        self._adapt = adapt
        self._place = place
        self._capabilities = capabilities
        self._exchange = exchange
        self._failures = failures
        self._events = events
        self._auto = auto
        self._trusted = dict(trusted)
        deadline = _DEADLINE * settings.timeout
        self._examine = EvaluationSettings(settings.verify, settings.tune, deadline_seconds=deadline)
        self._isolated: IsolatedProcess | None = None
        self._suspects: dict[str, tuple[LiveNotes, str]] = {}  # by fingerprint
        self._unchecked = not (settings.verify or settings.tune or settings.sandbox)

    def trusts(self, function: Function) -> bool:
        """Whether the outcome for a function came with the model."""
        return function.fingerprint in self._trusted

    def key(self, launch: GuardedLaunch) -> CacheKey:
        """The key of the executable on the first candidate of a cluster."""
        return self._compilation(launch).key(launch.function, self._candidates(launch)[0])

    def is_worth_waiting_for(self, launch: GuardedLaunch) -> bool:
        """Whether a first call should wait for the executable: a verdict is cached, and loading the executable takes no
        longer than the host takes for the call. Compiles nothing and hashes little."""
        function, disk = launch.function, self._exchange.disk_cache()
        if disk is None or disk.mode == "verify" or self._unchecked:
            return False
        if self._compilation(launch).unhashed_bytes(function) > _QUICKLY_HASHED:
            return False
        known = find_verdict(self._verdict_key(launch, self._candidates(launch)), function, disk)
        return known is not None and known.verdict == "ready" and known.timings.get("host", 0.0) >= _WORTH_WAITING

    def outcome(
        self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: WorkerSlot, until: float
    ) -> tuple[Outcome, bool]:
        """The outcome for a cluster, and whether its executable is to be found in the module's own cache.

        until: `time.monotonic` seconds by which it is ready, whatever it takes: attempts with several engines share it.

        Raises WorkerFailure, CallTimeout, Cancelled, and what compilation in this process raises.
        """
        function, record = launch.function, launch.record
        if (saved := self._trusted.get(function.fingerprint)) is not None:
            return dataclasses.replace(saved, reason=f"it came with the model: {saved.reason}"), True
        with native_call():
            if self._auto:
                self._capabilities.exclude_unidentified(function)
            names = self._candidates(launch)
            if self._unchecked:
                record.move(State.COMPILING)
                whole = tuple(range(len(function.body.nodes)))
                return Outcome("ready", (Piece(names[0], whole),), "results are not checked"), True
            key = self._verdict_key(launch, names)
        disk = self._exchange.disk_cache()
        known = None if disk is not None and disk.mode == "verify" else find_verdict(key, function, disk)
        if known is not None and known.provisional and record.outcome is not None:
            known = None  # this race is to be repeated
        if known is not None and known.untried and not self._settings.asynchronous:
            known = None  # who waits for the verdict gets the whole race
        if known is not None:
            self._events.emit("guard.known", cluster=function.name, engine=launch.engine, verdict=known.verdict)
            return known, True
        record.move(State.COMPILING)
        self._events.emit("guard.begin", cluster=function.name, engine=launch.engine, candidates=", ".join(names))
        if self._settings.sandbox:
            self._events.progress("wait", cluster=function.name, reason="a worker process takes it")
        work = _Examination(launch, names, inputs, slot, until)
        first = self._first_alone(work)
        outcome = self._examined(work) if first is None else first
        if outcome.verdict == "wrong" and kind_of(outcome) in ("raised", "memory"):
            outcome = dataclasses.replace(outcome, verdict="failed")  # a retry may succeed
        keep_verdict(key, function, disk, outcome)
        return outcome, False

    def _examined(self, work: _Examination) -> Outcome:
        """The outcome for the candidates. Where the host refuses inputs that are made up, as numbers among them must
        be sizes of others, they are examined on those of a call that it has answered."""
        launch = work.launch
        try:
            return self._evaluated(work)
        except (WorkerFailure, ExecutionError, InputError) as e:
            answered = launch.answered  # perhaps only now
            refused = not isinstance(e, WorkerFailure) or e.kind == "unusable"
            if work.inputs is not None or answered is None or not refused:
                raise
            name = launch.function.name
            self._events.emit("guard.real_inputs", cluster=name, engine=launch.engine, reason=str(e))
            return self._evaluated(work._replace(inputs=answered.inputs))

    def _first_alone(self, work: _Examination) -> Outcome | None:
        """The outcome for the first candidate of a symbolic function, which answers before the others are compiled and
        timed: calls whose sizes vary come one after another, and would wait on the host for the whole race. None where
        that is no such function, or where this candidate does not do."""
        first, others = work.names[:1], work.names[1:]
        if not (work.launch.function.is_symbolic and self._settings.asynchronous and self._settings.tune and others):
            return None
        now = time.monotonic()
        try:
            found = self._examined(work._replace(names=first, until=now + _OF_AN_ATTEMPT * (work.until - now)))
        except WorkerFailure:
            if is_shutting_down():
                raise
            return None  # the others are tried beside it, and what failed is recorded
        if found.verdict != "ready":
            return None
        reason = f"{found.reason}; {', '.join(others)} will be compared later"
        return dataclasses.replace(found, untried=others, reason=reason)

    def disprove(self, launch: GuardedLaunch, reason: str) -> None:
        """Keep the verdict "wrong" for a cluster, in place of the one it was live by."""
        with contextlib.suppress(XRTError):
            key = self._verdict_key(launch, self._candidates(launch))
            whole = Piece(HOST, tuple(range(len(launch.function.body.nodes))))
            outcome = Outcome("wrong", (whole,), f"a shadow run disagreed: {reason}")
            keep_verdict(key, launch.function, self._exchange.disk_cache(), outcome)

    def has_choice(self, launch: GuardedLaunch) -> bool:
        """Whether more than one engine takes a cluster."""
        return len(self._candidates(launch)) > 1

    def search(self, launch: GuardedLaunch, inputs: list[np.ndarray], slot: WorkerSlot, until: float) -> Outcome | None:
        """The outcome for a cluster that was disproved on `inputs` while it was live: without the nodes that are at
        fault, by an evaluation that begins with these inputs. None if that ends where it was; the verdict stays then.

        Raises as `outcome`.
        """
        names, before = self._candidates(launch), launch.record.outcome
        if launch.function.is_symbolic:
            launch.record.sizes = launch.sizes_of([x.shape for x in inputs])
        outcome = self._evaluated(_Examination(launch, names, inputs, slot, until))
        if outcome.verdict != "ready" or (before is not None and runs_alike(outcome, before)):
            return None
        keep_verdict(self._verdict_key(launch, names), launch.function, self._exchange.disk_cache(), outcome)
        return outcome

    def race(self, launch: GuardedLaunch, slot: WorkerSlot, until: float) -> Outcome:
        """The outcome of another race of the candidates of a live cluster, on sizes of its calls where they vary. What
        runs now stays unless another is 5 % faster. Candidates that were found right are timed; one that takes over is
        checked again.

        Raises as `outcome`.
        """
        names, before = self._candidates(launch), launch.record.outcome
        if launch.function.is_symbolic:
            launch.record.raced = launch.sizes_seen()
        right, current = _found_right(before, names)
        outcome = self._evaluated(_Examination(launch, names, None, slot, until, right, current))
        if before is not None and outcome.pieces == before.pieces:  # what goes with it was found out before
            outcome = dataclasses.replace(
                outcome, finite_only=before.finite_only, serialised=before.serialised, notes=before.notes
            )
        now, then = outcome.timings.get(outcome.timed), outcome.timings.get(before.timed) if before else None
        if before is not None and now and then and outcome.timed != before.timed and then < _WORTH_A_CHANGE * now:
            reason = f"{before.timed} stays, as {outcome.timed} is not {_WORTH_A_CHANGE:g}x as fast"
            busy = "; provisional, as other processes kept the machine busy" if outcome.provisional else ""
            outcome = dataclasses.replace(
                before,
                timings=outcome.timings,
                reason=reason + busy,
                provisional=outcome.provisional,
                untried=(),
            )
        keep_verdict(self._verdict_key(launch, names), launch.function, self._exchange.disk_cache(), outcome)
        return outcome

    def executable(self, launch: GuardedLaunch, outcome: Outcome, cached: bool, until: float) -> Executable:
        """The executable of an outcome, loaded from where the worker stored it, or compiled again in this process if
        its engine cannot serialise it. cached: it is in the module's own cache. Raises what engines raise.

        Where executables are isolated, or a process ended while it ran this one, the same happens in a process for
        them, and raises what `IsolatedProcess.load` does.
        """
        if self._is_isolated(launch):
            if launch.function.is_symbolic:  # memory shared with a child process has fixed sizes
                raise CompileError("a process of its own runs executables of static shapes only")
            self._isolated = self._isolated or IsolatedProcess()
            return self._load_isolated(self._isolated, launch, outcome, until)
        compilation = self._compilation(launch)
        if not (cached or self._exchange.is_disk_cache):
            compilation = compilation.through(self._exchange.store())
        with native_call():
            made = CompositeBuilder(compilation, place=self._place).pieces(launch.function, outcome.pieces)
        if len(outcome.pieces) == 1 and outcome.pieces[0].engine != launch.engine:
            made = self._adapt(made, outcome.pieces[0].engine, launch.engine)
        if outcome.serialised:
            made = SerialExecutable(made, [p.engine for p in outcome.pieces if p.engine != HOST])
        return made

    def _begins_to_compile(self, launch: GuardedLaunch, engine: str) -> None:
        check_shutdown()  # which waits for the compilation that has begun, and no further one
        self._events.progress("compile", cluster=launch.function.name, engine=engine)

    def _verifying(self, record: ClusterRecord, engine: str) -> None:
        record.move_from(State.COMPILING, State.VERIFYING)
        self._events.progress("verify", cluster=record.name, engine=engine)

    def after_fork(self) -> None:
        """In a process that was just forked: the isolated one is its parent's."""
        self._isolated, self._suspects = None, {}

    def crashed(self, function: Function) -> None:
        """Note that the process of an isolated executable has ended."""
        if (suspect := self._suspects.get(function.fingerprint)) is not None:
            notes, digest = suspect
            notes.isolated(digest, is_sound=False)

    def _is_isolated(self, launch: GuardedLaunch) -> bool:
        """Whether the launch's executable belongs into a process of its own: always, as this process was forked while
        an engine was in use, or as it is a suspect. If not, its runs are noted."""
        function, disk = launch.function, self._exchange.disk_cache()
        if self._settings.isolated:
            return True
        compilation = self._capabilities.compilation
        if IS_SUPPORTED and any(is_inherited(compilation.on(n)[0]) for n in self._engines(self._candidates(launch))):
            return True
        # copies of what a step of training updates would cost more than the suspicion is worth
        if disk is None or disk.mode != "readwrite" or function.aliases or not IS_SUPPORTED:
            return False
        notes, digest = live_notes(disk.folder), self._verdict_key(launch, self._candidates(launch)).digest
        if not notes.is_suspect(digest):
            launch.note = notes.begin(digest)
            return False
        self._suspects[function.fingerprint] = notes, digest
        notes.isolated(digest, is_sound=True)
        self._events.emit(
            "guard.suspect", level=logging.WARNING, cluster=function.name, engine=launch.engine,
            reason="a process ended while it ran this cluster, by a crash or because it was killed: a child process "
            "runs it now, until a process that did so ends in order; `xrt cache clear` forgets it",
        )  # fmt: skip
        return True

    def _load_isolated(
        self, process: IsolatedProcess, launch: GuardedLaunch, outcome: Outcome, until: float
    ) -> IsolatedExecutable:
        folder = new_folder("job")
        try:
            request = self._request(launch, self._candidates(launch), None, folder)
            request |= {"pieces": outcome.to_json()["pieces"], "serialised": outcome.serialised}
            request["timeout"] = _left(until)
            return process.load(launch.function, request, _left(until), self._settings.memory)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # --- candidates ------------------------------------------------------------------------------------------------

    def _compilation(self, launch: GuardedLaunch) -> Compilation:
        compilation = self._capabilities.compilation
        return compilation.sharing() if launch.shares_cores else compilation

    def _candidates(self, launch: GuardedLaunch) -> tuple[str, ...]:
        builder = CompositeBuilder(self._capabilities.compilation)
        any_engine = self._auto and not engine_and_device(launch.engine)[1]
        names = builder.candidates(launch.function, None if any_engine else launch.engine)
        return names if self._settings.tune else names[:1]

    def _examination(self, launch: GuardedLaunch) -> EvaluationSettings:
        """How a cluster is examined: one that is placed on a device stays there, whatever is faster elsewhere, and of a
        symbolic one, whose calls take as many times as they have sizes, a clear lead over the host is enough."""
        if engine_and_device(launch.engine)[1]:
            return dataclasses.replace(self._examine, tune=False)
        lead = _CLEAR_LEAD if launch.function.is_symbolic else 0.0
        return dataclasses.replace(self._examine, clear_lead=lead)

    def _engines(self, names: Sequence[str]) -> list[str]:
        """The engines that candidates need: with "auto" one that supports part of a cluster shares it with others."""
        placed = any(engine_and_device(n)[1] for n in names)
        return list(self._capabilities.compilation.engines) if self._auto and not placed else list(names)

    def _verdict_key(self, launch: GuardedLaunch, names: Sequence[str]) -> CacheKey:
        compilation = self._compilation(launch)
        return verdict_key(
            [compilation.key(launch.function, n) for n in self._engines(names)], self._examination(launch)
        )

    # --- compilation and verification ------------------------------------------------------------------------------

    def _evaluated(self, work: _Examination) -> Outcome:
        return self._in_worker(work) if self._settings.sandbox else self._in_process(work)

    def _in_process(self, work: _Examination) -> Outcome:
        launch = work.launch
        return call_with_timeout(
            _left(work.until),
            _within_native_call,
            evaluate_candidates,
            launch.function,
            self._compilation(launch).through(self._exchange.store()),
            work.names,
            self._examination(launch),
            work.inputs,
            lambda engine: self._begins_to_compile(launch, engine),
            lambda: self._verifying(launch.record, launch.engine),
            False,
            launch.ranges,
            self._place,
            launch.record.sizes,
            launch.record.raced,
            work.right,
            work.current,
        )

    def _in_worker(self, work: _Examination) -> Outcome:
        """An engine that fails the worker is excluded, and the remaining candidates are tried again."""
        launch, names, record = work.launch, work.names, work.launch.record
        lost: dict[str, tuple[str, WorkerFailure]] = {}
        folder = new_folder("job")
        try:
            request = self._request(launch, names, work.inputs, folder)
            request |= {"right": list(work.right), "current": work.current}
            while True:
                left = [n for n in names if n not in lost]
                attempt = _Attempt(record, left, self._verifying, self._events)
                try:
                    seconds = _left(work.until) * (_OF_AN_ATTEMPT if len(left) > 1 else 1.0)
                    asked = {**request, "candidates": left}
                    outcome = self._answer(work.slot, asked, attempt, launch.function, seconds)
                    break
                except WorkerFailure as e:
                    lost[attempt.engine] = attempt.stage, e
                    if len(left) == 1 or e.kind not in ("crashed", "hung", "memory") or is_shutting_down():
                        raise next(iter(lost.values()))[1] from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if lost and outcome.verdict not in ("ready", "slower"):
            raise next(iter(lost.values()))[1]
        for engine, (stage, lost_by) in lost.items():
            message = f"{engine}: {lost_by}"
            failure = FailureRecord(stage, lost_by.kind, message, lost_by.log, lost_by.exit_code)
            self._failures.record_failure(record, launch.function, failure)
        errors = tuple(f"{engine}: {error.kind}: {error}" for engine, (_, error) in lost.items())
        return dataclasses.replace(outcome, errors=errors + outcome.errors)

    def _answer(
        self, slot: WorkerSlot, request: Mapping[str, Any], attempt: _Attempt, function: Function, seconds: float
    ) -> Outcome:
        settings = {**request["settings"], "deadline_seconds": _DEADLINE * seconds}
        request = {**request, "timeout": seconds, "settings": settings}
        on_device = not all(is_host(e["device"]) for e in request["engines"])
        answer = slot.run(request, seconds, self._settings.memory, attempt.on_progress, on_device=on_device)
        if answer.error is not None:
            raise WorkerFailure(answer.kind, answer.error)
        outcome = answer.outcome
        known = {HOST, *request.get("candidates", ()), *(e["name"] for e in request["engines"])}
        if (
            outcome is None
            or not outcome.covers(len(function.body.nodes))
            or not known.issuperset(p.engine for p in outcome.pieces)
        ):
            raise WorkerFailure("crashed", "the worker's answer is no outcome for this cluster")
        return outcome

    def _request(
        self, launch: GuardedLaunch, names: Sequence[str], inputs: list[np.ndarray] | None, folder: pathlib.Path
    ) -> dict[str, Any]:
        """What `worker.run_job` needs, but for the candidates. Raises OSError and ExportError."""
        function, compilation = launch.function, self._compilation(launch)
        disk, options = self._exchange.shared_cache(), compilation.options
        write_function(function, folder)
        return {
            "folder": str(folder),
            "fingerprint": function.fingerprint,
            "ranges": launch.ranges,
            "sizes": dict(launch.record.sizes),
            "raced": [dict(sizes) for sizes in launch.record.raced],
            "host": self._place.device,
            "inputs": None if inputs is None else write_arrays(inputs, folder),
            "engines": [
                {**describe_engine(e), "device": device}
                for e, device in (compilation.on(n) for n in self._engines(names))
            ],
            "options": {
                **{f.name: getattr(options, f.name) for f in dataclasses.fields(options)},
                "extra": {engine: dict(own) for engine, own in options.extra.items()},
            },
            "cache": {"folder": str(disk.folder), "limit": disk.limit, "mode": disk.mode, "shared": disk.shared},
            "settings": dataclasses.asdict(self._examination(launch)),
        }


def runs_alike(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes run a cluster in the same way."""
    return (one.pieces, one.serialised, one.finite_only) == (other.pieces, other.serialised, other.finite_only)


def _found_right(before: Outcome | None, names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The labels of the candidates that a cluster's outcome found right as a whole, and of the one that runs it."""
    if before is None or before.verdict != "ready":
        return (), ""
    right = [name for name in before.timings if name.removesuffix(" alone") in names]
    first = before.pieces[0]
    current = first.engine if len(before.pieces) == 1 and first.fused else before.timed
    if len(before.pieces) == 1 and first.fused and current in names and current not in right:
        right.append(current)  # it answers untimed
    return tuple(right), current if current in right else ""


def _within_native_call(call: Callable[..., Outcome], *args: Any) -> Outcome:
    """The call, for which the end of the interpreter waits: this thread must not be inside a library then."""
    with native_call():
        return call(*args)


def _left(until: float) -> float:
    """Seconds until a deadline, at least `_SHORTEST`."""
    return max(until - time.monotonic(), _SHORTEST)


class _Attempt:
    """How far the worker is with a request: the one of the engines that it compiles with, and the stage."""

    def __init__(
        self,
        record: ClusterRecord,
        engines: Sequence[str],
        verifying: Callable[[ClusterRecord, str], None],
        events: EventLog,
    ) -> None:
        self._record = record
        self._engines = engines
        self._verifying = verifying
        self._events = events
        self.engine = engines[0]
        self.stage = "compile"

    def on_progress(self, message: Message) -> None:
        if message.stage == "compiling":
            self.stage = "compile"
            if message.engine in self._engines:
                self.engine = message.engine
            self._events.progress("compile", cluster=self._record.name, engine=self.engine, nodes=self._record.nodes)
        else:
            self.stage = "examine"
            self._verifying(self._record, self.engine)


_TYPES: Final = re.compile(r"is (\w+)\[[^]]*\], expected (\w+)\[")


def kind_of(outcome: Outcome) -> Kind:
    """The kind of failure for which the first candidate was rejected, read from the outcome's messages."""
    if outcome.verdict == "slower":
        return "slower"
    message = outcome.errors[0] if outcome.errors else outcome.reason
    if SIDE_EFFECT in message:
        return "side effect"
    if "MemoryError" in message:
        return "memory"
    if "it raised" in message or outcome.verdict == "failed":
        return "raised"
    if "it returned" in message:
        return "wrong count"
    types = _TYPES.search(message)
    if types is None:
        return "wrong numbers"
    return "wrong shape" if types[1] == types[2] else "wrong dtype"
