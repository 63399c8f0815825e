"""PlanCache: the plans of one graph by signature, and the calls that are bound to them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.ir.graph import Graph
from xrt_core.ir.types import OptionalType, SequenceType, TensorType, ValueType
from xrt_core.runtime.arrays import Converter, to_numpy
from xrt_core.runtime.plan import HOST, Plan

MAX_VARIANTS = 16
"""How many value sets of shape-determining inputs have plans of their own; others share one that knows no values."""

MakePlan = Callable[[Sequence[ValueType | None], Mapping[int, np.ndarray], bool], Plan]
"""(input types, known input values, whether engines may be used) -> plan."""

BoundCall = Callable[[Sequence[Any]], list[Any]]


class CacheEntry:
    """The plan of one signature. calls: keys under which calls are bound to it, oldest first. used: larger is later."""

    __slots__ = ("calls", "key", "plan", "used")

    def __init__(self, key: Hashable, plan: Plan) -> None:
        self.key = key
        self.plan = plan
        self.calls: dict[Hashable, None] = {}
        self.used = 0


class PlanCache:
    """Plans per signature, bounded: the least recently used goes first, and the calls bound to it with it.

    A body of control flow has one, and so has every graph that is called with arrays (`CompiledGraph`).

    graph: the captured graph.
    calls: key -> bound call and its entry; whoever runs one marks the entry as used: `entry.used = clock()`.
    make: makes a plan; a signature is planned once, also where many threads ask for it at the same time.
    by_value: indices of inputs that belong to the signature by value (shape-determining ones); inputs that turn out
        larger than `max_by_value` elements do not.
    max_signatures: how many plans are kept, and how many bound calls of each.
    engine_signatures: after N different signatures, all new ones share plans for the host that know ranks, but no
        shapes and no values (None: never): what changes at every call is not worth compiling, or planning.
    """

    def __init__(
        self,
        graph: Graph,
        make: MakePlan,
        *,
        by_value: Collection[int] = (),
        max_signatures: int = 64,
        engine_signatures: int | None = None,
        max_by_value: int = 64,
        to_host: Converter = to_numpy,
    ) -> None:
        self.graph = graph
        self.by_value = tuple(by_value)
        self.max_by_value = max_by_value
        self.engine_signatures = engine_signatures
        self._max = max_signatures
        self._make = make
        self._to_host = to_host
        self._planned = 0
        self._entries: dict[Hashable, CacheEntry] = {}
        self.calls: dict[Hashable, tuple[BoundCall, CacheEntry]] = {}
        self.clock = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    # --- bound calls --------------------------------------------------------------------------------------------------

    def bind(self, key: Hashable, call: BoundCall, plan: Plan, entry: CacheEntry) -> None:
        """Keep a call of a plan under a key, unless the plan was replaced or evicted meanwhile."""
        with self._lock:
            if entry.plan is not plan or self._entries.get(entry.key) is not entry:
                return
            while len(entry.calls) >= self._max:
                self._unbind(entry, next(iter(entry.calls)))
            entry.calls[key] = None
            self.calls[key] = call, entry

    # --- plans ----------------------------------------------------------------------------------------------------

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Results as the host's arrays (or sequences of them) for such arguments; None stands for one left out."""
        return self.read(self.plan_for(arrays).run(arrays))

    def read(self, results: Iterable[Any]) -> list[Any]:
        """The results of a plan as the host's arrays."""
        return [self._to_host(r) for r in results]

    def plan_for(self, arrays: Sequence[Any]) -> Plan:
        """The plan for the signature of these arguments, made if it is new."""
        return self.entry_for(arrays).plan

    def entry_for(self, arrays: Sequence[Any]) -> CacheEntry:
        """The entry for the signature of these arguments, made if it is new."""
        shapes = tuple([_part(a) for a in arrays])
        values = self.values(arrays)
        key: Hashable = (shapes, values) if values is not None else shapes
        found = self._entries.get(key)
        if found is not None:
            found.used = self.clock()
            return found
        if self.engine_signatures is not None and self._planned >= self.engine_signatures:
            return self._get_or_make((HOST, tuple([_rank(a) for a in arrays])), lambda: self._host_plan(arrays))
        if values is not None and self._variants(shapes) >= MAX_VARIANTS:
            key, values = shapes, None
        return self._get_or_make(key, lambda: self._new_plan(arrays, values is not None))

    def known_plan(self, arrays: Sequence[Any]) -> Plan | None:
        """The plan that is there for the signature of these arguments, or None."""
        shapes, values = tuple([_part(a) for a in arrays]), self.values(arrays)
        found = self._entries.get((shapes, values) if values is not None else shapes)
        return None if found is None else found.plan

    def plans(self) -> list[Plan]:
        """All plans, the least recently used first."""
        with self._lock:
            return [e.plan for e in sorted(self._entries.values(), key=lambda e: e.used)]

    def holds(self, plan: Plan) -> bool:
        """Whether a plan is there."""
        with self._lock:
            return any(e.plan is plan for e in self._entries.values())

    def replace(self, old: Plan, new: Plan) -> None:
        """Let a plan stand where another does, if it still does; calls are bound anew."""
        with self._lock:
            for entry in self._entries.values():
                if entry.plan is old:
                    entry.plan = new
                    for key in tuple(entry.calls):
                        self._unbind(entry, key)

    # --- signatures -----------------------------------------------------------------------------------------------

    def values(self, arrays: Sequence[Any]) -> Hashable:
        """The values, hashable, of the arguments that belong to the signature by value; None where there are none.

        Raises InputError for an argument that cannot be read.
        """
        return tuple([self._value(arrays[i]) for i in self.by_value]) if self.by_value else None

    def signature(
        self, arrays: Sequence[Any], by_value: bool = True
    ) -> tuple[list[ValueType | None], dict[int, np.ndarray]]:
        """Types of the arguments, and the values that are known: of shape-determining inputs."""
        known: dict[int, np.ndarray] = {}
        if by_value:
            for i in self.by_value:
                a = arrays[i]
                if isinstance(a, np.ndarray) and a.size <= self.max_by_value:
                    known[i] = a.copy()
        return [type_of(a, v.type) for a, v in zip(arrays, self.graph.inputs, strict=True)], known

    def _value(self, a: Any) -> Hashable:
        if type(a) is not np.ndarray:
            a = to_numpy(a)
        if not isinstance(a, np.ndarray) or a.size > self.max_by_value:
            return None
        return tuple(a.reshape(-1)) if a.dtype == object else a.tobytes()

    # --- making and evicting --------------------------------------------------------------------------------------

    def _get_or_make(self, key: Hashable, make: Callable[[], Plan]) -> CacheEntry:
        """The entry of a key; an exception of `make` is raised and nothing kept."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:  # other threads that want the same plan wait for it
            found = self._entries.get(key)
            if found is None:
                try:
                    found = CacheEntry(key, make())
                    self._insert(found)
                finally:
                    with self._lock:
                        self._making.pop(key, None)
            found.used = self.clock()
        return found

    def _insert(self, entry: CacheEntry) -> None:
        with self._lock:
            entry.used = self.clock()
            self._entries[entry.key] = entry
            while len(self._entries) > self._max:
                oldest = min(self._entries.values(), key=lambda e: e.used)
                del self._entries[oldest.key]
                for key in tuple(oldest.calls):
                    self._unbind(oldest, key)

    def _unbind(self, entry: CacheEntry, key: Hashable) -> None:
        del entry.calls[key]
        found = self.calls.get(key)
        if found is not None and found[1] is entry:
            del self.calls[key]

    def _variants(self, shapes: Any) -> int:
        """How many plans there are for values of their own under these shapes."""
        with self._lock:
            return sum(type(k) is tuple and len(k) == 2 and k[0] == shapes and k[1] is not None for k in self._entries)

    def _new_plan(self, arrays: Sequence[Any], with_values: bool) -> Plan:
        types, known = self.signature(arrays, with_values)
        self._planned += 1
        return self._make(types, known, True)

    def _host_plan(self, arrays: Sequence[Any]) -> Plan:
        types = [
            TensorType(t.dtype, (None,) * len(t.shape or ())) if isinstance(t, TensorType) else t
            for t in self.signature(arrays, by_value=False)[0]
        ]
        return self._make(types, {}, False)


def type_of(a: Any, declared: ValueType | None) -> ValueType | None:
    """The type of an argument: of an array its own; of a sequence or an absent optional what the graph declares."""
    if hasattr(a, "dtype"):
        return TensorType(a.dtype, a.shape)
    if isinstance(a, list):
        return declared if isinstance(declared, SequenceType) else SequenceType(None)
    if a is None:
        return declared if isinstance(declared, OptionalType) else OptionalType(None)
    return declared


def _part(a: Any) -> Any:
    try:
        return a.dtype, a.shape
    except AttributeError:
        return type(a)


def _rank(a: Any) -> Any:
    try:
        return a.dtype, len(a.shape)
    except AttributeError:
        return type(a)
