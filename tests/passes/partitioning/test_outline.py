"""What stands in a folded graph."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.passes.partitioning.graphs import TYPE, engine, graph
from xrt_core.errors import GraphError, InternalError
from xrt_core.ir.function import InputOutputAlias
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.passes.partitioning import Clustering, cluster, mark, outline, report

TOY = [engine("toy", "A", "B")]


def folded(g: Graph, **options: object) -> Graph:
    """`g` with its clusters folded."""
    return outline(g, cluster(g, mark(g, TOY), **options))


def labels(values: object) -> list[str]:
    """The names of values."""
    return [v.name for v in values]


def test_a_launch_holds_its_cluster_as_a_function() -> None:
    """Domain, version, attributes, params, returns; values are shared."""
    g = graph("a = A(y, x); b = B(a, z, y); h = H(b)", outputs="a h")
    out = folded(g)
    assert [n.operator for n in out.nodes] == ["xrt.Launch", "H"]
    launch = out.nodes[0]
    function = launch.attributes["function"]
    assert (launch.version, launch.attributes["engine"], launch.name, function.name) == (1, "toy", "toy_0", "toy_0")
    assert labels(launch.inputs) == labels(function.params) == ["y", "x", "z"]
    assert labels(launch.outputs) == labels(function.returns) == ["a", "b"]
    assert function.body.nodes == g.nodes[:2]
    assert out.nodes[1] is g.nodes[2]
    assert (out.inputs, out.outputs) == (g.inputs, g.outputs)
    assert out.opsets == {"": 13, "xrt": 1}


def test_what_the_graph_has_at_its_ends_comes_in_its_order() -> None:
    """Before what other functions and nodes make and read; so a graph of one function is that function."""
    names = ("x", "y", "z", "h", "a", "b")
    x, y, z, h, a, b = (Value(n, TYPE) for n in names)
    nodes = [Node("H", [x], [h], version=1), Node("A", [h, z, y], [a], version=1), Node("B", [a, x], [b], version=1)]
    g = Graph([x, y, z], [b, a], nodes, opsets={"": 13})
    launch = folded(g).nodes[-1]
    assert labels(launch.inputs) == ["x", "y", "z", "h"]
    assert labels(launch.outputs) == ["b", "a"]


def test_a_value_read_inside_only_is_not_returned() -> None:
    """And one returned twice by the graph is returned once by the function."""
    g = graph("a = A(x); b = A(a)", outputs="b b")
    assert labels(folded(g).nodes[0].outputs) == ["b"]


def test_constants_stay_inside_and_are_not_copied() -> None:
    """The body uses the same Value, hence the same array."""
    x, y = Value("x", TYPE), Value("y", TYPE)
    weight = Value.constant(np.ones(2, np.float32), "w")
    out = folded(Graph([x], [y], [Node("A", [x, weight], [y], version=1)], opsets={"": 13}))
    launch = out.nodes[0]
    assert launch.inputs == (x,)
    assert launch.attributes["function"].body.constants == (weight,)


def test_left_out_inputs_and_outputs_are_kept() -> None:
    """None among inputs or outputs is no param and no return."""
    x, y = Value("x", TYPE), Value("y", TYPE)
    out = folded(Graph([x], [y], [Node("A", [None, x], [None, y], version=1)], opsets={"": 13}))
    assert (labels(out.nodes[0].inputs), labels(out.nodes[0].outputs)) == (["x"], ["y"])
    assert out.nodes[0].attributes["function"].body.nodes[0].inputs == (None, x)


def test_captures_of_a_clustered_node_are_params() -> None:
    """A function sees nothing of the graph around it but its params."""
    g = graph("a = H(x); b = A(y)")
    a, b = g.nodes
    r = Value("r", TYPE)
    branch = Graph((), [r], [Node("H", [a.outputs[0]], [r], version=1)], opsets={"": 13})
    out = folded(g.replace(nodes=[a, b.replace(attributes={"then_branch": branch})]))
    assert labels(out.nodes[1].inputs) == ["y", "a"]


def test_aliases_at_the_boundary_become_the_functions() -> None:
    """One whose input is made inside is not at the boundary."""
    update = Annotations(model_update=True, aliases=((0, 0),))
    g = graph("u = A(w, g); v = A(u, g)", outputs="u v", u=update, v=update)
    launch = folded(g).nodes[0]
    assert launch.attributes["function"].aliases == (InputOutputAlias(0, 0),)
    assert launch.annotations.aliases == ((0, 0),)
    assert launch.annotations.model_update


def test_two_updates_of_one_variable_share_its_storage_once() -> None:
    """The first of two aliases of one param stands."""
    update = Annotations(aliases=((0, 0),))
    g = graph("u = A(w, g); v = A(w, u)", outputs="u v", u=update, v=update)
    assert folded(g).nodes[0].attributes["function"].aliases == (InputOutputAlias(0, 0),)


def test_nodes_stand_as_early_as_they_can_else_in_the_order_of_the_graph() -> None:
    """The cluster of c starts at index 1 and waits for the host's b at index 2."""
    g = graph("a = H(x); c = A(y); b = H(x); d = A(c, b); e = H(d)")
    assert [n.name for n in folded(g).nodes] == ["a", "b", "toy_0", "e"]


