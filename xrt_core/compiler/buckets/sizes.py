"""Sizes: the symbols of a graph's inputs, which of them vary, and the sizes that a bucket may have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, Expr, expression
from xrt_core.ir.types import Dim, TensorType

BucketSizes = str | tuple[tuple[str, tuple[int, ...]], ...]
"""The option: "off", "auto", or the sizes of each symbol, ascending."""

_UNNAMED: Final = "dim_"


class Symbols:
    """The symbols of a graph's inputs, as the user declared them or else the graph.

    is_named: for each of them, in order, whether the model named it; empty where no dimension varies, or a rank is
    unknown. axes: for each of them the axes of inputs whose sizes it is part of.
    """

    def __init__(self, graph: Graph, user: Declared | None = None) -> None:
        self._declared = _declared(graph, user)
        self.axes = {} if self._declared is None else _axes(self._declared)
        self.is_named = {s: not s.startswith(_UNNAMED) for s in self.axes}

    def of_arrays(self, arrays: Sequence[Any]) -> dict[str, int] | None:
        """Their sizes for these arguments; None where those are no arrays with elements, or fit no declared shape."""
        if self._declared is None or not all(type(a) is np.ndarray and a.size for a in arrays):
            return None
        return self._all(self._declared.admits([a.shape for a in arrays]))

    def of_signature(self, parts: Sequence[Any]) -> dict[str, int] | None:
        """As `of_arrays`, for (dtype, shape) of each argument."""
        if self._declared is None or not all(type(p) is tuple for p in parts):
            return None
        return self._all(self._declared.admits([tuple(s) for _, s in parts]))

    def _all(self, sizes: dict[str, int] | None) -> dict[str, int] | None:
        return None if sizes is None or sizes.keys() != self.is_named.keys() else sizes

    def in_limits(self, symbol: str, rounded: int, size: int) -> int:
        """The size of a bucket for `size`, within what the user declared of the symbol."""
        assert self._declared is not None
        limits = self._declared.symbols.get(symbol)
        if limits is None:
            return rounded
        rounded = -(-rounded // limits.multiple) * limits.multiple
        return rounded if limits.max is None else max(size, min(rounded, limits.max))

    def shapes(self, family: Family) -> list[tuple[Dim, ...] | None]:
        """The declared shapes with sizes in the place of fixed symbols, and with what stands for each other symbol."""
        assert self._declared is not None
        new = {**{s: Expr.of(n) for s, n in family.fixed.items()}, **{s: Expr.of(t) for s, t in family.same.items()}}
        found: list[tuple[Dim, ...] | None] = []
        for shape in self._declared.shapes:
            exprs = [expression(d) for d in shape or ()]
            found.append(tuple(None if e is None else e.substitute(new).dim for e in exprs))
        return found


@dataclass(frozen=True)
class Family:
    """Which symbols vary: of buckets that have this in common each may serve another's calls, but for their sizes.

    fixed: the size of each symbol that does not vary. same: for each other one the symbol that stands for it, itself
    or one that was always equal; these are the symbols of a bucket.
    """

    fixed: Mapping[str, int]
    same: Mapping[str, str]

    def __hash__(self) -> int:
        return hash((frozenset(self.fixed.items()), frozenset(self.same.items())))

    def own(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of a bucket's symbols for those of all symbols."""
        return {self.same[s]: n for s, n in sizes.items() if s in self.same}

    def all_sizes(self, own: Mapping[str, int]) -> dict[str, int]:
        """The sizes of all symbols for those of a bucket's."""
        return {**self.fixed, **{s: own[t] for s, t in self.same.items()}}

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes of all symbols differ in what varies alone."""
        return all(self.fixed.get(s, n) == n for s, n in sizes.items())


def rung(n: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least n: two sizes an octave, a fifth of which is
    padding on average where all sizes are as frequent."""
    k = 1
    while k < n:
        if k > 1 and k * 3 // 2 >= n:
            return k * 3 // 2
        k *= 2
    return k


def fine(n: int) -> int:
    """The smallest of eight sizes an octave that is at least n; n itself up to 16."""
    step = max(1, (1 << (n - 1).bit_length()) // 16)
    return -(-n // step) * step


def rounded(n: int, sizes: Sequence[int] | None) -> int:
    """The size of the bucket for n: of the given ones the smallest that fits; n itself above them all."""
    return rung(n) if sizes is None else min((s for s in sizes if s >= n), default=n)


def _declared(graph: Graph, user: Declared | None) -> Declared | None:
    """The shapes of a graph's inputs, as the user declared them or else the graph; dimensions without a name get one.
    None where a rank is unknown, and where no dimension varies."""
    shapes: list[tuple[Dim, ...]] = []
    for i, v in enumerate(graph.inputs):
        own = v.type.shape if isinstance(v.type, TensorType) and v.type.dtype is not None else None
        shape = own if user is None or user.shapes[i] is None else user.shapes[i]
        if own is None or shape is None:
            return None
        shapes.append(tuple(_dim(d, i, a) for a, d in enumerate(shape)))
    if all(isinstance(d, int) for s in shapes for d in s):
        return None
    return Declared(tuple(v.name for v in graph.inputs), tuple(shapes), {} if user is None else user.symbols)


def _dim(d: Dim, i: int, axis: int) -> Dim:
    if isinstance(d, int) or (d is not None and expression(d) is not None):
        return d
    return f"{_UNNAMED}{i}_{axis}" if d is None else "symbol_" + re.sub(r"\W", "_", d)


def _axes(declared: Declared) -> dict[str, set[int]]:
    """The symbols, in order, and the axes of inputs in whose sizes they are."""
    found: dict[str, set[int]] = {}
    for shape in declared.shapes:
        for axis, d in enumerate(shape or ()):
            made = None if d is None else expression(d)
            for s in sorted(made.symbols) if made is not None else ():
                found.setdefault(s, set()).add(axis)
    return found
