"""What a search for reduced precision came to, kept in the cache on disk for other processes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct, to_builtins

from xrt_core.accuracy.report import Trial
from xrt_core.cache.disk import DiskCache, open_cache
from xrt_core.cache.key import CacheKey, canonical, core_row, engine_rows
from xrt_core.compiler.services import usable_processors
from xrt_core.engine.contract import Engine
from xrt_core.guard.verdict_cache import read_json, write_json
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.graph import Graph
from xrt_core.options import Options

_REVISION: Final = "1"
"""Raised with every change of the search that invalidates what it came to before."""
_NOT_OF_THE_SEARCH: Final = frozenset(
    {"cache", "cache_dir", "cache_bytes", "cache_size", "executable_bytes", "trace", "verify", "sources",
     "forbid_compilation", "guard_sandbox", "guard_memory", "guard_failures", "guard_retry", "guard_timeout"}
)  # fmt: skip
"""Options that say where or how work is done, not what comes out."""


class KeptChoice(Struct, frozen=True):
    """The choice of one search. trials: all of it. products: of a form in int8, the numbers of those that are in int8,
    among all that can be. ranges: of a form in static int8, of each tensor that was finite."""

    trials: tuple[Trial, ...]
    products: tuple[int, ...] = ()
    ranges: dict[str, tuple[float, float]] = {}

    @property
    def chosen(self) -> Trial | None:
        """What answers; None for the model's own precision."""
        return next((t for t in self.trials if t.verdict == "chosen"), None)


class ChoiceFile:
    """The entry of one search: for a graph, a signature, options with a budget, and engines.

    given: the inputs that the user measures errors on, which the choice depends on; none: those of the first calls.
    """

    def __init__(
        self,
        graph: Graph,
        engines: Sequence[tuple[Engine, str]],
        options: Options,
        inputs: Sequence[np.ndarray],
        given: Sequence[Sequence[np.ndarray]] = (),
    ) -> None:
        self._disk: DiskCache | None = open_cache(options.cache, options.cache_dir, options.cache_bytes)
        self._title = f"accuracy {options.accuracy} of {graph.name or 'a graph'}"
        if self._disk is None:
            return
        said = {
            f.name: getattr(options, f.name)
            for f in dataclasses.fields(options)
            if f.name not in _NOT_OF_THE_SEARCH and not f.name.startswith("_")
        }
        digest = hashlib.sha256()
        for row in given:
            for a in row:
                digest.update(np.ascontiguousarray(a).tobytes())
        self._key = CacheKey(
            (
                ("accuracy", _REVISION),
                ("graph", graph_fingerprint(graph)),
                ("signature", ", ".join(f"{a.dtype}{list(a.shape)}" for a in inputs)),
                ("calibration", digest.hexdigest() if given else "of calls"),
                ("options", canonical(said)),
                *((f"{label} {k}", text) for k, (e, d) in enumerate(engines) for label, text in engine_rows(e, d)),
                ("processors", str(usable_processors())),
                core_row(),
            )
        )

    def read(self) -> KeptChoice | None:
        """The choice of an earlier process; None if there is none."""
        return None if self._disk is None else read_json(self._key, None, self._disk, KeptChoice)

    def write(self, choice: KeptChoice) -> None:
        """Keep a choice, in the place of an earlier one."""
        if self._disk is not None:
            finite = {n: r for n, r in choice.ranges.items() if all(map(math.isfinite, r))}
            found: Mapping[str, Any] = to_builtins(KeptChoice(choice.trials, choice.products, finite))
            write_json(self._key, self._title, None, self._disk, found)

    def remove(self) -> None:
        """Forget the choice: it exceeded its budget, or cannot be used any more."""
        if self._disk is not None and self._disk.mode != "read":
            self._disk.remove(self._disk.path_of(self._key))
