"""Draws docs/clusters.svg: a small detector before and after partitioning, as XRT sees it.

    python scripts/readme_picture.py [--check]

--check: write nothing, and exit with 1 where the file is not what would be written (a test does so).
"""

from __future__ import annotations

import pathlib
import sys
from html import escape
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import xrt_core as xrt  # noqa: E402
from xrt_core import ops  # noqa: E402
from xrt_core.reports.colours import colours  # noqa: E402
from xrt_core.reports.diagram import Diagram, diagram, groups  # noqa: E402
from xrt_core.reports.layout import HEIGHT, place  # noqa: E402

TARGET = ROOT / "docs" / "clusters.svg"
MARGIN, GAP, HEAD = 16, 150, 44
DENSE = 0.72  # of the layout's distance between layers
STYLE = """
  text { font: 11px ui-monospace, monospace; text-anchor: middle; fill: #212121; }
  .detail { font-size: 9px; fill: #555; } .head { font: 14px system-ui, sans-serif; fill: #1c2733; }
  .edge { fill: none; stroke: #78909c; stroke-width: 1.2; } .box { stroke: #607d8b; }
  .arrow { fill: #78909c; }
  @media (prefers-color-scheme: dark) { .head { fill: #e6edf5; } .edge { stroke: #90a4ae; } .arrow { fill: #90a4ae; } }
"""


class Recogniser(xrt.Graph):
    """Reads a line of text: convolutions, an LSTM over the columns, the best class of each, and which are no blanks."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shapes = ((8, 1, 3, 3), (16, 8, 3, 3), (1, 64, 16), (1, 64, 16), (16, 12))
        self.first, self.second, self.w, self.r, self.head = (
            rng.standard_normal(s).astype(np.float32) * np.float32(0.1) for s in shapes
        )

    def build(self, line: Any) -> Any:
        """line: float32 [1, 1, 32, 64] -> scores of the classes by column, and the columns with a character."""
        x = ops.Relu(ops.Conv(line, self.first, strides=[2, 2]))
        x = ops.Relu(ops.Conv(x, self.second, strides=[2, 2]))
        x = ops.Transpose(ops.ReduceMean(x, np.array([2]), keepdims=0), perm=[2, 0, 1])
        states, _, _ = ops.LSTM(x, self.w, self.r, hidden_size=16)
        scores = ops.Softmax(ops.Squeeze(states, np.array([1, 2])) @ self.head, axis=-1)
        return scores, ops.NonZero(ops.Cast(ops.ArgMax(scores, axis=-1, keepdims=0), to=6))


def drawn(engines: Any, **options: Any) -> Diagram:
    """The diagram of the recogniser on engines, a box per cluster; on the host, a box per node."""
    x = {"line": np.zeros((1, 1, 32, 64), np.float32)}
    with xrt.XRTModule(Recogniser(), engine=engines, guard=False, prune=False, **options) as m:
        every = diagram(m.partitioned(x), m.explain(x).report)
        return every if engines == "host" else groups(every).diagram


def _boxes(picture: Diagram, x0: float, head: str, tall: float = 0.0) -> tuple[list[str], float, float]:
    """The elements of one diagram, from `x0` on, in the middle of the height `tall`; its width and height."""
    placed = place(picture)
    high = DENSE * (placed.height - HEIGHT)
    y0 = HEAD + max(0.0, tall - high) / 2
    paint = colours([b.space for b in picture.boxes])
    made = [f'<text class="head" x="{x0 + placed.width / 2:.0f}" y="28">{escape(head)}</text>']
    for points in placed.lines:
        (x, y), *rest = [(x0 + px, y0 + DENSE * py) for px, py in points]
        path = f"M{x:.0f},{y:.0f}"
        for nx, ny in rest:
            path += f"C{x:.0f},{(y + ny) / 2:.0f} {nx:.0f},{(y + ny) / 2:.0f} {nx:.0f},{ny:.0f}"
            x, y = nx, ny
        made.append(f'<path class="edge" d="{path}"/>')
    for box, (x, y, width) in zip(picture.boxes, placed.boxes, strict=True):
        x, y, rounded = x0 + x, y0 + DENSE * y, HEIGHT / 2 if box.kind in ("input", "output") else 4
        middle, lines = x + width / 2, 14 if box.detail else 21
        made += [
            f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="{rounded:.0f}" '
            f'fill="{paint[box.space]}"/>',
            f'<text x="{middle:.0f}" y="{y + lines:.0f}">{escape(box.label)}</text>',
            f'<text class="detail" x="{middle:.0f}" y="{y + 27:.0f}">{escape(box.detail)}</text>',
        ]
    return made, placed.width, high


def picture() -> str:
    """The file."""
    left, width, height = _boxes(drawn("host"), MARGIN, "the model")
    marks = {"op:LSTM": "onnxruntime", "op:[!LN]*": "xla"}
    partitioned = drawn(["xla", "onnxruntime"], marks=marks)
    x0 = MARGIN + width + GAP
    right, wide, high = _boxes(partitioned, x0, "clusters by engine, and the host", height)
    whole, tall = x0 + wide + MARGIN, HEAD + max(height, high) + MARGIN
    y, x = HEAD + max(height, high) / 2, MARGIN + width + GAP / 4
    arrow = f'<path class="arrow" d="M{x:.0f},{y - 6:.0f}h{GAP / 3:.0f}v-9l22,15l-22,15v-9h-{GAP / 3:.0f}z"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {tall:.0f}" width="{whole:.0f}" '
        f'height="{tall:.0f}" role="img" aria-label="A model before and after partitioning">'
        f"<style>{STYLE}</style>\n" + "\n".join([*left, arrow, *right]) + "\n</svg>\n"
    )


def main() -> None:
    """Write the file, or check it."""
    new = picture()
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if TARGET.read_text("utf-8") == new else f"{TARGET.name} is old: run {sys.argv[0]}")
    TARGET.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
