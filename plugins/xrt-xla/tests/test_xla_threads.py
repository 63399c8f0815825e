"""XLA's worker threads on processors of their own."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterator

import pytest
from xrt_xla.threads import place_workers

from xrt_core.testing.processes import run_python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are placed on Linux alone")


@pytest.fixture
def idle() -> Iterator[list[int]]:
    """The system's numbers of three threads of this process that wait; meanwhile it may use two processors."""
    before = os.sched_getaffinity(os.getpid())
    if len(before) < 2:
        pytest.skip("this process may use one processor only")
    for thread in {os.getpid(), threading.get_native_id()}:
        os.sched_setaffinity(thread, sorted(before)[:2])
    done, begun = threading.Event(), threading.Barrier(4)
    found: list[int] = []

    def wait() -> None:
        found.append(threading.get_native_id())
        begun.wait(60)
        done.wait(60)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for t in threads:
        t.start()
    begun.wait(60)
    yield sorted(found)
    done.set()
    for t in threads:
        t.join()
    for thread in {os.getpid(), threading.get_native_id()}:
        os.sched_setaffinity(thread, before)


def tasks(folder: pathlib.Path, names: dict[int, str]) -> pathlib.Path:
    """Threads by number and name, as Linux shows them."""
    folder.mkdir()
    for number, name in names.items():
        (folder / str(number)).mkdir()
        (folder / str(number) / "comm").write_text(f"{name}\n")
    return folder


def test_two_workers_lie_on_two_processors(tmp_path: pathlib.Path, idle: list[int]) -> None:
    """Other threads stay free; three workers, and workers that somebody has placed, stay where they are."""
    free = os.sched_getaffinity(0)
    a, b, c = idle
    assert not place_workers(tasks(tmp_path / "three", {a: "tf_XLAEigen", b: "tf_XLAEigen", c: "tf_XLAEigen"}))
    assert not place_workers(tasks(tmp_path / "one", {a: "tf_XLAEigen", b: "python", c: "python"}))
    assert not place_workers(tmp_path / "nowhere")
    assert all(os.sched_getaffinity(t) == free for t in idle)
    assert place_workers(tasks(tmp_path / "two", {a: "tf_XLAEigen", b: "tf_XLAEigen", c: "python"}))
    assert [os.sched_getaffinity(t) for t in idle] == [{min(free)}, {max(free)}, free]
    os.sched_setaffinity(a, {max(free)})
    assert not place_workers(tasks(tmp_path / "again", {a: "tf_XLAEigen", b: "tf_XLAEigen"}))
    assert os.sched_getaffinity(a) == {max(free)}


def test_the_threads_that_xla_has() -> None:
    """Of two processors each has one; with more, or fewer, they are where XLA left them. The caller stays free."""
    found = json.loads(
        run_python("""
            import json, os, pathlib
            import numpy as np
            from xrt_core.module import XRTModule
            from xrt_core.testing import functions

            before = sorted(os.sched_getaffinity(0))
            x, y = functions.value("x", 8, 8), functions.value("y", 8, 8)
            graph = functions.function("relu", [x], [functions.node("Relu", [x], [y])], [y]).body
            XRTModule(graph, engine="xla", guard=False, cache="off", prune=False)(np.ones((8, 8), np.float32))
            names = {t.name: (t / "comm").read_text().strip() for t in pathlib.Path("/proc/self/task").iterdir()}
            workers = [sorted(os.sched_getaffinity(int(t))) for t, name in names.items() if name == "tf_XLAEigen"]
            print(json.dumps([before, sorted(os.sched_getaffinity(0)), sorted(workers)]))
        """)
    )
    before, after, workers = found
    assert before == after
    assert workers
    placed = len(before) == len(workers) == 2
    assert workers == ([[p] for p in before] if placed else [before] * len(workers))
