"""The cost model, and what it dissolves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.partitioning.graphs import Recipe, engine, graph, names, recipes
from tests.profiles import examples
from tests.random_graphs import F32, graph_of, node
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import Candidate, Clustering, Costs, cluster, costs_for, mark, outline, report
from xrt_core.passes.partitioning.contraction import reads_of
from xrt_core.passes.partitioning.cost_model import (
    ACCELERATOR,
    ACCELERATOR_WITH_HOST,
    CPU,
    Estimator,
    Rates,
    flops,
    nbytes,
    passes_of,
)

NOTHING = Rates(0.0, math.inf, math.inf)


def chain(*ops: str, shape: tuple[int, ...] = (4,)) -> Graph:
    """x through unary operators, all typed."""
    values = [Value(f"v{i}", TensorType(F32, shape)) for i in range(len(ops) + 1)]
    return graph_of(
        values[:1], values[-1:], [node(op, [a], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    )


def clustered(g: Graph, *engines: Candidate, costs: Costs = CPU, **options: object) -> Clustering:
    return cluster(g, mark(g, engines), costs=lambda device: costs, **options)


def estimate(g: Graph, costs: Costs, nodes: Sequence[int]) -> tuple[float, float, float]:
    """Of one cluster: seconds on the host, on the engine, and of its boundary."""
    assignment = np.full(len(g.nodes), -1)
    assignment[list(nodes)] = 0
    host, engine, boundary = Estimator(g, reads_of(g))(assignment, [costs], np.zeros(1, np.int64))[:, 0].tolist()
    return host, engine, boundary


def test_the_estimate_by_hand() -> None:
    """Every term of the formula, one at a time, for a product of 8 x 16 by a constant of 16 x 4, and a Relu."""
    x, h, y = (Value(n, TensorType(F32, s)) for n, s in (("x", (8, 16)), ("h", (8, 4)), ("y", (8, 4))))
    w = Value.constant(np.zeros((16, 4), np.float32), "w")
    g = graph_of([x], [y], [node("MatMul", [x, w], [h]), node("Relu", [h], [y])])

    def told(costs: Costs, *nodes: int) -> tuple[float, float, float]:
        return estimate(g, costs, nodes or (0, 1))

    assert told(Costs(Rates(1.0, math.inf, math.inf), NOTHING, 0, 0)) == (3.0, 0, 0)  # passes: MatMul 2, Relu 1
    assert told(Costs(Rates(0, 1.0, math.inf), NOTHING, 0, 0))[0] == 2 * (512 + 128) + (128 + 128)
    assert told(Costs(Rates(0, math.inf, 1.0), NOTHING, 0, 0))[0] == 2 * 8 * 16 * 4 + 32
    assert told(Costs(NOTHING, NOTHING, 5.0, 0)) == (0, 5.0, 5.0)
    assert told(Costs(NOTHING, NOTHING, 0, 1.0)) == (0, 2.0, 2.0)  # x and y; h stays inside, w is there
    assert told(Costs(NOTHING, NOTHING, 0, 0, copy=1.0)) == (0, 640, 640)
    assert told(Costs(NOTHING, Rates(0, 1.0, math.inf), 0, 0)) == (0, 640, 0)
    assert told(Costs(NOTHING, Rates(0, math.inf, 1.0), 0, 0)) == (0, 1056, 0)
    assert told(Costs(NOTHING, NOTHING, 0, 1.0), 0)[1] == 2.0  # of the product alone h crosses


def test_a_lookup_reads_what_it_returns() -> None:
    """A column of a large table takes the host no pass over the table."""
    x, y = Value("x", TensorType(F32, (3000, 100))), Value("y", TensorType(F32, (3000,)))
    column = Value.constant(np.array(7), "column")
    g = graph_of([x], [y], [node("Gather", [x, column], [y], axis=1)])
    assert estimate(g, Costs(Rates(0, 1.0, math.inf), NOTHING, 0, 0), [0])[0] == 3 * (12_000 + 12_000)


@examples(150)
@given(recipes(max_nodes=16), st.data())
def test_all_clusters_are_estimated_as_one_by_one(recipe: Recipe, data: st.DataObject) -> None:
    """Against the formula, written out for one cluster after another; captures, constants and outputs included."""
    g = recipe.build()
    kinds = [TensorType(F32, (2,)), TensorType(F32, (3, 5)), TensorType(F32, ("n",)), None]
    g = retyped(g, {v: data.draw(st.sampled_from(kinds)) for n in g.nodes for v in n.outputs if v is not None})
    owner = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=len(g.nodes), max_size=len(g.nodes))))
    costs = [Costs(Rates(2.0, 3.0, 5.0), Rates(0, 7.0, 11.0), 13.0, 17.0, 19.0), CPU]
    which = np.array(data.draw(st.lists(st.integers(0, 1), min_size=4, max_size=4)))
    found = Estimator(g, reads_of(g))(owner, costs, which)
    for k in range(4):
        c, nodes = costs[which[k]], [i for i in range(len(g.nodes)) if owner[i] == k]
        made = {v for i in nodes for v in g.nodes[i].outputs if v is not None}
        entry = {v for i in nodes for v in g.nodes[i].uses() if v.data is None} - made
        leaving = {v for v in made if v in g.outputs or any(owner[i] != k for i in g.consumers.get(v, ()))}
        moved = sum(nbytes(v) for v in entry) + sum(nbytes(v) for v in leaving)
        around = c.launch + len(entry | leaving) * c.transfer + moved / c.copy
        host = work = 0.0
        for n in (g.nodes[i] for i in nodes):
            size = sum(nbytes(v) for v in (*n.inputs, *n.outputs) if v is not None and v.data is None)
            host += passes_of(n) * c.host.call + max(passes_of(n) * size / c.host.bandwidth, flops(n) / c.host.flops)
            work += flops(n)
        engine = around + max(moved / c.engine.bandwidth, work / c.engine.flops)
        assert found[:, k].tolist() == pytest.approx([host, engine, around], rel=1e-12)


def retyped(g: Graph, types: Mapping[Value, TensorType | None]) -> Graph:
    """The graph with these types in it, bodies included."""
    new = {v: v.with_type(t) for v, t in types.items()}

    def node_of(n: Node) -> Node:
        bodies = {
            k: b.replace(nodes=[node_of(m) for m in b.nodes]) for k, b in n.attributes.items() if isinstance(b, Graph)
        }
        ins, outs = ([None if v is None else new.get(v, v) for v in ends] for ends in (n.inputs, n.outputs))
        return n.replace(inputs=ins, outputs=outs, attributes={**n.attributes, **bodies})

    return g.replace(nodes=[node_of(n) for n in g.nodes], outputs=[new.get(v, v) for v in g.outputs])


def test_a_value_that_is_read_outside_crosses_once() -> None:
    """However often it is read, and outputs of the graph as well."""
    g = graph("a = A(x); b = A(a); h = H(a); i = H(a)", outputs="a b h i")
    costs = Costs(NOTHING, NOTHING, 0, 1.0)
    assert estimate(g, costs, (0, 1))[1] == 3.0
    assert estimate(g, costs, (0,))[1] == 2.0


def test_constants_for_each_device() -> None:
    """Every device but the host's processor has memory of its own; a host on the device copies nothing."""
    assert costs_for(is_host=False) is ACCELERATOR
    assert costs_for(is_host=False, host_on_device=True) is ACCELERATOR_WITH_HOST
    assert costs_for(is_host=True, host_on_device=True) is CPU


