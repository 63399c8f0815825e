"""What a module calls: an imported graph of fixed inputs, or a graph that is traced for each signature.

Each has `CompiledGraph`s: the callable that compiles one IR graph per signature and runs it on arrays.
"""

from __future__ import annotations

import os
import pathlib
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Final

import numpy as np

from xrt_core.cache.lru import LRU
from xrt_core.cache.model_file import is_model_file
from xrt_core.compiler.buckets import Bucket, Buckets, Found
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.stages import Optimised, Partitioned, Planned
from xrt_core.compiler.tiering import BaselinePlan
from xrt_core.errors import InputError, ModelLoadError, describe, nearest
from xrt_core.explanation import Explanation
from xrt_core.frontends.estimators import is_estimator, onnx_of
from xrt_core.host.blas_threads import fewer_on_busy_machine
from xrt_core.ir.graph import Graph, Value, bind_defaults, every_node
from xrt_core.ir.operator_libraries import open_libraries
from xrt_core.ir.schema import domain_versions, undefined_operator
from xrt_core.ir.symbols import SymbolicSignature
from xrt_core.ir.types import STRING, MapType, OptionalType, SequenceType, TensorType, ValueType, dtype_name
from xrt_core.options import Options
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.quantization import calibration
from xrt_core.runtime.arrays import from_numpy, is_array, plain_arrays, texts_of, to_numpy
from xrt_core.runtime.binding import DeviceCall, bind, family_of_first
from xrt_core.runtime.into import put, wanted_of
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.plan_cache import Bound, BoundCall, CacheEntry, PlanCache, SymbolicEntry
from xrt_core.runtime.recording import Timeline
from xrt_core.runtime.varying import declared_shapes

OFTEN: Final = 30.0
"""Seconds of calls of one shape by a symbolic plan after which an exact plan is tried: what its build and its
verification take, a few times over."""

Shapes = Mapping[str, Sequence[Any]]
"""Input -> its dimensions, as the user declares them (`runtime.varying.declared_shapes`)."""


