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
from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from xrt_core.engine import engines
from xrt_core.ir.graph import NO_ANNOTATIONS, Graph, Node, Value, substitute
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION, since_version
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.padding import PaddingRefused, pad_graph

if TYPE_CHECKING:
    from xrt_core.compiler.models import CompiledGraph, ImportedModel

T = TypeVar("T")

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


class InPlace(NamedTuple):
    """A graph for single steps on caches of which the first entries are valid.

    run: takes the tokens, int [batch, 1], then `fixed`, then `state`; gives the scores, then the state after the step.
    fixed: names of inputs that are the same in all steps. state: of the mask and the positions, where the model has
    them, of the number of valid entries (`VALID`), and of the caches that are no cross caches. All of it stays in the
    arrays in which the engine gave it.
    """

    run: CompiledGraph
    fixed: tuple[str, ...]
    state: tuple[str, ...]


VALID: Final = "valid_past"


class Inputs(NamedTuple):
    """The inputs of a decoder, "" for what it lacks."""

    ids: str
    mask: str
    positions: str


def in_place(
    module: XRTModule, inputs: Inputs, caches: Sequence[Cache], scores: str, shapes: Mapping[str, Sequence[int]],
    constants: Mapping[str, np.ndarray], capacity: int,
) -> InPlace | None:  # fmt: skip
    """Steps that write into caches of `capacity` entries.

    shapes: of the inputs of a step, of all but `constants`, which are the same in all steps. None where padding may
    reach a result, where an engine takes shapes that vary and so needs none, and where the module does not run graphs
    made of its own.
    """
    graph = module.graph
    if graph is None or any(engines.get(n).dynamic_dims != "none" for n in module.engines):
        return None
    if {v.name for v in graph.inputs} != {*shapes, *constants}:
        return None
    key = (capacity, tuple((n, tuple(s)) for n, s in shapes.items()), tuple(constants))
    with _lock:
        kept = _of_graph(_forms, module, graph)
        if key in kept:
            return kept[key]
    own = [c for c in caches if not c.is_cross]
    part = _part(graph, _results(module, caches, scores), constants)
    appending = _appending(part, inputs, own, shapes, capacity)
    run = None if appending is None else module.derived(appending)
    names = [n for n in (inputs.mask, inputs.positions, VALID, *(c.input for c in own)) if n]
    fixed = [n for n in shapes if n not in names and n != inputs.ids]
    made = None if run is None else InPlace(run.plain, tuple(fixed), tuple(names))
    with _lock:
        kept[key] = made
        while len(kept) > _MOST:
            del kept[next(iter(kept))]
    return made


def shifted(module: XRTModule, caches: Sequence[Cache], scores: str, inputs: Collection[str]) -> ImportedModel | None:
    """What runs steps on caches with an entry more on the left, which is not read: it gives the scores, then the caches
    that are no cross caches. inputs: that are given. None where the module does not run graphs made of its own."""
    key, graph = frozenset(inputs), module.graph
    if graph is None:
        return None
    with _lock:
        kept = _of_graph(_shifting, module, graph)
        if key in kept:
            return kept[key]
    made = module.derived(_dropping(_part(graph, _results(module, caches, scores)), caches))
    with _lock:
        return kept.setdefault(key, made)


_Forms = weakref.WeakKeyDictionary[XRTModule, tuple[Graph, dict[Hashable, T]]]
_forms: Final[_Forms[InPlace | None]] = weakref.WeakKeyDictionary()
_shifting: Final[_Forms[ImportedModel | None]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def _of_graph(forms: _Forms[T], module: XRTModule, graph: Graph) -> dict[Hashable, T]:
    """What was made of a module's graph, which is another one once a pass was left out."""
    kept = forms.get(module)
    if kept is None or kept[0] is not graph:
        kept = forms[module] = (graph, {})
    return kept[1]


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
    graph: Graph, inputs: Inputs, caches: Sequence[Cache], shapes: Mapping[str, Sequence[int]], capacity: int
) -> Graph | None:
    """The graph of `InPlace`; None where padding may reach a result."""
    own = {c.input: c for c in caches}
    declared: list[list[int | str]] = []
    for v in graph.inputs:
        shape: list[int | str] = list(shapes[v.name])
        if v.name in own:
            shape[own[v.name].length] = _PAST
        elif v.name == inputs.mask:
            shape[-1] = f"{_PAST} + 1"
        declared.append(shape)
    try:
        made = pad_graph(graph, declared, {_PAST: capacity - 1}).graph
    except PaddingRefused:
        return None
    given = {v.name: v for v in made.inputs}
    valid = given[VALID]
    state: dict[str, tuple[Value, Value]] = {}  # name -> before the step, and after it
    new: list[Node] = []
    replaced: dict[Node, Node] = {}
    if inputs.mask:
        seen = given[inputs.mask]
        before = Value(seen.name, seen.type)
        one = Value.constant(np.ones((*shapes[inputs.mask][:-1], 1), seen.dtype))
        new.append(_write(before, one, valid, -1, seen))
        state[inputs.mask] = before, seen
    if inputs.positions:
        state[inputs.positions] = given[inputs.positions], _next(given[inputs.positions], new)
    state[VALID] = valid, _next(valid, new)
    makers = {v: n for n in made.nodes for v in n.outputs if v is not None}
    for c, result in zip(caches, made.outputs[1:], strict=True):
        part = given[c.input]
        sizes = list(shapes[c.input])
        sizes[c.length] = capacity
        whole = Value(c.input, TensorType(c.dtype, tuple(sizes)))
        new.append(_sliced(whole, part, c, 0, capacity - 1, graph))
        state[c.input] = whole, result
        node = makers.get(result)
        room = None if node is None or not _writes(node) or node.inputs[0] is None else makers.get(node.inputs[0])
        if node is not None and room is not None and room.op_type == "Concat" and room.inputs[0] is part:
            # the cache's last entry is not valid yet: it is the room that the padded form adds
            annotations = node.annotations.replace(aliases=((0, 0),))
            replaced[node] = node.replace(inputs=[whole, *node.inputs[1:]], annotations=annotations)
    fixed = [v for v in made.inputs if v.name not in state and v.name != inputs.ids]
    befores, afters = zip(*state.values(), strict=True)
    made = made.replace(
        inputs=[given[inputs.ids], *fixed, *befores],
        outputs=[made.outputs[0], *afters],
        nodes=[replaced.get(n, n) for n in (*new, *made.nodes)],
    )
    return _part(made, made.outputs)


def _write(x: Value, update: Value, start: Value, axis: int, made: Value) -> Node:
    return Node(
        "WriteSlice", [x, update, start], [made], {"axis": axis}, domain=DIALECT, version=DIALECT_VERSION,
        name=f"write {x.name}", annotations=NO_ANNOTATIONS.replace(aliases=((0, 0),)),
    )  # fmt: skip


def _next(x: Value, nodes: list[Node]) -> Value:
    """x + 1."""
    made = Value(f"next {x.name}", x.type)
    nodes.append(Node("Add", [x, Value.constant(np.array(1, x.dtype))], [made], version=7, name=f"next {x.name}"))
    return made


def _writes(node: Node) -> bool:
    return node.op_type == "WriteSlice" and node.domain == DIALECT


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
