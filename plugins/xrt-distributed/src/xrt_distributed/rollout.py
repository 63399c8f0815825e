"""Roll-out of a new engine, or of an engine's new version: which jobs or calls it answers, and how it compares.

Jobs are drawn by their name, calls by their number in it. What the new engine answers is compared with the proven ones:
the first call, the second, the fourth, the eighth, ..., and then as many as take 1 % of the time. A result that differs
by more than the tolerance ends the rollout in that module: the proven engines answer, that call included.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core import XRTModule
from xrt_core.events import EventLog
from xrt_core.ir.op_traits import draws_random
from xrt_core.options.rollout import Rollout
from xrt_distributed.jobs import falls_on, job_name

TOLERANCE: Final = 1e-3
"""How far an output of float32 or wider may be off, relative to its largest element."""
NARROW: Final = 2e-2
"""The same of a narrower float; all other types must be equal."""
_COMPARING: Final = 0.01  # of the time of the calls


class JobDecision:
    """Whether the new engine acts in this job. See `xrt_core.engine.rollout.Decision`."""

    def __init__(self, rollout: Rollout, events: EventLog, job: str) -> None:
        self._rollout, self._events, self._job = rollout, events, job
        self.acts = rollout.of == "calls" or falls_on(rollout.share, job, rollout.engine)
        events.emit(
            "rollout.decided", engine=rollout.name, version=rollout.version, share=rollout.share, of=rollout.of,
            acts=self.acts,
        )  # fmt: skip

    def answering(self, candidate: Any, proven: XRTModule, is_settled: Callable[[], bool]) -> RolledOutModel:
        """See `xrt_core.engine.rollout.Decision`."""
        share = self._rollout.share if self._rollout.of == "calls" else 1.0
        return RolledOutModel(candidate, proven, self._rollout, self._events, is_settled, (share, self._job))


class RolledOutModel:
    """A model that its new engine answers in some calls, and the proven engines in the others.

    candidate: the model on the new engine, as `XRTModule` asks it. proven: a module without it. drawn: the share of the
    calls, and the job's name. Everything that is no call is asked of the candidate.
    """

    def __init__(
        self,
        candidate: Any,
        proven: XRTModule,
        rollout: Rollout,
        events: EventLog,
        is_settled: Callable[[], bool],
        drawn: tuple[float, str],
    ) -> None:
        self._candidate, self._proven = candidate, proven
        self._rollout, self._events, self._is_settled, self._drawn = rollout, events, is_settled, drawn
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._answered = 0  # calls of the candidate
        self._next = 1  # the call of the candidate that is compared next
        self._given_up = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_candidate" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._candidate, name)

    def __call__(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return self._answer(lambda: self._candidate(args, named), lambda: self._proven(*args, **named))

    def run(self, inputs: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See `XRTModule.run`."""
        if results:  # arrays of the caller's hold one answer
            use = self._proven if self._given_up or not self._is_drawn() else self._candidate
            return dict(use.run(inputs, results))
        found: dict[str, Any] = self._answer(lambda: self._candidate.run(inputs), lambda: self._proven.run(inputs))
        return found

    def _is_drawn(self) -> bool:
        share, job = self._drawn
        return share >= 1.0 or falls_on(share, job, self._rollout.engine, next(self._numbers))

    def _answer(self, candidate: Callable[[], Any], proven: Callable[[], Any]) -> Any:
        if self._given_up or not self._is_drawn():
            return proven()
        with self._lock:
            self._answered += 1
            number = self._answered
            is_compared = number >= self._next
            if is_compared:
                self._next = 1 << 62  # one at a time
        if not is_compared:
            return candidate()
        cost = seconds = 0.0
        try:
            start = time.perf_counter()
            made = candidate()
            seconds = time.perf_counter() - start
            caller = self._candidate.caller
            if caller is not None and any(map(draws_random, caller.graph.nodes)):
                return made  # results that are drawn anew are no difference
            start = time.perf_counter()
            wanted = proven()
            cost = time.perf_counter() - start
            is_timed = number > 1  # the first call compiles
            return made if self._is_right(made, wanted, (seconds, cost) if is_timed else None) else wanted
        finally:
            with self._lock:
                gap = math.ceil(cost / (_COMPARING * seconds)) if seconds else 1
                self._next = number + min(number, max(gap, 1))

    def _is_right(self, made: Any, wanted: Any, seconds: tuple[float, float] | None) -> bool:
        """Whether results agree; tells, and ends the rollout where not."""
        error, reason = difference(made, wanted, self._rollout.tolerance)
        timed: dict[str, Any] = {}
        if seconds and self._is_settled() and self._proven.wait(0.0):  # else the host may have answered one of them
            timed = {"candidate_seconds": seconds[0], "proven_seconds": seconds[1]}
        names: dict[str, Any] = {"engine": self._rollout.name, "version": self._rollout.version}
        proven = ", ".join(self._proven.engines) or "host"
        self._events.emit(
            "rollout.compared", **names, proven=proven, is_right=not reason, error=error, reason=reason, **timed
        )
        if reason:
            self._given_up = True
            self._events.emit("rollout.given_up", level=logging.WARNING, **names, reason=reason)
        return not reason


def difference(made: Any, wanted: Any, tolerance: float | None = None) -> tuple[float, str]:
    """The largest error of the outputs, relative to the largest element of each, and what is wrong or "".

    made, wanted: an array, or nested tuples, lists and mappings of arrays.
    """
    ours, theirs = list(_arrays(made)), list(_arrays(wanted))
    if len(ours) != len(theirs):
        return math.inf, f"{len(ours)} outputs, and {len(theirs)} of the proven engines"
    worst = 0.0
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            kind, other = (f"{x.dtype.name}{list(x.shape)}" for x in (a, b))
            return math.inf, f"output {number} is {kind}, and {other} of the proven engines"
        is_float = a.dtype.kind in "fc" or "float" in a.dtype.name
        bound = (tolerance or (TOLERANCE if a.dtype.itemsize >= 4 else NARROW)) if is_float else 0.0
        error = _error(a, b) if is_float else float(np.any(a != b))
        worst = max(worst, error)
        if not error <= bound:
            return error, f"output {number} is off by {error:.3g} of its largest element, where {bound:g} is allowed"
    return worst, ""


def _error(a: np.ndarray, b: np.ndarray) -> float:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return math.inf
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max()) or 1.0
    return float(np.abs(a[finite] - b[finite]).max()) / scale


def _arrays(results: Any) -> Iterator[np.ndarray]:
    if isinstance(results, Mapping):
        for value in results.values():
            yield from _arrays(value)
    elif isinstance(results, tuple | list):
        for value in results:
            yield from _arrays(value)
    elif results is not None:
        yield _to_numpy(results)


def _to_numpy(array: Any) -> np.ndarray:
    for method in ("get", "cpu"):  # of CuPy and of torch, whose arrays on a GPU NumPy refuses
        if not isinstance(array, np.ndarray) and callable(found := getattr(array, method, None)):
            array = found()
            if method == "cpu":
                array = array.detach()
            break
    return np.asarray(array)


def decide(rollout: Rollout, events: EventLog) -> JobDecision:
    """What the hook `xrt_rollout` answers in this process."""
    return JobDecision(rollout, events, job_name())


