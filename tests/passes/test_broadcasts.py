"""Expands in front of elementwise operators: what goes, what stays, and that no number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xrt_core as xrt
from tests.random_graphs import F32, graph_of, node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.simplify import ImplicitBroadcasts


def expanded(
    op: str, x: tuple[Any, ...], to: tuple[Any, ...], other: tuple[Any, ...] | None, is_first: bool = False
) -> Graph:
    """`op` of the expanded `x` and `other`, or of it and itself; the result has the shape `to`."""
    target = Value.constant(np.array([d if isinstance(d, int) else 1 for d in to]), "target")
    small, large = Value("x", TensorType(F32, x)), Value("large", TensorType(F32, to))
    o, y = Value("o", TensorType(F32, other)) if other is not None else large, Value("y", TensorType(F32, to))
    inputs = [large, o] if is_first else [o, large]
    if op == "Where":
        inputs = [Value.constant(np.array(True), "c"), *inputs]
    given = [small] if other is None else [small, o]
    return graph_of(given, [y], [node("Expand", [small, target], [large]), node(op, inputs, [y])])


def reads_less(graph: Graph) -> bool:
    """Whether the second node reads what is expanded in the first one."""
    result = ImplicitBroadcasts()(graph)
    assert ImplicitBroadcasts()(result) is result
    assert result is graph or len(result.nodes) == len(graph.nodes)
    return graph.inputs[0] in result.nodes[1].inputs


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("op", ["Add", "Div", "Where", "Max"])
@pytest.mark.parametrize(
    ("x", "other"),
    [(("b", 4, 1), ("b", 4, 6)), ((4, 1), ("b", 4, 6)), ((), ("b", 4, 6)), (("b", 4, 1), (1, 1, 6))],
)
def test_the_other_operand_has_what_is_expanded(op: str, x: Any, other: Any, is_first: bool) -> None:
    """In each dimension in which the two differ."""
    assert reads_less(expanded(op, x, ("b", 4, 6), other, is_first))


@pytest.mark.parametrize("other", [("b", 4, 1), (4, 1), ("n", 4, 1), ()])
def test_an_expand_that_makes_the_shape_stays(other: Any) -> None:
    """Nothing else has the size of the result, or its rank."""
    assert not reads_less(expanded("Mul", ("b", 1, 1), ("b", 4, 6), other))
    assert not reads_less(expanded("Mul", (), (1, 1), other[:0]))
    assert not reads_less(expanded("Mul", (1,), (1, 1, 1), (1, 1)))
    assert reads_less(expanded("Mul", (1,), (1, 1, 1), (1, 1, 1)))


def test_what_is_not_elementwise_stays() -> None:
    """Shapes that are not known, operators of the first opsets, products, and the operand of PRelu that is no slope."""
    full = (2, 3, 4)
    assert not reads_less(expanded("Add", (3, 1), (2, None, 4), full))
    assert not reads_less(expanded("CastLike", (3, 1), full, full, is_first=True))
    assert not reads_less(expanded("PRelu", (3, 1), full, full, is_first=True))
    assert reads_less(expanded("PRelu", (3, 1), full, full))
    g = expanded("Add", (3, 1), full, full)
    assert not reads_less(g.replace(nodes=[g.nodes[0], Node("Add", g.nodes[1].inputs, g.nodes[1].outputs, version=6)]))
    square = ImplicitBroadcasts()(expanded("Mul", (3, 1), full, None))  # one of the two operands has to be large
    assert [v.name for v in square.nodes[1].inputs] == ["x", "large"]


@given(st.lists(st.integers(1, 3), max_size=4), st.data())
def test_no_result_changes_its_shape(to: list[int], data: st.DataObject) -> None:
    """Whatever is expanded to whatever, and whatever the other operand has."""

    def part(shape: list[int]) -> tuple[int, ...]:
        kept = shape[data.draw(st.integers(0, len(shape))) :]
        return tuple(1 if data.draw(st.booleans()) else d for d in kept)

    x, other = part(to), part([*data.draw(st.lists(st.integers(1, 3), max_size=1)), *to])
    result = np.broadcast_shapes(tuple(to), other)
    g = expanded("Add", x, tuple(to), other)
    y = Value("y", TensorType(F32, result))
    g = graph_of(g.inputs, [y], [g.nodes[0], g.nodes[1].replace(outputs=[y])])
    read = [v.shape for v in ImplicitBroadcasts()(g).nodes[1].inputs if v is not None]
    assert np.broadcast_shapes(*read) == result  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["host", "openvino"])
def test_a_norm_of_any_batch_is_one_cluster(engine: str) -> None:
    """x / norm(x).expand_as(x): the arithmetic of the shape goes with the Expand."""
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [
        make("ReduceL2", ["x", "axes"], ["norm"], keepdims=1),
        make("Shape", ["x"], ["shape"]),
        make("Expand", ["norm", "shape"], ["large"]),
        make("Div", ["x", "large"], ["y"]),
    ]
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    ends = [info(n, onnx.TensorProto.FLOAT, ["batch", 6]) for n in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], [axes])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    with xrt.XRTModule(model, engine=engine, guard=False, minimum_nodes=1) as m:
        for batch in (3, 5, 1):
            x = np.random.default_rng(batch).standard_normal((batch, 6)).astype(F32)
            np.testing.assert_allclose(m(x), x / np.linalg.norm(x, axis=1, keepdims=True), rtol=1e-6)
        if engine != "host":
            assert "clusters: 1 on openvino; 100% of nodes" in str(m.explain())
