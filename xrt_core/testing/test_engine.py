"""The suite for the engine that `--xrt-engine` names: `pytest --xrt-engine NAME --pyargs xrt_core.testing`."""

from __future__ import annotations

from xrt_core.testing.robustness_tests import RobustnessTests
from xrt_core.testing.suite import ConformanceSuite


class TestEngine(ConformanceSuite):
    """The contract and the operators, for the engine of the command line."""


class TestRobustness(RobustnessTests):
    """Planted faults and mutated models, for the engine of the command line."""
