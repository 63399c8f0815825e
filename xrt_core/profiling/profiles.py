"""Profile: what the calls within a `with` block did: a row for each cluster, host node, conversion; and a timeline."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from xrt_core import events
from xrt_core.errors import InputError, printable
from xrt_core.files import replace_file
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Node
from xrt_core.passes.partitioning import is_converter
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.profiling.roofline import Roofline
from xrt_core.runtime import recording
from xrt_core.runtime.memory_planner import size_of
from xrt_core.runtime.recording import Record, Recorder, Span, Timeline, node_names

Kind = Literal["cluster", "host", "control", "conversion", "between"]
"""What a row is of: a cluster; a node that the host runs; one that runs bodies; a value on its way between the host and
an engine; and what a call spends between its steps."""

_BACKGROUND: Final = re.compile(r"xrt-(?!ort-async|\d+$)")
"""How the names of threads begin on which XRT works for itself (comparisons, verification, rehearsals), or on a part of
a call that is recorded as a whole on the caller's thread. Those with a number run launches of several lanes at once."""
_SAMPLED: Final = 0.05  # seconds between two looks at the memory; more often they cost a percent


@dataclass(frozen=True, slots=True)
class Row:
    """One step of a plan, over all its runs.

    plan: the graph that it belongs to. label: of the step. engine: what ran it; "host", or the engines. nodes: names of
    the nodes that it computes. runs: how many there were. seconds: in all, with what ran inside of it. own: without
    that. best: of the shortest run. moved, flops: bytes and estimated operations of all runs. peak: the least time that
    this machine needs for these, as a share of `own`, by the roofline; None where it does not apply (another device,
    or nothing known to be moved).
    """

    plan: str
    label: str
    kind: Kind
    engine: str
    nodes: tuple[str, ...]
    runs: int
    seconds: float
    own: float
    best: float
    moved: int
    flops: int
    peak: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__} | {"nodes": list(self.nodes)}


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The time of one node in all runs. estimated: its cluster's time, shared out by bytes and operations: what an
    engine fuses has no time of its own."""

    name: str
    operator: str
    engine: str
    seconds: float
    estimated: bool


@dataclass(slots=True)
class _Sums:
    what: recording.What
    engine: str
    runs: int = 0
    seconds: float = 0.0
    own: float = 0.0
    best: float = float("inf")
    moved: int = 0


@dataclass(slots=True)
class _Open:
    """A record that has begun, while the ones within it are looked at."""

    record: Record
    inside: float = 0.0


@dataclass
class Profile:
    """The profile of the calls within `with xrt.profile() as p:`, in all threads, by all modules; read it afterwards.

    Calls that the guard makes for itself in the background are told apart (`background`). It may be nested, and several
    may be open at once: each has what ran while it was.
    """

    name: str = ""
    _recorder: Recorder = field(default_factory=Recorder, repr=False)
    _begin: float = field(default=0.0, repr=False)
    _epoch: float = field(default=0.0, repr=False)
    _end: float | None = field(default=None, repr=False)
    _events: list[tuple[events.Event, str]] = field(default_factory=list, repr=False)
    _memory: list[tuple[float, int]] = field(default_factory=list, repr=False)
    _close: Callable[[], None] = field(default=lambda: None, repr=False)

    def __enter__(self) -> Profile:
        if self._begin:
            raise InputError("this profile was used before; make another one: with xrt.profile() as p")
        undo = events.subscribe(self._hear)
        stop = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(stop,), name="xrt-profile", daemon=True)
        self._begin, self._epoch = time.perf_counter(), time.time()
        self._look_at_memory()
        recording.begin(self._recorder)
        sampler.start()

        def close() -> None:
            recording.end(self._recorder)
            self._end = time.perf_counter()
            undo()
            stop.set()
            sampler.join()
            self._look_at_memory()

        self._close = close
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _hear(self, event: events.Event) -> None:
        if event.seconds is not None:
            self._events.append((event, threading.current_thread().name))

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(_SAMPLED):
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        resident = resident_bytes()
        if resident:
            self._memory.append((time.perf_counter() - self._begin, resident))

    # --- what was recorded ----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How long the block took."""
        if self._end is None:
            raise InputError("a profile is read after its `with` block")
        return self._end - self._begin

    @cached_property
    def roofline(self) -> Roofline:
        """What this machine can do at most: measured before, or now (half a second)."""
        return Roofline.here()

    @cached_property
    def _records(self) -> list[Record]:
        """What ran, as it was when this is first asked for after the block."""
        if self._end is None:
            raise InputError("a profile is read after its `with` block")
        return self._recorder.records

    @cached_property
    def _evaluated(self) -> tuple[list[_Sums], list[Record], list[Record]]:
        """The sums of steps, the calls, and the calls in the background."""
        by_thread: dict[int, list[Record]] = defaultdict(list)
        for r in self._records:
            by_thread[r.thread].append(r)
        sums: dict[Any, _Sums] = {}
        calls: list[Record] = []
        background: list[Record] = []
        for thread, records in by_thread.items():
            behind = _BACKGROUND.match(recording.thread_name(thread)) is not None
            records.sort(key=lambda r: (r.start, -r.end))
            stack: list[_Open] = []
            for r in records:
                while stack and r.start >= stack[-1].record.end:
                    self._add(stack.pop(), stack, sums, behind)
                if not stack and r.what.step is None:
                    (background if behind else calls).append(r)
                stack.append(_Open(r))
            while stack:
                self._add(stack.pop(), stack, sums, behind)
        return list(sums.values()), calls, background

    @staticmethod
    def _add(done: _Open, stack: Sequence[_Open], sums: dict[Any, _Sums], behind: bool) -> None:
        r = done.record
        took = r.end - r.start
        if stack:
            stack[-1].inside += took
        if behind:
            return
        step = r.what.step
        key = (r.what.plan, None, "") if step is None else (r.what.plan, step.label, step.node, r.where)
        s = sums.get(key)
        if s is None:
            s = sums[key] = _Sums(r.what, r.where)
        s.runs += 1
        s.seconds += took
        s.own += took - done.inside
        s.best = min(s.best, took)
        s.moved += r.moved

    @property
    def calls(self) -> int:
        """How many calls of plans were made: of modules and training steps, in any thread, not in the background."""
        return len(self._evaluated[1])

    @property
    def call_seconds(self) -> float:
        """What they took in all; of calls in several threads at once the sum."""
        return sum(r.end - r.start for r in self._evaluated[1])

    @property
    def background(self) -> tuple[int, float]:
        """How many calls the guard made for itself meanwhile, in this process, and what they took."""
        found = self._evaluated[2]
        return len(found), sum(r.end - r.start for r in found)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """A row for each step of each plan that ran, the longest own time first. The own times add up to what the calls
        took, unless launches ran side by side."""
        return tuple(sorted((self._row(s) for s in self._evaluated[0]), key=lambda r: -r.own))

    def _row(self, s: _Sums) -> Row:
        step = s.what.step
        if step is None:
            times = s.seconds, s.own, s.best
            return Row(s.what.plan, "between steps", "between", "host", (), s.runs, *times, 0, 0, None)
        node = step.node
        operations = 0 if node is None else sum(map(flops, _inside(node)))
        kind = _kind(node, step.lane)
        applies = kind != "conversion" and (node is None or (node.annotations.device or "cpu").startswith("cpu"))
        least = self.roofline.seconds(s.moved, operations * s.runs) if applies else 0.0
        peak = least / s.own if least and s.own > 0 else None
        nodes = () if node is None else node_names(node)
        return Row(
            s.what.plan, step.label, kind, s.engine or "host", nodes, s.runs, s.seconds, s.own, s.best, s.moved,
            operations * s.runs, peak,
        )  # fmt: skip

    @cached_property
    def nodes(self) -> tuple[NodeTime, ...]:
        """The time of each node, the longest first: measured on the host, estimated within clusters."""
        found = []
        for s in self._evaluated[0]:
            node = None if s.what.step is None else s.what.step.node
            if node is None or is_converter(node):
                continue
            inside = _inside(node)
            weights = [self.roofline.seconds(_moved(n), flops(n)) or 1e-9 for n in inside]
            estimated = isinstance(node.attributes.get("function"), Function)
            for n, w in zip(inside, weights, strict=True):
                share = s.own * w / sum(weights)
                found.append(NodeTime(n.name or n.operator, n.operator, s.engine or "host", share, estimated))
        return tuple(sorted(found, key=lambda n: -n.seconds))

    @cached_property
    def timeline(self) -> Timeline:
        """Every call and step, and what else took time meanwhile (compilations, ...), by the time of its end."""
        spans = [self._recorder.span(r, self._begin) for r in self._records]
        for event, thread in self._events:
            end = event.time - self._epoch
            label = " ".join([event.name, *(str(event.fields[k]) for k in ("cluster", "engine") if k in event.fields)])
            spans.append(Span(label, "", thread, end - (event.seconds or 0.0), end, "event"))
        return Timeline(tuple(sorted(spans, key=lambda s: s.end)))

    @property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """(seconds since the beginning, bytes that the process holds), every 50 ms. Empty where /proc is not there."""
        return tuple(self._memory)

    @cached_property
    def arrays(self) -> tuple[tuple[float, int], ...]:
        """(seconds since the beginning, bytes of a run's own arrays): what the plan of memory says of each step,
        without inputs, weights and the scratch memory of engines."""
        return tuple(sorted((r.start - self._begin, s.memory) for r in self._records if (s := r.what.step) is not None))

    # --- forms ----------------------------------------------------------------------------------------------------

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headers and cells of the rows, for people."""
        total = sum(r.own for r in self.rows) or 1.0
        headers = ("step", "on", "runs", "own time", "share", "a run", "moved", "GB/s", "GFLOP/s", "of peak")
        cells: list[tuple[str, ...]] = []
        for r in self.rows:
            one = r.own / r.runs
            speed = (f"{r.moved / r.own / 1e9:.3g}", f"{r.flops / r.own / 1e9:.3g}") if r.own > 0 else ("", "")
            cells.append(
                (
                    r.label if r.plan == self._main else f"{r.plan}: {r.label}", r.engine, str(r.runs), _time(r.own),
                    f"{r.own / total:.1%}", _time(one), _bytes(r.moved / r.runs) if r.moved else "",
                    speed[0] if r.moved else "", speed[1] if r.flops else "", "" if r.peak is None else f"{r.peak:.0%}",
                )
            )  # fmt: skip
        return headers, cells

    @property
    def _main(self) -> str:
        calls = self._evaluated[1]
        return calls[0].what.plan if calls else ""

    def summary(self) -> str:
        """One line: calls, their time, conversions, memory and what this machine can do."""
        parts = [f"{self.calls} calls, {_time(self.call_seconds)}"]
        if self.calls:
            parts[0] += f", {_time(self.call_seconds / self.calls)} a call"
        conversions = [r for r in self.rows if r.kind == "conversion"]
        moved = sum(r.moved for r in conversions) / max(self.calls, 1)
        parts.append(f"conversions: {sum(r.runs for r in conversions) // max(self.calls, 1)} a call, {_bytes(moved)}")
        if self._memory:
            parts.append(f"memory of the process up to {_bytes(max(b for _, b in self._memory))}")
        count, took = self.background
        if count:
            parts.append(f"{count} calls in the background, {_time(took)}")
        return "; ".join([*parts, f"this machine: {self.roofline}"])

    def as_text(self) -> str:
        """The summary, and a table with a row for each step."""
        headers, cells = self.table()
        rows = [headers, *([printable(c, lines=False) for c in row] for row in cells)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
        lines = ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
                 for r in rows]  # fmt: skip
        return "\n".join([self.summary(), "", *(line.rstrip() for line in lines)])

    __str__ = as_text

    def to_json(self) -> Mapping[str, Any]:
        """As plain data: calls, rows, nodes, memory, and the roofline."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "calls": self.calls,
            "call_seconds": self.call_seconds,
            "background_calls": self.background[0],
            "background_seconds": self.background[1],
            "bandwidth": self.roofline.bandwidth,
            "peak_flops": self.roofline.flops,
            "rows": [r.to_json() for r in self.rows],
            "nodes": [{k: getattr(n, k) for k in n.__slots__} for n in self.nodes],
            "memory": [list(m) for m in self.memory],
        }

    def to_chrome(self) -> dict[str, Any]:
        """The timeline in Chrome's trace event format, for ui.perfetto.dev: a row for each thread, the names of nodes
        with each event, and the memory of the process and of a run's arrays as counters."""
        found = self.timeline.to_json(by="thread")
        for name, samples in (("resident memory", self.memory), ("arrays of a run", self.arrays)):
            found["traceEvents"] += [
                {"name": name, "ph": "C", "pid": 1, "ts": at * 1e6, "args": {"bytes": size}} for at, size in samples
            ]
        return found

    def to_html(self) -> str:
        """A self-contained page: the timeline to zoom into and to search, the tables, and memory over time."""
        from xrt_core.profiling.page import to_html

        nodes = [
            (n.name, n.operator, n.engine, _time(n.seconds), "estimated" if n.estimated else "measured")
            for n in self.nodes
        ]
        headers = ("node", "operator", "on", "time", "")
        return to_html(
            self.name, self.summary(), self.timeline.spans, self.memory, self.seconds, self.table(), (headers, nodes)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page (.html) or the trace (.json). Raises InputError for another suffix, and OSError."""
        import json

        kind = pathlib.Path(path).suffix.lower()
        if kind not in (".html", ".json"):
            raise InputError(f"a profile is saved as .html (a page) or .json (a trace for ui.perfetto.dev), not {path}")
        text = self.to_html() if kind == ".html" else json.dumps(self.to_chrome())
        with replace_file(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))

    def __repr__(self) -> str:
        return f"<profile{f' {self.name}' if self.name else ''}: {len(self._recorder.records)} records>"


def profile(name: str = "") -> Profile:
    """Return a profile of what runs within a `with` block:

        with xrt.profile() as p:
            m(x)
        print(p)

    name: for its page. Nothing is slower before or after; within, each step costs a fraction of a microsecond more, and
    launches on a GPU are waited for (docs/profiling.md).
    """
    return Profile(name)


def resident_bytes() -> int:
    """The memory that this process holds; 0 where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _inside(node: Node) -> Sequence[Node]:
    """The nodes of a cluster, for a Launch; else the node itself."""
    function = node.attributes.get("function") if node.attributes else None
    return function.body.nodes if isinstance(function, Function) else (node,)


def _kind(node: Node | None, lane: str) -> Kind:
    if node is not None and is_converter(node):
        return "conversion"
    if node is not None and isinstance(node.attributes.get("function"), Function):
        return "cluster"
    if node is not None and node.attributes and node.subgraphs:
        return "control"
    return "cluster" if lane else "host"


def _moved(node: Node) -> int:
    return sum(size_of(v) or 0 for v in (*node.inputs, *node.outputs) if v is not None)


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(count: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
