"""Fault isolation: injected faults are found and evicted, the other nodes stay accelerated, in few convex pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dag import is_convex
from tests.random_graphs import graphs
from tests.verify.planted import Planted, deep, value
from xrt_core.engine.contract import Function, InputOutputAlias
from xrt_core.errors import GraphError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning.contraction import Contraction, reads_of
from xrt_core.passes.shape_specialization import specialise
from xrt_core.testing.functions import node, update
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import Budget, Correction, FaultIsolator, OutOfBudget
from xrt_core.verify.reference import run_host
from xrt_core.verify.subgraph import (
    convex_partition,
    cut_after,
    disjoint_union,
    run_pieces,
    subfunction,
    topological_order,
)
from xrt_core.verify.verdict import HOST


def isolator(function: Function, planted: Planted, compiles: int = 100) -> FaultIsolator:
    made = FaultIsolator(function, planted.candidate, [synthesize_inputs(function)], Budget(compiles))
    made.reject_whole("it is wrong")
    return made


def accelerated(found: Correction) -> set[int]:
    return {i for p in found.pieces if p.engine != HOST for i in p.nodes}


def is_wide_softmax(n: Node, whole: int) -> bool:
    """The Softmax kernel, wrong only for rows of six."""
    return n.op_type == "Softmax" and n.inputs[0] is not None and (n.inputs[0].shape or ())[-1] == 6


def only_one_wide_softmax() -> tuple[Function, int]:
    """200 nodes, with Softmax of two shapes among them, of which exactly one has rows of seven."""
    function = deep(198)
    x = function.body.inputs[0]
    extra, made = value("wide", (4, 7)), value("soft", (4, 7))
    w = Value.constant(np.ones((6, 7), np.float32) / 3, "widen")
    nodes: list[Node] = []
    for i, n in enumerate(function.body.nodes):
        nodes.append(n)
        if i == 90:
            nodes += [node("MatMul", [x, w], [extra]), node("Softmax", [extra], [made])]
    body = function.body.replace(nodes=nodes, outputs=[*function.body.outputs, made])
    return Function.from_graph(body), 92


@pytest.mark.parametrize("compiles", [True, False])
def test_a_wrong_kernel_among_200_nodes(compiles: bool) -> None:
    """One operator, wrong only for one shape: it alone goes to the host, and about log2(200) compilations find it."""
    function, at = only_one_wide_softmax()
    planted = Planted(lambda n, k: n.op_type == "Softmax" and (n.inputs[0].shape or ())[-1] == 7)  # type: ignore[union-attr]

    found = isolator(function, planted).isolate(compiles=compiles)

    assert len(function.body.nodes) == 200
    assert list(found.offenders) == [at]
    assert accelerated(found) == set(range(200)) - {at}
    assert all(p.fused for p in found.pieces)
    assert len(planted.compiled) <= math.ceil(math.log2(200)) + (4 if not compiles else -3)


@pytest.mark.parametrize("compiles", [True, False])
def test_several_wrong_nodes_and_the_result(compiles: bool) -> None:
    """Every node of a faulty kernel is evicted, whether they hide behind each other or not, and the pieces together
    give the host's numbers."""
    function = deep(60)
    planted = Planted(is_wide_softmax)
    wanted = {i for i, n in enumerate(function.body.nodes) if is_wide_softmax(n, 0)}
    assert len(wanted) > 2

    found = isolator(function, planted, 200).isolate(compiles=compiles)

    assert set(found.offenders) == wanted
    assert accelerated(found) == set(range(60)) - wanted
    inputs = synthesize_inputs(function, seed=5)
    run = run_pieces(
        function, [p.nodes for p in found.pieces], [None if x is None else x.run for x in found.executables]
    )
    for got, want in zip(run(inputs), run_host(function, inputs)[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rs: [np.full_like(r, np.nan) for r in rs],
        lambda rs: [np.where(np.arange(r.size).reshape(r.shape) == 0, r + 1, r).astype(r.dtype) for r in rs],
        lambda rs: [r[::-1].copy() for r in rs],
        lambda rs: [np.zeros_like(r) for r in rs],
        lambda rs: [(r * np.float32(1.01)).astype(r.dtype) for r in rs],
    ],
    ids=["nan", "one_element", "reversed", "zeros", "one_percent"],
)
def test_kinds_of_wrong_numbers(spoil: Callable[[list[np.ndarray]], list[np.ndarray]]) -> None:
    """NaN, one element, the wrong order, zeros, and one per cent too much are all seen."""
    function = deep(30)
    planted = Planted(lambda n, k: n.op_type == "MatMul" and n.outputs[0].name == "n17", spoil=spoil)  # type: ignore[union-attr]
    at = next(i for i, n in enumerate(function.body.nodes) if n.outputs[0] is not None and n.outputs[0].name == "n17")

    # side by side the names of values are others: only bisection can meet a fault that follows a name
    found = isolator(function, planted).isolate(compiles=False)

    assert list(found.offenders) == [at]
    assert found.kept == 29


