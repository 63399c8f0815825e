"""What tests of compiled graphs share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """The graphs that `xrt_torch.graphs` tells of are the test's own, whatever a test before it left."""
    import torch
    from xrt_torch import compiled

    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled.known.clear()
    yield
    torch._dynamo.reset()
    gc.collect()
