"""Recording: the times of a plan's steps and calls, kept for whoever asks, at no cost while nobody does.

A plan runs the steps that it was made with. While something records (`begin`), every plan of the process, and each that
is made meanwhile, runs copies of its steps that also append a record; nothing looks whether it should.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from xrt_core.engine.forking import in_forked_process
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Node
from xrt_core.runtime.launch import DeviceLaunch, Launch, launch_mode
from xrt_core.runtime.memory_planner import size_of
from xrt_core.runtime.scheduler import Step

Call = Callable[[Sequence[Any]], Sequence[Any]]
_clock: Final = time.perf_counter


class _Thread(threading.local):
    """This thread's number: the system gives that of a thread that ended to another one, and this one not."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _names[self.number] = threading.current_thread().name


_numbers: Final = itertools.count()
_names: Final[dict[int, str]] = {}
_here: Final = _Thread()

# --- spans ------------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One step of one run, or the run itself: start and end in seconds since the recording began. thread: the name of
    its thread.

    lane: the engine and device of a launch, "" for a host step. where: what ran it, "host" or an engine's name. nodes:
    names of the nodes that it computed (operators for those without). moved: the bytes that it read and wrote.
    """

    label: str
    lane: str
    thread: str
    start: float
    end: float
    where: str = ""
    nodes: tuple[str, ...] = ()
    moved: int = 0


MOST_NAMES: Final = 64
"""Names of nodes that an event of a trace carries."""


class Timeline(Struct, frozen=True):
    """The spans of the steps of one run, in the order of their ends."""

    spans: tuple[Span, ...]

    def to_json(self, by: str = "lane") -> dict[str, Any]:
        """Return the spans in Chrome's trace event format, for chrome://tracing and ui.perfetto.dev.

        by: a row for each "lane", or for each "thread". Each event has the names of its nodes and the bytes moved.

        Source: "Trace Event Format", complete events ("X") and metadata events ("M"), times in microseconds.
        """
        rows = list(dict.fromkeys(getattr(s, by) for s in self.spans))
        found: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": row or "host"}}
            for i, row in enumerate(rows)
        ]
        number = {row: i for i, row in enumerate(rows)}
        found += [
            {
                "name": s.label, "cat": s.where or s.lane or "host", "ph": "X", "pid": 1, "tid": number[getattr(s, by)],
                "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6, "args": _arguments(s),
            }
            for s in self.spans
        ]  # fmt: skip
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    @property
    def overlap(self) -> float:
        """Seconds in which steps of two or more lanes were running at once."""
        edges = sorted((t, d) for s in self.spans for t, d in ((s.start, 1), (s.end, -1)))
        total, running = 0.0, 0
        for (t, d), (after, _) in pairwise(edges):
            running += d
            if running > 1:
                total += after - t
        return total


def _arguments(s: Span) -> dict[str, Any]:
    """What a trace tells of a span beside its times."""
    found: dict[str, Any] = {"thread": s.thread}
    if s.nodes:
        found["nodes"] = list(s.nodes[:MOST_NAMES])
        if len(s.nodes) > MOST_NAMES:
            found["more_nodes"] = len(s.nodes) - MOST_NAMES
    if s.moved:
        found["bytes"] = s.moved
    return found


# --- records ----------------------------------------------------------------------------------------------------------


class What(NamedTuple):
    """What a record is of: a step of a plan, or a call of the plan (`step` is None).

    plan: the name of its graph. moved: the bytes that a run of the step reads and writes, None where types do not tell.
    """

    plan: str
    step: Step | None
    moved: int | None = None


class Record(NamedTuple):
    """One run of `what`. start, end: of `time.perf_counter`. thread: its number. where: "host", or the engines that ran
    it. moved: the bytes that were read and written, as far as known."""

    what: What
    start: float
    end: float
    thread: int
    where: str
    moved: int


_WIDTH: Final = len(Record._fields)


class Recorder:
    """Takes records from any thread. take: with the fields of a `Record`."""

    __slots__ = ("_fields", "take")

    def __init__(self) -> None:
        # one after the other: an object for each record would have the garbage collector look at the whole heap
        self._fields: list[Any] = []
        self.take: Callable[[tuple[Any, ...]], None] = self._fields.extend

    @property
    def records(self) -> list[Record]:
        """What was taken, in the order of its ends."""
        fields = self._fields.copy()
        return [Record(*fields[i : i + _WIDTH]) for i in range(0, len(fields), _WIDTH)]

    def spans(self, begin: float) -> tuple[Span, ...]:
        """The records of steps as spans, in the order of their ends."""
        return tuple(self.span(r, begin) for r in self.records if r.what.step is not None)

    def span(self, r: Record, begin: float) -> Span:
        """One record as a span. begin: when the recording began."""
        what, start, end, thread, where, moved = r
        step = what.step
        label, lane = (what.plan, "") if step is None else (step.label, step.lane)
        nodes = () if step is None or step.node is None else node_names(step.node)
        return Span(label, lane, thread_name(thread), start - begin, end - begin, where, nodes, moved)


class _Several:
    """A recorder for several at once."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def take(self, record: tuple[Any, ...]) -> None:
        for r in self._recorders:
            r.take(record)


