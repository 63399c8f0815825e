"""ClusterRecord: the state, history and statistics of one guarded cluster, and the sink that its failures go to."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from xrt_core.errors import InternalError
from xrt_core.events import Kind
from xrt_core.guard.policy import retry_time
from xrt_core.ir.function import Function
from xrt_core.verify.verdict import Outcome


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
        S.LIVE: frozenset({S.FAILED, S.REJECTED}),
        S.FAILED: frozenset({S.QUEUED}),
        S.REJECTED: frozenset(),
    }
)
"""State -> its successors.

QUEUED is followed by READY or REJECTED if a verdict is cached, COMPILING by READY if nothing is verified or timed, and
LIVE by REJECTED if a shadow run finds wrong numbers.
"""

_HISTORY: Final = 64


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
    retried. outcome: of the last verification. calls, host_calls: all calls, and those that the host answered. Counters
    are updated without a lock; they are statistics and may lose increments.
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
        self.calls = 0
        self.host_calls = 0
        self.failures = 0
        self.shadow_runs = 0
        self.host_seconds: deque[float] = deque(maxlen=16)
        self.engine_seconds: deque[float] = deque(maxlen=16)
        self.history: deque[Transition] = deque([Transition(time.time(), State.QUEUED, "")], maxlen=_HISTORY)
        self.faults: deque[FailureRecord] = deque(maxlen=_HISTORY)
        self.fault_counts: Counter[tuple[str, str]] = Counter()
        self.attempts = 0
        self.settled = threading.Event()
        self._lock = threading.Lock()

    def move(self, state: State, reason: str = "") -> None:
        """Enter a state. Raises InternalError unless `TRANSITIONS` allows it."""
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                raise InternalError(f"cluster {self.name}: {self.state.name} cannot become {state.name} ({reason})")
            self._enter(state, reason)

    def move_from(self, expected: State, state: State, reason: str = "") -> bool:
        """Compare and swap: enter a state if the present one is `expected`. Returns whether it was."""
        with self._lock:
            if self.state is not expected:
                return False
            if state not in TRANSITIONS[expected]:
                raise InternalError(f"cluster {self.name}: {expected.name} cannot become {state.name} ({reason})")
            self._enter(state, reason)
            return True

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.history.append(Transition(time.time(), state, reason))
        if state in (State.LIVE, State.FAILED, State.REJECTED):
            self.settled.set()
        else:
            self.settled.clear()

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

    def disproved(self, launch: Any, reason: str) -> None:
        """Replace the cached verdict of a `GuardedLaunch` whose results were found wrong while it was live."""
