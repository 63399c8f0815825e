"""What holds for every pass on every graph, tried on random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.host_run import assert_same, run_graph
from tests.profiles import examples
from tests.random_graphs import RandomGraph, graphs
from xrt_core.errors import InternalError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.passes.pass_base import Pass, run_passes
from xrt_core.passes.shape_specialization import specialise
from xrt_core.passes.simplify import CommonSubexpressions, ConstantFold, DeadNodes, IdentityNodes

PASSES = [IdentityNodes(), CommonSubexpressions(), DeadNodes(), ConstantFold(run_node)]


def total_bytes(graph: Graph) -> int:
    """Bytes of the constants that a graph holds, each array once, subgraphs included."""
    found: dict[int, int] = {}

    def look(g: Graph) -> None:
        found.update((id(v.data), v.data.nbytes) for v in g.constants if v.data is not None)
        for n in g.nodes:
            for s in n.subgraphs:
                look(s)

    look(graph)
    return sum(found.values())


def typed(g: RandomGraph, known: bool = False) -> Graph:
    """The graph specialised for its arguments; `known`: with the values of all of them."""
    types = [TensorType(a.dtype, a.shape) for a in g.arrays]
    return specialise(g.graph, types, dict(enumerate(g.arrays)) if known else {}, run_node)


@pytest.mark.slow
@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
@examples(120)
@given(g=graphs())
def test_a_pass_keeps_results_and_is_idempotent(p: Pass, g: RandomGraph) -> None:
    """On the graph as it is and on the specialised one; the verifier agrees."""
    wanted = run_graph(g.graph, g.arrays)
    for graph in (g.graph, typed(g)):
        result = p(graph)
        verify(result, p.name)
        assert p(result) is result
        assert_same(run_graph(result, g.arrays), wanted)


@examples(150)
@given(graphs(symbolic=True))
def test_specialising_keeps_results(g: RandomGraph) -> None:
    """For the shapes alone, and for known values too: then a graph of small arrays folds away whole."""
    wanted = run_graph(g.graph, g.arrays)
    for known in (False, True):
        graph = typed(g, known)
        verify(graph, "specialise")
        assert_same(run_graph(graph, g.arrays), wanted)
        if known:
            assert not [n for n in graph.nodes if n.op_type != "Loop" and all(v.data is not None for v in n.uses())]


@examples(100)
@given(graphs())
def test_specialised_types_are_those_of_the_arrays(g: RandomGraph) -> None:
    """A static type that the walk states is the type of what the host computes for it."""
    graph = typed(g)
    watched = [v for n in graph.nodes for v in n.outputs if v is not None]
    probe = graph.replace(outputs=watched)
    for v, a in zip(watched, run_graph(probe, g.arrays), strict=True):
        a = np.asarray(a)
        assert isinstance(v.type, TensorType)
        assert v.type.dtype in (None, a.dtype)
        assert v.shape is None or len(v.shape) == a.ndim
        assert all(not isinstance(d, int) or d == n for d, n in zip(v.shape or (), a.shape, strict=False))


@examples(100)
@given(graphs(control=False))
def test_a_graph_without_data_dependence_is_typed_whole(g: RandomGraph) -> None:
    """Every value of such a graph is static once the inputs' shapes are known."""
    assert all(v.is_static for n in typed(g).nodes for v in n.outputs if v is not None)


@examples(100)
@given(graphs())
def test_all_passes_together_reach_a_fixed_point(g: RandomGraph) -> None:
    """The pipeline's order, twice: the second time changes nothing that a verifier or a result could tell."""
    order = [IdentityNodes(), CommonSubexpressions(), DeadNodes()]
    once = run_passes(typed(g), order)
    assert_same(run_graph(once, g.arrays), run_graph(g.graph, g.arrays))
    twice = run_passes(once, order)
    assert len(twice.nodes) <= len(once.nodes)
    assert_same(run_graph(twice, g.arrays), run_graph(once, g.arrays))


@examples(100)
@given(graphs())
def test_folding_without_an_allowance_never_grows_a_model(g: RandomGraph) -> None:
    """With a limit of zero bytes, what is folded takes no more memory than what it replaces."""
    assert total_bytes(DeadNodes()(ConstantFold(run_node, 0)(g.graph))) <= total_bytes(g.graph)


class _Breaks(Pass):
    name = "breaks"

    def __init__(self, what: str) -> None:
        self.what = what

    def rewrite(self, graph: Graph) -> Graph:
        if self.what == "inputs":
            return graph.replace(inputs=[Value("new")])
        return graph.replace(outputs=[])


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_a_pass_that_breaks_its_word_is_named(what: str) -> None:
    """Inputs and the number of outputs are not a pass's to change."""
    x = Value("x", TensorType(np.dtype(np.float32), (2,)))
    with pytest.raises(InternalError, match=f"'breaks' changed.* {what}"):
        _Breaks(what)(Graph([x], [x], [], opsets={"": 18}))
