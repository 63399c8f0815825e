"""The suite for the engine that `--xrt-engine` names: `pytest --xrt-engine NAME --pyargs xrt_core.testing`."""

from __future__ import annotations

from xrt_core.testing.suite import ConformanceSuite


class TestEngine(ConformanceSuite):
    """Everything the kit has, against the engine of the command line."""
