"""The padded form of a graph, and what is known of a value in it: axes as products of sizes, zeros, bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.symbols import Expr

Axis = tuple[Expr, ...]
"""The size of an axis as factors, the slowest first: positions count through them like digits. () is an axis of size 1.
An axis of one factor n is valid in its first n places; of the factors (b, n), where both digits are valid."""

Known = np.ndarray
"""Contents of a small tensor: an array of objects, `Expr` for integers and booleans (0 and 1), `Ratio` for floats."""

Steps = tuple[Expr, ...]
"""By how much integers rise from place to place along each axis; the first one is 0."""


ROWS = "number.of.rows"
"""The symbol of a size that is never padded, though no number: of rows that do not mix (`passes.padding.rows`)."""


class PaddingRefused(XRTError):
    """Padding is not proven harmless in a graph; the message names the node and the reason."""


class Padded(Struct, frozen=True):
    """What is known of one value in the padded graph.

    value: the value, at the bucket's sizes; None for contents that no node has computed yet. axes: of its valid shape.
    known: its contents as expressions, where they follow from shapes. zeros: axes behind whose valid size all elements
    that are valid along the other axes are zero. clean: all padding is zero. top: its elements are integers from 0 to
    below this, at every place (in the padding: for the bucket's sizes): one for all, or one for each column of the last
    axis. steps: its elements count positions at all valid places: one for all, or one for each column of the last axis.
    ratios: the contents of floats as quotients of sizes (`Ratio`), where they follow from shapes. unexpanded: what an
    Expand made it of.
    """

    value: Value | None
    dtype: np.dtype
    axes: tuple[Axis, ...]
    known: Known | None = None
    zeros: frozenset[int] = frozenset()
    clean: bool = False
    top: tuple[Expr, ...] = ()
    steps: tuple[Steps, ...] = ()
    ratios: Known | None = None
    unexpanded: Padded | None = None

    @property
    def padded(self) -> tuple[int, ...]:
        """The axes that carry padding."""
        return tuple(i for i, a in enumerate(self.axes) if is_padded(a))

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.axes)


@dataclass(frozen=True, slots=True)
class PaddedGraph:
    """The padded form of a graph.

    graph: its inputs are those of the original at the bucket's sizes, then an int64 scalar for each symbol: the valid
    size. symbols: their names, in the order of these inputs. buckets: the size of each. inputs, outputs: the axes of
    each. needs: expressions that must be at least so much for the sizes of a call. masks: operators before which
    padding is masked, with their numbers.
    """

    graph: Graph
    symbols: tuple[str, ...]
    buckets: Mapping[str, int]
    inputs: tuple[tuple[Axis, ...], ...]
    outputs: tuple[tuple[Axis, ...], ...]
    needs: tuple[tuple[Expr, int], ...] = ()
    masks: Mapping[str, int] = field(default_factory=dict)

    def why_not(self, sizes: Mapping[str, int]) -> str | None:
        """Why the padded graph does not serve these sizes, or None."""
        for s in self.symbols:
            if not 1 <= sizes[s] <= self.buckets[s]:
                return f"{s} = {sizes[s]} is not within 1..{self.buckets[s]}"
        for expr, least in self.needs:
            if expr.evaluate(sizes) < least:
                return f"{expr} is less than {least}"
        return None

    def pad(self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The arguments of the padded graph for these of the original; the padding is zero."""
        padded = []
        for a, axes in zip(arrays, self.inputs, strict=True):
            shape = tuple(bucket_size(x, self.buckets) for x in axes)
            if a.shape != shape:
                wide = np.zeros(shape, a.dtype)
                wide[tuple(slice(n) for n in a.shape)] = a
                a = wide
            padded.append(a)
        return [*padded, *(np.array(sizes[s], np.int64) for s in self.symbols)]

    def cut(self, results: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The results of the original graph in those of the padded one, as arrays of their own."""
        return [valid_part(r, axes, self.buckets, sizes) for r, axes in zip(results, self.outputs, strict=True)]


def valid_part(
    array: np.ndarray, axes: Sequence[Axis], buckets: Mapping[str, int], sizes: Mapping[str, int]
) -> np.ndarray:
    """A copy of the valid elements of an array of the padded graph; the array itself where all are."""
    if not any(is_padded(a) and bucket_size(a, buckets) != bucket_size(a, sizes) for a in axes):
        return array
    digits = [bucket_size((f,), buckets) for a in axes for f in a]
    valid = array.reshape(digits)[tuple(slice(f.evaluate(sizes)) for a in axes for f in a)]
    return np.array(valid.reshape([bucket_size(a, sizes) for a in axes]), order="C")


def is_padded(axis: Axis) -> bool:
    """Whether an axis carries padding: its size is no number, nor that of rows."""
    return any(f.constant is None and any(s != ROWS for s in f.symbols) for f in axis)


def bucket_size(axis: Axis, buckets: Mapping[str, int]) -> int:
    """The size of an axis for these sizes of the symbols."""
    return math.prod(f.evaluate(buckets) for f in axis)


def axis_of(factors: Iterable[Expr | int]) -> Axis:
    """An axis in normal form: no factor is 1, numbers stand behind the factor that they multiply, neighbours as one."""
    made: list[Expr] = []
    for f in factors:
        expr = Expr.of(f)
        parts = [expr]
        if expr.constant is None:
            content = math.gcd(*(c for _, c in expr.terms))
            if content > 1:
                parts = [Expr({m: c // content for m, c in expr.terms}), Expr.of(content)]
        for p in parts:
            if p.constant == 1:
                continue
            if made and p.constant is not None and made[-1].constant is not None:
                made[-1] = made[-1] * p
            else:
                made.append(p)
    return tuple(made)
