"""CompiledGraph: the callable that compiles one IR graph per signature and runs it on arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.stages import Partitioned, Planned
from xrt_core.compiler.tiering import BaselinePlan
from xrt_core.errors import InputError
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import OptionalType, SequenceType, TensorType, ValueType, dtype_name
from xrt_core.runtime.arrays import is_array, to_numpy
from xrt_core.runtime.binding import bind
from xrt_core.runtime.converters import plain_arrays
from xrt_core.runtime.plan_cache import BoundCall, CacheEntry, PlanCache
from xrt_core.runtime.scheduler import Timeline


class CompiledGraph:
    """Runs a graph on one array per input (None for an omitted optional input).

    The first call of a signature checks the arguments and compiles. Later calls look up the bound call by the types,
    shapes and dtypes of the arguments (and the values of those that determine shapes).
    """

    def __init__(self, graph: Graph, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.names = tuple(v.name or f"input_{i}" for i, v in enumerate(graph.inputs))
        self._captured = pipeline.capture(graph)
        self.graph: Graph = self._captured.graph  # not the given one, so that its constant-folded weights can be freed
        self.plans: PlanCache = pipeline.plan_cache(self._captured)
        self._calls, self._clock = self.plans.calls, self.plans.clock
        self._last: CacheEntry | None = None
        self._by_value = bool(self.plans.by_value)

    @property
    def last(self) -> Planned | None:
        """The plan of the last new signature; None before the first."""
        plan = None if self._last is None else self._last.plan
        assert plan is None or isinstance(plan, Planned)
        return plan

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the results, as arrays of the first array's library. Raises InputError for unsuitable arguments."""
        try:
            key: Hashable = tuple([(type(a), a.shape, a.dtype) for a in arrays])
            if self._by_value:
                key = key, self.plans.values(arrays)
            found = self._calls.get(key)
        except (AttributeError, TypeError, InputError):  # an omitted input, a sequence, or not an array
            key = found = None
        if found is None:
            return self._unbound(arrays, key)
        call, entry = found
        entry.used = self._clock()
        return call(arrays)

    def _unbound(self, arrays: Sequence[Any], key: Hashable) -> list[Any]:
        """Slow path: a signature that is not bound yet, or that types and shapes alone do not identify."""
        plain, back = plain_arrays(arrays)
        if plain is not arrays:  # arrays of registered user types are converted at every call, then looked up
            results = self(plain)
            return results if back is None else back(results)
        if key is None:
            key = self._key(arrays)
            found = None if key is None else self._calls.get(key)
            if found is not None:
                found[1].used = self._clock()
                return found[0](arrays)
        return self.prepare(arrays, key)(arrays)

    def timed(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Return the results as NumPy arrays, and the timeline of the steps. Raises InputError as a call does."""
        host = self.checked(arrays)
        results, timeline = self.plans.plan_for(host).run_timed(host)
        return [to_numpy(r) for r in results], timeline

    def prepare(self, arrays: Sequence[Any], key: Hashable = None, at_once: bool = False) -> BoundCall:
        """Return the call bound to the signature and array libraries of these arguments, compiling if necessary.

        at_once: compile for the engines before returning, instead of binding the baseline plan.
        """
        arrays, _ = plain_arrays(arrays)
        entry = self.plans.entry_for(self.checked(arrays))
        plan = entry.plan
        assert isinstance(plan, Planned)
        if at_once:
            plan = _final(plan)
        self._last = entry
        call = bind(plan, arrays, plan.engines, plan.xp)
        key = self._key(arrays) if key is None else key
        if key is not None:
            self.plans.bind(key, call, plan, entry)
        return call

    def finish(self) -> None:
        """Complete the tier-up of every signature that still runs its baseline plan."""
        for plan in self.plans.plans():
            if isinstance(plan, BaselinePlan):
                plan.finish()

    def _key(self, arrays: Sequence[Any]) -> Any:
        """Return the cache key of arguments some of which are omitted; None if one is a sequence: those are checked at
        every call."""
        if not all(a is None or is_array(a) for a in arrays):
            return None
        key = tuple([None if a is None else (type(a), a.shape, a.dtype) for a in arrays])
        return (key, self.plans.values(arrays)) if self._by_value else key

    def checked(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments as NumPy arrays. Raises InputError for one that does not fit its input."""
        host: list[Any] = []
        arrays, _ = plain_arrays(arrays)
        for i, (a, v) in enumerate(zip(arrays, self.graph.inputs, strict=True)):
            if isinstance(v.type, TensorType) and isinstance(a, _CONTAINERS):
                raise InputError(
                    f"input {self.names[i]!r} takes a tensor {v.type}, not a {type(a).__name__}; give an array"
                )
            try:
                host.append(to_numpy(a))
            except InputError as e:
                raise InputError(f"input {self.names[i]!r}: {e}") from e.__cause__
            _check(self.names[i], v.type, host[i])
        return host

    def example(self) -> list[Any]:
        """Return zeros for every input. Raises InputError if a declared shape is not static."""
        arrays: list[Any] = []
        for i, v in enumerate(self.graph.inputs):
            if not isinstance(v.type, TensorType) or not v.type.is_static:
                raise InputError(
                    f"input {self.names[i]!r} is declared as {v.type or '?'}: give inputs, which determine its shape"
                )
            shape = [d for d in v.type.shape or () if isinstance(d, int)]
            arrays.append(np.zeros(shape, v.type.dtype))
        return arrays

    def partition(self, arrays: Sequence[Any]) -> Partitioned:
        """Return the partitioned graph for the signature of these arguments, without compiling."""
        types, known = self.plans.signature(self.checked(arrays))
        pipeline = self.pipeline.accelerated
        return pipeline.partition(pipeline.optimise(pipeline.adopt(self._captured), types, known))

    def explain(self, arrays: Sequence[Any] | None) -> Explanation:
        """Return the decisions for the signature of these arguments; None: the last new one, or the declared types."""
        if arrays is None and self.last is not None:
            return _final(self.last).explain()
        if arrays is None:
            arrays = self.example()
        plan = self.plans.known_plan(self.checked(arrays))
        return _final(plan).explain() if isinstance(plan, Planned) else self.partition(arrays).explain()


_CONTAINERS = (list, tuple, dict, type(None))


def _final(plan: Planned) -> Planned:
    """Return the final plan of a baseline plan, compiled now if necessary; any other plan itself."""
    return plan.finish() if isinstance(plan, BaselinePlan) else plan


def _check(name: str, declared: ValueType | None, a: Any) -> None:
    """Raise InputError if the argument does not fit the declared type of its input."""
    if isinstance(declared, OptionalType):
        if a is not None and declared.element is not None:
            _check(name, declared.element, a)
    elif isinstance(declared, TensorType):
        if not isinstance(a, np.ndarray):
            raise InputError(f"input {name!r} takes a tensor {declared}, not a {type(a).__name__}")
        if declared.dtype is not None and a.dtype != declared.dtype:
            raise InputError(
                f"input {name!r}: dtype {dtype_name(a.dtype)} given, {dtype_name(declared.dtype)} expected; "
                f"convert it with .astype({dtype_name(declared.dtype)!r})"
            )
        shape = declared.shape
        if shape is not None:
            fits = len(shape) == a.ndim and all(
                not isinstance(d, int) or d == n for d, n in zip(shape, a.shape, strict=True)
            )
            if not fits:
                raise InputError(f"input {name!r}: shape {list(a.shape)} given, {declared} expected")
    elif isinstance(declared, SequenceType):
        if not isinstance(a, list):
            raise InputError(f"input {name!r} takes a list of arrays ({declared}), not a {type(a).__name__}")
        for i, e in enumerate(a):
            _check(f"{name}[{i}]", declared.element, e)
