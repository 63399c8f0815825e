"""How clusters are chosen, on graphs small enough to see."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.partitioning.graphs import Recipe, engine, graph, names, recipes
from tests.profiles import examples
from xrt_core.errors import InternalError, OptionError
from xrt_core.ir.graph import Annotations, Graph
from xrt_core.passes.partitioning import cluster, mark
from xrt_core.passes.partitioning.contraction import Contraction, _EdgeMerger, edge_groups, reads_of, slices

TOY = [engine("toy", "A", "B")]


def clusters(g: Graph, *, engines: list = TOY, **options: object) -> list[str]:
    """The clusters of `g` as texts."""
    return names(g, cluster(g, mark(g, engines), **options))


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("a = A(x); b = A(a); h = H(a)", ["toy: a", "toy: b"], ["toy: a b"]),
        ("a = A(x); b = A(a); h = H(a, b)", ["toy: a b"], ["toy: a b"]),
        ("a = A(x); b = A(a); c = A(a); d = A(c, b)", ["toy: a b c d"], ["toy: a b c d"]),
        ("a = A(x); c = A(x); b = A(a, c); h = H(b)", ["toy: a b c"], ["toy: a c b"]),
        ("a = A(x); b = A(a); c = A(b); h = H(b)", ["toy: a b", "toy: c"], ["toy: a b c"]),
        ("a = A(x); h = H(a); b = A(h)", ["toy: a", "toy: b"], ["toy: a", "toy: b"]),
        ("a = A(x); h = H(a); b = A(a, h)", ["toy: a", "toy: b"], ["toy: a", "toy: b"]),
        ("a = A(x); b = A(x); h = H(a); g = H(b)", ["toy: a", "toy: b"], ["toy: a", "toy: b"]),
        ("a = A(x); b = A(y); h = H(a, b)", ["toy: a b"], ["toy: a b"]),
    ],
    ids=["reader", "reader waits", "residual", "join", "tail", "line", "skip", "apart", "together"],
)
def test_strict_and_not(text: str, strict: list[str], loose: list[str]) -> None:
    """The examples of the docstring and their neighbours, with strict on and off."""
    g = graph(text)
    assert [sorted(c) for c in clusters(g)] == [sorted(c) for c in strict]
    assert [sorted(c) for c in clusters(g, strict=False)] == [sorted(c) for c in loose]


def test_a_consumer_is_delayed_only_when_strict_is_off() -> None:
    """h reads the first of three nodes: strict lets it start after that one, else it waits for all three."""
    g = graph("a = A(x); b = A(a); c = A(b); h = H(a)")
    assert clusters(g, strict=True) == ["toy: a", "toy: b c"]
    assert clusters(g, strict=False) == ["toy: a b c"]


def test_attention_with_a_host_softmax_is_one_cluster_a_layer() -> None:
    """The value branch joins the nodes after the softmax, so that the softmax does not wait for it."""
    layers = ";".join(
        f"q{i} = A(x{i}); k{i} = A(x{i}); v{i} = A(x{i}); s{i} = A(q{i}, k{i}); p{i} = H(s{i}); "
        f"c{i} = A(p{i}, v{i}); x{i + 1} = A(c{i}, x{i})"
        for i in range(3)
    )
    assert clusters(graph(layers)) == [
        "toy: q0 k0 s0",
        "toy: v0 c0 x1 q1 k1 s1",
        "toy: v1 c1 x2 q2 k2 s2",
        "toy: v2 c2 x3",
    ]


def test_engines_take_what_the_ones_before_leave() -> None:
    """The order of the candidates decides."""
    g = graph("a = A(x); b = B(a); c = C(b); d = A(c)")
    one, two = engine("one", "A", "B"), engine("two", "B", "C", "A")
    assert clusters(g, engines=[one, two]) == ["one: a b", "two: c", "one: d"]
    assert clusters(g, engines=[two, one]) == ["two: a b c d"]


def test_clusters_of_two_engines_never_wait_for_each_other() -> None:
    """{a, d} and {b, c} are both convex, but together they make a cycle: the second engine's stay apart."""
    g = graph("a = A(x); b = B(y); c = B(a, b); d = A(a, b)")
    one, two = engine("one", "A"), engine("two", "B")
    assert clusters(g, engines=[one, two], strict=False) == ["one: a d", "two: b", "two: c"]
    assert clusters(g, engines=[two, one], strict=False) == ["one: a", "two: b c", "one: d"]
    assert clusters(g, engines=[one, two], strict=True) == ["one: a", "two: b", "two: c", "one: d"]


