"""Layered layout of a diagram with few intersecting edges (Sugiyama, Tagawa and Toda, 1981)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xrt_core.reports.diagram import Diagram

HEIGHT: Final = 34.0
ROW: Final = 62.0
_GAP: Final = 18.0
CHARACTER: Final = 7.0
"""Width of a character of the diagram's font, in pixels."""
MAX_WIDTH: Final = 220.0
_GUTTER: Final = 64.0  # pixels between two columns
_LANES: Final = 10  # places in a gutter for edges from one column to another
_LANE: Final = 5.0
_MAX_COLUMNS: Final = 200
_SLACK: Final = 0.15  # of a column's length, by which a cut may move to where fewer edges pass
_BEND: Final = 4.0  # pixels; width of an edge that passes a layer
_SWEEPS: Final = 4
_MAX_BENDS: Final = 20_000  # with more, edges are straight lines, which bounds the time


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout, in pixels. boxes: per box (x, y, width), of its upper left corner. lines: per edge its points.

    columns: per box its column; edges from one column to another run in the gaps between rows and columns.
    width, height: of the whole diagram.
    """

    boxes: tuple[tuple[float, float, float], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]
    columns: tuple[int, ...]
    width: float
    height: float


def place(drawn: Diagram, aspect: float | None = None) -> Placed:
    """Lay out a diagram whose boxes are in topological order. Deterministic; near-linear in its size.

    aspect: the wanted ratio of width to height. Layers that are too wide for it are divided, and the sequence of layers
    is cut into columns. Without it there is one column, however high or wide.
    """
    widths = [min(max(len(b.label), len(b.detail)) * CHARACTER + 16, MAX_WIDTH) for b in drawn.boxes]
    layer = _layers(drawn)
    if aspect is None or not drawn.boxes:
        starts = [0]
    else:
        layer = _divided(layer, widths, aspect)
        starts = _cuts(drawn, layer, widths, aspect)
    column = [bisect.bisect_right(starts, k) - 1 for k in layer]
    inner: list[list[int]] = [[] for _ in starts]  # column -> the edges that stay in it
    for i, e in enumerate(drawn.edges):
        if column[e.source] == column[e.target]:
            inner[column[e.source]].append(i)
    members: list[list[int]] = [[] for _ in starts]
    for i, c in enumerate(column):
        members[c].append(i)
    boxes: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * len(drawn.boxes)
    lines: list[tuple[tuple[float, float], ...]] = [()] * len(drawn.edges)
    across, depth, gutters = _GAP, 0.0, [0.0]  # gutters: the x of the gap to the left of each column
    for c, start in enumerate(starts):
        edges = [(drawn.edges[i].source, drawn.edges[i].target) for i in inner[c]]
        found, drawn_lines, wide, deep = _column(members[c], edges, layer, start, widths)
        for i, (x, y) in found.items():
            boxes[i] = (x + across, y, widths[i])
        for i, points in zip(inner[c], drawn_lines, strict=True):
            lines[i] = tuple((x + across, y) for x, y in points)
        across += wide + (_GUTTER if c < len(starts) - 1 else 0.0)
        gutters.append(across - _GUTTER)
        depth = max(depth, deep)
    far = 0
    for i, e in enumerate(drawn.edges):
        if column[e.source] != column[e.target]:
            lane = far % _LANES * (_GUTTER - _GAP) / _LANES
            between = column[e.source], column[e.target]
            lines[i] = _around(boxes[e.source], boxes[e.target], lane, gutters, between, depth)
            far += 1
    low = _LANES * _LANE if far else 0.0
    return Placed(tuple(boxes), tuple(lines), tuple(column), across + _GAP, _GAP + depth + low)


def _layers(drawn: Diagram) -> list[int]:
    """The layer of every box: below all that it reads."""
    layer = [0] * len(drawn.boxes)
    for e in drawn.edges:  # edges are sorted by target
        layer[e.target] = max(layer[e.target], layer[e.source] + 1)
    readers: dict[int, int] = {}
    for e in drawn.edges:
        readers[e.source] = min(readers.get(e.source, layer[e.target]), layer[e.target])
    for i, b in enumerate(drawn.boxes):  # inputs one layer above their first reader, outputs in the last layer
        if b.kind == "input" and i in readers:
            layer[i] = readers[i] - 1
        elif b.kind == "output":
            layer[i] = max(layer)
    return layer


def _divided(layer: Sequence[int], widths: Sequence[float], aspect: float) -> list[int]:
    """The layers, renumbered, after those that are wider than the whole picture should be are divided into several."""
    room = math.sqrt(sum(w + _GAP for w in widths) * ROW * aspect)
    members: dict[int, list[int]] = {}
    for i, k in enumerate(layer):
        members.setdefault(k, []).append(i)
    made = [0] * len(layer)
    number = -1
    for k in sorted(members):
        used = math.inf
        for i in members[k]:
            if used + widths[i] > room:
                number, used = number + 1, 0.0
            used += widths[i] + _GAP
            made[i] = number
    return made


def _cuts(drawn: Diagram, layer: Sequence[int], widths: Sequence[float], aspect: float) -> list[int]:
    """The first layer of each column: as many columns as come nearest to the aspect, cut where few edges pass."""
    count = max(layer) + 1
    row = [0.0] * count
    for i, k in enumerate(layer):
        row[k] += widths[i] + _GAP
    passing = [0] * (count + 1)  # at k: edges between the layers k - 1 and k
    for e in drawn.edges:
        passing[layer[e.source] + 1] += 1
        passing[layer[e.target] + 1] -= 1
    passing = list(itertools.accumulate(passing))

    def misses(columns: int) -> float:
        length = -(-count // columns)
        wide = sum(max(row[a : a + length]) + _GUTTER for a in range(0, count, length))
        return abs(math.log(wide / (length * ROW) / aspect))

    columns = min(range(1, min(count, _MAX_COLUMNS) + 1), key=misses)
    length = count / columns
    starts = [0]
    for c in range(1, columns):
        middle, slack = round(c * length), int(length * _SLACK)
        candidates = range(max(starts[-1] + 1, middle - slack), min(count, middle + slack + 1))
        starts.append(min(candidates, key=lambda k, m=middle: (passing[k], abs(k - m)), default=middle))  # type: ignore[misc]
    return sorted({k for k in starts if k < count})


def _column(
    members: Sequence[int], edges: Sequence[tuple[int, int]], layer: Sequence[int], start: int, widths: Sequence[float]
) -> tuple[dict[int, tuple[float, float]], list[tuple[tuple[float, float], ...]], float, float]:
    """Lay out the boxes of a column, and the edges within it.

    Return the upper left corner of each box, the points of each edge, and the column's width and height.
    """
    local = {i: k for k, i in enumerate(members)}
    at = [layer[i] - start for i in members]
    breadth = [widths[i] for i in members]
    # dummy vertices (bends) for every edge that spans several layers
    chains: list[list[int]] = []
    room = _MAX_BENDS
    for source, target in edges:
        chain = [local[source]]
        passed = range(layer[source] + 1 - start, layer[target] - start)
        if len(passed) <= room:
            room -= len(passed)
            for k in passed:
                chain.append(len(at))
                at.append(k)
                breadth.append(_BEND)
        chain.append(local[target])
        chains.append(chain)
    x = _across(at, breadth, chains)
    left = min((x[i] - breadth[i] / 2 for i in range(len(at))), default=0.0)
    x = [v - left for v in x]

    def top(i: int) -> float:
        return _GAP + at[i] * ROW

    lines = []
    for chain in chains:
        points = [(x[chain[0]], top(chain[0]) + HEIGHT)]
        for i in chain[1:-1]:
            points += [(x[i], top(i)), (x[i], top(i) + HEIGHT)]
        lines.append((*points, (x[chain[-1]], top(chain[-1]))))
    corners = {i: (x[k] - breadth[k] / 2, top(k)) for i, k in local.items()}
    right = max((x[i] + breadth[i] / 2 for i in range(len(at))), default=0.0)
    return corners, lines, right, _GAP + (max(at, default=0) + 1) * ROW


def _around(
    source: tuple[float, float, float],
    target: tuple[float, float, float],
    lane: float,
    gutters: Sequence[float],
    columns: tuple[int, int],
    depth: float,
) -> tuple[tuple[float, float], ...]:
    """The points of an edge from one column to a later one: through gaps, below all columns where it passes some."""
    leaves, enters = columns
    x, y = source[0] + source[2] / 2, source[1] + HEIGHT
    to_x, to_y = target[0] + target[2] / 2, target[1]
    step = (ROW - HEIGHT) / 3
    out, into = gutters[leaves + 1] + _GAP / 2 + lane, gutters[enters] + _GAP / 2 + lane
    low = [] if enters == leaves + 1 else [(out, depth + lane), (into, depth + lane)]
    return ((x, y), (x, y + step), (out, y + step), *low, (into, to_y - step), (to_x, to_y - step), (to_x, to_y))


def _across(at: Sequence[int], widths: Sequence[float], chains: Sequence[Sequence[int]]) -> list[float]:
    """Return the x coordinate of the middle of every box and bend: order each layer by its neighbours, then align."""
    above: list[list[int]] = [[] for _ in at]
    below: list[list[int]] = [[] for _ in at]
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    layers: list[list[int]] = [[] for _ in range(max(at, default=-1) + 1)]
    for i, k in enumerate(at):
        layers[k].append(i)
    x = [0.0] * len(at)
    for row in layers:
        _spread(row, x, widths, dict.fromkeys(row, 0.0))
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in layers if down else reversed(layers):
            neighbours = above if down else below
            wanted = {i: sum(x[j] for j in near) / len(near) if (near := neighbours[i]) else x[i] for i in row}
            row.sort(key=lambda i, w=wanted: (w[i], i))  # type: ignore[misc]
            _spread(row, x, widths, wanted)
    return x


def _spread(row: Sequence[int], x: list[float], widths: Sequence[float], wanted: dict[int, float]) -> None:
    """Assign the x coordinates of a layer, keeping its order, as close to `wanted` as the widths allow."""
    blocks: list[tuple[float, float, list[int]]] = []  # left edge, width, members
    for i in row:
        start, size, members = wanted[i] - widths[i] / 2, widths[i] + _GAP, [i]
        while blocks and blocks[-1][0] + blocks[-1][1] > start:
            before_start, before_size, before = blocks.pop()
            share = before_size / (before_size + size)
            start = before_start * share + (start - before_size) * (1 - share)
            size, members = before_size + size, before + members
        blocks.append((start, size, members))
    for start, _, members in blocks:
        for i in members:
            x[i] = start + widths[i] / 2
            start += widths[i] + _GAP
