"""Rematerialization: results of the forward pass are recomputed in the backward pass instead of being stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from xrt_core.errors import OptionError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.op_traits import is_deterministic, traits_of
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.simplify import nbytes

MARK: Final = "xrt.recompute"
"""Key in a node's metadata: the nodes of one label are a region, which is recomputed as a whole."""

_SUFFIX: Final = ".recomputed"
_COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the numbers of segments tried for a budget


def marked(node: Node) -> str | None:
    """The label of the region that a node is marked for, or None."""
    return node.annotations.metadata.get(MARK)


class Recompute(Pass):
    """Recomputes the results of marked regions of the forward pass where the backward pass reads them.

    The graph's first output is its loss. The forward pass is the nodes on which the loss depends; all other nodes are
    the backward pass. If the backward pass reads results of a region, copies of the region's nodes recompute them right
    before the first such reader, from the inputs of the region. These inputs pass through an `xrt.Barrier`, together
    with a gradient that is available only then and whose readers read it from the barrier: therefore no compiler can
    schedule the copies earlier or merge them with the originals.

    1. With `label`: one region per label. A Cast between nodes of a region belongs to it.
    2. With `budget`: regions are chosen so that the intermediate results of a step, in the order of the nodes, never
       take more than `budget` bytes, with the least recomputation. OptionError if no choice suffices.
    3. Unchanged: nodes that draw random numbers without a seed; results that only updates of variables read; results
       that are inputs of another region, which are stored anyway; a graph that has barriers already.
    """

    name = "recompute"

    def __init__(self, label: Callable[[Node], str | None] = marked, budget: int | None = None) -> None:
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
            raise OptionError(f"recompute_budget={budget!r}: it takes a number of bytes above 0, or None")
        self._label, self._budget = label, budget

    def rewrite(self, graph: Graph) -> Graph:
        """See the class."""
        if any(_is_barrier(n) for n in graph.nodes):
            return graph
        forward_nodes = forward_pass(graph)
        regions: dict[str, list[int]] = {}
        for i in forward_nodes:
            label = self._label(graph.nodes[i])
            if label is not None:
                regions.setdefault(label, []).append(i)
        if regions:
            graph = _rewritten(graph, forward_nodes, list(_with_casts(graph, forward_nodes, regions).values()))
        return graph if self._budget is None else _within(graph, self._budget)


def peak_bytes(graph: Graph) -> int:
    """The peak memory of node results if nodes run in order and each result is freed after its last reader. Results of
    unknown size and graph outputs do not count."""
    last: dict[Value, int] = {v: i for i, n in enumerate(graph.nodes) for v in n.uses()}
    returned = set(graph.outputs)
    frees: dict[int, int] = {}
    have = most = 0
    for i, n in enumerate(graph.nodes):
        for v in n.outputs:
            if v is not None and v not in returned:
                size = nbytes(v.type) or 0
                have += size
                end = max(last.get(v, i), i)
                frees[end] = frees.get(end, 0) + size
        most = max(most, have)
        have -= frees.pop(i, 0)
    return most


def forward_pass(graph: Graph) -> list[int]:
    """Indices of the nodes that the first output (the loss) depends on, ascending."""
    found: set[int] = set()
    todo = [i for v in graph.outputs[:1] if (i := graph.producers.get(v)) is not None]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += graph.predecessors[i]
    return sorted(found)


