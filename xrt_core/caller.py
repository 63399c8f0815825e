"""GraphCaller: one IR graph behind a call with arrays, its plans per signature and its conversions per array family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.cache.memory import LRU
from xrt_core.errors import InputError
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import SequenceType, TensorType, dtype_name
from xrt_core.pipeline import Partitioned, Pipeline, Planned
from xrt_core.runtime.arrays import family_of, from_numpy, is_array, to_numpy
from xrt_core.runtime.plan import HOST
from xrt_core.runtime.runner import Runner

Call = Callable[[Sequence[Any]], list[Any]]


class GraphCaller:
    """Calls a graph with one array per input (None for one left out that has a default).

    The first call of a signature checks the arguments, specialises, partitions and compiles; later ones look up the
    bound call by the types, shapes and dtypes of the arguments and run it.
    """

    def __init__(self, graph: Graph, pipeline: Pipeline) -> None:
        self.graph = graph
        self.pipeline = pipeline
        self.defaults = {i: graph.defaults[v] for i, v in enumerate(graph.inputs) if v in graph.defaults}
        self.runner: Runner = pipeline.runner(graph)
        self.last: Planned | None = None
        self._calls: LRU[Call] = LRU(2 * pipeline.options.cache_size)
        self._by_value = bool(self.runner.by_value)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The results, in the family of the first array. Raises InputError for arguments that do not fit."""
        if not self._by_value:
            try:
                call = self._calls.get(tuple([(type(a), a.shape, a.dtype) for a in arrays]))
            except (AttributeError, TypeError):  # a sequence, or something that is no array
                call = None
            if call is not None:
                return call(arrays)
        return self.prepare(arrays)(arrays)

    def prepare(self, arrays: Sequence[Any]) -> Call:
        """The call bound to the signature and the families of these arguments."""
        host = self.checked(arrays)
        plan = self.runner.plan_for(host, self.defaults)
        assert isinstance(plan, Planned)
        self.last = plan
        call = _bound(plan, arrays)
        if not self._by_value and all(is_array(a) for a in arrays):
            self._calls.put(tuple([(type(a), a.shape, a.dtype) for a in arrays]), call)
        return call

    def checked(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments as NumPy arrays. Raises InputError for one that does not fit its input."""
        host = [to_numpy(a) for a in arrays]
        for i, a in enumerate(host):
            if a is not None or i not in self.defaults:
                _check(self.graph.inputs[i], a)
        return host

    def example(self) -> list[Any]:
        """Zeros for every input, None for those with a default. Raises InputError where a shape is not declared."""
        arrays: list[Any] = []
        for i, v in enumerate(self.graph.inputs):
            if i in self.defaults:
                arrays.append(None)
            elif not isinstance(v.type, TensorType) or not v.type.is_static:
                raise InputError(
                    f"input {v.name!r} is declared as {v.type or '?'}: give inputs, so that its shape is known"
                )
            else:
                shape = [d for d in v.type.shape or () if isinstance(d, int)]
                arrays.append(np.zeros(shape, v.type.dtype))
        return arrays

    def partition(self, arrays: Sequence[Any]) -> Partitioned:
        """The partitioned graph for the signature of these arguments; nothing is compiled."""
        types, known = self.runner.signature(self.checked(arrays), self.defaults)
        return self.runner.captured.optimise(types, known).partition()

    def explain(self, arrays: Sequence[Any] | None) -> Explanation:
        """What was decided for these arguments; None: for the last new signature, or the declared types."""
        if arrays is None and self.last is not None:
            return self.last.explain()
        return self.partition(self.example() if arrays is None else arrays).explanation


def _bound(plan: Planned, arrays: Sequence[Any]) -> Call:
    """Bind a plan to the families of its arguments and results; this is the hot path of every later call."""
    run = plan.run
    families = [family_of(type(a)) if is_array(a) else "numpy" for a in arrays]
    family = next((f for f, a in zip(families, arrays, strict=True) if is_array(a)), "numpy")
    convert = [
        i
        for i, (a, f) in enumerate(zip(arrays, families, strict=True))
        if (type(a) is not np.ndarray or to_numpy(a) is not a) and not (f == "jax" and plan.engine_inputs[i] == "xla")
    ]
    out = from_numpy(family)
    if family == "numpy" and not convert and HOST not in plan.spaces:
        asarray = np.asarray
        return lambda arrays: [asarray(r) for r in run(arrays)]

    def call(arrays: Sequence[Any]) -> list[Any]:
        if convert:
            arrays = list(arrays)
            for i in convert:
                arrays[i] = to_numpy(arrays[i])
        return [out(r) for r in run(arrays)]

    return call


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
