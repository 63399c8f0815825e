"""An interrupt at any moment of a call costs that call, and nothing after it."""

from __future__ import annotations

import math
import pathlib
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.guard.guarded import chain, eventually
from tests.training.test_whole_steps import interrupted
from xrt_core.engine import engines
from xrt_core.engine.boundary import changed, snapshot
from xrt_core.guard.launch import GuardedLaunch
from xrt_core.guard.sampling import SamplingSchedule
from xrt_core.guard.timeouts import TimedCaller
from xrt_core.module import XRTModule
from xrt_core.runtime.launch import _launches

ENGINES = ("onnxruntime", "xla", "openvino")
OPTIONS: dict[str, dict[str, Any]] = {
    "unguarded": {"guard": False},
    "guarded": {"guard": True, "guard_async": False, "guard_tune": False},
    "isolated": {"guard": "isolated", "guard_async": False, "guard_tune": False},
}
OURS = ("random's state", "NumPy's random state", "signal handlers")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
@pytest.mark.parametrize(
    ("engine", "mode", "count"),
    [
        ("host", "unguarded", 300),
        *(pytest.param(e, m, 5000, marks=pytest.mark.nightly) for e in ENGINES for m in OPTIONS),
    ],
)
def test_interrupts(engine: str, mode: str, count: int, own_cache: pathlib.Path) -> None:
    """The process is as before, nothing is left running or held, no fault is counted, and results are right."""
    if engine not in ("host", *engines.names()):
        pytest.skip(f"{engine} is not installed")
    graph, x, _ = chain()
    with XRTModule(graph, engine=engine, prune=False, **OPTIONS[mode]) as m:
        for _ in range(20):
            want = np.asarray(m(x))
        before, threads = snapshot(), threading.active_count()
        interrupted(count, lambda: m(x))
        state = [a.name for a in changed(before, snapshot()) if a.name not in OURS]
        assert not state
        assert eventually(lambda: threading.active_count() <= threads + 1)  # one that compares
        for _ in range(3):
            np.testing.assert_allclose(np.asarray(m(x)), want, rtol=1e-5)
        assert not m.explain().errors
        for launch in _launches:
            if isinstance(launch, GuardedLaunch) and launch.engine == engine:
                assert launch.note is None or not any(launch.note.flags)
                assert eventually(lambda one=launch: math.isfinite(one._schedule.due))


def test_a_comparison_that_was_interrupted_is_made_again() -> None:
    """The next call is compared; what another thread is at is left to it."""
    schedule = SamplingSchedule(None)
    assert schedule.is_due(0)
    thread = threading.Thread(target=schedule.release)
    thread.start()
    thread.join()
    assert not schedule.is_due(1)
    schedule.release()
    assert schedule.is_due(1)


def test_a_timed_call_that_was_interrupted_leaves_no_thread() -> None:
    """Its thread ends when the call does, as no one will read the result."""
    caller: TimedCaller[None] = TimedCaller(30.0)
    free, before = threading.Event(), threading.active_count()
    caller(int)

    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    thread = caller._idle.get_nowait()
    thread.results = type("Interrupted", (), {"get": interrupt})()
    caller._idle.put(thread)
    del thread
    with pytest.raises(KeyboardInterrupt):
        caller(free.wait, 30)
    free.set()
    assert eventually(lambda: threading.active_count() == before)
