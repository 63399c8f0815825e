"""DOT, the language of Graphviz (https://graphviz.org/doc/info/lang.html), of a partitioned graph."""

from __future__ import annotations

from xrt_core.errors import printable
from xrt_core.ir.graph import Graph
from xrt_core.passes.partitioning.report import PartitionReport
from xrt_core.reports.colours import colours
from xrt_core.reports.diagram import HOST, Box, diagram


def to_dot(graph: Graph, report: PartitionReport) -> str:
    """Return a partitioned graph in DOT: each cluster a subgraph in its engine's colour, reasons as tooltips."""
    drawn = diagram(graph, report)
    paint = colours([c.engine for c in report.clusters])
    lines = [
        f"digraph {_quoted(graph.name or 'graph')} {{",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=8];',
    ]
    clusters: dict[str, list[str]] = {}
    engines: dict[str, str] = {}
    for i, b in enumerate(drawn.boxes):
        text = f"  {_node(i, b, paint[b.space])}"
        if b.cluster:
            clusters.setdefault(b.cluster, []).append(f"  {text}")
            engines[b.cluster] = b.space
        else:
            lines.append(text)
    for k, (name, members) in enumerate(clusters.items()):
        colour = paint[engines[name]]
        lines.append(f"  subgraph cluster_{k} {{")
        lines.append(f"    label={_quoted(f'{name} on {engines[name]}')}; color={_quoted(colour)}; penwidth=2;")
        lines += [*members, "  }"]
    lines += [f"  n{e.source} -> n{e.target} [tooltip={_quoted(e.text)}];" for e in drawn.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _node(index: int, box: Box, colour: str) -> str:
    label = "\n".join(part for part in (box.label, box.detail) if part)
    shape = ", shape=ellipse" if box.kind in ("input", "output") else ""
    line = ', style="filled,rounded,dashed"' if box.kind == "node" and box.space == HOST else ""
    return f"n{index} [label={_quoted(label)}, tooltip={_quoted(box.tip)}, fillcolor={_quoted(colour)}{shape}{line}];"


def _quoted(text: str) -> str:
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
