"""Control flow on the host: the semantics that ONNX gives to If, Loop, Scan and SequenceMap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fake_engines import fake_engine
from tests.random_graphs import BOOL, F32, I64, graph_of, ints, node
from xrt_core.errors import ExecutionError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters  # bodies run on engines


def f32(name: str, *shape: Any) -> Value:
    return Value(name, TensorType(F32, shape))


def scalar(value: Any, dtype: Any = np.float32) -> Value:
    return Value.constant(np.array(value, dtype))


def run(graph: Graph, *arrays: Any, engine: str = "host") -> list[Any]:
    got = XRTModule(graph, engine=engine)(*arrays)
    return list(got) if isinstance(got, tuple) else [got]


def counting_loop(limit: Value | None, go: Value | None, stop_at: int = 99, scan_type: Any = None) -> Graph:
    """state += x until the turn number reaches stop_at; scans the new states."""
    turn, cond, s, x = Value("turn", TensorType(I64, ())), Value("cond", TensorType(BOOL, ())), f32("s"), f32("x", 2)
    t, still = Value("t", scan_type), Value("still")
    nodes = [node("Add", [s, x], [t]), node("Less", [turn, scalar(stop_at, np.int64)], [still])]
    body = graph_of([turn, cond, s], [still, t, t], nodes)
    outs = [Value("final"), Value("all")]
    given = [v for v in (limit, go) if v is not None and v.data is None]
    return graph_of([x, *given], outs, [node("Loop", [limit, go, x], outs, body=body)])


X = np.array([1, 2], np.float32)


def test_a_loop_stops_at_its_limit_or_its_condition() -> None:
    """The limit, the body's condition, and both left out in turn."""
    final, all_ = run(counting_loop(scalar(3, np.int64), None), X)
    np.testing.assert_array_equal(final, 4 * X)
    np.testing.assert_array_equal(all_, [2 * X, 3 * X, 4 * X])
    final, all_ = run(counting_loop(None, None, stop_at=1), X)
    np.testing.assert_array_equal(final, 3 * X)
    assert all_.shape == (2, 2)
    assert run(counting_loop(scalar(3, np.int64), scalar(True, bool), stop_at=1), X)[1].shape == (2, 2)


@pytest.mark.parametrize("scan_type", [None, TensorType(F32), TensorType(F32, ("k",)), TensorType(F32, (2,))])
def test_a_loop_without_a_turn(scan_type: Any) -> None:
    """A limit of 0 and a condition that is False at first: the state as it came in, scans empty and of the shape and
    dtype that one turn would give."""
    for limit, go in ((scalar(0, np.int64), None), (scalar(5, np.int64), scalar(False, bool))):
        final, all_ = run(counting_loop(limit, go, scan_type=scan_type), X)
        np.testing.assert_array_equal(final, X)
        assert not np.shares_memory(final, X)
        assert (all_.dtype, all_.shape) == (F32, (0, 2))


def test_the_limit_may_be_an_input() -> None:
    """Given at run time, as a scalar or a vector of one, with no plan per value of it."""
    limit = Value("limit", TensorType(I64, None))
    m = XRTModule(counting_loop(limit, None), engine="host")
    for n in (2, 0, 7):
        np.testing.assert_array_equal(m(X, np.array(n))[0], (n + 1) * X)
        np.testing.assert_array_equal(m(X, np.array([n]))[0], (n + 1) * X)


def growing_loop(turns: int) -> Graph:
    """The state doubles at every turn."""
    turn, cond, s = Value("turn", TensorType(I64, ())), Value("cond", TensorType(BOOL, ())), f32("s", "n")
    still, t, u, x, y = Value("still"), Value("t"), Value("u"), f32("x", 1), Value("y")
    nodes = [node("Identity", [cond], [still]), node("Concat", [s, ints_f32(1)], [t], axis=0), node("Neg", [t], [u])]
    body = graph_of([turn, cond, s], [still, u], nodes)
    return graph_of([x], [y], [node("Loop", [scalar(turns, np.int64), None, x], [y], body=body)])


def ints_f32(*values: float) -> Value:
    return Value.constant(np.array(values, np.float32))


