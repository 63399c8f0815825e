"""What is recorded of guarded clusters, each one's state, history and statistics, and the report made of it.

ClusterRecord is of one cluster, `FailureSink` takes what failed, GuardReport has the records of a module as plain data,
text and metrics.
"""

from __future__ import annotations

import enum
import html
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from xrt_core.errors import InternalError, OptionError, printable
from xrt_core.events import Kind
from xrt_core.ir.function import Function
from xrt_core.options.guard_settings import retry_time
from xrt_core.verify.verdict import Outcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class State(enum.Enum):
    """State of a guarded cluster of one signature."""

    QUEUED = "queued"
    COMPILING = "compiling"
    VERIFYING = "verifying"
    READY = "ready"
    LIVE = "live"
    FAILED = "failed"
    REJECTED = "rejected"


S = State

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {
        S.QUEUED: frozenset({S.COMPILING, S.READY, S.REJECTED, S.FAILED}),
        S.COMPILING: frozenset({S.VERIFYING, S.READY, S.FAILED}),
        S.VERIFYING: frozenset({S.READY, S.REJECTED, S.FAILED}),
        S.READY: frozenset({S.LIVE, S.FAILED}),
        S.LIVE: frozenset({S.READY, S.FAILED, S.REJECTED}),
        S.FAILED: frozenset({S.QUEUED}),
        S.REJECTED: frozenset({S.QUEUED, S.READY}),
    }
)
"""State -> its successors.

QUEUED is followed by READY or REJECTED if a verdict is cached, COMPILING by READY if nothing is verified or timed,
LIVE by REJECTED if a shadow run finds wrong numbers, and that by READY if the nodes at fault are found. A race that is
re-opened takes LIVE to READY if another engine wins it, and REJECTED to QUEUED where the host had won provisionally.
"""

_HISTORY: Final = 64
_COUNTERS: Final = {
    "calls": "Calls of a cluster.",
    "host_calls": "Calls that the host answered.",
    "shadow_runs": "Calls compared with the host.",
    "saved_seconds": "Estimated time saved.",
}


@dataclass(frozen=True, slots=True)
class Transition:
    """An entry of a cluster's history. time: seconds since the epoch, on entering `state`."""

    time: float
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """One failure. stage: "compile", "examine", "load", "run" or "shadow". log: the tail of the worker's log.
    exit_code: of a worker that ended. time: seconds since the epoch."""

    stage: str
    kind: Kind
    message: str
    log: str = ""
    exit_code: int | None = None
    time: float = field(default_factory=time.time)


class ClusterRecord:
    """State and statistics of one cluster and signature. Kept as long as its module, also after its plan was evicted.

    name, engine: of the Launch. number: of the record in its module. nodes: their number. operators: of them, for
    messages. state, reason: where it stands, and why. retry_at: `time.monotonic` seconds from which a failed cluster is
    retried, and one of which the host is the provisional choice. races: how often the choice was revisited. outcome: of
    the last verification. sizes: of the symbols of a symbolic cluster in the call that it was planned for. raced:
    those of the calls on whose sizes its candidates were compared. calls, host_calls: all calls, and those that the
    host answered. Counters are updated without a lock; they are statistics
    and may lose increments.
    """

    def __init__(self, name: str, engine: str, nodes: int, operators: str) -> None:
        self.name = name
        self.engine = engine
        self.number = 0
        self.nodes = nodes
        self.operators = operators
        self.state = State.QUEUED
        self.reason = ""
        self.retry_at = float("inf")
        self.outcome: Outcome | None = None
        self.sizes: Mapping[str, int] = {}
        self.raced: Sequence[Mapping[str, int]] = ()
        self.calls = 0
        self.host_calls = 0
        self.failures = 0
        self.shadow_runs = 0
        self.races = 0
        self.host_seconds: deque[float] = deque(maxlen=16)
        self.engine_seconds: deque[float] = deque(maxlen=16)
        self.history: deque[Transition] = deque([Transition(time.time(), State.QUEUED, "")], maxlen=_HISTORY)
        self.faults: deque[FailureRecord] = deque(maxlen=_HISTORY)
        self.fault_counts: Counter[tuple[str, str]] = Counter()
        self.attempts = 0
        self.settled = threading.Event()
        self._lock = threading.Lock()

    def begin_again(self, reason: str) -> None:
        """In a process that was just forked, where no build goes on: QUEUED, unless it was rejected."""
        self._lock = threading.Lock()
        self.settled = threading.Event()
        if self.state is not State.REJECTED:
            self._enter(State.QUEUED, reason)

    def move(self, state: State, reason: str = "", settles: bool = True) -> None:
        """Enter a state. settles: whether those who wait for its build go on, if it ends with this state.

        Raises InternalError unless `TRANSITIONS` allows it.
        """
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                raise InternalError(f"cluster {self.name}: {self.state.name} cannot become {state.name} ({reason})")
            self._enter(state, reason, settles)

    def move_from(self, expected: State, state: State, reason: str = "") -> bool:
        """Compare and swap: enter a state if the present one is `expected`. Returns whether it was."""
        with self._lock:
            if self.state is not expected:
                return False
            if state not in TRANSITIONS[expected]:
                raise InternalError(f"cluster {self.name}: {expected.name} cannot become {state.name} ({reason})")
            self._enter(state, reason)
            return True

    def add_reason(self, text: str) -> None:
        """Append to the reason of the present state."""
        with self._lock:
            self.reason = f"{self.reason}; {text}"

    def restate(self, reason: str) -> None:
        """Replace the reason of the present state."""
        with self._lock:
            self.reason = reason

    def _enter(self, state: State, reason: str, settles: bool = True) -> None:
        self.state, self.reason = state, reason
        self.history.append(Transition(time.time(), state, reason))
        if state not in (State.LIVE, State.FAILED, State.REJECTED):
            self.settled.clear()
        elif settles:
            self.settled.set()

    def postpone(self, first: float) -> None:
        """Schedule the next retry: after `first` seconds, four times later after each attempt, at most an hour."""
        self.attempts += 1
        self.retry_at = retry_time(first, self.attempts)

    def add(self, failure: FailureRecord) -> None:
        """Append a failure and count it."""
        self.faults.append(failure)
        self.fault_counts[failure.stage, failure.kind] += 1

    @property
    def chosen(self) -> str:
        """What runs the cluster now: the engines of its pieces, joined by " + ", or "host"."""
        if self.state is not State.LIVE or self.outcome is None:
            return "host"
        parts = {p.engine if p.fused else f"{p.engine} (unfused)": None for p in self.outcome.pieces}
        return " + ".join(parts) or self.engine

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "number": self.number,
            "engine": self.engine,
            "nodes": self.nodes,
            "operators": self.operators,
            "state": self.state.value,
            "reason": self.reason,
            "chosen": self.chosen,
            "calls": self.calls,
            "host_calls": self.host_calls,
            "failures": self.failures,
            "shadow_runs": self.shadow_runs,
            "races": self.races,
            "fault_counts": [
                {"stage": stage, "kind": kind, "count": count}
                for (stage, kind), count in tuple(self.fault_counts.items())
            ],
            "outcome": None if self.outcome is None else self.outcome.to_json(),
            "history": [{"time": m.time, "state": m.state.value, "reason": m.reason} for m in tuple(self.history)],
            "faults": [
                {
                    "time": f.time, "stage": f.stage, "kind": f.kind, "message": f.message, "log": f.log,
                    "exit_code": f.exit_code,
                }
                for f in tuple(self.faults)
            ],
        }  # fmt: skip


