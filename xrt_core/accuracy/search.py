"""PrecisionSearch: tries forms of a model in reduced precision and finds the fastest within a budget of errors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.accuracy.error import used
from xrt_core.accuracy.kept import KeptChoice
from xrt_core.accuracy.regions import choose, regions_of
from xrt_core.accuracy.report import Trial, Verdict
from xrt_core.compiler.models import CompiledGraph, ImportedModel
from xrt_core.compiler.pipeline import Pipeline, compilation_allowed
from xrt_core.compiler.tiering import pipeline_for
from xrt_core.engine import engines as process_engines
from xrt_core.engine.device_kinds import is_host
from xrt_core.engine.serialization import adds_int8_in_16_bits
from xrt_core.errors import XRTError
from xrt_core.events import EventLog
from xrt_core.guard.sampling import comparisons
from xrt_core.guard.timeouts import Cancelled, check_cancelled, native_call
from xrt_core.ir.graph import Graph, Node
from xrt_core.options import Options
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.quantization import calibration
from xrt_core.quantization.qdq import QuantisedProducts
from xrt_core.quantization.ranges import Ranges, identity
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.plan import HOST
from xrt_core.verify.autotune import Tuning, tune

WORTH: Final = 1.05
"""A form is chosen if a call is so many times as fast as in the model's own precision."""
_MEASURED_ON: Final = 2  # sets of inputs; for the choice of regions, which runs on the host