@pytest.mark.parametrize("operator", ["TreeEnsembleClassifier", "TreeEnsembleRegressor", "SVMClassifier"])
def test_classical_models_pay_a_launch(operator: str) -> None:
    """One row takes the host 60 us and more, so that a node whose results are maps' on the host is worth a launch."""
    n = Node(operator, [Value("x")], [Value("y")], domain="ai.onnx.ml", version=3)
    assert passes_of(n) * CPU.host.call > 5 * CPU.launch


def test_passes_know_operators_by_family() -> None:
    """What is not in the table goes by its name, and else counts one."""
    n = node("ReduceSum", [Value("x")], [Value("y")])
    assert passes_of(n) == 4
    assert passes_of(node("Abs", [Value("x")], [Value("y")])) == 1


def test_a_tiny_fragment_between_host_nodes_goes_to_the_host() -> None:
    """And says what it would have cost; with `prune` off it stays."""
    g = chain("Exp", "Neg", "Log")
    one = engine("one", "Neg")
    found = clustered(g, one)
    assert names(g, found) == []
    assert found.reasons[1].startswith(
        "one: a cluster of 1 node would not pay, estimated 6.0 us lost a call: 1.0 us on"
    )
    kept = clustered(g, one, prune=False)
    assert names(g, kept) == ["one: v2"]
    assert kept.clusters[0].estimate is not None
    assert kept.clusters[0].estimate.gain == pytest.approx(-6e-6, rel=1e-3)


def test_a_graph_that_engines_take_whole_is_left_alone() -> None:
    """However small: no value goes to the host and back, and whoever named the engine gets it."""
    assert len(clustered(chain("Neg", "Abs"), engine("one", "Neg", "Abs")).clusters) == 1
    assert len(clustered(chain("Neg", "Abs"), engine("one", "Neg"), engine("two", "Abs")).clusters) == 2


def test_a_single_heavy_node_stays() -> None:
    """One matrix product between nodes of the host, and one convolution."""
    values = [Value(f"v{i}", TensorType(F32, (512, 512))) for i in range(4)]
    a, b, c, d = values
    g = graph_of([a], [d], [node("Neg", [a], [b]), node("MatMul", [b, b], [c]), node("Neg", [c], [d])])
    assert names(g, clustered(g, engine("one", "MatMul"))) == ["one: v2"]
    assert names(g, clustered(g, engine("one", "MatMul"), costs=ACCELERATOR)) == ["one: v2"]