class FailureSink(Protocol):
    """Takes the failures of guarded clusters."""

    def record_failure(self, record: ClusterRecord, function: Function, failure: FailureRecord) -> None:
        """Add a failure to the cluster's record, emit a `FallbackEvent`, and write a repro bundle where that helps."""

    def drifted(self, launch: Any, reason: str) -> None:
        """Revisit the choice of a live `GuardedLaunch` in the background: it takes another time than when it was
        chosen, or it was chosen provisionally."""

    def disproved(self, launch: Any, reason: str, inputs: Sequence[np.ndarray]) -> None:
        """Replace the cached verdict of a `GuardedLaunch` whose results for `inputs` were found wrong while it was
        live, and look for the nodes that are at fault, or another engine; tell the launch where it is `lost`."""


@dataclass(frozen=True, slots=True)
class GuardReport:
    """State of a guarded module.

    clusters: as `ClusterRecord.to_json` gives them. planning: pending and failed background compilations, as
    `CompilationRecord.to_json` gives them. calls: of all clusters. host_calls: those that the host answered.
    saved_seconds: estimated from times of the host and of the executables. seconds: since the module was made.
    """

    clusters: tuple[Mapping[str, Any], ...]
    calls: int
    host_calls: int
    saved_seconds: float
    seconds: float
    planning: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(
        cls, records: Sequence[ClusterRecord], seconds: float, planning: Sequence[Mapping[str, Any]] = ()
    ) -> GuardReport:
        """The report on these records, as they are now."""
        return cls(
            tuple({**r.to_json(), "saved_seconds": _saved(r)} for r in records),
            sum(r.calls for r in records),
            sum(r.host_calls for r in records),
            sum(_saved(r) for r in records),
            seconds,
            tuple(planning),
        )

    @property
    def accelerated_share(self) -> float:
        """Share of the clusters' calls that an engine answered, 0.0 where there were none."""
        return 1.0 - self.host_calls / self.calls if self.calls else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "clusters": [dict(c) for c in self.clusters],
            "calls": self.calls,
            "host_calls": self.host_calls,
            "accelerated_share": self.accelerated_share,
            "saved_seconds": self.saved_seconds,
            "seconds": self.seconds,
            "planning": [dict(p) for p in self.planning],
        }

    def as_text(self) -> str:
        """Human-readable: totals, then each cluster with its state, timings, history and failures."""
        lines = [_planning(p) for p in self.planning]
        if not self.clusters:
            return "\n".join(lines) or "no cluster is under guard (guard=True turns it on; clusters come with calls)"
        lines.append(
            f"{len(self.clusters)} clusters, {self.calls} calls, {self.accelerated_share:.1%} accelerated, "
            f"about {self.saved_seconds:.3g} s saved"
        )
        for c in self.clusters:
            lines.append(f"{c['name']}: {c['state']}, runs on {c['chosen']}: {c['reason'] or 'no reason to give'}")
            lines.append(f"  {c['nodes']} nodes: {c['operators']}")
            shadow = f"; {c['shadow_runs']} compared with the host" if c["shadow_runs"] else ""
            races = f"; the choice was revisited {c['races']} times" if c["races"] else ""
            lines.append(f"  calls: {c['calls']}, of them {c['host_calls']} on the host{shadow}{races}")
            outcome = c["outcome"]
            if outcome is not None:
                times = ", ".join(f"{k} {_duration(v)}" for k, v in outcome["timings"].items())
                if times:
                    lines.append(f"  timings: {times}")
                lines += [f"  rejected: {e}" for e in outcome["errors"]]
                lines += [f"  note: {n}" for n in outcome["notes"]]
            begun = c["history"][0]["time"]
            way = ", ".join(f"{m['state']} +{m['time'] - begun:.2f} s" for m in c["history"])
            lines.append(f"  history: since {time.strftime('%H:%M:%S', time.localtime(begun))}: {way}")
            for f in c["faults"]:
                code = "" if f["exit_code"] is None else f" (exit code {f['exit_code']})"
                lines.append(f"  failed at {f['stage']}, {f['kind']}{code}: {f['message']}")
                lines += [f"    | {line}" for line in f["log"].splitlines()]
        return printable("\n".join(lines))

    def metrics(self) -> list[Metric]:
        """Return the metrics that `to_prometheus` writes, for the `collect` of a collector of prometheus-client.

        Counters xrt_cluster_calls_total, ..._host_calls_total, ..._shadow_runs_total, ..._saved_seconds_total and
        ..._failures_total, and the gauge xrt_cluster_state. Labels: cluster, number and engine; stage and kind of
        failures; state, of which all are given. Raises OptionError where prometheus-client is missing.
        """
        try:
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ModuleNotFoundError:
            raise OptionError("metrics need prometheus-client: pip install 'xrt-core[metrics]'") from None
        labels = ["cluster", "number", "engine"]
        counters = {f: CounterMetricFamily(f"xrt_cluster_{f}", text, labels=labels) for f, text in _COUNTERS.items()}
        failures = CounterMetricFamily(
            "xrt_cluster_failures", "Failures by stage and kind.", labels=[*labels, "stage", "kind"]
        )
        state = GaugeMetricFamily(
            "xrt_cluster_state", "1 for the state that a cluster is in.", labels=[*labels, "state"]
        )
        for c in self.clusters:
            own = [c["name"], str(c["number"]), c["engine"]]
            for key, family in counters.items():
                family.add_metric(own, c[key])
            for row in c["fault_counts"]:
                failures.add_metric([*own, row["stage"], row["kind"]], row["count"])
            for s in State:
                state.add_metric([*own, s.value], c["state"] == s.value)
        return [*counters.values(), failures, state]

    def to_prometheus(self) -> str:
        """Return counters and gauges in Prometheus' text format. Raises OptionError as `metrics` does."""
        found = self.metrics()
        from prometheus_client import CollectorRegistry, generate_latest

        class Given:
            def collect(self) -> Iterable[Metric]:
                return found

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Given())
        text: str = generate_latest(registry).decode()
        return text

    def __str__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        """Return what notebooks show: totals, a table of clusters, and the whole report, folded."""

        def cell(text: object) -> str:
            return html.escape(printable(str(text), lines=False))

        heads = ("cluster", "state", "runs on", "calls", "on the host", "reason")
        keys = ("name", "state", "chosen", "calls", "host_calls", "reason")
        rows = "".join("<tr>" + "".join(f"<td>{cell(c[k])}</td>" for k in keys) + "</tr>" for c in self.clusters)
        text = html.escape(self.as_text())
        if not self.clusters:
            return f"<pre>{text}</pre>"
        titles = "".join(f"<th>{h}</th>" for h in heads)
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
        whole = f"<details><summary>timings, history, failures</summary><pre>{text}</pre></details>"
        total = f"{len(self.clusters)} clusters, {self.calls} calls, {self.accelerated_share:.1%} accelerated"
        return f"<div>{cell(total)}{table}{whole}</div>"


def _planning(p: Mapping[str, Any]) -> str:
    since = f"since {time.strftime('%H:%M:%S', time.localtime(p['since']))}"
    if p["state"] == "failed":
        return f"{p['graph']}: the host runs it, as planning it with engines failed ({p['reason']})"
    return f"{p['graph']}: the host answers, {p['state']} for engines {since}"


def _saved(r: ClusterRecord) -> float:
    host, engine = tuple(r.host_seconds), tuple(r.engine_seconds)
    if not host and r.outcome is not None and "host" in r.outcome.timings:  # known from a cached verdict
        host = (r.outcome.timings["host"],)
    if not host or not engine:
        return 0.0
    return max(statistics.median(host) - statistics.median(engine), 0.0) * (r.calls - r.host_calls)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
