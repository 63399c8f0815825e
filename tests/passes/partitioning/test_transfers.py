"""Converters as nodes: one per transfer between spaces, none where nothing is transferred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from tests.random_graphs import F32, graph_of, node
from xrt_core.ir.function import Function, launch
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.passes.partitioning.outline import insert_converters, is_converter, space_of

T = TensorType(F32, (2,))


def value(name: str) -> Value:
    return Value(name, T)


def on(engine: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> Node:
    """A launch on an engine: every output is the sum of all inputs."""
    inner = [Value(f"p{i}", T) for i in range(len(inputs))]
    made = [Value(f"q{i}", T) for i in range(len(outputs))]
    nodes = [node("Sum", inner, [m]) for m in made]
    function = Function.from_graph(graph_of(inner, made, nodes), name=f"{engine}_{outputs[0].name}")
    return launch(function, engine, inputs, outputs)


def host(op: str, inputs: Sequence[Value], output: Value) -> Node:
    return node(op, inputs, [output])


def never(source: str, target: str) -> bool:
    return False


def transfers(graph: Graph) -> list[tuple[str, str, str]]:
    """(value, source, target) of every converter, in order."""
    return [
        (n.inputs[0].name, str(n.attributes["source"]), str(n.attributes["target"]))  # type: ignore[union-attr]
        for n in graph.nodes
        if is_converter(n)
    ]


def test_into_an_engine_and_out_again() -> None:
    """One converter for the input, one for the host that reads the result, and types go through."""
    x, a, y = value("x"), value("a"), value("y")
    g = insert_converters(graph_of([x], [y], [on("e", [x], [a]), host("Neg", [a], y)]), never)
    verify(g, "test")
    assert transfers(g) == [("x", "host", "e"), ("a", "e", "host")]
    assert [n.op_type for n in g.nodes] == ["EngineInputConvert", "Launch", "EngineOutputConvert", "Neg"]
    assert all(v.type == T for n in g.nodes if is_converter(n) for v in n.outputs if v is not None)


def test_neighbours_of_one_engine_hand_over_as_it_is() -> None:
    """Between two launches of an engine nothing stands."""
    x, a, b = value("x"), value("a"), value("b")
    g = insert_converters(graph_of([x], [b], [on("e", [x], [a]), on("e", [a], [b])]), never)
    assert transfers(g) == [("x", "host", "e")]
    assert g.nodes[2].inputs == (a,)
    assert g.outputs == (b,)


def test_between_engines_by_way_of_the_host_or_directly() -> None:
    """The host's form is shared with a host node; a direct converter takes the place of the pair."""
    x, a, b, c = value("x"), value("a"), value("b"), value("c")
    g = graph_of([x], [b, c], [on("e", [x], [a]), on("f", [a], [b]), host("Neg", [a], c)])
    by_host = insert_converters(g, never)
    assert transfers(by_host) == [("x", "host", "e"), ("a", "e", "host"), ("a_on_host", "host", "f")]
    assert by_host.nodes[-1].inputs[0].name == "a_on_host"  # type: ignore[union-attr]
    direct = insert_converters(g, lambda s, t: (s, t) == ("e", "f"))
    assert transfers(direct) == [("x", "host", "e"), ("a", "e", "f"), ("a", "e", "host")]
    verify(direct, "test")


def test_a_value_goes_to_a_space_once() -> None:
    """However many nodes read it there; one node that reads it twice as well."""
    x, a = value("x"), value("a")
    outs = [value(f"o{i}") for i in range(4)]
    nodes = [on("e", [x], [a]), *[host("Add", [a, a], o) for o in outs[:2]], *[on("f", [a, x], [o]) for o in outs[2:]]]
    g = insert_converters(graph_of([x], outs, nodes), never)
    assert sorted(transfers(g)) == [
        ("a", "e", "host"),
        ("a_on_host", "host", "f"),
        ("x", "host", "e"),
        ("x", "host", "f"),
    ]


def test_outputs_stay_where_they_were_made() -> None:
    """But for one that is returned twice: the second comes from the host."""
    x, a = value("x"), value("a")
    g = insert_converters(graph_of([x], [a, a], [on("e", [x], [a])]), never)
    assert g.outputs[0] is a
    assert transfers(g) == [("x", "host", "e"), ("a", "e", "host")]
    assert g.outputs[1].name == "a_on_host"
    verify(g, "test")


def test_outputs_whose_arrays_only_a_converter_knows() -> None:
    """They come to the host in the graph."""
    x, a = value("x"), value("a")
    g = insert_converters(graph_of([x], [a], [on("e", [x], [a])]), lambda s, t: (s, t) == ("e", "host"))
    assert transfers(g) == [("x", "host", "e"), ("a", "e", "host")]
    assert g.outputs[0].name == "a_on_host"