def test_copies_decide_on_a_device_of_its_own() -> None:
    """Three passes over 4 MB pay beside the host, and not where the arrays must be brought there over a slow link."""
    g = chain("Exp", "Neg", "Abs", "Neg", "Log", shape=(1 << 20,))
    one = engine("one", "Neg", "Abs")
    slow = Costs(ACCELERATOR.host, ACCELERATOR.engine, ACCELERATOR.launch, ACCELERATOR.transfer, copy=5e9)
    assert len(clustered(g, one).clusters) == 1
    assert len(clustered(g, one, costs=slow).clusters) == 0


def test_a_marked_region_is_never_dissolved() -> None:
    """It carries its estimate all the same."""
    g = chain("Exp", "Neg", "Log")
    pinned = g.nodes[1].replace(annotations=Annotations(engine="one", region="block 1"))
    found = clustered(g.replace(nodes=[g.nodes[0], pinned, g.nodes[2]]), engine("one", "Neg"))
    assert [c.region for c in found.clusters] == ["block 1"]
    assert found.clusters[0].estimate is not None
    assert found.clusters[0].estimate.gain < 0


def test_what_does_not_pay_for_one_engine_is_offered_to_the_next() -> None:
    """Neg alone does not pay on the first; with its neighbours on the second it does."""
    ops = ["Exp", *["Softmax"] * 3, "Neg", *["Softmax"] * 3, "Log"]
    g = chain(*ops)
    one, two = engine("one", "Neg"), engine("two", "Neg", "Softmax")
    assert names(g, clustered(g, one, two, prune=False)) == ["two: v2 v3 v4", "one: v5", "two: v6 v7 v8"]
    assert names(g, clustered(g, one, two)) == ["two: v2 v3 v4 v5 v6 v7 v8"]


def test_dissolving_delays_no_one_else_and_breaks_up_nothing() -> None:
    """s alone does not pay. It now waits for all of a's cluster, but whatever reads s would have waited anyway."""
    heavy = "Softmax"
    x, a, b, h = (Value(n, TensorType(F32, (64, 64))) for n in "xabh")
    small = Value("s", TensorType(F32, (1,)))
    nodes = [node(heavy, [x], [a]), node(heavy, [a], [b]), node("Size", [a], [small]), node("Exp", [b], [h])]
    g = graph_of([x], [h, small], nodes)
    found = clustered(g, engine("one", heavy, "Size"))
    assert names(g, found) == ["one: a b"]
    assert "would not pay" in found.reasons[2]


def sprinkled(layers: int, size: int) -> Graph:
    """Layers of six small nodes, of which one is unsupported, and one product of `size` in the middle."""
    value = first = Value("x", TensorType(F32, (size, size)))
    nodes = []
    for i in range(layers):
        for op in ("Neg", "Abs", "Exp", "Relu", "Tanh", "Neg"):
            made = Value(f"{op}{i}_{len(nodes)}", TensorType(F32, (size, size)))
            nodes.append(node(op, [value], [made]))
            value = made
        if i == layers // 2:
            made = Value("heavy", TensorType(F32, (size, size)))
            nodes.append(node("MatMul", [value, value], [made]))
            value = made
    return graph_of([first], [value], nodes)


def test_a_big_model_does_not_end_as_a_hundred_tiny_engines() -> None:
    """A hundred fragments between unsupported nodes: of 4 x 4 one is left, of 256 x 256 what pays."""
    one = engine("one", "Neg", "Abs", "Relu", "Tanh", "MatMul")
    g = sprinkled(100, 4)
    assert len(clustered(g, one, prune=False).clusters) == 101
    assert [any(g.nodes[i].name == "heavy" for i in c.nodes) for c in clustered(g, one).clusters] == [True]
    big = sprinkled(100, 256)
    left = clustered(big, one)
    assert "heavy" in " ".join(names(big, left))
    assert all(c.estimate is not None and c.estimate.gain > 0 for c in left.clusters)


@examples(150)
@given(recipes(max_nodes=20, ops="AABCH"))
def test_pruning_leaves_only_what_pays(recipe: Recipe) -> None:
    """Whatever the graph: nothing is dissolved where the host has nothing, else every cluster saves something, and no
    node is taken that was not taken without pruning."""
    g = recipe.build()
    engines = [engine("one", "A", "B"), engine("two", "B", "C")]
    costs = Costs(Rates(3e-6, math.inf, math.inf), NOTHING, 5e-6, 1e-6)
    whole, found = (clustered(g, *engines, costs=costs, prune=p) for p in (False, True))
    if not whole.reasons:
        assert not found.reasons
        assert len(found.clusters) <= len(whole.clusters)
    else:
        assert all(c.estimate is not None and c.estimate.gain > 0 for c in found.clusters)
    assert set(whole.reasons) <= set(found.reasons)
    told = report(g.nodes, found, outline(g, found)).to_json()
    assert all(
        c["estimate"]["gain_us"] == pytest.approx(c["estimate"]["host_us"] - c["estimate"]["engine_us"], abs=0.002)
        for c in told["clusters"]
    )
