"""Steps: a decoder's graph for one token at a time, on caches of a fixed capacity, for engines that compile for shapes.

`InPlace` has what is valid at the beginning of the caches. It is the padded form of the graph (`passes.padding`) for
caches of any length up to the capacity, so that padding is proven to reach nothing; what a step appends is written
behind what is valid, into the storage of the cache that it was given.

`Shifted` has what is valid at the end, and the mask leaves the rest out: that is how batches of unequal prompts are
padded, so models that take these do not see a difference. A step drops the leftmost entry as it appends one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from xrt_core.engine import engines
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.padding import PaddingRefused, pad_graph

if TYPE_CHECKING:
    from xrt_core.compiler.models import ImportedModel

_PAST: Final = "past"
_MOST: Final = 8
"""Forms of one model that are kept, with their executables: of different batches and capacities."""


class Cache(NamedTuple):
    """One cache: its input, the output that is the next one's input, its dtype, its shape (0 for the sizes that vary),
    the axis of sequences and that of tokens. is_cross: whether it is of an encoder's states: the first step makes it,
    and all others read it."""

    input: str
    output: str
    dtype: np.dtype
    shape: tuple[int, ...]
    batch: int
    length: int
    is_cross: bool = False


class Steps(NamedTuple):
    """A graph for single steps.

    run: from its inputs by name to the scores and then the caches that are no cross caches, in arrays of whatever
    library. valid: its input for the number of valid entries of the caches, which begin with these; "" where they end
    with them.
    """

    run: ImportedModel
    valid: str = ""


def in_place(
    module: XRTModule, caches: Sequence[Cache], scores: str, mask: str, shapes: Mapping[str, Sequence[int]],
    constants: Mapping[str, np.ndarray], capacity: int,
) -> Steps | None:  # fmt: skip
    """Steps that write into caches of `capacity` entries.

    mask: the input with a column for each entry, "" for none. shapes: of the other inputs of a step. constants: of
    inputs that are the same in all steps. None where padding may reach a result, where an engine takes shapes that vary
    and so needs none, and where the module does not run graphs made of its own.
    """
    graph = module.graph
    if graph is None or any(engines.get(n).dynamic_dims != "none" for n in module.engines):
        return None
    if {v.name for v in graph.inputs} != {*shapes, *constants}:
        return None
    key = (capacity, tuple((n, tuple(s)) for n, s in shapes.items()), tuple(constants))
    kept = _forms_of(module)
    if key not in kept:
        form = _appending(_part(graph, _results(module, caches, scores), constants), caches, mask, shapes, capacity)
        run = None if form is None else module.derived(form)
        kept[key] = None if run is None else Steps(run, f"valid_{_PAST}")
        while len(kept) > _MOST:
            kept.pop(next(iter(kept)))
    return kept[key]


def shifted(module: XRTModule, caches: Sequence[Cache], scores: str, inputs: Collection[str]) -> Steps | None:
    """Steps on caches with an entry more on the left, which is not read. inputs: that are given. None where the module
    does not run graphs made of its own."""
    key, kept, graph = frozenset(inputs), _forms_of(module), module.graph
    if graph is None:
        return None
    if key not in kept:
        run = module.derived(_dropping(_part(graph, _results(module, caches, scores)), caches))
        kept[key] = None if run is None else Steps(run)
    return kept[key]


_forms: Final[weakref.WeakKeyDictionary[XRTModule, dict[Any, Steps | None]]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def _forms_of(module: XRTModule) -> dict[Any, Steps | None]:
    with _lock:
        return _forms.setdefault(module, {})


def _results(module: XRTModule, caches: Sequence[Cache], scores: str) -> list[Value]:
    """The outputs of a module's graph that a step gives."""
    assert module.graph is not None
    outputs = dict(zip(module.output_names, module.graph.outputs, strict=True))
    return [outputs[n] for n in (scores, *(c.output for c in caches if not c.is_cross))]


def _part(graph: Graph, results: Sequence[Value], constants: Mapping[str, np.ndarray] = MappingProxyType({})) -> Graph:
    """What gives some values of a graph, where some inputs have known values."""
    known = {v: Value.constant(constants[v.name], v.name) for v in graph.inputs if v.name in constants}
    needed, nodes = set(results), []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            nodes.append(substitute(node, known) if known else node)
            needed.update(node.uses())
    inputs = [v for v in graph.inputs if v not in known]
    return graph.replace(inputs=inputs, outputs=results, nodes=nodes[::-1])


def _appending(
    graph: Graph, caches: Sequence[Cache], mask: str, shapes: Mapping[str, Sequence[int]], capacity: int
) -> Graph | None:
    """The graph's form for caches of `capacity` entries, of which the first ones are valid; None where padding may
    reach a result."""
    own = {c.input: c for c in caches if not c.is_cross}
    declared: list[list[int | str]] = []
    for v in graph.inputs:
        shape: list[int | str] = list(shapes[v.name])
        if v.name in own:
            shape[own[v.name].length] = _PAST
        elif v.name == mask:
            shape[-1] = f"{_PAST} + 1"
        declared.append(shape)
    try:
        form = pad_graph(graph, declared, {_PAST: capacity - 1})
    except PaddingRefused:
        return None
    made = form.graph
    makers = {v: n for n in made.nodes for v in n.outputs if v is not None}
    inputs, new, replaced = list(made.inputs), [], {}
    for i, v in enumerate(made.inputs):
        cache = own.get(v.name)
        if cache is None:
            continue
        shape_ = list(shapes[v.name])
        shape_[cache.length] = capacity
        whole = inputs[i] = Value(v.name, TensorType(cache.dtype, tuple(shape_)))
        for node in made.nodes:
            room = makers.get(node.inputs[0]) if _writes(node) and node.inputs[0] is not None else None
            if room is not None and room.op_type == "Concat" and room.inputs[0] is v:
                # the last entry of the cache, which is not valid yet, is that room
                annotations = node.annotations.replace(aliases=((0, 0),))
                replaced[node] = node.replace(inputs=[whole, *node.inputs[1:]], annotations=annotations)
        new.append(_sliced(whole, v, cache, 0, capacity - 1, graph))
    nodes = [replaced.get(n, n) for n in (*new, *made.nodes)]
    made = made.replace(inputs=inputs, nodes=nodes)
    return _part(made, made.outputs)


def _writes(node: Node) -> bool:
    return node.op_type == "WriteSlice" and node.domain == "xrt"


def _dropping(graph: Graph, caches: Sequence[Cache]) -> Graph:
    """The graph for caches with an entry more on the left, which is not read."""
    known = {c.input: c for c in caches if not c.is_cross}
    inputs, nodes = [], []
    for v in graph.inputs:
        cache = known.get(v.name)
        if cache is not None:
            whole = Value(v.name, TensorType(cache.dtype, tuple(n or None for n in cache.shape)))
            nodes.append(_sliced(whole, v, cache, 1, int(np.iinfo(np.int64).max), graph))
            v = whole
        inputs.append(v)
    return graph.replace(inputs=inputs, nodes=[*nodes, *graph.nodes])


def _sliced(whole: Value, part: Value, cache: Cache, start: int, end: int, graph: Graph) -> Node:
    """The node that reads a part of a cache."""
    bounds = (Value.constant(np.array([n])) for n in (start, end, cache.length))
    version = since_version("Slice", "", max(graph.opsets.get("", 0), 10))
    return Node("Slice", [whole, *bounds], [part], version=version, name=f"part of {whole.name}")
