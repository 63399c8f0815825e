"""Pictures, differences and the assertion about partitions."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engines import fake_engine
from tests.profiles import examples
from tests.reports import partitions
from tests.reports.partitions import explained
from xrt_core.errors import InputError
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.module import XRTModule
from xrt_core.reports import assert_offloaded, difference
from xrt_core.reports.diagram import HOST, Box, Diagram, Edge, diagram, groups, node_count, parts, transfers
from xrt_core.reports.layout import HEIGHT, place
from xrt_core.testing.functions import value

pytestmark = pytest.mark.tiny_clusters  # the pictures show clusters

EXP_ON_HOST = frozenset(("Exp",))


@pytest.fixture(scope="module")
def mixed() -> Explanation:
    return explained(EXP_ON_HOST, frozenset(("Abs", "Sign")))


# --- diagrams -----------------------------------------------------------------------------------------------------


def test_every_node_is_a_box_in_its_space(mixed: Explanation) -> None:
    assert mixed.partitioned is not None
    drawn = diagram(mixed.partitioned, mixed.report)
    spaces = {b.label: b.space for b in drawn.boxes if b.kind == "node"}
    assert spaces == {"Relu": "fake", "Neg": "fake", "Exp": HOST, "Add": "fake", "Abs": "second", "Sign": "second"}
    assert node_count(mixed.partitioned) == 6
    (exp,) = (b for b in drawn.boxes if b.label == "Exp")
    assert "fake: not wanted" in exp.tip


def test_edges_go_where_values_go(mixed: Explanation) -> None:
    assert mixed.partitioned is not None
    drawn = diagram(mixed.partitioned, mixed.report)
    seen = {(drawn.boxes[e.source].label, drawn.boxes[e.target].label) for e in drawn.edges}
    assert seen == {
        ("x", "Relu"), ("Relu", "Neg"), ("Neg", "Exp"), ("Exp", "Add"), ("Add", "Abs"), ("Abs", "y"),
        ("Relu", "Sign"), ("Sign", "z"),
    }  # fmt: skip


def test_clusters_as_single_boxes(mixed: Explanation) -> None:
    assert mixed.partitioned is not None
    every = diagram(mixed.partitioned, mixed.report)
    drawn = groups(every)
    clusters = [b for b in drawn.diagram.boxes if b.kind == "cluster"]
    assert {b.cluster for b in clusters} == {c.name for c in mixed.report.clusters}
    assert sum(b.kind == "node" for b in drawn.diagram.boxes) == 1
    assert sorted(i for m in drawn.members for i in m) == list(range(len(every.boxes)))
    assert all(e.source < e.target for e in drawn.diagram.edges)


def test_a_chain_of_host_nodes_is_one_box() -> None:
    """Nodes each of which only the next one reads are a group; a node that two read ends one."""
    boxes = [Box("input", "x", "", HOST, "", ""), *(Box("node", o, o, HOST, "", f"{o}: why") for o in "ABCDE")]
    edges = [Edge(0, 1, "x"), Edge(1, 2, "a"), Edge(2, 3, "b"), Edge(3, 4, "c"), Edge(3, 5, "c")]
    found = groups(Diagram(tuple(boxes), tuple(edges)))
    assert found.members == ((0,), (1, 2, 3), (4,), (5,))
    tip = "A: why\nB: why\nC: why"
    assert found.diagram.boxes[1] == Box("cluster", "3 nodes on the host", "A, B, C", HOST, "", tip)
    assert found.diagram.edges == (Edge(0, 1, "x"), Edge(1, 2, "c"), Edge(1, 3, "c"))


def test_a_part_shows_what_it_exchanges_values_with(mixed: Explanation) -> None:
    assert mixed.partitioned is not None
    every = diagram(mixed.partitioned, mixed.report)
    relu = next(i for i, b in enumerate(every.boxes) if b.label == "Relu")
    ((part, indices),) = parts(every, [(relu,)])
    assert [every.boxes[i].label for i in indices] == [b.label for b in part.boxes] == ["x", "Relu", "Neg", "Sign"]
    assert [(e.source, e.target) for e in part.edges] == [(0, 1), (1, 2), (1, 3)]


def test_transfers_are_the_values_that_cross(mixed: Explanation) -> None:
    assert mixed.partitioned is not None
    found = list(transfers(mixed.partitioned))
    ways = {(t.value, t.source.partition(" ")[2] or HOST, t.target.partition(" ")[2] or HOST) for t in found}
    fake, second = "(fake)", "(second)"
    assert ways == {
        ("x", HOST, fake), ("b", fake, HOST), ("c", HOST, fake), ("d", fake, second), ("a", fake, second),
        ("y", second, HOST), ("z", second, HOST),
    }  # fmt: skip
    assert {t.bytes for t in found} == {24}


# --- layout -------------------------------------------------------------------------------------------------------


@st.composite
def diagrams(draw: st.DrawFn) -> Diagram:
    count = draw(st.integers(1, 25))
    boxes = tuple(Box("node", f"n{i}", "x" * draw(st.integers(0, 30)), HOST, "", "") for i in range(count))
    edges = [
        Edge(source, target, "")
        for target in range(count)
        for source in draw(st.lists(st.integers(0, max(target - 1, 0)), max_size=3, unique=True))
        if source < target
    ]
    return Diagram(boxes, tuple(edges))


@examples(150)
@given(diagrams())
def test_boxes_do_not_overlap_and_lines_lead_down(drawn: Diagram) -> None:
    placed = place(drawn)
    for i, (x, y, w) in enumerate(placed.boxes):
        assert x >= 0
        assert x + w <= placed.width
        assert y + HEIGHT <= placed.height
        for x2, y2, w2 in placed.boxes[i + 1 :]:
            assert y != y2 or x + w <= x2 + 1e-6 or x2 + w2 <= x + 1e-6
    for e, points in zip(drawn.edges, placed.lines, strict=True):
        assert [p[1] for p in points] == sorted(p[1] for p in points)
        assert points[0][1] == placed.boxes[e.source][1] + HEIGHT
        assert points[-1][1] == placed.boxes[e.target][1]
    assert place(drawn) == placed


@examples(150)
@given(diagrams(), st.floats(0.3, 3.0))
def test_columns_do_not_overlap_and_lines_keep_off_boxes(drawn: Diagram, aspect: float) -> None:
    """Wrapped into columns: boxes lie apart and inside the picture; a line from one column to another meets no box."""
    placed = place(drawn, aspect)
    for i, (x, y, w) in enumerate(placed.boxes):
        assert x >= 0
        assert x + w <= placed.width
        assert y + HEIGHT <= placed.height
        for x2, y2, w2 in placed.boxes[i + 1 :]:
            assert y != y2 or x + w <= x2 + 1e-6 or x2 + w2 <= x + 1e-6
    for e, points in zip(drawn.edges, placed.lines, strict=True):
        assert placed.columns[e.source] <= placed.columns[e.target]
        assert points[0][1] == placed.boxes[e.source][1] + HEIGHT
        assert points[-1][1] == placed.boxes[e.target][1]
        if placed.columns[e.source] == placed.columns[e.target]:
            continue
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            assert x == to_x or y == to_y
            for bx, by, bw in placed.boxes:
                across = min(x, to_x) < bx + bw and max(x, to_x) > bx
                assert not (across and min(y, to_y) < by + HEIGHT and max(y, to_y) > by)


def test_a_deep_graph_and_a_wide_one_get_the_aspect() -> None:
    """A chain of 600 boxes is cut into columns, a layer of 600 boxes into rows."""
    boxes = tuple(Box("node", f"node {i}", "", HOST, "", "") for i in range(600))
    for edges in (tuple(Edge(i - 1, i, "") for i in range(1, 600)), ()):
        for aspect in (0.6, 1.4):
            placed = place(Diagram(boxes, edges), aspect)
            assert placed.width / placed.height == pytest.approx(aspect, rel=0.35)


def test_a_long_chain_is_quick_to_lay_out() -> None:
    boxes = tuple(Box("node", f"n{i}", "", HOST, "", "") for i in range(3000))
    edges = tuple(Edge(i - 1, i, "") for i in range(1, 3000))
    placed = place(Diagram(boxes, edges))
    assert len({x + w / 2 for x, _, w in placed.boxes}) < 10  # a straight line, up to the widths of labels


# --- pages --------------------------------------------------------------------------------------------------------


def page_data(page: str) -> dict[str, Any]:
    """What the page's viewer draws."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_is_whole_and_needs_no_network(mixed: Explanation) -> None:
    page = mixed.to_html()
    own = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=(?!\"#tables)|@import|url\(", own)
    assert "default-src 'none'" in own  # the browser refuses whatever a script would fetch
    assert "Permission is hereby granted, free of charge" in page  # the licence of Cytoscape.js
    body = own.partition("<body>")[2].partition("</body>")[0]
    root = ElementTree.fromstring(f"<body>{body}</body>")  # well-formed, every name escaped
    boxes = page_data(page)["boxes"]
    assert any("on the host" in b[5] and "not wanted" in b[5] for b in boxes)
    assert any('relu "<first>"' in b[5] for b in boxes)
    heads = [h.text for h in root.iter("h2")]
    assert heads == ["Clusters", "Boundary transfers", "On the host"]
    rows = ["|".join("".join(c.itertext()) for c in r) for r in root.iter("tr")]
    assert any(r.startswith("c|float32[2, 3]|24|host|") for r in rows), rows
    assert "#90caf9" not in page  # no colour of an engine that takes no part


