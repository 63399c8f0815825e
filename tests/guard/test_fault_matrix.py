"""The fault matrix: a sample of every sort in this process; nightly the whole, in processes that it may end."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

from tests.guard import fault_matrix
from tests.guard.fault_matrix import FILE, PAGE, Cell, as_page, as_text, cells, examine, faulty_package, run
from tests.guard.guarded import eventually, gone, leftovers
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import process_pool
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.testing.stage_faults import ISOLATED, LATE_PROCESS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")

EXPECTED = json.loads(FILE.read_text(encoding="utf-8"))
SAMPLE = [
    Cell(*c)
    for c in (
        ("import_raises_interrupt", "unguarded", 1), ("import_raises_unprintable", "unguarded", 1),
        ("import_changes_rounding", "unguarded", 1), ("construct_raises_long", "unguarded", 1),
        ("attribute_returns_int", "unguarded", 1), ("fingerprint_raises_group", "unguarded", 1),
        ("supports_raises_stop_iteration", "unguarded", 1), ("compile_raises_system_exit", "unguarded", 1),
        ("serialize_returns_none", "sync", 1), ("load_returns_text", "sync", 1),
        ("late_run_raises_interrupt", "unguarded", 4),
        ("first_run_reuses", "unguarded", 4), ("late_run_input_view", "sync", 4), ("late_run_wrong_order", "sync", 1),
        ("array_raises_unprintable", "unguarded", 1), ("shape_raises_interrupt", "sync", 1),
        ("length_raises", "unguarded", 1), ("run_threads", "sync", 4), ("run_nan", "background", 4),
        ("first_run_wrong_output", "sync", 1), ("first_run_nan", "sync", 4),
        # a worker that ends costs a second until the next one has started
        ("import_crashes", "sync", 1), ("late_run_segfaults", "isolated", 4),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_in_a_process_of_cells(monkeypatch: pytest.MonkeyPatch, own_cache: pathlib.Path) -> Iterator[None]:
    """Late faults are hit here; nothing is known from an earlier cell, and no engine but the faulty one is there."""
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))
    forget_all()
    yield
    forget_all()


def test_the_matrix_is_whole() -> None:
    """Every cell has its place in the file."""
    assert {(f, c) for f, row in EXPECTED.items() for c in row} == {(c.fault, c.column) for c in cells()}


def test_the_page_shows_the_matrix() -> None:
    """docs/guard-internals.md holds the tables as `python -m tests.guard.fault_matrix` writes them."""
    assert as_page(EXPECTED) in PAGE.read_text(encoding="utf-8")


def test_guarded_callers_get_the_hosts_numbers() -> None:
    """In every guarded cell: but where a process ends in which the engine ran for good, and then in the next one, and
    where numbers become wrong late, and only until a comparison."""
    for fault, row in EXPECTED.items():
        for column, text in row.items():
            mode, got = column.partition("/")[0], text.partition(";")[0]
            if mode == "unguarded" or got == fault_matrix.RIGHT:
                continue
            if got in (fault_matrix.UNTIL, fault_matrix.EITHER):
                assert fault.startswith("late_run_") or fault == "first_run_threads"
            else:
                assert text.startswith(f"{fault_matrix.ENDED}; then {fault_matrix.RIGHT}"), (fault, column)
                assert mode != "isolated"


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=pytest.mark.slow if c.threads > 1 else ()) for c in SAMPLE],
    ids=lambda c: f"{c.fault}-{c.column}",
)
def test_cells(cell: Cell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller gets, how the cluster ends, and what is told; no process and no file is left."""
    monkeypatch.setenv(LATE_PROCESS, ISOLATED if cell.mode == "isolated" else str(os.getpid()))
    before = set(process_pool().pids())
    with faulty_package(cell, tmp_path):
        found = examine(cell)
    assert as_text(found) == EXPECTED[cell.fault][cell.column]
    assert gone(sorted(before - set(process_pool().pids())))
    assert eventually(lambda: leftovers() == [])  # a search for the faulty nodes may be ending


@pytest.mark.nightly
@pytest.mark.parametrize("mode", fault_matrix.MODES)
def test_all_cells(mode: str) -> None:
    """The whole, in processes of their own."""
    wrong = []

    def told(cell: Cell, found: dict[str, object]) -> None:
        text = as_text(found)
        if text != EXPECTED[cell.fault][cell.column]:
            wrong.append(f"{cell.fault} {cell.column}: {text}, expected {EXPECTED[cell.fault][cell.column]}")

    run([c for c in cells() if c.mode == mode], max(1, (os.cpu_count() or 1) // 2), told)
    assert not wrong, "\n".join(wrong)
