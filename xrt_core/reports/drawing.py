"""A diagram as SVG, for notebooks: boxes with tooltips, lines between them, no scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Final

from xrt_core.errors import printable
from xrt_core.reports.diagram import HOST, Diagram
from xrt_core.reports.layout import CHARACTER, HEIGHT, place

_LINE: Final = "#78909c"  # seen on white and on black


def to_svg(drawn: Diagram, paint: Mapping[str, str], aspect: float | None = None) -> str:
    """Return the diagram as an SVG element of its own size that shrinks to the width it gets. paint: space -> colour.

    aspect: as of `place`.
    """
    placed = place(drawn, aspect)
    wide, high = round(placed.width), round(placed.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'style="max-width:100%;height:auto" role="img" font-family="ui-monospace,monospace" font-size="11" '
        f'text-anchor="middle">'
    ]
    for edge, points in zip(drawn.edges, placed.lines, strict=True):
        parts.append(
            f'<path d="{_curve(points)}" fill="none" stroke="{_LINE}" stroke-width="1.2">'
            f"<title>{_text(edge.text)}</title></path>"
        )
    for box, (x, y, width) in zip(drawn.boxes, placed.boxes, strict=True):
        round_ = HEIGHT / 2 if box.kind in ("input", "output") else 4
        dash = ' stroke-dasharray="4 2"' if box.kind == "node" and box.space == HOST else ""
        lines = [_cut(text, width) for text in (box.label, box.detail) if text]
        middle = x + width / 2
        first = y + (14 if len(lines) > 1 else 21)
        parts.append(
            f'<g><title>{_text(box.tip)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT}" '
            f'rx="{round_}"{dash} fill="{paint[box.space]}" stroke="#607d8b" />'
            + "".join(
                f'<text x="{middle:.1f}" y="{first + 13 * k:.1f}" fill="#212121">{_text(text)}</text>'
                for k, text in enumerate(lines)
            )
            + "</g>"
        )
    return "\n".join([*parts, "</svg>"])


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG path through the points: S-shaped where it moves down and aside, else straight."""
    (x, y), *rest = points
    path = [f"M{x:.1f},{y:.1f}"]
    for nx, ny in rest:
        half = (y + ny) / 2
        bent = f"C{x:.1f},{half:.1f} {nx:.1f},{half:.1f} {nx:.1f},{ny:.1f}"
        path.append(f"L{nx:.1f},{ny:.1f}" if x == nx or y == ny else bent)
        x, y = nx, ny
    return "".join(path)


def _cut(text: str, width: float) -> str:
    room = int((width - 12) / CHARACTER)
    return text if len(text) <= room else text[: max(room - 3, 1)] + "..."


def _text(text: str) -> str:
    return html.escape(printable(text))
