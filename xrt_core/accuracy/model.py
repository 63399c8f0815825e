"""BudgetedModel: a model that answers in reduced precision where that is faster and within its budget of errors."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import structs

from xrt_core.accuracy.error import used
from xrt_core.accuracy.kept import ChoiceFile, KeptChoice
from xrt_core.accuracy.report import AccuracyReport, Trial
from xrt_core.accuracy.search import PrecisionSearch, Reduced, replace_verdict
from xrt_core.compiler.models import CompiledGraph, ImportedModel, Shapes
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.engine.forking import each_in_forked_process
from xrt_core.errors import InputError, XRTError
from xrt_core.guard.sampling import SamplingSchedule, comparisons
from xrt_core.guard.timeouts import BackgroundTask, Cancelled, running
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import ValueType
from xrt_core.options.guard_settings import MAX_INPUT_BYTES
from xrt_core.runtime.arrays import to_numpy

_INPUTS: Final = 8
"""So many calls' inputs are kept while the search begins, if none are given."""
_LOOK: Final = 0.1  # seconds until a signature that has no executable yet is looked at again
_SIGNATURES: Final = 1024

Inputs = Mapping[str, Any]


class BudgetedModel:
    """Answers as `exact` does, until a search in the background finds a reduced form (`docs/precision.md`).

    Then calls whose signature that form has executables for are answered by it; others by `exact`, while the form is
    compiled for them. The first reduced results, and then a sample of at most 1 % of the time, are compared with the
    exact ones: where the budget is exceeded, `exact` answers from there on.

    pipeline: runs `exact`. given: inputs to measure errors on; none: those of the first calls. on_change: is called
    with the pipeline that answers when that changes.

    Raises InputError where the given inputs do not fit the model.
    """

    def __init__(
        self,
        exact: ImportedModel,
        pipeline: Pipeline,
        given: Sequence[Inputs] | None,
        on_change: Callable[[Pipeline], None],
    ) -> None:
        options = pipeline.options
        assert options.accuracy is not None
        self.exact = exact
        self.reduced: ImportedModel | None = None
        self._made: Reduced | None = None
        self._pipeline = pipeline
        self._budget = options.accuracy
        self._on_change = on_change
        self._lock = threading.Lock()
        self._inputs: list[list[np.ndarray]] = []
        self._signature: Hashable = None
        self._given = given is not None
        self._report = AccuracyReport(self._budget, "waiting", given=self._given)
        self._thread: threading.Thread | None = None
        self._file: ChoiceFile | None = None
        self._closed = False
        self._live: set[Hashable] = set()
        self._next_look: dict[Hashable, float] = {}
        self._calls = 0
        self._schedule = SamplingSchedule(None)
        unknown = sorted({name for name, _ in self._budget.outputs} - set(exact.output_names))
        if unknown:
            raise InputError(
                f"accuracy: the model has no output {unknown[0]!r}; it has {', '.join(exact.output_names)}"
            )
        _models.add(self)
        for row in given or ():
            caller, arrays = exact.bind((), row)
            checked = caller.checked(arrays)
            if caller is not exact.plain:
                raise InputError("calibration: leave out the inputs that have a default value")
            if self._signature not in (None, caller.key(checked)):
                raise InputError("calibration: all sets of inputs must have the same shapes")
            self._signature = caller.key(checked)
            self._inputs.append([np.array(a) for a in checked])
        if given is not None:
            if not self._inputs:
                raise InputError("calibration is empty: give sets of inputs, or leave it out to use those of calls")
            self._begin()

    # --- what a module asks of its model ----------------------------------------------------------------------------

    @property
    def _answering(self) -> ImportedModel:
        return self.reduced or self.exact

    @property
    def caller(self) -> CompiledGraph:
        """See `ImportedModel`."""
        return self._answering.caller

    @property
    def shapes(self) -> Shapes | None:
        """See `ImportedModel`."""
        return self.exact.shapes

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `ImportedModel`."""
        return self.exact.output_names

    @property
    def input_types(self) -> dict[str, ValueType | None]:
        """See `ImportedModel`."""
        return self.exact.input_types

    @property
    def optional(self) -> tuple[str, ...]:
        """See `ImportedModel`."""
        return self.exact.optional

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[CompiledGraph, Sequence[Any]]:
        """See `ImportedModel.bind`."""
        return self._answering.bind(args, named)

    def saved(self) -> tuple[Graph, list[CompiledGraph]]:
        """See `ImportedModel.saved`: of what answers now."""
        return self._answering.saved()

    def __call__(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        results = self._run(*self.exact.bind(args, named), None)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See `ImportedModel.run`."""
        return dict(zip(self.output_names, self._run(*self.exact.bind((), inputs), results), strict=True))

    def bound(self, inputs: Inputs, results: Mapping[str, Any]) -> tuple[Sequence[str], Callable[[], Sequence[Any]]]:
        """See `ImportedModel.bound`."""
        caller, arrays = self.exact.bind((), inputs)
        caller.bound(arrays, self.output_names, results)  # which raises what is wrong with them
        return self.output_names, lambda: self._run(caller, arrays, results)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _run(self, exact: CompiledGraph, arrays: Sequence[Any], results: Mapping[str, Any] | None) -> Sequence[Any]:
        reduced = self.reduced
        if reduced is None or exact is not self.exact.plain or not self._is_live(reduced.plain, arrays):
            made = self._answer(exact, arrays, results)
            if exact is self.exact.plain:
                self._observe(exact, arrays)
            return made
        self._calls += 1
        if self._schedule.is_due(self._calls - 1):
            try:
                return self._compared(reduced.plain, exact, arrays, results)
            except BaseException:
                self._schedule.release()
                raise
        if self._schedule.is_first_under_way:  # another thread is at the first comparison
            return self._answer(exact, arrays, results)
        return self._answer(reduced.plain, arrays, results)

    def _answer(self, caller: CompiledGraph, arrays: Sequence[Any], results: Mapping[str, Any] | None) -> Sequence[Any]:
        return caller(arrays) if not results else caller.run_into(arrays, self.output_names, results)

    def _is_live(self, caller: CompiledGraph, arrays: Sequence[Any]) -> bool:
        """Whether the reduced form has executables for arguments like these; if not, they are compiled."""
        key = caller.key(arrays)
        if key in self._live:
            return True
        now = time.monotonic()
        if key is None or now < self._next_look.get(key, 0.0):
            return False
        if len(self._next_look) >= _SIGNATURES:
            self._next_look.clear()
            self._live.clear()
        self._next_look[key] = now + _LOOK
        try:
            if caller.live(arrays) is not None:
                self._live.add(key)
                return True
            caller.begin(arrays)
        except XRTError:  # `exact` raises what is to be raised, to the caller
            return False
        return False

    def _compared(
        self, reduced: CompiledGraph, exact: CompiledGraph, arrays: Sequence[Any], results: Mapping[str, Any] | None
    ) -> Sequence[Any]:
        """A reduced call whose results are compared: the first before they are returned, others in the background."""
        number = self._calls
        kept = [np.array(to_numpy(a)) for a in arrays]
        start = time.perf_counter()
        made = self._answer(reduced, arrays, results)
        seconds = time.perf_counter() - start
        copies = [np.array(to_numpy(r)) for r in made]

        def compare() -> bool:
            begin = time.perf_counter()
            try:
                want = [to_numpy(r) for r in exact(kept)]
                share = used(self._budget, self.output_names, copies, want)
            except XRTError:  # the model's own fault, which a call raises
                return True
            finally:
                self._schedule.postpone(number, time.perf_counter() - begin, seconds)
            report = self._report
            self._update(checked=report.checked + 1, worst=max(report.worst, share))
            if share > 1.0:
                self._give_up(share, number)
                return False
            self._schedule.confirm(number)
            return True

        if self._schedule.is_synchronous:
            return made if compare() else self._answer(exact, arrays, results)
        if not comparisons().submit(compare):
            self._schedule.postpone(number, 0.0, 0.0)
        return made

    def _give_up(self, share: float, number: int) -> None:
        """The model's own precision answers from here on."""
        with self._lock:
            made, self._made, self.reduced = self._made, None, None
        if made is None:
            return
        if self._file is not None:
            self._file.remove()
        reason = (
            f"call {number} used {share:.0%} of the budget; results of the calls since "
            f"{self._schedule.last_right + 1} may exceed it"
        )
        trials = [replace_verdict(t, "exceeded", reason) if t.verdict == "chosen" else t for t in self._report.trials]
        self._update(trials=tuple(trials))
        self._on_change(self._pipeline)
        made.pipeline.close()
        self._pipeline.services.events.emit(
            "accuracy.exceeded", level=logging.WARNING, form=made.trial.form, engine=made.trial.engine, reason=reason
        )

    # --- the search -------------------------------------------------------------------------------------------------

    @property
    def report(self) -> AccuracyReport:
        """What the search has come to."""
        return self._report

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the search has ended. Returns False after `timeout` seconds; True at once where none has begun."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            return not thread.is_alive()
        return True

    def close(self) -> None:
        """Cancel the search, and what both pipelines do in the background, without waiting."""
        self._closed = True
        self._pipeline.close()
        if (made := self._made) is not None:
            made.pipeline.close()

    def _observe(self, caller: CompiledGraph, arrays: Sequence[Any]) -> None:
        """Keep the inputs of one of the first calls, and begin the search after the first of them."""
        if self._given or self._report.state not in ("waiting", "searching") or len(self._inputs) >= _INPUTS:
            return
        try:
            kept = [np.array(to_numpy(a)) for a in arrays]
        except XRTError:
            return
        with self._lock:
            key = caller.key(kept)
            held = sum(a.nbytes for row in self._inputs for a in row)
            if self._signature not in (None, key) or held + sum(a.nbytes for a in kept) > MAX_INPUT_BYTES:
                return
            self._signature = key
            self._inputs.append(kept)
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.Thread(target=self._search, name="xrt-accuracy", daemon=True)
        self._update(state="searching")
        try:
            self._thread.start()
        except RuntimeError as e:  # no more threads, or the interpreter is shutting down
            self._update(state="failed", reason=f"no thread can be started: {e}")

    def _search(self) -> None:
        events = self._pipeline.services.events
        start = time.perf_counter()
        try:
            with running(BackgroundTask(self, lambda: not self._closed)):
                found, seconds = self._found()
        except Cancelled:
            self._update(state="failed", reason="it was cancelled")
            return
        except BaseException as e:
            reason = f"{type(e).__name__}: {e}"
            self._update(state="failed", reason=reason)
            events.emit("accuracy.failed", level=logging.WARNING, reason=reason)
            return
        finally:
            self._inputs = []
        if found is not None and not self._closed:
            found.pipeline.services.events.most = logging.CRITICAL
            with self._lock:
                self._made, self.reduced = found, found.model
            self._on_change(found.pipeline)
        self._update(state="done", seconds=seconds or None)
        events.emit(
            "accuracy.searched", level=logging.INFO, seconds=time.perf_counter() - start,
            result="the model's own precision" if found is None else str(found.trial),
        )  # fmt: skip

    def _found(self) -> tuple[Reduced | None, float]:
        """The form that answers from now on, None for the model's own precision, and the seconds of a call in that:
        what an earlier process chose, or what a search finds, which is kept."""
        with self._lock:
            inputs = list(self._inputs)
        options, engines = self._pipeline.options, self._pipeline.accelerated.engines
        given = inputs if self._given else ()
        self._file = file = ChoiceFile(self.exact.plain.graph, engines, options, inputs[0], given)
        kept = file.read()
        if kept is not None:
            self._update(inputs=len(inputs), trials=kept.trials)
            if kept.chosen is None:
                return None, 0.0
            found = PrecisionSearch(self.exact, self._pipeline, inputs, self._add).again(kept)
            if found is not None:
                return found, 0.0
            file.remove()
            self._update(trials=())
        # other calls' inputs come in while the model's own executables are compiled
        self._pipeline.wait(options.guard_timeout)
        with self._lock:
            inputs = list(self._inputs)
        search = PrecisionSearch(self.exact, self._pipeline, inputs, self._add)
        self._update(inputs=len(inputs))
        found = search.find()
        if found is not None or search.is_final:
            made = ((), {}) if found is None else (found.products, dict(found.ranges))
            file.write(KeptChoice(self._report.trials, *made))
        return found, search.seconds

    def _add(self, trial: Trial) -> None:
        """Note a trial, in the place of an earlier one of the same form on the same engine."""
        rows = {(t.form, t.engine, t.nodes): t for t in self._report.trials}
        rows[trial.form, trial.engine, trial.nodes] = trial
        self._update(trials=tuple(rows.values()))

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._report = structs.replace(self._report, **changes)

    def _after_fork(self) -> None:
        """In a process that was just forked there is no such thread: what answers now stays."""
        self._lock, self._thread = threading.Lock(), None
        if self._report.state == "searching":
            self._report = AccuracyReport(self._budget, "failed", reason="the process was forked during the search")


_models: weakref.WeakSet[BudgetedModel] = weakref.WeakSet()
each_in_forked_process(_models, BudgetedModel._after_fork)
