"""Plans as register programs, Launches with the host behind them, and Runners with their bounds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.random_graphs import F32, I64, graph_of, ints, node
from xrt_core.errors import InputError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import OptionalType, SequenceType, TensorType
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan
from xrt_core.runtime.plan_cache import MAX_VARIANTS, PlanCache, type_of

X = np.array([1, -2], np.float32)


def on_host(n: Node) -> Lowered:
    return Lowered(host_kernel(n), HOST, n.op_type)


def f32(name: str) -> Value:
    return Value(name, TensorType(F32, (2,)))


def test_registers_die_after_their_last_reader() -> None:
    """Intermediates and inputs are cleared as soon as nothing reads them; constants and results are not."""
    x, a, b = f32("x"), Value("a"), Value("b")
    c = Value.constant(X)
    plan = make_plan(graph_of([x], [b], [node("Add", [x, c], [a]), node("Neg", [a], [b])]), on_host)
    assert [s.dead for s in plan.steps] == [(0,), (2,)]
    assert str(plan) == "inputs r0..r0\nr2 = Add(r0, r1)  free r0\nr3 = Neg(r2)  free r2\nreturn r3"
    for _ in range(2):
        np.testing.assert_array_equal(plan.run([X])[0], -2 * X)


def test_one_launch_is_called_without_registers() -> None:
    """Also where it takes some of the inputs and its results come in another order."""
    x, unused, y, a, b = f32("x"), f32("unused"), f32("y"), f32("a"), f32("b")
    body = graph_of([y, x], [a, b], [node("Neg", [x], [a]), node("Abs", [y], [b])])
    p = [Parameter(name, F32, (2,)) for name in "yxab"]
    function = Function("f", p[:2], p[2:], body)
    launch = Launch(function, "fake", None, lambda: lambda arrays: [-arrays[1], np.abs(arrays[0])])
    there = f32("y_there"), f32("x_there")
    nodes = [node("Identity", [v], [w]) for v, w in zip((y, x), there, strict=True)]
    nodes.append(Node("Launch", there, [a, b], domain="xrt", version=1))
    calls = {"Launch": launch, "Identity": None}  # a converter that has nothing to convert
    graph = graph_of([x, unused, y], [b, a], nodes)
    plan = make_plan(graph, lambda n: Lowered(calls[n.op_type], "fake", "f"))
    entered: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("plan.py"):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        found = plan.run([X, X, 3 * X])
    finally:
        sys.setprofile(None)
    assert [name for name in entered if name != "<listcomp>"] == ["run"]
    np.testing.assert_array_equal(found, [np.abs(3 * X), -X])
    with xrt.profile() as profiled:
        plan.run([X, X, 3 * X])
    assert [s.label for s in profiled.timeline.spans] == ["f", "g"]


def test_outputs_that_nobody_wants_and_inputs_left_out() -> None:
    """A second output that is left out has no register; an input left out arrives as None."""
    x, y = f32("x"), Value("y")
    plan = make_plan(graph_of([x], [y], [node("Clip", [x, None, Value.constant(np.float32(0))], [y])]), on_host)
    np.testing.assert_array_equal(plan.run([X])[0], [0, -2])
    plan = make_plan(graph_of([x], [y], [node("TopK", [x, ints(1)], [None, y])]), on_host)
    assert plan.run([X])[0].tolist() == [0]


def test_kernels_cannot_write_into_what_is_not_theirs() -> None:
    """Inputs and constants reach host steps read-only, elements of sequences too; the caller's array stays writable."""
    seen: list[Any] = []

    def spy(arrays: Sequence[Any]) -> Sequence[Any]:
        seen.extend(arrays)
        return (arrays[0] + arrays[1],)

    x, s, y = f32("x"), Value("s", SequenceType(TensorType(F32))), Value("y")
    g = graph_of([x, s], [y], [node("Add", [x, Value.constant(X.copy()), s], [y])])
    given, element = X.copy(), X.copy()
    make_plan(g, lambda n: Lowered(spy, HOST, "spy")).run([given, [element]])
    assert not any(a.flags.writeable for a in (*seen[:2], seen[2][0]))
    assert given.flags.writeable
    assert element.flags.writeable


