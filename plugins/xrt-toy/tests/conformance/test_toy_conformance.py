"""The conformance kit on this engine."""

from __future__ import annotations

from xrt_core.testing import ConformanceSuite


class TestToy(ConformanceSuite):
    engine = "toy"
