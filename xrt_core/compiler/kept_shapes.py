"""Which signatures of a graph varied in an earlier process, kept in the cache on disk.

From them a process plans symbolically at its first call, where it would need a second one to see that sizes vary, and
build an executable for the sizes of the first. Nothing depends on them but how soon that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.cache.disk import DiskCache, Miss, open_cache
from xrt_core.cache.key import CacheKey, core_row
from xrt_core.errors import CacheError, XRTError
from xrt_core.files import decode, encode
from xrt_core.ir.function import digest
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import dtype_from_name, dtype_name
from xrt_core.options import Options
from xrt_core.runtime.varying import Parts

_REVISION: Final = "1"
"""Raised with every change of what is kept."""
_MOST: Final = 8
"""Signatures that are kept: more tell no more of what varies."""


class _Entry(Struct, frozen=True):
    signatures: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]


class KeptShapes:
    """The entry of one graph. A graph of the same operators on the same shapes shares it, whatever its weights are."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self._graph = graph
        self._disk: DiskCache | None = open_cache(options.cache, options.cache_dir, options.cache_bytes)
        self._known: CacheKey | None = None

    @property
    def _key(self) -> CacheKey:
        if self._known is None:
            nodes = (f"{n.operator}({', '.join(str(v and v.type) for v in n.inputs)})" for n in self._graph.nodes)
            inputs = (f"{v.name}: {v.type}" for v in self._graph.inputs)
            text = "\n".join((*inputs, *nodes)).encode("utf-8", "surrogatepass")
            self._known = CacheKey((("varying shapes", _REVISION), ("operators", digest(text)), core_row()))
        return self._known

    def read(self) -> list[Parts]:
        """Signatures of an earlier process between which sizes varied; none where it is not known."""
        if self._disk is None:
            return []
        hit = self._disk.read(self._key, b"")
        if isinstance(hit, Miss):
            return []
        try:
            entry = decode(hit.blob, _Entry, "the entry", CacheError)
            return [[(dtype_from_name(d), s) for d, s in row] for row in entry.signatures if self._fits(row)]
        except (XRTError, TypeError, ValueError):
            return []

    def write(self, signatures: Sequence[Parts]) -> None:
        """Keep signatures between which sizes varied, in the place of earlier ones; none: forget those."""
        if self._disk is None or self._disk.mode == "read":
            return
        if not signatures:
            self._disk.remove(self._disk.path_of(self._key))
            return
        rows = [[[dtype_name(np.dtype(d)), list(map(int, s))] for d, s in row] for row in signatures[-_MOST:]]
        info = {"cluster": f"sizes of {self._graph.name or 'a graph'}", "nodes": 0, "compile_seconds": 0.0}
        self._disk.write(self._key, info, b"", encode({"signatures": rows}))

    def _fits(self, row: Sequence[Any]) -> bool:
        return len(row) == len(self._graph.inputs) and all(n >= 0 for _, s in row for n in s)
