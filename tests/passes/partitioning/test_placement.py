"""Marks given by rules and by metadata: which nodes get them, and what is refused."""

from __future__ import annotations

import pytest

from tests.passes.partitioning.graphs import graph
from xrt_core.errors import GraphError, OptionError
from xrt_core.ir.graph import MARK, REGION, Annotations, Graph, SourceLocation
from xrt_core.passes.partitioning import MarkRule, apply_marks, names_an_engine, without_marks

CHAIN = "enc_a = A(x); enc_b = B(enc_a); dec_a = A(enc_b)"


def marks_of(g: Graph) -> list[tuple[str | None, str]]:
    return [(n.annotations.engine, n.annotations.region) for n in g.nodes]


def test_a_rule_marks_by_name_and_another_by_operator() -> None:
    """Each rule is a region; the host has none."""
    found = apply_marks(graph(CHAIN), [MarkRule("name:enc_*", "one"), MarkRule("op:[A]", "one")])
    assert marks_of(found) == [("one", "name:enc_*"), ("one", "name:enc_*"), ("one", "op:[A]")]
    assert marks_of(apply_marks(graph(CHAIN), [MarkRule("op:B", "host")])) == [(None, ""), ("host", ""), (None, "")]


def test_a_node_without_a_name_goes_by_its_first_output() -> None:
    """As Netron and others call it."""
    g = graph("a = A(x)")
    unnamed = g.replace(nodes=[type(n)(n.op_type, n.inputs, n.outputs, version=1) for n in g.nodes])
    assert marks_of(apply_marks(unnamed, [MarkRule("name:a", "one")])) == [("one", "name:a")]


def test_metadata_marks_and_tells_regions_apart() -> None:
    """One region for each engine, or for each label."""
    noted = [Annotations(metadata={MARK: "one"}), Annotations(metadata={MARK: "one", REGION: "tail"})]
    g = graph("a = A(x); b = A(a); c = A(b)", a=noted[0], b=noted[1], c=Annotations(metadata={"other": "1"}))
    assert marks_of(apply_marks(g, ())) == [("one", f"{MARK}=one"), ("one", "tail"), (None, "")]


def test_a_graph_without_marks_is_given_back() -> None:
    """The same object."""
    g = graph(CHAIN)
    assert apply_marks(g, ()) is g
    assert without_marks(g) is g


@pytest.mark.parametrize(
    ("own", "rules", "message"),
    [
        (Annotations(), [("name:a", "one"), ("op:A", "two")], "'a'.*'one' by marks={'name:a'.*'two' by marks={'op:A'"),
        (
            Annotations(engine="one", source=SourceLocation("m.py", 3)),
            [("op:A", "host")],
            r"'one' by power_by_engine \(m.py:3\) and for 'host' by marks=",
        ),
        (Annotations(metadata={MARK: "one"}), [("op:A", "two")], "'one' by the model's metadata 'xrt.mark' and for"),
    ],
    ids=["rules", "block", "metadata"],
)  # fmt: skip
def test_marks_that_contradict_each_other_are_an_error(
    own: Annotations, rules: list[tuple[str, str]], message: str
) -> None:
    """It names both and the node."""
    with pytest.raises(GraphError, match=message):
        apply_marks(graph("a = A(x)", a=own), [MarkRule(*r) for r in rules])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("name:enk_a", r"matches no node name of graph ''; the closest: enc_a"),
        ("op:C", "matches no operator.*there are: A, B"),
        ("name:ENC_*", "matches no node name"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(pattern: str, message: str) -> None:
    """With the closest names."""
    with pytest.raises(OptionError, match=message):
        apply_marks(graph(CHAIN), [MarkRule(pattern, "one")])


@pytest.mark.parametrize("pattern", ["encoder", "node:a", "op:", ""])
def test_a_pattern_without_a_kind_is_an_error(pattern: str) -> None:
    """It says how one looks."""
    with pytest.raises(OptionError, match="names no nodes; say 'name:encoder"):
        MarkRule(pattern, "one")


def test_bodies_are_marked_as_well() -> None:
    """By rules about what is in them, and by the mark of the node that has them; their own marks win over that."""
    inner = graph("p = A(q); r = B(p)", r=Annotations(engine="host"))
    outer = graph("c = If(x)")
    node = outer.nodes[0].replace(attributes={"then_branch": Graph((), inner.outputs, inner.nodes, opsets={"": 13})})
    g = outer.replace(nodes=[node])
    by_if = apply_marks(g, [MarkRule("op:If", "one")])
    (body,) = by_if.nodes[0].subgraphs
    assert marks_of(body) == [("one", "op:If"), ("host", "")]
    (body,) = apply_marks(g, [MarkRule("name:p", "two")]).nodes[0].subgraphs
    assert marks_of(body) == [("two", "name:p"), ("host", "")]
    assert names_an_engine(by_if)
    assert not names_an_engine(without_marks(by_if))
    assert not names_an_engine(g)  # a mark for the host alone leaves automatic clustering on