def test_every_box_is_in_a_view_that_search_opens(mixed: Explanation) -> None:
    """Each box has a view; the view of a group has its members, and says which boxes are others'."""
    data = page_data(mixed.to_html())
    assert {int(i) for i in data["home"]} == {b for view in data["views"] for b in view["boxes"]}
    assert {b[1] for b in data["boxes"] if b[0] == "node"} == {"Relu", "Neg", "Exp", "Add", "Abs", "Sign"}
    for i, view in data["home"].items():
        assert int(i) in data["views"][view]["boxes"]
    for group, view in data["opens"].items():
        inner = [b for i, b in enumerate(data["views"][view]["boxes"]) if i not in data["views"][view]["outside"]]
        assert inner == data["members"][group]
    for view in data["views"]:
        for name in ("wide", "tall") if view["listed"] else ("wide",):
            assert len(view[name]["boxes"]) == len(view["boxes"])
            assert len(view[name]["lines"]) == len(view["edges"])


def test_a_name_cannot_end_the_data() -> None:
    """What looks like the end of a script, in a name, is text."""
    x, y = value("</script><script>alert(1)</script>", 2), Value("y")
    graph = Graph([x], [y], [Node("Relu", [x], [y], version=14, name="<!--")], opsets={"": 21}, name="</title>")
    page = XRTModule(graph, engine="host").explain().to_html()
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 3 + page.count('"<script')
    assert page_data(page)["boxes"][0][1] == "</script><script>alert(1)</script>"


