"""Evaluation of one cluster: every candidate is compiled and checked, faulty nodes are isolated, and the rest is timed.

Knows no process, thread or cache: its caller decides where it runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from xrt_core.engine.boundary import read
from xrt_core.engine.contract import Executable, RunOptions
from xrt_core.errors import InputError, XRTError
from xrt_core.host.place import HostPlace
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import float_like
from xrt_core.runtime.arrays import Range
from xrt_core.runtime.input_checks import is_finite
from xrt_core.verify.autotune import Stopwatch, Tuning, tune
from xrt_core.verify.checker import Check, ResultChecker
from xrt_core.verify.inputs import DEGENERATE, EDGES, NONFINITE, SEQUENCE, Kind, are_beyond, synthesize_inputs
from xrt_core.verify.isolate import Budget, Candidate, Correction, FaultIsolator, OutOfBudget
from xrt_core.verify.reference import ON_CPU, ReferenceExecutor
from xrt_core.verify.subgraph import Run, run_pieces
from xrt_core.verify.value_ranges import ValueConstraint, infer_constraints
from xrt_core.verify.verdict import HOST, Outcome, Piece

__all__ = ["Candidate", "EvaluationSettings", "evaluate"]

_NO_DONATION: Final = RunOptions(donate=False)
_SHOWN: Final = 5

_ISOLATIONS: Final = 3
"""Of the faults of a candidate: the parts that are left may be wrong on the edges, and each is a case of its own."""

_LARGEST_LOOKED_AT: Final = 1 << 20  # elements of a constant

EDGE_SECONDS: Final = 0.05
"""Of the host's fastest run, up to which candidates are checked on the edges as well."""


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What an evaluation does and may cost; plain data.

    verify: check results, and isolate faults. tune: time what is right against the host and each other. seed: of the
    synthesized inputs. deadline_seconds: after which no compilation, check or round of timing begins. max_compiles:
    compilations that isolating the faults of one candidate may take. input_sets: sets of inputs that results are
    checked on, and host runs that this may cost; a result of the last set that is out of bounds costs two more. edges:
    check a candidate that is right on those on the sets `EDGES` too, and on NaN and infinities, which it may get wrong
    (`Outcome.finite_only`; so are functions with a node that weighs), where a run of the host takes less than
    `EDGE_SECONDS`. clear_lead: where one candidate alone is right, and was this many times as fast as the host while it
    was checked, that decides, without a race; 0.0: never.
    """

    verify: bool = True
    tune: bool = True
    seed: int = 0
    deadline_seconds: float = float("inf")
    max_compiles: int = 64
    input_sets: int = 2
    edges: bool = True
    clear_lead: float = 0.0


@dataclass(frozen=True, slots=True)
class StressResult:
    """How an executable whose results are right behaves beside them. reason: why it must not be used, "" for nothing.
    serialised, notes: see `Outcome`."""

    reason: str = ""
    serialised: bool = False
    notes: tuple[str, ...] = ()


Stress = Callable[[Candidate, Executable, Sequence[ResultChecker], float], StressResult]
"""(candidate, executable, checkers of the sets that it is right on, seconds of a run) -> the result of a stress."""


@dataclass(frozen=True)
class _Accepted:
    """A candidate whose results are right: its pieces, with an executable for each that is not the host's, or one for
    all of them together. quickest: seconds of the fastest run while it was checked."""

    candidate: Candidate
    pieces: tuple[Piece, ...]
    executables: tuple[Executable | None, ...]
    note: str
    quickest: float = math.inf
    stressed: StressResult = field(default_factory=StressResult)

    @property
    def label(self) -> str:
        if self.candidate.pieces is not None or all(p.engine != HOST and p.fused for p in self.pieces):
            return self.candidate.engine
        return f"{self.candidate.engine} {'unfused' if len(self.pieces) == 1 else 'in pieces'}"


def evaluate(
    function: Function,
    candidates: Sequence[Candidate],
    settings: EvaluationSettings,
    inputs: Sequence[np.ndarray] | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    stress: Stress | None = None,
    ranges: Sequence[Range | None] = (),
    place: HostPlace = ON_CPU,
    timed: Sequence[Sequence[np.ndarray]] = (),
    right: Collection[str] = (),
    current: str = "",
) -> Outcome:
    """Decide what runs a cluster.

    candidates: in order of preference. inputs: of a real call; the first set that results are checked on, and the one
    that is timed. Without them all sets are synthesized. stress: the test that candidates with right results must pass
    as well. ranges: of the inputs of a real call; results are checked on one set in these ranges as well, if they go
    beyond those of synthesized inputs and the host is quick (`EvaluationSettings.edges`). place: where the host
    computes; executables take its arrays, are checked against it there, and timed with arrays that are there. timed:
    sets of inputs on which executables that take more shapes than the function's are timed against one another, all of
    them in one run, where the host is clearly slower (`clear_lead`) on the function's own. right: labels of candidates
    that an earlier evaluation found right, which are timed first: of them only a winner is checked, and not the
    `current` one, which runs the cluster meanwhile.

    Without `tune` the first candidate that is right wins. Only if none is right as a whole are their faults isolated,
    in order, until a part of one is left. Whatever an engine raises is a finding; raises XRTError only if the host
    cannot run the function.
    """
    evaluation = _Evaluation(function, settings, inputs, clock, stress, ranges, place, timed, right, current)
    return evaluation.outcome(candidates)


def difference(function: Function, one: Executable, other: Executable) -> str:
    """What is wrong with the results of `one` on synthesized inputs: they are, within the bounds of a verification,
    neither those of `other` nor the host's. "" for nothing."""
    inputs = synthesize_inputs(function, "gentle")
    expected = [read(r) for r in other.run([x.copy() for x in inputs], _NO_DONATION)]
    return ResultChecker(function, inputs, results=expected).check(one, {}).reason


