"""Time limits, cancellation, and a shutdown that waits for native code and for nothing else."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tests.guard.guarded import eventually, timed_calls_end
from xrt_core.guard import timeouts
from xrt_core.guard.timeouts import (
    BackgroundTask,
    CallTimeout,
    Cancelled,
    TimedCaller,
    call_with_timeout,
    check_cancelled,
    current_task,
    running,
    suspended,
)


def test_a_call_returns_or_raises_what_it_does() -> None:
    """Within its limit."""
    assert call_with_timeout(60.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(60.0, divmod, 7, 0)
    with pytest.raises(SystemExit):
        call_with_timeout(60.0, sys.exit, 3)


def test_a_call_that_exceeds_its_limit_is_abandoned() -> None:
    """Its thread ends when the call comes back after all."""
    go = threading.Event()
    with timed_calls_end():
        with pytest.raises(CallTimeout, match=r"0\.05 s"):
            call_with_timeout(0.05, go.wait, 60)
        go.set()


def test_threads_are_used_again() -> None:
    """One thread serves calls one after another."""
    caller: TimedCaller[int] = TimedCaller(60.0)
    assert len({caller(threading.get_ident) for _ in range(5)}) == 1
    caller.close()


def test_threads_end_with_their_caller() -> None:
    """A launch that is dropped without being closed leaves no thread waiting."""
    caller: TimedCaller[int] = TimedCaller(60.0)
    number = caller(threading.get_ident)
    assert number in {t.ident for t in threading.enumerate()}
    del caller
    assert eventually(lambda: number not in {t.ident for t in threading.enumerate()})


def test_a_limit_stands_still_while_the_call_is_suspended() -> None:
    """Waiting for a worker does not count, what comes after it does."""
    waited, go = threading.Event(), threading.Event()

    def waits() -> str:
        with suspended():
            waited.set()
            go.wait(60)
        return "done"

    def hangs() -> None:
        waits()
        threading.Event().wait(60)

    releases = threading.Thread(target=lambda: (waited.wait(60), time.sleep(0.7), go.set()))
    releases.start()
    assert call_with_timeout(0.5, waits) == "done"
    releases.join()
    with pytest.raises(CallTimeout):
        call_with_timeout(0.5, hangs)


def test_only_background_tasks_are_cancelled() -> None:
    """Work that a caller waits for goes on."""
    check_cancelled()
    wanted = True
    task = BackgroundTask(None, lambda: wanted)
    with running(task):
        assert current_task() is task
        check_cancelled()
        wanted = False
        with pytest.raises(Cancelled):
            check_cancelled()
    assert current_task() is None
    check_cancelled()


@pytest.fixture
def shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is taken back at the end."""
    monkeypatch.setattr(timeouts, "_shutdown", False)


@pytest.mark.usefixtures("shutdown")
def test_shutdown_waits_for_a_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it returns, within a limit; none begins after that."""
    entered, go = threading.Event(), threading.Event()

    def native() -> None:
        with timeouts.native_call():
            entered.set()
            go.wait(60)

    t = threading.Thread(target=native, daemon=True)
    t.start()
    assert entered.wait(60)
    monkeypatch.setattr(timeouts, "_SHUTDOWN_SECONDS", 0.05)
    timeouts._wait_for_native_calls()  # it hangs: given up
    assert timeouts._native_calls == 1
    with pytest.raises(Cancelled), timeouts.native_call():
        raise AssertionError("no native call begins after shutdown has")
    monkeypatch.setattr(timeouts, "_SHUTDOWN_SECONDS", 60.0)
    waiting = threading.Thread(target=timeouts._wait_for_native_calls)
    waiting.start()
    go.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert eventually(lambda: timeouts._native_calls == 0)


@pytest.mark.usefixtures("shutdown")
def test_shutdown_does_not_wait_for_a_suspended_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a worker is outside of native code, and goes no further."""
    monkeypatch.setattr(timeouts, "_SHUTDOWN_SECONDS", 60.0)
    start = time.monotonic()
    with pytest.raises(Cancelled), timeouts.native_call(), suspended():
        timeouts._wait_for_native_calls()
    assert time.monotonic() - start < 30
    assert timeouts._native_calls == 0