def test_a_graph_too_large_to_draw_still_has_its_tables(mixed: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrt_core.reports.html.DRAWN_NODES", 3)
    page = mixed.to_html()
    assert "<script" not in page
    assert page.count("Not drawn") == 1
    assert "not wanted" in page


# --- notebooks ----------------------------------------------------------------------------------------------------


def test_what_a_notebook_shows(mixed: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture without scripts, well-formed, with its tables folded; too large a picture is left out, and said so."""
    shown = mixed._repr_html_()
    root = ElementTree.fromstring(shown)
    assert "<script" not in shown
    svg = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{svg}rect"))) == len(mixed.report.clusters) + 1 + 3
    assert any("not wanted" in (t.text or "") for t in root.iter(f"{svg}title"))
    assert "1 nodes on the host" in shown
    monkeypatch.setattr("xrt_core.reports.notebook.DRAWN_BOXES", 2)
    assert "<svg" not in mixed._repr_html_()
    assert "to_html()" in mixed._repr_html_()


def test_a_module_and_its_graph_in_a_notebook() -> None:
    """A module shows its inputs, and after a call its partition; a graph shows its operators and its text."""
    m = XRTModule(partitions.graph(), engine="host")
    assert "<svg" not in m._repr_html_()
    assert "x (float32[2, 3])" in m._repr_html_()
    m(np.ones((2, 3), np.float32))
    assert "<svg" in m._repr_html_()
    assert m.graph is not None
    shown = m.graph._repr_html_()
    ElementTree.fromstring(shown)
    assert "6 nodes (" in shown
    assert "%y = Abs(%d)" in shown


def test_dot_has_a_frame_for_each_cluster(mixed: Explanation) -> None:
    text = mixed.to_dot()
    assert text.count("subgraph cluster_") == len(mixed.report.clusters)
    assert r"relu \"<first>\"" in text
    assert text.count("{") == text.count("}")
    assert len(re.findall(r"^ +n\d+ \[", text, re.M)) == 6 + 1 + 2
    assert len(re.findall(r"n\d+ -> n\d+", text)) == 8


def test_an_explanation_without_its_graph_says_so(mixed: Explanation) -> None:
    bare = Explanation(mixed.name, mixed.signature, mixed.report, mixed.own_flops, mixed.cluster_flops)
    with pytest.raises(InputError, match="this explanation has no graph"):
        bare.to_html()


# --- difference ---------------------------------------------------------------------------------------------------


def test_no_difference(mixed: Explanation) -> None:
    report = json.loads(json.dumps(mixed.to_json()))
    found = difference(report, report)
    assert not found
    assert found.as_text() == "no difference"


def test_what_moved_is_said() -> None:
    before = explained(EXP_ON_HOST).to_json()
    after = explained(frozenset(("Exp", "Sign")), frozenset(("Abs",))).to_json()
    found = difference(before, after)
    assert set(found.moved) == {"abs: fake -> second", "sign: fake -> host"}
    assert any(line.startswith("exp: ") for line in found.reasons) == (
        before["host_nodes"][0]["reason"] != after["host_nodes"][0]["reason"]
    )
    assert any(line.startswith("gone: ") for line in found.clusters)
    assert any(line.startswith("node_share: ") for line in found.figures)
    assert "moved:\n" in found.as_text()


def test_nodes_that_only_one_has(mixed: Explanation) -> None:
    report = json.loads(json.dumps(mixed.to_json()))
    other = json.loads(json.dumps(report))
    other["host_nodes"][0]["name"] = "renamed"
    assert set(difference(report, other).nodes) == {"exp: only before (host)", "renamed: only after (host)"}


@pytest.mark.parametrize("bad", [{}, {"clusters": 3}, {"clusters": [{"nodes": ["a"]}]}, []])
def test_other_json_is_refused(mixed: Explanation, bad: object) -> None:
    with pytest.raises(InputError, match="the second is no report of a partition.*xrt partition MODEL --report"):
        difference(mixed.to_json(), bad)  # type: ignore[arg-type]


# --- assertion ----------------------------------------------------------------------------------------------------


def test_what_is_offloaded_passes(mixed: Explanation) -> None:
    assert_offloaded(mixed, ["Relu", "Neg", "Add"], engine="fake")
    assert_offloaded(mixed.report, ["Abs"])
    assert_offloaded(mixed, "Abs", engine="second")
    assert_offloaded(mixed, share=0.8)


def test_what_is_not_is_listed_with_its_reason(mixed: Explanation) -> None:
    with pytest.raises(AssertionError, match=r"Exp exp runs on the host: fake: not wanted"):
        assert_offloaded(mixed, ["Exp", "Relu"])
    with pytest.raises(AssertionError, match="Exp exp runs on the host"):
        assert_offloaded(mixed)
    with pytest.raises(AssertionError, match=r"Abs.* run on second, not on fake"):
        assert_offloaded(mixed, ["Abs"], engine="fake")
    with pytest.raises(AssertionError, match=r"83\.3% of the nodes run on engines, not 90\.0%"):
        assert_offloaded(mixed, share=0.9)


def test_an_operator_that_is_not_there_would_mean_nothing(mixed: Explanation) -> None:
    with pytest.raises(InputError, match=r"the model has no Conv; its operators are Abs"):
        assert_offloaded(mixed, ["Conv"])
    with pytest.raises(InputError, match="names of operators"):
        assert_offloaded(mixed, [3])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"takes what XRTModule\.explain gives, not a str"):
        assert_offloaded("model", ["Abs"])  # type: ignore[arg-type]


# --- names of others ----------------------------------------------------------------------------------------------


def test_control_characters_of_names_are_escaped() -> None:
    """Names of values, nodes and models reach no terminal, DOT or page as they are; the data has them."""
    name = "\x1b[2Jwiped\x07\r\nforged"
    x, y, z = value(name, 2, 3), Value("y" + name), Value("z")
    nodes = [Node("Relu", [x], [y], version=14, name=name), Node("Exp", [y], [z], version=13, name=name)]
    with fake_engine() as one:
        one.takes = lambda n: n.op_type != "Exp"
        told = XRTModule(Graph([x], [z], nodes, opsets={"": 21}, name=name), engine="fake", prune=False).explain()
    page = re.sub(r"<script>.*?</script>", "", told.to_html(), flags=re.DOTALL)  # without Cytoscape.js
    for text in (told.as_text(), told.to_dot(), page, told._repr_html_()):
        assert "wiped" in text
        assert not {c for c in text if not c.isprintable()} - {"\n"}
        assert not any(line.startswith("forged") for line in text.splitlines())
    assert name in told.signature
