"""Progress: one line on a terminal that says what is being done, how far it is, and what it waits for.

What it says comes from events: those named "progress.*" tell what begins (`EventLog.progress`), others that it ended.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TextIO

from xrt_core.errors import printable
from xrt_core.events import Event, FallbackEvent, subscribe

_BEGINS: Final[dict[str, Callable[[Any], str]]] = {
    "progress.compile": lambda f: f"compiling {_cluster(f)}" + (f" ({f['nodes']} nodes)" if "nodes" in f else ""),
    "progress.verify": lambda f: f"verifying and timing {_cluster(f)}",
    "progress.wait": lambda f: f"waiting: {f['reason']} ({f['cluster']})",
    "progress.fetch": lambda f: f"fetching {f['cluster']} from a shared cache",
    "progress.load": lambda f: f"loading {_cluster(f)} from the cache",
}
"""Name of an event -> what is said of it, from its fields."""
_ENDS: Final = frozenset(("compile", "compile.cached", "cache.hit", "saved.loaded", "guard.live", "guard.known"))
"""Names of events after which nothing is being done with a cluster."""
_OF_GUARD: Final = frozenset(("compile", "examine", "load"))
"""Stages of fallbacks after which the host keeps a cluster."""


def _cluster(fields: Any) -> str:
    engine = fields.get("engine", "")
    return f"{fields['cluster']} on {engine}" if engine else str(fields["cluster"])


class State:
    """What events have told so far: the clusters that are wanted and done, and what is done with the others."""

    def __init__(self) -> None:
        self.wanted = 0
        self.done: set[str] = set()
        self.doing: OrderedDict[str, str] = OrderedDict()  # cluster -> what is done with it, the latest last
        self._lock = threading.Lock()

    def hear(self, event: Event) -> bool:
        """Take note of an event; returns whether the text is another."""
        fields = event.fields
        with self._lock:
            if event.name == "progress.plan":
                self.wanted += int(fields["clusters"])
                return True
            begins = _BEGINS.get(event.name)
            if begins is not None:
                self.doing[str(fields["cluster"])] = begins(fields)
                self.doing.move_to_end(str(fields["cluster"]))
                return True
            lost = isinstance(event, FallbackEvent) and event.stage in _OF_GUARD
            if (event.name in _ENDS or lost) and "cluster" in fields:
                self.doing.pop(str(fields["cluster"]), None)
                self.done.add(str(fields["cluster"]))
                return True
        return False

    def text(self) -> str:
        """How far it is, and what is being done."""
        with self._lock:
            parts = []
            if self.wanted:
                parts.append(f"{min(len(self.done), self.wanted)} of {self.wanted} clusters")
            if self.doing:
                more = f" and {len(self.doing) - 1} more" if len(self.doing) > 1 else ""
                parts.append(next(reversed(self.doing.values())) + more)
        return "; ".join(parts)


class Progress:
    """Shows a line while its `with` block runs, where `file` is a terminal; nothing else.

    label: what is done as a whole. total: of the steps that `advance` counts; a bar is shown then. shown: False for
    never.
    """

    def __init__(self, label: str, total: int | None = None, *, shown: bool = True, file: TextIO | None = None) -> None:
        self.label = label
        self.total, self.count = total, 0
        self._file = sys.stderr if file is None else file
        self._shown = shown and self._file.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._undo: Callable[[], None] = lambda: None
        self.state = State()

    def __enter__(self) -> Progress:
        if not self._shown:
            return self
        from rich import progress
        from rich.console import Console

        columns: list[Any] = [progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False)]
        if self.total is not None:
            columns += [progress.BarColumn(), progress.MofNCompleteColumn()]
        columns += [progress.TextColumn("{task.fields[note]}", markup=False), progress.TimeElapsedColumn()]
        if self.total is not None:
            columns.append(progress.TimeRemainingColumn())
        self._bar = progress.Progress(*columns, console=Console(file=self._file, highlight=False), transient=True)
        self._task = self._bar.add_task(self.label, total=self.total, note="")
        self._bar.start()
        self._undo = subscribe(self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Count a step. note: shown behind the count, such as a loss."""
        if self._bar is not None:
            self.count += 1
            note = note if self.total is not None else f"{self.count}, {note}"
            self._bar.update(self._task, advance=1, note=note)

    def _hear(self, event: Event) -> None:
        if self.state.hear(event):
            self._bar.update(self._task, description=f"{self.label}: {printable(self.state.text(), lines=False)}")


def show_progress(label: str = "xrt") -> Progress:
    """Return a context within which whatever compiles, verifies, tunes or fetches says so in one line on stderr:

        with xrt.show_progress():
            m(x)
            m.wait()

    Nothing is written where stderr is no terminal, and nothing is left when the block ends.
    """
    return Progress(label)
