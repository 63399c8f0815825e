"""docs/gradients.md says what the code and the cases do."""

from __future__ import annotations

from tests.training import table
from tests.training.table import DIRECTED, PAGE, how, page, schemas


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.training.table` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_gradient_is_tested() -> None:
    """Each operator with a gradient has cases, or is in the file that the page names."""
    cases = table.tested()
    left = [n for n in schemas() if how(n) not in ("", "ends") and n not in cases and n not in DIRECTED]
    assert not left
    for name, file in DIRECTED.items():
        assert f"{name}(" in (PAGE.parents[1] / "tests" / "training" / file).read_text(encoding="utf-8")