@dataclass(frozen=True)
class Reduced:
    """A form of a model that can answer. products, ranges: see `KeptChoice`."""

    trial: Trial
    model: ImportedModel
    pipeline: Pipeline
    products: tuple[int, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class PrecisionSearch:
    """One search for one model. Everything happens in the thread that calls `find`.

    exact: the model in its own precision, which `pipeline` runs. inputs: sets of inputs, one array for each, of one
    signature. report: is given each trial. is_final: whether another search would come to the same, as far as is known;
    not so where nothing was found on a busy machine, or within the time.

    Raises Cancelled where the task of the thread is cancelled.
    """

    def __init__(
        self,
        exact: ImportedModel,
        pipeline: Pipeline,
        inputs: Sequence[Sequence[np.ndarray]],
        report: Callable[[Trial], None],
    ) -> None:
        options = pipeline.options
        assert options.accuracy is not None
        self._exact, self._pipeline, self._inputs, self._report = exact, pipeline, inputs, report
        self._budget = options.accuracy
        self._options = replace(options, accuracy=None)
        self._until = time.monotonic() + options.guard_timeout
        with native_call():
            self._expected = [self._arrays(exact.plain.on_host(x)) for x in inputs]
        self._measured: dict[tuple[str, frozenset[Node]], float] = {}
        self._best_ratio = 1.0
        self.seconds = 0.0
        self.is_final = True

    def find(self) -> Reduced | None:
        """The fastest form within the budget; None if none is `WORTH` as fast as the model in its own precision."""
        accelerated = self._pipeline.accelerated
        with compilation_allowed():
            self._exact.plain.prepare(self._inputs[0], at_once=True)
        if accelerated.services.guard is not None:
            accelerated.services.guard.start()
        self._pipeline.wait(self._options.guard_timeout)
        with native_call():
            self._results(self._exact)
        best: Reduced | None = None
        try:
            for found in self._forms():
                if best is None or _ratio(found) < _ratio(best):
                    best, found = found, best
                    self._best_ratio = _ratio(best)
                if found is not None:
                    found.pipeline.close()
            return None if best is None else self._confirmed(best)
        except BaseException:
            if best is not None:
                best.pipeline.close()
            raise

    def again(self, kept: KeptChoice) -> Reduced | None:
        """The form that another process chose, verified and with its errors measured here, and not timed again; None if
        it cannot be made, or exceeds the budget on these inputs."""
        chosen = kept.chosen
        assert chosen is not None
        form, name = chosen.form, chosen.engine
        engines = {engine.name: engine for engine, _ in self._pipeline.accelerated.engines}
        graph = self._exact.plain.graph
        try:
            if form.startswith("int8"):
                ranges = None
                if form == "int8":
                    ranges = Ranges(graph.name, identity(graph), len(self._inputs), dict(kept.ranges))
                products = self._products(ranges)
                graph = products.with_products([products.products[i] for i in kept.products])
                options = self._with(name)
            elif form in engines[name].reduced_precisions:
                own = engines[name].reduced_precisions[form]
                options = self._with(name, engine_options=_merged(self._options, name, own))
            else:
                options = self._with(name, precision=form)
        except (XRTError, LookupError) as e:
            self._report(replace_verdict(chosen, "failed", f"the choice of an earlier process: {e}"))
            return None
        return self._trial(form, name, graph, options, chosen.nodes, chosen.total, known=chosen)[1]

    def _confirmed(self, best: Reduced) -> Reduced | None:
        """The fastest form, if it wins a second race as well: what else the machine did may have helped it."""
        with native_call():
            again = self._race(best.model)
        self.is_final &= not again.busy
        if again.seconds["reduced"] * WORTH > again.seconds["exact"]:
            self._report(replace_verdict(best.trial, "slower", "in a second race"))
            best.pipeline.close()
            return None
        busy = "other processes kept the machine busy while it was timed" if again.busy else ""
        self._report(replace_verdict(best.trial, "chosen", busy))
        return best

    # --- forms ----------------------------------------------------------------------------------------------------

    def _forms(self) -> Iterator[Reduced]:
        """Every form that is within the budget and worth it; those that are made fast, with narrower floats, first."""
        engines = self._pipeline.accelerated.engines
        graph = self._exact.plain.graph
        for engine, device in engines:
            for dtype, own in engine.reduced_precisions.items():
                options = self._with(engine.name, engine_options=_merged(self._options, engine.name, own))
                yield from self._tried(dtype, engine.name, graph, options, len(graph.nodes))
            if not is_host(device):  # casts of every node were measured to lose on CPUs (docs/precision.md)
                for dtype in ("bfloat16", "float16"):
                    options = self._with(engine.name, precision=dtype)
                    yield from self._tried(dtype, engine.name, graph, options, len(graph.nodes))
        for form, ranges in (("int8", True), ("int8 (dynamic)", False)):
            try:
                quantised = self._quantised(ranges)
            except XRTError as e:  # the library is missing, or the graph has nothing to quantise
                self._report(Trial(form, HOST, 0, 0, "failed", reason=str(e)))
                continue
            if quantised.products:
                for engine, _ in engines:
                    yield from self._int8(form, engine.name, quantised)

    def _int8(self, form: str, engine: str, quantised: QuantisedProducts) -> Iterator[Reduced]:
        """The graph with all products in int8; where that is fast but too far off, as many as are within it."""
        products, options = quantised.products, self._with(engine)
        graph, total = quantised.with_products(products), len(products)
        trial, made = self._trial(form, engine, graph, options, total, total)
        if made is not None:
            yield replace(made, products=tuple(range(total)), ranges=quantised.ranges)
        if trial.verdict != "too far off" or trial.used is None:
            return
        whole = 1.0 if trial.ratio is None else trial.ratio
        if whole >= self._best_ratio:  # a part of them gains less
            return
        regions = regions_of(products, self._work)
        measure = partial(self._measure, form, quantised)
        correction = max(1.0, trial.used / max(measure(products), 1e-9))
        for _ in range(2):
            taken = choose(regions, self._work, measure, correction)
            gain = (1 - whole) * self._flops(taken) / max(self._flops(products), 1)
            if not taken or 1 - gain >= self._best_ratio:
                return
            graph = quantised.with_products(taken)
            trial, made = self._trial(form, engine, graph, options, len(taken), total)
            if made is not None:
                yield replace(made, products=tuple(map(products.index, taken)), ranges=quantised.ranges)
            if trial.verdict != "too far off" or trial.used is None:
                return
            correction *= trial.used  # the engine is further off with these than the host

    def _tried(self, form: str, engine: str, graph: Graph, options: Options, nodes: int) -> Iterator[Reduced]:
        _, made = self._trial(form, engine, graph, options, nodes, nodes)
        if made is not None:
            yield made

    def _quantised(self, static: bool) -> QuantisedProducts:
        """The products of the graph in int8, by ranges measured on the inputs, or by those of each call."""
        check_cancelled()
        if not static:
            return self._products(None)
        graph, recorder = self._exact.plain.graph, calibration.Recorder()
        with native_call():
            for arrays in self._inputs:
                recorder.record(graph, arrays, self._on_host)
        return self._products(recorder.ranges(graph))

    def _products(self, ranges: Ranges | None) -> QuantisedProducts:
        marks = self._options.precision if isinstance(self._options.precision, tuple) else ()
        with native_call():
            prepared = calibration.prepared(self._exact.plain.graph)
            on_cpu = any(is_host(device) for _, device in self._pipeline.accelerated.engines)
            narrow = on_cpu and adds_int8_in_16_bits()
            return QuantisedProducts(prepared, ranges, [key for key, _ in marks], narrow=narrow)

    @cached_property
    def _work(self) -> Mapping[str, int]:
        """FLOPs of nodes, by name, for the first inputs."""
        plain = self._exact.plain
        types, known = plain.plans.signature(self._inputs[0])
        optimised = self._pipeline.optimise(plain.captured, types, known, engines=False)
        return MappingProxyType({n.name: flops(n) for n in optimised.graph.nodes})

    def _flops(self, nodes: Iterable[Node]) -> int:
        return sum(self._work.get(n.name, 0) for n in nodes)

    def _measure(self, form: str, quantised: QuantisedProducts, taken: Collection[Node]) -> float:
        """The share of the budget that the host's results use with these products in int8."""
        check_cancelled()
        key = form, frozenset(taken)
        if key not in self._measured:
            pairs = list(zip(self._inputs, self._expected, strict=True))[:_MEASURED_ON]
            with native_call():
                run = self._on_host(quantised.with_products(taken))
                self._measured[key] = max(self._used(run(x), want) for x, want in pairs)
        return self._measured[key]

    @cached_property
    def _host(self) -> Pipeline:
        options = replace(self._options, engine=(HOST,), guard=False, buckets="off")
        return pipeline_for(options, lambda without=(), found_usable=(): (), EventLog(most=logging.DEBUG))

    def _on_host(self, graph: Graph) -> CompiledGraph:
        return CompiledGraph(graph, self._host)

    # --- trials ---------------------------------------------------------------------------------------------------

    def _with(self, engine: str, **changes: Any) -> Options:
        """The options of a form on one engine; those that are changed count as given, so that they are saved."""
        sources = {**self._options.sources, "engine": "option accuracy", **dict.fromkeys(changes, "option accuracy")}
        return replace(self._options, engine=(engine,), sources=MappingProxyType(sources), **changes)

    def _trial(
        self,
        form: str,
        engine: str,
        graph: Graph,
        options: Options,
        nodes: int,
        total: int,
        known: Trial | None = None,
    ) -> tuple[Trial, Reduced | None]:
        """Compile and verify a form, measure its error and its time. Returns it if it is within the budget and worth
        it. known: it was found so before, and is not timed again."""
        check_cancelled()

        def judged(verdict: Verdict, share: float | None = None, ratio: float | None = None, why: str = "") -> Trial:
            trial = Trial(form, engine, nodes, total, verdict, share, ratio, why)
            self._report(trial)
            return trial

        if time.monotonic() > self._until:
            self.is_final = False
            return judged("failed", why="the time of guard_timeout is over"), None
        pipeline: Pipeline | None = None
        try:
            choose_engines = partial(process_engines.choose, options)
            pipeline = pipeline_for(options, choose_engines, EventLog(most=logging.DEBUG))
            model = ImportedModel(graph, pipeline, self._exact.shapes)
            with compilation_allowed():
                model.plain.prepare(self._inputs[0], at_once=True)
            guard = pipeline.accelerated.services.guard
            if guard is not None:
                guard.start()
            pipeline.wait(max(self._until - time.monotonic(), 1.0))
            if model.plain.live(self._inputs[0]) is None:
                return judged("not live", why=_why_not_live(pipeline)), None
            with native_call():
                got = self._results(model)
                share = max(self._used(g, want) for g, want in zip(got, self._expected, strict=True))
                timing = None if known is not None else self._race(model)
            if model.plain.live(self._inputs[0]) is None:  # the guard has found it wrong, and the host answered
                return judged("not live", why=_why_not_live(pipeline)), None
        except Cancelled:
            raise
        except Exception as e:
            self.is_final = False
            return judged("failed", why=f"{type(e).__name__}: {e}"), None
        else:
            ratio = None if known is None else known.ratio
            if timing is not None:
                self.is_final &= not timing.busy
                self.seconds = timing.seconds["exact"]
                ratio = timing.seconds["reduced"] / self.seconds
                if ratio * WORTH > 1.0:
                    return judged("slower", share, ratio), None
            if share > 1.0:
                return judged("too far off", share, ratio), None
            if known is None:
                trial = judged("within the budget", share, ratio)
            else:
                trial = judged("chosen", share, ratio, "by an earlier process")
            made, pipeline = Reduced(trial, model, pipeline), None
            return trial, made
        finally:
            if pipeline is not None:
                pipeline.close()

    def _results(self, model: ImportedModel) -> list[list[np.ndarray]]:
        """The results of a model's executables, once the guard has compared their first calls: the host may answer
        these, and until the background has judged them. No comparison is left to disturb what is timed next."""
        for again in (True, False):
            results = [self._arrays(model.plain(x)) for x in self._inputs]
            comparisons().wait()
            if not again or model.plain.live(self._inputs[0]) is None:
                break
        return results

    def _race(self, model: ImportedModel) -> Tuning:
        """Time a form and the model in its own precision in turns."""
        arrays = self._inputs[0]
        return tune({"exact": partial(self._exact.plain, arrays), "reduced": partial(model.plain, arrays)})

    def _used(self, got: Sequence[Any], want: Sequence[np.ndarray]) -> float:
        return used(self._budget, self._exact.output_names, self._arrays(got), want)

    @staticmethod
    def _arrays(results: Sequence[Any]) -> list[np.ndarray]:
        return [to_numpy(r) for r in results]


def replace_verdict(trial: Trial, verdict: Verdict, reason: str = "") -> Trial:
    """The trial with another verdict."""
    return Trial(
        trial.form, trial.engine, trial.nodes, trial.total, verdict, trial.used, trial.ratio, reason or trial.reason
    )


def _ratio(made: Reduced) -> float:
    assert made.trial.ratio is not None
    return made.trial.ratio


def _merged(options: Options, engine: str, own: Mapping[str, Any]) -> str:
    """The option `engine_options` with those of a form added to what is given."""
    from xrt_core.options import TABLE

    given = json.loads(options.engine_options) if options.engine_options else {}
    before = given.get(engine, {})
    merged = {**before, **own}
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            merged[key] = {**before[key], **value}
    found: str = TABLE["engine_options"].kind.accept({**given, engine: merged})
    return found


def _why_not_live(pipeline: Pipeline) -> str:
    """What the guard says of the first cluster that is not on an engine."""
    try:
        for row in pipeline.report().clusters:
            if row.get("reason"):
                return str(row["reason"])
    except XRTError as e:
        return str(e)
    return "no engine took any of it"
