"""Fixtures: one engine for all tests."""

from __future__ import annotations

import pytest
from xrt_openvino import OpenVinoEngine


@pytest.fixture(scope="session")
def engine() -> OpenVinoEngine:
    return OpenVinoEngine()