def test_a_state_that_grows_is_planned_a_few_times_only() -> None:
    """Fifty shapes: the first sixteen get plans of their own, the rest share one of the host."""
    wanted = np.zeros(1, np.float32)
    for _ in range(50):
        wanted = -np.concatenate([wanted, [np.float32(1)]])
    with fake_engine() as engine:
        module = XRTModule(growing_loop(50), engine="fake")
        for _ in range(2):
            np.testing.assert_array_equal(module(np.zeros(1, np.float32)), wanted)
        assert len(engine.compiled) == 16
        assert engine.runs == 32
        assert len(module.events.recent("specialised")) == 1 + 16 + 1


def test_bodies_run_on_engines() -> None:
    """What is inside a loop, but for its counting, is compiled once and runs at every turn, with what it captures."""
    with fake_engine() as engine:
        m = XRTModule(counting_loop(scalar(5, np.int64), None), engine="fake")
        np.testing.assert_array_equal(m(X)[0], 6 * X)
        assert len(engine.compiled) == 1
        assert engine.runs == 5
        assert m.explain().engine_node_count == 1


def scan(axes: dict[str, Any], opset: int = 0) -> Graph:
    """Running sums of the slices, and their negatives."""
    s, e, t, o = f32("s", 2), f32("e", 2), Value("t"), Value("o")
    body = graph_of([s, e], [t, o], [node("Add", [s, e], [t]), node("Neg", [t], [o])])
    state, xs = f32("state"), f32("xs")
    outs = [Value("final"), Value("all")]
    n = node("Scan", [state, xs], outs, body=body, num_scan_inputs=1, **axes)
    g = graph_of([Value("state", TensorType(F32)), Value("xs", TensorType(F32))], outs, [])
    return g.replace(nodes=[n.replace(inputs=g.inputs)])