def test_a_node_that_breaks_the_compiler() -> None:
    """A compiler that fails on one operator keeps all the others."""
    function = deep(64)
    at = next(i for i, n in enumerate(function.body.nodes) if n.op_type == "Erf")
    only = function.body.nodes[at].outputs[0]
    planted = Planted(breaks=lambda n, k: n.op_type == "Erf" and n.outputs[0] is only)

    found = isolator(function, planted).isolate(compiles=False)

    assert list(found.offenders) == [at]
    assert "CompileError" in found.offenders[at]
    assert found.kept == 63
    assert len(planted.compiled) <= 6 + 5


def test_wrong_only_together_is_cut() -> None:
    """A fault of large functions only evicts no node: the function is cut until every piece is right."""
    function = deep(64)
    planted = Planted(lambda n, k: n.op_type == "MatMul" and k > 20)

    found = isolator(function, planted, 200).isolate(compiles=False)

    assert not found.offenders
    assert found.kept == 64
    assert len(found.pieces) > 1
    assert all(len(p.nodes) <= 20 or "MatMul" not in {function.body.nodes[i].op_type for i in p.nodes}
               for p in found.pieces)  # fmt: skip


def test_the_unfused_build_comes_first() -> None:
    """Where the engine's unfused build is right, it is the answer, after one compilation."""
    function = deep(40)
    planted = Planted(lambda n, k: n.op_type == "Tanh", heals_unfused=True)

    found = isolator(function, planted).isolate(compiles=True)

    assert [(p.engine, p.nodes, p.fused) for p in found.pieces] == [("planted", tuple(range(40)), False)]
    assert planted.compiled == [40]


def test_all_wrong_ends_at_the_host() -> None:
    """An engine that gets nothing right keeps nothing."""
    function = deep(20)
    found = isolator(function, Planted(lambda n, k: True)).isolate(compiles=True)

    assert found.kept == 0
    assert set(found.offenders) == set(range(20))


def test_the_budget_is_kept() -> None:
    """No compilation is made beyond the budget; unchecked nodes go to the host."""
    function = deep(64)
    planted = Planted(lambda n, k: n.op_type == "Sigmoid" and k < 60)
    found = isolator(function, Planted(breaks=lambda n, k: n.op_type == "Sigmoid"), 5).isolate(compiles=False)
    made = isolator(function, planted, 0).isolate(compiles=True)

    assert not found.complete
    assert not made.complete
    assert planted.compiled == []
    assert made.kept == 0
    assert sorted(i for p in found.pieces for i in p.nodes) == list(range(64))
    with pytest.raises(OutOfBudget):
        Budget(9, until=1.0, clock=lambda: 2.0).build(planted.candidate, function, True)


# --- pieces ------------------------------------------------------------------------------------------------------


def static(drawn: Any) -> Function | None:
    """A random graph as a Function of static shapes, or None where nothing is left of it."""
    flag = drawn.graph.inputs[-1]
    graph = specialise(
        drawn.graph, [*(TensorType(a.dtype, a.shape) for a in drawn.arrays[:-1]), flag.type], {}, run_node
    )
    if not graph.nodes or any(n.subgraphs for n in graph.nodes):
        return None
    return Function.from_graph(graph)


