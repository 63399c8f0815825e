"""The switch interval while XRT computes in Python beside its caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from xrt_core.engine import interpreter_turns
from xrt_core.engine.boundary import changed, snapshot
from xrt_core.engine.interpreter_turns import shorter_turns
from xrt_core.testing.processes import run_python


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_body_ends() -> None:
    """Bodies may overlap in any order."""
    first, second = shorter_turns(), shorter_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_the_shortest_of_overlapping_bodies_holds() -> None:
    """And none is taken for a change by somebody else."""
    first, second = shorter_turns(), shorter_turns(1e-5)
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(1e-5, abs=2e-6)
    assert interpreter_turns.usual_interval() == pytest.approx(5e-3)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(2e-4, abs=2e-6)
    assert interpreter_turns.usual_interval() == pytest.approx(5e-3)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(5e-3, abs=2e-6)


def test_an_error_in_the_body() -> None:
    """It passes through, and the interval is what it was."""
    with pytest.raises(ZeroDivisionError), shorter_turns():
        _ = 1 / 0
    assert sys.getswitchinterval() == pytest.approx(5e-3)


@pytest.mark.parametrize("own", [1e-2, 1e-5])
def test_what_somebody_sets_meanwhile_stays(own: float) -> None:
    """As does an interval that is shorter already."""
    with shorter_turns():
        sys.setswitchinterval(own)
    assert sys.getswitchinterval() == pytest.approx(own)
    with shorter_turns():
        assert sys.getswitchinterval() == pytest.approx(min(own, 2e-4))
    assert sys.getswitchinterval() == pytest.approx(own)


@pytest.mark.parametrize("own", [2e-4, 1.99e-4, 3.33e-4, 1e-5])
def test_the_interval_does_not_drift(own: float) -> None:
    """It is kept in whole microseconds, rounded down."""
    sys.setswitchinterval(own + 5e-7)
    before = sys.getswitchinterval()
    for _ in range(5):
        with shorter_turns(), shorter_turns(1e-5):
            pass
    assert sys.getswitchinterval() == before


def test_it_is_no_change_of_an_engines() -> None:
    """What an engine leaves changed is found beside a body of another thread, and a body is not taken for it."""
    before = snapshot()
    with shorter_turns():
        assert not [a.name for a in changed(before, snapshot()) if "interval" in a.name]
        sys.setswitchinterval(0.01)
        assert "the switch interval" in [a.name for a in changed(before, snapshot())]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process forks here")
def test_the_last_body_may_end_while_the_interval_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short one was told, and held against an engine, or a test."""
    usual, body, lock = sys.getswitchinterval(), shorter_turns(), interpreter_turns._lock
    body.__enter__()

    class EndsTheBody:
        def __enter__(self) -> None:
            monkeypatch.setattr(interpreter_turns, "_lock", lock)
            body.__exit__(None, None, None)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(interpreter_turns, "_lock", EndsTheBody())
    assert interpreter_turns.usual_interval() == pytest.approx(usual)


def test_a_process_forked_meanwhile_has_the_usual_interval() -> None:
    """Its bodies are the parent's."""
    run_python("""
        import os, sys
        from xrt_core.engine.interpreter_turns import shorter_turns

        with shorter_turns():
            child = os.fork()
            if not child:
                os._exit(int(abs(sys.getswitchinterval() - 5e-3) > 1e-4))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
