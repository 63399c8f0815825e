"""Random graphs, one to five engines of random capability, random marks: what holds for every partition of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dag import ancestors, is_convex, is_sorted
from tests.fake_engines import FakeEngine, chosen, fake_engine
from tests.host_run import assert_same, run_graph
from tests.passes.partitioning.graphs import Recipe, engine, execute, recipes
from tests.passes.partitioning.test_random_graphs import is_acyclic, partitions, unit_ancestors
from tests.profiles import examples
from tests.random_graphs import RandomGraph, graphs
from xrt_core.ir.graph import Graph
from xrt_core.module import XRTModule
from xrt_core.passes.partitioning import UNLIMITED, Candidate, Clustering, Costs, Marks, cluster, mark, outline
from xrt_core.passes.partitioning.cost_model import Rates

pytestmark = pytest.mark.tiny_clusters  # every partition is to be met

OPERATORS = "ABCDE"
NOTHING = Rates(0.0, float("inf"), float("inf"))
COSTS = Costs(Rates(2e-6, float("inf"), float("inf")), NOTHING, 3e-6, 1e-6)
SLOW_HOST = Costs(Rates(1e-3, float("inf"), float("inf")), NOTHING, 3e-6, 1e-6)  # whatever an engine takes pays


class Case:
    """A graph, its engines, and the options to cluster it with."""

    def __init__(self, recipe: Recipe, engines: list[Candidate], options: dict[str, Any], automatic: bool) -> None:
        self.recipe, self.engines, self.options, self.automatic = recipe, engines, options, automatic

    def run(self, prefix: str = "v") -> tuple[Graph, Marks, Clustering]:
        g = self.recipe.build(prefix)
        marks = mark(g, self.engines, automatic=self.automatic)
        return g, marks, cluster(g, marks, **self.options)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """1 to 5 engines, each of some operators; marks where the engine takes the node, in up to three regions."""
    count = draw(st.integers(1, 5))
    taken = [draw(st.sets(st.sampled_from(OPERATORS), min_size=1)) for _ in range(count)]
    engines = [engine(f"e{i}", *sorted(ops)) for i, ops in enumerate(taken)]
    recipe = draw(recipes(max_nodes=18, annotated=True, ops=OPERATORS + "H"))
    nodes = []
    for op, sources, outs, noted, captured in recipe.nodes:
        takers = [e.name for e, ops in zip(engines, taken, strict=True) if op in ops]
        if captured is not None:
            takers = []  # a node with a body stays on the host
        if takers and draw(st.integers(0, 2)) == 0:
            noted = noted.replace(engine=draw(st.sampled_from(takers)), region=draw(st.sampled_from(["", "r", "s"])))
        nodes.append((op, sources, outs, noted, captured))
    minimum, extra = draw(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3, UNLIMITED])))
    options = {
        "minimum_nodes": minimum,
        "maximum_nodes": minimum + extra,
        "strict": draw(st.booleans()),
        "merge_updates": draw(st.booleans()),
        "costs": draw(st.sampled_from([None, lambda device: COSTS])),
    }
    return Case(replace(recipe, nodes=tuple(nodes)), engines, options, draw(st.sampled_from([True, True, False])))


def check(case: Case) -> None:
    """Everything that must hold."""
    g, marks, found = case.run()
    options = case.options
    assert sorted([i for c in found.clusters for i in c.nodes] + list(found.reasons)) == list(range(len(g.nodes)))
    assert all(found.reasons.values())
    assert is_acyclic(g, found)
    for c in found.clusters:
        noted = [g.nodes[i].annotations for i in c.nodes]
        assert is_convex(g, c.nodes)
        assert all((v := marks.verdicts[c.engine][i]) is not None and v.ok for i in c.nodes)
        assert {a.device or "cpu" for a in noted} == {c.device}
        assert len({a.sbp for a in noted}) == 1
        assert c.model_update == any(a.model_update for a in noted)
        assert options["merge_updates"] or len({a.model_update for a in noted}) == 1
        if c.pinned:
            assert {(a.engine, a.region) for a in noted} == {(c.engine, c.region)}
        else:
            assert {a.engine for a in noted} == {None}
            assert case.automatic
            assert options["minimum_nodes"] <= len(c.nodes) <= options["maximum_nodes"]
            if options["costs"] is not None and found.reasons:
                assert c.estimate is not None
                assert c.estimate.gain > 0
    assignment = found.assignment()
    for i, n in enumerate(g.nodes):
        wanted = n.annotations.engine
        if wanted == "host":
            assert assignment[i] < 0
        elif wanted is not None:
            assert found.clusters[assignment[i]].engine == wanted
    parts: dict[tuple[str, str], int] = {}
    for c in found.clusters:
        if c.pinned:
            parts[c.engine, c.region] = parts.get((c.engine, c.region), 0) + 1
    for c in found.clusters:
        assert (
            (f"of {parts[c.engine, c.region]} of" in c.note)
            if c.pinned and parts[c.engine, c.region] > 1
            else not c.note or (not c.pinned and options["costs"] is not None and "stands before" in c.note)
        )
    twin = case.run("w")[2]
    assert twin == found
    folded = outline(g, found)
    assert is_sorted(folded)
    assert execute(folded, [3, 7]) == execute(g, [3, 7])


@pytest.mark.slow
@examples(800)
@given(cases())
def test_every_partition_keeps_the_rules(case: Case) -> None:
    """Complete, jointly acyclic, of one kind each, within bounds, marks obeyed, with reasons, deterministic; the folded
    graph computes the same."""
    check(case)


@pytest.mark.slow
@examples(150)
@given(cases())
def test_strict_delays_no_node_that_no_engine_takes(case: Case) -> None:
    """With marks set aside, which are not strict: a node that every engine refuses waits for what it waited for."""
    bare = [(op, s, o, a.replace(engine=None, region=""), c) for op, s, o, a, c in case.recipe.nodes]
    options = {**case.options, "strict": True, "minimum_nodes": 1}
    plain = Case(replace(case.recipe, nodes=tuple(bare)), case.engines, options, True)
    g, marks, found = plain.run()
    after = unit_ancestors(g, found)
    for i in found.reasons:
        refused = all(v is None or not v.ok for e in marks.engines for v in [marks.verdicts[e][i]])
        if refused and not (g.nodes[i].annotations.model_update and not g.successors[i]):
            assert after[i] == ancestors(g, [i])


@examples(100)
@given(recipes(max_nodes=8, ops="AAAH"))
def test_a_region_has_as_few_parts_as_there_can_be(recipe: Recipe) -> None:
    """No other way to split it into parts that do not wait for each other has fewer: all are tried. Convex: one."""
    nodes = tuple(
        (op, s, o, a if op == "H" or c is not None else a.replace(engine="e", region="r"), c)
        for op, s, o, a, c in recipe.nodes
    )
    g = replace(recipe, nodes=nodes).build()
    found = cluster(g, mark(g, [engine("e", "A")], automatic=False))
    members = sorted(i for c in found.clusters for i in c.nodes)
    if members and is_convex(g, members):
        assert len(found.clusters) == 1
    best = len(found.clusters)
    for groups in partitions(members):
        if len(groups) < best:
            made = tuple(found.clusters[0].__class__("e", tuple(sorted(m)), "cpu") for m in groups)
            assert not is_acyclic(g, Clustering(made, found.reasons, len(g.nodes)))


class E0(FakeEngine):
    """The first of five."""

    name = "e0"


ENGINES = [E0, *(type(f"E{i}", (FakeEngine,), {"name": f"e{i}", "__doc__": "One of five."}) for i in range(1, 5))]
shares = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def check_results(g: RandomGraph, seed: int, share: list[int], options: dict[str, Any], picks: list[int]) -> None:
    """Run a graph on engines, then again with some of what they took marked: the host's results, marks obeyed."""
    wanted = run_graph(g.graph, g.arrays)
    with ExitStack() as stack:
        made = [stack.enter_context(fake_engine(k)) for k in ENGINES[: len(share)]]
        for k, (e, s) in enumerate(zip(made, share, strict=True)):
            e.takes = chosen(seed + k, s)
        names = [e.name for e in made]
        module = XRTModule(g.graph, engine=names, **options)
        got = module(*g.arrays)
        assert_same(got if isinstance(got, tuple) else (got,), wanted, 1e-5, 1e-6)
        inside = {n.name for n in g.graph.nodes}
        took = [(n, c.engine) for c in module.explain().report.clusters for n in c.nodes if n in inside]
        marks = {f"name:{n}": e if p % 3 else "host" for p, (n, e) in zip(picks, took, strict=False) if p % 2}
        marked = XRTModule(g.graph, engine=names, marks=marks, **options)
        got = marked(*g.arrays)
        assert_same(got if isinstance(got, tuple) else (got,), wanted, 1e-5, 1e-6)
        told = marked.explain().report
        engine_of = {n: c.engine for c in told.clusters for n in c.nodes}
        left = {h.name for h in told.host_nodes}
        for pattern, e in marks.items():
            name = pattern.removeprefix("name:")
            assert engine_of.get(name, "host") == e if name in engine_of or name in left else True
        if any(e != "host" for e in marks.values()):
            assert set(engine_of) <= {p.removeprefix("name:") for p in marks}


