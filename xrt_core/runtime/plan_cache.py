"""PlanCache: the plans of one graph by signature, and the calls that are bound to them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import SymbolicSignature
from xrt_core.ir.types import OptionalType, SequenceType, TensorType, ValueType
from xrt_core.runtime.arrays import Converter, to_numpy
from xrt_core.runtime.plan import HOST, Plan
from xrt_core.runtime.varying import Parts, SignatureStore, VaryingShapes, types_of

MAX_VARIANTS = 16
"""How many value sets of shape-determining inputs have plans of their own; others share one that knows no values."""

MakePlan = Callable[[Sequence[ValueType | None], Mapping[int, np.ndarray], bool], Plan]
"""(input types, known input values, whether engines may be used) -> plan."""

MakeSymbolicPlan = Callable[[Sequence[ValueType | None], Mapping[int, np.ndarray], SymbolicSignature], Plan | None]
"""(input types, known input values, the symbols) -> plan; None where exact plans are better."""

BoundCall = Callable[[Sequence[Any]], list[Any]]

_MOST_BESIDE: Final = 4
"""Exact plans that are made beside symbolic ones that answer, of one graph."""
_MOST_LOST: Final = 2
"""Of these, how many may turn out to be no better before no more are made."""
_MOST_CALLS: Final = 4096
"""Calls that are bound to one symbolic plan: one for each combination of sizes."""


class CacheEntry:
    """The plan of one signature. calls: keys under which calls are bound to it, oldest first. used: larger is later."""

    __slots__ = ("calls", "key", "plan", "used")

    def __init__(self, key: Hashable, plan: Plan) -> None:
        self.key = key
        self.plan = plan
        self.calls: dict[Hashable, None] = {}
        self.used = 0


class SymbolicEntry(CacheEntry):
    """The plan of one symbolic signature. parts: of the arguments that it was made for. values: of those that belong to
    it by value."""

    __slots__ = ("dtypes", "parts", "signature", "values")

    def __init__(self, key: Hashable, plan: Plan, signature: SymbolicSignature, parts: Parts, values: Hashable) -> None:
        super().__init__(key, plan)
        self.signature = signature
        self.parts = parts
        self.dtypes = tuple([d for d, _ in parts])
        self.values = values

    def admits(self, parts: Sequence[Any], values: Hashable) -> bool:
        """Whether the plan is for arguments like these."""
        sizes = self._sizes(parts, values)
        return sizes is not None and (self.plan.agrees is None or self.plan.agrees(sizes))

    def refuses(self, parts: Sequence[Any], values: Hashable) -> bool:
        """Whether the plan would be for arguments like these, if sizes agreed that must."""
        sizes = self._sizes(parts, values)
        return sizes is not None and self.plan.agrees is not None and not self.plan.agrees(sizes)

    def _sizes(self, parts: Sequence[Any], values: Hashable) -> Mapping[str, int] | None:
        if values != self.values or len(parts) != len(self.dtypes) or any(type(p) is not tuple for p in parts):
            return None
        if tuple([d for d, _ in parts]) != self.dtypes:
            return None
        sizes = self.signature.declared.admits([s for _, s in parts])
        return sizes if sizes is not None and all(g.evaluate(sizes) >= 0 for g in self.plan.guards) else None


class Bound:
    """A call that is bound to the plan of an entry. is_bound: False from when it is not any more."""

    __slots__ = ("call", "entry", "is_bound")

    def __init__(self, call: BoundCall, entry: CacheEntry) -> None:
        self.call = call
        self.entry = entry
        self.is_bound = True


class PlanCache:
    """Plans per signature, bounded: the least recently used goes first, and the calls bound to it with it.

    A body of control flow has one, and so has every graph that is called with arrays (`CompiledGraph`).

    graph: the captured graph.
    calls: by key; whoever runs one marks its entry as used: `entry.used = clock()`.
    make: makes a plan; a signature is planned once, also where many threads ask for it at the same time.
    by_value: indices of inputs that belong to the signature by value (shape-determining ones); inputs that turn out
        larger than `max_by_value` elements do not.
    max_signatures: how many plans are kept, and how many bound calls of each. fits: whether these may
        be in memory together; one plan always may.
    engine_signatures: after N different signatures, all new ones that no symbolic plan serves share plans for the host
        that know ranks, but no shapes and no values (None: never): what changes at every call is not worth compiling.
    varying: makes what proposes symbolic signatures, which is asked from the second signature on; from the first on
        with `at_once`, where the user declared shapes or they are known to vary. make_symbolic: makes the plan of one,
        or None if exact plans are better. A plan for exact shapes answers before a symbolic one, which takes its place
        once all its executables are there.
    kept: the signatures between which sizes varied in an earlier process, read at the first call; written once a
        symbolic plan is live, and none where exact plans are better after all.
    on_live: called when all executables of a plan are there, where they were built beside the host.
    """

    def __init__(
        self,
        graph: Graph,
        make: MakePlan,
        *,
        by_value: Collection[int] = (),
        max_signatures: int = 64,
        fits: Callable[[Sequence[Plan]], bool] = lambda plans: True,
        engine_signatures: int | None = None,
        max_by_value: int = 64,
        to_host: Converter = to_numpy,
        varying: Callable[[], VaryingShapes] | None = None,
        at_once: bool = False,
        make_symbolic: MakeSymbolicPlan | None = None,
        kept: SignatureStore | None = None,
    ) -> None:
        self.graph = graph
        self.on_live: Callable[[], None] | None = None
        self._make_varying, self._at_once = varying, at_once
        self._varying: VaryingShapes | None = None
        self._first: Sequence[Any] | None = None  # the signature before there was a second
        self._make_symbolic = make_symbolic
        self._kept = kept
        self._is_kept = False
        self._symbolic: tuple[SymbolicEntry, ...] = ()
        self._beside: dict[Hashable, Any] = {}
        self._lost = 0
        self.by_value = tuple(by_value)
        self.max_by_value = max_by_value
        self.engine_signatures = engine_signatures
        self._max = max_signatures
        self._fits = fits
        self._make = make
        self._to_host = to_host
        self._planned = 0
        self._entries: dict[Hashable, CacheEntry] = {}
        self.calls: dict[Hashable, Bound] = {}
        self.clock = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    # --- bound calls --------------------------------------------------------------------------------------------------

    def bind(self, key: Hashable, call: BoundCall, plan: Plan, entry: CacheEntry) -> None:
        """Keep a call of a plan under a key, unless the plan was replaced or evicted meanwhile."""
        with self._lock:
            if entry.plan is not plan or self._entries.get(entry.key) is not entry:
                return
            while len(entry.calls) >= (_MOST_CALLS if isinstance(entry, SymbolicEntry) else self._max):
                self._unbind(entry, next(iter(entry.calls)))
            entry.calls[key] = None
            self.keep(key, call, entry)

    def keep(self, key: Hashable, call: BoundCall, entry: CacheEntry) -> None:
        """Keep a call under a key, in the place of the one that is there."""
        self.let_go(key)
        self.calls[key] = Bound(call, entry)

    def let_go(self, key: Hashable) -> None:
        """Let the call of a key go: whoever has it does not use it any more."""
        found = self.calls.pop(key, None)
        if found is not None:
            found.is_bound = False

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
        varying = self._proposes(shapes)
        symbolic = None if varying is None else self._symbolic_entry(varying, shapes, values, arrays)
        if symbolic is not None:
            symbolic.used = self.clock()
            return symbolic
        if self.engine_signatures is not None and self._planned >= self.engine_signatures:
            return self.host_entry(arrays)
        if values is not None and self._variants(shapes) >= MAX_VARIANTS:
            key, values = shapes, None
        return self._get_or_make(key, lambda: self._new_plan(arrays, values is not None))

    def host_entry(self, arrays: Sequence[Any]) -> CacheEntry:
        """The entry of the plan for the host alone that knows the ranks of these arguments, and neither shapes nor
        values."""
        return self._get_or_make((HOST, tuple([_rank(a) for a in arrays])), lambda: self._host_plan(arrays))

    @property
    def has_symbolic(self) -> bool:
        """Whether there is a plan for a symbolic signature."""
        return bool(self._symbolic)

    def known_plan(self, arrays: Sequence[Any]) -> Plan | None:
        """The plan that is there for the signature of these arguments, or None."""
        shapes, values = tuple([_part(a) for a in arrays]), self.values(arrays)
        found = self._entries.get((shapes, values) if values is not None else shapes)
        if found is None:
            found = next((e for e in self._symbolic if e.admits(shapes, values)), None)
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
        if not new.is_unbuilt:
            self._became_live(new)

    # --- builds ---------------------------------------------------------------------------------------------------

    def watch(self, plan: Plan) -> None:
        """See to it that a plan takes the place of others as soon as all its executables are there."""
        cache, watched = weakref.ref(self), weakref.ref(plan)

        def on_live() -> None:
            found, made = cache(), watched()
            if found is not None and made is not None and not made.is_unbuilt:
                found._became_live(made)

        for launch in plan.launches:
            launch.on_live = on_live

    def _became_live(self, plan: Plan) -> None:
        varying = self._varying
        entry = next((e for e in self._symbolic if e.plan is plan), None)
        if entry is not None and varying is not None and varying.supersedes:
            self._supersede(entry)
        kept = None if self._at_once or self._is_kept else self._kept
        if entry is not None and varying is not None and kept is not None:
            self._is_kept = True
            kept.write(varying.seen_like(entry.parts))
        if self.on_live is not None:
            self.on_live()

    def drop_unbuilt(
        self, covers: Callable[[Sequence[Any], Hashable], bool], reason: str, begun: bool = True
    ) -> None:
        """Forget the exact plans that wait for executables, of signatures that something else serves. covers: asked
        with the parts of each argument, and the values of those that belong to the signature by value. begun: also
        those whose executables are being built."""
        with self._lock:
            for entry in tuple(self._entries.values()):
                exact = not isinstance(entry, SymbolicEntry)
                waits = entry.plan.is_unbuilt if begun else entry.plan.is_unplanned
                if exact and waits and covers(*self._parts_of(entry.key)):
                    self._remove(entry, reason)

    # --- symbolic plans -------------------------------------------------------------------------------------------

    def _proposes(self, shapes: Sequence[Any]) -> VaryingShapes | None:
        """What proposes symbolic signatures; None before there is more than one signature."""
        if self._varying is None and self._make_varying is not None:
            with self._lock:
                earlier = [] if self._kept is None or self._first or self._at_once else self._kept.read()
                self._is_kept = bool(earlier)
                if not (earlier or self._at_once) and self._first in (None, shapes):
                    self._first = shapes
                elif self._varying is None:
                    made = self._make_varying()
                    made.note_earlier(earlier)
                    if self._first is not None:
                        made.note(self._first)
                    self._varying = made
        return self._varying

    def _symbolic_entry(
        self, varying: VaryingShapes, shapes: Sequence[Any], values: Hashable, arrays: Sequence[Any]
    ) -> SymbolicEntry | None:
        """The symbolic entry for these arguments, made if that is what they need; None for an exact plan."""
        found = next((e for e in self._symbolic if e.admits(shapes, values)), None)
        if found is not None:
            if varying.supersedes:
                self._supersede(found)
            return found
        if any(e.refuses(shapes, values) for e in self._symbolic):  # the exact plan says what is wrong
            return None
        signature = varying.signature_for(shapes, at_once=self._is_behind)
        return None if signature is None else self._new_symbolic(signature, shapes, values, arrays)

    @property
    def _is_behind(self) -> bool:
        """Whether an exact plan still waits for its executables: shapes come faster than these are built."""
        with self._lock:
            return any(e.plan.is_unbuilt for e in self._entries.values() if not isinstance(e, SymbolicEntry))

    def symbolic_entry(self, arrays: Sequence[Any], signature: SymbolicSignature) -> SymbolicEntry | None:
        """The entry of a symbolic signature, made if it is new, to which these arguments belong; None where exact plans
        are better."""
        shapes, values = tuple([_part(a) for a in arrays]), self.values(arrays)
        found = next((e for e in self._symbolic if e.admits(shapes, values)), None)
        return found or self._new_symbolic(signature, shapes, values, arrays)

    def _new_symbolic(
        self, signature: SymbolicSignature, shapes: Sequence[Any], values: Hashable, arrays: Sequence[Any]
    ) -> SymbolicEntry | None:
        make = self._make_symbolic
        if make is None:
            return None
        known = self.signature(arrays)[1] if values is not None else {}
        plan = make(types_of(signature, shapes), known, signature)
        if plan is None:
            return None
        key = ("symbolic", str(signature.declared), tuple(signature.sizes.items()), values)
        made = SymbolicEntry(key, plan, signature, shapes, values)
        if not made.admits(shapes, values):
            return None
        self._insert(made)
        with self._lock:
            self._symbolic = (*self._symbolic, made)
        # what is being built for exact shapes would only delay what serves all of them
        self.drop_unbuilt(made.admits, "a plan for all sizes took its place")
        if not plan.is_unbuilt:
            self._became_live(plan)
        return made

    # --- exact plans beside symbolic ones -----------------------------------------------------------------------------

    def begin_beside(self, arrays: Sequence[Any], begin: Callable[..., Any]) -> None:
        """Begin to make an exact plan for the signature of these arguments, which a symbolic plan serves meanwhile.

        begin: called with input types, known values and the key of the plan; what it returns is kept until the plan is
        there (`put_beside`). Nothing happens where there is, or is to be, such a plan, or those before were no better.
        """
        shapes, values = tuple([_part(a) for a in arrays]), self.values(arrays)
        key: Hashable = (shapes, values) if values is not None else shapes
        with self._lock:
            if key in self._beside or key in self._entries:
                return
            if len(self._beside) >= _MOST_BESIDE or self._lost >= _MOST_LOST:
                return
            self._beside[key] = None
        types, known = self.signature(arrays, values is not None)
        self._beside[key] = begin(types, known, key)

    def put_beside(self, key: Hashable, plan: Plan, is_better: Callable[[], bool]) -> None:
        """Let an exact plan answer as soon as all its executables are there, if it is better then; else it goes."""
        self._beside[key] = plan
        cache, watched = weakref.ref(self), weakref.ref(plan)

        def on_live() -> None:
            found, made = cache(), watched()
            if found is not None and made is not None and not made.is_unbuilt:
                found._decide(key, made, is_better())

        for launch in plan.launches:
            launch.on_live = on_live

    def _decide(self, key: Hashable, plan: Plan, is_better: bool) -> None:
        with self._lock:
            if self._beside.get(key) is not plan:
                return
            self._beside[key] = None
            self._lost = 0 if is_better else self._lost + 1
        if not is_better:
            plan.release("a plan for all sizes is as good")
            return
        self._insert(CacheEntry(key, plan))
        with self._lock:
            for entry in self._symbolic:  # calls are bound anew, those of this signature to the exact plan
                for call in tuple(entry.calls):
                    self._unbind(entry, call)

    def _supersede(self, symbolic: SymbolicEntry) -> None:
        """Let a symbolic plan whose executables are all there take the place of exact ones, which frees theirs."""
        launches = symbolic.plan.launches
        if not launches or any(x.executable is None for x in launches):
            return
        with self._lock:
            for entry in tuple(self._entries.values()):
                if not isinstance(entry, SymbolicEntry) and symbolic.admits(*self._parts_of(entry.key)):
                    self._remove(entry, "a plan for all sizes took its place")

    def _parts_of(self, key: Any) -> tuple[Sequence[Any], Hashable]:
        """The parts and values of an exact entry's key."""
        return key if self.by_value and len(key) == 2 and type(key[0]) is tuple else (key, None)

    def clear(self, reason: str) -> None:
        """Forget all plans."""
        with self._lock:
            for entry in tuple(self._entries.values()):
                self._remove(entry, reason)

    def abandon(self, plan: Plan | None, reason: str) -> None:
        """Plan by exact shapes from now on, and forget a symbolic plan; None: unless there is another one."""
        if self._varying is None and self._make_varying is not None:
            self._varying = self._make_varying()
        if self._varying is not None and (plan is not None or not self._symbolic):
            self._varying.give_up(reason)
        if self._is_kept and self._kept is not None:
            self._is_kept = False
            self._kept.write(())
        with self._lock:
            for entry in self._symbolic:
                if entry.plan is plan:
                    self._remove(entry)

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
            while len(self._entries) > 1 and (
                len(self._entries) > self._max or not self._fits([e.plan for e in self._entries.values()])
            ):
                self._remove(min(self._entries.values(), key=lambda e: e.used), "others took its memory")

    def _remove(self, entry: CacheEntry, reason: str = "its plan was dropped") -> None:
        self._entries.pop(entry.key, None)
        entry.plan.release(reason)
        self._symbolic = tuple(e for e in self._symbolic if e is not entry)
        for key in tuple(entry.calls):
            self._unbind(entry, key)

    def _unbind(self, entry: CacheEntry, key: Hashable) -> None:
        del entry.calls[key]
        found = self.calls.get(key)
        if found is not None and found.entry is entry:
            self.let_go(key)

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
