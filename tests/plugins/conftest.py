"""Packages in a folder of their own, installed for one test."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from xrt_core.engine import engines
from xrt_core.options import process_config


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder for packages that this process finds as if pip had installed them, beside those that are installed."""
    monkeypatch.delenv("XRT_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    engines.refresh()
    yield tmp_path
    process_config.reset()
    monkeypatch.undo()
    engines.refresh()