class _Evaluation:
    def __init__(
        self,
        function: Function,
        settings: EvaluationSettings,
        inputs: Sequence[np.ndarray] | None,
        clock: Callable[[], float],
        stress: Stress | None,
        ranges: Sequence[Range | None],
        place: HostPlace,
        timed: Sequence[Sequence[np.ndarray]],
        right: Collection[str],
        current: str,
    ) -> None:
        self.function, self.settings, self.clock, self.stress = function, settings, clock, stress
        self.timed = timed
        self.right, self.current = right if settings.tune else (), current
        self.ranges = ranges if are_beyond(ranges) else ()
        self.until = clock() + settings.deadline_seconds
        self.whole = tuple(range(len(function.body.nodes)))
        self.errors: list[str] = []
        self.timings: dict[str, float] = {}
        self.checkers: list[ResultChecker] = []
        self.host = ReferenceExecutor(function, clock, place)
        self.first: ResultChecker | None = None  # the checkers of other sets share its analysis of the function
        self.quickest: dict[str, float] = {}  # seconds of the fastest run of each candidate while it was checked
        self._wasted = 0  # host runs on uninformative sets
        self.constraints = infer_constraints(function.body)
        self.finite_only = any(traits_of(n).weighs for n in function.body.nodes)
        self.given = inputs is not None
        self._sources = _sources(function, settings.seed, inputs, self.constraints)

    def outcome(self, candidates: Sequence[Candidate]) -> Outcome:
        accepted: list[_Accepted] = []
        rejected: list[tuple[Candidate, str, bool]] = []
        misbehaved = False
        for candidate in candidates:
            executable, reason = self._compiled(candidate)
            if executable is not None and candidate.engine in self.right:
                if (quick := self._found_before(candidate, executable)) is not None:
                    accepted.append(quick)
                continue
            check = None if executable is None or not self.settings.verify else self._check(candidate, executable)
            if executable is not None and (check is None or check.is_right):
                found = self._accepted(candidate, executable, check)
                if found is None:
                    misbehaved = True
                    continue
                accepted.append(found)
                if not self.settings.tune:
                    break
            else:
                reason = reason or (check.reason if check is not None else "")
                self.errors.append(f"{candidate.engine}: {reason}")
                if candidate.pieces is None:
                    rejected.append((candidate, reason, executable is not None))
        if not accepted:
            for candidate, reason, compiles in rejected:
                corrected = self._isolated(candidate, reason, compiles)
                if corrected is not None:
                    accepted.append(corrected)
                    break
        if not accepted:
            any_compiles = misbehaved or any(compiles for _, _, compiles in rejected)
            return self._on_host("wrong" if any_compiles else "failed", "; ".join(self.errors) or "no candidates")
        return self._tuned(accepted)

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

    def _accepted(self, candidate: Candidate, executable: Executable, check: Check | None) -> _Accepted | None:
        """A candidate whose results are right as a whole; None where it must not be used for what it does beside."""
        quickest = self.quickest.get(candidate.engine, math.inf)
        found = _Accepted(candidate, self._pieces(candidate), (executable,), self._note(check), quickest)
        stressed = self._stressed(found, executable) if check is not None else StressResult()
        if stressed.reason:
            self.errors.append(f"{candidate.engine}: {stressed.reason}")
            return None
        return replace(found, stressed=stressed)

    def _found_before(self, candidate: Candidate, executable: Executable) -> _Accepted | None:
        """A candidate that an earlier evaluation found right, with the time of a run; None where it does not run."""
        found = _Accepted(candidate, self._pieces(candidate), (executable,), "right, as was found before")
        checker, place, watch = self._checker(0), self.host.place, Stopwatch(self.clock)
        assert checker is not None
        run = _repeat(self._run_of(found), [place.copies(checker.inputs)], place)
        try:
            with self._timed("checked runs"):
                for _ in range(2):
                    watch.run(lambda: (run(),))
        except Exception as e:  # whatever an engine raises
            self.errors.append(f"{candidate.engine}: {type(e).__name__}: {e}")
            return None
        return replace(found, quickest=watch.quickest)

    def _is_still_right(self, chosen: _Accepted) -> _Accepted | None:
        """A winner of those that were found right before, after its check; None where something is wrong with it."""
        candidate, executable = chosen.candidate, chosen.executables[0]
        if candidate.engine not in self.right or candidate.engine == self.current or not self.settings.verify:
            return chosen
        assert executable is not None
        check = self._check(candidate, executable)
        if check.is_right:
            return self._accepted(candidate, executable, check)
        self.errors.append(f"{candidate.engine}: {check.reason}")
        return None

    def _pieces(self, candidate: Candidate) -> tuple[Piece, ...]:
        return candidate.pieces or (Piece(candidate.engine, self.whole),)

    def _check(self, candidate: Candidate, executable: Executable) -> Check:
        found = Check("")
        runs, isolated = Stopwatch(self.clock), Stopwatch(self.clock)
        budget = Budget(1, self.until, self.clock)
        with self._timed("verify"):
            for k in range(self.settings.input_sets):
                checker = self._checker(k)
                if checker is None:
                    break
                check = checker.check(runs.on(executable), candidate.tolerance)
                if not check.is_right and check.differences and (calmer := self._calmer(k)) is not None:
                    check = calmer.check(runs.on(executable), candidate.tolerance)
                found = found if found.is_doubtful and check.is_right else check
                if not (found.is_right or found.is_doubtful):
                    break
            if found.is_doubtful:
                timed = Candidate(
                    candidate.engine, lambda f, fused: isolated.on(candidate.build(f, fused)), candidate.tolerance
                )
                if self._isolator(timed, budget).are_parts_right():
                    found = Check("", found.differences, found.tolerance)
            if found.is_right:
                found = self._check_edges(candidate, executable, found)
        self._move("verify", "compile", budget.seconds)
        self._move("verify", "checked runs", runs.seconds + isolated.seconds)
        self.quickest[candidate.engine] = runs.quickest
        return found

    def _stressed(self, found: _Accepted, executable: Executable) -> StressResult:
        """The result of the stress test of a candidate whose results are right."""
        if self.stress is None or self.clock() > self.until:
            return StressResult()
        checkers = [c for c in self.checkers if c.is_informative] or self.checkers
        with self._timed("stress"):
            if len(checkers) == 1 and self.first is not None and self.host.seconds <= EDGE_SECONDS:
                with suppress(XRTError):  # two threads need inputs of their own
                    other = self.first.for_inputs(
                        synthesize_inputs(self.function, "gentle", self.settings.seed, self.constraints)
                    )
                    checkers = [*checkers, other] if other.is_informative else checkers
            return self.stress(found.candidate, executable, checkers, found.quickest)

    def _check_edges(self, candidate: Candidate, executable: Executable, found: Check) -> Check:
        """The check on `EDGES`, or `found` where that is right; notes whether non-finite inputs go wrong."""
        if not self.settings.edges or self.first is None or self.host.seconds > EDGE_SECONDS:
            return found
        sets: list[tuple[Kind, Sequence[Range | None]]] = [(kind, ()) for kind in (*EDGES, *NONFINITE)]
        if self.ranges:
            sets.insert(0, ("normal", self.ranges))
        if any(map(_has_infinity, self.function.body.constants)):
            sets.insert(0, ("gentle", ()))  # positive: beside both signs, infinite sums are mostly NaN on any engine
        for kind, ranges in sets:
            if self.clock() > self.until:
                break
            if self.finite_only and kind in NONFINITE:
                continue
            try:
                arrays = synthesize_inputs(self.function, kind, self.settings.seed, self.constraints, ranges)
                if kind in NONFINITE and all(map(is_finite, arrays)):
                    continue  # of indices and masks, or of one param
                checker = self.first.for_inputs(arrays)
                is_informative = checker.is_informative
                check = checker.check(executable, candidate.tolerance)
            except XRTError:  # inputs that an operator rejects
                continue
            if kind in NONFINITE:
                self.finite_only |= not check.is_right
            elif ranges and checker.is_chaotic:
                continue
            elif not check.is_right and not check.is_doubtful and (is_informative or kind in DEGENERATE):
                self.checkers.append(checker)  # for the isolation of the fault
                return check
        return found

    def _checker(self, k: int) -> ResultChecker | None:
        """The checker of set `k` of inputs; None if the budget of host runs is used up."""
        if k < len(self.checkers):
            return self.checkers[k]
        error: XRTError | None = None
        uninformative: ResultChecker | None = None
        while not k or (self._host_runs < self.settings.input_sets and self.clock() <= self.until):
            arrays = next(self._sources, None)
            if arrays is None:
                break
            if self.first is None:
                self.first = ResultChecker(self.function, arrays, self.settings.seed, host=self.host)
            checker = self.first.for_inputs(arrays)
            try:
                if checker.is_informative:
                    self.checkers.append(checker)
                    return checker
                uninformative = uninformative or checker
            except XRTError as e:  # synthesized inputs that an operator rejects
                error = e
            self._wasted += 1
        if k:
            return None
        if uninformative is None:
            raise error or InputError(f"no inputs could be synthesized for {self.function.name!r}")
        self.checkers.append(uninformative)
        return uninformative

    def _calmer(self, k: int) -> ResultChecker | None:
        """The checker of calmer inputs, from now on in the place of set `k`, if that says nothing: where the function
        is chaotic on it. None where it is not, where inputs were given, or where calmer ones are chaotic as well."""
        checker = self.checkers[k]
        assert self.first is not None
        try:
            if (not k and self.given) or not checker.is_chaotic:
                return None
            arrays = synthesize_inputs(self.function, "damped", self.settings.seed + k, self.constraints)
            calmer = self.first.for_inputs(arrays)
            if not calmer.is_informative or calmer.is_chaotic:
                return None
        except XRTError:
            return None
        self._wasted += checker.host_runs
        self.checkers[k] = calmer
        return calmer

    @property
    def _host_runs(self) -> int:
        return self._wasted + sum(r.host_runs for r in self.checkers)

    def _isolated(self, candidate: Candidate, reason: str, compiles: bool) -> _Accepted | None:
        """The parts of a candidate that are right, also on the edges: what those show is one more case to isolate. None
        where shapes within depend on data: parts would be launches that read such values."""
        if self.function.is_open_within:
            return None
        self._checker(0)
        for _ in range(_ISOLATIONS):
            with self._timed("correct"):
                isolator = self._isolator(candidate, Budget(self.settings.max_compiles, self.until, self.clock))
                isolator.reject_whole(reason)
                found = isolator.isolate(compiles=compiles)
            offenders = [f"{candidate.engine}: {label(self.function, i)}: {why}" for i, why in found.offenders.items()]
            self.errors.extend(e for e in offenders if e not in self.errors)
            if not found.kept:
                return None
            made = _Accepted(candidate, found.pieces, found.executables, "")
            pieces = _Pieces(self._run_of(made))
            with self._timed("verify"):
                check = self._check_edges(candidate, pieces, Check(""))
            if check.is_right:
                break
            self.errors.append(f"{candidate.engine}: in pieces: {check.reason}")
        else:
            return None
        finite = ", for finite inputs only" if self.finite_only else ""
        made = replace(made, note=self._summary(found, reason) + finite)
        stressed = self._stressed(made, pieces)
        if stressed.reason:
            self.errors.append(f"{candidate.engine}: {stressed.reason}")
            return None
        return replace(made, stressed=stressed)

    def _tuned(self, accepted: Sequence[_Accepted]) -> Outcome:
        first = accepted[0]
        if not self.settings.tune:
            return self._ready(first, f"{first.label}: {first.note}")
        checker = self._checker(0)
        assert checker is not None
        place = self.host.place
        lead = self.settings.clear_lead
        leads = lead > 0.0 and min(c.quickest for c in accepted) * lead <= self.host.seconds
        over_sizes = leads and len(accepted) > 1 and len(self.timed) > 0
        sets = [place.copies(x) for x in (self.timed if over_sizes else [checker.inputs])]
        runs: dict[str, Callable[[], object]] = {}
        for c in accepted:
            runs.setdefault(c.label, _repeat(self._run_of(c), sets, place))
        known = {HOST: self.host.seconds} | {c.label: c.quickest for c in accepted}
        try:
            if leads and len(accepted) == 1:
                tuning = Tuning(first.label, known, 0)
            elif over_sizes:
                tuning = _of_one(tune(runs, clock=self.clock, until=self.until), len(sets), self.host.seconds)
            else:
                runs[HOST] = _repeat(self.host.compute, sets, place)
                tuning = tune(runs, HOST, clock=self.clock, until=self.until, known=known)
        except Exception as e:  # although it ran when it was checked
            self.errors.append(f"it failed while it was timed: {type(e).__name__}: {e}")
            return self._on_host("failed", self.errors[-1])
        self.timings.update(tuning.seconds)
        if tuning.winner == HOST:
            times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in tuning.seconds.items())
            return _timed_as(self._on_host("slower", f"the host is faster: {times}"), tuning)
        winner = next(c for c in accepted if c.label == tuning.winner)
        chosen = self._is_still_right(winner)
        if chosen is None:
            others_left = [c for c in accepted if c is not winner]
            return self._tuned(others_left) if others_left else self._on_host("wrong", self.errors[-1])
        mine = chosen.quickest if over_sizes else tuning.seconds[tuning.winner]  # of the size that the host took
        ratio = tuning.seconds[HOST] / max(mine, 1e-9)
        others = [name for name in tuning.seconds if name not in (HOST, tuning.winner)]
        over = f", faster than {', '.join(others)}" if others else ""
        over += f" over {len(sets)} sizes" if len(sets) > 1 else ""
        reason = f"{chosen.label}: {chosen.note}, {ratio:.3g}x as fast as the host{over}"
        return _timed_as(self._ready(chosen, reason), tuning)

    # --- parts of steps --------------------------------------------------------------------------------------------

    def _run_of(self, chosen: _Accepted) -> Run:
        def run_of(executable: Executable | None) -> Run | None:
            return None if executable is None else lambda given: executable.run(given, _NO_DONATION)

        if len(chosen.executables) == 1:
            run = run_of(chosen.executables[0])
            assert run is not None
            to_host = self.host.place.to_host
            return lambda given: [to_host(r) for r in run(given)]
        runs = [run_of(x) for x in chosen.executables]
        return run_pieces(self.function, [p.nodes for p in chosen.pieces], runs, self.host.place)

    def _isolator(self, candidate: Candidate, budget: Budget) -> FaultIsolator:
        return FaultIsolator(self.function, candidate, [r.inputs for r in self.checkers], budget, self.settings.seed)

    def _note(self, check: Check | None) -> str:
        if check is None:
            return "results were not checked"
        own = f", within its own tolerance ({check.tolerance})" if check.tolerance else ""
        count = len(self.checkers)
        finite = ", for finite inputs only" if self.finite_only else ""
        return f"right on {count} set{'s' if count != 1 else ''} of inputs{own}{finite}"

    def _summary(self, found: Correction, reason: str) -> str:
        total = len(self.whole)
        cut = "" if found.complete else ", the others were not checked"
        if not found.offenders and found.complete:
            how = "unfused" if len(found.pieces) == 1 else f"cut into {len(found.pieces)} pieces"
            return f"right {how}, after the fused build of the whole: {reason}"
        names = [label(self.function, i) for i in found.offenders]
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        return f"right for {found.kept} of {total} nodes, the host runs {shown or 'the others'}{cut}"

    def _ready(self, chosen: _Accepted, reason: str) -> Outcome:
        stressed = chosen.stressed
        if stressed.serialised:
            reason += "; its runs take turns, as they are wrong on two threads at once"
        return Outcome(
            "ready", chosen.pieces, reason, dict(self.timings), tuple(self.errors), self.finite_only,
            stressed.serialised, stressed.notes,
        )  # fmt: skip

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


