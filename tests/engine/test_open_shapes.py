"""Nodes whose results' shapes depend on data, on an engine that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import pytest

from tests.fake_engines import FakeEngine, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import GraphError, XRTError
from xrt_core.frontends.onnx_export import export_function
from xrt_core.frontends.onnx_import import import_function
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Annotations, Graph, Node, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule


class OpenEngine(FakeEngine):
    """Takes NonZero and Compress too."""

    name = "opened"
    open_shapes: ClassVar[Literal["none", "results", "any"]] = "results"

    def supports(self, node: Node, device: str, phase: str) -> Support:
        return Support.yes() if node.op_type in ("NonZero", "Compress", "Neg") else Support.no("not wanted")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The engine, registered."""
    with fake_engine(OpenEngine) as made:
        yield made


def _graph(after: bool = False) -> Graph:
    """Neg, NonZero; the indices as floats, doubled where `after`."""
    x, h, at, y, f = Value("x", TensorType(F32, (2, 3))), *map(Value, ("h", "at", "y", "f"))
    nodes = [node("Neg", [x], [h]), node("NonZero", [h], [at])]
    if after:
        nodes += [Node("Cast", [at], [f], {"to": 1}, version=13), Node("Add", [f, f], [y], version=14)]
    return graph_of([x], [y if after else at], nodes)


_X = np.array([[0, 1, 0], [2, 0, 3]], np.float32)


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("guard", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["plain", "guarded"])
def test_they_end_a_cluster(engine: FakeEngine, guard: bool) -> None:
    """The engine gets them with what comes before; what follows waits for the shape, and each call has its own."""
    m = XRTModule(_graph(after=True), engine="opened", prune=False, guard=guard, guard_async=False, guard_tune=False)
    for x in (_X, np.zeros_like(_X), np.ones_like(_X)):
        np.testing.assert_array_equal(m(x), 2.0 * np.array(np.nonzero(x)))
    assert not m.explain().errors
    if not guard:  # else a worker process compiled, and what has run here is its verdict
        (function,) = {f.fingerprint: f for f in engine.compiled if len(f.body.nodes) == 2}.values()
        assert function.returns == (Parameter("at", np.dtype(np.int64), (2, None)),)
        assert str(function.returns[0].type) == "int64[2, ?]"
        assert engine.runs >= 3


@pytest.mark.tiny_clusters
def test_a_result_of_another_rank_is_refused(engine: FakeEngine) -> None:
    """What is known of the shape is held to; the host answers instead."""
    engine.on_run = lambda inputs: [np.zeros((3, 1), np.int64)]
    m = XRTModule(_graph(), engine="opened", prune=False, guard=False)
    np.testing.assert_array_equal(m(_X), np.nonzero(_X))
    assert "int64[3, 1], expected int64[2, ?]" in next(iter(m.explain().errors.values()))


def test_other_engines_never_see_them() -> None:
    """Without `open_shapes` an engine is not asked."""
    with fake_engine() as other:
        other.supports_hook = lambda n: Support.yes()
        m = XRTModule(_graph(), engine="fake", prune=False, guard=False)
        np.testing.assert_array_equal(m(_X), np.nonzero(_X))
        assert all(n.op_type != "NonZero" for f in other.compiled for n in f.body.nodes)


class OpenWithin(OpenEngine):
    """Takes nodes that read such values as well."""

    open_shapes: ClassVar[Literal["none", "results", "any"]] = "any"

    def supports(self, node: Node, device: str, phase: str) -> Support:
        return Support.yes() if node.op_type != "Clip" else Support.no("not wanted")


class OpenWithChecks(OpenWithin):
    """Raises where an index of Gather is out of range."""

    checks_indices: ClassVar[tuple[str, ...]] = ("Gather",)


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
def test_what_follows_is_in_the_cluster(guard: bool) -> None:
    """For an engine that takes any shapes: one launch, whatever a call selects, nothing too."""
    with fake_engine(OpenWithin) as engine:
        m = XRTModule(_graph(after=True), engine="opened", guard=guard, guard_async=False, guard_tune=False)
        for x in (_X, np.zeros_like(_X), np.ones_like(_X), *[np.zeros_like(_X)] * 20):
            np.testing.assert_array_equal(m(x), 2.0 * np.array(np.nonzero(x)))
        assert not m.explain().errors
        assert not m.explain().report.host_nodes
        if not guard:
            (function,) = engine.compiled
            assert [n.op_type for n in function.body.nodes] == ["Neg", "NonZero", "Cast", "Add"]
            assert [str(r.type) for r in function.returns] == ["float32[2, ?]"]
            assert engine.runs == 23


