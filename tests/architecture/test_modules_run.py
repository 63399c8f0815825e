"""What `--modules-run` counts; `nox -s fast` runs the fast tests with it."""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Iterator

import pytest

from tests.modules_run import ModulesRun


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A package of three modules: with a function, with one that its import calls, and with names alone."""
    root = tmp_path / "counted_package"
    root.mkdir()
    (root / "called.py").write_text("def f():\n    return 1\n")
    (root / "imported.py").write_text("def f():\n    return 1\n\nX = f()\n")
    (root / "names.py").write_text("NAMES = [n for n in 'ab']\n\n\nclass A:\n    x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield root
    for name in ("called", "imported", "names"):
        sys.modules.pop(f"counted_package.{name}", None)
    sys.modules.pop("counted_package", None)


def test_a_module_counts_when_a_function_of_it_runs(package: pathlib.Path) -> None:
    """Its import is not enough, whatever that calls; a module without functions need not run."""
    seen = ModulesRun(package)
    seen.start()
    try:
        called, _, _ = (importlib.import_module(f"counted_package.{n}") for n in ("called", "imported", "names"))
        assert seen.missing() == ["counted_package/called.py", "counted_package/imported.py"]
        called.f()
    finally:
        seen.stop()
    assert seen.missing() == ["counted_package/imported.py"]
