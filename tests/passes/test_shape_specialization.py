"""Specialising for a signature: what folds, which branches go, and the types of control flow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.host_run import assert_same, run_graph
from tests.random_graphs import BOOL, F32, I64, graph_of, ints, node
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import SequenceType, TensorType, ValueType
from xrt_core.ir.verifier import verify
from xrt_core.passes.shape_specialization import specialise


def f32(*shape: Any) -> TensorType:
    return TensorType(F32, shape)


def run(graph: Graph, *types: ValueType | None, **known: np.ndarray) -> Graph:
    """The specialised and verified graph; `known` by input name."""
    index = {v.name: i for i, v in enumerate(graph.inputs)}
    made = specialise(graph, types or [v.type for v in graph.inputs], {index[k]: a for k, a in known.items()}, run_node)
    verify(made, "specialise")
    return made


def scalar(value: Any, dtype: Any = np.float32) -> Value:
    return Value.constant(np.array(value, dtype))


def test_shape_arithmetic_folds() -> None:
    """Shape, Gather, Mul and Concat of a known shape leave the Reshape alone, with a constant target."""
    x, y = Value("x", f32("n", "m")), Value("y")
    s, n, t = Value("s"), Value("n"), Value("t")
    nodes = [
        node("Shape", [x], [s]),
        node("Gather", [s, ints(0)], [n]),
        node("Concat", [n, ints(-1)], [t], axis=0),
        node("Reshape", [x, t], [y]),
    ]
    made = run(graph_of([x], [y, s], nodes), f32(4, 6))
    assert [m.op_type for m in made.nodes] == ["Reshape"]
    assert made.outputs[0].type == f32(4, 6)
    np.testing.assert_array_equal(made.outputs[1].data, [4, 6])


@pytest.mark.parametrize(
    ("op", "attributes", "wanted"),
    [
        ("Shape", {}, [2, 3, 4]),
        ("Shape", {"start": 1}, [3, 4]),
        ("Shape", {"start": -2, "end": -1}, [3]),
        ("Shape", {"end": 99}, [2, 3, 4]),
        ("Shape", {"start": 3}, []),
        ("Size", {}, 24),
    ],
)
def test_shape_and_size_of_a_known_shape_are_constants(op: str, attributes: dict[str, int], wanted: Any) -> None:
    """With ONNX's clamping of start and end, and dtype int64."""
    x, y = Value("x", f32(2, 3, 4)), Value("y")
    out = run(graph_of([x], [y], [node(op, [x], [y], **attributes)])).outputs[0]
    assert out.data is not None
    assert out.data.dtype == I64
    np.testing.assert_array_equal(out.data, wanted)


def test_a_known_input_folds_through() -> None:
    """An input whose value belongs to the signature is a constant inside, and stays an input."""
    x, shape, y = Value("x", f32(6)), Value("shape", TensorType(I64, (2,))), Value("y")
    g = graph_of([x, shape], [y], [node("Reshape", [x, shape], [y])])
    made = run(g, shape=np.array([2, 3]))
    assert made.outputs[0].type == f32(2, 3)
    assert [v.name for v in made.inputs] == ["x", "shape"]
    assert run(g).outputs[0].shape in (None, (None, None))


def branches(then: float, other: float, x: Value, name: str = "y") -> dict[str, Graph]:
    made = {}
    for key, c in (("then_branch", then), ("else_branch", other)):
        out = Value(name)
        made[key] = graph_of([], [out], [node("Add", [x, scalar(c)], [out])])
    return made