@pytest.mark.tiny_clusters
def test_what_an_engine_gets_wrong_is_the_hosts() -> None:
    """Selected rows are compared as well; and a run that raises is the host's."""
    with fake_engine(OpenWithin) as engine:
        engine.on_run = lambda inputs: [np.ones((2, 1), F32)]
        m = XRTModule(_graph(after=True), engine="opened", guard=True, guard_async=False, guard_tune=False, cache="off")
        np.testing.assert_array_equal(m(_X), 2.0 * np.array(np.nonzero(_X)))
        assert m.explain().errors
        engine.on_run = None


@pytest.mark.tiny_clusters
def test_marks_stay() -> None:
    """What is marked for the host is the host's, and without automatic clustering nothing else is an engine's."""
    with fake_engine(OpenWithin) as engine:
        graph = _graph(after=True)
        nodes = [*graph.nodes[:3], graph.nodes[3].replace(annotations=Annotations(engine="host"))]
        marked = XRTModule(graph.replace(nodes=nodes), engine="opened", guard=False, prune=False)
        manual = XRTModule(graph, engine="opened", automatic=False, guard=False)
        for m, most in ((marked, 3), (manual, 0)):
            engine.compiled.clear()
            np.testing.assert_array_equal(m(_X), 2.0 * np.array(np.nonzero(_X)))
            assert max((len(f.body.nodes) for f in engine.compiled), default=0) == most


def _rows(limit: int) -> Graph:
    """Rows of a table at the number of elements that are not zero, which may be beyond the last."""
    x, table = Value("x", TensorType(F32, (2, 3))), Value("t", TensorType(F32, (limit, 2)))
    at, n, i, y = map(Value, ("at", "n", "i", "y"))
    where = Value.constant(np.array([1], np.int64))
    nodes = [node("NonZero", [x], [at]), node("Shape", [at], [n]), node("Gather", [n, where], [i], axis=0)]
    return graph_of([x, table], [y], [*nodes, node("Gather", [table, i], [y], axis=0)])


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("kind", [OpenWithin, OpenWithChecks], ids=["trusting", "checking"])
def test_indices_that_nothing_is_known_of(kind: type[FakeEngine]) -> None:
    """Only an engine that checks them gets them with what computes them, else they are checked in front of a launch of
    their own; the error is the host's."""
    with fake_engine(kind) as engine:
        m = XRTModule(_rows(4), engine="opened", guard=False)
        table = np.arange(8, dtype=np.float32).reshape(4, 2)
        np.testing.assert_array_equal(m(_X, table), table[3:4])
        sizes = [len(f.body.nodes) for f in engine.compiled]
        assert sizes == ([4] if kind is OpenWithChecks else [3, 1])
        with pytest.raises(XRTError, match="Gather"):
            m(np.ones_like(_X), table)


def test_functions_with_open_returns_travel() -> None:
    """As ONNX and back, with the same fingerprint; an input stays of known shape."""
    x, y = Value("x", TensorType(F32, (4,))), Value("y", TensorType(np.dtype(np.int64), (1, None)))
    function = Function.from_graph(Graph([x], [y], [node("NonZero", [x], [y])], opsets={"": 21}))
    again = import_function(export_function(function).SerializeToString())
    assert again.fingerprint == function.fingerprint
    assert again.returns[0].dims == function.returns[0].dims == (1, None)
    assert function.returns[0].fits((1, 9))
    assert not function.returns[0].fits((2, 9))
    loose = Value("x", TensorType(F32, (None,)))
    with pytest.raises(GraphError, match="input 0 'x' has type float32"):
        Function.from_graph(Graph([loose], [y], [node("NonZero", [loose], [y])], opsets={"": 21}))
