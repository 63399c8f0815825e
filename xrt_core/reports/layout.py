"""Layered layout of a diagram with few intersecting edges (Sugiyama, Tagawa and Toda, 1981)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xrt_core.reports.diagram import Diagram

HEIGHT: Final = 34.0
ROW: Final = 62.0
_GAP: Final = 18.0
_CHARACTER: Final = 7.0  # pixels; width of a character of the diagram's font
_BEND: Final = 4.0  # pixels; width of an edge that passes a layer
_SWEEPS: Final = 4
_MAX_BENDS: Final = 20_000  # with more, edges are straight lines, which bounds the time


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout, in pixels. boxes: per box (x, y, width), of its upper left corner. lines: per edge its points.

    width, height: of the whole diagram.
    """

    boxes: tuple[tuple[float, float, float], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def place(drawn: Diagram) -> Placed:
    """Lay out a diagram whose boxes are in topological order. Deterministic; near-linear in its size."""
    count = len(drawn.boxes)
    layer = [0] * count
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
    # dummy vertices (bends) for every edge that spans several layers
    widths = [max(len(b.label), len(b.detail)) * _CHARACTER + 16 for b in drawn.boxes]
    at = list(layer)
    chains: list[list[int]] = []
    room = _MAX_BENDS
    for e in drawn.edges:
        chain = [e.source]
        passed = range(layer[e.source] + 1, layer[e.target])
        if len(passed) <= room:
            room -= len(passed)
            for k in passed:
                chain.append(len(at))
                at.append(k)
                widths.append(_BEND)
        chain.append(e.target)
        chains.append(chain)
    x = _across(at, widths, chains)
    left = min((x[i] - widths[i] / 2 for i in range(len(at))), default=0.0)
    x = [v - left + _GAP for v in x]

    def top(i: int) -> float:
        return _GAP + at[i] * ROW

    lines = []
    for chain in chains:
        points = [(x[chain[0]], top(chain[0]) + HEIGHT)]
        for i in chain[1:-1]:
            points += [(x[i], top(i)), (x[i], top(i) + HEIGHT)]
        lines.append((*points, (x[chain[-1]], top(chain[-1]))))
    boxes = tuple((x[i] - widths[i] / 2, top(i), widths[i]) for i in range(count))
    right = max((x[i] + widths[i] / 2 for i in range(len(at))), default=0.0)
    return Placed(boxes, tuple(lines), right + _GAP, _GAP * 2 + (max(at, default=0) + 1) * ROW)


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
