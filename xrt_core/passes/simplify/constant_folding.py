"""Constant folding: what depends on constants alone is computed once per model, not once per signature.

Evaluation is bounded, so that a model never grows by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError, XRTError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import is_deterministic, traits_of
from xrt_core.ir.types import STRING, TensorType, ValueType
from xrt_core.passes.pass_base import Pass

HostRun = Callable[[Node, Sequence[Any]], tuple[Any, ...]]
"""Runs one node on arrays: `host.executor.run_node`."""

DEFAULT_FOLD_LIMIT = 64 * 1024
_EAGER_ELEMENTS = 1 << 16  # inputs up to this many elements are evaluated even where the result's size is unknown


def nbytes(type: ValueType | None) -> int | None:
    """Size of a static tensor in bytes (strings count as one pointer an element), or None."""
    if not isinstance(type, TensorType) or not type.is_static:
        return None
    assert type.dtype is not None
    assert type.shape is not None
    return math.prod(type.shape) * type.dtype.itemsize  # type: ignore[arg-type]


def last_uses(graph: Graph) -> set[Value]:
    """The values that are read in one place alone, subgraphs and outputs included: whoever replaces that reader, such
    as by folding it, frees them."""
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
    """Bytes of constants that nobody reads once `old` is folded; `new` is the node with its inputs known."""
    return sum(
        w.data.nbytes
        for v, w in zip(old.inputs, new.inputs, strict=True)
        if v in last and w is not None and w.data is not None
    )


def evaluate(
    node: Node, types: Sequence[ValueType | None], run: HostRun, limit: int = DEFAULT_FOLD_LIMIT, freed: int = 0
) -> list[np.ndarray | None] | None:
    """The outputs of a node whose inputs are all known, or None where it is left as it is.

    It is left where results could differ from call to call, where it updates variables, where they take more than
    `limit` bytes and more than the `freed` bytes that folding gives back (see `freed_bytes`), and where the host fails
    on it (the run then says so, with the caller there).
    """
    inputs = node.inputs
    traits = traits_of(node)
    if node.subgraphs or traits.stateful or node.annotations.model_update or not is_deterministic(node):
        return None
    if node.op_type == "DequantizeLinear":  # the integers of a weight are what an engine computes with
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
    if sum(a.nbytes for a in arrays if a is not None and a.dtype != STRING) > budget:
        return None
    return arrays


def is_known(node: Node) -> bool:
    """Whether every given input of the node is a constant."""
    return all(v is None or v.data is not None for v in node.inputs)


def constant_like(value: Value, data: np.ndarray) -> Value:
    """A constant that stands for `value`. Its array is read-only: many graphs share it."""
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return Value(value.name, TensorType(data.dtype, data.shape), data)


class ConstantFold(Pass):
    """Replaces nodes whose inputs are all constants by their results.

    1. A node of known inputs whose results take at most the limit becomes constants.
    2. So does one whose results take no more than those of its inputs that nobody else reads.
    3. Left alone: larger results (a model never grows), random draws, updates of variables, control flow, and what
       the host fails on.
    """

    name = "constant_fold"

    def __init__(self, run: HostRun, limit: int = DEFAULT_FOLD_LIMIT) -> None:
        self.run = run
        self.limit = limit

    def rewrite(self, graph: Graph) -> Graph:
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
