"""The states of a cluster under guard, as a table, and the record of one cluster: what happened to it and when."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import InternalError
from xrt_core.events import Kind
from xrt_core.guard.background import later
from xrt_core.verify.verdict import Outcome


class State(enum.Enum):
    """Where a cluster stands, for one signature."""

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
"""Which state may follow which.

QUEUED goes straight to READY or REJECTED where the verdict is known from an earlier examination, COMPILING straight to
READY where nothing is to be examined. LIVE is left for REJECTED when a shadow run finds wrong numbers.
"""

_HISTORY: Final = 64


@dataclass(frozen=True, slots=True)
class Moment:
    """A line of a cluster's history. time: seconds since the epoch, on entering `state`."""

    time: float
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """One failure. stage: "compile", "examine", "load", "run" or "shadow". log: the tail of the child's log."""

    time: float
    stage: str
    kind: Kind
    message: str
    log: str = ""
    exit_code: int | None = None


class ClusterRecord:
    """What is known of one cluster and signature; lives as long as its module, also after its plan is gone.

    name, engine: of the Launch. number: of the record in its module. nodes: how many. operators: of them, for people.
    state, reason: where it stands and why. retry_at: `time.monotonic` seconds from which a failed one is tried again.
    outcome: of the last examination. calls, host_calls: how often it ran, and how often on the host. Counters are
    bumped without a lock: CPython switches threads between statements of that size, not within, and a count that is
    off by one would harm nobody.
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
        self.history: deque[Moment] = deque([Moment(time.time(), State.QUEUED, "")], maxlen=_HISTORY)
        self.faults: deque[FailureRecord] = deque(maxlen=_HISTORY)
        self.fault_counts: Counter[tuple[str, str]] = Counter()
        self.attempts = 0
        self.settled = threading.Event()
        self._lock = threading.Lock()

    def move(self, state: State, reason: str = "") -> None:
        """Enter a state. Raises InternalError where the table has no such way."""
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                raise InternalError(f"cluster {self.name}: {self.state.name} cannot become {state.name} ({reason})")
            self._enter(state, reason)

    def move_from(self, expected: State, state: State, reason: str = "") -> bool:
        """Enter a state if the present one is `expected`; whether it was. For where several threads may be first."""
        with self._lock:
            if self.state is not expected:
                return False
            if state not in TRANSITIONS[expected]:
                raise InternalError(f"cluster {self.name}: {expected.name} cannot become {state.name} ({reason})")
            self._enter(state, reason)
            return True

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.history.append(Moment(time.time(), state, reason))
        if state in (State.LIVE, State.FAILED, State.REJECTED):
            self.settled.set()
        else:
            self.settled.clear()

    def postpone(self, first: float) -> None:
        """Set when a failure is tried again: after `first` seconds, four times longer each time, at most an hour."""
        self.attempts += 1
        self.retry_at = later(first, self.attempts)

    def fault(self, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None) -> FailureRecord:
        """Note a failure."""
        found = FailureRecord(time.time(), stage, kind, message, log, exit_code)
        self.faults.append(found)
        self.fault_counts[stage, kind] += 1
        return found

    @property
    def chosen(self) -> str:
        """Who runs it now, for people: engines in the order of their pieces, or "host"."""
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
