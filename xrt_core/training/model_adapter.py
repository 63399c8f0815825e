"""Adapters of trained models, with constants turned into variables: FixedModel (ONNX, IR) and WrittenGraph (Python)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import numpy as np

from xrt_core.errors import CheckpointError, InputError, XRTError
from xrt_core.frontends.graph import Graph as TracedGraph
from xrt_core.frontends.graph import Traced, layout_of, parameters_of, trace_call
from xrt_core.frontends.promotion import is_float
from xrt_core.ir.graph import Graph, Value, bind_defaults
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.kernels import static_inputs
from xrt_core.passes.shape_specialization import shape_inputs
from xrt_core.passes.simplify import DeadNodes
from xrt_core.runtime.arrays import family_of, is_array, to_numpy
from xrt_core.training.open_batch import open_batch
from xrt_core.training.variables import (
    Select,
    Variable,
    all_constants,
    master,
    promoted,
    replaced,
    statistics,
    trainable,
    untied,
)

log = logging.getLogger("xrt")


_LABELS: Final = {
    "labels": "a loss brings its own inputs: loss='cross_entropy' takes labels",
    "target": "a loss brings its own inputs: loss='mse' takes target",
}


def bound(
    names: Sequence[str], args: Sequence[Any], inputs: Mapping[str, Any], on_mesh: bool
) -> dict[str, np.ndarray]:
    """The arrays of a step by name, in order. on_mesh: see `kept`. Raises InputError for those that do not fit."""
    if len(args) > len(names):
        raise InputError(f"{len(args)} arrays given, a step takes {len(names)}: {', '.join(names)}")
    given = dict(zip(names, args, strict=False))
    for name, array in inputs.items():
        if name not in names:
            hint = f"; {_LABELS[name]}" if name in _LABELS else ""
            raise InputError(f"unknown input {name!r}; a step takes {', '.join(names)}{hint}")
        if name in given:
            raise InputError(f"input {name!r} is given twice, by position and by name")
        given[name] = array
    missing = [n for n in names if n not in given]
    if missing:
        raise InputError(f"missing input {', '.join(map(repr, missing))}; a step takes {', '.join(names)}")
    found: dict[str, np.ndarray] = {}
    for n in names:
        if not is_array(given[n]):
            raise InputError(f"input {n!r} is a {type(given[n]).__name__}, not an array")
        found[n] = kept(given[n], on_mesh)
    return found


def kept(array: Any, on_mesh: bool) -> Any:
    """A JAX or CuPy array as it is, so that engines read it where it lies, those of several devices where programs run
    on a mesh; all else as a NumPy array."""
    family = family_of(type(array))
    if family == "cupy":
        return array
    if family == "jax":
        with suppress(Exception):  # a tracer, which to_numpy names
            if not array.is_deleted() and (on_mesh or len(array.devices()) == 1):
                return array
    return to_numpy(array)


class FixedModel:
    """A model with fixed inputs and outputs, whose variables are constants of its graph."""

    def __init__(self, model: Any, select: Select, batch_norm: bool) -> None:
        if not isinstance(model, Graph):
            from xrt_core.frontends.onnx_import import import_model

            model = import_model(model)
        # initializers that are inputs as well, as in files of IR 3, are constants here
        model, shared = untied(bind_defaults(model))
        if shared:
            log.warning(
                "%s: parameters whose elements are all equal are one constant for several layers, as exporters write "
                "those of new layers; each layer learns its own: %s",
                model.name, ", ".join(f"{n} ({count} layers)" for n, count in [*shared.items()][:4]),
            )  # fmt: skip
        self.graph = self.model = cast(Graph, model)
        self.name = model.name
        running = statistics(model) if batch_norm else []
        trained = trainable(model, select, running)
        self._constants = [*trained, *running]
        self.variables = _variables(trained, running)
        self._promoted = promoted(model, trained, running)
        self._inputs = list(model.inputs)
        self.by_value = tuple(model.inputs[i].name for i in shape_inputs(model, static_inputs) if i < len(model.inputs))
        self.output_names: tuple[str, ...] | None = tuple(v.name for v in model.outputs)
        self.own_loss = False
        self.on_mesh = False
        self.is_half = any(v.dtype == np.float16 for v in trained)

    @property
    def input_names(self) -> list[str]:
        """Names of the model's own inputs, in order."""
        return [v.name for v in self._inputs]

    def bind(self, args: Sequence[Any], inputs: Mapping[str, Any], labels: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the arrays of a step by name. Raises InputError for those that do not fit."""
        own = [v.name for v in self._inputs]
        found = bound([*own, *(n for n in labels if n not in own)], args, inputs, self.on_mesh)
        for v in self._inputs:
            t = v.type
            if isinstance(t, TensorType) and t.dtype is not None and found[v.name].dtype != t.dtype:
                raise InputError(f"input {v.name!r}: dtype {found[v.name].dtype} given, {t.dtype} expected")
            if isinstance(t, TensorType) and t.shape is not None:
                shape = found[v.name].shape
                if len(shape) != len(t.shape) or any(
                    isinstance(d, int) and d != n for d, n in zip(t.shape, shape, strict=True)
                ):
                    raise InputError(f"input {v.name!r}: shape {list(shape)} given, {t} expected")
        return found

    def with_unread(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs as they are: a loss beside the model has its own."""
        return inputs

    @property
    def size(self) -> int:
        """The bytes of its variables."""
        return sum(v.value.nbytes for v in self.variables)

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Nothing: its variables are known, and a state is held against them."""

    def forward(self, types: Mapping[str, TensorType]) -> tuple[Graph, list[Variable]]:
        """Return the graph for inputs of these types, with the variables as its last inputs, and the variables."""
        return self._promoted, self.variables

    def filled(self, arrays: Mapping[str, np.ndarray]) -> Graph:
        """Return the model's graph with these arrays as the values of its variables."""
        return _filled(self.graph, self._constants, arrays)

    def exported(self, arrays: Mapping[str, np.ndarray]) -> Graph:
        """The same: its inputs have the types that the model declares."""
        return self.filled(arrays)

    def own(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays of variables in the model's dtypes."""
        return _own(self._constants, arrays)


class WrittenGraph:
    """An `xrt.Graph`, traced once per signature; the arrays in its attributes are the variables."""

    def __init__(self, graph: TracedGraph, select: Select = None) -> None:
        self._graph = self.model = graph
        self.name = type(graph).__name__
        self.select = select
        self.by_value: tuple[str, ...] = ()
        self.output_names: tuple[str, ...] | None = None
        self._names = [n for n, p in parameters_of(graph).items() if p.default is p.empty]
        self._made: tuple[Graph, list[Any], list[Variable]] | None = None
        self.own_loss = False  # whether `build` calls backward(): `forward` then has the loss as its first output
        self.on_mesh = False
        self._types: dict[str, TensorType] = {}  # of what it was made for
        self.is_half = any(p.dtype == np.float16 for p in graph.named_parameters().values())
        self._is_double = any(p.dtype == np.float64 for p in graph.named_parameters().values())
        self._has_warned = False

    @property
    def input_names(self) -> list[str]:
        """Names of the model's own inputs, in order."""
        return list(self._names)

    def bind(self, args: Sequence[Any], inputs: Mapping[str, Any], labels: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the arrays of a step by name, float64 as float32 where no variable is wider. Raises InputError for
        those that do not fit."""
        found = bound([*self._names, *(n for n in labels if n not in self._names)], args, inputs, self.on_mesh)
        wide = [n for n, a in found.items() if a.dtype == np.float64]
        if wide and not self._is_double:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: %s is float64 and is cast to float32, which the variables are of; give it as float32",
                    self.name, wide[0],
                )  # fmt: skip
            found |= {n: found[n].astype(np.float32) for n in wide}
        return found

    def with_unread(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs, with zeros for those left out that no output reads but the loss of `backward`, once that is
        known; of a batch as large as that of the inputs that are given."""
        given = dict(zip(self._names, args, strict=False)) | dict(inputs)
        left = [n for n in self._names if n not in given]
        if not left or self._made is None or not self.own_loss:
            return inputs
        graph = DeadNodes()(self._made[0])
        read = {v.name for n in graph.nodes for v in n.uses()} | {v.name for v in graph.outputs}
        sizes = {t.shape[0] for t in self._types.values() if t.shape}
        now = {a.shape[0] for a in given.values() if is_array(a) and a.shape}
        if read.intersection(left) or len(sizes) != 1 or len(now) != 1:
            return inputs
        (rows,) = now
        types = {n: self._types[n] for n in left}
        shapes = {n: (rows, *t.shape[1:]) if t.shape else () for n, t in types.items()}
        return {**inputs, **{n: np.zeros(shapes[n], t.dtype) for n, t in types.items()}}

    @property
    def size(self) -> int:
        """The most bytes that its variables may have."""
        own = self._graph.named_parameters().values()
        return sum(master(np.empty(0, p.dtype)).itemsize * math.prod(p.shape) for p in own)

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Hold a state against the arrays of the graph, before a step has said which of them are variables.

        Raises CheckpointError for an array that the graph has not, or has in another form.
        """
        own = self._graph.named_parameters()
        for name, array in state.items():
            if name.startswith(("training/", "optimizer/")):
                continue
            if name not in own:
                raise CheckpointError(f"the state does not fit {self.name}: it has no array {name!r}")
            want = master(np.empty(0, own[name].dtype)).dtype
            if own[name].shape != array.shape or array.dtype not in (want, own[name].dtype):
                raise CheckpointError(
                    f"the state's {name!r} is {dtype_name(array.dtype)}{list(array.shape)}, {self.name}'s is "
                    f"{dtype_name(want)}{list(own[name].shape)}"
                )
        if not any(n in own for n in state):
            raise CheckpointError(f"the state holds none of the arrays of {self.name}; it was saved before any step")

    def forward(self, types: Mapping[str, TensorType]) -> tuple[Graph, list[Variable]]:
        """Return the graph for inputs of these types, with the variables as its last inputs, and the variables."""
        recorded = self._trace(types)
        traced = recorded.graph
        running = statistics(traced)
        kept = self._graph.named_parameters()
        own = {n for n, p in kept.items() if not isinstance(p, Variable) or p.trained}
        select = self.select if self.select is not None else (lambda name, array: name in own)
        trained = trainable(traced, select, running)
        constants = [*trained, *running]
        if self._made is None:
            self._types = dict(types)
            self._made = traced, constants, _variables(trained, running)
            used = {v.name for v in all_constants(traced)}
            for name in sorted(n for n in own - used if is_float(kept[n].dtype)):
                log.warning(
                    "%s.%s is not trained: `build` reads it through NumPy (a slice, .T, arithmetic of arrays alone), "
                    "or not at all; keep it as an xrt.Variable, whose operations are traced", self.name, name
                )  # fmt: skip
        elif [v.name for v in constants] != [v.name for v in self._made[2]]:
            raise XRTError(
                f"{self.name}.build uses other arrays for this signature than for the first; the variables of a "
                "training must not depend on shapes"
            )
        whole = promoted(traced, trained, running)
        self.own_loss = recorded.loss is not None
        if recorded.loss is not None:  # loss=None means the first output; `filled` has the outputs of `build`
            whole = whole.replace(outputs=(recorded.loss, *whole.outputs))
        return whole, self._made[2]

    def filled(self, arrays: Mapping[str, np.ndarray]) -> Graph:
        """Return the model's graph with these arrays as the values of its variables."""
        if self._made is None:
            raise InputError(f"{self.name} has not been traced yet: take a step first")
        graph, constants, _ = self._made
        return _filled(graph, constants, arrays)

    def exported(self, arrays: Mapping[str, np.ndarray]) -> Graph:
        """`filled`, without what only a loss reads, and for batches of any size where the graph depends on none."""
        graph = self.filled(arrays)
        assert self._made is not None
        sizes = {t.shape[0] for t in self._types.values() if t.shape}
        if len(sizes) == 1 and isinstance(size := sizes.pop(), int):
            larger = {
                n: TensorType(t.dtype, (size + 1, *t.shape[1:])) if t.shape else t for n, t in self._types.items()
            }
            with suppress(Exception):  # `build` may be made for one size
                other = self._trace(larger).graph
                opened = open_batch(self._made[0], other, (size, size + 1), {v.name for v in self._made[1]})
                graph = graph if opened is None else _filled(opened, self._made[1], arrays)
        graph = DeadNodes()(graph)
        used = {v for n in graph.nodes for v in n.uses()} | set(graph.outputs)
        return graph.replace(inputs=[v for v in graph.inputs if v in used])

    def _trace(self, types: Mapping[str, TensorType]) -> Traced:
        return trace_call(self._graph, list(types.values()), layout_of(len(types)), list(types))

    def own(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All arrays of the graph, those of variables with these values, in the model's dtypes."""
        own = {n: np.array(p) for n, p in self._graph.named_parameters().items()}
        return {n: np.asarray(arrays.get(n, a)).astype(a.dtype, copy=False) for n, a in own.items()}


def _variables(trained: Sequence[Value], running: Sequence[Value]) -> list[Variable]:
    return [
        *(Variable(master(np.asarray(v.data)), True, v.name) for v in trained),
        *(Variable(np.asarray(v.data), False, v.name) for v in running),
    ]


def _own(constants: Sequence[Value], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {v.name: arrays[v.name].astype(v.dtype, copy=False) for v in constants if v.name in arrays}


def _filled(graph: Graph, constants: Sequence[Value], arrays: Mapping[str, np.ndarray]) -> Graph:
    own = _own(constants, arrays)
    return replaced(graph, {v: Value.constant(own[v.name], v.name) for v in constants})
