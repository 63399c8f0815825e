"""Draws docs/architecture.svg from the imports of xrt_core: a box for each part, an arrow for each direct import.

    python scripts/architecture_picture.py [--check]

Parts stand in layers: each imports only from layers below it. An arrow is left out where a longer way of arrows says
the same, and so are imports of `errors` and `events`, which every part may have. --check: write nothing, and exit with
1 where the file is not what would be written (a test does so).
"""

from __future__ import annotations

import pathlib
import sys
from functools import cache

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture.source import CORE, imports, sources, unit, unit_of  # noqa: E402

TARGET = ROOT / "docs" / "architecture.svg"
LEFT_OUT = {"", "errors", "events"}
WIDTH, BOX, HEIGHT, GAP, MARGIN = 1080, 118, 34, 46, 24
STYLE = """
  .box { fill: #eef3fb; stroke: #5b7db1; } .name { font: 13px monospace; fill: #1c2733; text-anchor: middle; }
  .arrow { stroke: #8a97a8; fill: none; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #22303f; stroke: #7fa3d6; } .name { fill: #e6edf5; } .arrow { stroke: #6d7a8a; }
  }
"""


def edges() -> dict[str, set[str]]:
    """Part -> parts that it imports, late imports included."""
    found: dict[str, set[str]] = {}
    for path in sources(CORE):
        part = unit_of(path)
        if part in LEFT_OUT:
            continue
        used = {unit(i.module) for i in imports(path) if i.module.startswith("xrt_core.")}
        found.setdefault(part, set()).update(used - LEFT_OUT - {part})
    return found


def layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """Part -> its layer: 0 imports nothing, every other is one above the highest that it imports."""

    @cache
    def layer(part: str) -> int:
        return 1 + max(map(layer, graph[part]), default=-1)

    return {part: layer(part) for part in graph}


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without edges that longer ways imply."""

    @cache
    def below(part: str) -> frozenset[str]:
        return frozenset(graph[part]).union(*(below(p) for p in graph[part]))

    return {part: {p for p in used if not any(p in below(q) for q in used - {p})} for part, used in graph.items()}


def picture() -> str:
    """The picture as SVG."""
    graph = edges()
    level = layers(graph)
    rows = [sorted(p for p in level if level[p] == n) for n in range(max(level.values()) + 1)][::-1]
    at = {}
    for y, row in enumerate(rows):
        step = WIDTH / len(row)
        for x, part in enumerate(row):
            at[part] = (step * (x + 0.5), MARGIN + y * (HEIGHT + GAP))
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The parts of xrt_core and their imports</title>",
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="arrow" d="M0,0 L8,4 L0,8"/></marker>',
    ]
    for part, used in sorted(reduced(graph).items()):
        for other in sorted(used):
            (x1, y1), (x2, y2) = at[part], at[other]
            y1, bend = y1 + HEIGHT, GAP * 0.6
            lines.append(
                f'<path class="arrow" marker-end="url(#tip)" '
                f'd="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"/>'
            )
    for part, (x, y) in sorted(at.items()):
        lines.append(f'<rect class="box" x="{x - BOX / 2:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="5"/>')
        lines.append(f'<text class="name" x="{x:.0f}" y="{y + 21:.0f}">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write or check the picture."""
    made = picture()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == made else f"{TARGET} is out of date")
    TARGET.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
