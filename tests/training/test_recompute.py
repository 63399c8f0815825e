"""Recomputation: the same numbers in less memory, by mark, by name and by budget, on the host and through XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xrt_core as xrt
from tests.profiles import examples
from tests.training.peers import bert
from xrt_core.errors import OptionError, TraceError
from xrt_core.frontends import ops
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.verifier import verify
from xrt_core.passes.rematerialization import Recompute, peak_bytes
from xrt_core.passes.simplify import CommonSubexpressions, DeadNodes, IdentityNodes
from xrt_core.training import Adam, TrainModule, gradients

from .checks import run

F = np.float32


class Chain(xrt.Graph):
    """Layers in a row, each a region where asked for, with Dropout in each."""

    def __init__(self, layers: int = 6, mark: bool = False, dropout: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        self.w = [(rng.standard_normal((16, 16)) * 0.25).astype(F) for _ in range(layers)]
        self.mark, self.dropout = mark, dropout

    def layer(self, x: Any, w: Any) -> Any:
        h = ops.Gelu(ops.LayerNormalization(x, np.ones(16, F), outputs=1) @ w)
        if self.dropout:
            h = ops.Dropout(h, self.dropout, outputs=1)
        return ops.Tanh(h) * ops.Sigmoid(h) + x

    def build(self, x: Any) -> Any:
        for w in self.w:
            if self.mark:
                with xrt.training.recompute():
                    x = self.layer(x, w)
            else:
                x = self.layer(x, w)
        return (x * x).mean()


def batch(rows: int = 64) -> np.ndarray:
    """A batch for `Chain`."""
    return np.random.default_rng(1).standard_normal((rows, 16)).astype(F)


def trained(model: Any, engine: str, **options: Any) -> tuple[list[float], dict[str, np.ndarray], TrainModule]:
    """The losses of some steps, the state after them, and the module."""
    if engine == "xla":
        pytest.importorskip("jax")
    t = TrainModule(model, optimizer=Adam(1e-2), engine=engine, verify=True, **options)
    found = [float(t.step(batch())) for _ in range(4)]
    return found, t.state_dict(), t


def operators(graph: Graph) -> list[str]:
    """The operators of a graph."""
    return [n.operator for n in graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["host", "xla"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_marked_layers_give_the_same_numbers(engine: str, dropout: float) -> None:
    """Bit for bit on the host, Dropout included, and to rounding through XLA, which fuses the copies in other ways."""
    plain = trained(Chain(dropout=dropout), engine)
    again = trained(Chain(dropout=dropout, mark=True), engine)
    if engine == "host":
        assert plain[0] == again[0]
        assert all(plain[1][n].tobytes() == again[1][n].tobytes() for n in plain[1])
    np.testing.assert_allclose(plain[0], again[0], rtol=1e-5)
    graph = again[2].training_graph()
    assert operators(graph).count("xrt.Barrier") == 6
    assert operators(graph).count("MatMul") == 6 + 12 + 5  # all layers but the last of them: its result is the loss's
    assert peak_bytes(graph) < 0.5 * peak_bytes(plain[2].training_graph())


def test_simplification_leaves_the_copies_alone() -> None:
    """Neither our own merging of equal nodes nor a second run of the pass changes what was made."""
    graph = trained(Chain(mark=True), "host")[2].training_graph()
    for p in (CommonSubexpressions(), IdentityNodes(), DeadNodes(), Recompute()):
        assert p(graph) is graph


def test_a_pattern_marks_by_name() -> None:
    """Nodes in whose names the expression finds the same text are a region."""
    graph = xrt.trace(Chain(), "float32[64, 16]")
    names = {n: f"layer.{k // 8}/{n.op_type}.{k}" for k, n in enumerate(graph.nodes)}
    named = graph.replace(nodes=[_renamed(n, names[n]) for n in graph.nodes])
    plain = trained(named, "host", trainable=lambda name, array: name.startswith("w"))
    again = trained(named, "host", trainable=lambda name, array: name.startswith("w"), recompute=r"layer\.[0-4]/")
    assert plain[0] == again[0]
    assert operators(again[2].training_graph()).count("xrt.Barrier") >= 4
    assert peak_bytes(again[2].training_graph()) < 0.7 * peak_bytes(plain[2].training_graph())
    with pytest.raises(OptionError, match=r"recompute='\(': it takes a regular expression"):
        trained(named, "host", recompute="(")


def _renamed(node: Any, name: str) -> Any:
    return type(node)(
        node.op_type, node.inputs, node.outputs, node.attributes, domain=node.domain, version=node.version, name=name,
        annotations=node.annotations,
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_budget_is_kept(share: float) -> None:
    """The intermediate results take no more than the budget, by the order of the nodes; the numbers stay the same."""
    plain = trained(Chain(12), "host")
    budget = int(share * peak_bytes(plain[2].training_graph()))
    again = trained(Chain(12), "host", recompute_budget=budget)
    assert peak_bytes(again[2].training_graph()) <= budget
    assert again[0] == plain[0]
    assert len(again[2].training_graph().nodes) > len(plain[2].training_graph().nodes)


def test_budgets_that_change_nothing_or_cannot_be_kept() -> None:
    """One that is large enough costs nothing; one that is too small says what would do."""
    plain = trained(Chain(), "host")[2].training_graph()
    same = trained(Chain(), "host", recompute_budget=peak_bytes(plain))[2].training_graph()
    assert operators(same) == operators(plain)
    with pytest.raises(OptionError, match=r"recompute_budget=1000: .* take \d+ bytes, and \d+ at the least"):
        trained(Chain(), "host", recompute_budget=1000)
    for bad in (0, -5, 2.5, True):
        with pytest.raises(OptionError, match="it takes a number of bytes above 0"):
            trained(Chain(), "host", recompute_budget=bad)
    with pytest.raises(TraceError, match="recompute records into a graph"), xrt.training.recompute():
        pass


@pytest.mark.nightly
def test_xla_takes_less_memory() -> None:
    """The temporary memory that XLA says its program takes falls, and the barriers are in the program."""
    pytest.importorskip("jax")
    model = bert(3, 32, 4, 64, 4, 64)

    class Marked(type(model.xrt(model.parameters))):  # type: ignore[misc]
        def layer(self, x: Any, k: int) -> Any:
            with xrt.training.recompute():
                return super().layer(x, k)

    sizes = []
    for graph in (model.xrt(model.parameters), Marked(model.parameters, 3, 4)):
        t = TrainModule(graph, optimizer=Adam(1e-3), engine="xla", cache="off")
        losses = [float(t.step(**model.batch(0)))]
        launch = t._last.plan.launches[0]  # type: ignore[union-attr]
        sizes.append((launch.executable.inner._compiled.memory_analysis().temp_size_in_bytes, losses))  # type: ignore[union-attr]
    np.testing.assert_allclose(sizes[0][1], sizes[1][1], rtol=1e-5)
    assert sizes[1][0] < 0.8 * sizes[0][0]


# --- any graph --------------------------------------------------------------------------------------------------------

_UNARY: tuple[Callable[[Any], Any], ...] = (ops.Tanh, ops.Sigmoid, lambda x: x * x, ops.Relu, lambda x: x * 0.5)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[str | None]]:
    """A graph of float64 nodes in any order with its gradients, and a label, or none, for each of its first nodes."""
    step = st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30))
    steps = draw(st.lists(step, min_size=3, max_size=14))

    def build(x: Any, w: Any) -> Any:
        values = [x, w]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(a * b + 0.1 if kind == 5 else _UNARY[kind](a))
        total = values[2].sum()
        for v in values[3:]:
            total = total + v.sum()
        return total * 0.1

    graph = xrt.trace(build, "float64[3]", "float64[3]")
    graph = CommonSubexpressions()(gradients(graph, 0, graph.inputs, unused="zeros"))
    marks = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=len(graph.nodes), max_size=len(graph.nodes)))
    return graph, marks


@examples(25)
@given(graphs())
def test_any_regions_give_the_same_numbers(made: tuple[Graph, list[str | None]]) -> None:
    """Whatever is marked, also regions that interleave: a sound graph, the same outputs bit for bit, no node lost."""
    graph, marks = made
    label = {id(n): m for n, m in zip(graph.nodes, marks, strict=True)}
    again = Recompute(lambda n: label.get(id(n)))(graph)
    verify(again, "recompute")
    arrays = [np.array([0.3, -0.8, 1.1]), np.array([-0.2, 0.5, 0.9])]
    for a, b in zip(run(graph, arrays), run(again, arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    assert CommonSubexpressions()(again) is again
    assert Recompute(lambda n: label.get(id(n)))(again) is again


def test_peak_bytes() -> None:
    """By hand: x -> a (4 bytes a number) -> b -> c, a read by b and c."""
    x = Value("x", xrt.TensorType(np.dtype(F), (10,)))
    graph = xrt.trace(lambda x: (lambda a: ops.Tanh(a) * a)(ops.Relu(x)).sum(), x.type)
    assert peak_bytes(graph) == 3 * 40  # a, its tanh and the product; the sum is an output
    assert peak_bytes(graph.replace(nodes=graph.nodes[:0], outputs=graph.inputs)) == 0
