"""Runner: a graph that is planned once per signature and run many times; control-flow bodies have one each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from xrt_core.cache.lru import LRU
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import OptionalType, SequenceType, TensorType, ValueType
from xrt_core.runtime.arrays import Converter, to_numpy
from xrt_core.runtime.plan import HOST, Plan

MAX_VARIANTS = 16
"""So many value sets of shape-determining inputs get plans of their own; later ones share one that knows no values."""

MakePlan = Callable[[Sequence[ValueType | None], Mapping[int, np.ndarray], bool], Plan]
"""(input types, known input values, whether engines may be used) -> plan."""


class HasGraph(Protocol):
    """What a Runner runs: the captured stage of the pipeline."""

    @property
    def graph(self) -> Graph:
        """The graph."""


class PlanCache:
    """Plans per signature, kept in a bounded LRU.

    captured: the graph, as its frontend gave it.
    by_value: indices of inputs that belong to the signature by value (shape-determining ones); inputs that turn out
        larger than `max_by_value` elements do not.
    max_signatures: how many plans are kept. engine_signatures: after so many different signatures, all new ones share
        plans for the host that know ranks, but no shapes and no values (None: never): what changes at every call is
        not worth compiling, or planning.
    replaced: is told of a plan that took the place of another.
    """

    def __init__(
        self,
        captured: HasGraph,
        make: MakePlan,
        *,
        by_value: Collection[int] = (),
        max_signatures: int = 64,
        engine_signatures: int | None = None,
        max_by_value: int = 64,
        to_host: Converter = to_numpy,
    ) -> None:
        self.captured: Any = captured
        self.plans: LRU[Plan] = LRU(max_signatures)
        self.by_value = tuple(by_value)
        self.max_by_value = max_by_value
        self.engine_signatures = engine_signatures
        self.replaced: Callable[[Plan, Plan], None] = lambda old, new: None
        self._make = make
        self._to_host = to_host
        self._planned = 0
        self._value_sets: LRU[set[Any]] = LRU(max_signatures)  # by shapes: values that have plans of their own

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Results as the host's arrays (or sequences of them) for such arguments; None stands for one left out."""
        return [self._to_host(r) for r in self.plan_for(arrays).run(arrays)]

    def plan_for(self, arrays: Sequence[Any]) -> Plan:
        """The plan for the signature of these arguments, made if it is new."""
        shapes = tuple([_part(a) for a in arrays])
        values = self.values(arrays)
        key: Any = (shapes, values) if values is not None else shapes
        plan = self.plans.get(key)
        if plan is not None:
            return plan
        if self.engine_signatures is not None and self._planned >= self.engine_signatures:
            key = (HOST, tuple([_rank(a) for a in arrays]))
            return self.plans.get_or_make(key, lambda: self._host_plan(arrays))
        if values is not None:
            seen = self._value_sets.get_or_make(shapes, set)
            if values not in seen:
                if len(seen) >= MAX_VARIANTS:
                    key, values = shapes, None
                else:
                    seen.add(values)
        return self.plans.get_or_make(key, lambda: self._new_plan(arrays, values is not None))

    def keep(self, plans: Iterable[Plan]) -> None:
        """Count these plans as used, the last as the latest; those that are gone are passed over."""
        keys = {id(plan): key for key, plan in self.plans.items()}
        for plan in plans:
            self.plans.get(keys.get(id(plan)))

    def replace(self, old: Plan, new: Plan) -> None:
        """Let a plan stand where another does, if it still does, and tell `replaced`."""
        self.plans.replace(old, new)
        self.replaced(old, new)

    def known_plan(self, arrays: Sequence[Any]) -> Plan | None:
        """The plan that is there for the signature of these arguments, or None."""
        shapes, values = tuple([_part(a) for a in arrays]), self.values(arrays)
        return self.plans.get((shapes, values) if values is not None else shapes)

    def values(self, arrays: Sequence[Any]) -> Any:
        """The values, hashable, of the arguments that belong to the signature by value; None where there are none.

        Raises InputError for an argument that cannot be read.
        """
        return tuple([self._value(arrays[i]) for i in self.by_value]) if self.by_value else None

    def _value(self, a: Any) -> Any:
        if type(a) is not np.ndarray:
            a = to_numpy(a)
        if not isinstance(a, np.ndarray) or a.size > self.max_by_value:
            return None
        return tuple(a.reshape(-1)) if a.dtype == object else a.tobytes()

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
        types = [
            type_of(a, v.type) for a, v in zip(arrays, self.captured.graph.inputs, strict=True)
        ]
        return types, known

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
