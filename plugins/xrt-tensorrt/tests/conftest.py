"""Fixtures: the engine, building for a GPU that is not there."""

from __future__ import annotations

import pytest
from xrt_tensorrt import TensorRTEngine


@pytest.fixture(scope="session")
def engine() -> TensorRTEngine:
    """The engine for sm_89; skips where no TensorRT is installed that builds without a GPU."""
    from xrt_tensorrt import _toolkit

    try:
        _toolkit.toolkit()
    except _toolkit.ToolkitError as e:
        pytest.skip(str(e))
    return TensorRTEngine().targeting("sm_89")


@pytest.fixture
def gpu() -> None:
    """Skips where TensorRT cannot run."""
    status = TensorRTEngine().probe()
    if not status.available:
        pytest.skip(f"tensorrt cannot run here: {status.reason}")
