"""States of a cluster: every pair of them, by the table; history, retries, and the options of the guard."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from xrt_core.errors import CacheError, InternalError, OptionError
from xrt_core.files import decode, encode
from xrt_core.guard.record import TRANSITIONS, ClusterRecord, FailureRecord, State
from xrt_core.ir.types import physical_memory
from xrt_core.options import resolve
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.verify.verdict import Outcome, Piece

ALLOWED = {
    ("QUEUED", "COMPILING"), ("QUEUED", "READY"), ("QUEUED", "REJECTED"), ("QUEUED", "FAILED"),
    ("COMPILING", "VERIFYING"), ("COMPILING", "READY"), ("COMPILING", "FAILED"),
    ("VERIFYING", "READY"), ("VERIFYING", "REJECTED"), ("VERIFYING", "FAILED"),
    ("READY", "LIVE"), ("READY", "FAILED"),
    ("LIVE", "READY"), ("LIVE", "FAILED"), ("LIVE", "REJECTED"),
    ("FAILED", "QUEUED"), ("REJECTED", "QUEUED"), ("REJECTED", "READY"),
}  # fmt: skip
"""The design, written down apart from the table."""
WAYS = {
    State.QUEUED: (),
    State.COMPILING: (State.COMPILING,),
    State.VERIFYING: (State.COMPILING, State.VERIFYING),
    State.READY: (State.READY,),
    State.LIVE: (State.READY, State.LIVE),
    State.FAILED: (State.FAILED,),
    State.REJECTED: (State.REJECTED,),
}


def in_state(state: State) -> ClusterRecord:
    """A record that got where it is by allowed ways."""
    record = ClusterRecord("c", "e", 1, "Relu")
    for step in WAYS[state]:
        record.move(step)
    return record


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)), ids=lambda s: s.name)
def test_transitions(old: State, new: State) -> None:
    """What the design allows is entered with its reason; anything else is an error that changes nothing."""
    record = in_state(old)
    if (old.name, new.name) in ALLOWED:
        record.move(new, "because")
        assert (record.state, record.reason) == (new, "because")
        assert record.history[-1].state is new
        return
    before = list(record.history)
    with pytest.raises(InternalError, match=f"cluster c: {old.name} cannot become {new.name}"):
        record.move(new)
    assert record.state is old
    assert list(record.history) == before


def test_the_table_is_whole() -> None:
    """Every state has a row, and every state but the first can be reached."""
    assert set(TRANSITIONS) == set(State)
    assert {s for row in TRANSITIONS.values() for s in row} == set(State)


def test_of_many_threads_one_moves() -> None:
    """`move_from` is entered by one thread only."""
    record = in_state(State.LIVE)
    barrier = threading.Barrier(8)
    won: list[bool] = []

    def run() -> None:
        barrier.wait()
        won.append(record.move_from(State.LIVE, State.FAILED, "once"))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(won) == [False] * 7 + [True]


def test_move_from_keeps_to_the_table() -> None:
    """An illegal way is an error also there; the wrong present state is not."""
    record = in_state(State.LIVE)
    assert not record.move_from(State.READY, State.LIVE)
    with pytest.raises(InternalError, match="LIVE cannot become COMPILING"):
        record.move_from(State.LIVE, State.COMPILING)


def test_settled() -> None:
    """Waiters are let go where a cluster comes to rest, and wait again when it is tried again."""
    for state in State:
        assert in_state(state).settled.is_set() == (state in (State.LIVE, State.FAILED, State.REJECTED))
    record = in_state(State.FAILED)
    record.move(State.QUEUED)
    assert not record.settled.is_set()


def test_waits_grow() -> None:
    """Four times as long after each failure, at most an hour, and for ever where retries are off."""
    record = ClusterRecord("c", "e", 1, "Relu")
    waits = []
    for _ in range(6):
        record.postpone(60.0)
        waits.append(record.retry_at - time.monotonic())
    assert [round(w, -1) for w in waits] == [60, 240, 960, 3600, 3600, 3600]
    record.postpone(0.0)
    assert record.retry_at == float("inf")


def test_record_as_data() -> None:
    """State, history and failures, with names in place of objects."""
    record = in_state(State.READY)
    record.outcome = Outcome("ready", (Piece("a", (0, 2)), Piece("host", (1,)), Piece("b", (3,), fused=False)), "fine")
    assert record.chosen == "host"
    record.move(State.LIVE)
    assert record.chosen == "a + host + b (unfused)"
    record.add(FailureRecord("run", "raised", "RuntimeError: no", log="tail", exit_code=-6))
    found = record.to_json()
    assert found["state"] == "live"
    assert [m["state"] for m in found["history"]] == ["queued", "ready", "live"]
    assert found["faults"][0]["exit_code"] == -6
    assert found["fault_counts"] == [{"stage": "run", "kind": "raised", "count": 1}]
    assert decode(encode(found["outcome"]), Outcome, "it", CacheError) == record.outcome


EMPTY = {"verdict": "ready", "pieces": [], "reason": "", "timings": {}, "errors": []}


@pytest.mark.parametrize(
    "bad",
    [
        None, [], {}, {"verdict": "ready"},
        {**EMPTY, "verdict": "fine"},
        {**EMPTY, "pieces": [{"engine": "a", "nodes": [-1], "fused": True}]},
        {**EMPTY, "reason": 1},
        {**EMPTY, "timings": {"a": "soon"}},
    ],
)  # fmt: skip
def test_what_is_no_outcome_is_refused(bad: object) -> None:
    """Data from a disk or another process is looked at before it is believed."""
    with pytest.raises(CacheError, match="it is damaged: .*(Expected|missing|Invalid)"):
        decode(encode(bad), Outcome, "it", CacheError)


# --- options ---------------------------------------------------------------------------------------------------------


def settings(**options: object) -> GuardSettings | None:
    """The settings of these keywords, without an environment."""
    return GuardSettings.of(resolve(options, environ={}))


def test_the_guard_is_on_unless_switched_off() -> None:
    """Without an option all is on, and with an engine named all but the timing; not for a device elsewhere, nor for a
    saved model without verdicts."""
    found = settings()
    assert found is not None
    assert (found.asynchronous, found.sandbox, found.verify, found.tune) == (True,) * 4
    found = settings(engine="xla")
    assert found is not None
    assert (found.asynchronous, found.sandbox, found.verify, found.tune) == (True, True, True, False)
    assert found.shadow is None
    assert settings(guard=False) is None
    assert settings(guard=False, guard_real_inputs=True) is None
    assert settings(target="sm_89", engine="tensorrt") is None
    assert GuardSettings.of(resolve({}, environ={}), saved=True) is None
    assert GuardSettings.of(resolve({"guard": True}, environ={}), saved=True) is not None


def test_the_switch_turns_all_on() -> None:
    """And each part can be taken out."""
    found = settings(guard=True)
    assert found is not None
    assert (found.asynchronous, found.sandbox, found.verify, found.tune) == (True,) * 4
    assert found.memory == physical_memory() // 2
    for name, field in (("async", "asynchronous"), ("sandbox",) * 2, ("verify",) * 2, ("tune",) * 2):
        part = settings(guard=True, **{f"guard_{name}": False})
        assert part is not None
        assert not getattr(part, field)
        alone = settings(guard=False, **{f"guard_{name}": True})
        assert alone is not None
        assert [alone.asynchronous, alone.sandbox, alone.verify, alone.tune].count(True) == 1
        assert getattr(alone, field)


def test_auto() -> None:
    """`engine="auto"` is the whole guard, or with guard=False the timing alone."""
    found = settings(engine="auto")
    assert found is not None
    assert (found.asynchronous, found.sandbox, found.verify, found.tune) == (True,) * 4
    found = settings(engine="auto", guard=False)
    assert found is not None
    assert (found.asynchronous, found.sandbox, found.verify, found.tune) == (False, False, False, True)
    with pytest.raises(OptionError, match="'auto' is every engine that is ready, so it stands alone"):
        resolve({"engine": ["auto", "xla"]})


@pytest.mark.parametrize(
    ("given", "auto"),
    [
        ({}, True), ({"guard": True}, True), ({"guard": "isolated"}, True), ({"device": "cpu"}, True),
        ({"guard": False}, False), ({"guard_verify": False}, False), ({"guard_tune": False}, False),
        ({"phase": "train"}, False), ({"engine": "xla"}, False), ({"engine": ["xla", "host"]}, False),
        ({"engine": "auto", "guard": False}, True),
    ],
)  # fmt: skip
def test_auto_is_the_default(given: dict[str, Any], auto: bool) -> None:
    """Where no engine is named and results are verified; training takes the engines by their priority."""
    assert resolve(given, environ={}).auto is auto


def test_a_switch_is_a_choice() -> None:
    """An engine that is switched on is named; one that is switched off leaves the choice among the others."""
    assert not resolve({}, environ={"FLAGS_use_xla_jit": "1"}).auto
    assert resolve({}, environ={"FLAGS_use_xla_jit": "0"}).auto


def test_environment() -> None:
    """Each option has a variable."""
    environ = {"XRT_GUARD": "1", "XRT_GUARD_TIMEOUT": "2.5", "XRT_GUARD_MEMORY": "512M", "XRT_GUARD_TUNE": "off"}
    found = GuardSettings.of(resolve({}, environ=environ))
    assert found is not None
    assert (found.timeout, found.memory, found.tune, found.verify) == (2.5, 512 << 20, False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guard", "yes"), ("guard_timeout", 0), ("guard_timeout", -1.0), ("guard_timeout", float("inf")),
        ("guard_timeout", True), ("guard_retry", -1), ("guard_retry", float("nan")), ("guard_failures", 0),
        ("guard_shadow", -1), ("guard_memory", -1), ("guard_run_timeout", "1"),
    ],
)  # fmt: skip
def test_bad_values(name: str, value: object) -> None:
    """Refused, with the option's name."""
    with pytest.raises(OptionError, match=f"option '{name}'"):
        resolve({name: value})
