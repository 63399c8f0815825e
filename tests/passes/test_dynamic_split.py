"""What waits for shapes that depend on data, and which inputs belong to the signature by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.random_graphs import BOOL, F32, I64, graph_of, ints, node
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import OPEN_REGION, Graph, Node, Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.kernels import static_inputs
from xrt_core.passes.data_dependent_shapes import SplitLate, is_late
from xrt_core.passes.shape_specialization import shape_inputs, specialise

SPLIT = SplitLate(static_inputs)


def split(graph: Graph) -> tuple[list[str], list[str]]:
    """Operators before the Late node, and inside it; splitting again changes nothing."""
    typed = specialise(graph, [v.type for v in graph.inputs], {}, run_node)
    result = SPLIT(typed)
    assert SPLIT(result) is result
    late = [n for n in result.nodes if is_late(n)]
    if not late:
        assert result is typed
        return [n.op_type for n in result.nodes], []
    assert result.nodes[-1] is late[0]
    body = late[0].attributes["body"]
    assert isinstance(body, Graph)
    assert not body.captures
    return [n.op_type for n in result.nodes[:-1]], [n.op_type for n in body.nodes]


def x_of(*shape: Any) -> Value:
    return Value("x", TensorType(F32, shape))


def test_readers_of_unknown_shapes_wait() -> None:
    """Case 1 and 3: what NonZero makes is known at run time; its readers wait, and theirs."""
    x, i, t, u, y = x_of(2, 3), Value("i"), Value("t"), Value("u"), Value("y")
    nodes = [
        node("NonZero", [x], [i]),
        node("Relu", [x], [u]),
        node("Transpose", [i], [t]),
        node("GatherND", [u, t], [y]),
    ]
    assert split(graph_of([x], [y, u], nodes)) == (["NonZero", "Relu"], ["Transpose", "GatherND"])


def test_an_input_that_must_be_known_is_waited_for() -> None:
    """Case 2: the target of a Reshape that is computed from data."""
    x, n, t, y = x_of(4), Value("n"), Value("t"), Value("y")
    nodes = [
        node("Abs", [x], [n]),
        node("Cast", [n], [t], to=7),
        node("Reshape", [x, t], [y]),
    ]
    assert split(graph_of([x], [y], nodes)) == (["Abs", "Cast"], ["Reshape"])


def test_left_alone_is_what_has_nothing_to_wait_for() -> None:
    """Case 4: a static graph; unknown inputs of the graph itself; sequences; an unknown value that only leaves."""
    x, y, z = x_of(2), Value("y"), Value("z")
    assert split(graph_of([x], [y], [node("Relu", [x], [y])])) == (["Relu"], [])
    unknown = x_of("n")
    assert split(graph_of([unknown], [y], [node("Relu", [unknown], [y])])) == (["Relu"], [])
    s = Value("s", SequenceType(TensorType(F32, (2,))))
    nodes = [node("SequenceConstruct", [x], [y]), node("SequenceLength", [y], [z])]
    assert split(graph_of([x, s], [z], nodes))[1] == []
    assert split(graph_of([x], [y], [node("NonZero", [x], [y])])) == (["NonZero"], [])


def test_captures_of_a_waiting_control_flow_become_inputs() -> None:
    """An If that waits takes what its branches use along."""
    x, i, s, y = x_of(3), Value("i"), Value("s"), Value("y")
    flag = Value("flag", TensorType(BOOL, ()))
    outs = [Value("a"), Value("b")]
    t, e = (graph_of([], [o], [node(op, [s], [o])]) for o, op in zip(outs, ("Neg", "Abs"), strict=True))
    nodes = [
        node("NonZero", [x], [i]),
        node("Cast", [i], [s], to=1),
        node("If", [flag], [y], then_branch=t, else_branch=e),
    ]
    assert split(graph_of([x, flag], [y], nodes)) == (["NonZero"], ["Cast", "If"])


def by_value(inputs: list[Value], nodes: list[Node]) -> list[str]:
    last = nodes[-1].outputs[0]
    assert last is not None
    g = graph_of(inputs, [last], nodes)
    return [inputs[i].name for i in shape_inputs(g, static_inputs)]


def vector(name: str, dtype: Any = I64) -> Value:
    return Value(name, TensorType(np.dtype(dtype), (2,)))


def test_a_shape_is_traced_to_the_inputs() -> None:
    """Directly, and through arithmetic; data inputs are not taken."""
    x, shape, y = x_of(6), vector("shape"), Value("y")
    assert by_value([x, shape], [node("Reshape", [x, shape], [y])]) == ["shape"]
    a, b = Value("a"), Value("b")
    nodes = [
        node("Mul", [shape, ints(2)], [a]),
        node("Concat", [a, ints(1)], [b], axis=0),
        node("Reshape", [x, b], [y]),
    ]
    assert by_value([x, shape], nodes) == ["shape"]


def test_a_shape_is_traced_through_gather_nd() -> None:
    """As through Gather: it moves elements; an operator of that name of another domain is unknown."""
    x, shape, a, y = x_of(6), vector("shape"), Value("a"), Value("y")
    reshape = node("Reshape", [x, a], [y])
    rows = Value.constant(np.array([[1], [0]], np.int64))
    assert by_value([x, shape], [node("GatherND", [shape, rows], [a]), reshape]) == ["shape"]
    assert by_value([x, shape], [Node("Gather", [shape, rows], [a], domain="com.example", version=1), reshape]) == []


def test_tracing_stops_at_what_is_no_arithmetic() -> None:
    """A shape that comes out of a reduction over data through NonZero is not an input's value."""
    x, i, y = x_of(6), Value("i"), Value("y")
    assert by_value([x], [node("NonZero", [x], [i]), node("Reshape", [x, i], [y])]) == []
    s = Value("s")
    assert by_value([x], [node("Shape", [x], [s]), node("Reshape", [x, s], [y])]) == []