def test_clusters_that_only_seemed_in_each_others_way_are_joined() -> None:
    """b would delay c if c stood alone, but c is in one cluster with d, which waits for b."""
    g = graph("a = A(x); b = A(a); c = B(a); d = B(c, b)")
    assert clusters(g, engines=[engine("one", "A"), engine("two", "B")]) == ["one: a b", "two: c d"]


def test_minimum_dissolves_and_offers_what_is_left_to_the_next() -> None:
    """A cluster too small for its engine goes to the next one, and to the host where it is too small for that too."""
    g = graph("a = A(x); h = H(a); b = A(h); c = B(b); d = C(c); e = H(d); f = A(e)")
    found = cluster(g, mark(g, [engine("one", "A"), engine("two", "A", "B", "C")]), minimum_nodes=2)
    assert names(g, found) == ["two: b c d"]
    assert found.reasons[0] == (
        "one: a cluster of 1 node would be under minimum_nodes=2; "
        "two: a cluster of 1 node would be under minimum_nodes=2"
    )
    assert found.reasons[1] == "one: no kernel for H; two: no kernel for H"


def test_a_dissolved_node_is_not_delayed() -> None:
    """t is too small to be a cluster; so that it need not wait for b, a and b are not joined and dissolve as well."""
    g = graph("a = A(x); b = A(a); h = H(b); t = A(a)")
    assert clusters(g, minimum_nodes=1) == ["toy: a b", "toy: t"]
    assert clusters(g, minimum_nodes=2) == []
    assert clusters(g, minimum_nodes=2, strict=False) == ["toy: a b t"]


def test_what_was_dissolved_is_tried_again_once_others_are_clusters() -> None:
    """a and b are too small apart, and may be joined only after the second engine joined c and d."""
    g = graph("a = A(x); b = A(a); c = B(a); d = B(c, b)")
    engines = [engine("one", "A"), engine("two", "B")]
    assert clusters(g, engines=engines, minimum_nodes=2) == ["one: a b", "two: c d"]


def test_maximum_cuts_a_chain_into_even_pieces() -> None:
    """Nine nodes under a maximum of four are three times three, in order."""
    g = graph("; ".join(f"n{i} = A({f'n{i - 1}' if i else 'x'})" for i in range(9)))
    for strict in (True, False):
        assert clusters(g, maximum_nodes=4, strict=strict) == ["toy: n0 n1 n2", "toy: n3 n4 n5", "toy: n6 n7 n8"]


def test_maximum_keeps_together_what_edges_join() -> None:
    """Two chains that stand interleaved in the graph are cut from each other first."""
    g = graph("a = A(x); b = A(y); c = A(a); d = A(b)")
    assert clusters(g) == ["toy: a b c d"]
    assert clusters(g, maximum_nodes=2) == ["toy: a c", "toy: b d"]


def test_slices_leave_little_over() -> None:
    """Even slices where each has the minimum, else as large as allowed, so that one node is over and not nine."""
    units = list(range(9))
    assert slices(units, [1] * 9, 1, 8) == [units[:5], units[5:]]
    assert [len(s) for s in slices(units, [1] * 9, 5, 8)] == [8, 1]


