"""Order, reachability and convexity over a graph's integer adjacency."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dag import ancestors, descendants
from tests.ir.random_graphs import graphs, node
from tests.profiles import examples
from xrt_core.errors import GraphError
from xrt_core.ir import dag
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

X = Value("x", TensorType(np.dtype(np.float32), (2,)))


def chain(edges: dict[int, list[int]], count: int) -> Graph:
    """A graph of `count` Sum nodes where node i reads the nodes edges[i] (or the input)."""
    values = [Value(f"v{i}") for i in range(count)]
    nodes = [node("Sum", [values[j] for j in edges.get(i, [])] or [X], [values[i]]) for i in range(count)]
    return Graph([X], [values[-1]], nodes, opsets={"": 18})


DIAMOND = chain({1: [0], 2: [0], 3: [1, 2], 4: [3]}, 5)


def test_sorted_nodes_keep_their_order() -> None:
    """Sorting what is in order changes nothing."""
    assert dag.topological_sort(DIAMOND.nodes) == DIAMOND.nodes


def test_a_late_producer_moves_before_its_consumer() -> None:
    """Only what is out of order moves."""
    a, b, c = DIAMOND.nodes[:3]

    assert dag.topological_sort([b, a, c]) == (a, b, c)


@examples(40)
@given(graphs(), st.randoms())
def test_any_shuffle_can_be_sorted(graph: Graph, random: object) -> None:
    """Shuffled nodes come out in a topological order, subgraphs' captures respected, nothing lost."""
    nodes = list(graph.nodes)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    result = graph.replace(nodes=dag.topological_sort(nodes))

    assert all(p < i for i, predecessors in enumerate(result.predecessors) for p in predecessors)
    assert set(result.nodes) == set(graph.nodes)


def test_a_cycle_is_named() -> None:
    """The error tells the nodes on the cycle, and not the others."""
    a, b, c = Value("a"), Value("b"), Value("c")
    nodes = [
        Node("Relu", [X], [c], version=14, name="free"),
        Node("Add", [c, b], [a], version=14, name="first"),
        Node("Relu", [a], [b], version=14, name="second"),
    ]
    with pytest.raises(
        GraphError, match="cycle of 2 nodes: .*(first -> second -> first|second -> first -> second)"
    ) as e:
        dag.topological_sort(nodes)
    assert "free" not in str(e.value)


def test_a_value_made_twice_is_named() -> None:
    """Two producers of one value are an error that names it."""
    v = Value("twice")
    with pytest.raises(GraphError, match="'twice' is made twice"):
        dag.topological_sort([node("Relu", [X], [v]), node("Neg", [X], [v])])


def test_a_long_chain_needs_no_recursion() -> None:
    """Depth is no limit: 20 000 nodes in reverse order."""
    graph = chain({i: [i - 1] for i in range(1, 20_000)}, 20_000)

    assert dag.topological_sort(graph.nodes[::-1]) == graph.nodes


def test_reachability() -> None:
    """Paths of the diamond."""
    assert dag.reaches(DIAMOND, 0, 4)
    assert not dag.reaches(DIAMOND, 1, 2)
    assert not dag.reaches(DIAMOND, 4, 0)


def test_convexity() -> None:
    """A set with a path that leaves it and comes back is not convex; the nodes on that path are told."""
    assert dag.leaving_nodes(DIAMOND, [0, 1, 2, 3]) == []
    assert dag.leaving_nodes(DIAMOND, [1, 2]) == []
    assert dag.leaving_nodes(DIAMOND, []) == []
    assert dag.leaving_nodes(DIAMOND, {0, 1, 3}) == [2]
    assert dag.leaving_nodes(DIAMOND, {0, 4}) == [1, 2, 3]


@examples(60)
@given(graphs(minimum=3), st.data())
def test_convexity_agrees_with_its_definition(graph: Graph, data: st.DataObject) -> None:
    """For random sets: convex exactly where no outside node lies between two inside ones."""
    count = len(graph.nodes)
    chosen = data.draw(st.sets(st.integers(0, count - 1)))
    between = {
        i
        for i in set(range(count)) - chosen
        if ancestors(graph, [i]) & chosen and descendants(graph, [i]) & chosen
    }

    assert set(dag.leaving_nodes(graph, chosen)) == between