def test_launches_of_an_earlier_folding_keep_their_names() -> None:
    """A second folding, for another engine, does not use them again."""
    g = graph("a = A(x); c = C(a)")
    once = folded(g)
    more = engine("toy", "C")
    twice = outline(once, cluster(once, mark(once, [more])))
    assert [n.name for n in twice.nodes] == ["toy_0", "toy_1"]


def test_device_and_sbp_travel_to_the_launch() -> None:
    """As far as all nodes of the cluster share them."""
    where = Annotations(device="cuda:1", sbp=("split(0)",), placement=("cuda:0", "cuda:1"))
    launch = folded(graph("a = A(x); b = A(a)", outputs="a b", a=where, b=where)).nodes[0]
    assert launch.annotations.device == "cuda:1"
    assert launch.annotations.sbp == ("split(0)", "split(0)")
    assert launch.annotations.placement == ("cuda:0", "cuda:1")


def test_a_boundary_without_a_static_type_is_an_error() -> None:
    """An engine that took such a node made a mistake, and the message names the value."""
    x, y = Value("x", TYPE), Value("odd")
    with pytest.raises(GraphError, match="'odd'"):
        folded(Graph([x], [y], [Node("A", [x], [y], version=1)], opsets={"": 13}))


def test_unnamed_values_are_fine() -> None:
    """Params and returns get names of their own."""
    x, y = Value("", TYPE), Value("", TYPE)
    function = (
        folded(Graph([x], [y], [Node("A", [x], [y], version=1)], opsets={"": 13})).nodes[0].attributes["function"]
    )
    assert all(p.name for p in (*function.params, *function.returns))


def test_a_clustering_of_another_graph_is_refused() -> None:
    """It would fold the wrong nodes."""
    g, other = graph("a = A(x)"), graph("a = A(x); b = A(a)")
    with pytest.raises(InternalError, match="1 nodes for a graph of 2"):
        outline(other, cluster(g, mark(g, TOY)))


def test_clusters_that_wait_for_each_other_are_refused() -> None:
    """A clustering made by hand that is not convex."""
    g = graph("a = A(x); h = H(a); b = A(h)")
    good = cluster(g, mark(g, TOY))
    bad = type(good.clusters[0])("toy", (0, 2), "cpu")
    with pytest.raises(InternalError, match="cycle"):
        outline(g, Clustering((bad,), {1: "host"}, 3))


def test_the_garbage_collector_runs_again_afterwards() -> None:
    """Also after an error, and it stays off where it was off."""
    g = graph("a = A(x)")
    folded(g)
    assert gc.isenabled()
    with pytest.raises(InternalError):
        outline(graph(""), cluster(g, mark(g, TOY)))
    assert gc.isenabled()
    gc.disable()
    try:
        folded(g)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_report_names_every_cluster_and_every_host_node() -> None:
    """As objects and as plain data."""
    g = graph("a = A(x); b = B(a); c = A(b); h = H(c)")
    found = cluster(g, mark(g, TOY))
    r = report(g.nodes, found, outline(g, found))
    assert r.offloaded_share == 0.75
    assert r.to_json() == {
        "node_count": 4,
        "offloaded_share": 0.75,
        "clusters": [
            {
                "name": "toy_0",
                "engine": "toy",
                "device": "cpu",
                "node_count": 3,
                "inputs": [{"name": "x", "type": "float32[2]"}],
                "outputs": [{"name": "c", "type": "float32[2]"}],
                "operators": {"A": 2, "B": 1},
                "nodes": ["a", "b", "c"],
                "pinned": False,
                "model_update": False,
                "note": "",
                "region": "",
                "estimate": None,
            }
        ],
        "host_nodes": [{"index": 3, "name": "h", "operator": "H", "reason": "toy: no kernel for H"}],
    }


def test_the_report_of_an_empty_graph_offloads_nothing() -> None:
    """No division by zero nodes."""
    g = graph("")
    found = cluster(g, mark(g, TOY))
    assert report(g.nodes, found, outline(g, found)).offloaded_share == 0.0
