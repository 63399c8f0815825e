"""Clusters that are not worth their transfers go to a later engine that takes what stands around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dag import is_convex
from tests.passes.partitioning.graphs import Recipe, engine, execute, graph, names, recipes
from tests.passes.partitioning.test_cost_model import NOTHING, chain, clustered
from tests.passes.partitioning.test_random_graphs import is_acyclic, unit_ancestors
from tests.profiles import examples
from tests.random_graphs import F32, graph_of, node
from xrt_core.ir.graph import Annotations, Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import Candidate, Clustering, Costs, cluster, mark, outline, report
from xrt_core.passes.partitioning.cluster import Grower
from xrt_core.passes.partitioning.cost_model import CPU, Rates

CLUSTER = import_module("xrt_core.passes.partitioning.cluster")  # the package has a function of that name
SLOW_HOST = Costs(Rates(1e-3, math.inf, math.inf), NOTHING, launch=5e-6, transfer=1e-6)
"""Whatever an engine takes pays, and no engine is quicker than another."""


def boundaries(g: Graph, owner: Mapping[int, int] | list[int]) -> int:
    """Values at the boundaries of clusters, counted for each cluster: what a launch is given and gives."""
    found: set[tuple[int, Value]] = set()
    for i, n in enumerate(g.nodes):
        k = owner[i]
        for v in n.uses():
            made = g.producers.get(v)
            other = -1 if made is None else owner[made]
            if v.data is None and (made is None or other != k):
                found.update((c, v) for c in (k, other) if c >= 0)
        found.update((k, v) for v in n.outputs if k >= 0 and v is not None and v in g.outputs)
    return len(found)


def test_a_piece_inside_what_a_later_engine_takes_goes_to_it() -> None:
    """Otherwise the later one is in two pieces; the report says what became of the piece."""
    g = chain("Exp", "Neg", "Exp")
    one, two = engine("one", "Neg"), engine("two", "Neg", "Exp")
    assert names(g, clustered(g, one, two, prune=False)) == ["two: v1", "one: v2", "two: v3"]
    found = clustered(g, one, two)
    assert names(g, found) == ["two: v1 v2 v3"]
    (told,) = report(g.nodes, found, outline(g, found)).clusters
    assert told.note == (
        "1 node of it would be a cluster of one, which stands before: launch and transfers of that are estimated to "
        "cost 14 us a call, and one is taken to save 0.0 us"
    )  # three launches become one, and four transfers go


def test_what_the_first_engine_is_worth_decides() -> None:
    """One that has the product keeps it, as long as its engine is taken to be quicker at all; the Neg goes."""
    x, a, b, c, d = (Value(n, TensorType(F32, (512, 512))) for n in "xabcd")
    nodes = [node("Exp", [x], [a]), node("MatMul", [a, a], [b]), node("Exp", [b], [c]), node("Neg", [c], [d])]
    g = graph_of([x], [d], [*nodes, node("Exp", [d], [y := Value("y", x.type)])])
    small = g.replace(outputs=[y])
    one, two = engine("one", "MatMul", "Neg"), engine("two", "MatMul", "Neg", "Exp")
    assert names(small, clustered(small, one, two)) == ["two: a", "one: b", "two: c d y"]
    equal = Costs(CPU.host, CPU.engine, CPU.launch, CPU.transfer, preferred=0.0)
    assert names(small, clustered(small, one, two, costs=equal)) == ["two: a b c d y"]


def test_the_order_of_engines_holds_where_the_later_one_takes_less() -> None:
    """Nothing goes to an engine that does not take it whole, nor back to an earlier one, nor to one not beside it."""
    g = chain("Neg", "Abs", "Neg")
    assert len(clustered(g, engine("one", "Neg"), engine("two", "Abs")).clusters) == 3
    assert names(g, clustered(g, engine("one", "Neg", "Abs"), engine("two", "Neg", "Abs"))) == ["one: v1 v2 v3"]
    apart = graph("a = A(x); b = B(y)")
    found = clustered(apart, engine("one", "A"), engine("two", "A", "B"))
    assert names(apart, found) == ["one: a", "two: b"]


def test_engines_in_turn_come_together_on_the_first_that_takes_both() -> None:
    """Two that cannot take each other's nodes, and two behind them that take all; the third has nothing there yet."""
    g = graph("a = A(x); b = B(a); c = A(b); d = B(c)")
    engines = [engine("one", "A"), engine("two", "B"), engine("three", "A", "B"), engine("four", "A", "B")]
    found = clustered(g, *engines, costs=SLOW_HOST)
    assert names(g, found) == ["three: a b c d"]
    assert "2 nodes of it would be 2 clusters of one" in found.clusters[0].note
    assert "2 nodes of it would be 2 clusters of two" in found.clusters[0].note


def test_marks_and_bounds_win() -> None:
    """A marked region stays where it was marked for; no cluster grows beyond the maximum; another device is another."""
    g = chain("Exp", "Neg", "Exp")
    one, two = engine("one", "Neg"), engine("two", "Neg", "Exp")
    assert max(len(c.nodes) for c in clustered(g, one, two, maximum_nodes=2).clusters) == 2
    for noted in (Annotations(engine="one"), Annotations(device="cuda:0")):
        marked = g.replace(nodes=[g.nodes[0], g.nodes[1].replace(annotations=noted), g.nodes[2]])
        found = cluster(marked, mark(marked, [one, two]), costs=lambda device: CPU)
        assert [c.engine for c in found.clusters if 1 in c.nodes] == ["one"]