@settings(max_examples=60, deadline=None)
@given(graphs(control=False, maximum=14), st.data())
def test_pieces_cover_are_convex_and_compute_the_same(drawn: Any, data: st.DataObject) -> None:
    """Whatever is evicted and wherever is cut: the pieces cover every node once, each is convex, none waits for
    another in a circle, and together they give exactly the host's numbers."""
    function = static(drawn)
    if function is None:
        return
    body = function.body
    indices = st.integers(0, len(body.nodes) - 1)
    evicted = data.draw(st.sets(indices, max_size=4))
    cuts = data.draw(st.sets(indices, max_size=2))

    stay, leave = convex_partition(body, evicted, cuts)

    assert sorted(i for nodes in (*stay, *leave) for i in nodes) == list(range(len(body.nodes)))
    assert {i for nodes in leave for i in nodes} == evicted
    assert all(is_convex(body, nodes) for nodes in (*stay, *leave))
    pieces = [*stay, *leave]
    owner = {i: k for k, nodes in enumerate(pieces) for i in nodes}
    Contraction.of_reads(reads_of(body)).merge([owner[i] for i in range(len(body.nodes))])  # raises for a circle
    assert sorted(topological_order(body, pieces)) == list(range(len(pieces)))

    def runs(nodes: Sequence[int]) -> Any:
        part = subfunction(function, nodes)
        return lambda given: run_host(part, given)[0]

    call = run_pieces(function, pieces, [runs(n) for n in stay] + [None] * len(leave))
    for got, want in zip(call(drawn.arrays), run_host(function, drawn.arrays)[0], strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_fewest_pieces() -> None:
    """One evicted node of a chain leaves two pieces; a parallel strand adds none."""
    function = deep(40)
    assert len(convex_partition(function.body, {20})[0]) == 2
    assert len(convex_partition(function.body, {20, 21})[0]) == 2  # one in each strand
    assert len(convex_partition(function.body, {0, 1})[0]) == 1  # nothing stays before them
    assert convex_partition(function.body, ()) == ([tuple(range(40))], [])


def test_subfunctions_keep_aliases() -> None:
    """An alias goes into the part that holds both its ends, unless another part still reads the param."""
    function = update(4)  # total = p + g, new = p - g takes the storage of p
    assert subfunction(function, [0, 1]) is function
    assert subfunction(function, [1]).aliases == ()

    p, g, new = (value(n, (4,)) for n in ("p", "g", "new"))
    other = value("other", (4,))
    graph = Graph([p, g], [new, other], [node("Neg", [g], [other]), node("Sub", [p, g], [new])], opsets={"": 21})
    whole = Function.from_graph(graph, aliases=[InputOutputAlias(0, 0)])
    assert [(a.output, a.input) for a in subfunction(whole, [1]).aliases] == [(0, 0)]
    with pytest.raises(GraphError, match="without nodes"):
        subfunction(whole, [])


def test_a_disjoint_union() -> None:
    """Every part gets params of its own; each gives what it gives in its place."""
    function = deep(30)
    inputs = synthesize_inputs(function)
    values = run_host(function, inputs, keep=True)[1]

    union, meant, places = disjoint_union(function, [(i,) for i in range(30)])

    results = run_host(union, [values[v] for v in meant])[0]
    assert all(not p for p in union.body.predecessors)
    for i, returns in enumerate(places):
        outputs = [v for v in function.body.nodes[i].outputs if v is not None]
        for k, v in zip(returns, outputs, strict=True):
            np.testing.assert_array_equal(results[k], values[v])

    parts = [tuple(range(10)), tuple(range(10, 30))]
    union, meant, places = disjoint_union(function, parts)
    results = run_host(union, [values[v] for v in meant])[0]
    meant = [v for nodes in parts for v in subfunction(function, nodes).body.outputs]
    assert [len(p) for p in places] == [len(subfunction(function, nodes).body.outputs) for nodes in parts]
    for r, v in zip(results, meant, strict=True):
        np.testing.assert_array_equal(r, values[v])


def test_parts_end_at_marked_nodes() -> None:
    """Nothing that depends on a marked node is in its part; what is computed from a constant is with its reader."""
    x, c = value("x", (4,)), Value.constant(np.ones(4, np.float32))
    a, q, w, m, y = (value(n, (4,)) for n in "aqwmy")
    nodes = [node("Neg", [c], [w]), node("Exp", [x], [a]), node("Round", [a], [q]), node("Mul", [q, w], [m]),
             node("Add", [m, a], [y])]  # fmt: skip
    graph = Graph([x], [y], nodes, opsets={"": 21})
    assert cut_after(graph, {2}) == [(1, 2), (0, 3, 4)]
    assert cut_after(graph, {2, 3}) == [(1, 2), (0, 3), (4,)]
    assert cut_after(graph, ()) == [(0, 1, 2, 3, 4)]
