"""Constant folding: what becomes a constant, and what must not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tests.random_graphs import graph_of, ints, node
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import STRING
from xrt_core.passes.simplify import ConstantFold


def fold(graph: Graph, limit: int = 1024) -> Graph:
    """The folded graph, which folding again leaves as it is."""
    result = ConstantFold(run_node, limit)(graph)
    assert ConstantFold(run_node, limit)(result) is result
    return result


def chain(op: str, *inputs: Value | None, more: tuple[Value, ...] = (), **attributes: Any) -> Graph:
    """One node whose output is the graph's; `more` are outputs beside it."""
    y = Value("y")
    return graph_of([], [y, *more], [node(op, inputs, [y], **attributes)])


def array(*shape: int) -> Value:
    return Value.constant(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_small_results_become_constants() -> None:
    """Case 1, through a chain, and nodes without any input."""
    a, b = Value("a"), Value("b")
    g = graph_of([], [b], [node("Add", [array(3), array(3)], [a]), node("Neg", [a], [b])])
    result = fold(g)
    assert result.nodes == ()
    np.testing.assert_array_equal(result.outputs[0].data, [0, -2, -4])
    assert not result.outputs[0].data.flags.writeable  # type: ignore[union-attr]
    assert fold(chain("Constant", value=np.ones(2, np.float32))).nodes == ()


def test_large_weights_that_nobody_else_reads_are_folded() -> None:
    """Case 2: the transposed weight takes the place of the weight."""
    result = fold(chain("Transpose", array(64, 32)))
    assert result.nodes == ()
    assert result.outputs[0].shape == (32, 64)


def test_large_weights_that_someone_else_reads_stay() -> None:
    """Folding would hold the weight twice: read by another node, by an output, by a subgraph."""
    w = array(64, 32)
    for other in ("node", "output", "subgraph"):
        y, z = Value("y"), Value("z")
        nodes, outputs = [node("Transpose", [w], [y])], [y]
        if other == "node":
            x = Value("x")
            nodes.append(node("MatMul", [x, w], [z]))
            g = graph_of([x], [y, z], nodes)
        elif other == "output":
            g = graph_of([], [y, w], nodes)
        else:
            flag, inner = Value("flag"), Value("i")
            branch = graph_of([], [inner], [node("Relu", [w], [inner])])
            nodes.append(node("If", [flag], [z], then_branch=branch, else_branch=branch))
            g = graph_of([flag], [*outputs, z], nodes)
        assert fold(g) is g, other


def test_a_model_never_grows() -> None:
    """Results larger than the limit and their inputs stay nodes, whether their size is known before or not."""
    for g in (
        chain("Expand", array(1), ints(1000)),
        chain("Tile", array(10), ints(100)),
        chain("Range", *[Value.constant(np.array(v)) for v in (0, 10**9, 1)]),
        chain("ConstantOfShape", ints(10**5, 10**5)),
        chain("MatMul", array(100, 1), array(1, 100)),
        chain("Einsum", array(300), array(300), equation="i,j->ij"),
        chain("Resize", array(1, 1, 1, 1), None, None, ints(1, 1, 10**4, 10**4)),
        chain("Constant", value=np.zeros(1000, np.float32)),
    ):
        assert fold(g) is g


def test_draws_control_flow_and_failing_nodes_stay() -> None:
    """Case 3; a draw with a seed gives the same at every call and is folded."""
    g = chain("RandomNormal", shape=(2,))
    assert fold(g) is g
    assert fold(chain("RandomNormal", shape=(2,), seed=1.0)).nodes == ()
    y = Value("y")
    branch = graph_of([], [y], [node("Relu", [array(2)], [y])])
    g = chain("If", Value.constant(np.array(True)), then_branch=branch, else_branch=branch)
    assert fold(g) is g
    g = chain("Reshape", array(3), ints(2, 2))
    assert fold(g) is g
    g = chain("SequenceConstruct", array(3))
    assert fold(g) is g


def test_strings_are_folded() -> None:
    """Arrays of text are constants like others."""
    text = Value.constant(np.array(["a", "b"], dtype=object))
    result = fold(chain("Concat", text, text, axis=0))
    assert result.outputs[0].dtype == STRING
    assert list(result.outputs[0].data) == ["a", "b", "a", "b"]  # type: ignore[arg-type]


def test_text_is_counted_by_its_characters() -> None:
    """Concatenations that double a string stop at the limit, before the larger one is made."""
    made: list[int] = []

    def run(n: Node, arrays: Any) -> Any:
        results = run_node(n, arrays)
        made.extend(len(s) for r in results for s in r.flat)
        return results

    values = [Value.constant(np.array(["ab" * 16], STRING)), *(Value(f"s{i}") for i in range(40))]
    nodes = [Node("StringConcat", [a, a], [b], version=20) for a, b in itertools.pairwise(values)]
    result = ConstantFold(run, 1024)(Graph([], [values[-1]], nodes, opsets={"": 20}))
    assert max(made) == 1024
    assert len(result.nodes) == 40 - 5


def test_a_table_of_texts_is_counted_before_it_is_made() -> None:
    """Every string of a column with every one of a row: the product of their numbers, each as long as both."""
    column = Value.constant(np.array([["x" * 100]] * 32, STRING))
    row = Value.constant(np.array([["y" * 100] * 32], STRING))
    y = Value("y")
    g = Graph([], [y], [Node("StringConcat", [column, row], [y], version=20)], opsets={"": 20})
    assert len(fold(g, 32 * 32 * 8).nodes) == 1
    assert fold(g, 32 * 32 * 200).nodes == ()
