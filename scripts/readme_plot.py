"""Draws docs/speed.svg from benchmarks/inference.json: the time of each engine and of XRT, over the fastest engine's.

    python scripts/readme_plot.py [--check]

The file holds medians in milliseconds, which `benchmarks/inference.py --json` measured. --check: write nothing, and
exit with 1 where the picture is not what would be written (a test does so).
"""

from __future__ import annotations

import json
import pathlib
import sys
from html import escape
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE, TARGET = ROOT / "benchmarks" / "inference.json", ROOT / "docs" / "speed.svg"
COLOURS = {
    "XRT, no engine named": "#1e88e5", "OpenVINO": "#b0a4c8", "ONNX Runtime": "#d8b38c", "XLA through XRT": "#9fc5a0"
}  # fmt: skip
LEFT, BAR, WIDE, GAP, HEAD, MOST = 150, 11, 480, 14, 62, 4.0
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #1c2733; } .head { font-size: 13px; } .small { fill: #5a6675; }
  .line { stroke: #8a97a8; stroke-width: 1; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf5; } .small { fill: #a9b4c2; } .line { stroke: #6d7a8a; } }
"""


def picture(measured: dict[str, Any]) -> str:
    """The file: a group of bars for each model, the line at the fastest engine that was used directly."""
    made, y = [], HEAD
    unit = WIDE / MOST
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + (0, 160, 250, 360)[i]
        made.append(f'<rect x="{x}" y="32" width="10" height="10" fill="{colour}"/>')
        made.append(f'<text x="{x + 14}" y="41">{name}</text>')
    for row in measured["models"]:
        times = row["milliseconds"]
        best = min(t for n in ("ONNX Runtime", "OpenVINO") if (t := times[n]) is not None)
        bars = [(n, times[n]) for n in COLOURS]
        middle = y + BAR * len(bars) / 2 + 4
        made.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(row["model"])}</text>')
        for name, t in bars:
            if t is None:
                made.append(f'<text class="small" x="{LEFT + 4}" y="{y + 9}">does not run the model</text>')
            else:
                ratio = t / best
                width = unit * min(ratio, MOST)
                made.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" fill="{COLOURS[name]}"/>')
                text = f"{ratio:.2f}" + (f" ({t:.2g} ms)" if name.startswith("XRT") else "")
                made.append(f'<text class="small" x="{LEFT + width + 4:.1f}" y="{y + 9}">{text}</text>')
            y += BAR
        y += GAP
    x = LEFT + unit
    made.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 8}" y2="{y - 6}" stroke-dasharray="4 3"/>')
    head = "Time of a call over that of the fastest engine used directly (lower is better)"
    made.append(f'<text class="head" x="{LEFT}" y="18">{head}</text>')
    made.append(
        f'<text class="small" x="{LEFT}" y="{y + 10}">{escape(measured["date"])}, {escape(measured["machine"])}; '
        f"{escape(measured['versions'])}</text>"
    )
    width, height = LEFT + WIDE + 90, y + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{head}"><style>{STYLE}</style>\n' + "\n".join(made) + "\n</svg>\n"
    )


def main() -> None:
    """Write the file, or check it."""
    new = picture(json.loads(SOURCE.read_text("utf-8")))
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if TARGET.read_text("utf-8") == new else f"{TARGET.name} is old: run {sys.argv[0]}")
    TARGET.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
