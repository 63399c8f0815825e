"""Common subexpressions and dead nodes: every case of the docstrings, and what the passes must leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.random_graphs import F32, graph_of, node
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.simplify import CommonSubexpressions, DeadNodes

X = Value("x", TensorType(F32, (2,)))


def pair(first: Node, second: Node) -> int:
    """How many of the two nodes are left, both being outputs."""
    g = graph_of([X], [first.outputs[0], second.outputs[0]], [first, second])  # type: ignore[list-item]
    result = CommonSubexpressions()(g)
    assert CommonSubexpressions()(result) is result
    if len(result.nodes) == 1:
        assert result.outputs == (first.outputs[0],) * 2
    else:
        assert result is g
    return len(result.nodes)


def of(op: str, *inputs: Value | None, **attributes: Any) -> Node:
    return node(op, inputs, [Value("", TensorType(F32, (2,)))], **attributes)


def constant(*values: float, dtype: Any = np.float32) -> Value:
    return Value.constant(np.array(values, dtype))


def test_equal_nodes_become_one() -> None:
    """Case 1, and those that become equal by it."""
    assert pair(of("Relu", X), of("Relu", X)) == 1
    a, b = of("Relu", X), of("Relu", X)
    c, d = of("Neg", a.outputs[0]), of("Neg", b.outputs[0])
    g = graph_of([X], [c.outputs[0], d.outputs[0]], [a, b, c, d])  # type: ignore[list-item]
    result = CommonSubexpressions()(g)
    assert [n.op_type for n in result.nodes] == ["Relu", "Neg"]
    assert result.outputs == (c.outputs[0],) * 2


def test_either_order_of_a_commutative_operator() -> None:
    """Case 3: two operands, constants as well; with three, the order of additions shows in the rounding."""
    one = constant(1, 2)
    assert pair(of("Add", X, one), of("Add", constant(1, 2), X)) == 1
    assert pair(of("Max", X, one), of("Max", one, X)) == 1
    assert pair(of("Div", X, one), of("Div", one, X)) == 2
    assert pair(of("Sum", X, one, one), of("Sum", one, one, X)) == 2


def test_updates_of_variables_stay() -> None:
    """Each writes a variable of its own."""
    first, second = (Node("Assign", [X, X], [Value("", X.type)], domain="xrt", version=1) for _ in range(2))
    assert pair(first, second) == 2


def test_what_differs_in_anything_stays() -> None:
    """Operator, operand order, attribute, version, engine mark, wanted outputs."""
    one, two = constant(1, 2), constant(3, 4)
    assert pair(of("Relu", X), of("Neg", X)) == 2
    assert pair(of("Sub", X, one), of("Sub", one, X)) == 2
    assert pair(of("Sub", X, one), of("Sub", X, two)) == 2
    assert pair(of("LeakyRelu", X, alpha=0.5), of("LeakyRelu", X, alpha=0.25)) == 2
    assert pair(of("LeakyRelu", X, alpha=0.0), of("LeakyRelu", X, alpha=-0.0)) == 2
    assert pair(of("Softmax", X), Node("Softmax", [X], [Value()], version=11)) == 2
    marked = of("Relu", X).replace(annotations=Annotations(engine="xla"))
    assert pair(of("Relu", X), marked) == 2
    masked = node("Dropout", [X], [Value("y"), Value("mask")])
    assert pair(of("Dropout", X), masked) == 2


def test_small_equal_constants_count_as_the_same() -> None:
    """Case 2: by dtype, shape and contents; zeros of both signs differ; large ones count by identity."""
    assert pair(of("Add", X, constant(1, 2)), of("Add", X, constant(1, 2))) == 1
    assert pair(of("Add", X, constant(0)), of("Add", X, constant(-0.0))) == 2
    assert pair(of("Add", X, constant(1)), of("Add", X, Value.constant(np.float32(1).reshape(())))) == 2
    assert pair(of("Equal", X, constant(0)), of("Equal", X, constant(0, dtype=np.int32))) == 2
    large = np.zeros(4096, np.float32)
    assert pair(of("Add", X, Value.constant(large)), of("Add", X, Value.constant(large.copy()))) == 2
    assert pair(of("Add", X, Value.constant(large)), of("Add", X, Value.constant(large))) == 1


def test_left_alone_are_draws_updates_and_control_flow() -> None:
    """Case 3; draws with a seed are equal and may be one."""
    assert pair(of("RandomNormalLike", X), of("RandomNormalLike", X)) == 2
    assert pair(of("RandomNormalLike", X, seed=1.0), of("RandomNormalLike", X, seed=1.0)) == 1
    update = Annotations(model_update=True)
    assert pair(of("Relu", X).replace(annotations=update), of("Relu", X).replace(annotations=update)) == 2

    def branch() -> Graph:
        y = Value("y")
        return graph_of([], [y], [node("Relu", [X], [y])])

    flag = Value.constant(np.array(True))
    ifs = [of("If", flag, then_branch=branch(), else_branch=branch()) for _ in range(2)]
    assert pair(*ifs) == 2


def test_dead_nodes_go_with_what_only_they_read() -> None:
    """Case 1: a chain that ends nowhere goes whole; the order of the rest stays."""
    a, b, c, d = of("Relu", X), of("Neg", X), of("Abs", X), of("Tanh", X)
    dead = of("Exp", b.outputs[0])
    g = graph_of([X], [d.outputs[0], a.outputs[0]], [a, b, dead, c, d])  # type: ignore[list-item]
    result = DeadNodes()(g)
    assert result.nodes == (a, d)
    assert DeadNodes()(result) is result


def test_nodes_read_in_part_or_by_a_subgraph_stay() -> None:
    """Case 2: one output of two, and a value that only a branch captures; unread inputs of the graph stay too."""
    y, mask = Value("y"), Value("mask")
    drop = node("Dropout", [X], [y, mask])
    captured = of("Relu", X)
    out = Value("o")
    branch = graph_of([], [out], [node("Neg", [captured.outputs[0]], [out])])
    choose = of("If", Value.constant(np.array(True)), then_branch=branch, else_branch=branch)
    unread = Value("unread", X.type)
    g = graph_of([X, unread], [mask, choose.outputs[0]], [drop, captured, choose])  # type: ignore[list-item]
    assert DeadNodes()(g) is g
