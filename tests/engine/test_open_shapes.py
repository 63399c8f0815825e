"""Nodes whose results' shapes depend on data, on an engine that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from tests.fake_engines import FakeEngine, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import GraphError
from xrt_core.frontends.onnx_export import export_function
from xrt_core.frontends.onnx_import import import_function
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Graph, Node, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule


class OpenEngine(FakeEngine):
    """Takes NonZero and Compress too."""

    name = "opened"
    open_shapes: ClassVar[bool] = True

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