def _has_infinity(constant: Value) -> bool:
    """Whether a constant has an element that is not finite, as far as it is quick to see: masks, not weights."""
    x = constant.data
    return x is not None and x.size <= _LARGEST_LOOKED_AT and float_like(x.dtype) and not is_finite(x)


def _timed_as(outcome: Outcome, tuning: Tuning) -> Outcome:
    """The outcome of a race, provisional if the machine was busy."""
    busy = "; provisional, as other processes kept the machine busy" if tuning.busy else ""
    return replace(outcome, reason=outcome.reason + busy, timed=tuning.winner, provisional=tuning.busy)


class _Pieces(Executable):
    """Pieces that are run one after another. Results belong to the caller."""

    def __init__(self, call: Run) -> None:
        self._call = call

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = _NO_DONATION, block_until_done: bool = True
    ) -> Sequence[Any]:
        # those of the host may be views, or constants
        return [np.array(r) if isinstance(r, np.ndarray) else r.copy() for r in self._call(inputs)]


def label(function: Function, index: int) -> str:
    """A node for messages: its operator, name and index."""
    node = function.body.nodes[index]
    return f"{node.operator} {node.name!r} (node {index})" if node.name else f"{node.operator} (node {index})"


def _sources(
    function: Function,
    seed: int,
    inputs: Sequence[np.ndarray] | None,
    constraints: Mapping[Value, ValueConstraint],
) -> Iterator[Sequence[np.ndarray]]:
    """Sets of inputs, the most informative first, synthesized lazily."""
    if inputs is not None:
        yield inputs
    for kind in SEQUENCE:
        yield synthesize_inputs(function, kind, seed, constraints)


def _of_one(tuning: Tuning, sets: int, host: float) -> Tuning:
    """A tuning of runs on so many sets, with the mean seconds of one. host: its seconds, which was not timed."""
    return replace(tuning, seconds={HOST: host, **{name: s / sets for name, s in tuning.seconds.items()}})


def _repeat(run: Run, sets: Sequence[Sequence[Any]], place: HostPlace) -> Callable[[], object]:
    """A run on each of these sets of inputs that returns when all work of the device is done."""

    def complete() -> None:
        with place.within():
            for arrays in sets:
                run(arrays)
            place.synchronize()

    def on_cpu() -> None:
        for arrays in sets:
            run(arrays)

    return on_cpu if place.on_cpu else complete
