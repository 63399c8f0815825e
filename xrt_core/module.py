"""XRTModule: the public callable that runs a model on engines and the host."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from xrt_core.cache.lru import LRU
from xrt_core.cache.model_file import is_model_file
from xrt_core.compiler.compiled_graph import CompiledGraph
from xrt_core.compiler.guarded import GuardedModule
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.tiering import pipeline_for
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import CacheError, InputError, ModelLoadError, QuantizationError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.rewrite import bind_defaults
from xrt_core.ir.types import OptionalType, TensorType, ValueType
from xrt_core.options import Options, resolve
from xrt_core.quantization import calibration
from xrt_core.runtime.arrays import is_array
from xrt_core.runtime.converters import plain_arguments
from xrt_core.runtime.scheduler import Timeline
from xrt_core.saved_model import SavedModel, open_saved, save_module


class XRTModule(GuardedModule):
    """A model whose clusters run on engines; the nodes that no engine supports run on the host.

        m = XRTModule("model.onnx")
        y = m(x)                        # positional or by name; one result, or a tuple of them
        results = m.run({"x": x})       # {output name: array}

    model: an ONNX file's path, its bytes, a ModelProto, an onnx_ir.Model, an IR graph, or an `xrt.Graph` (or a
        function of traced tensors), which is traced once per signature and returns its results nested as `build`
        returns them.
    engine: a name, a list of names by descending priority, "host" for none, "auto" for the fastest one per cluster
        (docs/guard.md). Default: every available engine that the switches of `xrt.config` enable.
    options: see docs/options.md.

    Arguments are arrays of NumPy, JAX, CuPy or torch. Results are arrays of the first argument's library, zero-copy
    if possible, so NumPy results may be read-only. For each new signature (dtypes and shapes, and the values of inputs
    that determine shapes) the graph is specialised, partitioned and compiled once. Calls are thread-safe.

    Raises ModelLoadError for a model that cannot be read, OptionError for a bad option, and the errors of
    `engine.EngineManager.select` for engines that cannot be used.
    """

    def __init__(self, model: Any, *, engine: str | Sequence[str] | None = None, **options: Any) -> None:
        self.options: Options = resolve({"engine": engine, **options})
        self.events = EventLog()
        saved = model if isinstance(model, SavedModel) else None
        choose = partial(process_engines.choose, self.options)
        self._pipeline = pipeline_for(self.options, choose, self.events, saved.file if saved else None)
        self._source: _Imported | _Traced
        if _is_traced(model):
            self._source = _Traced(model, self._pipeline)
        else:
            graph = _read(model)
            self._source = _Imported(graph if saved else _quantised(graph, self._pipeline), self._pipeline)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and the executables of every signature that has been run or prepared into one file.

        `XRTModule.load` runs them without a compiler, on machines with the same engines and kind of device. An
        existing file is replaced atomically.

        Raises UnsupportedError if an engine's executables cannot be serialised, InputError for a traced graph that
        has more than one signature, or none yet (a file holds one graph), CacheError if the file cannot be written.
        """
        graph, callers = self._source.saved()
        for caller in callers:
            caller.finish()
        save_module(path, graph, callers, self._pipeline.accelerated)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: str | Sequence[str] | None = None,
        recompile: bool = False,
        **options: Any,
    ) -> XRTModule:
        """Return the module that `save` wrote, with its saved options; options given here take precedence.

        The saved signatures run without compilation; any other signature is compiled at its first call. recompile:
        on a machine that the executables do not fit, compile them again instead of raising. Load only files that you
        trust: executables are code; their digests detect damage, not tampering.

        Raises CacheError, with the reason, for a damaged file or one that was made for other engines or another kind
        of device, ModelLoadError if the file cannot be read, and the errors of `XRTModule`.
        """
        saved = open_saved(path)
        module = cls(saved, engine=engine or saved.engine_names(), **{**saved.options, **options})
        if not recompile:
            saved.check(module._pipeline.engines)
        executables, guard = module._pipeline.services.executables, module._pipeline.services.guard
        executables.sealed = not recompile
        for inputs in saved.signatures():
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
        if calibration.active is not None:
            self._record(calibration.active, args, named)
        return self._source(args, named)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model on {input name: array}; returns {output name: array}. Raises InputError as a call does."""
        if calibration.active is not None:
            self._record(calibration.active, (), _mapping(inputs))
        return self._source.run(_mapping(inputs))

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Timeline]:
        """Run as `run` does; return the results as NumPy arrays and the start and end of each step of the plan.
        `timeline.to_json()` is for chrome://tracing or ui.perfetto.dev. Raises InputError as a call does."""
        caller, arrays = self._source.bind((), _mapping(inputs))
        results, timeline = caller.timed(arrays)
        names = [v.name or f"output_{i}" for i, v in enumerate(caller.graph.outputs)]
        return dict(zip(names, results, strict=True)), timeline

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Specialise and compile for the signature of these inputs, without running. With `guard_async`, compilation
        starts in the background and `wait` blocks until it is done."""
        caller, arrays = self._source.bind((), _mapping(inputs))
        caller.prepare(arrays, at_once=True)
        guard = self._pipeline.accelerated.services.guard
        if guard is not None:
            guard.start()

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

    def _record(self, recorder: calibration.Recorder, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self.options.use_int8:
            raise QuantizationError("a module with use_int8 is quantised already: calibrate one without it")
        caller, arrays = self._source.bind(args, named)
        recorder.record(caller.graph, arrays, lambda graph: CompiledGraph(graph, self._pipeline))

    def _known_caller(self) -> CompiledGraph:
        caller = self._source.caller
        if caller is None:
            raise InputError("a traced graph has no types before its first call: give inputs")
        return caller

    def __repr__(self) -> str:
        caller = self._source.caller
        name = (caller.graph.name if caller else "") or "graph"
        takes = _names(caller.graph.inputs) if caller else "..."
        return f"<XRTModule {name}: {takes} -> {', '.join(self.output_names)}; engines {self._pipeline.engine_names}>"


class _Imported:
    """A model with fixed inputs and outputs: an ONNX model or an IR graph.

    An omitted input that has a default becomes a constant: each set of given optional inputs has a CompiledGraph.
    caller: the CompiledGraph used last; initially the one for no optional input.
    """

    def __init__(self, graph: Graph, pipeline: Pipeline) -> None:
        self.output_names = tuple(v.name or f"output_{i}" for i, v in enumerate(graph.outputs))
        self.caller = self._plain = CompiledGraph(bind_defaults(graph), pipeline)
        self._graph = graph
        self._inputs = graph.inputs
        self._pipeline = pipeline
        self._callers: LRU[CompiledGraph] = LRU(pipeline.options.cache_size)
        self._defaults = frozenset(i for i, v in enumerate(graph.inputs) if v in graph.defaults)
        self._names = tuple(v.name or f"input_{i}" for i, v in enumerate(graph.inputs))
        self._index = {name: i for i, name in enumerate(self._names)}
        self._single = len(graph.outputs) == 1
        self._required = tuple(name for i, name in enumerate(self._names) if i not in self._defaults)
        required = len(self._required)
        # exactly this number of positional arguments matches the inputs of the plain caller: no binding needed
        self._plain_count = -1 if any(i < required for i in self._defaults) else required

    @property
    def input_types(self) -> dict[str, ValueType | None]:
        """Input name -> declared type, optional inputs included."""
        return dict(zip(self._names, (v.type for v in self._inputs), strict=True))

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the inputs that have a default value, in order."""
        return tuple(self._names[i] for i in sorted(self._defaults))

    def __call__(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if named or len(args) != self._plain_count:
            caller, args = self.bind(args, named)
        else:
            caller = self.caller = self._plain
        results = caller(args)
        return results[0] if self._single else tuple(results)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        caller, arrays = self.bind((), inputs)
        return dict(zip(self.output_names, caller(arrays), strict=True))

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[CompiledGraph, list[Any]]:
        """Return the CompiledGraph for the given inputs, and one argument per input of it (None: omitted)."""
        if not args and len(named) == len(self._required) and all(name in named for name in self._required):
            self.caller = self._plain  # fast path: a model may list every weight as an optional input
            return self._plain, [named[name] for name in self._required]
        count = len(self._inputs)
        if len(args) > count:
            raise InputError(f"{len(args)} inputs given, the model takes {count}: {_names(self._inputs)}")
        arrays: list[Any] = [*args, *[_MISSING] * (count - len(args))]
        for name, array in named.items():
            i = self._index.get(name)
            if i is None:
                raise InputError(f"unknown input {name!r}; the model takes {_names(self._inputs)}")
            if arrays[i] is not _MISSING:
                raise InputError(f"input {name!r} is given twice, by position and by name")
            arrays[i] = array
        missing = [
            self._names[i]
            for i, (v, a) in enumerate(zip(self._inputs, arrays, strict=True))
            if a is _MISSING and i not in self._defaults and not isinstance(v.type, OptionalType)
        ]
        if missing:
            raise InputError(f"missing input {', '.join(map(repr, missing))}; the model takes {_names(self._inputs)}")
        given = frozenset(i for i in self._defaults if arrays[i] is not _MISSING and arrays[i] is not None)
        self.caller = caller = self._caller(given)
        taken = [a for i, a in enumerate(arrays) if i not in self._defaults or i in given]
        return caller, [None if a is _MISSING else a for a in taken]

    def saved(self) -> tuple[Graph, list[CompiledGraph]]:
        """Return the contents of a model file: the graph, and the CompiledGraphs that hold its signatures."""
        return self._graph, [self._plain, *self._callers.values()]

    def _caller(self, given: frozenset[int]) -> CompiledGraph:
        if not given:
            return self._plain
        return self._callers.get_or_make(
            given, lambda: CompiledGraph(bind_defaults(self._graph, given), self._pipeline)
        )


class _Traced:
    """An `xrt.Graph` or a function, traced once per signature; the nesting of the arguments is part of it."""

    def __init__(self, graph: Any, pipeline: Pipeline) -> None:
        from xrt_core.frontends.graph import Binder

        self.caller: CompiledGraph | None = None
        self.output_names: tuple[str, ...] = ()
        self.optional: tuple[str, ...] = ()
        self._graph = graph
        self._binder = Binder(graph)
        self._pipeline = pipeline
        self._traced: LRU[tuple[CompiledGraph, Any]] = LRU(pipeline.options.cache_size)

    @property
    def input_types(self) -> dict[str, ValueType | None]:
        """Input name -> type, of the most recently traced signature."""
        caller = self.caller
        return dict(zip(caller.names, (v.type for v in caller.graph.inputs), strict=True)) if caller else {}

    def __call__(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        args, named, back = plain_arguments(args, named)
        (caller, traced), arrays = self._bind(args, named)
        results = caller(arrays)
        return traced.structure.rebuild(results if back is None else back(results))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        _, inputs, back = plain_arguments((), inputs)
        (caller, traced), arrays = self._bind((), inputs)
        results = caller(arrays)
        return dict(zip(traced.output_names, results if back is None else back(results), strict=True))

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[CompiledGraph, list[Any]]:
        """Return the CompiledGraph for the signature of these arguments, and its input arrays."""
        (caller, _), arrays = self._bind(*plain_arguments(args, named)[:2])
        return caller, arrays

    def saved(self) -> tuple[Graph, list[CompiledGraph]]:
        """Return the contents of a model file. Raises InputError unless there is exactly one traced graph."""
        traced = self._traced.values()
        if len(traced) != 1:
            raise InputError(
                f"a traced graph is saved after it ran with one signature, and this one has {len(traced)}: make a "
                "module for each signature"
            )
        caller = traced[0][0]
        return caller.graph, [caller]

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[CompiledGraph, Any], list[Any]]:
        call = self._binder(args, named)
        key = (tuple([(type(a), a.shape, a.dtype) for a in call.arrays]), call.layout)
        return self._traced.get_or_make(key, lambda: self._trace(call)), list(call.arrays)

    def _trace(self, call: Any) -> tuple[CompiledGraph, Any]:
        from xrt_core.frontends.graph import trace_call
        from xrt_core.runtime.arrays import to_numpy

        types = [TensorType(x.dtype, x.shape) for x in map(to_numpy, call.arrays)]
        traced = trace_call(self._graph, types, call.layout, call.names)
        self.caller = CompiledGraph(_quantised(traced.graph, self._pipeline), self._pipeline)
        self.output_names = tuple(traced.output_names)
        return self.caller, traced


_MISSING: Any = object()
_SHOWN = 12  # inputs named in a message


def _is_traced(model: Any) -> bool:
    if isinstance(model, str | bytes | os.PathLike | SavedModel):  # loading a file must not import the tracer
        return False
    from xrt_core.frontends.graph import Graph as TracedGraph

    return isinstance(model, TracedGraph) or (
        callable(model) and not isinstance(model, type) and hasattr(model, "__code__") and not is_array(model)
    )


def _read(model: Any) -> Graph:
    if isinstance(model, Graph):
        return model
    if isinstance(model, SavedModel):
        return model.graph
    from xrt_core.frontends.onnx_import import import_model

    if isinstance(model, str | os.PathLike) and is_model_file(pathlib.Path(model)):
        raise ModelLoadError(f"{os.fspath(model)!r} is a saved module: XRTModule.load({os.fspath(model)!r}) opens it")
    return import_model(model)


def _quantised(graph: Graph, pipeline: Pipeline) -> Graph:
    """Return the graph with Q/DQ nodes inserted as `use_int8` requires. Raises QuantizationError."""
    if not pipeline.options.use_int8:
        return graph
    from xrt_core.quantization.qdq import quantise
    from xrt_core.quantization.ranges import identity, load_ranges

    graph = calibration.prepared(pipeline.capture(bind_defaults(graph)).graph)  # the form that was calibrated
    folder = pipeline.options.int8_calibration
    assert folder is not None
    marks = pipeline.options.precision if isinstance(pipeline.options.precision, tuple) else ()
    return quantise(graph, load_ranges(folder, identity(graph), graph.name), [key for key, _ in marks])


def _mapping(inputs: Any) -> Mapping[str, Any]:
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a mapping of input names to arrays, not a {type(inputs).__name__}")
    return inputs


def _names(inputs: Sequence[Value]) -> str:
    shown = [f"{v.name or f'input_{i}'} ({v.type or '?'})" for i, v in enumerate(inputs[:_SHOWN])]
    more = [f"... {len(inputs)} in all"] if len(inputs) > _SHOWN else []
    return ", ".join(shown + more) or "no inputs"
