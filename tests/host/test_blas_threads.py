"""BLAS threads are limited while a body lasts, and set back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import threadpoolctl

from tests.guard.guarded import eventually
from xrt_core.guard.sampling import ComparisonThread
from xrt_core.host import blas_threads
from xrt_core.host.blas_threads import fewer_blas_threads, fewer_on_busy_machine
from xrt_core.testing.processes import run_python


def count() -> int:
    """The threads of NumPy's BLAS."""
    return max(x.num_threads for x in LIBRARIES)


LIBRARIES = [x for x in threadpoolctl.ThreadpoolController().lib_controllers if x.user_api == "blas"]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A BLAS with four threads, of which two are half."""
    if not LIBRARIES:
        pytest.skip("NumPy's BLAS is none that threadpoolctl knows")
    assert eventually(lambda: not blas_threads._wanted)  # a build of an earlier test may be ending
    monkeypatch.setattr(blas_threads, "_half", lambda: 2)
    with threadpoolctl.threadpool_limits(4, "blas"):
        if count() != 4:
            pytest.skip("this BLAS was built for fewer threads")
        yield


def test_overlapping_bodies() -> None:
    """The last one sets it back."""
    first, second = fewer_blas_threads(), fewer_blas_threads()
    first.__enter__()
    assert count() == 2
    second.__enter__()
    first.__exit__(None, None, None)
    assert count() == 2
    second.__exit__(None, None, None)
    assert count() == 4


def test_bodies_on_two_threads() -> None:
    """The thread that set it may not be the one that sets it back."""
    body = fewer_blas_threads()
    for call in (body.__enter__, lambda: body.__exit__(None, None, None)):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert count() == (2 if call == body.__enter__ else 4)
    first, second = fewer_blas_threads(1), fewer_blas_threads()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert count() == 2
    ended = threading.Thread(target=second.__exit__, args=(None, None, None))
    ended.start()
    ended.join()
    assert count() == 4


def test_the_fewest_count() -> None:
    """A body that allows one thread, within one that allows more, and the other way round."""
    with fewer_blas_threads():
        with fewer_blas_threads(1):
            assert count() == 1
        assert count() == 2
    inner = fewer_blas_threads(3)
    with fewer_blas_threads(1):
        inner.__enter__()
        assert count() == 1
    assert count() == 3
    inner.__exit__(None, None, None)
    assert count() == 4


def test_what_others_set_meanwhile_stays() -> None:
    """A limit that is not ours any more is not touched."""
    with fewer_blas_threads():
        for x in LIBRARIES:
            x.set_num_threads(3)
    assert count() == 3


def test_a_signal_before_the_body_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal's handler raises while the limit is being set ends it."""

    def interrupted(most: int) -> None:
        raise KeyboardInterrupt

    body = fewer_blas_threads()
    with monkeypatch.context() as patch:
        patch.setattr(blas_threads, "_limit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            body.__enter__()
    assert not blas_threads._wanted
    assert count() == 4


def test_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer threads are used where more wants to run than there are processors, and only there."""
    processors = os.cpu_count() or 1
    for load, wanted in ((processors + 0.5, 2), (processors - 0.5, 4)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        with fewer_on_busy_machine():
            assert count() == wanted
        assert count() == 4


def test_comparisons_leave_no_thread_that_spins() -> None:
    """The host's runs in the background, however short, use one thread."""
    thread, seen = ComparisonThread(), list[int]()
    assert thread.submit(lambda: seen.append(count()))
    thread.wait()
    assert seen == [1]
    assert eventually(lambda: count() == 4)


def test_another_number_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set is set back, also where half of the processors is another number by then."""
    with fewer_blas_threads():
        monkeypatch.setattr(blas_threads, "_half", lambda: 1)
    assert count() == 4


def test_libraries_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body runs with all threads, and later ones are limited again."""
    with monkeypatch.context() as patch:
        patch.setattr(blas_threads, "_libraries", [])
        patch.setattr(threadpoolctl, "ThreadpoolController", lambda: 1 // 0)
        with fewer_blas_threads():
            assert count() == 4
    with fewer_blas_threads():
        assert count() == 2
    assert count() == 4


def test_fewer_are_not_made_more() -> None:
    """A process that was told to use one thread goes on with one."""
    with threadpoolctl.threadpool_limits(1, "blas"), fewer_blas_threads():
        assert count() == 1


FORK = """
    import os
    import numpy
    from threadpoolctl import ThreadpoolController, threadpool_limits
    from xrt_core.host import blas_threads

    blas_threads._half = lambda: 2
    libraries = [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]
    count = lambda: max(x.num_threads for x in libraries)
    with threadpool_limits(4, "blas"), blas_threads.fewer_blas_threads():
        child = os.fork()
        if child == 0:
            os._exit(count())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_has_all() -> None:
    """No body goes on there; in a process without libraries that warn of forks."""
    assert run_python(FORK) == "4 2"
