"""Every injected fault, at every stage, in every mode: the host's numbers, the right event, no process or file left."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guard.fault_matrix import ISOLATED, MATRIX, as_markdown
from tests.guard.guarded import captured_events, chain, eventually, fallbacks, gone, leftovers, module, registered
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import process_pool
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.testing.stage_faults import ISOLATED as IN_ISOLATION
from xrt_core.testing.stage_faults import LATE_PROCESS, STAGE_FAULTS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")

QUICK_CELLS = [
    ("probe_crashes", "async", 4), ("supports_crashes", "async", 1), ("supports_hangs", "sync", 4),
    ("compile_raises", "async", 4), ("compile_crashes", "sync", 1), ("run_hangs", "sync", 4),
    ("run_wrong_numbers", "async", 4), ("late_run_raises", "sync", 4), ("late_run_wrong_shape", "async", 4),
    ("late_run_wrong_numbers", "sync", 1),
]  # fmt: skip
ALL_CELLS = [
    (fault, mode, threads)
    for fault in (f for f, cell in MATRIX.items() if cell.state != "-")
    for mode, threads in (("async", 4), ("sync", 1), ("async", 1), ("sync", 4))
    # a synchronous guard probes where its module is made, in the caller's process
    if (mode == "async" or not fault.startswith("probe"))
    # a worker that ends costs a second until the next one has started: one mode of each is enough
    and (fault, mode, threads) not in QUICK_CELLS
    and ((mode, threads) == ("async", 4) or fault.rpartition("_")[2] not in ("exits", "memory", "hangs", "crashes"))
]


@pytest.fixture(autouse=True)
def _this_process_is_late(monkeypatch: pytest.MonkeyPatch, own_cache: pathlib.Path) -> Iterator[None]:
    """Late faults are hit here; nothing is known from an earlier cell."""
    monkeypatch.setenv(LATE_PROCESS, str(os.getpid()))
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))  # for "auto"
    forget_all()
    yield
    forget_all()


def test_the_matrix_is_whole() -> None:
    """Every fault of the kit has its cell."""
    assert set(MATRIX) == set(STAGE_FAULTS)
    assert set(ISOLATED) == {f for f in STAGE_FAULTS if f.startswith("late_run")}


def test_the_page_shows_the_matrix() -> None:
    """docs/guard-internals.md holds the table as `python -m tests.guard.fault_matrix` prints it."""
    page = pathlib.Path(__file__, "../../../docs/guard-internals.md").resolve().read_text(encoding="utf-8")
    assert as_markdown() in page


@pytest.mark.parametrize(
    ("fault", "mode", "threads"),
    # a limit that runs out takes its seconds
    [pytest.param(*c, marks=pytest.mark.slow if c[0].endswith("hangs") else ()) for c in QUICK_CELLS],
)
def test_faults(fault: str, mode: str, threads: int) -> None:
    """A few cells of every sort."""
    check(fault, mode, threads)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "mode", "threads"), ALL_CELLS)
def test_all_faults(fault: str, mode: str, threads: int) -> None:
    """The others."""
    check(fault, mode, threads)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f == "late_run_crashes" else pytest.mark.nightly) for f in ISOLATED]
)
def test_isolated(fault: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables that are isolated may end their process as well."""
    monkeypatch.setenv(LATE_PROCESS, IN_ISOLATION)
    check(fault, "sync", threads, guard="isolated")


def check(fault: str, mode: str, threads: int, **more: Any) -> None:
    """Call a model on the faulty engine from several threads, until its clusters are settled."""
    graph, x, want = chain()
    expected = (ISOLATED if more else MATRIX)[fault]
    wrong: list[str] = []
    hangs = fault.endswith("hangs")
    limit = 2.5 if hangs and not fault.startswith("late") else 60.0
    before = set(process_pool().pids())
    with registered(STAGE_FAULTS[fault]), captured_events() as events:
        m = module(
            graph, "auto" if fault.startswith("probe") else fault, guard_async=mode == "async", guard_tune=False,
            guard_timeout=limit, guard_memory=300 << 20, guard_run_timeout=0.5 if hangs else 60.0,
            guard_shadow=int(fault == "late_run_wrong_numbers"), **more,
        )  # fmt: skip

        def call(k: int) -> None:
            for i in range(12):
                if not np.array_equal(m(x), want):
                    wrong.append(f"thread {k}, call {i}")
                m.wait(60)

        with m:
            workers = [threading.Thread(target=call, args=(k,)) for k in range(threads)]
            for t in workers:
                t.start()
            for t in workers:
                t.join(120)
                assert not t.is_alive()
            report = m.report()
    assert not wrong
    assert [c["state"] for c in report.clusters] == ([] if expected.state == "none" else [expected.state]), str(report)
    found = set(fallbacks(events))
    assert found == ({expected.event} if expected.event else set()), report.as_text()
    if ("compile", "crashed") in found or ("examine", "crashed") in found:
        assert "Fatal Python error: Aborted" in report.as_text() or "exit code 3" in report.as_text()
    assert gone(sorted(before - set(process_pool().pids())))
    assert len(process_pool().pids()) <= process_pool().size
    assert eventually(lambda: leftovers() == [])  # a search for the faulty nodes may be ending