@pytest.mark.parametrize("taken", [True, False])
def test_the_dead_branch_of_a_known_condition_goes(taken: bool) -> None:
    """Constant, computed from shapes, or given by value; the name of the result does not clash with the branch's."""
    x, y, z = Value("x", f32(2)), Value("y"), Value("z")
    nodes = [node("If", [scalar(taken, bool)], [y], **branches(1, 2, x)), node("Neg", [y], [z])]
    g = graph_of([x], [z], nodes)
    made = run(g)
    assert [n.op_type for n in made.nodes] == ["Add", "Neg"]
    assert_same(run_graph(made, [np.ones(2, np.float32)]), run_graph(g, [np.ones(2, np.float32)]))

    flag = Value("flag", TensorType(BOOL, (1,)))
    g = graph_of([x, flag], [y], [node("If", [flag], [y], **branches(1, 2, x))])
    assert [n.op_type for n in run(g, flag=np.array([taken])).nodes] == ["Add"]
    assert [n.op_type for n in run(g).nodes] == ["If"]


def test_one_branch_object_may_stand_in_two_places() -> None:
    """A Graph object that two Ifs share is put in twice, each time with values of its own."""
    x, a, b, y = Value("x", f32(2)), Value("a"), Value("b"), Value("y")
    shared = branches(1, 2, x)
    yes = scalar(True, bool)
    nodes = [node("If", [yes], [a], **shared), node("If", [yes], [b], **shared), node("Mul", [a, b], [y])]
    made = run(graph_of([x], [y], nodes))
    assert [n.op_type for n in made.nodes] == ["Add", "Add", "Mul"]
    assert len(made.producers) == 3
    names = [v.name for n in made.nodes for v in n.outputs if v is not None]
    assert len(set(names)) == 3


def test_nested_ifs_go_inside_out() -> None:
    """Known conditions at both levels; the inner branch uses values of both levels around it."""
    x, y = Value("x", f32(2)), Value("y")
    mid, inner_out, outer_out = Value("mid"), Value("i"), Value("o")
    inner = graph_of([], [inner_out], [node("Mul", [mid, x], [inner_out])])
    outer = graph_of(
        [],
        [outer_out],
        [
            node("Neg", [x], [mid]),
            node(
                "If",
                [scalar(False, bool)],
                [outer_out],
                then_branch=branches(0, 0, mid)["then_branch"],
                else_branch=inner,
            ),
        ],
    )
    g = graph_of([x], [y], [node("If", [scalar(True, bool)], [y], then_branch=outer, else_branch=inner_free(x))])
    made = run(g)
    assert [n.op_type for n in made.nodes] == ["Neg", "Mul"]
    assert_same(run_graph(made, [np.arange(2, dtype=np.float32)]), [np.array([0, -1], np.float32)])


def inner_free(x: Value) -> Graph:
    return branches(5, 5, x)["then_branch"]


def test_an_unknown_if_has_what_both_branches_have() -> None:
    """Equal types, types that differ in one dimension, in rank, in dtype."""

    def typed(then: Value, other: Value) -> ValueType | None:
        flag, y = Value("flag", TensorType(BOOL, ())), Value("y")
        a, b = Value("a"), Value("b")
        t = graph_of([], [a], [node("Identity", [then], [a])])
        e = graph_of([], [b], [node("Identity", [other], [b])])
        g = graph_of([flag, then, other], [y], [node("If", [flag], [y], then_branch=t, else_branch=e)])
        return run(g).outputs[0].type

    assert typed(Value("p", f32(2, 3)), Value("q", f32(2, 3))) == f32(2, 3)
    assert typed(Value("p", f32(2, 3)), Value("q", f32(5, 3))) == f32(None, 3)
    assert typed(Value("p", f32(2, 3)), Value("q", f32(3))) == TensorType(F32)
    assert typed(Value("p", f32(2)), Value("q", TensorType(I64, (2,)))) == TensorType(None, (2,))
    sequences = [Value("p", SequenceType(f32(2))), Value("q", SequenceType(f32(3)))]
    assert typed(*sequences) == SequenceType(f32(None))


