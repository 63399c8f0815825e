"""Fixtures: one engine for all tests, and a skip for those that need a GPU."""

from __future__ import annotations

import pytest
from xrt_toy import ToyEngine


@pytest.fixture(scope="session")
def engine() -> ToyEngine:
    return ToyEngine()


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips where there is no CUDA GPU, or the simulator stands in for it."""
    from xrt_toy import _toolkit

    if _toolkit.SIMULATED or not _toolkit.GPUS:
        pytest.skip("no CUDA GPU here")
