"""Tracing: a record of what each pass changed, as log lines or as files."""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Final

from xrt_core.errors import OptionError
from xrt_core.events import EventLog
from xrt_core.ir.graph import Graph

LOG: Final = "1"
"""The value of the option `trace` that selects log lines instead of files."""
INDEX: Final = "index.tsv"
_HEAD: Final = "number\tpass\towner\tmilliseconds\tnodes before\tnodes after\tfile before\tfile after\n"
_serial = itertools.count()


class Trace:
    """Records the runs of passes of one module.

    where: LOG, or a folder, in which every run of passes creates a folder: `index.tsv` with a row per pass, and a
    numbered text of the graph after each pass that changed it. Raises OptionError if the folder cannot be created.
    """

    def __init__(self, where: str, events: EventLog) -> None:
        self.where = where
        self.events = events
        if where != LOG:
            try:
                pathlib.Path(where).expanduser().mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise OptionError(f"trace={where!r}: the folder cannot be made: {e}") from e

    def begin(self, graph: Graph, what: str) -> Callable[[Graph, Graph, str, str, float], None]:
        """Begin the trace of one run of passes. what: the stage. Returns a function to call after each pass with the
        graph before and after, the name of the pass, its owner, and its duration in seconds."""
        if self.where == LOG:
            return self._log(graph.name or "graph", what)
        return _Files(pathlib.Path(self.where).expanduser(), graph, what, self.events)

    def _log(self, model: str, what: str) -> Callable[[Graph, Graph, str, str, float], None]:
        def log(before: Graph, after: Graph, name: str, owner: str, seconds: float) -> None:
            self.events.emit(
                f"pass.{name}",
                level=logging.INFO,
                seconds=seconds,
                model=model,
                of=what,
                nodes=f"{len(before.nodes)} -> {len(after.nodes)}" if before is not after else "unchanged",
            )

        return log


class _Files:
    """The files of one run of passes. A disk error is reported once and ends the trace, not the run."""

    def __init__(self, folder: pathlib.Path, graph: Graph, what: str, events: EventLog) -> None:
        name = re.sub(r"[^\w.-]+", "_", graph.name or "graph")[:60]
        self.folder = folder / f"{os.getpid()}-{next(_serial):04d}-{name}-{what}"
        self.events = events
        self.lock = threading.Lock()
        self.count = 0
        self.failed = False
        self.last = self._write(graph, "000-start.txt", _HEAD)

    def __call__(self, before: Graph, after: Graph, name: str, owner: str, seconds: float) -> None:
        with self.lock:
            self.count += 1
            earlier = self.last
            file = f"{self.count:03d}-{name}.txt" if after is not before else earlier
            counts = f"{len(before.nodes)}\t{len(after.nodes)}"
            row = f"{self.count}\t{name}\t{owner}\t{seconds * 1e3:.3f}\t{counts}\t{earlier}\t{file}\n"
            self.last = self._write(after if after is not before else None, file, row)

    def _write(self, graph: Graph | None, file: str, row: str) -> str:
        if not self.failed:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if graph is not None:
                    (self.folder / file).write_text(f"{graph}\n", encoding="utf-8")
                with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                    index.write(row)
            except OSError as e:
                self.failed = True
                self.events.emit("trace.failed", level=logging.WARNING, folder=str(self.folder), error=str(e))
        return file
