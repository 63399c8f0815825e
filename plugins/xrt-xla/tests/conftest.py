"""Fixtures: one engine for all tests; JAX's configuration must be as it was after each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from xrt_xla import XlaEngine

sys.path.insert(0, str(Path(__file__).parents[3]))  # the backend cases live with the core's tests


@pytest.fixture(scope="session")
def engine() -> XlaEngine:
    return XlaEngine()


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's own cache, child processes included."""
    os.environ["XRT_CACHE_DIR"] = str(tmp_path_factory.mktemp("xrt-cache"))


@pytest.fixture(autouse=True)
def _same_configuration() -> Iterator[None]:
    before = dict(jax.config.values)
    yield
    assert dict(jax.config.values) == before
