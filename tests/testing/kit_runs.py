"""Runs the kit's tests one by one against an engine, without pytest's collection, and says which of them fail."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from xrt_core.engine.contract import Engine
from xrt_core.testing import ConformanceSuite
from xrt_core.testing.subject import Subject, spec_of

OTHER_PROCESSES = frozenset(
    (
        "test_listing_does_not_import_it", "test_importing_it_does_not_import_its_library",
        "test_without_its_library_it_says_what_to_install", "test_fingerprint_is_the_same_everywhere",
        "test_serialises_for_another_process",
    )
)  # fmt: skip
"""Tests that start a process each."""


def failing(engine: type[Engine], *only: str) -> dict[str, str]:
    """Test -> message, for each test of the kit that the engine fails; only: the tests to run.

    Without `only`: all but the cases of operators, and those that start processes or take a thousand runs.
    """
    subject = Subject(spec_of(engine))
    failed = {}
    left_out = OTHER_PROCESSES | {"test_memory_stays_level"}
    for name in only or [n for n in dir(ConformanceSuite) if n.startswith("test_") and n not in left_out]:
        for arguments in _arguments(getattr(ConformanceSuite, name)):
            try:
                getattr(ConformanceSuite(), name)(subject=subject, **arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as e:
                failed.setdefault(name, f"{type(e).__name__}: {e}")
    return failed


def _arguments(test: Any) -> Iterator[dict[str, Any]]:
    """Every combination of the test's own parameters; none for tests that need more of pytest than that."""
    marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
    names = [m.args[0] for m in marks]
    if set(inspect.signature(test).parameters) - {"self", "subject", *names}:
        return
    for values in itertools.product(*(m.args[1] for m in marks)):
        yield dict(zip(names, values, strict=True))