class CompiledGraph:
    """Runs a graph on one array per input (None for an omitted optional input).

    The first call of a signature checks the arguments and compiles. Later calls look up the bound call by the types,
    shapes and dtypes of the arguments (and the values of those that determine shapes).

    shapes: what the user declares of the inputs' shapes. padded: it has no buckets of its own. compared: its first
    calls are compared with the graph as it is given, if those of the pipeline are.
    """

    def __init__(
        self,
        graph: Graph,
        pipeline: Pipeline,
        shapes: Shapes | None = None,
        *,
        padded: bool = False,
        compared: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.names = tuple(v.name or f"input_{i}" for i, v in enumerate(graph.inputs))
        types = [v.type for v in graph.inputs]
        self.declared = None if shapes is None else declared_shapes(self.names, types, shapes)
        self.captured = pipeline.capture(graph)
        if compared and pipeline.compares_first_calls:
            self.captured = replace(self.captured, given=graph)
        self.graph: Graph = self.captured.graph  # not the given one, so that its constant-folded weights can be freed
        self.plans: PlanCache = pipeline.plan_cache(self.captured, declared=self.declared)
        self._calls, self._clock = self.plans.calls, self.plans.clock
        self._last: CacheEntry | None = None
        self._recent: tuple[tuple[Any, ...], Bound | None] = ((), None)  # the last bound call, with its key
        self._by_value = bool(self.plans.by_value)
        self._texts = [
            i for i, v in enumerate(self.graph.inputs) if isinstance(v.type, TensorType) and v.type.dtype == STRING
        ]
        self._buckets: Buckets | None = None
        self._last_found: Found | None = None  # of the last new signature, by the buckets
        if pipeline.options.buckets != "off" and not padded and not self._by_value:
            guard = GuardSettings.of(pipeline.options)
            reference = self.on_host if guard is not None and guard.verify else None
            self._buckets = Buckets(
                self.graph,
                pipeline.options.buckets,
                self._padded_graph,
                pipeline.services.events,
                reference,
                self.declared,
                not pipeline.options.forbid_compilation,
                pipeline.begin,
                self._drop_unbuilt,
                self._drop_unplanned,
                lambda made: pipeline.fits_in_memory(p for g in made for p in g.plans.plans()),
            )

    @property
    def is_live(self) -> bool:
        """Whether an engine runs a cluster of the last new signature, and no executable is still to come."""
        launches = self._launches
        return any(x.executable is not None for x in launches) and not any(x.is_pending for x in launches)

    @property
    def is_pending(self) -> bool:
        """Whether executables of the last new signature are being built."""
        return any(x.is_pending for x in self._launches)

    @property
    def runs_beside_itself(self) -> bool:
        """Whether two calls at once take less time than one after the other."""
        return self.pipeline.has_processors_to_share

    @property
    def _launches(self) -> Sequence[Launch]:
        plan = self.final
        return () if plan is None else plan.launches

    def build(self, arrays: Sequence[Any]) -> None:
        """Plan for engines for the signature of these arguments, and begin what is built beside the host."""
        self.prepare(arrays, at_once=True)
        if self.final is not None:
            self.pipeline.begin_builds(self.final, arrays)

    def retry(self) -> None:
        """Build executables of the last new signature again that failed, where another attempt is due."""
        for launch in self._launches:
            launch.retry()

    @property
    def final(self) -> Planned | None:
        """The plan with engines of the last new signature; None before the first, and until it was made."""
        plan = self.last
        return plan.final if isinstance(plan, BaselinePlan) else plan

    @property
    def last(self) -> Planned | None:
        """The plan of the last new signature; None before the first."""
        plan = None if self._last is None else self._last.plan
        assert plan is None or isinstance(plan, Planned)
        return plan

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the results, as arrays of the first array's library. Raises InputError for unsuitable arguments."""
        if self._texts:
            arrays = self._with_texts(arrays)
        key: Hashable = None
        parts, found = self._recent
        try:
            if found is not None and found.is_bound:  # a third of what it takes to make the key and look it up
                for i, a in enumerate(arrays):
                    kind, shape, dtype = parts[i]
                    if type(a) is not kind or a.shape != shape or a.dtype is not dtype:
                        found = None
                        break
            else:
                found = None
            if found is None:
                parts = key = tuple([(type(a), a.shape, a.dtype) for a in arrays])
                if self._by_value:
                    key = key, self.plans.values(arrays)
                found = self._calls.get(key)
                if found is not None and not self._by_value:
                    self._recent = parts, found
        except Exception:  # an omitted input, a sequence, or not an array that can be read
            key = found = None
        if found is None:
            return self._unbound(arrays, key)
        found.entry.used = self._clock()
        return found.call(arrays)

    def _unbound(self, arrays: Sequence[Any], key: Hashable) -> list[Any]:
        """Slow path: a signature that is not bound yet, or that types and shapes alone do not identify."""
        plain, back = plain_arrays(arrays)
        if plain is not arrays:  # arrays of registered user types are converted at every call, then looked up
            results = self(plain)
            return results if back is None else back(results)
        if key is None:
            key = self.key(arrays)
            found = None if key is None else self._calls.get(key)
            if found is not None:
                found.entry.used = self._clock()
                return found.call(arrays)
        return self.prepare(arrays, key)(arrays)

    def run_into(self, arrays: Sequence[Any], names: Sequence[str], results: Mapping[str, Any]) -> list[Any]:
        """As a call, with the results of some names in the arrays that are given for them, which are returned.

        Raises InputError for arrays that are no outputs', or do not fit them.
        """
        wanted = wanted_of(results, names)
        plain, back = plain_arrays(self._with_texts(arrays))
        key = self.key(plain)
        found = None if key is None else self._calls.get(key)
        if found is None:
            call = self.prepare(plain, key)
        else:
            call = found.call
            found.entry.used = self._clock()
        made = call(plain, wanted) if isinstance(call, DeviceCall) else call(plain)
        filled = [r if x is None else put(r, x, n) for r, x, n in zip(made, wanted, names, strict=True)]
        if back is None:
            return filled
        return [x if x is not None else r for r, x in zip(back(filled), wanted, strict=True)]

    def run_as_is(self, arrays: Sequence[Any]) -> list[Any]:
        """As a call, with results as their engines made them, in arrays of whatever library: for what is given to a
        later call, which then converts nothing. Without buckets."""
        parts = self.key(arrays)
        key = None if parts is None else ("as is", parts)
        found = self._calls.get(key)
        if found is None:
            self._last, self._last_found = self.plans.entry_for(self.checked(arrays)), None
            plan = self._last.plan
            assert isinstance(plan, Planned)
            found = Bound(bind(plan, arrays, plan.engines, *plan.host, as_is=True), self._last)
            if key is not None:
                self.plans.bind(key, found.call, plan, self._last)
        found.entry.used = self._clock()
        return found.call(arrays)

    def repeated(self) -> BoundCall:
        """`run_as_is` as a function of arrays whose shapes and dtypes are the same in all calls: only their types are
        looked at in each."""
        types: list[type] = []
        key: Hashable = None

        def run(arrays: Sequence[Any]) -> list[Any]:
            nonlocal types, key
            now = [*map(type, arrays)]
            found = self._calls.get(key) if now == types else None
            if found is None:  # the first call, one of other types, or its plan was replaced
                types, key = now, ("as is", self.key(arrays))
                return self.run_as_is(arrays)
            found.entry.used = self._clock()
            return found.call(arrays)

        return run

    def _with_texts(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arguments, those for tensors of strings as `texts_of` gives them."""
        if not self._texts:
            return arrays
        found = list(arrays)
        for i in self._texts:
            try:
                found[i] = texts_of(found[i])
            except InputError as e:
                raise InputError(f"input {self.names[i]!r}: {e}") from e.__cause__
        return found

    def bound(self, arrays: Sequence[Any], names: Sequence[str], results: Mapping[str, Any]) -> Callable[[], list[Any]]:
        """`run_into` as a function of no arguments: what these arrays are is looked at here, and their shapes only at
        each call. The signature is prepared, where it can be told by types, shapes and values.

        Raises InputError as a call does, and as `run_into` does for results.
        """
        wanted_of(results, names)
        plain, back = plain_arrays(arrays)
        parts = None if back is not None or plain is not arrays else self.key(arrays)
        if parts is None:
            self.checked(arrays)
            return lambda: self.run_into(arrays, names, results)
        wanted = [results.get(n) for n in names] if results else []
        self.prepare(arrays, parts)
        there = [(n, a, a.shape) for n, a in zip(self.names, arrays, strict=True) if a is not None]
        clock, by_value = self._clock, self._by_value
        found: Bound | None = None

        def run() -> list[Any]:
            nonlocal found
            for name, a, shape in there:
                if a.shape != shape:
                    raise InputError(f"input {name!r}: shape {list(a.shape)}, it was bound with {list(shape)}")
            if found is None or by_value or not found.is_bound:
                key = (parts[0], self.plans.values(arrays)) if by_value else parts
                found = self._calls.get(key)
            now = found
            if now is None:  # its plan was replaced or dropped
                call = self.prepare(arrays, key)
            else:
                call = now.call
                now.entry.used = clock()
            if not wanted:
                return call(arrays)
            made = call(arrays, wanted) if isinstance(call, DeviceCall) else call(arrays)
            return [r if x is None else put(r, x, n) for r, x, n in zip(made, wanted, names, strict=True)]

        return run

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
        checked = self.checked(arrays)
        generation = 0 if self._buckets is None else self._buckets.generation  # one may become ready from here on
        if self._buckets is not None and self.pipeline.symbolic_after is None:  # else no padding is needed
            self._last_found = found = self._buckets.find(checked, at_once)
            if found is not None and found.bucket is None:
                return self._host_call(found.sizes, arrays, checked)
            if found is not None and found.bucket is not None:
                return self._padded_call(found.bucket, found.sizes, generation, arrays, key)
        entry = self.plans.entry_for(checked)
        plan = entry.plan
        assert isinstance(plan, Planned)
        if at_once and isinstance(plan, BaselinePlan):
            plan = plan.finish(checked)
        self._last = entry
        call = bind(plan, arrays, plan.engines, *plan.host)
        often = isinstance(entry, SymbolicEntry) and not isinstance(plan, BaselinePlan)
        if often and self.pipeline.may_place_beside and not isinstance(call, DeviceCall):
            call = self._watched(call)
        key = self.key(arrays) if key is None else key
        if key is not None:
            self.plans.bind(key, call, plan, entry)
        return call

    def _watched(self, call: BoundCall) -> BoundCall:
        """A call by a symbolic plan that asks for an exact one beside it once it has taken `OFTEN` seconds in all."""
        clock, spent = time.perf_counter, 0.0

        def watched(arrays: Sequence[Any]) -> list[Any]:
            nonlocal spent
            start = clock()
            results = call(arrays)
            if spent < OFTEN:
                spent += clock() - start
                if spent >= OFTEN:
                    self.pipeline.place_beside(self.plans, self.captured, self.checked(arrays))
            return results

        return watched

    def _host_call(self, sizes: Mapping[str, int], arrays: Sequence[Any], checked: Sequence[Any]) -> BoundCall:
        """The call by the host's plan for all sizes, which is not kept: the next one may have a bucket."""
        self._last = self.plans.host_entry(checked)
        plan = self._last.plan
        assert isinstance(plan, Planned)
        call, buckets = bind(plan, arrays, plan.engines, *plan.host), self._buckets
        assert buckets is not None

        def beside_builds(arrays: Sequence[Any]) -> list[Any]:
            start = time.perf_counter()
            with fewer_on_busy_machine():
                results = call(arrays)
            buckets.took_host(sizes, time.perf_counter() - start)
            return results

        return beside_builds

    def _padded_call(
        self, bucket: Bucket, sizes: Mapping[str, int], generation: int, arrays: Sequence[Any], key: Hashable
    ) -> BoundCall:
        """The call that pads arguments like these to a bucket and cuts the results. generation: of the buckets when
        this one was found."""
        buckets = self._buckets
        assert buckets is not None
        out = from_numpy(family_of_first(arrays) or "numpy")

        def call(arrays: Sequence[Any]) -> list[Any]:
            if buckets.generation != generation or buckets.wants_another(bucket, sizes):
                return self.prepare(arrays)(arrays)
            return [out(r) for r in buckets.run(bucket, sizes, [to_numpy(a) for a in arrays])]

        self._last = bucket.inner._last
        key = self.key(arrays) if key is None else key
        if key is not None and self._last is not None:
            self.plans.keep(key, call, self._last)
            old = buckets.keep(key)
            if old is not None:
                self.plans.let_go(old)
        return call

    def _padded_graph(self, graph: Graph) -> CompiledGraph:
        """What compiles the padded form of the graph for a bucket."""
        made, buckets = CompiledGraph(graph, self.pipeline, padded=True), self._buckets
        assert buckets is not None
        of_bucket, of_graph = weakref.ref(made), weakref.ref(buckets)

        def on_live() -> None:
            inner, buckets = of_bucket(), of_graph()
            if inner is not None and buckets is not None:
                buckets.became_live(inner)

        made.plans.on_live = on_live
        return made

    def _drop_unbuilt(self) -> None:
        """Cancel the builds of signatures that a bucket serves."""
        buckets = self._buckets
        assert buckets is not None
        self.plans.drop_unbuilt(lambda parts, _: buckets.covers(parts), "a bucket took its place")

    def _drop_unplanned(self) -> None:
        """Begin no builds of signatures that the bucket which is being made will serve: they would delay it."""
        buckets = self._buckets
        assert buckets is not None
        self.plans.drop_unbuilt(lambda parts, _: buckets.will_cover(parts), "a bucket is being made", begun=False)

    def forget(self, reason: str) -> None:
        """Let all plans and their executables go."""
        self._last, self._recent = None, ((), None)
        self.plans.clear(reason)

    def on_host(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Return the results of the graph as it is on the host alone, without keeping a plan."""
        types, known = self.plans.signature(arrays)
        optimised = self.pipeline.optimise(self.captured, types, known, engines=False)
        return self.pipeline.plan(self.pipeline.partition(optimised)).run(arrays)

    def begin(self, arrays: Sequence[Any]) -> None:
        """Start compiling for the signature of these arguments in the background; nothing is run in this thread."""
        checked = self.checked(arrays)
        entry = self.plans.entry_for(checked)
        self._last, self._last_found = entry, None
        if isinstance(entry.plan, BaselinePlan):
            entry.plan.begin(checked)

    def live(self, arrays: Sequence[Any]) -> LiveCall | None:
        """Return what answers arguments like these on engines now; None where the host would, or a compilation is due.
        Nothing is compiled or run. Raises InputError for unsuitable arguments."""
        arrays, back = plain_arrays(arrays)
        plan = self.plans.known_plan(self.checked(arrays))
        if back is not None or not isinstance(plan, Planned) or isinstance(plan, BaselinePlan):
            return None
        launches = tuple(x for x in plan.launches if x.executable is not None)
        if not launches:
            return None
        by_value = tuple(self.names[i] for i in self.plans.by_value)
        plan.pinned = True
        return LiveCall(self.names, bind(plan, arrays, plan.engines, *plan.host), launches, by_value, plan)

    def is_prepared(self, arrays: Sequence[Any]) -> bool:
        """Whether what answers arguments like these is there, and nothing is to be compiled for them. Raises InputError
        for unsuitable arguments."""
        checked = self.checked(arrays)
        if self._buckets is not None and self.pipeline.symbolic_after is None:
            parts = [(a.dtype, a.shape) if isinstance(a, np.ndarray) else type(a) for a in checked]
            if self._buckets.covers(parts):
                return True
        plan = self.plans.known_plan(checked)
        return plan is not None and not isinstance(plan, BaselinePlan) and not plan.is_unbuilt

    def finish(self) -> None:
        """Complete the tier-up of every signature that still runs its baseline plan."""
        if self._buckets is not None:
            self._buckets.finish()
            for bucket in self._buckets.buckets:
                bucket.inner.finish()
        for plan in self.plans.plans():
            if isinstance(plan, BaselinePlan):
                plan.finish()

    def key(self, arrays: Sequence[Any]) -> Any:
        """Return the cache key of arguments some of which are omitted; None if one is a sequence: those are checked at
        every call."""
        if not all(a is None or is_array(a) for a in arrays):
            return None
        key = tuple([None if a is None else (type(a), a.shape, a.dtype) for a in arrays])
        return (key, self.plans.values(arrays)) if self._by_value else key

    def checked(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments as NumPy arrays. Raises InputError for one that does not fit its input."""
        host: list[Any] = []
        arrays, _ = plain_arrays(self._with_texts(arrays))
        for i, (a, v) in enumerate(zip(arrays, self.graph.inputs, strict=True)):
            if isinstance(v.type, TensorType) and issubclass(type(a), _CONTAINERS):
                raise InputError(
                    f"input {self.names[i]!r} takes a tensor {v.type}, not a {type(a).__name__}; give an array"
                )
            try:
                host.append(to_numpy(a))
            except InputError as e:
                raise InputError(f"input {self.names[i]!r}: {e}") from e.__cause__
            except Exception as e:  # what reading an object of the caller's raises
                raise InputError(
                    f"input {self.names[i]!r}: this {type(a).__name__} cannot be read as an array: {describe(e)}"
                ) from e
            _check(self.names[i], v.type, host[i])
        if self.declared is not None:
            self.declared.bind([a.shape if isinstance(a, np.ndarray) else None for a in host])
        return host

    @property
    def buckets(self) -> Buckets | None:
        """Its buckets; None where calls are not padded."""
        return self._buckets

    def prepare_symbolic(self, arrays: Sequence[Any], signature: SymbolicSignature) -> None:
        """Plan for a symbolic signature, to which these arguments belong. Raises InputError for unsuitable ones."""
        arrays, _ = plain_arrays(arrays)
        entry = self.plans.symbolic_entry(self.checked(arrays), signature)
        if entry is not None:
            self._last = entry

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

    def optimise(self, arrays: Sequence[Any]) -> Optimised:
        """Return the optimised graph for the signature of these arguments, without compiling."""
        types, known = self.plans.signature(self.checked(arrays))
        pipeline = self.pipeline.accelerated
        return pipeline.optimise(pipeline.adopt(self.captured), types, known)

    def partition(self, arrays: Sequence[Any]) -> Partitioned:
        """Return the partitioned graph for the signature of these arguments, without compiling."""
        return self.pipeline.accelerated.partition(self.optimise(arrays))

    def explain(self, arrays: Sequence[Any] | None) -> Explanation:
        """Return the decisions for the signature of these arguments; None: the last new one, or the declared types."""
        if arrays is None and self.last is not None:
            found = self._answering
            if found is not None and found.bucket is not None:
                return self._with_padding(found.bucket.inner.explain(None), found)
            return self._with_padding(_final(self.last).explain(), found)
        if arrays is None:
            arrays = self.example()
        checked = self.checked(arrays)
        plan = self.plans.known_plan(checked)
        found = self._buckets.known(checked) if self._buckets is not None and plan is None else None
        if found is not None and found.bucket is not None:
            inner = found.bucket.inner.explain(found.bucket.arguments(checked, found.sizes))
            return self._with_padding(inner, found)
        explanation = _final(plan).explain() if isinstance(plan, Planned) else self.partition(arrays).explain()
        return self._with_padding(explanation, None)

    @property
    def _answering(self) -> Found | None:
        """What answers calls of the last new signature, if that is a matter of buckets."""
        found = self._last_found
        if found is None or found.bucket is not None or self._buckets is None:
            return found
        return self._buckets.known_for(found.sizes) or found

    def explained(self) -> Explanation | None:
        """Return the decisions for the last new signature; None before the first, and where the plan with engines is
        still being made. Nothing is compiled."""
        found = self._answering
        if found is not None:
            return None if found.bucket is None else found.bucket.inner.explained()
        plan = self.final
        return None if plan is None else plan.explain()

    def _with_padding(self, explanation: Explanation, found: Found | None) -> Explanation:
        """The explanation with what was decided about buckets, where there are any. found: what answers the calls."""
        return explanation if self._buckets is None else replace(explanation, padding=self._buckets.text(found))


@dataclass(frozen=True, slots=True)
class LiveCall:
    """A call that engines answer, for arguments of one signature (types, shapes, dtypes, and values of some inputs).

    names: of its inputs, in order. run: arrays -> results. launches: the clusters that are on engines. by_value: the
    inputs whose values are a part of the signature. plan: what it runs; calls of several sizes may share one.
    """

    names: tuple[str, ...]
    run: BoundCall
    launches: tuple[Launch, ...]
    by_value: tuple[str, ...]
    plan: Planned

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines of the clusters, each once."""
        return tuple(dict.fromkeys(getattr(getattr(x, "record", None), "chosen", x.engine) for x in self.launches))


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
                f"convert it with .astype({'str' if declared.dtype == STRING else repr(dtype_name(declared.dtype))})"
            )
        shape = declared.shape
        if shape is not None:
            fits = len(shape) == a.ndim and all(
                not isinstance(d, int) or d == n for d, n in zip(shape, a.shape, strict=True)
            )
            if not fits:
                raise InputError(f"input {name!r}: shape {list(a.shape)} given, {declared} expected")
    elif isinstance(declared, MapType):
        if not isinstance(a, dict):
            raise InputError(f"input {name!r} takes a dict ({declared}), not a {type(a).__name__}")
        key = str if declared.key == STRING else int
        wrong = next((k for k in a if not isinstance(k, key) and not (key is int and isinstance(k, np.integer))), None)
        if wrong is not None:
            raise InputError(f"input {name!r} takes a dict ({declared}); {wrong!r} is no {key.__name__}")
    elif isinstance(declared, SequenceType):
        if not isinstance(a, list):
            raise InputError(f"input {name!r} takes a list of arrays ({declared}), not a {type(a).__name__}")
        for i, e in enumerate(a):
            _check(f"{name}[{i}]", declared.element, e)


class ImportedModel:
    """A model with fixed inputs and outputs: an ONNX model or an IR graph.

    An omitted input that has a default becomes a constant: each set of given optional inputs has a CompiledGraph.
    caller: the CompiledGraph used last; initially the one for no optional input, `plain`. shapes: what the user
    declares of the inputs' shapes. compared: see `CompiledGraph`. Raises InputError where the shapes do not fit.
    """

    def __init__(
        self, graph: Graph, pipeline: Pipeline, shapes: Shapes | None = None, *, compared: bool = False
    ) -> None:
        if shapes is not None:
            declared_shapes([v.name for v in graph.inputs], [v.type for v in graph.inputs], shapes)
            unknown = sorted(set(shapes) - {v.name for v in graph.inputs})
            if unknown:
                hint = nearest(unknown[0], [v.name for v in graph.inputs])
                raise InputError(
                    f"shapes: unknown input {unknown[0]!r}; the model takes {input_list(graph.inputs)}{hint}"
                )
        self.shapes = shapes
        self.output_names = tuple(v.name or f"output_{i}" for i, v in enumerate(graph.outputs))
        self._compiled = partial(CompiledGraph, pipeline=pipeline, shapes=shapes, compared=compared)
        self.caller = self.plain = self._compiled(bind_defaults(graph))
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
        self._pick = _picker(self._required)

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
            caller = self.caller = self.plain
        results = caller(args)
        return results[0] if self._single else tuple(results)

    def run(self, inputs: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        caller, arrays = self.bind((), inputs)
        names = self.output_names
        made = caller.run_into(arrays, names, results) if results else caller(arrays)
        return {names[0]: made[0]} if self._single else dict(zip(names, made, strict=True))

    def run_as_is(self, inputs: Mapping[str, Any]) -> list[Any]:
        """See `CompiledGraph.run_as_is`."""
        caller, arrays = self.bind((), inputs)
        return caller.run_as_is(arrays)

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[CompiledGraph, Sequence[Any]]:
        """Return the CompiledGraph for the given inputs, and one argument per input of it (None: omitted)."""
        if not args and type(named) is dict and len(named) == len(self._required):
            try:  # a model may list every weight as an optional input
                taken: Sequence[Any] | None = self._pick(named)
            except KeyError:
                taken = None
            if taken is not None:
                self.caller = self.plain
                return self.plain, taken
        count = len(self._inputs)
        if len(args) > count:
            raise InputError(f"{len(args)} inputs given, the model takes {count}: {input_list(self._inputs)}")
        arrays: list[Any] = [*args, *[_MISSING] * (count - len(args))]
        for name, array in named.items():
            i = self._index.get(name)
            if i is None:
                hint = nearest(name, self._names)
                raise InputError(f"unknown input {name!r}; the model takes {input_list(self._inputs)}{hint}")
            if arrays[i] is not _MISSING:
                raise InputError(f"input {name!r} is given twice, by position and by name")
            arrays[i] = array
        missing = [
            self._names[i]
            for i, (v, a) in enumerate(zip(self._inputs, arrays, strict=True))
            if a is _MISSING and i not in self._defaults and not isinstance(v.type, OptionalType)
        ]
        if missing:
            raise InputError(
                f"missing input {', '.join(map(repr, missing))}; the model takes {input_list(self._inputs)}"
            )
        given = frozenset(i for i in self._defaults if arrays[i] is not _MISSING and arrays[i] is not None)
        self.caller = caller = self._caller(given)
        taken = [a for i, a in enumerate(arrays) if i not in self._defaults or i in given]
        return caller, [None if a is _MISSING else a for a in taken]

    def bound(
        self, inputs: Mapping[str, Any], results: Mapping[str, Any]
    ) -> tuple[Sequence[str], Callable[[], Sequence[Any]]]:
        """The names of the results, and `run` on these arrays as a function of no arguments."""
        caller, arrays = self.bind((), inputs)
        return self.output_names, caller.bound(arrays, self.output_names, results)

    def saved(self) -> tuple[Graph, list[CompiledGraph]]:
        """Return the contents of a model file: the graph, and the CompiledGraphs that hold its signatures."""
        return self._graph, [self.plain, *self._callers.values()]

    def _caller(self, given: frozenset[int]) -> CompiledGraph:
        if not given:
            return self.plain
        return self._callers.get_or_make(
            given, lambda: self._compiled(bind_defaults(self._graph, given))
        )


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """The function that takes the values of these names out of a dict, in C where there are several. It raises
    KeyError."""
    if len(names) > 1:
        return itemgetter(*names)
    if names:
        (name,) = names
        return lambda named: (named[name],)
    return lambda named: ()


_MISSING: Any = object()
_SHOWN = 12  # inputs named in a message


def is_traced(model: Any) -> bool:
    """Whether a model is an `xrt.Graph` or a function of traced tensors."""
    if isinstance(model, str | bytes | os.PathLike):  # loading a file must not import the tracer
        return False
    from xrt_core.frontends.graph import Graph as TracedGraph

    return isinstance(model, TracedGraph) or (
        callable(model) and not isinstance(model, type) and hasattr(model, "__code__") and not is_array(model)
    )


def read_model(model: Any, example: Any = None) -> Graph:
    """Return the graph of a model that is not traced. Raises ModelLoadError.

    example: of the input of an estimator, or of a model that a plugin's frontend imports. Raises InputError where it is
    given for a model that says itself what it takes.
    """
    if is_estimator(model):
        model, example = onnx_of(model, example), None
    if isinstance(model, Graph):
        if example is not None:
            raise InputError("example is for models that do not say what they take; a Graph does")
        return model
    from xrt_core.frontends.onnx_import import import_model

    if isinstance(model, str | os.PathLike) and is_model_file(pathlib.Path(model)):
        raise ModelLoadError(f"{os.fspath(model)!r} is a saved module: XRTModule.load({os.fspath(model)!r}) opens it")
    return import_model(model, example=example)


def settle_operators(graph: Graph, options: Options) -> None:
    """Make known the operators of a model that the libraries of the option `custom_op_libraries` have.

    With `strict`, raise ModelLoadError, which names them all, where nobody defines the operators of a model. Raises
    what `open_libraries` does.
    """
    if options.custom_op_libraries:
        known = domain_versions()
        foreign = {(n.domain, n.op_type) for n in every_node(graph) if n.domain not in known}
        open_libraries(options.custom_op_libraries, foreign)
    if options.strict:
        found = {
            (n.domain, n.op_type): f"node {n.name!r}: {why}"
            for n in every_node(graph)
            if (why := undefined_operator(n))
        }
        if found:
            raise ModelLoadError("; ".join(found.values()))


def quantised(graph: Graph, pipeline: Pipeline) -> Graph:
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


def input_list(inputs: Sequence[Value]) -> str:
    """The inputs with their types, for messages; of many the first."""
    shown = [f"{v.name or f'input_{i}'} ({v.type or '?'})" for i, v in enumerate(inputs[:_SHOWN])]
    more = [f"... {len(inputs)} in all"] if len(inputs) > _SHOWN else []
    return ", ".join(shown + more) or "no inputs"
