"""A profile as one self-contained HTML page: a timeline to zoom into and to search, memory over time, and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

from xrt_core.errors import printable
from xrt_core.reports.colours import colours
from xrt_core.runtime.recording import Span

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headers, and a row of cells for each step."""

MOST_SPANS: Final = 50_000
"""Of the timeline; of more, those at its end are left out. The tables are always complete."""
MOST_SAMPLES: Final = 2000
"""Of memory."""
_OTHERS: Final = {"call": "#b0bec5", "event": "#d7ccc8"}


def to_html(
    name: str, summary: str, timeline: Sequence[Span], memory: Sequence[tuple[float, int]], seconds: float,
    steps: Table, nodes: Table,
) -> str:  # fmt: skip
    """Return the page. It loads nothing: style, script and data are in it.

    name: the title. timeline, memory, seconds: what is drawn, from 0 to `seconds`.
    """
    spans = sorted(timeline, key=lambda s: (s.start, -s.end))
    shown = spans[:MOST_SPANS]
    threads = list(dict.fromkeys(s.thread for s in shown))
    wheres = sorted({_where(s) for s in shown})
    paint = {**colours(w for w in wheres if w not in _OTHERS), **_OTHERS}
    labels = list(dict.fromkeys((s.label, s.nodes, s.moved) for s in shown))
    number = {k: i for i, k in enumerate(labels)}
    data: dict[str, Any] = {
        "threads": threads,
        "wheres": wheres,
        "colours": [paint[w] for w in wheres],
        "labels": [[printable(label), list(nodes), moved] for label, nodes, moved in labels],
        "spans": [
            [
                threads.index(s.thread), _depth, round(s.start * 1e6, 2), round((s.end - s.start) * 1e6, 2),
                number[s.label, s.nodes, s.moved], wheres.index(_where(s)),
            ]
            for s, _depth in zip(shown, _depths(shown), strict=True)
        ],
        "memory": [[round(t * 1e6), size] for t, size in _thinned(memory)],
        "seconds": seconds,
    }  # fmt: skip
    rest = len(spans) - len(shown)
    left = f"<p>The last {rest} of {len(spans)} spans are not drawn.</p>" if rest else ""
    title = html.escape(printable(name or "profile"))
    key = "".join(f'<span class="key" style="background:{paint[w]}">{html.escape(w)}</span>' for w in wheres)
    files = resources.files("xrt_core.profiling")
    style = files.joinpath("page.css").read_text("utf-8")
    script = files.joinpath("page.js").read_text("utf-8")
    embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body>\n"
        f"<h1>{title}</h1><p>{html.escape(summary)}</p>\n"
        f'<p class="keys">{key}</p>\n'
        '<p class="tools"><input id="search" type="search" placeholder="a step or a node" aria-label="search"> '
        '<button id="in">zoom in (+)</button> <button id="out">zoom out (-)</button> <button id="all">all (0)</button> '
        '<output id="found"></output></p>\n'
        '<canvas id="timeline" tabindex="0" role="img" aria-label="timeline of steps by thread"></canvas>\n'
        '<canvas id="memory" role="img" aria-label="memory of the process over time"></canvas>\n'
        '<pre id="details" aria-live="polite">Drag or use the arrow keys to move, the wheel or + and - to zoom; '
        f"click a step.</pre>\n{left}"
        f"<h2>Steps</h2>{_table(*steps)}\n<h2>Nodes</h2>"
        f"<p>On the host measured; within clusters a share of the cluster's time, by bytes and operations.</p>"
        f"{_table(*nodes)}\n"
        f'<script type="application/json" id="data">{embedded}</script>\n<script>{script}</script>\n</body></html>\n'
    )


def _where(s: Span) -> str:
    return s.where or "call"


def _depths(spans: list[Span]) -> list[int]:
    """How many others of its thread each span lies in; `spans` by their starts, the longer first."""
    ends: dict[str, list[float]] = {}
    found = []
    for s in spans:
        open_ = ends.setdefault(s.thread, [])
        while open_ and open_[-1] <= s.start:
            open_.pop()
        found.append(len(open_))
        open_.append(s.end)
    return found


def _thinned(samples: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    return samples[:: max(1, -(-len(samples) // MOST_SAMPLES))]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th><button>{html.escape(h)}</button></th>" for h in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(printable(c, lines=False))}</td>" for c in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
