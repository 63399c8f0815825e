"""Checks of a training step: range checks of class labels and indices among its inputs, and localisation of NaNs.

Engines do not check indices: an invalid class label gives NaN, an out-of-range row another row. Inputs of a step are
therefore checked before it runs, at a few microseconds plus at most one per thousand elements.

The origin of a NaN or infinity is found by running the nodes of the step one by one on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError, InputError
from xrt_core.frontends.promotion import is_float
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.training.gradient_context import describe

# operators that read their second input as class labels
_LOSSES = frozenset(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"))
# the result has the same elements as the first input, so a range of the result is a range of the input
_SAME_NUMBERS = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The range that a node requires of the integers of one input: low <= x < high, or x == ignored.

    input: the index of the graph input.
    """

    input: int
    name: str
    low: int
    high: int
    ignored: int | None
    node: str

    def check(self, array: np.ndarray) -> None:
        """Raise InputError, naming the first element out of range, unless all are in range."""
        if not array.size:
            return
        if array.min() >= self.low and array.max() < self.high:
            return
        outside = (array < self.low) | (array >= self.high)
        if self.ignored is not None:
            outside &= array != self.ignored
        if not outside.any():
            return
        at = tuple(map(int, np.argwhere(outside)[0]))
        also = "" if self.ignored is None else f" and the ignored {self.ignored}"
        raise InputError(
            f"{self.name!r}: {int(array[at])} at {list(at)}, and {int(outside.sum())} such in all; {self.node} reads "
            f"it as a number from {self.low} to {self.high - 1}{also}. The state is as it was before the step"
        )


def index_ranges(graph: Graph) -> tuple[IndexRange, ...]:
    """Return the ranges of the graph inputs that are used as class labels or indices, directly or after a change of
    shape or dtype."""
    source: dict[Value, int] = {
        v: i for i, v in enumerate(graph.inputs) if v.dtype is not None and v.dtype.kind in "iu"
    }
    found: dict[IndexRange, None] = {}
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        if first is not None and first in source and not node.domain and node.op_type in _SAME_NUMBERS:
            out = node.outputs[0]
            if out is not None and out.dtype is not None and out.dtype.kind in "iu":
                source[out] = source[first]
        for value, low, high, ignored in _reads(node):
            if value in source:
                at = source[value]
                found[IndexRange(at, graph.inputs[at].name, low, high, ignored, describe(node))] = None
    return tuple(found)


def _reads(node: Node) -> Iterator[tuple[Value, int, int, int | None]]:
    """Yield the values that a node uses as indices, with their ranges."""
    if node.domain or len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
        return
    shape, indices = node.inputs[0].shape, node.inputs[1]
    if node.op_type in _LOSSES:
        axis, negative = 1, False
    elif node.op_type in ("Gather", "GatherElements"):
        axis, negative = int(node.attributes.get("axis", 0)), True  # type: ignore[arg-type]
    else:
        return
    size = None if not shape else shape[axis]
    if isinstance(size, int):
        ignored: Any = node.attributes.get("ignore_index")
        yield indices, -size if negative else 0, size, ignored


def refuse_out_of_range(ranges: Sequence[IndexRange], arrays: Sequence[Any]) -> None:
    """Raise InputError for the first NumPy array that violates its range; arrays of other libraries are not checked."""
    for r in ranges:
        array = arrays[r.input]
        if type(array) is np.ndarray:
            r.check(array)


def not_finite(graph: Graph, arrays: Sequence[Any]) -> ExecutionError:
    """Return the error of a step whose loss is not finite; it names the first input, or node, that is not finite."""
    values: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    bad = next((v.name for v in graph.inputs if not _is_finite(values[v])), None)
    if bad is not None:
        return _error(f"{bad!r} holds one already")
    for node in graph.nodes:
        given = [None if v is None else v.data if v.data is not None else values[v] for v in node.inputs]
        if node.subgraphs:  # bodies are not searched
            return _error(f"all values before {describe(node)} are finite: it arises in its body, or later")
        for v, r in zip(node.outputs, run_node(node, given), strict=False):
            if v is None:
                continue
            values[v] = r
            if not _is_finite(r):
                shown = ", ".join("_" if u is None else f"{u.name or 'constant'} {_range(a)}"
                                  for u, a in zip(node.inputs, given, strict=True))  # fmt: skip
                return _error(f"it comes from {describe(node)}, whose inputs are {shown}")
    return _error("on the host all values are finite, so it is due to the engine's rounding")


def _error(why: str) -> ExecutionError:
    return ExecutionError(f"the loss is not finite: {why}. The state is as it was before the step")


def _is_finite(x: Any) -> bool:
    if not isinstance(x, np.ndarray) or not is_float(x.dtype):
        return True
    return bool(np.isfinite(x.astype(np.float32) if x.dtype.itemsize < 4 else x).all())


def _range(x: Any) -> str:
    if not isinstance(x, np.ndarray) or not x.size or x.dtype == object:
        return ""
    return f"in [{x.min()}, {x.max()}]"