def _with_casts(graph: Graph, forward_nodes: Sequence[int], regions: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The regions, with the unmarked casts all of whose readers in the forward pass are in one of them."""
    of = {i: label for label, nodes in regions.items() for i in nodes}
    known = set(forward_nodes)
    for i in reversed(forward_nodes):
        n = graph.nodes[i]
        if n.op_type == "Cast" and not n.domain and i not in of:
            readers = {of.get(k) for v in n.outputs if v is not None for k in graph.consumers.get(v, ()) if k in known}
            label = next(iter(readers), None)
            if len(readers) == 1 and label is not None:
                of[i] = label
    found: dict[str, list[int]] = {label: [] for label in regions}
    for i in sorted(of):
        found[of[i]].append(i)
    return found


def _rewritten(graph: Graph, forward_nodes: Sequence[int], regions: Sequence[Sequence[int]]) -> Graph:
    """The graph in which the backward pass reads recomputed results of the regions."""
    forward = set(forward_nodes)
    nodes = graph.nodes
    kept = set(graph.outputs)

    def readers(v: Value) -> list[int]:
        return [
            i for i in graph.consumers.get(v, ()) if i not in forward and not nodes[i].annotations.model_update
        ]  # fmt: skip

    plans: list[tuple[list[int], list[Value]]] = []
    wanted_of = [[v for i in r for v in nodes[i].outputs if v is not None and readers(v)] for r in regions]
    spans = [set(r) for r in regions]
    for again in (False, True):  # the second time with the values that other regions store
        plans = [
            _closure(graph, own, [v for v in wanted if v not in kept], kept)
            for own, wanted in zip(spans, wanted_of, strict=True)
        ]
        if not again:
            kept |= {v for _, boundary in plans for v in boundary}
    late = _latest(graph, forward)
    inserted: dict[int, list[Node]] = {}
    waited: dict[int, dict[Value, Value]] = {}
    replaced: dict[Value, Value] = {}
    names = _Names(graph)
    for closure, boundary in plans:
        made = {v for i in closure for v in nodes[i].outputs if v is not None}
        users = sorted({i for v in made for i in readers(v)})
        if not users:
            continue
        first = users[0]
        token = _token(graph, late, users)
        barrier, through = _barrier(graph, closure, boundary, token, names)
        copies = [] if barrier is None else [barrier]
        if token is not None and token in through and token not in boundary:
            waited.setdefault(first, {})[token] = through[token]
        for i in closure:
            outputs = [None if v is None else Value(names.fresh(v.name), v.type) for v in nodes[i].outputs]
            copy = substitute(nodes[i], through)
            copies.append(
                Node(copy.op_type, copy.inputs, outputs, copy.attributes, domain=copy.domain, version=copy.version,
                     name=names.fresh(copy.name), annotations=copy.annotations)
            )  # fmt: skip
            through |= {v: w for v, w in zip(nodes[i].outputs, outputs, strict=True) if v is not None and w is not None}
        inserted.setdefault(first, []).extend(copies)
        replaced |= {v: through[v] for v in made}
    if not inserted:
        return graph
    result: list[Node] = []
    held: dict[Value, Value] = {}  # gradient -> output of a barrier: later readers depend on the barrier
    for i, n in enumerate(nodes):
        for copy in inserted.get(i, ()):
            result.append(substitute(copy, held) if held else copy)
        held |= waited.get(i, {})
        after = i not in forward and not n.annotations.model_update
        n = substitute(n, replaced) if after else n
        result.append(substitute(n, held) if held else n)
    opsets = graph.opsets if DIALECT in graph.opsets else {**graph.opsets, DIALECT: DIALECT_VERSION}
    return graph.replace(nodes=result, opsets=opsets)


def _closure(
    graph: Graph, own: set[int], wanted: Sequence[Value], kept: Collection[Value]
) -> tuple[list[int], list[Value]]:
    """The nodes of a region that compute `wanted` from stored values, and those values."""
    found: set[int] = set()
    boundary: dict[Value, None] = {}
    todo = list(wanted)
    while todo:
        v = todo.pop()
        i = graph.producers.get(v)
        if i is None or i not in own or v in kept or not _may_repeat(graph.nodes[i]):
            boundary[v] = None
        elif i not in found:
            found.add(i)
            todo += [u for u in graph.nodes[i].uses() if u.data is None]
    return sorted(found), list(boundary)


def _may_repeat(node: Node) -> bool:
    return is_deterministic(node) and not (traits_of(node).stateful or node.annotations.model_update)


def _barrier(
    graph: Graph, closure: Sequence[int], boundary: Sequence[Value], token: Value | None, names: _Names
) -> tuple[Node | None, dict[Value, Value]]:
    """The barrier for the inputs of a region, and the substitution of its outputs for them.

    Graph inputs pass through it only if a copy would otherwise be equal to its original.
    """
    made = {v for i in closure for v in graph.nodes[i].outputs if v is not None}
    held = {v: None for v in boundary if v in graph.producers}
    for i in closure:
        used = [v for v in graph.nodes[i].uses() if v.data is None]
        if not any(v in held or v in made for v in used):
            held.update(dict.fromkeys(used))
    if not held:
        return None, {}
    if token is not None:
        held[token] = None
    inputs = list(held)
    outputs = [Value(names.fresh(v.name), v.type) for v in inputs]
    node = Node(
        "Barrier", inputs, outputs, domain=DIALECT, version=DIALECT_VERSION, name=names.fresh("barrier"),
        annotations=graph.nodes[closure[0]].annotations.replace(metadata={}),
    )  # fmt: skip
    return node, dict(zip(inputs, outputs, strict=True))


def _latest(graph: Graph, forward: Collection[int]) -> list[int]:
    """For each node of the backward pass the last node of the forward pass on which it depends, -1 for the others."""
    found: list[int] = []
    for i, before in enumerate(graph.predecessors):
        found.append(-1 if i in forward else max((p if p in forward else found[p] for p in before), default=-1))
    return found


def _token(graph: Graph, late: Sequence[int], users: Sequence[int]) -> Value | None:
    """A value of the backward pass that is available when the first of `users` runs, and as late as possible: of the
    values that they read, or else of all available ones, the one that depends on the last node of the forward pass."""
    first = users[0]
    read = [p for i in users for p in graph.predecessors[i]]
    for among in ([p for p in read if p < first], range(first)):
        best = max(among, key=lambda p: (late[p], p), default=-1)
        if best >= 0 and late[best] >= 0:
            return next((v for v in graph.nodes[best].outputs if v is not None), None)
    return None


def _is_barrier(node: Node) -> bool:
    return node.op_type == "Barrier" and node.domain == DIALECT


class _Names:
    """Names that no value or node of a graph has."""

    def __init__(self, graph: Graph) -> None:
        self._used = {v.name for n in graph.nodes for v in (*n.inputs, *n.outputs) if v is not None}
        self._used |= {n.name for n in graph.nodes}

    def fresh(self, base: str) -> str:
        """A free name for the recomputed `base`."""
        name, count = f"{base}{_SUFFIX}", 1
        while name in self._used:
            name, count = f"{base}{_SUFFIX}.{count}", count + 1
        self._used.add(name)
        return name


# --- by budget --------------------------------------------------------------------------------------------------------


def _within(graph: Graph, budget: int) -> Graph:
    """The graph whose intermediate results fit into the budget, with the fewest segments recomputed."""
    least = have = peak_bytes(graph)
    if have <= budget:
        return graph
    forward_nodes = forward_pass(graph)
    for count in _COUNTS:
        if count > len(forward_nodes):
            break
        segments = _segments(graph, forward_nodes, count)[:-1]  # the last would be recomputed immediately
        made = _rewritten(graph, forward_nodes, segments)
        peak = peak_bytes(made)
        least = min(least, peak)
        if peak <= budget:
            for k in range(len(segments) - 1, -1, -1):  # the later a segment, the shorter its results are stored
                fewer = [s for j, s in enumerate(segments) if j != k]
                cheaper = _rewritten(graph, forward_nodes, fewer)
                if peak_bytes(cheaper) <= budget:
                    segments, made = fewer, cheaper
            return made
    raise OptionError(
        f"recompute_budget={budget}: the intermediate results of a step take {have} bytes, and {least} at the least "
        "with recomputation; give that much, or a smaller batch"
    )


def _segments(graph: Graph, forward_nodes: Sequence[int], count: int) -> list[list[int]]:
    """The forward pass in `count` segments that store about equally much for the backward pass, cut where few bytes are
    live."""
    forward, place = set(forward_nodes), {i: k for k, i in enumerate(forward_nodes)}
    size = len(forward_nodes)
    saved, change = [0] * size, [0] * (size + 1)  # change: of the live bytes at each node
    for k, i in enumerate(forward_nodes):
        for v in graph.nodes[i].outputs:
            users = graph.consumers.get(v, ()) if v is not None else ()
            bytes_ = nbytes(v.type) or 0 if v is not None else 0
            end = max((place[u] for u in users if u in forward), default=k)
            change[k] += bytes_
            change[end] -= bytes_  # a cut after k separates k from k + 1
            if any(u not in forward for u in users):
                saved[k] += bytes_
    total = sum(saved) or 1
    run = live = 0
    weight, live_after = [], []
    for k in range(size):
        run += saved[k]
        live += change[k]
        weight.append(run / total)
        live_after.append(live)
    cuts: list[int] = []
    for c in range(1, count):
        near = [k for k in range(cuts[-1] + 1 if cuts else 0, size - 1) if abs(weight[k] - c / count) <= 0.5 / count]
        if near:
            cuts.append(min(near, key=lambda k: (live_after[k], abs(weight[k] - c / count))))
    bounds = [0, *(k + 1 for k in cuts), size]
    return [list(forward_nodes[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