size = st.sampled_from([{}, {"minimum_nodes": 2}, {"maximum_nodes": 2}, {"strict_clustering": False}, {"prune": True}])


@pytest.mark.slow
@examples(300)
@given(graphs(symbolic=True, maximum=16), st.integers(0, 99), shares, size, st.lists(st.integers(0, 11), max_size=12))
def test_results_are_the_hosts(
    g: RandomGraph, seed: int, share: list[int], options: dict[str, Any], picks: list[int]
) -> None:
    """Through XRTModule, with real operators."""
    check_results(g, seed, share, options, picks)


def test_many_regions_of_one_graph_stay_linear_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that do not stand in each other's way are contracted in one go, not one after another."""
    from tests.passes.partitioning.graphs import graph
    from xrt_core.ir.graph import Annotations
    from xrt_core.passes.partitioning.contraction import Contraction

    text = "; ".join(f"n{i} = A({f'n{i - 1}' if i else 'x'})" for i in range(400))
    noted = {f"n{i}": Annotations(engine="e", region=f"r{i // 4}") for i in range(400)}
    merges = []
    merge = Contraction.merge
    monkeypatch.setattr(Contraction, "merge", lambda self, label: merges.append(1) or merge(self, label))
    g = graph(text, **noted)
    found = cluster(g, mark(g, [engine("e", "A")]))
    assert [len(c.nodes) for c in found.clusters] == [4] * 100
    assert len(merges) <= 2
    assert np.all([c.pinned for c in found.clusters])
