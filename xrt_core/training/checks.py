"""Class labels and row numbers among the inputs of a step, held against their ranges before the step is taken.

Engines do not look at what they gather by: a label that is no class gives NaN, a row that is not there another row.
What a step reads from its own inputs costs a few microseconds to check, and up to one more for each thousand numbers.

Where a NaN or an infinity came from: the nodes of a step run one by one until one makes the first.
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

# how each operator reads its second input is known to this module alone: these read it as classes
_LOSSES = frozenset(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"))
# every number of the first input is in the result, so that a range of the result is one of the input
_SAME_NUMBERS = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


@dataclass(frozen=True, slots=True)
class IndexRange:
    """What a node asks of the integers of one input: low <= x < high, or x == ignored.

    input: its number among the graph's inputs.
    """

    input: int
    name: str
    low: int
    high: int
    ignored: int | None
    node: str

    def check(self, array: np.ndarray) -> None:
        """Raises InputError, naming the first number outside."""
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
    """The ranges of those inputs of a graph that select classes or rows, as they are or in another shape or type."""
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
    """The indices that a node reads, and their range."""
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
    """Raises InputError for the first range that the NumPy array of its input leaves; arrays of others are not read."""
    for r in ranges:
        array = arrays[r.input]
        if type(array) is np.ndarray:
            r.check(array)


def not_finite(graph: Graph, arrays: Sequence[Any]) -> ExecutionError:
    """The error for a step whose loss is not finite: it names the first input, or node, that is not."""
    values: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    bad = next((v.name for v in graph.inputs if not _is_finite(values[v])), None)
    if bad is not None:
        return _error(f"{bad!r} holds one already")
    for node in graph.nodes:
        given = [None if v is None else v.data if v.data is not None else values[v] for v in node.inputs]
        if node.subgraphs:  # bodies are not looked into
            return _error(f"all before {describe(node)} is finite: it came up in there, or later")
        for v, r in zip(node.outputs, run_node(node, given), strict=False):
            if v is None:
                continue
            values[v] = r
            if not _is_finite(r):
                shown = ", ".join("_" if u is None else f"{u.name or 'constant'} {_range(a)}"
                                  for u, a in zip(node.inputs, given, strict=True))  # fmt: skip
                return _error(f"it comes from {describe(node)}, whose inputs are {shown}")
    return _error("on the host all of it is finite, so the engine's own rounding made it")


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
