"""The event log."""

from __future__ import annotations

import logging

import pytest

from xrt_core.errors import RegistrationError
from xrt_core.events import Event, EventLog, FallbackEvent, subscribe


def test_ring_keeps_the_latest(caplog: pytest.LogCaptureFixture) -> None:
    """Only the latest events are kept, each is logged at its level with its fields."""
    log = EventLog(size=2)
    with caplog.at_level(logging.INFO, logger="xrt"):
        for i in range(3):
            log.emit("a.b", level=logging.INFO if i == 2 else logging.DEBUG, number=i)

    assert [e.fields["number"] for e in log] == [1, 2]
    assert [r.getMessage() for r in caplog.records] == ["a.b number=2"]
    assert log.recent("a") == list(log)
    assert log.recent("c") == []


def test_span_times_its_body() -> None:
    """A span is one event with its duration and what the body added; one that raises records the error."""
    log = EventLog()
    with log.span("work", kind="x") as fields:
        fields["found"] = 3
    with pytest.raises(ValueError, match="no"), log.span("work"):
        raise ValueError("no")

    good, bad = log
    assert dict(good.fields) == {"kind": "x", "found": 3}
    assert good.seconds is not None
    assert good.seconds >= 0
    assert bad.fields["error"] == "ValueError: no"
    assert str(good).startswith("work in ")


def test_a_listener_is_a_function() -> None:
    """Said at once, and not at every event."""
    with pytest.raises(RegistrationError, match="a function of an event, not 3"):
        subscribe(3)  # type: ignore[arg-type]


def test_listeners_cannot_do_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Listeners hear every event until they are undone; one that raises is logged and changes nothing."""
    heard: list[Event] = []

    def bad(event: Event) -> None:
        raise RuntimeError("listener")

    undo = [subscribe(bad), subscribe(heard.append)]
    try:
        event = EventLog().emit("x")
    finally:
        for u in undo:
            u()
    EventLog().emit("y")

    assert heard == [event]
    assert "a listener failed on x" in caplog.text


def test_a_fallback_is_an_event_of_its_own_type(caplog: pytest.LogCaptureFixture) -> None:
    """Who listens knows it by its type, and has what failed as attributes."""
    log, heard = EventLog(), []
    undo = subscribe(heard.append)
    try:
        log.emit("a.b")
        event = log.fallback(cluster="c_0", engine="xla", stage="run", kind="raised", error="boom", failures=2)
    finally:
        undo()

    assert [e for e in heard if isinstance(e, FallbackEvent)] == [event]
    assert (event.cluster, event.engine, event.stage) == ("c_0", "xla", "run")
    assert (event.kind, event.error) == ("raised", "boom")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "fallback cluster=c_0 engine=xla stage=run kind=raised error=boom failures=2"
    ]
