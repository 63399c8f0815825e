"""Fixtures: one engine for all tests."""

from __future__ import annotations

import pytest
from xrt_onnxruntime import OnnxRuntimeEngine


@pytest.fixture(scope="session")
def engine() -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine()