def test_constants_cross_as_well() -> None:
    """A launch that reads a constant of the graph."""
    c, a = Value.constant(np.zeros(2, np.float32), "c"), value("a")
    assert transfers(insert_converters(graph_of([], [a], [on("e", [c], [a])]), never)) == [("c", "host", "e")]


def test_what_a_body_captures_is_converted_before_the_node() -> None:
    """An If on the host whose branch uses an engine's value."""
    x, a, y = value("x"), value("a"), value("y")
    flag = Value("flag", TensorType(np.dtype(np.bool_), ()))
    branch = [graph_of([], [out], [host("Neg", [a], out)]) for out in (value("t"), value("u"))]
    choice = node("If", [flag], [y], then_branch=branch[0], else_branch=branch[1])
    g = insert_converters(graph_of([x, flag], [y], [on("e", [x], [a]), choice]), never)
    assert transfers(g) == [("x", "host", "e"), ("a", "e", "host")]
    assert [v.name for v in g.nodes[-1].captures] == ["a_on_host"]
    verify(g, "test")


def test_pairs_that_cancel_go() -> None:
    """Out to the host and in again, whoever put it there."""
    x, a, b, c, y = (value(n) for n in "xabcy")
    out = Node("EngineOutputConvert", [a], [b], {"source": "e", "target": "host"}, domain="xrt", version=1)
    back = Node("EngineInputConvert", [b], [c], {"source": "host", "target": "e"}, domain="xrt", version=1)
    g = insert_converters(graph_of([x], [y], [on("e", [x], [a]), out, back, on("e", [c], [y])]), never)
    assert transfers(g) == [("x", "host", "e")]
    assert g.nodes[-1].inputs == (a,)


def test_launches_under_a_name_for_several_engines_share_no_space() -> None:
    """What one of them made may be another library's: it goes by way of the host."""
    x, a, b = value("x"), value("a"), value("b")
    g = insert_converters(graph_of([x], [b], [on("auto", [x], [a]), on("auto", [a], [b])]), never, mixed=("auto",))
    assert transfers(g) == [("x", "host", "auto"), ("a", "auto", "host"), ("a_on_host", "host", "auto")]


def test_names_that_are_taken() -> None:
    """A converted value gets a name that nothing else in the graph has."""
    x, a, taken, y = value("x"), value("a"), value("a_on_host"), value("y")
    nodes = [on("e", [x], [a]), host("Neg", [x], taken), host("Add", [a, taken], y)]
    g = insert_converters(graph_of([x], [y, taken], nodes), never)
    assert [v.name for n in g.nodes if is_converter(n) for v in n.outputs if v is not None] == [
        "x_on_e",
        "a_on_host_1",
    ]


def test_a_graph_of_the_host_is_left_alone() -> None:
    """The very same object."""
    x, y = value("x"), value("y")
    g = graph_of([x], [y], [host("Neg", [x], y)])
    assert insert_converters(g, never) is g


@st.composite
def partitioned(draw: st.DrawFn) -> Graph:
    """A random graph of launches on three engines and host nodes."""
    pool, nodes = [value("x0"), value("x1")], []
    inputs = list(pool)
    for i in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
        out = value(f"v{i}")
        where = draw(st.sampled_from(["e", "f", "g", "host"]))
        nodes.append(host("Sum", read, out) if where == "host" else on(where, read, [out]))
        pool.append(out)
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4))
    return graph_of(inputs, outputs, nodes)


@examples(200)
@given(partitioned(), st.sets(st.sampled_from([(a, b) for a in "efg" for b in "efg" if a != b])))
def test_every_read_is_in_its_own_space(g: Graph, direct: set[tuple[str, str]]) -> None:
    """In any graph: values are read where they are, each goes to a space once, no pair cancels; a second run of the
    pass changes nothing, and without converters the graph is the one that was given."""
    made = insert_converters(g, lambda s, t: (s, t) in direct)
    verify(made, "test")
    space: dict[Value, str] = {}
    plain: dict[Value, Value] = {}
    seen = set()
    for n in made.nodes:
        if is_converter(n):
            v, out = n.inputs[0], n.outputs[0]
            assert v is not None
            assert out is not None
            source, target = n.attributes["source"], n.attributes["target"]
            assert space.get(v, "host") == source != target
            assert "host" in (source, target) or (source, target) in direct
            plain[out] = plain.get(v, v)
            assert (plain[out], target) not in seen
            assert space.get(plain[out], "host") != target
            seen.add((plain[out], target))
            space[out] = str(target)
        else:
            assert {space.get(v, "host") for v in n.uses()} == {space_of(n)}
            space.update((v, space_of(n)) for v in n.outputs if v is not None)
    for n, old in zip((n for n in made.nodes if not is_converter(n)), g.nodes, strict=True):
        assert [plain.get(v, v) for v in n.uses()] == list(old.uses())
    assert [plain.get(v, v) for v in made.outputs] == list(g.outputs)
    again = insert_converters(made, lambda s, t: (s, t) in direct)
    assert str(again) == str(made)
