"""Regions of a graph that are taken to int8 or left: those that cost the least error for what they save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from xrt_core.ir.graph import Node

_REGIONS: Final = 16
"""How many regions a graph is divided into: each is measured by a run on the host."""
_TRIES: Final = 5
_AIM: Final = 0.9  # share of the budget that a choice is to use


def regions_of(products: Sequence[Node], work: Mapping[str, int]) -> list[tuple[Node, ...]]:
    """Runs of products, in topological order, with about the same work each. work: FLOPs by node's name."""
    total = sum(work.get(n.name, 0) for n in products) or len(products)
    found: list[list[Node]] = [[]]
    done = 0.0
    for n in products:
        if found[-1] and done >= total * len(found) / _REGIONS:
            found.append([])
        found[-1].append(n)
        done += work.get(n.name, 0) if total != len(products) else 1
    return [tuple(r) for r in found if r]


def choose(
    regions: Sequence[tuple[Node, ...]],
    work: Mapping[str, int],
    measure: Callable[[Sequence[Node]], float],
    correction: float = 1.0,
) -> tuple[Node, ...]:
    """The products to take: as much work as the budget allows.

    measure: products -> the share of the budget that the model uses with these in int8. correction: how many times as
    much an engine was seen to use than `measure` says.

    Errors of regions are taken to add up as independent ones do, by their squares; then a set is measured as a whole,
    and where it uses more or less than was predicted, the prediction is corrected and the set chosen anew.
    """
    alone = [measure(r) * correction for r in regions]
    saved = [max(sum(work.get(n.name, 0) for n in r), 1) for r in regions]
    order = sorted(range(len(regions)), key=lambda i: alone[i] ** 2 / saved[i])
    best: tuple[int, ...] = ()
    factor, tried = 1.0, set[tuple[int, ...]]()
    for _ in range(_TRIES):
        taken, square = [], 0.0
        for i in order:
            if math.isfinite(alone[i]) and factor * math.sqrt(square + alone[i] ** 2) <= _AIM:
                taken.append(i)
                square += alone[i] ** 2
        chosen = tuple(sorted(taken))
        if not chosen or chosen in tried:
            break
        tried.add(chosen)
        uses = measure([n for i in chosen for n in regions[i]]) * correction
        if uses <= 1.0 and sum(saved[i] for i in chosen) > sum(saved[i] for i in best):
            best = chosen
        if not square or not math.isfinite(uses):
            break
        factor = max(uses / math.sqrt(square), 1e-3)
    return tuple(n for i in best for n in regions[i])
