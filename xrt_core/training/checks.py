"""Checks of a training step: range checks of class labels and indices among its inputs, and localisation of NaNs.

Engines do not check indices: an invalid class label gives NaN, an out-of-range row another row. Inputs of a step are
therefore checked before it runs, at a few microseconds plus at most one per thousand elements; also where the step
adds a constant to them, or multiplies them by one. Indices that are computed in another way are checked on demand, by
running what computes them on the host.

The origin of a NaN or infinity is found by running the nodes of the step one by one on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from xrt_core.errors import ExecutionError, InputError
from xrt_core.frontends.promotion import is_float
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.runtime.arrays import to_numpy
from xrt_core.training.gradient_context import describe

if TYPE_CHECKING:
    from xrt_core.runtime.index_origins import Bounds
    from xrt_core.runtime.input_checks import InputChecks, SymbolicInputChecks

_FEW: Final = 256  # up to so many elements Python's min and max take less than NumPy's reductions

_UNSIGNED: Final = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Signed integers -> those of the same size without a sign."""

# operators that read their second input as class labels
_LOSSES = frozenset(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"))
# the result has the same elements as the first input, so a range of the result is a range of the input
_SAME_NUMBERS = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The range that a node requires of the integers of one input: low <= scale x + offset < high, or == ignored.

    input: the index of the graph input; for `ComputedIndices` -1. unsigned: for ranges from 0 on, the type in which
    negative numbers are the greatest, so that one look tells whether all are in range.
    """

    input: int
    name: str
    low: int
    high: int
    ignored: int | None
    node: str
    scale: int = 1
    offset: int = 0
    unsigned: np.dtype | None = None

    def check(self, array: np.ndarray) -> None:
        """Raise InputError, naming the first element out of range, unless all are in range."""
        if not array.size:
            return
        if self.unsigned is not None:
            seen = array.view(self.unsigned)
            if seen.item(seen.argmax()) < self.high:  # argmax costs a third of what NumPy's reductions do
                return
        low, high = _ends(array)
        ends = low * self.scale + self.offset, high * self.scale + self.offset
        if min(ends) >= self.low and max(ends) < self.high:
            return
        read = array.astype(np.int64) * self.scale + self.offset
        outside = (read < self.low) | (read >= self.high)
        if self.ignored is not None:
            outside &= read != self.ignored
        if not outside.any():
            return
        at = tuple(map(int, np.argwhere(outside)[0]))
        also = "" if self.ignored is None else f" and the ignored {self.ignored}"
        moved = "" if (self.scale, self.offset) == (1, 0) else f"{self._formula()} = {int(read[at])}, "
        raise InputError(
            f"{self.name!r}: {int(array[at])} at {list(at)}, and {int(outside.sum())} such in all; {self.node} reads "
            f"{moved or 'it '}as a number from {self.low} to {self.high - 1}{also}. The state is as it was before "
            "the step"
        )

    def covers(self, bounds: Bounds) -> bool:
        """Whether what passes lies within the bounds that an engine's cluster has for the same elements."""
        return (
            (self.scale, self.offset) == (1, 0)
            and self.low >= max(bounds.low)
            and self.high - 1 <= min(bounds.high)
            and self.ignored in (None, bounds.ignored)
        )

    def _formula(self) -> str:
        """What the node reads, by the input's name."""
        scaled = {1: self.name, -1: f"-{self.name}"}.get(self.scale, f"{self.scale} {self.name}")
        return scaled if not self.offset else f"{scaled} {'+' if self.offset > 0 else '-'} {abs(self.offset)}"


def _ends(array: np.ndarray) -> tuple[int, int]:
    """The least and the greatest element."""
    if array.size <= _FEW:
        elements = array.ravel().tolist()
        return min(elements), max(elements)
    return int(array.min()), int(array.max())


def without_checked(
    checks: InputChecks | SymbolicInputChecks | None, inputs: Sequence[int], ranges: Sequence[IndexRange]
) -> Any:
    """The checks of a launch that reads the step's inputs `inputs`, in which NumPy arrays that `ranges` bound count as
    checked."""
    if checks is None or not isinstance(checks, msgspec.Struct):  # where sizes vary each call has its own
        return checks
    by_input = [(i, [r for r in ranges if r.input == at]) for i, at in enumerate(inputs)]
    covered = {i for i, own in by_input if own}
    for c in checks.indices:
        if not any(r.covers(c.bounds) for r in dict(by_input)[c.parameter]):
            covered.discard(c.parameter)
    return msgspec.structs.replace(checks, checked=frozenset(covered))


def index_ranges(graph: Graph) -> tuple[IndexRange, ...]:
    """Return the ranges of the graph inputs that are used as class labels or indices, directly or after a change of
    shape or dtype, a constant added, or a factor."""
    source = _affine(graph)
    found: dict[IndexRange, None] = {}
    for node in graph.nodes:
        for value, low, high, ignored in _reads(node):
            if value in source:
                at, scale, offset = source[value]
                v = graph.inputs[at]
                one_look = not low and (scale, offset) == (1, 0)
                unsigned = _unsigned(v.dtype, high) if one_look and v.dtype is not None else None
                found[IndexRange(at, v.name, low, high, ignored, describe(node), scale, offset, unsigned)] = None
    return tuple(found)


def _unsigned(dtype: np.dtype, end: int) -> np.dtype | None:
    """The type in which all integers below 0 are at least `end`; None for types too narrow for that."""
    found = _UNSIGNED.get(dtype, dtype)
    return None if found is not dtype and end > 1 << (8 * dtype.itemsize - 1) else found


def _affine(graph: Graph) -> dict[Value, tuple[int, int, int]]:
    """Values whose elements are `scale x + offset` of the elements x of an integer input: its index, scale, offset."""
    found = {v: (i, 1, 0) for i, v in enumerate(graph.inputs) if _is_integer(v)}
    for node in graph.nodes:
        out = node.outputs[0] if node.outputs else None
        if node.domain or out is None or not _is_integer(out):
            continue
        first, second = (*node.inputs, None, None)[:2]
        if node.op_type in _SAME_NUMBERS and first in found:
            found[out] = found[first]
        elif node.op_type in ("Add", "Sub", "Mul", "Neg"):
            made = _moved(node.op_type, found, first, second)
            if made is not None:
                found[out] = made
    return found


def _moved(
    op_type: str, known: Mapping[Value, tuple[int, int, int]], first: Value | None, second: Value | None
) -> tuple[int, int, int] | None:
    """The result of arithmetic of a known value and a constant of one element; None for anything else."""
    one, other = (None if v is None else known.get(v) for v in (first, second))
    if op_type == "Neg":
        return None if one is None else (one[0], -one[1], -one[2])
    constant = _number(second if one is not None else first)
    moved = one if one is not None else other
    if moved is None or constant is None:
        return None
    at, scale, offset = moved
    if op_type == "Mul":
        return at, scale * constant, offset * constant
    if op_type == "Add":
        return at, scale, offset + constant
    return (at, scale, offset - constant) if one is not None else (at, -scale, constant - offset)


def _number(value: Value | None) -> int | None:
    data = None if value is None else value.data
    return int(data.reshape(())) if data is not None and data.size == 1 else None


def _is_integer(value: Value) -> bool:
    return value.dtype is not None and value.dtype.kind in "iu"


class ComputedIndices:
    """The indices of a step that no range of its inputs bounds, and what computes them."""

    def __init__(self, graph: Graph) -> None:
        self._graph, followed = graph, _affine(graph)
        self._reads = [
            (value, IndexRange(-1, value.name or "the indices", low, high, ignored, describe(node)))
            for node in graph.nodes
            for value, low, high, ignored in _reads(node)
            if value not in followed and value.data is None
        ]
        needed = {v for v, _ in self._reads}
        self._nodes: list[Node] = []
        for node in reversed(graph.nodes):
            if any(v in needed for v in node.outputs):
                needed.update(node.uses())
                self._nodes.append(node)
        self._nodes.reverse()
        self._inputs = [i for i, v in enumerate(graph.inputs) if v in needed]

    def check(self, arrays: Sequence[Any]) -> None:
        """Compute them on the host from the inputs of a step. Raises InputError for one that is out of range."""
        values: dict[Value, Any] = {self._graph.inputs[i]: to_numpy(arrays[i]) for i in self._inputs}
        for node in self._nodes:
            given = [None if v is None else v.data if v.data is not None else values[v] for v in node.inputs]
            values.update((v, r) for v, r in zip(node.outputs, run_node(node, given), strict=False) if v is not None)
        for value, range_ in self._reads:
            range_.check(np.asarray(values[value]))


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


def refuse_out_of_range(ranges: Sequence[IndexRange], arrays: Sequence[Any], every: bool = False) -> None:
    """Raise InputError for the first NumPy array that violates its range. every: read arrays of other libraries too."""
    for r in ranges:
        array = arrays[r.input]
        if every or type(array) is np.ndarray:
            r.check(to_numpy(array))


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
