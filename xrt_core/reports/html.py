"""A partition as one self-contained HTML page: a viewer of its diagrams, by Cytoscape.js, and tables."""

from __future__ import annotations

import html as _html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from xrt_core.errors import printable
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.report import ClusterReport, PartitionReport
from xrt_core.passes.sharding import ShardingReport
from xrt_core.reports.colours import colours
from xrt_core.reports.diagram import HOST, Diagram, diagram, groups, parts, transfers
from xrt_core.reports.layout import CHARACTER, HEIGHT, Placed, place

DRAWN_NODES: Final = 3000
"""Diagrams with more boxes are omitted: browsers cannot show them usefully. The tables are always complete."""

ASPECTS: Final[Mapping[str, float]] = {"wide": 1.35, "tall": 0.68}
"""The ratios of width to height that each diagram is laid out for; the viewer takes the one that its window is like."""

_VIEWER: Final = pathlib.Path(__file__).with_name("viewer")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # nothing is fetched


def to_html(
    graph: Graph, report: PartitionReport, title: str, summary: str, sharding: ShardingReport | None = None
) -> str:
    """Return an HTML page about a partitioned graph.

    A picture with a box per cluster and per chain of host nodes, coloured by engine, in which each can be opened,
    searched and clicked, for a host node's reason; a picture with a box per node. Tables: clusters, transfers, host
    nodes by reason; on a mesh its collectives, and how each tensor lies. The page holds all that it needs,
    Cytoscape.js (MIT licence) included.
    """
    paint = colours([c.engine for c in report.clusters])
    everything = diagram(graph, report)
    data = _data(everything, report, paint)
    key = "".join(
        f'<span class="key host">{_text(s)}</span>' if s == HOST else
        f'<span class="key" style="background:{c}">{_text(s)}</span>'
        for s, c in paint.items()
    )  # fmt: skip
    listed = "".join(
        f'<option value="{i}">{_text(str(v["title"]))}</option>' for i, v in enumerate(data["views"]) if v["listed"]
    )
    drawn = (
        '<nav aria-label="Picture">'
        '<button id="up" type="button" disabled="">Back</button>'
        f'<select id="views" aria-label="Picture"><option value="" hidden="">One part</option>{listed}</select>'
        '<input id="search" type="search" placeholder="Search nodes, operators, reasons" autocomplete="off" '
        'role="combobox" aria-label="Search" aria-expanded="false" aria-controls="found" />'
        '<ul id="found" role="listbox" aria-label="Found" hidden=""></ul>'
        '<button id="in" type="button" aria-label="Zoom in">+</button>'
        '<button id="out" type="button" aria-label="Zoom out">-</button>'
        '<button id="fit" type="button">Fit</button><a href="#tables">Tables</a>'
        f'<span class="keys">{key}</span></nav>'
        '<div id="stage"><div id="canvas" tabindex="0" role="application" aria-label="The partition as a picture; '
        'arrow keys go from box to box, Enter opens one" aria-describedby="panel"></div>'
        '<aside id="panel" aria-live="polite"></aside></div>'
    )
    if not data["views"]:
        drawn = f"<p>Not drawn: it has more than {DRAWN_NODES} boxes.</p>"
    body = [
        '<div id="viewer">' if data["views"] else "<div>",
        f"<header><h1>{_text(title)}</h1><p>{_text(summary)}</p></header>",
        drawn,
        "</div>",
        '<div id="tables">',
        _clusters(report),
        _transfers(graph),
        *(() if sharding is None else (_sharding(sharding),)),
        _host_nodes(report),
        "</div>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" /><title>{_text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<style>{_part('viewer.css')}</style></head><body>\n"
        + "\n".join(body)
        + (_scripts(data) if data["views"] else "")
        + "\n</body></html>\n"
    )


def _scripts(data: Mapping[str, Any]) -> str:
    """The picture's data, Cytoscape.js with its licence, and the viewer."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'\n<script type="application/json" id="data">{text}</script>'
        f"\n<script>{_part('cytoscape.min.js')}</script>\n<script>{_part('viewer.js')}</script>"
    )


def _part(name: str) -> str:
    return (_VIEWER / name).read_text(encoding="utf-8")


def _data(everything: Diagram, report: PartitionReport, paint: Mapping[str, str]) -> dict[str, Any]:
    """What viewer.js reads: the boxes, and views of some of them with their places; no view where there are too many.

    opens: group -> the view of its members. members: group -> its boxes. home: box -> the view that search shows it in.
    """
    grouped = groups(everything)
    offset = len(everything.boxes)
    boxes = [*everything.boxes, *grouped.diagram.boxes]
    indices = [m[0] if len(m) == 1 and b.kind != "cluster" else offset + k
               for k, (m, b) in enumerate(zip(grouped.members, grouped.diagram.boxes, strict=True))]  # fmt: skip
    views: list[dict[str, Any]] = []
    opens: dict[int, int] = {}
    members: dict[int, tuple[int, ...]] = {}
    home: dict[int, int] = {}
    if len(grouped.diagram.boxes) <= DRAWN_NODES:
        views.append(_view("Clusters", grouped.diagram, indices))
        home.update(dict.fromkeys(indices, 0))
        if len(everything.boxes) <= DRAWN_NODES:
            views.append(_view(f"Every node ({_nodes(everything)})", everything, range(offset)))
            home.update({i: home.get(i, 1) for i in range(offset)})
        small = [k for k, m in enumerate(grouped.members) if indices[k] >= offset and len(m) <= DRAWN_NODES]
        drawn = parts(everything, (grouped.members[k] for k in small))
        for k, (part, at) in zip(small, drawn, strict=True):
            inner = grouped.members[k]
            view = _view(grouped.diagram.boxes[k].label, part, at, listed=False)
            chosen = set(inner)
            view |= {"inner": len(inner), "of": indices[k], "outside": [i for i, b in enumerate(at) if b not in chosen]}
            opens[indices[k]] = len(views)
            members[indices[k]] = inner
            home.update(dict.fromkeys(inner, len(views)))
            views.append(view)
    return {
        "host": HOST,
        "height": HEIGHT,
        "character": CHARACTER,
        "colours": dict(paint),
        "boxes": [
            [b.kind, *(printable(t, False) for t in (b.label, b.detail, b.space, b.cluster)), printable(b.tip)]
            for b in boxes
        ],
        "views": views,
        "opens": opens,
        "members": members,
        "home": home,
        "facts": {printable(c.name, False): _facts(c) for c in report.clusters},
    }


def _view(title: str, drawn: Diagram, indices: Sequence[int], listed: bool = True) -> dict[str, Any]:
    """A view: its boxes, by their indices; its edges; its layouts. outside: boxes that are not its own, faded."""
    made: dict[str, Any] = {
        "title": title,
        "listed": listed,
        "boxes": list(indices),
        "edges": [[e.source, e.target, printable(e.text, lines=True)] for e in drawn.edges],
        "outside": [],
    }
    shapes = ASPECTS if listed else {"wide": None}
    made |= {name: _layout(drawn, place(drawn, aspect)) for name, aspect in shapes.items()}
    return made


def _layout(drawn: Diagram, placed: Placed) -> dict[str, Any]:
    """A layout in whole pixels. far: the edges from one column to another."""
    column = placed.columns
    return {
        "boxes": [[round(v) for v in b] for b in placed.boxes],
        "lines": [[round(v) for p in points for v in p] for points in placed.lines],
        "far": [i for i, e in enumerate(drawn.edges) if column[e.source] != column[e.target]],
    }


def _nodes(drawn: Diagram) -> int:
    return sum(b.kind == "node" for b in drawn.boxes)


def _facts(c: ClusterReport) -> list[str]:
    """What the report says of a cluster, beside its nodes."""
    said = [f"on {c.device}" if c.device else "", f"marked: {c.region}" if c.region else "", c.note]
    said.append("" if c.estimate is None else str(c.estimate))
    return [printable(s, lines=False) for s in said if s]


def _clusters(report: PartitionReport) -> str:
    rows = [
        (
            c.name,
            c.engine,
            c.device,
            str(c.node_count),
            ", ".join(f"{o} x{k}" if k > 1 else o for o, k in c.operators),
            c.note,
        )
        for c in report.clusters
    ]
    return "<h2>Clusters</h2>" + table(("cluster", "engine", "device", "#nodes", "operators", "note"), rows)


def _transfers(graph: Graph) -> str:
    rows = [(t.value, t.type, "?" if t.bytes is None else str(t.bytes), t.source, t.target) for t in transfers(graph)]
    return "<h2>Boundary transfers</h2>" + table(("value", "type", "#bytes", "from", "to"), rows)


def _sharding(report: ShardingReport) -> str:
    rows = [(c.kind, c.value, c.source, c.target, str(c.bytes), c.reason) for c in report.collectives]
    whole = list(report.replicated.items())
    return (
        f"<h2>On the mesh {_text(report.mesh)}</h2>"
        + table(("collective", "value", "from", "to", "#bytes a device", "for"), rows)
        + table(("tensor", "SBP"), report.tensors.items())
        + (table(("whole on each device", "reason"), whole) if whole else "")
    )


def _host_nodes(report: PartitionReport) -> str:
    rows = [(h.name or f"#{h.index}", h.operator, h.reason) for h in report.host_nodes]
    return "<h2>On the host</h2>" + table(("node", "operator", "reason"), rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; a column whose header begins with # is numeric (right-aligned)."""
    marks = [' class="number"' if h.startswith("#") else "" for h in heads]
    lines = ["".join(f"<th{m}>{_text(h.lstrip('#'))}</th>" for h, m in zip(heads, marks, strict=True))]
    lines += ["".join(f"<td{m}>{_text(c)}</td>" for c, m in zip(row, marks, strict=True)) for row in rows]
    if len(lines) == 1:
        return "<p>None.</p>"
    return '<div class="scroll"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _text(text: str, lines: bool = False) -> str:
    return _html.escape(printable(text, lines))
