"""BLAS threads are limited while a body lasts, and set back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import threadpoolctl

from xrt_core.host import blas_threads
from xrt_core.host.blas_threads import fewer_blas_threads


def count() -> int:
    """The threads of NumPy's BLAS."""
    return max(x.num_threads for x in LIBRARIES)


LIBRARIES = [x for x in threadpoolctl.ThreadpoolController().lib_controllers if x.user_api == "blas"]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A BLAS with four threads, of which two are half."""
    if not LIBRARIES:
        pytest.skip("NumPy's BLAS is none that threadpoolctl knows")
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


def test_what_others_set_meanwhile_stays() -> None:
    """A limit that is not ours any more is not touched."""
    with fewer_blas_threads():
        for x in LIBRARIES:
            x.set_num_threads(3)
    assert count() == 3


def test_fewer_are_not_made_more() -> None:
    """A process that was told to use one thread goes on with one."""
    with threadpoolctl.threadpool_limits(1, "blas"), fewer_blas_threads():
        assert count() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_has_all() -> None:
    """No body goes on there."""
    with fewer_blas_threads():
        child = os.fork()
        if child == 0:
            os._exit(count())
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert count() == 2
