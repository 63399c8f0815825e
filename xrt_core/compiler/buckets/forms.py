"""Forms: the padded form of a bucket, of a part of the rows where they do not mix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from xrt_core.compiler.buckets.bucket import full_sizes
from xrt_core.compiler.buckets.sizes import Family, Symbols
from xrt_core.events import EventLog
from xrt_core.frontends.onnx_functions import function_body
from xrt_core.ir.graph import Graph
from xrt_core.passes.padding import PaddedGraph, PaddingRefused, pad_graph
from xrt_core.passes.padding.rows import Rows, divided

TRIED_ROWS: Final = 4
"""Rows by which it is found out whether they mix."""


class Form(NamedTuple):
    """A padded form; how its rows lie where they do not mix, and how many of them it has."""

    padded: PaddedGraph
    rows: Rows | None = None
    of_rows: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """See `full_sizes`."""
        return full_sizes(*self)


class Forms:
    """Makes the padded forms of one graph.

    may_divide: whether rows that do not mix may be divided. rows: how rows lie where they do not mix, of each family
    for which that was looked for.
    """

    def __init__(self, graph: Graph, symbols: Symbols, events: EventLog, may_divide: bool) -> None:
        self._graph, self._symbols, self._events, self._may_divide = graph, symbols, events, may_divide
        self.rows: dict[Family, Rows | None] = {}

    def make(self, family: Family, sizes: Mapping[str, int]) -> Form:
        """The padded form for these sizes, of fewer rows where they do not mix. Raises PaddingRefused."""
        rows = self.rows_of(family, sizes)
        if rows is not None and rows.worth(sizes) < sizes[rows.symbol]:
            try:
                return self._divided(family, sizes, rows.symbol, rows.worth(sizes))
            except PaddingRefused:  # of this number of rows
                self.rows[family] = None
        return Form(pad_graph(self._graph, self._symbols.shapes(family), sizes, body_of=function_body))

    def make_again(self, family: Family, sizes: Mapping[str, int], rows: str) -> Form:
        """That of a bucket which was saved. rows: the symbol whose rows do not mix, or "". Raises PaddingRefused."""
        if not rows:
            return Form(pad_graph(self._graph, self._symbols.shapes(family), sizes, body_of=function_body))
        made = self._divided(family, sizes, rows, sizes[rows])
        self.rows[family] = made.rows
        return made

    def rows_of(self, family: Family, sizes: Mapping[str, int]) -> Rows | None:
        """How rows lie in a family, where they do not mix. sizes: for which that is proven at the first time."""
        if family not in self.rows:
            self.rows[family] = self._proven_rows(family, sizes)
        return self.rows[family]

    def _proven_rows(self, family: Family, sizes: Mapping[str, int]) -> Rows | None:
        """How rows lie, along the first symbol that counts rows which do not mix."""
        for symbol in sizes if self._may_divide else ():
            try:
                return self._divided(family, sizes, symbol, TRIED_ROWS).rows
            except PaddingRefused as e:
                self._events.emit("padding.rows", model=self._graph.name, symbol=symbol, reason=str(e))
        return None

    def _divided(self, family: Family, sizes: Mapping[str, int], symbol: str, count: int) -> Form:
        """The form of so many rows, which `symbol` counts. Raises PaddingRefused where they might mix."""
        others = {s: n for s, n in sizes.items() if s != symbol}
        padded, rows = divided(self._graph, self._symbols.shapes(family), others, symbol, count, function_body)
        return Form(padded, rows, count)
