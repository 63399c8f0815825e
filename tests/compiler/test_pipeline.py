"""The pipeline's stages, what they print and tell, and what waits for the run."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.fake_engines import fake_engine
from tests.random_graphs import F32, graph_of, ints, node
from xrt_core.compiler.passes import DEFAULT_PASSES
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.services import build_services
from xrt_core.engine import engines
from xrt_core.errors import GraphError
from xrt_core.events import EventLog, subscribe
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.options import resolve

pytestmark = pytest.mark.tiny_clusters  # the counts are of clusters


def chain(*ops: str, shape: Any = (2,)) -> Graph:
    """x through unary operators."""
    values = [Value("x", TensorType(F32, shape)), *[Value(f"v{i}") for i in range(len(ops))]]
    nodes = [node(op, [a], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    return graph_of(values[:1], values[-1:], nodes, "chain")


X = np.array([1, -2], np.float32)


def test_the_stages_one_after_another() -> None:
    """Each stage is made from the one before and prints itself; every pass has a name and a reason."""
    assert len({p.name for p in DEFAULT_PASSES}) == len(DEFAULT_PASSES)
    assert all(len(p.reason) > 20 for p in DEFAULT_PASSES)
    with fake_engine() as engine:
        pipeline = Pipeline(build_services(resolve({"engine": "fake"}), [(engines.get("fake"), "cpu")], EventLog()))
        captured = pipeline.capture(chain("Neg", "Identity", "Abs"))
        optimised = pipeline.optimise(captured, [TensorType(F32, (2,))], {})
        assert "Identity" in str(captured)
        assert "Identity" not in str(optimised)
        partitioned = pipeline.partition(optimised)
        assert "2 nodes on fake (cpu): Abs, Neg" in str(partitioned)
        assert engine.compiled == []
        planned = pipeline.plan(partitioned)
        assert "fake_0 on fake(r0)" in str(planned)
        np.testing.assert_array_equal(planned.run([X])[0], np.abs(X))


def test_one_line_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    """One INFO line for each specialisation, none for a known signature."""
    with fake_engine() as engine, caplog.at_level(logging.INFO, "xrt"):
        engine.takes = lambda n: n.op_type != "Abs"
        m = XRTModule(chain("Neg", "Abs"), engine="fake")
        m(X)
        m(X)
    (line,) = [r.message for r in caplog.records if r.levelno == logging.INFO]
    assert "model=chain" in line
    assert "2 nodes, clusters: 1 on fake; 50% of nodes" in line
    assert "1 nodes on the host (Abs)" in line


def test_the_summary_is_made_for_readers_only(caplog: pytest.LogCaptureFixture) -> None:
    """The event of a specialisation has the summary if the level INFO is logged or somebody listens, and else not."""
    with caplog.at_level(logging.WARNING, "xrt"):
        for heard in (False, True):
            undo = subscribe(lambda event: None) if heard else lambda: None
            m = XRTModule(chain("Neg"), engine="host")
            m(X)
            undo()
            (event,) = m.events.recent("specialised")
            assert ("result" in event.fields) == heard
            assert m.explain().summary().startswith("1 nodes")


def test_a_broken_graph_is_found_at_the_first_stage() -> None:
    """With `verify`, and named with the stage and the rule."""
    x, y = Value("x"), Value("y")
    bad = graph_of([x], [y], [node("Neg", [Value("nowhere")], [y])])
    with pytest.raises(GraphError, match="stage 'captured'.*'operands'.*'nowhere'"):
        XRTModule(bad, engine="host", verify=True)


def test_equal_functions_are_compiled_once_in_a_process() -> None:
    """Two modules of one graph share the executable, as long as one of them lives."""
    with fake_engine() as engine:
        first, second = XRTModule(chain("Neg"), engine="fake"), XRTModule(chain("Neg"), engine="fake")
        np.testing.assert_array_equal(first(X), second(X))
        assert len(engine.compiled) == 1


def late_chain(length: int) -> Graph:
    """Each turn keeps the positive elements and takes 1 from them: shapes are known one after another."""
    one, zero = Value.constant(np.array(1, np.float32)), Value.constant(np.array(0, np.float32))
    last = x = Value("x", TensorType(F32, ("n",)))
    nodes: list[Node] = []
    for i in range(length):
        positive, some, less = Value(f"p{i}"), Value(f"s{i}"), Value(f"l{i}")
        nodes += [
            node("Greater", [last, zero], [positive]),
            node("Compress", [last, positive], [some], axis=0),
            node("Sub", [some, one], [less]),
        ]
        last = less
    return graph_of([x], [last], nodes, "late")


def test_a_cluster_that_the_host_took_over_counts_for_it() -> None:
    """In nodes and in FLOPs, and the summary says so."""

    def fail(function: Any) -> None:
        if any(n.op_type == "Neg" for n in function.body.nodes):
            raise ValueError("broken")

    with fake_engine() as engine:
        engine.on_compile = fail
        engine.takes = lambda n: n.op_type != "Exp"
        m = XRTModule(chain("Neg", "Exp", "Abs", "Floor"), engine="fake", prune=False)
        m(X)
        told = m.explain()
    assert "clusters: 2 on fake (1 of them run by the host); 50% of nodes" in told.summary()
    assert (told.engine_node_count, told.node_count) == (2, 4)
    assert told.engine_flops == told.cluster_flops["fake_1"] < sum(told.cluster_flops.values()) < told.flops


def test_what_depends_on_data_is_compiled_when_it_is_known() -> None:
    """Each part that waits is planned for the shapes that arrive, once for each; the explanation holds them all."""
    with fake_engine() as engine:
        m = XRTModule(late_chain(3), engine="fake")
        given = np.arange(5, dtype=np.float32)
        for _ in range(2):
            np.testing.assert_array_equal(m(given), [0, 1])
        compiled = len(engine.compiled)
        assert compiled >= 3
        told = m.explain()
        assert "it waits for shapes that depend on data" in str(told)
        assert told.engine_node_count == 6
        # Compress, on the host, only moves elements
        assert sum(told.cluster_flops.values()) < told.engine_flops == told.flops
        clusters = [c for e in told._with_parts() for c in e.report.clusters]
        assert f"clusters: {len(clusters)} on fake" in told.summary()  # those of the parts as well
        np.testing.assert_array_equal(m(given), [0, 1])
        assert len(engine.compiled) == compiled
        np.testing.assert_array_equal(m(-given), [])


def test_a_long_chain_of_waiting_parts_ends() -> None:
    """Forty parts inside one another."""
    with fake_engine():
        m = XRTModule(late_chain(40), engine="fake", verify=False)
        np.testing.assert_array_equal(m(np.arange(45, dtype=np.float32)), np.arange(0, 5))


def test_nonzero_on_xla() -> None:
    """Before and after the operator whose shape depends on data, XLA computes."""
    pytest.importorskip("xrt_xla", reason="the XLA engine is not installed")
    x, h, i, t, y = Value("x", TensorType(F32, (2, 2))), Value("h"), Value("i"), Value("t"), Value("y")
    nodes = [
        node("Neg", [x], [h]),
        node("NonZero", [h], [i]),
        node("Transpose", [i], [t], perm=(1, 0)),
        node("GatherND", [h, t], [y]),
    ]
    m = XRTModule(graph_of([x], [y], nodes), engine="xla")
    for given in ([[1, 0], [2, 3]], [[0, 0], [0, 5]], [[0, 0], [0, 0]]):
        wanted = [-v for row in given for v in row if v]
        np.testing.assert_array_equal(m(np.array(given, np.float32)), wanted)
    assert [h.operator for h in m.explain().report.host_nodes] == ["NonZero", "xrt.Late"]


def test_weights_are_not_held_twice() -> None:
    """A large weight that is read as it is and transposed stays one array in the plan of the host."""
    w = Value.constant(np.ones((300, 300), np.float32), "w")
    x, a, b, y = Value("x", TensorType(F32, (1, 300))), Value("a"), Value("b"), Value("y")
    nodes = [node("MatMul", [x, w], [a]), node("Cast", [w], [b], to=11), node("Cast", [a], [y], to=11)]
    z = Value("z")
    m = XRTModule(graph_of([x], [z], [*nodes, node("MatMul", [y, b], [z])]), engine="host")
    np.testing.assert_array_equal(m(np.ones((1, 300), np.float32)), np.full((1, 300), 90000.0))
    plan = m._source.caller.last  # type: ignore[union-attr]
    held = [r for r in plan._template if isinstance(r, np.ndarray) and r.size > 100]
    assert [np.shares_memory(r, w.data) for r in held] == [True]


def test_reshaped_by_an_unused_input() -> None:
    """Inputs that nobody reads are accepted, and change nothing."""
    x, extra, y = Value("x", TensorType(F32, (2,))), Value("extra", TensorType(F32, ("k",))), Value("y")
    with fake_engine():
        m = XRTModule(graph_of([extra, x], [y], [node("Reshape", [x, ints(2, 1)], [y])]), engine="fake")
        for k in (0, 3):
            np.testing.assert_array_equal(m(np.zeros(k, np.float32), X), X.reshape(2, 1))