def test_conditions_count_unless_they_are_data() -> None:
    """A flag that chooses a branch belongs to the signature; floats that are compared do not."""
    x, y, c, t = x_of(2), Value("y"), Value("c"), Value("t")
    flag = Value("flag", TensorType(BOOL, ()))
    outs = [Value("a"), Value("b")]
    then, other = (graph_of([], [o], [node(op, [x], [o])]) for o, op in zip(outs, ("Neg", "Abs"), strict=True))
    choose = {"then_branch": then, "else_branch": other}
    assert by_value([x, flag], [node("Not", [flag], [c]), node("If", [c], [y], **choose)]) == ["flag"]
    zero = Value.constant(np.float32(0).reshape(()))
    nodes = [node("ReduceSum", [x], [t], keepdims=0), node("Greater", [t, zero], [c]), node("If", [c], [y], **choose)]
    assert by_value([x], nodes) == []


def test_what_subgraphs_need_is_looked_for() -> None:
    """A captured shape inside a branch counts."""
    x, shape, y, o = x_of(6), vector("shape"), Value("y"), Value("o")
    flag = Value("flag", TensorType(BOOL, ()))
    branch = graph_of([], [o], [node("Reshape", [x, shape], [o])])
    assert by_value([x, shape, flag], [node("If", [flag], [y], then_branch=branch, else_branch=branch)]) == [
        "shape",
        "flag",
    ]


# --- the region of an engine that takes data-dependent shapes ---


