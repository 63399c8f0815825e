"""Fixtures of the kernel tests."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that gives every test the same numbers."""
    return np.random.default_rng(0)
