"""How many examples random tests try: HYPOTHESIS_PROFILE is `fast`, `default` or `thorough` (by night: all of them)."""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

SHARES: Final = {"fast": 0.05, "default": 0.25, "thorough": 1.0}
"""Profile -> the share of a test's examples that it tries."""
LEAST: Final = 10
"""Examples that every profile tries."""


def examples(count: int, **more: Any) -> settings:
    """Hypothesis's settings for a test that is worth `count` examples; more: further settings."""
    share = SHARES[os.environ.get("HYPOTHESIS_PROFILE", "default")]
    return settings(max_examples=min(count, max(LEAST, round(count * share))), deadline=None, **more)
