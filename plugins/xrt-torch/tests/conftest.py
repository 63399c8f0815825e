"""What tests of compiled graphs share."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """The graphs that `xrt_torch.graphs` tells of are the test's own, whatever a test before it left."""
    import torch
    from xrt_torch import background, compiled

    torch.manual_seed(0)
    until = time.monotonic() + 60
    while background.is_busy() and time.monotonic() < until:
        time.sleep(0.01)
    torch._dynamo.reset()
    compiled.known.clear()
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """The events of all logs, during a test."""
    import xrt_core as xrt

    found: list[Any] = []
    undo = xrt.subscribe(found.append)
    yield found
    undo()
