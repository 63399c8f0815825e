"""The examination of one cluster: every candidate is compiled, checked, corrected where it is wrong, and timed.

It knows no process, thread or cache: whoever calls it decides where it runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Executable, RunOptions
from xrt_core.errors import InputError, XRTError
from xrt_core.ir.function import Function
from xrt_core.runtime.arrays import to_numpy
from xrt_core.verify.autotune import Stopwatch, tune
from xrt_core.verify.checker import Check, ResultChecker
from xrt_core.verify.inputs import SEQUENCE, synthesize_inputs
from xrt_core.verify.isolate import Budget, Candidate, Correction, Corrector, OutOfBudget
from xrt_core.verify.reference import Host
from xrt_core.verify.subgraph import Run, run_pieces
from xrt_core.verify.value_ranges import needs_of_inputs
from xrt_core.verify.verdict import HOST, Faults, Outcome, Piece

__all__ = ["Candidate", "ExamineSettings", "examine"]

_NO_DONATION: Final = RunOptions(donate=False)
_SHOWN: Final = 5
NO_FAULTS: Final[Mapping[str, Faults]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExamineSettings:
    """What an examination does and may cost. All fields are plain data.

    verify: check results, and correct what is wrong. tune: time what is right against the host and each other.
    seed: of the made-up inputs. deadline_seconds: after which no compilation, check or round of timing begins.
    max_compiles: compilations that the correction of one candidate may take. stimuli: sets of inputs that results are
    checked on, and runs of the host that this may cost; a result of the last set that is out of bounds costs two more.
    """

    verify: bool = True
    tune: bool = True
    seed: int = 0
    deadline_seconds: float = float("inf")
    max_compiles: int = 64
    stimuli: int = 2


@dataclass(frozen=True)
class _Contestant:
    """What is left of a candidate and right: its pieces, with executables for those that are not the host's, or one for
    all of them together. quickest: seconds of the quickest run when it was checked."""

    candidate: Candidate
    pieces: tuple[Piece, ...]
    executables: tuple[Executable | None, ...]
    note: str
    quickest: float = math.inf

    @property
    def label(self) -> str:
        if self.candidate.pieces is not None or all(p.engine != HOST and p.fused for p in self.pieces):
            return self.candidate.engine
        return f"{self.candidate.engine} {'unfused' if len(self.pieces) == 1 else 'in pieces'}"


def examine(
    function: Function,
    candidates: Sequence[Candidate],
    settings: ExamineSettings,
    inputs: Sequence[np.ndarray] | None = None,
    *,
    faults: Mapping[str, Faults] = NO_FAULTS,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """What to do with a cluster.

    candidates: engines that may take it, in the order in which they are preferred. inputs: those of a real call; they
    are the first set that results are checked on, and those that are timed. Without them both are made up. faults: of
    candidates that are known to be at fault as a whole, by engine.

    Without `tune` the first candidate that is right wins. Only where none is right as a whole are they corrected, in
    order, until something is left of one. Raises nothing for whatever an engine does; XRTError where even the host
    cannot run the function.
    """
    return _Examination(function, settings, inputs, faults, clock).outcome(candidates)


class _Examination:
    def __init__(
        self,
        function: Function,
        settings: ExamineSettings,
        inputs: Sequence[np.ndarray] | None,
        faults: Mapping[str, Faults],
        clock: Callable[[], float],
    ) -> None:
        self.function, self.settings, self.faults, self.clock = function, settings, faults, clock
        self.until = clock() + settings.deadline_seconds
        self.whole = tuple(range(len(function.body.nodes)))
        self.errors: list[str] = []
        self.timings: dict[str, float] = {}
        self.referees: list[ResultChecker] = []
        self.host = Host(function, clock)
        self.judge: ResultChecker | None = None  # knows the function; each set has one of its own
        self.quickest: dict[str, float] = {}  # seconds of one run of each candidate as it was checked
        self._wasted = 0  # runs of the host on sets that showed nothing
        self._sources = _sources(function, settings.seed, inputs)

    def outcome(self, candidates: Sequence[Candidate]) -> Outcome:
        contestants: list[_Contestant] = []
        turned_down: list[tuple[Candidate, str, bool]] = []
        for candidate in candidates:
            if (known := self.faults.get(candidate.engine)) is not None:
                turned_down.append((candidate, known.reason, False))
                self.errors.append(f"{candidate.engine}: {known.reason}")
                continue
            executable, reason = self._compiled(candidate)
            check = None if executable is None or not self.settings.verify else self._check(candidate, executable)
            if executable is not None and (check is None or check.is_right):
                pieces = candidate.pieces or (Piece(candidate.engine, self.whole),)
                quickest = self.quickest.get(candidate.engine, math.inf)
                contestants.append(_Contestant(candidate, pieces, (executable,), self._note(check), quickest))
                if not self.settings.tune:
                    break
            else:
                reason = reason or (check.reason if check is not None else "")
                self.errors.append(f"{candidate.engine}: {reason}")
                if candidate.pieces is None:
                    turned_down.append((candidate, reason, executable is not None))
        if not contestants:
            for candidate, reason, compiles in turned_down:
                corrected = self._corrected(candidate, reason, compiles)
                if corrected is not None:
                    contestants.append(corrected)
                    break
        if not contestants:
            any_compiles = any(compiles for _, _, compiles in turned_down)
            return self._on_host("wrong" if any_compiles else "failed", "; ".join(self.errors) or "no candidates")
        return self._tuned(contestants)

    # --- steps -----------------------------------------------------------------------------------------------------

    def _compiled(self, candidate: Candidate) -> tuple[Executable | None, str]:
        budget = Budget(1, self.until, self.clock)
        try:
            with self._timed("compile"):
                return budget.build(candidate, self.function, True), ""
        except OutOfBudget:
            return None, "no time was left to compile it"
        except Exception as e:  # whatever an engine raises
            return None, f"it does not compile: {type(e).__name__}: {e}"

    def _check(self, candidate: Candidate, executable: Executable) -> Check:
        found = Check("")
        runs, apart = Stopwatch(self.clock), Stopwatch(self.clock)
        budget = Budget(1, self.until, self.clock)
        with self._timed("verify"):
            for k in range(self.settings.stimuli):
                referee = self._referee(k)
                if referee is None:
                    break
                found = referee.judge(runs.on(executable), candidate.tolerance)
                if not found.is_right:
                    break
            if found.is_doubtful:
                timed = Candidate(
                    candidate.engine, lambda f, fused: apart.on(candidate.build(f, fused)), candidate.tolerance
                )
                if self._corrector(timed, budget).are_right_apart():
                    found = Check("", found.differences, found.tolerance)
        self._move("verify", "compile", budget.seconds)
        self._move("verify", "checked runs", runs.seconds + apart.seconds)
        self.quickest[candidate.engine] = runs.quickest
        return found

    def _referee(self, k: int) -> ResultChecker | None:
        """The judge over set number `k` of inputs; None where the budget of host runs is used up."""
        if k < len(self.referees):
            return self.referees[k]
        error: XRTError | None = None
        dull: ResultChecker | None = None
        while not k or (self._host_runs < self.settings.stimuli and self.clock() <= self.until):
            arrays = next(self._sources, None)
            if arrays is None:
                break
            if self.judge is None:
                self.judge = ResultChecker(self.function, arrays, self.settings.seed, host=self.host)
            referee = self.judge.on(arrays)
            try:
                if referee.is_telling:
                    self.referees.append(referee)
                    return referee
                dull = dull or referee
            except XRTError as e:  # made-up inputs that the operators refuse
                error = e
            self._wasted += 1
        if k:
            return None
        if dull is None:
            raise error or InputError(f"no inputs could be made for {self.function.name!r}")
        self.referees.append(dull)
        return dull

    @property
    def _host_runs(self) -> int:
        return self._wasted + sum(r.host_runs for r in self.referees)

    def _corrected(self, candidate: Candidate, reason: str, compiles: bool) -> _Contestant | None:
        self._referee(0)
        with self._timed("correct"):
            corrector = self._corrector(candidate, Budget(self.settings.max_compiles, self.until, self.clock))
            if (known := self.faults.get(candidate.engine)) is not None:
                corrector.known_faults(known)
            else:
                corrector.known_wrong(reason)
            found = corrector.correct(apart=compiles)
        for i, why in found.offenders.items():
            self.errors.append(f"{candidate.engine}: {label(self.function, i)}: {why}")
        if not found.kept:
            return None
        return _Contestant(candidate, found.pieces, found.executables, self._left(found, reason))

    def _tuned(self, contestants: Sequence[_Contestant]) -> Outcome:
        first = contestants[0]
        if not self.settings.tune:
            return self._ready(first, f"{first.label}: {first.note}")
        referee = self._referee(0)
        assert referee is not None
        arrays = [x.copy() for x in referee.inputs]
        runs: dict[str, Callable[[], object]] = {}
        for c in contestants:
            runs.setdefault(c.label, _repeat(self._run_of(c), arrays))
        runs[HOST] = _repeat(self.host.run, arrays)
        known = {HOST: self.host.seconds} | {c.label: c.quickest for c in contestants}
        try:
            tuning = tune(runs, HOST, clock=self.clock, until=self.until, known=known)
        except Exception as e:  # it ran when it was checked
            self.errors.append(f"it failed while it was timed: {type(e).__name__}: {e}")
            return self._on_host("failed", self.errors[-1])
        self.timings.update(tuning.seconds)
        if tuning.winner == HOST:
            times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in tuning.seconds.items())
            return self._on_host("slower", f"the host is faster: {times}")
        chosen = next(c for c in contestants if c.label == tuning.winner)
        ratio = tuning.seconds[HOST] / max(tuning.seconds[tuning.winner], 1e-9)
        rivals = [name for name in tuning.seconds if name not in (HOST, tuning.winner)]
        over = f", faster than {', '.join(rivals)}" if rivals else ""
        return self._ready(chosen, f"{chosen.label}: {chosen.note}, {ratio:.3g}x as fast as the host{over}")

    # --- parts of steps --------------------------------------------------------------------------------------------

    def _run_of(self, contestant: _Contestant) -> Run:
        def run_of(executable: Executable | None) -> Run | None:
            return None if executable is None else lambda given: executable.run(given, _NO_DONATION)

        if len(contestant.executables) == 1:
            run = run_of(contestant.executables[0])
            assert run is not None
            return lambda given: [to_numpy(r) for r in run(given)]
        return run_pieces(
            self.function, [p.nodes for p in contestant.pieces], [run_of(x) for x in contestant.executables]
        )

    def _corrector(self, candidate: Candidate, budget: Budget) -> Corrector:
        return Corrector(self.function, candidate, [r.inputs for r in self.referees], budget, self.settings.seed)

    def _note(self, check: Check | None) -> str:
        if check is None:
            return "results were not checked"
        own = f", within its own tolerance ({check.tolerance})" if check.tolerance else ""
        count = len(self.referees)
        return f"right on {count} set{'s' if count != 1 else ''} of inputs{own}"

    def _left(self, found: Correction, reason: str) -> str:
        total = len(self.whole)
        cut = "" if found.complete else ", the rest was not looked at"
        if not found.offenders and found.complete:
            how = "unfused" if len(found.pieces) == 1 else f"cut into {len(found.pieces)} pieces"
            return f"right {how}, after the fused build of the whole: {reason}"
        names = [label(self.function, i) for i in found.offenders]
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        return f"right for {found.kept} of {total} nodes, the host keeps {shown or 'the others'}{cut}"

    def _ready(self, contestant: _Contestant, reason: str) -> Outcome:
        return Outcome("ready", contestant.pieces, reason, dict(self.timings), tuple(self.errors))

    def _on_host(self, verdict: Any, reason: str) -> Outcome:
        return Outcome(verdict, (Piece(HOST, self.whole),), reason, dict(self.timings), tuple(self.errors))

    def _move(self, source: str, target: str, seconds: float) -> None:
        self.timings[source] -= seconds
        self.timings[target] = self.timings.get(target, 0.0) + seconds

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.timings[what] = self.timings.get(what, 0.0) + self.clock() - start


def label(function: Function, index: int) -> str:
    """A node for people: its operator, name and number."""
    node = function.body.nodes[index]
    return f"{node.operator} {node.name!r} (node {index})" if node.name else f"{node.operator} (node {index})"


def _sources(function: Function, seed: int, inputs: Sequence[np.ndarray] | None) -> Iterator[Sequence[np.ndarray]]:
    """Sets of inputs, the most telling first; each is made when it is asked for."""
    if inputs is not None:
        yield inputs
    needs = needs_of_inputs(function.body)
    for kind in SEQUENCE:
        yield synthesize_inputs(function, kind, seed, needs)


def _repeat(run: Run, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
    return lambda: run(arrays)
