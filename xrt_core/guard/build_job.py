"""BringUp: from a cluster to what is decided about it, and to its executable: known, or found out in the child."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from xrt_core.cache.key import CacheKey
from xrt_core.engine.contract import Executable
from xrt_core.events import EventLog, Kind
from xrt_core.guard import timeouts
from xrt_core.guard.capability import Inquiry
from xrt_core.guard.composite import Build
from xrt_core.guard.ipc import ArtifactExchange, new_folder, write_arrays, write_function
from xrt_core.guard.launch import GuardedLaunch
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.record import ClusterRecord, State
from xrt_core.guard.salvage import examined_in_child
from xrt_core.guard.timeouts import call_with_timeout, native_call
from xrt_core.guard.verdict_cache import find_verdict, keep_verdict, verdict_key
from xrt_core.guard.worker import examined
from xrt_core.guard.worker_pool import WorkerSlot
from xrt_core.ir.function import Function
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.engine_compiler import Compilation
from xrt_core.verify.evaluate import ExamineSettings
from xrt_core.verify.verdict import Outcome, Piece

_QUICK_BYTES: Final = 4 << 20  # hashing so many bytes takes some ten milliseconds
_WORTH_SECONDS: Final = 0.1  # a host that takes as long for one call has its answer later than a load would have it


class Keeper(Protocol):
    """What this needs of the guard."""

    @property
    def closed(self) -> bool:
        """Whether nothing is to be compiled any more."""

    def fell_back(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
        """Note that the host stands in."""


class BuildJob:
    """Finds out what is to run a cluster, and makes it.

    inquiry: has the engines that may take part. auto: the launches' engine is a name for whichever engine is best.
    trusted: outcomes that came with the model, by the fingerprints of their functions; they hold at once.
    """

    def __init__(
        self,
        settings: GuardSettings,
        inquiry: Inquiry,
        crossing: ArtifactExchange,
        keeper: Keeper,
        events: EventLog,
        auto: bool,
        trusted: Mapping[str, Outcome],
    ) -> None:
        self._settings = settings
        self._inquiry = inquiry
        self._crossing = crossing
        self._keeper = keeper
        self._events = events
        self._auto = auto
        self._trusted = dict(trusted)
        # a little less than the limit, so that an examination that takes long ends with what it has found
        self._examine = ExamineSettings(settings.verify, settings.tune, deadline_seconds=0.8 * settings.timeout)

    @property
    def _compilation(self) -> Compilation:
        return self._inquiry.compilation

    def trusts(self, function: Function) -> bool:
        """Whether the outcome for a function came with the model."""
        return function.fingerprint in self._trusted

    def key(self, launch: GuardedLaunch) -> CacheKey:
        """The key of the executable on the first engine that a cluster is tried on."""
        return self._compiles(launch).key(launch.function, self._candidates(launch)[0])

    def knows(self, launch: GuardedLaunch) -> bool:
        """See `launch.Keeper`. Nothing is compiled or hashed for the answer."""
        function, disk = launch.function, self._crossing.usable()
        if disk is None or disk.mode == "verify" or self._nothing_to_examine:
            return False
        if self._compilation.unhashed_bytes(function) > _QUICK_BYTES:
            return False
        known = find_verdict(self._question(launch)[1], function, disk)
        return known is not None and known.verdict == "ready" and known.timings.get("host", 0.0) >= _WORTH_SECONDS

    def outcome(self, launch: GuardedLaunch, inputs: list[np.ndarray] | None, slot: WorkerSlot) -> tuple[Outcome, bool]:
        """The outcome for a cluster, and whether it was known, or needs none: then executables come the plain way."""
        function, record = launch.function, launch.record
        if (saved := self._trusted.get(function.fingerprint)) is not None:
            return dataclasses.replace(saved, reason=f"it came with the model: {saved.reason}"), True
        if self._nothing_to_examine:
            names = self._candidates(launch)
            record.move(State.COMPILING)
            whole = tuple(range(len(function.body.nodes)))
            return Outcome("ready", (Piece(names[0], whole),), "nothing is examined"), True
        with native_call():
            names, key = self._question(launch)
        disk = self._crossing.usable()
        known = None if disk is not None and disk.mode == "verify" else find_verdict(key, function, disk)
        if known is not None:
            self._events.emit("guard.known", cluster=function.name, engine=launch.engine, verdict=known.verdict)
            return known, True
        record.move(State.COMPILING)
        self._events.emit("guard.begin", cluster=function.name, engine=launch.engine, candidates=", ".join(names))
        if self._settings.sandbox:
            outcome = self._in_child(launch, names, inputs, slot)
        else:
            compilation = self._compiles(launch).through(self._crossing.store())
            outcome = call_with_timeout(
                self._settings.timeout,
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
        return not (self._settings.verify or self._settings.tune or self._settings.sandbox)

    def _compiles(self, launch: GuardedLaunch) -> Compilation:
        return self._compilation.sharing() if launch.shares_cores else self._compilation

    def _candidates(self, launch: GuardedLaunch) -> tuple[str, ...]:
        names = Build(self._compilation).candidates(launch.function, None if self._auto else launch.engine)
        return names if self._settings.tune else names[:1]

    def _question(self, launch: GuardedLaunch) -> tuple[tuple[str, ...], CacheKey]:
        """The engines that a cluster is tried on, and the key of the verdict on them."""
        names = self._candidates(launch)
        keys = [self._compiles(launch).key(launch.function, n) for n in self._needed(names)]
        return names, verdict_key(keys, self._examine)

    def _needed(self, names: Sequence[str]) -> list[str]:
        """The engines that take part in an examination: in auto mode one that takes half a cluster shares it."""
        return list(self._compilation.engines) if self._auto else list(names)

    def _in_child(
        self, launch: GuardedLaunch, names: Sequence[str], inputs: list[np.ndarray] | None, slot: WorkerSlot
    ) -> Outcome:
        function, settings, options = launch.function, self._settings, self._compiles(launch).options
        folder = new_folder("job")
        try:
            write_function(function, folder)
            disk = self._crossing.between()
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
                is_wanted=lambda: not (self._keeper.closed or timeouts.begun()),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for engine, (stage, e) in failures.items():
            self._keeper.fell_back(launch, stage, e.kind, f"{engine}: {e}", e.log, e.exit_code)
        return outcome

    def _compiled(self, record: ClusterRecord) -> None:
        record.move_from(State.COMPILING, State.VERIFYING)

    def realise(self, launch: GuardedLaunch, outcome: Outcome, known: bool) -> Executable:
        """The executable of an outcome, in this process: the disk has what the child made, where its engine serialises.

        Others are compiled once more here, now that they have been compiled without harm.
        """
        plain = known or self._crossing.is_the_cache
        compilation = self._compiles(launch)
        compilation = compilation if plain else compilation.through(self._crossing.store())
        with native_call():
            made = Build(compilation).pieces(launch.function, outcome.pieces)
        whole = outcome.pieces[0] if len(outcome.pieces) == 1 else None
        return made if whole is not None and whole.engine == launch.engine else _AsNumpy(made)


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