@pytest.mark.parametrize("options", [{"minimum_nodes": 0}, {"minimum_nodes": 3, "maximum_nodes": 2}])
def test_bounds_that_make_no_sense_are_an_error(options: dict[str, int]) -> None:
    """The message names the option and its value."""
    name, value = list(options.items())[-1]
    with pytest.raises(OptionError, match=f"{name}={value}"):
        clusters(graph("a = A(x)"), **options)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Annotations(device="cuda:0"), Annotations(device="cuda:1")),
        (Annotations(sbp=("split(0)",)), Annotations(sbp=("broadcast",))),
        (Annotations(placement=("cpu:0",)), Annotations(placement=("cpu:0", "cpu:1"))),
        (Annotations(), Annotations(model_update=True)),
        (Annotations(engine="toy"), Annotations()),
    ],
    ids=["device", "sbp", "placement", "model update", "pinned"],
)
def test_nodes_of_different_kinds_are_kept_apart(left: Annotations, right: Annotations) -> None:
    """Whether strict or not; two of one kind are joined."""
    for strict in (True, False):
        assert clusters(graph("a = A(x); b = A(a)", a=left, b=right), strict=strict) == ["toy: a", "toy: b"]
        assert clusters(graph("a = A(x); b = A(a)", a=right, b=right), strict=strict) == ["toy: a b"]


def test_the_device_that_is_meant_anyway_may_be_said() -> None:
    """A node annotated with the device of the run joins those that are not annotated."""
    g = graph("a = A(x); b = A(a)", b=Annotations(device="cpu"))
    found = cluster(g, mark(g, TOY, device="cpu"))
    assert [c.nodes for c in found.clusters] == [(0, 1)]
    assert len(cluster(g, mark(g, TOY, device="cuda:0")).clusters) == 2


def test_one_sbp_entry_an_output_says_the_same_as_one() -> None:
    """A node of two outputs, both split, joins one of one output, split."""
    g = graph("a, b = A(x); c = A(a, b)", a=Annotations(sbp=("split(0)",) * 2), c=Annotations(sbp=("split(0)",)))
    assert clusters(g) == ["toy: a c"]