@pytest.mark.parametrize("owned", [True, False])
def test_parts_of_a_graph_do_without_copies(owned: bool) -> None:
    """What goes on into another plan may be a view; it is read-only then."""
    x = f32("x")
    (y,) = make_plan(graph_of([x], [x], []), on_host, owned=owned).run([X])
    assert np.shares_memory(y, X) != owned
    assert y.flags.writeable == owned


def test_two_results_of_one_memory_are_told_apart() -> None:
    """A result and its reshaped self, in either order."""
    x, a, b = f32("x"), Value("a"), Value("b")
    nodes = [node("Neg", [x], [a]), node("Reshape", [a, ints(2, 1)], [b])]
    for outputs in ([a, b], [b, a], [a, a], [b, b]):
        first, second = make_plan(graph_of([x], outputs, nodes), on_host).run([X])
        assert not np.shares_memory(first, second)
        assert first.flags.writeable
        assert second.flags.writeable


def test_floating_point_warnings_are_off_in_host_steps_only() -> None:
    """The caller's error state is what it was."""
    x, y = f32("x"), Value("y")
    plan = make_plan(graph_of([x], [y], [node("Log", [x], [y])]), on_host)
    with np.errstate(all="raise"):
        assert np.isnan(plan.run([X])[0][1])
        with pytest.raises(FloatingPointError):
            np.log(X)


def cache_of(**options: Any) -> tuple[PlanCache, list[Any]]:
    """A plan cache over x (any shape) and shape, whose plans return the number of plans made so far."""
    made: list[Any] = []
    graph = Graph([Value("x", TensorType(F32, None)), Value("shape", TensorType(I64, None))], [], [], opsets={})

    def make(types: Any, known: Any, engines: bool) -> Plan:
        made.append((types, known, engines))
        y = Value.constant(np.array(len(made)))
        return make_plan(Graph(graph.inputs, [y], [], opsets={}), on_host)

    return PlanCache(graph, make, **options), made


def test_a_signature_is_planned_once() -> None:
    """By dtype, shape, and the value of what determines shapes."""
    r, made = cache_of(by_value=[1])
    for shape in ([2], [3], [2]):
        r.run([X, np.array(shape)])
    assert len(made) == 2
    assert [known[1].tolist() for _, known, _ in made] == [[2], [3]]
    r.run([X.astype(np.float64), np.array([2])])
    r.run([X[:1], np.array([2])])
    assert [str(types[0]) for types, _, _ in made] == ["float32[2]", "float32[2]", "float64[2]", "float32[1]"]


def test_values_beyond_the_bound_share_a_plan() -> None:
    """After so many values; too large values never count."""
    r, made = cache_of(by_value=[1], max_by_value=4)
    for i in range(2 * MAX_VARIANTS):
        r.run([X, np.array([i])])
    assert len(made) == MAX_VARIANTS + 1
    assert made[-1][1] == {}
    for i in range(5):
        r.run([X, np.full(5, i)])
    assert len(made) == MAX_VARIANTS + 2


def test_known_values_are_copies() -> None:
    """A caller who changes the array afterwards changes no plan."""
    r, made = cache_of(by_value=[1])
    shape = np.array([2])
    r.run([X, shape])
    shape[0] = 9
    assert made[0][1][1].tolist() == [2]


def test_too_many_signatures_share_the_host() -> None:
    """After the bound on engines' signatures, one plan per rank, without shapes, values or engines."""
    r, made = cache_of(by_value=[1], engine_signatures=3)
    for n in range(10):
        r.run([np.zeros(n, np.float32), np.array([n])])
    assert [engines for _, _, engines in made] == [True] * 3 + [False]
    assert str(made[-1][0][0]) == "float32[?]"
    assert made[-1][1] == {}
    r.run([np.zeros((1, 1), np.float32), np.array([1])])
    assert len(made) == 5


def test_types_of_arguments() -> None:
    """Arrays have their own; sequences and absent optionals that of the declaration."""
    t = TensorType(F32, (2,))
    assert type_of(X, None) == t
    assert type_of([X], SequenceType(t)) == SequenceType(t)
    assert type_of([X], None) == SequenceType(None)
    assert type_of(None, OptionalType(t)) == OptionalType(t)
    assert type_of(None, None) == OptionalType(None)


def test_unreadable_values_are_input_errors() -> None:
    """Where a value is part of the signature it has to be one."""
    r, _ = cache_of(by_value=[1])
    with pytest.raises(InputError, match="object is not an array"):
        r.values([X, object()])
