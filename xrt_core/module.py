"""XRTModule: a model, and the callable that a user holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from xrt_core.cache.memory import LRU
from xrt_core.engine import engines as process_engines
from xrt_core.errors import InputError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import SequenceType, TensorType, ValueType, dtype_name
from xrt_core.options import Options, resolve
from xrt_core.pipeline import Pipeline, Planned
from xrt_core.runtime.arrays import family_of, from_numpy, is_array, to_numpy
from xrt_core.runtime.runner import Runner, type_of

_Call = Callable[[Sequence[Any]], Any]


class XRTModule:
    """A model that runs on engines, and where no engine takes a node, on the host.

        m = XRTModule("model.onnx", engine="xla")
        y = m(x)                        # positional or by name; one result, or a tuple of them
        results = m.run({"x": x})       # {output name: array}

    model: an ONNX file's path, its bytes, a ModelProto, an onnx_ir.Model, an IR graph, or an `xrt.Graph`.
    engine: a name, a list of names in the order to try them, "host" for none; without it every engine that is ready
        takes part, as the switches of `xrt.config` allow. options: see docs/options.md.

    Arguments are arrays of NumPy, JAX, CuPy or torch; results come in the family of the first argument, without a
    copy where that is possible, so NumPy results may be read-only. For each new signature (dtypes and shapes, and the
    values of inputs that determine shapes) the graph is specialised, partitioned and compiled once. A module may be
    called from many threads.

    Raises ModelLoadError for a model that cannot be read, OptionError for a bad option, and what
    `engine.EngineManager.select` raises for engines that cannot be used.
    """

    def __init__(self, model: Any, *, engine: str | Sequence[str] | None = None, **options: Any) -> None:
        self.options: Options = resolve({"engine": engine, **options})
        self.events = EventLog()
        chosen = process_engines.select(self.options)
        devices = [(e, process_engines.device(e, self.options.device)) for e in chosen]
        self._pipeline = Pipeline(self.options, devices, self.events)
        graph = _read(model)
        self._runner: Runner = self._pipeline.runner(graph)
        self._inputs = graph.inputs
        self._defaults = {i: graph.defaults[v] for i, v in enumerate(graph.inputs) if v in graph.defaults}
        self._index = {v.name: i for i, v in enumerate(graph.inputs)}
        self._calls: LRU[_Call] = LRU(2 * self.options.cache_size)
        self._by_value = frozenset(self._runner.by_value)
        self._last: Planned | None = None
        self.output_names: tuple[str, ...] = tuple(v.name or f"output_{i}" for i, v in enumerate(graph.outputs))

    @property
    def input_types(self) -> Mapping[str, ValueType | None]:
        """Name -> declared type of every input; a dimension is an int, a symbol's name, or None."""
        return MappingProxyType({v.name: v.type for v in self._inputs})

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that may be left out, because the model holds a default for them."""
        return tuple(self._inputs[i].name for i in self._defaults)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that take part, in the order in which they are tried."""
        return tuple(e.name for e, _ in self._pipeline.engines)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. Returns its result, or a tuple of them where it has several.

        Raises InputError for arguments that do not fit; nothing is changed then.
        """
        arrays: Sequence[Any] = self._bind(args, named) if named or len(args) != len(self._inputs) else args
        if not self._by_value:
            try:
                call = self._calls.get(tuple([(type(a), a.shape, a.dtype) for a in arrays]))
            except (AttributeError, TypeError):  # a sequence, or something that is no array
                call = None
            if call is not None:
                return call(arrays)
        return self._prepare(arrays)(arrays)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model on {input name: array}; returns {output name: array}. Raises InputError as a call does."""
        results = self(**dict(inputs))
        return dict(zip(self.output_names, results if isinstance(results, tuple) else (results,), strict=True))

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Specialise and compile for the signature of these inputs, without running."""
        self._prepare(self._bind((), inputs))

    def explain(self, inputs: Mapping[str, Any] | None = None) -> Explanation:
        """What was decided for the signature of `inputs`; without them, for the last new signature.

        A signature that has not been run is partitioned but not compiled. Without inputs and before the first run the
        declared input types must be static. Raises InputError where they are not, or the inputs do not fit.
        """
        if inputs is None and self._last is not None:
            return self._last.explain()
        arrays = self._arguments(inputs)
        return self._partition(arrays).explanation

    def partitioned(self, inputs: Mapping[str, Any] | None = None) -> Graph:
        """The graph with a Launch node per cluster, for the signature of `inputs` (see `explain`)."""
        return self._partition(self._arguments(inputs)).graph

    # --- within ---------------------------------------------------------------------------------------------------

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """One argument per input, in order; None for those left out that have a default."""
        count = len(self._inputs)
        if len(args) > count:
            raise InputError(f"{len(args)} inputs given, the model takes {count}: {self._names()}")
        arrays: list[Any] = [*args, *[_MISSING] * (count - len(args))]
        for name, array in named.items():
            i = self._index.get(name)
            if i is None:
                raise InputError(f"unknown input {name!r}; the model takes {self._names()}")
            if arrays[i] is not _MISSING:
                raise InputError(f"input {name!r} is given twice, by position and by name")
            arrays[i] = array
        missing = [
            v.name for i, (v, a) in enumerate(zip(self._inputs, arrays, strict=True))
            if a is _MISSING and i not in self._defaults and not _may_be_absent(v)
        ]  # fmt: skip
        if missing:
            raise InputError(f"missing input {', '.join(map(repr, missing))}; the model takes {self._names()}")
        return [None if a is _MISSING else a for a in arrays]

    def _names(self) -> str:
        return ", ".join(f"{v.name} ({v.type or '?'})" for v in self._inputs) or "no inputs"

    def _prepare(self, arrays: Sequence[Any]) -> _Call:
        """The call for these arguments: converts them, runs their plan, and takes the results to their family."""
        host = [to_numpy(a) for a in arrays]
        for i, a in enumerate(host):
            if a is not None or i not in self._defaults:
                _check(self._inputs[i], a)
        plan = self._runner.plan_for(host, self._defaults)
        assert isinstance(plan, Planned)
        self._last = plan
        families = [family_of(type(a)) if is_array(a) else "numpy" for a in arrays]
        family = next((f for f, a in zip(families, arrays, strict=True) if is_array(a)), "numpy")
        call = _make_call(plan, arrays, families, family)
        if not self._by_value and all(is_array(a) for a in arrays):
            self._calls.put(tuple([(type(a), a.shape, a.dtype) for a in arrays]), call)
        return call

    def _arguments(self, inputs: Mapping[str, Any] | None) -> list[Any]:
        if inputs is not None:
            return [to_numpy(a) for a in self._bind((), inputs)]
        arrays: list[Any] = []
        for i, v in enumerate(self._inputs):
            if i in self._defaults:
                arrays.append(None)
            elif not isinstance(v.type, TensorType) or not v.type.is_static:
                raise InputError(
                    f"input {v.name!r} is declared as {v.type or '?'}: give inputs, so that its shape is known"
                )
            else:
                shape = [d for d in v.type.shape or () if isinstance(d, int)]
                arrays.append(np.zeros(shape, v.type.dtype))
        return arrays

    def _partition(self, arrays: Sequence[Any]) -> Any:
        for i, a in enumerate(arrays):
            if a is not None or i not in self._defaults:
                _check(self._inputs[i], a)
        known = dict(self._defaults)
        known.update({i: arrays[i] for i in self._by_value if isinstance(arrays[i], np.ndarray)})
        known = {i: a for i, a in known.items() if arrays[i] is None or i in self._by_value}
        types = [
            type_of(known.get(i) if a is None else a, v.type)
            for i, (a, v) in enumerate(zip(arrays, self._inputs, strict=True))
        ]
        return self._pipeline.capture(self._runner.graph).optimise(types, known).partition()

    def __repr__(self) -> str:
        name = self._runner.graph.name or "graph"
        return f"<XRTModule {name}: {self._names()} -> {', '.join(self.output_names)}; engines {self.engines or 'host'}>"


_MISSING: Any = object()


def _read(model: Any) -> Graph:
    if isinstance(model, Graph):
        return model
    from xrt_core.frontends.onnx_import import import_model

    return import_model(model)


def _may_be_absent(v: Value) -> bool:
    from xrt_core.ir.types import OptionalType

    return isinstance(v.type, OptionalType)


def _make_call(plan: Planned, arrays: Sequence[Any], families: Sequence[str], family: str) -> _Call:
    """Bind a plan to the families of its arguments and results; the hot path of every later call."""
    run = plan.run
    convert = [
        i
        for i, (a, f) in enumerate(zip(arrays, families, strict=True))
        if type(a) is not np.ndarray and not (f == "jax" and plan.engine_inputs[i] == "xla")
    ]
    foreign = [i for i, a in enumerate(arrays) if isinstance(a, np.ndarray) and to_numpy(a) is not a]
    convert = sorted({*convert, *foreign})
    out = from_numpy(family)
    single = len(plan.outputs) == 1
    if family == "numpy" and not convert and all(s != HOST_SPACE for s in plan.spaces):
        asarray = np.asarray
        if single:
            return lambda arrays: asarray(run(arrays)[0])
        return lambda arrays: tuple([asarray(r) for r in run(arrays)])

    def call(arrays: Sequence[Any]) -> Any:
        if convert:
            arrays = list(arrays)
            for i in convert:
                arrays[i] = to_numpy(arrays[i])
        results = run(arrays)
        return out(results[0]) if single else tuple([out(r) for r in results])

    return call


HOST_SPACE = "host"


def _check(value: Value, a: Any) -> None:
    """Raise InputError where the argument does not fit the declared type of its input."""
    declared = value.type
    if isinstance(declared, TensorType):
        if not isinstance(a, np.ndarray):
            raise InputError(f"input {value.name!r} takes a tensor {declared}, not a {type(a).__name__}")
        if declared.dtype is not None and a.dtype != declared.dtype:
            raise InputError(
                f"input {value.name!r}: dtype {dtype_name(a.dtype)} given, {dtype_name(declared.dtype)} expected; "
                f"convert it with .astype({dtype_name(declared.dtype)!r})"
            )
        shape = declared.shape
        if shape is not None:
            fits = len(shape) == a.ndim and all(
                not isinstance(d, int) or d == n for d, n in zip(shape, a.shape, strict=True)
            )
            if not fits:
                raise InputError(f"input {value.name!r}: shape {list(a.shape)} given, {declared} expected")
    elif isinstance(declared, SequenceType) and not isinstance(a, list):
        raise InputError(f"input {value.name!r} takes a list of arrays ({declared}), not a {type(a).__name__}")


ModelSource = str | os.PathLike[str] | bytes