def test_no_node_outside_waits_longer() -> None:
    """H reads the first engine's piece, and must not wait for the second engine's node that comes after it."""
    g = graph("a = A(x); h = H(a); b = B(a); c = B(b, h)")
    found = clustered(g, engine("one", "A"), engine("two", "A", "B"), costs=SLOW_HOST)
    assert names(g, found) == ["one: a", "two: b c"]


@contextmanager
def watched(check: Callable[[Grower, list[int], list[int]], None]) -> Iterator[None]:
    """Calls `check` with the owner of each node, as the number of its cluster, before and after each handing over."""
    original = CLUSTER.reassign_clusters

    def reassign_clusters(grower: Grower, *arguments: object) -> bool:
        before = grower.clusters()[0].tolist()
        changed: bool = original(grower, *arguments)
        check(grower, before, grower.clusters()[0].tolist())
        return changed

    with patch.object(CLUSTER, "reassign_clusters", reassign_clusters):
        yield


COSTS = st.sampled_from([CPU, SLOW_HOST, Costs(Rates(8e-6, math.inf, math.inf), NOTHING, 5e-6, 1e-6)])


@st.composite
def engines_in_order(draw: Callable[..., object]) -> list[Candidate]:
    """Two to four engines; the last takes nearly all."""
    count = draw(st.integers(2, 4))
    taken = [draw(st.sets(st.sampled_from("ABCD"), min_size=1)) for _ in range(count - 1)]
    return [engine(f"e{i}", *sorted(ops)) for i, ops in enumerate([*taken, set("ABC")])]


@pytest.mark.slow
@examples(200)
@given(recipes(max_nodes=18, annotated=True, ops="AABBCDH"), engines_in_order(), COSTS, st.booleans())
def test_handing_over_adds_no_crossing_and_keeps_the_rules(
    recipe: Recipe, engines: list[Candidate], costs: Costs, strict: bool
) -> None:
    """At each time: the same nodes are in clusters, which are merged only and cross no more; the whole is as valid."""
    g = recipe.build()
    marks = mark(g, engines)

    def check(grower: Grower, before: list[int], after: list[int]) -> None:
        assert [k < 0 for k in before] == [k < 0 for k in after]
        assert all(len({after[i] for i, k in enumerate(before) if k == c}) == 1 for c in set(before))
        assert boundaries(g, after) <= boundaries(g, before)
        host = [k < 0 for k in before]
        if strict:  # what is in no cluster waits for what it waited for
            assert waits(g, after, host) == waits(g, before, host)

    with watched(check):
        found = cluster(g, marks, costs=lambda device: costs, strict=strict)
    assert is_acyclic(g, found)
    for c in found.clusters:
        assert is_convex(g, c.nodes)
        assert all((v := marks.verdicts[c.engine][i]) is not None and v.ok for i in c.nodes)
        assert ("stands before" in c.note) == bool(c.note)
    assert cluster(recipe.build("w"), mark(recipe.build("w"), engines), costs=lambda d: costs, strict=strict) == found
    assert execute(outline(g, found), [3, 7]) == execute(g, [3, 7])


def waits(g: Graph, owner: list[int], host: list[bool]) -> list[set[int]]:
    """For the nodes of the host what they wait for, updates that nothing reads aside."""
    count = max(owner, default=-1) + 1
    members = [tuple(i for i, k in enumerate(owner) if k == c) for c in range(count)]
    made = CLUSTER.Clustering(
        tuple(CLUSTER.Cluster("e", m, "cpu") for m in members), {i: "host" for i, h in enumerate(host) if h}, len(owner)
    )
    found = unit_ancestors(g, made)
    idle = [n.annotations.model_update and not g.successors[i] for i, n in enumerate(g.nodes)]
    return [w for w, h, skipped in zip(found, host, idle, strict=True) if h and not skipped]


@examples(150)
@given(recipes(max_nodes=18, ops="AABBC"), engines_in_order())
def test_engines_that_take_the_whole_graph_cross_no_more_than_without(recipe: Recipe, engines: list[Candidate]) -> None:
    """From end to end, beside the same engines without handing over; the host has nothing there or here."""
    g = recipe.build()

    def run() -> Clustering:
        return clustered(g, *engines, costs=SLOW_HOST)

    found = run()
    with patch.object(CLUSTER, "reassign_clusters", lambda *_: False):
        before = run()
    assert set(found.reasons) == set(before.reasons)
    if not found.reasons:
        assert boundaries(g, found.assignment()) <= boundaries(g, before.assignment())
        assert len(found.clusters) <= len(before.clusters)


def test_many_pieces_come_together_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pieces in turn are one cluster after one merge, not one after another."""
    g = chain(*["Exp", "Neg"] * 1000)
    merges = []
    merge = Grower.merge
    monkeypatch.setattr(Grower, "merge", lambda self, *rest: merges.append(1) or merge(self, *rest))
    found = clustered(g, engine("one", "Neg"), engine("two", "Neg", "Exp"))
    assert [len(c.nodes) for c in found.clusters] == [2000]
    assert len(merges) <= 6
    assert np.all([c.engine == "two" for c in found.clusters])
