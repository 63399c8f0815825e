"""What holds for every clustering of every graph, tried on random ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.dag import ancestors, is_convex, is_sorted
from tests.passes.partitioning.graphs import Recipe, engine, execute, recipes
from tests.profiles import examples
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning import UNLIMITED, Clustering, Marks, cluster, mark, outline

ENGINES = {1: [engine("one", *"AB")], 2: [engine("one", *"AB"), engine("two", *"BC")]}
bounds = st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3, UNLIMITED])).map(lambda b: (b[0], b[0] + b[1]))


def unit_ancestors(g: Graph, clustering: Clustering) -> list[set[int]]:
    """Per node the nodes that run before it once clusters run as one, those of its own cluster left out."""
    group = clustering.assignment()
    members = {k: set(c.nodes) for k, c in enumerate(clustering.clusters)}
    unit = [members[k] if k >= 0 else {i} for i, k in enumerate(group)]
    found = []
    for i in range(len(g.nodes)):
        seen: set[int] = set()
        todo = list(unit[i])
        while todo:
            for p in g.predecessors[todo.pop()]:
                new = (unit[p] - seen) - unit[i]
                seen |= new
                todo.extend(new)
        found.append(seen)
    return found


def is_acyclic(g: Graph, clustering: Clustering) -> bool:
    """Whether the graph with all clusters contracted at once has no cycle."""
    group = [k if k >= 0 else len(g.nodes) + i for i, k in enumerate(clustering.assignment())]
    edges = {(group[p], group[i]) for i in range(len(g.nodes)) for p in g.predecessors[i] if group[p] != group[i]}
    left = set(group)
    while left:
        free = {u for u in left if not any(b == u for _, b in edges)}
        if not free:
            return False
        left -= free
        edges = {(a, b) for a, b in edges if a not in free}
    return True


def check(g: Graph, marks: Marks, found: Clustering, minimum: int, maximum: int) -> None:
    """Everything that must hold whatever the options are."""
    placed = sorted([i for c in found.clusters for i in c.nodes] + list(found.reasons))
    assert placed == list(range(len(g.nodes)))
    assert all(found.reasons.values())
    assert is_acyclic(g, found)
    for c in found.clusters:
        assert is_convex(g, c.nodes)
        assert minimum <= len(c.nodes) <= maximum
        annotations = [g.nodes[i].annotations for i in c.nodes]
        for i in c.nodes:
            verdict = marks.verdicts[c.engine][i]
            assert verdict is not None
            assert verdict.ok
        assert {a.device or marks.device for a in annotations} == {c.device}
        assert {a.model_update for a in annotations} == {c.model_update}
        assert len({a.sbp for a in annotations}) == 1
    for i, reason in found.reasons.items():
        taken = any(v is not None and v.ok for e in marks.engines for v in [marks.verdicts[e][i]])
        assert taken == ("minimum_nodes" in reason)
    if minimum == 1:
        assert not any("minimum_nodes" in r for r in found.reasons.values())


@examples(250)
@given(recipes(annotated=True), st.sampled_from([1, 2]), bounds, st.booleans())
def test_every_clustering_keeps_the_rules(recipe: Recipe, engines: int, size: tuple[int, int], strict: bool) -> None:
    """Complete, convex, jointly acyclic, of one kind each, within bounds, with a reason for the rest."""
    g = recipe.build()
    marks = mark(g, ENGINES[engines])
    found = cluster(g, marks, minimum_nodes=size[0], maximum_nodes=size[1], strict=strict)
    check(g, marks, found, *size)


@examples(250)
@given(recipes(annotated=True), st.sampled_from([1, 2]), bounds)
def test_strict_clusters_delay_no_host_node(recipe: Recipe, engines: int, size: tuple[int, int]) -> None:
    """What must run before a node of the host is the same before and after, updates that nothing reads aside."""
    g = recipe.build()
    found = cluster(g, mark(g, ENGINES[engines]), minimum_nodes=size[0], maximum_nodes=size[1])
    after = unit_ancestors(g, found)
    for i in found.reasons:
        if not (g.nodes[i].annotations.model_update and not g.successors[i]):
            assert after[i] == ancestors(g, [i])


@examples(250)
@given(recipes(annotated=True), st.sampled_from([1, 2]), bounds, st.booleans())
def test_folding_keeps_results(recipe: Recipe, engines: int, size: tuple[int, int], strict: bool) -> None:
    """The folded graph is sorted and computes what the graph did; constants inside are the same objects."""
    g = recipe.build()
    found = cluster(g, mark(g, ENGINES[engines]), minimum_nodes=size[0], maximum_nodes=size[1], strict=strict)
    folded = outline(g, found)
    assert is_sorted(folded)
    launches = [n for n in folded.nodes if n.op_type == "Launch"]
    assert len(launches) == len(found.clusters)
    assert len(folded.nodes) == len(found.clusters) + len(found.reasons)
    assert execute(folded, [3, 7]) == execute(g, [3, 7])
    for n in launches:
        body = n.attributes["function"].body
        assert all(v.data is None for v in n.inputs)
        assert not body.captures
        assert set(body.constants) <= set(g.constants)


@examples(150)
@given(recipes(annotated=True), st.sampled_from([1, 2]), bounds, st.booleans())
def test_clustering_is_deterministic_and_idempotent(
    recipe: Recipe, engines: int, size: tuple[int, int], strict: bool
) -> None:
    """An equal graph of other objects and names gives the same clusters, and a folded graph has none left to find."""
    options = {"minimum_nodes": size[0], "maximum_nodes": size[1], "strict": strict}
    g, twin = recipe.build(), recipe.build("w")
    found = cluster(g, mark(g, ENGINES[engines]), **options)
    assert cluster(twin, mark(twin, ENGINES[engines]), **options) == found
    folded = outline(g, found)
    again = cluster(folded, mark(folded, ENGINES[engines]), **options)
    assert again.clusters == ()
    assert outline(folded, again) is folded


@examples(150)
@given(recipes(ops="AB"), st.booleans())
def test_a_graph_that_an_engine_takes_whole_is_one_cluster(recipe: Recipe, strict: bool) -> None:
    """However it forks, joins and ends."""
    g = recipe.build()
    found = cluster(g, mark(g, ENGINES[1]), strict=strict)
    assert [c.nodes for c in found.clusters] == [tuple(range(len(g.nodes)))]


def partitions(items: list[int]) -> list[list[list[int]]]:
    """All ways to split `items` into groups."""
    if not items:
        return [[]]
    found = []
    for rest in partitions(items[1:]):
        found.append([[items[0]], *rest])
        found.extend([*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]] for k in range(len(rest)))
    return found


@examples(80)
@given(recipes(max_nodes=7, ops="AAAH"))
def test_strict_clusters_are_as_few_as_can_be(recipe: Recipe) -> None:
    """No other strict partition of the nodes that one engine takes has fewer clusters: all are tried."""
    g = recipe.build()
    found = cluster(g, mark(g, ENGINES[1]))
    taken = sorted(i for c in found.clusters for i in c.nodes)
    host = [i for i in range(len(g.nodes)) if i not in taken]
    before = {i: ancestors(g, [i]) for i in host}
    best = len(taken)
    for groups in partitions(taken):
        if len(groups) >= best:
            continue
        made = tuple(found.clusters[0].__class__("one", tuple(sorted(m)), "cpu") for m in groups)
        other = Clustering(made, dict.fromkeys(host, "host"), len(g.nodes))
        after = unit_ancestors(g, other)
        if is_acyclic(g, other) and all(after[i] == before[i] for i in host):
            best = len(groups)
    assert len(found.clusters) == best


@examples(150)
@given(recipes(ops="AAAH"))
def test_without_strict_no_edge_is_left_that_could_be_contracted(recipe: Recipe) -> None:
    """Joining two neighbouring clusters of the result would always make a cycle."""
    g = recipe.build()
    found = cluster(g, mark(g, ENGINES[1]), strict=False)
    group = found.assignment()
    neighbours = {
        (group[p], group[i]) for i in range(len(g.nodes)) for p in g.predecessors[i] if group[p] >= 0 and group[i] >= 0
    }
    for a, b in sorted(neighbours):
        if a != b:
            joined = found.clusters[0].__class__(
                "one", tuple(sorted(found.clusters[a].nodes + found.clusters[b].nodes)), "cpu"
            )
            rest = tuple(c for k, c in enumerate(found.clusters) if k not in (a, b))
            assert not is_acyclic(g, Clustering((joined, *rest), found.reasons, len(g.nodes)))


@examples(100)
@given(recipes(annotated=True), st.booleans())
def test_one_engine_more_leaves_no_more_on_the_host(recipe: Recipe, strict: bool) -> None:
    """With a second engine behind the first the host has fewer nodes or as many, and the first keeps its own."""
    g = recipe.build()
    alone, both = (cluster(g, mark(g, ENGINES[k]), strict=strict) for k in (1, 2))
    assert set(both.reasons) <= set(alone.reasons)
    first = [sorted(i for c in found.clusters if c.engine == "one" for i in c.nodes) for found in (alone, both)]
    assert first[0] == first[1]
