"""What notebooks show of a partition: a picture without scripts, and its tables, folded."""

from __future__ import annotations

import html
from typing import Final

from xrt_core.errors import printable
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.report import PartitionReport
from xrt_core.reports.colours import colours
from xrt_core.reports.diagram import diagram, groups
from xrt_core.reports.drawing import to_svg
from xrt_core.reports.html import table

DRAWN_BOXES: Final = 250
"""Larger pictures are left to the page of `to_html`, in which people can search and zoom."""

_ASPECT: Final = 1.8


def to_notebook(graph: Graph | None, report: PartitionReport, title: str, summary: str) -> str:
    """Return an HTML fragment about a partition, with a picture of the graph if there is one."""
    paint = colours([c.engine for c in report.clusters])
    parts = [f"<div><strong>{_text(title)}</strong>: {_text(summary)}"]
    if graph is not None:
        drawn = groups(diagram(graph, report)).diagram
        if len(drawn.boxes) <= DRAWN_BOXES:
            key = " ".join(
                f'<span style="background:{c};color:#212121;padding:0 8px;border-radius:8px">{_text(s)}</span>'
                for s, c in paint.items()
            )
            parts.append(f"<div style=\"margin:6px 0\">{key}</div>{to_svg(drawn, paint, _ASPECT)}")
        else:
            parts.append(f"<p>{len(drawn.boxes)} boxes: to_html() gives a page that can be searched.</p>")
    clusters = [
        (c.name, c.engine, str(c.node_count), ", ".join(f"{o} x{k}" if k > 1 else o for o, k in c.operators))
        for c in report.clusters
    ]
    hosts = [(h.name or f"#{h.index}", h.operator, h.reason) for h in report.host_nodes]
    for name, heads, rows in (
        ("clusters", ("cluster", "engine", "#nodes", "operators"), clusters),
        ("nodes on the host", ("node", "operator", "reason"), hosts),
    ):
        if rows:
            parts.append(f"<details><summary>{len(rows)} {name}</summary>{table(heads, rows)}</details>")
    return "\n".join([*parts, "</div>"])


def _text(text: str) -> str:
    return html.escape(printable(text, lines=False))
