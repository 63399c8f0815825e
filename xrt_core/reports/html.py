"""A partition as one self-contained HTML page: SVG diagrams and tables, no scripts."""

from __future__ import annotations

import html as _html
from collections.abc import Iterable, Sequence
from typing import Final

from xrt_core.errors import printable
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.report import PartitionReport
from xrt_core.passes.sharding import ShardingReport
from xrt_core.reports.colours import colours
from xrt_core.reports.diagram import HOST, Diagram, diagram, node_count, transfers
from xrt_core.reports.layout import HEIGHT, place

DRAWN_NODES: Final = 3000
"""Diagrams with more boxes are omitted: browsers cannot show them usefully. The tables are always complete."""

_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #212121; background: #fff; }
table { border-collapse: collapse; margin: 8px 0 24px; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid #e0e0e0; vertical-align: top; }
td.number, th.number { text-align: right; }
h2 { margin-top: 32px; font-size: 18px; }
.drawing { overflow: auto; border: 1px solid #e0e0e0; max-height: 85vh; }
svg text { font: 11px ui-monospace, monospace; text-anchor: middle; pointer-events: none; }
svg .detail { fill: #616161; font-size: 9px; }
svg path { fill: none; stroke: #90a4ae; stroke-width: 1.2; }
svg path:hover { stroke: #d32f2f; stroke-width: 3; }
svg rect { stroke: #607d8b; }
svg rect:hover { stroke: #d32f2f; stroke-width: 2.5; }
.key { display: inline-block; padding: 2px 10px; margin-right: 8px; border: 1px solid #607d8b; border-radius: 4px; }
summary { cursor: pointer; }
"""


def to_html(
    graph: Graph, report: PartitionReport, title: str, summary: str, sharding: ShardingReport | None = None
) -> str:
    """Return an HTML page about a partitioned graph.

    The partition with a box per cluster, then with a box per node, both coloured by engine; the tooltip of a box
    describes it, and for a host node gives the reason. Tables: clusters, transfers, host nodes by reason; on a mesh
    its collectives, and how each tensor lies.
    """
    paint = colours([c.engine for c in report.clusters])
    key = "".join(f'<span class="key" style="background:{c}">{_text(s)}</span>' for s, c in paint.items())
    parts = [
        f"<h1>{_text(title)}</h1><p>{_text(summary)}</p><p>{key}</p>",
        "<h2>Partition</h2>",
        _drawing(diagram(graph, report, expanded=False), paint),
        _clusters(report),
        _transfers(graph),
        *(() if sharding is None else (_sharding(sharding),)),
        _host_nodes(report),
    ]
    if report.clusters:
        parts.append(f"<details><summary>Every node ({node_count(graph)})</summary>")
        expanded = diagram(graph, report, expanded=True) if node_count(graph) <= DRAWN_NODES else None
        parts += [_drawing(expanded, paint), "</details>"]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _drawing(drawn: Diagram | None, paint: dict[str, str]) -> str:
    if drawn is None or len(drawn.boxes) > DRAWN_NODES:
        return f"<p>Not drawn: it has more than {DRAWN_NODES} boxes.</p>"
    placed = place(drawn)
    parts = [f'<div class="drawing"><svg width="{placed.width:.0f}" height="{placed.height:.0f}">']
    for edge, points in zip(drawn.edges, placed.lines, strict=True):
        parts.append(f'<path d="{_curve(points)}"><title>{_text(edge.text)}</title></path>')
    for box, (x, y, width) in zip(drawn.boxes, placed.boxes, strict=True):
        round_ = HEIGHT / 2 if box.kind in ("input", "output") else 4
        dash = ' stroke-dasharray="4 2"' if box.kind == "node" and box.space == HOST else ""
        middle = x + width / 2
        parts.append(
            f'<g><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="{round_}"{dash} '
            f'fill="{paint[box.space]}"><title>{_text(box.tip, lines=True)}</title></rect>'
            f'<text x="{middle:.1f}" y="{y + (14 if box.detail else 21):.1f}">{_text(box.label)}</text>'
            + (
                f'<text class="detail" x="{middle:.1f}" y="{y + 27:.1f}">{_text(box.detail)}</text>'
                if box.detail
                else ""
            )
            + "</g>"
        )
    return "\n".join([*parts, "</svg></div>"])


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG path through the points: vertical within a layer, S-shaped from one layer to the next."""
    (x, y), *rest = points
    path = [f"M{x:.1f},{y:.1f}"]
    for i, (nx, ny) in enumerate(rest):
        if i % 2 == 0:
            half = (y + ny) / 2
            path.append(f"C{x:.1f},{half:.1f} {nx:.1f},{half:.1f} {nx:.1f},{ny:.1f}")
        else:
            path.append(f"L{nx:.1f},{ny:.1f}")
        x, y = nx, ny
    return "".join(path)


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
    return "<h2>Clusters</h2>" + _table(("cluster", "engine", "device", "#nodes", "operators", "note"), rows)


def _transfers(graph: Graph) -> str:
    rows = [(t.value, t.type, "?" if t.bytes is None else str(t.bytes), t.source, t.target) for t in transfers(graph)]
    return "<h2>Boundary transfers</h2>" + _table(("value", "type", "#bytes", "from", "to"), rows)


def _sharding(report: ShardingReport) -> str:
    rows = [(c.kind, c.value, c.source, c.target, str(c.bytes), c.reason) for c in report.collectives]
    whole = list(report.replicated.items())
    return (
        f"<h2>On the mesh {_text(report.mesh)}</h2>"
        + _table(("collective", "value", "from", "to", "#bytes a device", "for"), rows)
        + _table(("tensor", "SBP"), report.tensors.items())
        + (_table(("whole on each device", "reason"), whole) if whole else "")
    )


def _host_nodes(report: PartitionReport) -> str:
    rows = [(h.name or f"#{h.index}", h.operator, h.reason) for h in report.host_nodes]
    return "<h2>On the host</h2>" + _table(("node", "operator", "reason"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; a column whose header begins with # is numeric (right-aligned)."""
    marks = [' class="number"' if h.startswith("#") else "" for h in heads]
    lines = ["".join(f"<th{m}>{_text(h.lstrip('#'))}</th>" for h, m in zip(heads, marks, strict=True))]
    lines += ["".join(f"<td{m}>{_text(c)}</td>" for c, m in zip(row, marks, strict=True)) for row in rows]
    if len(lines) == 1:
        return "<p>None.</p>"
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(text: str, lines: bool = False) -> str:
    return _html.escape(printable(text, lines))