class Sink(Protocol):
    """Takes records."""

    @property
    def take(self) -> Callable[[tuple[Any, ...]], None]: ...


def thread_name(number: int) -> str:
    """The name of a thread, by its number in records; that which it had when it was first recorded."""
    return _names[number]


def node_names(node: Node) -> tuple[str, ...]:
    """The name of a node, its operator if it has none; of a Launch those of the nodes in its cluster."""
    function = node.attributes.get("function") if node.attributes else None
    inside = function.body.nodes if isinstance(function, Function) else (node,)
    return tuple(n.name or n.operator for n in inside)


def _moved(node: Node | None) -> int | None:
    """The bytes of a node's inputs and outputs, with the constants in its cluster; None where types do not tell."""
    if node is None:
        return None
    sizes = [size_of(v) for v in (*node.inputs, *node.outputs) if v is not None]
    function = node.attributes.get("function") if node.attributes else None
    if isinstance(function, Function):
        sizes += [v.data.nbytes for v in function.body.constants if v.data is not None]
    return None if None in sizes else sum(s for s in sizes if s is not None)


def _bytes_of(arrays: Sequence[Any]) -> int:
    return sum([a.nbytes for a in arrays if hasattr(a, "nbytes")])


def recorded(step: Step, plan: str, sink: Sink) -> Step:
    """Return the step with a call that also gives its record to `sink`. plan: the name of the graph."""
    moved = _moved(step.node)
    what, call, take, where = What(plan, step, moved), step.call, sink.take, step.lane or "host"
    if isinstance(call, Launch):
        return step._replace(call=_recorded_launch(call, what, sink))
    if moved is None:

        def measured(arrays: Sequence[Any]) -> Sequence[Any]:
            count, start = _bytes_of(arrays), _clock()
            end = 0.0
            try:
                results = call(arrays)
                end = _clock()
                count += _bytes_of(results)
                return results
            finally:
                take((what, start, end or _clock(), _here.number, where, count))

        return step._replace(call=measured)

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        start = _clock()
        try:
            return call(arrays)
        finally:
            end = _clock()
            take((what, start, end, _here.number, where, moved))

    return step._replace(call=run)


def _recorded_launch(launch: Launch, what: What, sink: Sink) -> Call:
    """A launch that is waited for, where it would run ahead: its time is then its own."""
    take, ahead = sink.take, isinstance(launch, DeviceLaunch) and launch.asynchronous
    known: list[Any] = [None, "host"]

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        token = launch_mode.set((launch_mode.get()[0], True)) if ahead else None
        count = what.moved
        if count is None:
            count = _bytes_of(arrays)
        made = launch.executable
        if made is not known[0]:
            known[:] = made, "host" if made is None else ran_by(launch)
        was_ahead, launch.ahead = launch.ahead, False
        start = _clock()
        try:
            return launch(arrays)
        finally:
            end = _clock()
            take((what, start, end, _here.number, known[1] if made is not None else "host", count))
            if was_ahead:  # another thread may have begun meanwhile, and found it switched off
                launch.ahead = True
            if token is not None:
                launch_mode.reset(token)

    return run


def ran_by(launch: Launch) -> str:
    """The engines that run a launch: with the guard those that it chose."""
    return str(getattr(getattr(launch, "record", None), "chosen", launch.engine))


def recorded_call(plan: str, call: Call, sink: Sink) -> Call:
    """Return the call of a plan, which also gives its record to `sink`."""
    what, take = What(plan, None), sink.take

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        start = _clock()
        try:
            return call(arrays)
        finally:
            end = _clock()
            take((what, start, end, _here.number, "", 0))

    return run


# --- what records now -------------------------------------------------------------------------------------------------


class Recordable(Protocol):
    """A plan."""

    def record(self, sink: Sink | None) -> None:
        """Give records to `sink` from the next run on; None: no more."""


plans: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Every plan: `Recordable`s, which enter themselves when made, and record at once where there are `recorders`."""
recorders: Final[list[Recorder]] = []
lock = threading.Lock()
"""Of both."""


def begin(recorder: Recorder) -> None:
    """Give the records of every plan in this process to `recorder`, beside those that record already."""
    with lock:
        recorders.append(recorder)
        _apply()


def end(recorder: Recorder) -> None:
    """Give it no more; runs that began before may still."""
    with lock:
        recorders.remove(recorder)
        _apply()


def sink() -> Sink | None:
    """What takes the records of all recorders; None where there are none."""
    return recorders[0] if len(recorders) == 1 else _Several(recorders) if recorders else None


def _apply() -> None:
    now = sink()
    for plan in list(plans):
        plan.record(now)


def _new_lock() -> None:
    global lock
    lock = threading.Lock()


in_forked_process(_new_lock)
