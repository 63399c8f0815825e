"""What every test runs under."""

from __future__ import annotations

import os
import pathlib

import pytest

os.environ.setdefault("XRT_VERIFY", "1")  # the graph is held against the IR's rules after every stage
os.environ.setdefault("XRT_PRUNE", "0")  # tensors of tests are so small that hardly any cluster of theirs would pay
for _name in [n for n in os.environ if n.startswith("FLAGS_") or n == "XRT_DISABLE_PLUGINS"]:
    del os.environ[_name]  # a developer's own switches must not decide what the tests see


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's own cache, child processes included."""
    os.environ["XRT_CACHE_DIR"] = str(tmp_path_factory.mktemp("xrt-cache"))
    for name in ("XRT_CACHE_MODE", "XRT_CACHE_SIZE"):
        os.environ.pop(name, None)


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache folder for one test, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XRT_CACHE_DIR", str(folder))
    return folder
