"""Automatic sharding: how inputs and weights lie on a mesh, chosen by the estimated time of a run.

A greedy search: inputs, and groups of weights of the same shape whose names differ in numbers alone (the layers of a
model), are tried in turn, the inputs first and then last, in each way in which they may lie on each axis of the mesh.
What the propagation makes of the whole graph decides. The estimate counts FLOPs, bytes of weights that are read, and
bytes of collectives, at the rates below; they stand for no machine, and only their ratios matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from xrt_core.errors import GraphError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.sharding import B, Mesh, NdSbp, S, Sbp, parse_sbp, sbp_text
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.passes.sharding.propagate import Propagation, exact_name

_FLOPS: Final = 1e12  # a second
_MEMORY: Final = 1e11  # bytes a second
_NETWORK: Final = 2e10
_COLLECTIVE: Final = 1e-5  # seconds that each takes at least
_GROUPS: Final = 16  # the largest that are tried
_LEAST: Final = 4096  # elements of a weight that is worth splitting


def automatic(
    graph: Graph,
    mesh: Mesh,
    weights: Mapping[str, Sequence[str]] | None = None,
    given: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The sharding of a graph's inputs and weights, by exact patterns of their names.

    weights: names of inputs that are weights -> names of others that lie as they do; None: the constants are. given: of
    inputs that are not tried. What lies whole has no pattern, but for the first input of a graph of which all does, so
    that the mesh computes.
    """
    named = [v for v in (*graph.inputs, *graph.constants) if v.name]
    follow = {v.name: () for v in named if v.data is not None} if weights is None else weights
    start = {name: parse_sbp(text, mesh) for name, text in given.items()}
    groups = list(_groups([v for v in named if v.name not in given], follow))
    # what the inputs do decides what weights can save, and the other way round
    tried = [_search(graph, mesh, start, order, follow) for order in (groups, groups[::-1])]
    _, found = min(tried, key=lambda t: t[0])
    rules = {exact_name(n): sbp_text(s, mesh) for n, s in found.items()}
    return rules or {exact_name(v.name): "B" for v in named[:1]}


def _search(
    graph: Graph,
    mesh: Mesh,
    found: dict[str, NdSbp],
    groups: Sequence[Sequence[Value]],
    follow: Mapping[str, Sequence[str]],
) -> tuple[float, dict[str, NdSbp]]:
    """The estimated time, and the sharding, after trying each group in turn."""
    best = estimate(graph, mesh, found)
    for group in groups:
        for axis in range(len(mesh.names)):
            for split in range(min(2 if group[0].name in follow else 1, len(group[0].shape or ()))):
                tried = dict(found)
                for name in (n for v in group for n in (v.name, *follow.get(v.name, ()))):
                    whole = found.get(name, (B,) * len(mesh.names))
                    tried[name] = (*whole[:axis], S(split), *whole[axis + 1 :])
                try:
                    seconds = estimate(graph, mesh, tried)
                except GraphError:  # the axis does not divide it
                    continue
                if seconds < best:
                    best, found = seconds, tried
    return best, found


def estimate(graph: Graph, mesh: Mesh, shardings: Mapping[str, NdSbp]) -> float:
    """Estimated seconds of a run. Raises GraphError for a size that its part of the mesh does not divide."""
    made = Propagation(graph, mesh, {exact_name(n): sbp_text(s, mesh) for n, s in shardings.items()})
    _, report = made.run()
    seconds = sum(c.bytes / _NETWORK + _COLLECTIVE for c in report.collectives if c.kind != "slice")
    for i, n in enumerate(graph.nodes):
        reads = [made.reads[i, k] for k in range(len(n.inputs))]
        seconds += flops(n) / _parts(mesh, [*reads, *(made.sbp[v] for v in n.outputs if v is not None)]) / _FLOPS
    for v in (*graph.inputs, *graph.constants):
        if isinstance(v.shape, tuple) and v.is_static and v.dtype is not None:
            size = math.prod(d for d in v.shape if isinstance(d, int)) * v.dtype.itemsize
            seconds += size / _parts(mesh, [made.sbp[v]]) / _MEMORY
    return seconds


def _parts(mesh: Mesh, sbps: Sequence[Sequence[Sbp]]) -> int:
    """Over how many devices something is split that lies so."""
    return math.prod(size for a, (_, size) in enumerate(mesh.sizes) if any(sbp[a] != B for sbp in sbps))


def _groups(named: Sequence[Value], weights: Mapping[str, Sequence[str]]) -> Iterator[list[Value]]:
    """Inputs together, then groups of weights, the largest first."""
    others = {n for row in weights.values() for n in row}
    inputs = [v for v in named if v.name not in weights and v.name not in others and v.shape]
    if inputs:
        yield inputs
    groups: dict[tuple[object, ...], list[Value]] = {}
    for v in named:
        if v.name in weights and v.shape and len(v.shape) > 1 and _elements(v) >= _LEAST:
            groups.setdefault((re.sub(r"\d+", "#", v.name), v.shape), []).append(v)
    yield from sorted(groups.values(), key=lambda g: -sum(map(_elements, g)))[:_GROUPS]


def _elements(value: Value) -> int:
    return math.prod(d for d in value.shape or () if isinstance(d, int))
