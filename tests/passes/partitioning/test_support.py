"""Which engine is asked about which node, and what is said where none takes it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.partitioning.graphs import TYPE, engine, graph
from xrt_core.errors import GraphError
from xrt_core.ir.graph import Annotations, Graph, Node, SourceLocation, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import Candidate, cluster, mark, outline


def test_every_engine_is_asked_about_every_unpinned_node() -> None:
    """Verdicts come per engine and node, refusals with the engine's own reason."""
    marks = mark(graph("a = A(x); b = B(a)"), [engine("one", "A"), engine("two", "A", "B")])
    assert [v.ok for v in marks.verdicts["one"]] == [True, False]
    assert [v.ok for v in marks.verdicts["two"]] == [True, True]
    assert marks.reason(1) == "one: no kernel for B"


def test_a_host_node_has_the_reason_of_every_engine() -> None:
    """What each engine that was asked said stands in the reason, in their order."""
    marks = mark(graph("a = H(x)"), [engine("one", "A"), engine("two", "B")])
    assert marks.reason(0) == "one: no kernel for H; two: no kernel for H"
    assert mark(graph("a = H(x)"), []).reason(0) == "no engine takes part"


def test_a_pinned_node_is_asked_of_its_engine_alone() -> None:
    """The other engines have no verdict on it, and the host's nodes have none at all."""
    g = graph("a = A(x); b = A(a)", a=Annotations(engine="two"), b=Annotations(engine="host"))
    marks = mark(g, [engine("one", "A"), engine("two", "A")])
    assert [v and v.ok for v in marks.verdicts["one"]] == [None, None]
    assert [v and v.ok for v in marks.verdicts["two"]] == [True, None]
    assert marks.reason(1) == "pinned to the host"


def test_a_pinned_node_that_its_engine_refuses_is_an_error() -> None:
    """The message names node, operator, engine, reason and the line of the user."""
    place = Annotations(engine="one", source=SourceLocation("model.py", 7))
    with pytest.raises(GraphError, match=r"node 'a', operator H, \(model.py:7\) .*'one'.*no kernel for H"):
        mark(graph("a = H(x)", a=place), [engine("one", "A")])


def test_a_node_pinned_to_an_absent_engine_is_an_error() -> None:
    """The message names the engine and those that take part."""
    with pytest.raises(GraphError, match=r"node 'a', operator A,.*'far', which does not take part here \(one\)"):
        mark(graph("a = A(x)", a=Annotations(engine="far")), [engine("one", "A")])


def test_two_candidates_of_one_name_are_an_error() -> None:
    """And so is one that is called as the host."""
    with pytest.raises(GraphError, match="stand once"):
        mark(graph("a = A(x)"), [engine("one", "A"), engine("one", "B")])
    with pytest.raises(GraphError, match="not an engine"):
        mark(graph("a = A(x)"), [engine("host", "A")])


def test_a_node_of_the_other_phase_is_refused() -> None:
    """In its own phase it is taken."""
    g = graph("a = A(x)", a=Annotations(phase="train"))
    assert mark(g, [engine("one", "A")], "inference").reason(0) == (
        "one: it belongs to the phase 'train', and this is 'inference'"
    )
    verdict = mark(g, [engine("one", "A")], "train").verdicts["one"][0]
    assert verdict is not None
    assert verdict.ok


def test_without_automatic_clustering_only_pinned_nodes_are_taken() -> None:
    """The rest says why it stays on the host."""
    g = graph("a = A(x); b = A(a)", a=Annotations(engine="one"))
    found = cluster(g, mark(g, [engine("one", "A")], automatic=False))
    assert [c.nodes for c in found.clusters] == [(0,)]
    assert found.reasons == {
        1: "one: it carries no mark, and automatic clustering is off (automatic=True switches it on)"
    }


def test_a_launch_is_never_taken_again() -> None:
    """Even by an engine that takes everything, and even when it says it is pinned."""
    everything = Candidate("all", lambda n: Support.yes())
    g = graph("a = A(x)")
    folded = outline(g, cluster(g, mark(g, [everything])))
    marks = mark(folded, [everything])
    assert marks.reason(0) == "it is a launch already"
    pinned = folded.replace(nodes=[folded.nodes[0].replace(annotations=Annotations(engine="elsewhere"))])
    assert mark(pinned, [everything]).reason(0) == "it is a launch already"


def test_supports_judges_types() -> None:
    """Marking looks at no types itself: a node of unknown type goes to the engine that says yes."""
    x, y = Value("x", TYPE), Value("y")
    g = Graph([x], [y], [Node("A", [x], [y], version=1)], opsets={"": 13})
    verdict = mark(g, [engine("one", "A")]).verdicts["one"][0]
    assert verdict is not None
    assert verdict.ok


@pytest.mark.parametrize("automatic", [True, False])
def test_the_way_back_is_free_where_the_engine_of_its_pin_does_not_take_it(automatic: bool) -> None:
    """A node of phase "train" got its pin from a forward node; others keep theirs, and are errors as ever."""
    back = Annotations(engine="one", phase="train")
    g = graph("a = A(x); b = B(a)", a=back, b=back)
    marks = mark(g, [engine("one", "A"), engine("two", "A", "B")], "train", automatic=automatic)
    assert list(marks.pins) == ["one", None]
    assert [None if v is None else v.ok for v in marks.verdicts["one"]] == [True, False]
    assert [None if v is None else v.ok for v in marks.verdicts["two"]] == [None, True]
    with pytest.raises(GraphError, match="pinned to engine 'one', which cannot take it"):
        mark(graph("b = B(x)", b=Annotations(engine="one")), [engine("one", "A")], "train")


def test_an_empty_batch_is_free_where_the_engine_of_its_pin_does_not_take_it() -> None:
    """The module goes on with the batch that has nothing in it; constants without elements are no such thing."""
    empty, none = TensorType(TYPE.dtype, (0, 4)), Value.constant(np.zeros(0, np.float32))
    place = Annotations(engine="one")
    x, y = Value("x", empty), Value("y", empty)
    g = Graph([x], [y], [Node("B", [x], [y], version=1, name="b", annotations=place)], opsets={"": 13})
    marks = mark(g, [engine("one", "A"), engine("two", "B")])
    assert list(marks.pins) == [None]
    assert list(mark(g, [engine("one", "B")]).pins) == ["one"]
    x, y = Value("x", TYPE), Value("y", TYPE)
    g = Graph([x], [y], [Node("B", [x, none], [y], version=1, annotations=place)], opsets={"": 13})
    with pytest.raises(GraphError, match="pinned to engine 'one', which cannot take it"):
        mark(g, [engine("one", "A")])


def test_the_cure_names_no_stand_in_for_engines() -> None:
    """ "auto" takes no marks, so nobody is told to mark for it."""
    with pytest.raises(GraphError, match=r"cannot take it: no kernel for B; take the mark off"):
        mark(graph("b = B(x)", b=Annotations(engine="one")), [engine("one", "A"), engine("auto", "B")])
