"""PlanCache: what is kept, what goes with a plan that is evicted or replaced, and one plan for many threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.random_graphs import F32
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.runtime.plan import Plan, make_plan
from xrt_core.runtime.plan_cache import PlanCache

X = np.zeros(2, np.float32)


def a_plan() -> Plan:
    graph = Graph([Value("x", TensorType(F32, None))], [Value.constant(np.array(0))], [], opsets={})
    return make_plan(graph, lambda node: pytest.fail("no nodes"))


def cache(size: int = 2) -> PlanCache:
    graph = Graph([Value("x", TensorType(F32, None))], [], [], opsets={})
    return PlanCache(graph, lambda types, known, engines: a_plan(), max_signatures=size)


def bound(plans: PlanCache, n: int) -> Any:
    """A call bound under the key n to the plan for n elements."""
    entry = plans.entry_for([np.zeros(n, np.float32)])
    plans.bind(n, lambda arrays: [n], entry.plan, entry)
    return entry


def called(plans: PlanCache, key: Any) -> Any:
    """The call that is bound under a key, marked as used as `CompiledGraph` does; None where there is none."""
    found = plans.calls.get(key)
    if found is None:
        return None
    found.entry.used = plans.clock()
    return found.call


def test_a_bound_call_keeps_its_plan() -> None:
    """A hit of the bound call counts as a use of the plan; the least recently used goes, and its calls with it."""
    plans = cache()
    one, _ = bound(plans, 1), bound(plans, 2)
    assert called(plans, 1)([]) == [1]
    bound(plans, 3)
    assert (called(plans, 2), called(plans, 1) is None, called(plans, 3) is None) == (None, False, False)
    assert plans.holds(one.plan)
    assert len(plans.plans()) == 2


def test_a_replaced_plan_is_bound_anew() -> None:
    """Its calls go; a call that was made of the old plan meanwhile is not kept."""
    plans = cache()
    entry = bound(plans, 1)
    old, new = entry.plan, a_plan()
    plans.replace(old, new)
    assert called(plans, 1) is None
    assert entry.plan is plans.plan_for([np.zeros(1, np.float32)]) is new
    plans.bind(1, lambda arrays: [], old, entry)
    assert called(plans, 1) is None
    plans.replace(old, a_plan())
    assert plans.plans() == [new]


def test_whoever_has_a_call_is_told_that_it_is_not_bound_any_more() -> None:
    """It was replaced by another one, let go, or went with its plan."""
    plans = cache()
    entry = bound(plans, 1)
    first = plans.calls[1]
    plans.keep(1, lambda arrays: [], entry)
    second = plans.calls[1]
    assert (first.is_bound, second.is_bound) == (False, True)
    plans.let_go(1)
    assert (second.is_bound, plans.calls) == (False, {})
    bound(plans, 1)
    third = plans.calls[1]
    plans.replace(entry.plan, a_plan())
    assert not third.is_bound


def test_the_calls_of_one_plan_are_bounded() -> None:
    """The oldest goes."""
    plans = cache()
    entry = plans.entry_for([X])
    for key in "abc":
        plans.bind(key, lambda arrays: [], entry.plan, entry)
    assert [called(plans, key) is None for key in "abc"] == [True, False, False]
    assert list(entry.calls) == ["b", "c"]


def test_threads_that_ask_together_get_one_plan() -> None:
    """And one that fails leaves nothing behind."""
    made: list[Plan] = []
    begin = threading.Barrier(8)
    failing = [True]

    def make(types: Any, known: Any, engines: bool) -> Plan:
        if failing:
            failing.clear()
            raise ValueError("the first one fails")
        made.append(a_plan())
        return made[-1]

    plans = PlanCache(Graph([Value("x", TensorType(F32, None))], [], [], opsets={}), make)
    with pytest.raises(ValueError, match="the first one"):
        plans.plan_for([X])
    got: list[Plan] = []

    def ask() -> None:
        begin.wait()
        got.append(plans.plan_for([X]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1
    assert all(p is made[0] for p in got)