@pytest.mark.parametrize("update_engine", [TOY, [engine("toy", "A")]], ids=["on the engine", "on the host"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_training_step_is_one_cluster_and_its_updates_another(update_engine: list, strict: bool) -> None:
    """Updates could start while the backward pass goes on, but nothing waits for them: they don't cut it."""
    update = Annotations(model_update=True)
    g = graph(
        "f = A(x, w1); g = A(f, w2); l = A(g); dg = A(l); df = A(dg, w2); u2 = B(w2, dg); u1 = B(w1, df)",
        u1=update,
        u2=update,
    )
    expected = ["toy: f g l dg df"] + (["toy: u2 u1"] if update_engine is TOY else [])
    assert clusters(g, engines=update_engine, strict=strict) == expected


def test_updates_are_grouped_before_the_rest() -> None:
    """h waits for both updates, which are one; only so can f and g be one, before the next engine takes them."""
    update = Annotations(model_update=True)
    g = graph("f = A(x); g = A(f); u = B(f); v = B(g); h = H(u, v)", u=update, v=update)
    found = clusters(g, engines=[engine("one", "A", "B"), engine("two", "A")], minimum_nodes=2)
    assert found == ["one: f g", "one: u v"]


def test_updates_that_others_read_do_count() -> None:
    """A second step reads the first one's update: the way leads out of the forward nodes and back, which cuts them."""
    g = graph("f = A(x, w); u = B(w, f); g = A(f, u)", u=Annotations(model_update=True))
    assert clusters(g, strict=False) == ["toy: f", "toy: u", "toy: g"]


def test_a_marked_region_is_whole_and_does_not_grow() -> None:
    """It is cut neither by strict nor by the maximum nor dissolved by the minimum; its neighbours stay outside."""
    pin = Annotations(engine="toy")
    g = graph("a = A(x); b = A(a); c = A(b); h = H(b); d = A(c)", b=pin, c=pin)
    assert clusters(g) == ["toy: a", "toy: b c", "toy: d"]
    assert clusters(g, maximum_nodes=1) == ["toy: a", "toy: b c", "toy: d"]
    assert clusters(g, minimum_nodes=9) == ["toy: b c"]


def test_a_marked_region_is_cut_where_a_path_comes_back() -> None:
    """And says so, naming the path."""
    pin = Annotations(engine="toy", region="block 1")
    g = graph("a = A(x); h = H(a); i = H(h); b = A(a, i); k = H(b); c = A(k)", a=pin, b=pin, c=pin)
    found = cluster(g, mark(g, TOY))
    assert names(g, found) == ["toy: a", "toy: b", "toy: c"]
    of = "of the region 'block 1' marked for toy: a path leaves it and comes back"
    assert [c.note for c in found.clusters] == [
        f"part 1 of 3 {of}: a -> h -> i -> b",
        f"part 2 of 3 {of}: a -> h -> i -> b",
        f"part 3 of 3 {of}: b -> k -> c",
    ]


def test_what_a_subgraph_captures_is_an_edge() -> None:
    """The control-flow node between two clusters reads the first only inside its branch, and still divides them."""
    g = graph("a = A(x); h = H(y); b = A(a, h)")
    a, h, b = g.nodes
    inner = graph("r = H(q)")
    branch = Graph((), inner.outputs, [inner.nodes[0].replace(inputs=[a.outputs[0]])], opsets={"": 13})
    g = g.replace(nodes=[a, h.replace(attributes={"then_branch": branch}), b])
    assert clusters(graph("a = A(x); h = H(y); b = A(a, h)"), strict=False) == ["toy: a b"]
    assert clusters(g, strict=False) == ["toy: a", "toy: b"]


def test_a_graph_without_nodes_has_no_clusters() -> None:
    """Nor reasons."""
    g = graph("")
    found = cluster(g, mark(g, TOY))
    assert (found.clusters, found.reasons) == ((), {})


def test_groups_that_make_a_cycle_are_noticed() -> None:
    """Contracting the two ends of a path of three, the middle left out, is refused."""
    units = Contraction.of_reads(reads_of(graph("a = A(x); h = H(a); b = A(h)")))
    with pytest.raises(InternalError, match="wait for each other"):
        units.merge([0, 1, 0])


def test_a_second_path_keeps_an_edge() -> None:
    """a and b are joined by an edge and by way of h: only the other edge is contracted."""
    units = Contraction.of_reads(reads_of(graph("a = A(x); h = H(a); b = A(a, h); c = A(b)")))
    assert edge_groups(units, [True, False, True, True], 9) == [0, 1, 2, 2]
    assert edge_groups(units, [True, False, True, True], 1) == [0, 1, 2, 3]


def test_sets_that_differ_in_their_last_bit_are_told_apart() -> None:
    """250 host nodes wait for u, v and p, and one more for u alone."""
    hosts = "; ".join(f"h{i} = H(p)" for i in range(250))
    g = graph(f"u = A(x); v = A(x); p = A(u, v); {hosts}; z = H(u)")
    assert clusters(g) == ["toy: u", "toy: v p"]


@examples(150)
@given(recipes(max_nodes=25, ops="AAAH"), st.integers(1, 30))
def test_contracting_edges_makes_no_cycle(recipe: Recipe, maximum: int) -> None:
    """On graphs where levels have grouped nothing yet, so that every edge has to be searched."""
    g = recipe.build()
    units = Contraction.of_reads(reads_of(g))
    merged, new = units.merge(edge_groups(units, [n.op_type == "A" for n in g.nodes], maximum))
    assert sum(merged.sizes) == len(g.nodes)
    assert max(merged.sizes) <= maximum
    assert all(new[p] <= new[i] for i in range(len(g.nodes)) for p in g.predecessors[i])


@pytest.mark.parametrize("seed", range(40))
def test_the_order_kept_while_contracting_edges_stays_topological(seed: int) -> None:
    """After each contraction every unit has a place before those of its successors, one that no other unit has."""
    draw = random.Random(seed)
    edges = sorted(
        {(draw.randrange(max(0, t - 12), t), t) for t in range(1, 60) for _ in range(draw.choice([1, 1, 2]))}
    )
    source, target = np.array(edges).T
    merger = _EdgeMerger(Contraction([1] * 60, (source, target)), [draw.random() < 0.8 for _ in range(60)], 99)
    for u in range(60):
        if merger.open[u] and merger.alive[u]:
            merger.absorb(u)
            alive = [w for w in range(60) if merger.alive[w]]
            assert len({merger.place[w] for w in alive}) == len(alive)
            assert all(merger.place[w] < merger.place[s] for w in alive for s in merger.successors[w])
    assert merger.merged > 0