def loop(
    body_nodes: list[Node], states: list[Value], after: list[Value], given: list[Value], scans: list[Value]
) -> Graph:
    turn, go = Value("turn", TensorType(I64, ())), Value("go", TensorType(BOOL, ()))
    still = Value("still")
    body = graph_of([turn, go, *states], [still, *after, *scans], [node("Identity", [go], [still]), *body_nodes])
    outputs = [Value(f"out{i}") for i in range(len(after) + len(scans))]
    return graph_of(given, outputs, [node("Loop", [scalar(3, np.int64), None, *given], outputs, body=body)])


def test_a_loop_of_fixed_shapes_is_static_and_so_is_its_body() -> None:
    """The state keeps its shape; a scan output is as long as the limit says, where only that ends the loop."""
    s, t, x = Value("s"), Value("t"), Value("x", f32(2))
    made = run(loop([node("Neg", [s], [t])], [s], [t], [x], [t]))
    assert [v.type for v in made.outputs] == [f32(2), f32(3, 2)]
    (body,) = made.nodes[0].subgraphs
    assert [v.type for v in (*body.inputs[2:], *body.outputs[1:])] == [f32(2)] * 3
    limit = Value("limit", TensorType(I64, ()))
    (old,) = loop([node("Neg", [s], [t])], [s], [t], [x], [t]).nodes
    made = run(graph_of([x, limit], old.outputs, [old.replace(inputs=[limit, None, x])]))
    assert [v.type for v in made.outputs] == [f32(2), f32(None, 2)]


def test_a_loop_that_changes_a_shape_forgets_it() -> None:
    """A state that grows; its other dimensions are kept."""
    s, t, x = Value("s"), Value("t"), Value("x", f32(1, 3))
    made = run(loop([node("Concat", [s, s], [t], axis=0)], [s], [t], [x], []))
    assert made.outputs[0].type == f32(None, 3)


def test_a_change_travels_through_a_chain_of_states() -> None:
    """Each turn hands a shape on to the next state: the last of eight changes at the eighth turn, and is not static."""
    states = [Value(f"s{i}") for i in range(8)]
    given = [Value(f"x{i}", f32(1)) for i in range(8)]
    grown = Value("grown")
    made = run(
        loop([node("Concat", [states[0], states[0]], [grown], axis=0)], states, [grown, *states[:-1]], given, [])
    )
    assert {v.type for v in made.outputs} == {f32(None)}


def scan(shape: tuple[Any, ...], version_attributes: dict[str, Any]) -> Graph:
    s, e, t, o = Value("s"), Value("e"), Value("t"), Value("o")
    body = graph_of([s, e], [t, o], [node("Add", [s, e], [t]), node("Neg", [t], [o])])
    state, xs = Value("state", f32(2)), Value("xs", f32(*shape))
    outs = [Value("final"), Value("all")]
    n = node("Scan", [state, xs], outs, body=body, num_scan_inputs=1, **version_attributes)
    return graph_of([state, xs], outs, [n])


def test_scans_are_typed_along_their_axes() -> None:
    """Input and output axes, also negative ones; an unknown length stays unknown."""
    assert [v.type for v in run(scan((5, 2), {})).outputs] == [f32(2), f32(5, 2)]
    axes = {"scan_input_axes": (-1,), "scan_output_axes": (-1,)}
    assert [v.type for v in run(scan((2, 5), axes)).outputs] == [f32(2), f32(2, 5)]
    assert [v.type for v in run(scan(("n", 2), {})).outputs] == [f32(2), f32("n", 2)]


def test_bodies_that_do_not_fit_have_no_type() -> None:
    """Scan axes of a scalar, an operator that refuses its inputs: the run says what is wrong, not the walk."""
    assert run(scan((), {})).outputs[0].type is None
    s, t, x = Value("s"), Value("t"), Value("x", f32(2))
    made = run(loop([node("MatMul", [s, scalar(1)], [t])], [s], [t], [x], []))
    assert not made.outputs[0].is_static


