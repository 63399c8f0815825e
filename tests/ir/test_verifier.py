"""The verifier: each rule finds the graph that breaks it, at the stage that made it, and lets good graphs pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.ir.random_graphs import graphs, node
from tests.profiles import examples
from xrt_core.errors import GraphError
from xrt_core.ir.function import Function, launch
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import GRAPH_RULES, NODE_RULES, rules, verify

F32 = np.dtype(np.float32)
X = Value("x", TensorType(F32, (2,)))
Y = Value("y", TensorType(F32, (2,)))
FLAG = Value("flag", TensorType(np.dtype(np.bool_), ()))
OPSETS = {"": 18}


def one(n: Node, outputs: list[Value] | None = None, **more: Any) -> Graph:
    """A graph of one node."""
    return Graph([X], [Y] if outputs is None else outputs, [n], **{"opsets": OPSETS, "name": "g", **more})


def branch(body: Graph, other: Graph | None = None) -> Node:
    """An If with that body on both sides."""
    return node("If", [FLAG], [Value("z")], then_branch=body, else_branch=other or body)


def relu_function() -> Function:
    """relu: float32[2] -> float32[2]."""
    a, b = Value("a", TensorType(F32, (2,))), Value("b", TensorType(F32, (2,)))
    return Function.from_graph(Graph([a], [b], [node("Relu", [a], [b])], opsets=OPSETS), name="relu")


def _later() -> Graph:
    a = Value("a")
    return Graph([X], [Y], [node("Relu", [a], [Y]), node("Relu", [X], [a])], opsets=OPSETS)


def _leak() -> Graph:
    inner = Value("inner")
    body = Graph([], [inner], [node("Relu", [X], [inner])], opsets=OPSETS)
    return Graph([X, FLAG], [inner], [branch(body)], opsets=OPSETS)


W = Value.constant(np.ones(2, np.float32), "w")
WIDE = Value("wide", TensorType(F32, (3,)))
FALSELY = Value("typed", TensorType(F32, (3,)), np.ones(2, np.float32))
BAD: dict[str, tuple[str, Graph, str]] = {
    "unknown operator": ("operator", one(Node("Relo", [X], [Y], version=14)), "did you mean Relu"),
    "version in between": ("operator", one(Node("Softmax", [X], [Y], version=12)), "version 12"),
    "too many inputs": ("arity", one(node("Relu", [X, X], [Y])), "2 inputs"),
    "too few outputs": ("arity", one(node("Relu", [X], []), []), "0 outputs"),
    "unknown attribute": ("attributes", one(node("Relu", [X], [Y], alpha=1.0)), "no attribute 'alpha'"),
    "attribute of another kind": ("attributes", one(node("Softmax", [X], [Y], axis="a")), "kind int, not a str"),
    "list for a scalar": ("attributes", one(node("Softmax", [X], [Y], axis=(1,))), "kind int, not a tuple"),
    "missing attribute": ("attributes", one(node("Cast", [X], [Y])), "'to' is missing"),
    "dangling input": ("operands", one(node("Relu", [Value("lost")], [Y])), "'lost' is made by no node"),
    "used before made": ("operands", _later(), "'a' is made by a later node"),
    "falsely typed constant": ("operands", one(node("Add", [X, FALSELY], [Y])), r"typed float32\[3\]"),
    "dtype outside ONNX": (
        "operands", one(node("Add", [X, Value.constant(np.zeros(2, "M8[s]"), "t")], [Y])), "ONNX has not"
    ),
    "made twice": (
        "results", Graph([X], [Y], [node("Relu", [X], [Y]), node("Neg", [X], [Y])], opsets=OPSETS), "already defined"
    ),
    "output is the input": ("results", one(node("Relu", [X], [X]), [X]), "'x' is already defined"),
    "output is a constant": ("results", one(node("Relu", [X], [W]), [X]), "'w' is a constant"),
    "output listed twice": ("results", one(node("Dropout", [X], [Y, Y])), "listed twice"),
    "branch defines an outer value": ("results", Graph(
        [X, FLAG], [Y], [node("Relu", [X], [Y]), branch(one(node("Relu", [X], [Y])).replace(inputs=[]))], opsets=OPSETS
    ), "'y' is already defined"),
    "value of a branch used outside": ("outputs", _leak(), "'inner' is made by no node"),
    "output not made": ("outputs", Graph([X], [Y], [], opsets=OPSETS), "'y' is made by no node"),
    "input listed twice": ("inputs", Graph([X, X], [X], [], opsets=OPSETS), "'x' is already defined"),
    "input with data": ("inputs", Graph([W], [W], [], opsets=OPSETS), "'w' holds data"),
    "two inputs of a name": ("names", Graph([X, Value("x")], [X], [], opsets=OPSETS), "two inputs are named 'x'"),
    "default of no input": (
        "defaults", Graph([X], [X], [], opsets=OPSETS, defaults={Y: np.ones(2, np.float32)}), "'y' has a default"
    ),
    "default of another dtype": (
        "defaults", Graph([X], [X], [], opsets=OPSETS, defaults={X: np.ones(2)}), "its default float64"
    ),
    "domain not imported": ("opsets", one(node("Relu", [X], [Y]), opsets={}), "no opset is imported for"),
    "launch with too few inputs": ("launch", one(launch(relu_function(), "xla", [], [Y])), "0 inputs for function"),
    "launch of another type": (
        "launch", Graph([WIDE], [Y], [launch(relu_function(), "xla", [WIDE], [Y])], opsets=OPSETS),
        r"is float32\[3\], but",
    ),
    "launch without an engine": ("launch", one(launch(relu_function(), "", [X], [Y])), "engine is not named"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_graph_is_found(case: str) -> None:
    """The error names the stage, the rule and what is wrong."""
    rule, graph, message = BAD[case]
    with pytest.raises(GraphError, match=message) as e:
        verify(graph, "some stage")
    assert "stage 'some stage'" in str(e.value)
    assert f"breaks the rule {rule!r}" in str(e.value)


def test_every_rule_has_a_case() -> None:
    """No rule stands without a graph that breaks it."""
    assert {rule for rule, _, _ in BAD.values()} == {r.name for r in (*GRAPH_RULES, *NODE_RULES)}
    assert all(says for _, says in rules())


def test_a_function_inside_a_launch_is_checked() -> None:
    """A bad body is found through the Launch that holds it."""
    a, b = Value("a", TensorType(F32, (2,))), Value("b", TensorType(F32, (2,)))
    body = Graph([a], [b], [Node("Relo", [a], [b], version=14)], opsets=OPSETS, name="body")
    f = Function.from_graph(body, name="bad")
    with pytest.raises(GraphError, match="function 'body' breaks the rule 'operator'"):
        verify(one(launch(f, "xla", [X], [Y])), "fold")


def test_a_body_shared_by_two_nodes_is_fine() -> None:
    """One subgraph object may stand on both sides of an If."""
    inner = Value("inner")
    body = Graph([], [inner], [node("Relu", [X], [inner])], opsets=OPSETS)
    n = branch(body)
    verify(Graph([X, FLAG], [n.outputs[0]], [n], opsets=OPSETS), "captured")  # type: ignore[list-item]


@examples(60)
@given(graphs())
def test_random_good_graphs_pass(graph: Graph) -> None:
    """Nothing is found in a valid graph."""
    verify(graph, "captured")


def test_long_chains_are_verified() -> None:
    """Depth costs no recursion: a chain of 20 000 nodes passes (benchmarks/ir.py measures the time)."""
    values = [X, *(Value(f"v{i}") for i in range(20_000))]
    nodes = [node("Relu", [a], [b]) for a, b in pairwise(values)]
    verify(Graph([X], [values[-1]], nodes, opsets=OPSETS), "captured")
    with pytest.raises(GraphError):
        verify(Graph([X], [values[-1]], nodes[::-1], opsets=OPSETS), "captured")
