"""The garbage collector while XRT builds graphs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from xrt_core.engine.boundary import changed, snapshot
from xrt_core.ir.garbage_collection import collector_paused, is_usually_on
from xrt_core.testing.processes import run_python


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_off_until_the_last_body_ends() -> None:
    """Bodies may overlap in any order, and end with an error."""
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    assert not gc.isenabled()
    assert is_usually_on()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    """It is the program's to turn on."""
    gc.disable()
    with collector_paused():
        assert not is_usually_on()
    assert not gc.isenabled()


def test_it_is_no_change_of_an_engines() -> None:
    """An engine that is examined while another thread loads a model has changed nothing; what it turns off is found."""
    before = snapshot()
    with collector_paused():
        assert not [a.name for a in changed(before, snapshot()) if "garbage" in a.name]
        during = snapshot()
    assert not [a.name for a in changed(during, snapshot()) if "garbage" in a.name]
    gc.disable()
    assert "the garbage collector" in [a.name for a in changed(before, snapshot())]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process forks here")
def test_a_process_forked_meanwhile_collects() -> None:
    """Its bodies are the parent's."""
    run_python("""
        import gc, os
        from xrt_core.ir.garbage_collection import collector_paused

        with collector_paused():
            child = os.fork()
            if not child:
                os._exit(int(not gc.isenabled()))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