def test_nodes_that_do_not_fit_keep_unknown_types() -> None:
    """And all that follows from them."""
    x, y, z = Value("x", f32(2, 3)), Value("y"), Value("z")
    made = run(graph_of([x], [z], [node("MatMul", [x, x], [y]), node("Relu", [y], [z])]))
    assert not made.outputs[0].is_static


def test_declared_types_give_way_to_inferred_ones() -> None:
    """Real files declare shapes that are wrong."""
    x, y = Value("x", f32(2, 3)), Value("y", f32(7, 7, 7))
    assert run(graph_of([x], [y], [node("Relu", [x], [y])])).outputs[0].type == f32(2, 3)


def test_what_is_known_but_large_stays_a_node() -> None:
    """The plan of one signature never holds a folded copy of a weight that the model holds already."""
    w = Value.constant(np.zeros((256, 256), np.float32))
    y = Value("y")
    g = graph_of([], [y], [node("Transpose", [w], [y])])
    assert len(run(g).nodes) == 1


def test_deep_nesting_ends() -> None:
    """Loops in loops, five deep: each body is typed, and the walk comes back."""
    graph: Graph | None = None
    for level in range(5):
        turn, go, s = Value(f"turn{level}"), Value(f"go{level}"), Value(f"s{level}")
        still, t = Value(f"still{level}"), Value(f"t{level}")
        if graph is None:
            inner = node("Neg", [s], [t])
        else:
            inner = node("Loop", [scalar(2, np.int64), None, s], [t], body=graph)
        graph = graph_of([turn, go, s], [still, t], [node("Identity", [go], [still]), inner])
    x, y = Value("x", f32(2)), Value("y")
    made = run(graph_of([x], [y], [node("Loop", [scalar(2, np.int64), None, x], [y], body=graph)]))
    assert made.outputs[0].type == f32(2)


def test_expanded_operators_take_their_place_twice() -> None:
    """A body given for a node is put in with its own values each time, also the same body."""
    x, a, b = Value("x", f32(2)), Value("a"), Value("b")
    i, m, o = Value("i"), Value("m"), Value("o")
    body = graph_of([i], [o], [node("Exp", [i], [m]), node("Neg", [m], [o])])
    g = graph_of([x], [b], [node("Celu", [x], [a]), node("Celu", [a], [b])])
    made = specialise(g, [x.type], {}, run_node, expand=lambda n: body if n.op_type == "Celu" else None)
    verify(made, "specialise")
    assert [n.op_type for n in made.nodes] == ["Exp", "Neg", "Exp", "Neg"]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
@pytest.mark.parametrize(
    ("version", "axes", "attributes"),
    [
        (13, None, {}),
        (13, None, {"axes": (0,), "keepdims": 0}),
        (18, None, {"keepdims": 0}),
        (18, ints(0), {}),
        (18, ints(-1), {"keepdims": 0, "noop_with_empty_axes": 1}),
        (18, None, {"noop_with_empty_axes": 1}),
    ],
    ids=str,
)
def test_products_of_few_integers(
    version: int, axes: Value | None, attributes: dict[str, Any], dtype: Any, count: int
) -> None:
    """Up to four integers, which are sizes mostly, are multiplied one with the next; with the same result."""
    x, y = Value("x", TensorType(np.dtype(dtype), (count,))), Value("y")
    if axes is not None:
        axes = Value.constant(np.reshape(axes.data, (1,)))  # type: ignore[arg-type]
    inputs = [x] if axes is None else [x, axes]
    graph = graph_of([x], [y], [Node("ReduceProd", inputs, [y], attributes, version=version, name="product")])
    made = run(graph)
    is_kept = count > 4 or dtype == np.float32 or (axes is None and bool(attributes.get("noop_with_empty_axes")))
    assert ([n.op_type for n in made.nodes] == ["ReduceProd"]) == is_kept
    given = [np.arange(2, 2 + count, dtype=dtype)]
    assert_same(run_graph(made, given), run_graph(graph, given))