XS = np.arange(8, dtype=np.float32).reshape(4, 2)
SUMS = np.cumsum(XS, axis=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("out_axis", [0, 1, -2])
def test_scan_axes(axis: int, out_axis: int) -> None:
    """Any axis may be the scanned one, also counted from the end."""
    g = scan({"scan_input_axes": (axis,), "scan_output_axes": (out_axis,)})
    final, all_ = run(g, np.zeros(2, np.float32), np.moveaxis(XS, 0, axis))
    np.testing.assert_array_equal(final, SUMS[-1])
    np.testing.assert_array_equal(all_, np.moveaxis(-SUMS, 0, out_axis))


def test_scan_directions() -> None:
    """Inputs from the back, outputs towards the front."""
    back = np.cumsum(XS[::-1], axis=0)
    _, all_ = run(scan({"scan_input_directions": (1,)}), np.zeros(2, np.float32), XS)
    np.testing.assert_array_equal(all_, -back)
    _, all_ = run(scan({"scan_input_directions": (1,), "scan_output_directions": (1,)}), np.zeros(2, np.float32), XS)
    np.testing.assert_array_equal(all_, -back[::-1])


def test_scan_over_nothing_and_over_numbers() -> None:
    """A length of 0 gives empty outputs; slices of a vector are scalars."""
    final, all_ = run(scan({}), np.ones(2, np.float32), XS[:0])
    np.testing.assert_array_equal(final, [1, 1])
    assert all_.shape == (0, 2)
    s, e, t = f32("s"), f32("e"), Value("t")
    body = graph_of([s, e], [t, t], [node("Add", [s, e], [t])])
    state, xs, outs = f32("state"), f32("xs", 3), [Value("final"), Value("all")]
    g = graph_of([state, xs], outs, [node("Scan", [state, xs], outs, body=body, num_scan_inputs=1)])
    final, all_ = run(g, np.array(0, np.float32), np.array([1, 2, 3], np.float32))
    assert (final.shape, float(final)) == ((), 6)
    np.testing.assert_array_equal(all_, [1, 3, 6])


def test_scan_over_text() -> None:
    """Elements of a vector of strings arrive as arrays like any others."""
    text = TensorType(np.dtype(object), (3,))
    e, o = Value("e", TensorType(np.dtype(object), ())), Value("o")
    body = graph_of([e], [o], [node("Unsqueeze", [e, ints(0)], [o])])
    xs, all_ = Value("xs", text), Value("all")
    g = graph_of([xs], [all_], [node("Scan", [xs], [all_], body=body, num_scan_inputs=1)])
    assert run(g, np.array(["a", "b", "c"]))[0].tolist() == [["a"], ["b"], ["c"]]


def test_scan_of_different_lengths_is_an_error() -> None:
    """It names the node and the lengths."""
    a, b, o = f32("a"), f32("b"), Value("o")
    body = graph_of([a, b], [o], [node("Add", [a, b], [o])])
    xs, ys, all_ = f32("xs", "n"), f32("ys", "m"), Value("all")
    g = graph_of([xs, ys], [all_], [node("Scan", [xs, ys], [all_], body=body, num_scan_inputs=2)])
    with pytest.raises(ExecutionError, match=r"'all': Scan over inputs of different lengths \[2, 3\]"):
        run(g, np.zeros(2, np.float32), np.zeros(3, np.float32))


def scan_8(state_shape: Sequence[Any] = ("b", 2)) -> Graph:
    s, e, t, o = f32("s"), f32("e"), Value("t"), Value("o")
    nodes = [Node("Add", [s, e], [t], version=7), Node("Neg", [t], [o], version=6)]
    body = Graph([s, e], [t, o], nodes, opsets={"": 8}, name="body")
    lengths, state, xs = Value("lengths", TensorType(I64, ("b",))), f32("state", *state_shape), f32("xs", "b", "n", 2)
    outs = [Value("final"), Value("all")]
    n = Node("Scan", [lengths, state, xs], outs, {"body": body, "num_scan_inputs": 1}, version=8, name="scan")
    return Graph([lengths, state, xs], outs, [n], opsets={"": 8}, name="g")


def test_scan_of_opset_8_has_a_batch_axis_and_lengths() -> None:
    """Each entry runs for its own length (0 included); outputs are filled with zeros behind it."""
    xs = np.stack([XS, XS, XS])
    final, all_ = run(scan_8(), np.array([4, 0, 2]), np.zeros((3, 2), np.float32), xs)
    np.testing.assert_array_equal(final, [SUMS[3], [0, 0], SUMS[1]])
    np.testing.assert_array_equal(all_[0], -SUMS)
    np.testing.assert_array_equal(all_[1], np.zeros((4, 2)))
    np.testing.assert_array_equal(all_[2], np.concatenate([-SUMS[:2], np.zeros((2, 2))]))


def test_scan_of_opset_8_over_an_empty_batch() -> None:
    """No entry at all: empty results, not a missing one."""
    final, all_ = run(scan_8(), np.zeros(0, np.int64), np.zeros((0, 2), np.float32), np.zeros((0, 4, 2), np.float32))
    assert final.shape == (0, 2)
    assert all_.shape[:2] == (0, 4)


def choose(then: Graph, other: Graph, *more: Value) -> Graph:
    flag, y = Value("flag", TensorType(None, None)), Value("y")
    return graph_of([flag, *more], [y], [node("If", [flag], [y], then_branch=then, else_branch=other)])


def test_branches_of_different_shapes_and_constants() -> None:
    """What a branch returns may be a constant, a captured value as it is, or of another rank; never shared memory."""
    x, o = f32("x", 2), Value("o")
    constant = Value.constant(np.array([[5]], np.float32))
    g = choose(graph_of([], [x], []), graph_of([], [constant], []), x)
    m = XRTModule(g, engine="host")
    for flag in (np.array(True), np.array([False]), np.array(False), np.array([True])):
        y = m(flag, X)
        np.testing.assert_array_equal(y, X if flag.all() else [[5]])
        y[...] = 0
    np.testing.assert_array_equal(X, [1, 2])
    np.testing.assert_array_equal(constant.data, [[5]])
    del o


def test_nested_branches_capture_from_every_level() -> None:
    """An If in an If in a graph; the name of a captured value may be that of a body's own input."""
    x, mid, deep, out = f32("x", 2), Value("mid"), Value("deep"), Value("out")
    flag2 = Value("flag2", TensorType(BOOL, ()))
    inner_yes = graph_of([], [deep], [node("Add", [mid, x], [deep])])
    inner_no = graph_of([], [mid], [])
    outer_yes = graph_of(
        [], [out], [node("Neg", [x], [mid]), node("If", [flag2], [out], then_branch=inner_yes, else_branch=inner_no)]
    )
    g = choose(outer_yes, graph_of([], [x], []), x, flag2)
    with fake_engine():
        for engine in ("host", "fake"):
            m = XRTModule(g, engine=engine)
            np.testing.assert_array_equal(m(np.array(True), X, np.array(True)), [0, 0])
            np.testing.assert_array_equal(m(np.array(True), X, np.array(False)), -X)
            np.testing.assert_array_equal(m(np.array(False), X, np.array(False)), X)


def test_a_captured_value_named_like_an_input_of_the_body() -> None:
    """Names are labels: the body's own `x` and the `x` around it are two values."""
    outer, own, t = f32("x", 2), f32("x", 2), Value("t")
    turn, cond, still, y = (
        Value("turn", TensorType(I64, ())),
        Value("cond", TensorType(BOOL, ())),
        Value("k"),
        Value("y"),
    )
    body = graph_of([turn, cond, own], [still, t], [node("Identity", [cond], [still]), node("Add", [own, outer], [t])])
    g = graph_of([outer], [y], [node("Loop", [scalar(2, np.int64), None, outer], [y], body=body)])
    np.testing.assert_array_equal(run(g, X)[0], 3 * X)


def test_sequences_and_optionals_go_through_control_flow() -> None:
    """A loop that collects its turns in a sequence, whose elements have different shapes."""
    turn, cond = Value("turn", TensorType(I64, ())), Value("cond", TensorType(BOOL, ()))
    seq, still, some, more = Value("seq", SequenceType(TensorType(F32))), Value("still"), Value("some"), Value("more")
    count, x = Value("count"), f32("x", 4)
    nodes = [
        node("Identity", [cond], [still]),
        node("Unsqueeze", [turn, ints(0)], [count]),
        node("Slice", [x, ints(0), count], [some]),
        node("SequenceInsert", [seq, some], [more]),
    ]
    body = graph_of([turn, cond, seq], [still, more], nodes)
    empty, collected, length, joined = Value("empty"), Value("collected"), Value("length"), Value("joined")
    outer = [
        node("SequenceEmpty", [], [empty]),
        node("Loop", [scalar(4, np.int64), None, empty], [collected], body=body),
        node("SequenceLength", [collected], [length]),
        node("ConcatFromSequence", [collected], [joined], axis=0),
    ]
    x4 = np.array([1, 2, 3, 4], np.float32)
    with fake_engine():
        for engine in ("host", "fake"):
            parts, n, whole = run(graph_of([x], [collected, length, joined], outer), x4, engine=engine)
            assert [p.tolist() for p in parts] == [[], [1], [1, 2], [1, 2, 3]]
            assert int(n) == 4
            assert whole.tolist() == [1, 1, 2, 1, 2, 3]
            assert not any(np.shares_memory(p, x4) for p in parts)


def test_sequence_map() -> None:
    """Over one sequence with a plain tensor beside it, over two, and over an empty one."""
    a, b, o = f32("a"), f32("b"), Value("o")
    body = graph_of([a, b], [o], [node("Add", [a, b], [o])])
    s = Value("s", SequenceType(TensorType(F32)))
    y = Value("y")
    beside = f32("x", 2)
    g = graph_of([s, beside], [y], [node("SequenceMap", [s, beside], [y], body=body)])
    m = XRTModule(g, engine="host")
    assert [e.tolist() for e in m([X, 2 * X], X)] == [[2, 4], [3, 6]]
    assert m([], X) == []
    g = graph_of([s], [y], [node("SequenceMap", [s, s], [y], body=body)])
    assert [e.tolist() for e in XRTModule(g, engine="host")([X])] == [[2, 4]]


def test_a_condition_without_a_value_names_the_node() -> None:
    """Whatever goes wrong in control flow says where."""
    x = f32("x", 2)
    g = choose(graph_of([], [x], []), graph_of([], [x], []), x)
    with pytest.raises(ExecutionError, match="node 'y': If failed"):
        run(g, np.zeros(0, bool), X)
