"""Estimated FLOPs, and which nodes may be evaluated ahead of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import ExecutionError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import is_deterministic
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.passes.simplify import evaluate, last_uses


def of(*shape: Any) -> Value:
    return Value("v", TensorType(F32, shape))


@pytest.mark.parametrize(
    ("op", "inputs", "out", "attributes", "wanted"),
    [
        ("MatMul", [of(2, 3), of(3, 4)], of(2, 4), {}, 2 * 2 * 3 * 4),
        ("Gemm", [of(3, 2), of(3, 4)], of(2, 4), {"transA": 1}, 2 * 2 * 3 * 4),
        ("Conv", [of(1, 2, 8, 8), of(4, 2, 3, 3)], of(1, 4, 6, 6), {}, 2 * 4 * 36 * 2 * 9),
        ("ConvTranspose", [of(1, 2, 4, 4), of(2, 3, 2, 2)], of(1, 3, 5, 5), {}, 2 * 2 * 16 * 3 * 4),
        ("LSTM", [of(5, 2, 3), of(1, 16, 3), of(1, 16, 4)], of(5, 1, 2, 4), {"hidden_size": 4}, 2 * 10 * (48 + 64)),
        ("ReduceSum", [of(2, 3)], of(2), {}, 6),
        ("Add", [of(3), of(2, 3)], of(2, 3), {}, 6),
        ("Transpose", [of(2, 3)], of(3, 2), {}, 0),
        ("Trilu", [of(3, 3)], of(3, 3), {}, 0),
        ("NonZero", [of(2, 3)], of(2, None), {}, 6),
        ("MatMul", [of("n", "k"), of("k", 4)], of("n", 4), {}, 0),
    ],
)
def test_estimates(op: str, inputs: list[Value], out: Value, attributes: dict[str, Any], wanted: int) -> None:
    """Two per multiply-add, one per element, nothing for what moves data or is not known."""
    n = node(op, inputs, [out], **attributes)
    assert flops(n) == wanted


def test_what_draws_is_not_deterministic() -> None:
    """Unless it has a seed, or is a Dropout that is off."""
    x, on, off = of(2), Value.constant(np.array(True)), Value.constant(np.array(False))
    y = Value("y")
    assert not is_deterministic(node("RandomUniform", [], [y], shape=(2,)))
    assert is_deterministic(node("RandomUniform", [], [y], shape=(2,), seed=0.0))
    assert is_deterministic(node("Dropout", [x], [y]))
    assert is_deterministic(node("Dropout", [x, None, off], [y]))
    assert not is_deterministic(node("Dropout", [x, None, on], [y]))
    assert not is_deterministic(node("Dropout", [x, None, of()], [y]))
    body = graph_of([], [y], [node("Bernoulli", [x], [y])])
    assert not is_deterministic(node("If", [on], [Value()], then_branch=body, else_branch=body))


def test_updates_of_variables_are_left() -> None:
    """A variable is written in the run, not when the graph is compiled."""
    x = Value.constant(np.ones(2, F32))
    update = Node("Assign", [x, x], [Value("", x.type)], domain="xrt", version=1)

    assert evaluate(update, [x.type], run_node) is None
    assert evaluate(node("Add", [x, x], [Value("", x.type)]), [x.type], run_node) is not None


def test_other_domains_count_elements() -> None:
    """An operator that has but the name of one of the standard's is not taken for it."""
    t = TensorType(F32, (3,))
    assert flops(Node("ConvInteger", [Value("x", t)], [Value("y", t)], domain="f", version=1)) == 3


def test_a_node_that_fails_is_left() -> None:
    """The run says what is wrong, with the caller there."""

    def fails(*_: Any) -> Any:
        raise ExecutionError("no")

    assert evaluate(node("Relu", [Value.constant(np.ones(2))], [Value()]), [None], fails) is None


def test_values_read_once() -> None:
    """Reads by nodes, outputs and subgraphs count; one node that reads twice counts twice."""
    a, b, c, d = (Value(n) for n in "abcd")
    inner = Value("i")
    body = graph_of([], [inner], [node("Relu", [c], [inner])])
    nodes = [
        node("Add", [a, b], [Value()]),
        node("Mul", [b, b], [Value()]),
        node("If", [Value.constant(np.array(True))], [Value()], then_branch=body, else_branch=body),
    ]
    found = last_uses(graph_of([a, b, c, d], [d], nodes))
    assert {a, d} <= found
    assert not {b, c} & found