def region(graph: Graph, refused: str = "") -> tuple[list[str], list[str], list[str]]:
    """Operators of the region, of the other nodes, and of the Late node, for an engine that takes all but `refused`."""

    def taken(graph: Graph, nodes: Sequence[Node]) -> tuple[str, list[Node]]:
        return "opened", [n for n in nodes if n.op_type != refused]

    typed = specialise(graph, [v.type for v in graph.inputs], {}, run_node)
    pass_ = SplitLate(static_inputs, taken=taken)
    result = pass_(typed)
    assert pass_(result) is result
    inside = [n for n in result.nodes if n.annotations.region == OPEN_REGION]
    assert {n.annotations.engine for n in inside} <= {"opened"}
    late = [n.attributes["body"] for n in result.nodes if is_late(n)]
    waiting = [n.op_type for g in late for n in g.nodes]  # type: ignore[union-attr]
    others = [n.op_type for n in result.nodes if n not in inside and not is_late(n)]
    return [n.op_type for n in inside], others, waiting


def selection(*between: str) -> Graph:
    """x [3, 4] -> Relu -> the operators between -> its elements that are not zero, negated."""
    x, u, i, t, g, y = x_of(4, 4), Value("u"), Value("i"), Value("t"), Value("g"), Value("y")
    nodes = [node("Relu", [x], [u])]
    for k, op in enumerate(between):
        after = Value(f"u{k}")
        nodes.append(node(op, [u, x] if op == "MatMul" else [u], [after]))
        u = after
    nodes += [
        node("NonZero", [u], [i]),
        node("Transpose", [i], [t]),
        node("GatherND", [u, t], [g]),
        node("Neg", [g], [y]),
    ]
    return graph_of([x], [y], nodes)


def test_all_that_the_engine_takes_is_one_region() -> None:
    """Without contractions, with what comes before: one launch."""
    whole = ["Relu", "NonZero", "Transpose", "GatherND", "Neg"]
    assert region(selection()) == (whole, [], [])


def test_contractions_stay_outside() -> None:
    """So do the nodes before them, which other engines may take as well; what is read of them has known shapes."""
    assert region(selection("MatMul")) == (["NonZero", "Transpose", "GatherND", "Neg"], ["Relu", "MatMul"], [])


def test_what_the_engine_refuses_waits_with_all_that_follows() -> None:
    """The region has the nodes before it."""
    found = region(selection("MatMul"), refused="GatherND")
    assert found == (["NonZero", "Transpose"], ["Relu", "MatMul"], ["GatherND", "Neg"])
    none = region(selection("MatMul"), refused="NonZero")
    assert none == ([], ["Relu", "MatMul", "NonZero"], ["Transpose", "GatherND", "Neg"])


def test_a_contraction_of_selected_rows_waits() -> None:
    """Its shapes are known by then, so that any engine may take it."""
    x, i, f, m, y = x_of(3, 4), Value("i"), Value("f"), Value("m"), Value("y")
    nodes = [
        node("NonZero", [x], [i]),
        node("Cast", [i], [f], to=1),
        node("MatMul", [Value.constant(np.ones((2, 2), np.float32)), f], [m]),
        node("Relu", [m], [y]),
    ]
    assert region(graph_of([x], [y], nodes)) == (["NonZero", "Cast"], [], ["MatMul", "Relu"])


def test_little_work_is_no_region() -> None:
    """A launch would take longer than the host does."""
    x, n, t, y = x_of(4), Value("n"), Value("t"), Value("y")
    nodes = [node("Abs", [x], [n]), node("Cast", [n], [t], to=7), node("Reshape", [x, t], [y])]
    assert region(graph_of([x], [y], nodes)) == ([], ["Abs", "Cast"], ["Reshape"])


def test_a_product_of_a_whole_shape_is_its_size() -> None:
    """In a graph without symbols as well: engines compute a Size in all its bits."""
    x, i, s, y = x_of(3, 4), Value("i"), Value("s"), Value("y")
    nodes = [node("NonZero", [x], [i]), node("Shape", [i], [s]), node("ReduceProd", [s], [y], keepdims=0)]
    made = specialise(graph_of([x], [y], nodes), [x.type], {}, run_node)
    assert [n.op_type for n in made.nodes if n.outputs[0] in made.outputs] == ["Size"]
