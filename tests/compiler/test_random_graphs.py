"""Random graphs through XRTModule: every partition gives the host's results, within the bounds it was told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engines import SecondEngine, chosen, fake_engine
from tests.host_run import assert_same, run_graph
from tests.profiles import examples
from tests.random_graphs import RandomGraph, graphs
from xrt_core.explanation import Explanation
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters  # every partition is to be met


def results_of(module: XRTModule, g: RandomGraph) -> tuple[Any, ...]:
    got = module(*g.arrays)
    return got if isinstance(got, tuple) else (got,)


def explanations(e: Explanation) -> list[Explanation]:
    return [e, *[x for parts in e.nested.values() for part in parts for x in explanations(part)]]


@examples(150)
@given(graphs(symbolic=True))
def test_the_host_alone(g: RandomGraph) -> None:
    """All of the pipeline without an engine."""
    assert_same(results_of(XRTModule(g.graph, engine="host"), g), run_graph(g.graph, g.arrays), 1e-5, 1e-6)


bounds = st.tuples(st.integers(1, 3), st.sampled_from([None, 0, 2])).map(
    lambda b: {"minimum_nodes": b[0]} | ({} if b[1] is None else {"maximum_nodes": b[0] + b[1]})
)


@pytest.mark.slow
@examples(250)
@given(graphs(symbolic=True, maximum=14), st.integers(0, 9), st.integers(1, 10), bounds, st.booleans(), st.booleans())
def test_any_partition(g: RandomGraph, seed: int, share: int, size: dict[str, int], strict: bool, two: bool) -> None:
    """One or two engines that take random nodes: the host's results, bounds kept, the same twice, inputs untouched."""
    wanted = run_graph(g.graph, g.arrays)
    before = [a.copy() for a in g.arrays]
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes, second.takes = chosen(seed, share), chosen(seed + 1, share)
        names = ["fake", "second"] if two else ["fake"]
        options: dict[str, Any] = {"engine": names, "strict_clustering": strict, **size}
        module, twin = XRTModule(g.graph, **options), XRTModule(g.graph, **options)
        got = results_of(module, g)
        assert_same(got, wanted, 1e-5, 1e-6)
        for x in got:
            x[...] = 0  # results are the caller's own, whatever they came from
        assert_same(results_of(module, g), wanted, 1e-5, 1e-6)
        assert_same(results_of(twin, g), wanted, 1e-5, 1e-6)
        results_of(twin, g)
    assert_same(g.arrays, before)
    told = module.explain()
    assert json.dumps(told.to_json()) == json.dumps(twin.explain().to_json())
    for e in explanations(told):
        assert not e.errors
        placed = sum(c.node_count for c in e.report.clusters) + len(e.report.host_nodes)
        assert placed == e.report.node_count
        for c in e.report.clusters:
            assert size["minimum_nodes"] <= c.node_count <= size.get("maximum_nodes", c.node_count)
        assert all(h.reason for h in e.report.host_nodes)


@examples(40)
@given(graphs(symbolic=True), st.integers(0, 9))
def test_failing_engines_change_no_result(g: RandomGraph, seed: int) -> None:
    """Every other compilation and every third run fails: the caller does not notice."""
    with fake_engine() as engine:
        engine.takes = chosen(seed, 7)
        turns = iter(range(10**6))

        def compile_fails(_: Any) -> None:
            if next(turns) % 2:
                raise RuntimeError("compiler trouble")

        def run_fails(_: Any) -> None:
            if next(turns) % 3 == 0:
                raise RuntimeError("device trouble")

        engine.on_compile, engine.on_run = compile_fails, run_fails
        module = XRTModule(g.graph, engine="fake")
        wanted = run_graph(g.graph, g.arrays)
        for _ in range(3):
            assert_same(results_of(module, g), wanted, 1e-5, 1e-6)


@pytest.mark.slow
@examples(25)
@given(graphs(symbolic=True, maximum=8))
def test_xla(g: RandomGraph) -> None:
    """The XLA engine gives the host's results but for rounding."""
    pytest.importorskip("xrt_xla", reason="the XLA engine is not installed")
    module = XRTModule(g.graph, engine="xla")
    assert_same(results_of(module, g), run_graph(g.graph, g.arrays), 1e-4, 1e-4)
    assert not module.explain().errors


@examples(30)
@given(graphs(control=False))
def test_an_engine_that_takes_all_gets_all(g: RandomGraph) -> None:
    """One Launch for a graph of static shapes, and no node on the host."""
    with fake_engine() as engine:
        module = XRTModule(g.graph, engine="fake")
        results_of(module, g)
        told = module.explain()
        assert told.report.host_nodes == ()
        assert len(told.report.clusters) == (1 if told.report.node_count else 0)
        assert told.node_share == 1.0
        assert len(engine.compiled) == len(told.report.clusters)


def test_shapes_that_arrive_are_compiled_one_by_one() -> None:
    """Symbolic dimensions: a compilation for each new shape, none for a known one."""
    from tests.random_graphs import F32, graph_of, node
    from xrt_core.ir.graph import Value
    from xrt_core.ir.types import TensorType

    x, y = Value("x", TensorType(F32, ("n",))), Value("y")
    with fake_engine() as engine:
        module = XRTModule(graph_of([x], [y], [node("Relu", [x], [y])]), engine="fake")
        for n in (3, 4, 3, 4, 5, 3):
            np.testing.assert_array_equal(module(np.full(n, -1, np.float32)), np.zeros(n))
        assert [f.params[0].shape for f in engine.compiled] == [(3,), (4,), (5,)]
