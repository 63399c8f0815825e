"""docs/onnx-operators.md says what the code does: a line for every operator, each as it is computed now."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conformance.table import ENGINES, HEAD, PAGE, operators, row

_CELLS = len(HEAD) - len(ENGINES)
_SAMPLE = 12


def listed() -> dict[str, list[str]]:
    """The page's lines by operator, as cells."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0]: cells for cells in rows if cells[0] != HEAD[0]}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_every_operator_has_its_line() -> None:
    """With its versions, what the host does, and its gradient."""
    want = {(made := cells(row(*o, wanted=())))[0]: made[:_CELLS] for o in operators()}
    assert {name: found[:_CELLS] for name, found in listed().items()} == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[pytest.mark.nightly] if i % _SAMPLE else []) for i in range(len(operators()))]
)
def test_what_engines_take(index: int) -> None:
    """The counts of each engine that is installed."""
    missing = [e for e in ENGINES if importlib.util.find_spec(f"xrt_{e}") is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    made = cells(row(*operators()[index]))
    assert listed()[made[0]] == made
