"""Engine-independent simplification: constant folding, identities, broadcasts, common subexpressions, dead nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError, XRTError
from xrt_core.ir.graph import Graph, Node, Value, attribute_key, substitute
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import draws_random, is_deterministic, traits_of
from xrt_core.ir.schema import DIALECT
from xrt_core.ir.types import STRING, TensorType, ValueType
from xrt_core.passes.pass_base import Pass, rebuild
from xrt_core.passes.symbolic_dims import BROADCASTING

HostRun = Callable[[Node, Sequence[Any]], tuple[Any, ...]]
"""Runs one node on arrays: `host.executor.run_node`."""

DEFAULT_FOLD_LIMIT = 64 * 1024
_EAGER_ELEMENTS = 1 << 16  # a node whose result size is unknown is evaluated up to this many input elements
_CONSTANT_BYTES = 1024  # constants up to this size are compared by contents


# --- constant folding -------------------------------------------------------------------------------------------------


class ConstantFold(Pass):
    """Replaces nodes whose inputs are all constants by their results.

    1. A node with known inputs whose results take at most `limit` bytes becomes constants.
    2. So does one whose results take no more than the constants that have no other reader.
    3. Unchanged: larger results (a model never grows), random draws, updates of variables, control flow, and nodes on
       which the host fails.
    """

    name = "constant_fold"

    def __init__(self, run: HostRun, limit: int = DEFAULT_FOLD_LIMIT) -> None:
        self.run = run
        self.limit = limit

    def rewrite(self, graph: Graph) -> Graph:
        if not any(is_known(n) for n in graph.nodes):
            return graph
        new: dict[Value, Value] = {}
        last = last_uses(graph)
        kept = []
        for old in graph.nodes:
            node = substitute(old, new) if new else old
            arrays = None
            if is_known(node):
                try:
                    types = infer_types(node) if not node.subgraphs else (None,) * len(node.outputs)
                    arrays = evaluate(node, types, self.run, self.limit, freed_bytes(old, node, last))
                except ShapeError:
                    arrays = None
            if arrays is None:
                kept.append(node)
                continue
            for v, data in zip(node.outputs, arrays, strict=False):
                if v is not None and data is not None:
                    new[v] = constant_like(v, data)
        if len(kept) == len(graph.nodes):
            return graph
        return graph.replace(nodes=kept, outputs=[new.get(v, v) for v in graph.outputs])


def nbytes(type: ValueType | None) -> int | None:
    """Size of a static tensor in bytes (strings count as one pointer an element), or None."""
    if not isinstance(type, TensorType) or not type.is_static:
        return None
    assert type.dtype is not None
    assert type.shape is not None
    return math.prod(type.shape) * type.dtype.itemsize  # type: ignore[arg-type]


def last_uses(graph: Graph) -> set[Value]:
    """The values that are read once, reads in subgraphs and graph outputs included: folding that reader frees them."""
    reads: Counter[Value] = Counter(graph.outputs)
    _count(graph, reads)
    return {v for v, n in reads.items() if n == 1}


def _count(graph: Graph, reads: Counter[Value]) -> None:
    for n in graph.nodes:
        reads.update(v for v in n.inputs if v is not None)
        for g in n.subgraphs:
            reads.update(g.outputs)
            _count(g, reads)


def freed_bytes(old: Node, new: Node, last: Collection[Value]) -> int:
    """Bytes of the constants that have no reader once `old` is folded; `new` is the node with its inputs known."""
    return sum(
        w.data.nbytes
        for v, w in zip(old.inputs, new.inputs, strict=True)
        if v in last and w is not None and w.data is not None
    )


def evaluate(
    node: Node, types: Sequence[ValueType | None], run: HostRun, limit: int = DEFAULT_FOLD_LIMIT, freed: int = 0
) -> list[np.ndarray | None] | None:
    """The outputs of a node whose inputs are all known, or None if the node must not be folded.

    It must not be folded if its results may differ between calls, if it updates variables, if the results take more
    than `limit` bytes and more than the `freed` bytes (see `freed_bytes`), or if the host fails on it (the run then
    raises the error in the caller).
    """
    inputs = node.inputs
    traits = traits_of(node)
    if node.subgraphs or traits.stateful or node.annotations.model_update or not is_deterministic(node):
        return None
    # the integers of a weight are what an engine computes with; a mark says how a weight lies on a mesh
    if node.op_type == "DequantizeLinear" or (node.op_type == "Boxing" and node.domain == DIALECT):
        return None
    budget = max(limit, freed)
    sizes = [nbytes(t) for t, v in zip(types, node.outputs, strict=True) if v is not None]
    if any(s is None for s in sizes):
        if sum(v.data.size for v in inputs if v is not None and v.data is not None) > _EAGER_ELEMENTS:
            return None
        if traits.grows:
            return None
    elif sum(s for s in sizes if s is not None) > budget:
        return None
    if _text_bytes(node, types) > budget:
        return None
    try:
        results = run(node, [None if v is None else v.data for v in inputs])
    except XRTError:
        return None
    arrays: list[np.ndarray | None] = []
    for v, r in zip(node.outputs, results, strict=False):
        if v is None:
            arrays.append(None)
        elif isinstance(r, np.ndarray) or np.isscalar(r):
            arrays.append(np.asarray(r))
        else:
            return None  # sequences and optionals stay with the host
    if sum(_bytes(a) for a in arrays if a is not None) > budget:
        return None
    return arrays


def _bytes(array: np.ndarray) -> int:
    """Bytes of an array, of strings those of their characters."""
    return sum(len(str(s)) for s in array.flat) if array.dtype == STRING else array.nbytes


def _text_bytes(node: Node, types: Sequence[ValueType | None]) -> int:
    """The most that the strings of a node's results may have, where their number is known: each is made of one string
    of every input. Strings grow by concatenation, so the bound holds before they are made."""
    counts = [math.prod(t.shape) for t in types if isinstance(t, TensorType) and t.dtype == STRING and t.is_static]  # type: ignore[arg-type]
    if not any(counts):
        return 0
    given = [v.data for v in node.inputs if v is not None and v.data is not None and v.data.dtype == STRING]
    longest = sum(max((len(str(s)) for s in a.flat), default=0) for a in given)
    return max(counts) * longest


def is_known(node: Node) -> bool:
    """Whether every given input of the node is a constant."""
    return all(v is None or v.data is not None for v in node.inputs)


def constant_like(value: Value, data: np.ndarray) -> Value:
    """A constant that replaces `value`. Its array is read-only, since graphs share it."""
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return Value(value.name, TensorType(data.dtype, data.shape), data)


# --- identities -------------------------------------------------------------------------------------------------------


class IdentityNodes(Pass):
    """Removes nodes whose output is their first input, unchanged. Shapes and dtypes must be known, except for 1.

    1. Identity.
    2. Cast, CastLike to the dtype that the input has.
    3. Reshape, Flatten, Squeeze, Unsqueeze, Expand, Tile to the shape that the input has (for these, equal shapes
       mean equal elements; Tile with all repeats one).
    4. Transpose that keeps the order of all axes longer than one.
    5. Slice to the same shape with all steps positive, Pad with no padding.
    6. Concat, Sum, Max, Min, Mean of one input.
    7. Dropout in inference mode whose mask is not read.
    8. Unchanged: everything else, nodes whose second output is read, and updates of variables.
    """

    name = "identity_nodes"

    def rewrite(self, graph: Graph) -> Graph:
        new: dict[Value, Value] = {}
        kept = []
        for node in graph.nodes:
            test = None if node.domain or node.annotations.model_update else _CASES.get(node.op_type)
            source = node.inputs[0] if node.inputs else None
            result = node.outputs[0] if node.outputs else None
            if test is not None and source is not None and result is not None and test(node, source, result, graph):
                new[result] = source
            else:
                kept.append(node)
        return rebuild(graph, kept, new) if new else graph


_Test = Callable[[Node, Value, Value, Graph], bool]


def _always(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return True


def _same_type(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return source.is_static and source.type == result.type


def _same_dtype(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return source.dtype is not None and source.dtype == result.dtype and source.dtype != np.dtype(object)


def _single_input(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return len(node.inputs) == 1 and _same_type(node, source, result, graph)


def _identity_transpose(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph) or source.shape is None:
        return False
    shape = source.shape
    order = node.attributes.get("perm") or tuple(reversed(range(len(shape))))
    moved = [p for p in order if shape[p] != 1]  # type: ignore[union-attr, index]
    return moved == sorted(moved)


def _full_slice(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph):
        return False
    if len(node.inputs) < 5:
        return True
    steps = node.inputs[4]
    return steps is None or (steps.data is not None and bool((steps.data > 0).all()))


def _empty_pad(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph):
        return False
    pads = node.attributes.get("pads")
    if pads is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        pads = node.inputs[1].data
    return pads is not None and not np.any(np.asarray(pads))


def _identity_dropout(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        mask = node.outputs[1]
        if mask in graph.consumers or mask in graph.outputs:
            return False
    return not draws_random(node)


_CASES: Mapping[str, _Test] = MappingProxyType(
    {
        "Identity": _always,
        "Cast": _same_dtype,
        "CastLike": _same_dtype,
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"), _same_type),
        "Transpose": _identity_transpose,
        "Slice": _full_slice,
        "Pad": _empty_pad,
        **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean"), _single_input),
        "Dropout": _identity_dropout,
    }
)


# --- broadcasts -------------------------------------------------------------------------------------------------------


class ImplicitBroadcasts(Pass):
    """Lets elementwise operators read what an Expand reads, where their other operands have the shape of the result.

    As of `x / norm.expand_as(x)`, which exporters write as an Expand in front of a Div: of a size that varies it takes
    the arithmetic of a shape besides, and some engines take no integers of 64 bits.

    1. An operand that an Expand made is replaced by what was expanded, if in each dimension in which the two differ
       another operand has the size of the result. Shapes must be known, as numbers or expressions.
    2. The Expand goes, with what computes its shape, when nothing else reads it (`DeadNodes`).
    3. Unchanged: operators before opset 7, which broadcast by an attribute; the first operand of PRelu, whose shape is
       that of the result; updates of variables.
    """

    name = "implicit_broadcasts"

    def rewrite(self, graph: Graph) -> Graph:
        expanded = {
            y: x for n in graph.nodes if n.op_type == "Expand" and not n.domain
            for x, y in zip(n.inputs[:1], n.outputs, strict=True) if x is not None and y is not None
        }  # fmt: skip
        nodes = [_reading_less(n, expanded) for n in graph.nodes] if expanded else graph.nodes
        if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)):
            return graph
        return graph.replace(nodes=nodes)


def _reading_less(node: Node, expanded: Mapping[Value, Value]) -> Node:
    if node.domain or node.op_type not in BROADCASTING or node.version < 7 or node.annotations.model_update:
        return node
    first = 1 if node.op_type == "PRelu" else 0
    inputs = list(node.inputs)
    for i, v in enumerate(node.inputs):
        x = expanded.get(v) if v is not None and i >= first else None
        if x is not None and _is_broadcast(node, inputs, i, x):
            inputs[i] = x
    return node if inputs == list(node.inputs) else node.replace(inputs=inputs)


def _is_broadcast(node: Node, inputs: list[Value | None], i: int, x: Value) -> bool:
    """Whether the result keeps its shape if input `i` is `x`."""
    result = node.outputs[0]
    shapes = [x.shape, *(v.shape if v is not None else None for k, v in enumerate(inputs) if k != i)]
    if result is None or result.shape is None or any(s is None or None in s for s in shapes):
        return False
    ranks = [len(s) for s in shapes if s is not None]
    if max(ranks) != len(result.shape):
        return False
    aligned = [(1,) * (max(ranks) - len(s)) + tuple(s) for s in shapes if s is not None]
    return all(d in sizes for d, *sizes in zip(result.shape, *aligned, strict=True))


# --- common subexpressions --------------------------------------------------------------------------------------------


class CommonSubexpressions(Pass):
    """Merges nodes that compute the same values (CSE).

    1. Two nodes of one operator, version, mark, attributes, inputs and list of wanted outputs become one.
    2. Constants of at most 1 KiB count as the same input where dtype, shape and contents are equal.
    3. The two inputs of a commutative operator may stand in either order.
    4. Unchanged: nodes with subgraphs, nodes that draw random numbers without a seed, nodes that update variables.
    """

    name = "common_subexpressions"

    def rewrite(self, graph: Graph) -> Graph:
        seen: dict[Any, Node] = {}
        constants: dict[Value, Any] = {}
        new: dict[Value, Value] = {}
        kept = []
        for node in graph.nodes:
            key = self._key(node, new, constants)
            first = seen.get(key) if key is not None else None
            if first is not None:
                pairs = zip(node.outputs, first.outputs, strict=True)
                new.update((v, w) for v, w in pairs if v is not None and w is not None)
                continue
            if key is not None:
                seen[key] = node
            kept.append(node)
        return rebuild(graph, kept, new) if new else graph

    @staticmethod
    def _key(node: Node, new: dict[Value, Value], constants: dict[Value, Any]) -> Any:
        attributes = attribute_key(node)
        traits = traits_of(node)
        if attributes is None or node.annotations.model_update or traits.stateful:
            return None
        if traits.random and not is_deterministic(node):
            return None
        inputs: list[Any] = []
        for v in node.inputs:
            if v is None:
                inputs.append(None)
            elif v.data is None:
                inputs.append(new.get(v, v))
            else:
                if v not in constants:
                    constants[v] = _constant_key(v)
                inputs.append(constants[v])
        if traits.commutative and len(inputs) == 2:
            inputs.sort(key=hash)
        wanted = tuple(v is not None for v in node.outputs)
        own = node.annotations
        mark = (own.engine, own.region, own.device, own.sbp)  # merging must take no node out of a marked region
        return node.domain, node.op_type, node.version, attributes, tuple(inputs), wanted, mark


def _constant_key(value: Value) -> Any:
    data = value.data
    assert data is not None
    if data.dtype == STRING or data.nbytes > _CONSTANT_BYTES:
        return ("array", id(data))  # the graph keeps the array alive while the key is used
    return data.dtype, data.shape, data.tobytes()


# --- dead nodes -------------------------------------------------------------------------------------------------------


class DeadNodes(Pass):
    """Removes nodes none of whose outputs is read.

    1. A node is removed if none of its outputs is a graph output or read by a node that is kept.
    2. Unchanged: a node with at least one output that is read, and every graph input.
    """

    name = "dead_nodes"

    def rewrite(self, graph: Graph) -> Graph:
        live: set[Value | None] = set(graph.outputs)
        kept = []
        for node in reversed(graph.nodes):
            if any(v in live for v in node.outputs if v is not None):
                live.update(node.inputs)
                if node.attributes:
                    live.update(node.captures)
                kept.append(node)
        if len(kept) == len(graph.nodes):
            return graph
        return graph.replace(nodes=reversed(kept))
