"""docs/gradients.md says what the code and the cases do."""

from __future__ import annotations

import pytest

from tests.training.table import PAGE, page


@pytest.mark.nightly
def test_the_page_is_up_to_date() -> None:
    """`python -m tests.training.table` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
