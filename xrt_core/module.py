"""XRTModule: the public callable that runs a model on engines and the host."""

from __future__ import annotations

import logging
import os
import pathlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from xrt_core.compiler.guarded import GuardedModule
from xrt_core.errors import CacheError, InputError, ModelLoadError, QuantizationError, UnsupportedError, printable
from xrt_core.events import EventLog
from xrt_core.options import Options, resolve

if TYPE_CHECKING:
    from xrt_core.accuracy.model import BudgetedModel
    from xrt_core.accuracy.report import AccuracyReport
    from xrt_core.compiler.bound import Binding
    from xrt_core.compiler.inspection import CompiledCluster
    from xrt_core.compiler.models import CompiledGraph, ImportedModel, LiveCall
    from xrt_core.compiler.pipeline import Pipeline
    from xrt_core.compiler.traced import TracedModel
    from xrt_core.engine.contract import CompileOptions
    from xrt_core.explanation import Explanation
    from xrt_core.ir.graph import Graph
    from xrt_core.ir.types import ValueType
    from xrt_core.quantization import calibration
    from xrt_core.runtime.recording import Timeline

# What a module needs is imported when the first one is made: `from xrt_core import XRTModule` does not import NumPy.


class XRTModule(GuardedModule):
    """A model whose clusters run on engines; the nodes that no engine supports run on the host.

        m = XRTModule("model.onnx")
        y = m(x)                        # positional or by name; one result, or a tuple of them
        results = m.run({"x": x})       # {output name: array}

    model: an ONNX file's path, its bytes, a ModelProto, an onnx_ir.Model, an IR graph, or an `xrt.Graph` (or a
        function of traced tensors), which is traced once per signature and returns its results nested as `build`
        returns them. A fitted estimator of scikit-learn is converted by skl2onnx.
    example: a few rows of an estimator's input (an array or a DataFrame), which tell its dtypes; or the arguments of
        a model that a plugin's frontend captures by running it, as a tuple (docs/pytorch.md).
    engine: a name, a list of names by descending priority, "host" for none, "auto" for the fastest one per cluster
        (docs/guard.md). Default: "auto", or the engines that switches of `xrt.config` enable; with `guard=False` every
        available engine by its priority.
    shapes: input -> its dimensions: sizes, names of symbols, `xrt.Symbol("n", min=1, max=512, multiple=8)`, expressions
        such as "n + 1", or None for any size. Calls must fit them, and one plan serves all of them where the engine can
        (docs/shapes.md). What is not declared is found out by the calls.
    calibration: sets of inputs (input -> array) on which the errors are measured that the option `accuracy` allows; not
        given, those of the first calls (docs/precision.md).
    options: see docs/options.md.

    Arguments are arrays of NumPy, JAX, CuPy or torch. Results are arrays of the first argument's library, zero-copy
    if possible, so NumPy results may be read-only. For each new signature (dtypes and shapes, and the values of inputs
    that determine shapes) the graph is specialised, partitioned and compiled once. Calls are thread-safe.

    Raises ModelLoadError for a model that cannot be read, OptionError for a bad option, and the errors of
    `engine.EngineManager.select` for engines that cannot be used.
    """

    def __init__(
        self,
        model: Any,
        *,
        engine: str | Sequence[str] | None = None,
        example: Any = None,
        shapes: Mapping[str, Sequence[Any]] | None = None,
        calibration: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        from xrt_core.compiler.models import ImportedModel, is_traced, quantised, read_model, settle_operators
        from xrt_core.compiler.tiering import pipeline_for
        from xrt_core.compiler.traced import TracedModel
        from xrt_core.engine import engines as process_engines
        from xrt_core.engine.rollout import roll_out
        from xrt_core.quantization import calibration as calibration_mode
        from xrt_core.saved_model import SavedModel

        self.events = EventLog()
        saved = model if isinstance(model, SavedModel) else None
        given = process_engines.settled(resolve({"engine": engine, **options}), self.events)
        if given.rollout is not None:
            given = self._with_rollout(given, saved is not None)
        self.options: Options
        self.options, rollout = roll_out(given, self.events, process_engines)
        choose = partial(process_engines.choose, self.options)
        self._pipeline = pipeline_for(self.options, choose, self.events, saved.file if saved else None)
        self._calibration = calibration_mode
        self._source: ImportedModel | TracedModel | BudgetedModel
        self._budgeted: BudgetedModel | None = None
        if shapes is None and saved is not None:
            shapes = saved.shapes()
        if example is not None and (saved is not None or is_traced(model)):
            raise InputError("example is for models that do not say what they take; this one does")
        source: Callable[[Pipeline], ImportedModel | TracedModel]
        if saved is None and is_traced(model):
            source = partial(TracedModel, model, shapes=shapes)
        else:
            graph = saved.graph if saved is not None else read_model(model, example)
            settle_operators(graph, self.options)
            graph = graph if saved is not None else quantised(graph, self._pipeline)
            source = partial(ImportedModel, graph, shapes=shapes, compared=True)
        if rollout is None:
            self._check_passes(source, partial(pipeline_for, self.options, choose, self.events, None))
        self._source = source(self._pipeline)
        if calibration is not None and self.options.accuracy is None:
            raise InputError("calibration is for accuracy=, which says how far results may be off")
        if self.options.accuracy is not None:
            self._budgeted = self._within_budget(self._source, calibration)
            self._source = self._budgeted or self._source
        self._proven: XRTModule | None = None
        if rollout is not None:
            assert given.rollout is not None
            held = {**options, "rollout": structs.replace(given.rollout, share=0.0)}
            self._proven = XRTModule(model, engine=engine, example=example, shapes=shapes, **held)
            self._source = rollout.answering(self._source, self._proven, partial(self._pipeline.wait, 0.0))

    def _check_passes(
        self,
        source: Callable[[Pipeline], ImportedModel | TracedModel],
        make: Callable[[Sequence[str]], Pipeline],
    ) -> None:
        """Compare the first calls with the model as it was given. make: makes a pipeline without passes, by name."""
        from xrt_core.compiler.pass_check import PassCheck, keeps_results
        from xrt_core.compiler.tiering import TieredPipeline

        module = weakref.ref(self)

        def replan(pipeline: Pipeline) -> None:
            if (found := module()) is not None:
                before = found._pipeline
                found._source, found._pipeline = source(pipeline), pipeline
                before.close()

        if isinstance(self._pipeline, TieredPipeline) and keeps_results(self.options):
            PassCheck(self._pipeline, make, replan)

    def _with_rollout(self, options: Options, is_saved: bool) -> Options:
        """The options, without a rollout where that does not apply. Raises UnsupportedError where it was said for this
        module."""
        if not is_saved and options.accuracy is None:
            return options
        reason = "a saved module has its engines" if is_saved else "accuracy= chooses engines and compares by itself"
        if options.source("rollout").startswith("keyword"):
            raise UnsupportedError(f"rollout ({options.source('rollout')}) does not apply: {reason}")
        self.events.emit("rollout.not_applied", reason=reason)  # the environment speaks of all modules of a process
        return replace(options, rollout=None)

    def _within_budget(self, source: Any, inputs: Sequence[Mapping[str, Any]] | None) -> BudgetedModel | None:
        """The model with the option `accuracy`; None where that does not apply and was not said for this module.

        Raises UnsupportedError where it does not apply and was.
        """
        from xrt_core.accuracy.model import BudgetedModel
        from xrt_core.compiler.models import ImportedModel
        from xrt_core.options.guard_settings import GuardSettings

        options = self.options
        settings = GuardSettings.of(options)
        why = (
            "for models of fixed inputs; a traced graph becomes one by exporting it"
            if not isinstance(source, ImportedModel)
            else "for inference"
            if options.phase != "inference"
            else "for devices that are here"
            if options.target is not None
            else "for one device"
            if options.mesh is not None
            else "for engines whose results are verified, which guard=False turns off"
            if settings is None or not settings.verify
            else "not for graphs that are quantised or lowered by other options already"
            if options.use_int8 or options.narrow is not None
            else ""
        )
        if why and options.source("accuracy").startswith("keyword"):
            raise UnsupportedError(f"accuracy ({options.source('accuracy')}) is {why}")
        if why:  # the environment speaks of all modules of a process
            self.events.emit("accuracy.not_applied", reason=why)
            return None
        module = weakref.ref(self)

        def on_change(pipeline: Pipeline) -> None:
            if (found := module()) is not None:
                found._pipeline = pipeline

        return BudgetedModel(source, self._pipeline, inputs, on_change)

    @property
    def accuracy(self) -> AccuracyReport | None:
        """What the option `accuracy` has come to: what was tried, its errors and times, and what answers; None where
        the option is not given."""
        return None if self._budgeted is None else self._budgeted.report

    def wait(self, timeout: float | None = None) -> bool:
        """See `GuardedModule.wait`; with `accuracy`, for the search; with `rollout`, for the proven engines too."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not super().wait(timeout):
            return False
        if self._proven is not None:
            return self._proven.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if self._budgeted is None:
            return True
        if not self._budgeted.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
            return False
        return super().wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """See `GuardedModule.close`."""
        if self._proven is not None:
            self._proven.close()
        if self._budgeted is not None:
            self._budgeted.close()
        super().close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UnsupportedError: executables and threads are neither pickled nor copied."""
        raise UnsupportedError(
            "an XRTModule cannot be pickled or copied: m.save(path) writes it with its executables, and "
            "XRTModule.load(path) makes a module of the file"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and the executables of every signature that has been run or prepared into one file.

        `XRTModule.load` runs them without a compiler, on machines with the same engines and kind of device. An
        existing file is replaced atomically.

        Raises UnsupportedError if an engine's executables cannot be serialised, InputError for a traced graph that
        has more than one signature, or none yet (a file holds one graph), CacheError if the file cannot be written.
        """
        from xrt_core.saved_model import save_module

        graph, callers = self._source.saved()
        for caller in callers:
            caller.finish()
        save_module(path, graph, callers, self._pipeline.accelerated, self._source.shapes)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: str | Sequence[str] | None = None,
        recompile: bool = False,
        **options: Any,
    ) -> XRTModule:
        """Return the module that `save` wrote, with its saved options (docs/cache.md); options given here win.

        The saved signatures run without compilation; any other signature is compiled at its first call. recompile:
        on a machine that the executables do not fit, compile them again instead of raising. Load only files that you
        trust: executables are code; their digests detect damage, not tampering.

        Raises CacheError, with the reason, for a damaged file or one that was made for other engines or another kind
        of device, ModelLoadError if the file cannot be read, and the errors of `XRTModule`.
        """
        from xrt_core.compiler.pipeline import compilation_allowed
        from xrt_core.files import reading
        from xrt_core.saved_model import open_saved

        saved = open_saved(path)
        module = cls(saved, engine=engine or saved.engine_names(), **{**saved.options, **options})
        if not recompile:
            saved.check(module._pipeline.engines)
        if saved.ignored:
            ignored = ", ".join(saved.ignored)
            module.events.emit("saved.ignored", level=logging.WARNING, file=str(path), options=ignored)
        executables, guard = module._pipeline.services.executables, module._pipeline.services.guard
        executables.sealed = not recompile
        with compilation_allowed():
            for inputs, signature in saved.symbolic():
                with reading(f"{path}: a saved signature", CacheError):
                    caller, arrays = module._source.bind((), inputs)
                    caller.prepare_symbolic(arrays, signature)
            saved.restore_buckets(lambda inputs: module._source.bind((), inputs))
            for inputs in saved.signatures():
                with reading(f"{path}: a saved signature", CacheError):
                    caller, arrays = module._source.bind((), inputs)
                    caller.prepare(arrays)
        missed = [*executables.missed, *(guard.missing(saved.file) if guard is not None else ())]
        if missed and not recompile:
            raise CacheError(f"{missed[0]}. XRTModule.load(..., recompile=True), or --recompile, compiles them again")
        if guard is not None:
            guard.start()
        executables.sealed = False
        return module

    @property
    def input_types(self) -> Mapping[str, ValueType | None]:
        """Name -> declared type of every input; a dimension is an int, a symbol's name, or None.

        A traced graph has the types of its most recently traced signature; empty before the first one.
        """
        return MappingProxyType(self._source.input_types)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that may be omitted, because the model holds a default value for them."""
        return self._source.optional

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order (of a traced graph: of its most recently traced signature)."""
        return self._source.output_names

    @property
    def graph(self) -> Graph | None:
        """The captured graph, before specialisation; None for a traced one that has not been called."""
        caller = self._source.caller
        return None if caller is None else caller.graph

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the selected engines, by descending priority."""
        return tuple(e.name for e, _ in self._pipeline.accelerated.engines)

    def compile_options(self, engine: str, fused: bool = True) -> CompileOptions:
        """Return the CompileOptions for an engine, its own options included. fused: False disables operator fusion."""
        return self._pipeline.accelerated.services.compilation.options_for(engine, fused)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Run the model. Returns its result, or a tuple of results if it has several.

        Raises InputError for arguments that do not fit the declared inputs; no state is changed then.
        """
        if self._calibration.active is not None:
            self._record(self._calibration.active, args, named)
        return self._source(args, named)

    def run(self, inputs: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run the model on {input name: array}; returns {output name: array}.

        results: {output name: array of NumPy, CuPy or torch} for outputs that are wanted in arrays of the caller's;
        these are returned in their place. An engine that can writes there itself, else the result is copied. If the
        call fails, their content is anything.

        Raises InputError as a call does, and for results that the model does not have, or of another dtype or shape.
        """
        if self._calibration.active is not None:
            self._record(self._calibration.active, (), _mapping(inputs))
        if results is None:
            return self._source.run(inputs if type(inputs) is dict else _mapping(inputs))
        return self._source.run(_mapping(inputs), _mapping(results))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> Binding:
        """Return a call without arguments that runs the model on these arrays as often as it is called.

            step = m.bind({"x": x, "state": state}, {"state_out": state})
            x[:] = samples                  # new content in the same array
            step()["y"]

        inputs, outputs: as for `run`. Types, dtypes and shapes are looked at once, so that a call below a millisecond
        takes less. Results without an array in `outputs` are arrays of their own. An output may have the array of an
        input, which carries a state on.

        Raises InputError as `run` does; it prepares the signature, and runs nothing.
        """
        from xrt_core.compiler.bound import Binding

        inputs, outputs = dict(_mapping(inputs)), dict(_mapping(outputs or {}))
        source = self._source
        names, run = source.bound(inputs, outputs)

        def watched() -> Sequence[Any]:
            nonlocal source, run
            if self._calibration.active is not None:
                self._record(self._calibration.active, (), inputs)
            if self._source is not source:  # a pass was left out
                source = self._source
                run = source.bound(inputs, outputs)[1]
            return run()

        return Binding(inputs, outputs, names, watched)

    def run_many(self, sets: Iterable[Mapping[str, Any]], *, callers: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the results of `run` for each of many sets of inputs, in their order.

        sets: taken as they are needed, a few ahead. callers: so many threads call at a time; more than one helps where
        a run does not use all processors, such as with `threads=1`.

        Raises InputError where `callers` is no positive integer; what a run raises comes in its place, and ends it.
        """
        from xrt_core.compiler.bound import run_many

        return run_many(self.run, sets, callers)

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Timeline]:
        """Run as `run` does; return the results as NumPy arrays and the start and end of each step of the plan.
        `timeline.to_json()` is for chrome://tracing or ui.perfetto.dev. Raises InputError as a call does."""
        caller, arrays = self._source.bind((), _mapping(inputs))
        results, timeline = caller.timed(arrays)
        names = [v.name or f"output_{i}" for i, v in enumerate(caller.graph.outputs)]
        return dict(zip(names, results, strict=True)), timeline

    def prepare(self, inputs: Mapping[str, Any], *, background: bool = False) -> None:
        """Specialise and compile for the signature of these inputs, without running. With `guard_async`, compilation
        starts in the background and `wait` blocks until it is done.

        background: with `guard_async`, planning and queries of engines are in the background as well, as after a call.
        Raises InputError as a call does.
        """
        from xrt_core.compiler.pipeline import compilation_allowed

        if self._proven is not None:
            self._proven.prepare(inputs, background=background)
        caller, arrays = self._source.bind((), _mapping(inputs))
        if background:
            with compilation_allowed():
                caller.begin(arrays)
            return
        with compilation_allowed():
            caller.prepare(arrays, at_once=True)
        guard = self._pipeline.accelerated.services.guard
        if guard is not None:
            guard.start()

    def is_prepared(self, inputs: Mapping[str, Any]) -> bool:
        """Whether what answers inputs like these is there, and nothing is to be compiled for them, as after `prepare`.
        Sizes that a plan for several serves are prepared with it. Raises InputError as a call does."""
        caller, arrays = self._source.bind((), _mapping(inputs))
        return caller.is_prepared(arrays)

    def derived(self, graph: Graph) -> ImportedModel | None:
        """Return what runs a graph that was made of this model's, with the options and engines of this module; None
        where more than these decide what answers (`accuracy`, `rollout`), and for a traced graph."""
        from xrt_core.compiler.models import ImportedModel

        return ImportedModel(graph, self._pipeline) if type(self._source) is ImportedModel else None

    def live(self, inputs: Mapping[str, Any]) -> LiveCall | None:
        """Return the call by which engines answer inputs like these; None where the host would, or where they need a
        compilation. Nothing is compiled or run. Raises InputError as a call does."""
        caller, arrays = self._source.bind((), _mapping(inputs))
        return caller.live(arrays)

    def explain(self, inputs: Mapping[str, Any] | None = None) -> Explanation:
        """Return the partitioning and compilation decisions for the signature of `inputs`, by default for the last
        new signature.

        A signature that has not been run is partitioned but not compiled. Without inputs and before the first run the
        declared input types must be static. Raises InputError if they are not, or the inputs do not fit.
        """
        if inputs is None:
            return self._known_caller().explain(None)
        caller, arrays = self._source.bind((), _mapping(inputs))
        return caller.explain(arrays)

    def partitioned(self, inputs: Mapping[str, Any] | None = None) -> Graph:
        """Return the graph with a Launch node per cluster, for the signature of `inputs` (see `explain`)."""
        if inputs is None:
            caller = self._known_caller()
            return caller.partition(caller.example()).graph
        caller, arrays = self._source.bind((), _mapping(inputs))
        return caller.partition(arrays).graph

    def optimised(self, inputs: Mapping[str, Any] | None = None) -> Graph:
        """Return the graph after specialisation and the passes, before it is partitioned, for the signature of `inputs`
        (see `explain`)."""
        if inputs is None:
            caller = self._known_caller()
            return caller.optimise(caller.example()).graph
        caller, arrays = self._source.bind((), _mapping(inputs))
        return caller.optimise(arrays).graph

    def clusters(self, inputs: Mapping[str, Any] | None = None) -> Sequence[CompiledCluster]:
        """Return the clusters of the graph for the signature of `inputs` (see `explain`).

        Each shows by `as_text(stage)` what its engine makes of it; with "auto" the first that takes the cluster,
        whichever runs it. Nothing is compiled before that.
        """
        from xrt_core.compiler.inspection import compiled_clusters

        return compiled_clusters(self.partitioned(inputs), self._pipeline.accelerated.services.compilation)

    @property
    def executables(self) -> Sequence[CompiledCluster]:
        """The clusters that engines run for the last new signature, with the engines that were chosen; empty before the
        first call, while the host answers alone, and where it runs everything.

        `m.executables[i].stages()` lists the forms of one, `m.executables[i].as_text(stage)` shows it.
        """
        from xrt_core.compiler.inspection import executables_of

        caller = self._source.caller
        plan = None if caller is None else caller.final
        return () if plan is None else executables_of(plan, self._pipeline.accelerated.services.compilation)

    def _record(self, recorder: calibration.Recorder, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self.options.use_int8:
            raise QuantizationError("a module with use_int8 is quantised already: calibrate one without it")
        caller, arrays = self._source.bind(args, named)
        from xrt_core.compiler.models import CompiledGraph

        recorder.record(caller.graph, arrays, lambda graph: CompiledGraph(graph, self._pipeline))

    def _known_caller(self) -> CompiledGraph:
        caller = self._source.caller
        if caller is None:
            raise InputError("a traced graph has no types before its first call: give inputs")
        return caller

    def __repr__(self) -> str:
        from xrt_core.compiler.models import input_list

        caller = self._source.caller
        name = (caller.graph.name if caller else "") or "graph"
        takes = input_list(caller.graph.inputs) if caller else "..."
        return f"<XRTModule {name}: {takes} -> {', '.join(self.output_names)}; engines {self._pipeline.engine_names}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: inputs, outputs, engines, and the partition of the last call."""
        from html import escape

        caller = self._source.caller
        known = caller.explained() if caller is not None else None
        head = f"<div>{escape(printable(repr(self), lines=False))}</div>"
        return head + ("" if known is None else known._repr_html_())


def warmup(
    module: XRTModule,
    shapes: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
    timeout: float | None = None,
) -> None:
    """Compile a module for calls of these shapes, and wait until that is done; nothing is run for a result.

    shapes: for each call to prepare for, input -> its shape, or an array where values matter (those that determine
        shapes); or the path of a JSON file with such a list. Inputs that are not named must have a default. With
        `shapes=` declared, or an engine of dynamic shapes and two different calls, one plan serves all sizes.
    timeout: seconds to wait for what is compiled in the background.

    Raises InputError for shapes that do not fit the model, ModelLoadError for a file that cannot be read.
    """
    import numpy as np

    if isinstance(shapes, str | os.PathLike):
        from xrt_core.files import decode, reading

        with reading(os.fspath(shapes), ModelLoadError):
            content = pathlib.Path(shapes).read_bytes()
        shapes = decode(content, tuple[dict[str, tuple[int, ...]], ...], os.fspath(shapes), ModelLoadError)
    types = module.input_types
    for row in shapes:
        inputs = {}
        for name, given in _mapping(row).items():
            t = types.get(name)
            if hasattr(given, "dtype"):
                inputs[name] = given
            elif (dtype := getattr(t, "dtype", None)) is None:
                raise InputError(f"warmup: the dtype of input {name!r} is not known ({t}); give an array")
            else:
                inputs[name] = np.zeros(tuple(given), dtype)
        module.prepare(inputs)
    module.wait(timeout)


def _mapping(inputs: Any) -> Mapping[str, Any]:
    """Return `inputs`. Raises InputError if they are no mapping."""
    if type(inputs) is not dict and not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a mapping of input names to arrays, not a {type(inputs).__name__}")
    return inputs
