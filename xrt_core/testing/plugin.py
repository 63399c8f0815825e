"""The pytest plugin: its options, and nothing else until a suite is collected."""

from __future__ import annotations

import pytest

for _name in ("contract_tests", "execution_tests", "operator_tests", "robustness_tests", "tolerance"):
    pytest.register_assert_rewrite(f"xrt_core.testing.{_name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the kit."""
    group = parser.getgroup("xrt", "XRT conformance kit")
    group.addoption(
        "--xrt-engine",
        metavar="NAME",
        help="the engine that `--pyargs xrt_core.testing` tests: its name, or module:Class of one not installed",
    )
    group.addoption("--xrt-device", metavar="NAME", help="the device to run on, such as cuda:1; the engine's first")
    group.addoption("--xrt-scorecard", metavar="FILE", help="write the score card of every engine tested as JSON")
    group.addoption("--xrt-lists", metavar="FOLDER", help="where unsupported.txt and xfails.txt of that engine are")
    group.addoption("--xrt-fuzz", metavar="NUMBER", type=int, default=0, help="run so many mutated models on it")
    group.addoption("--xrt-full", action="store_true", help="run every case of the kit, not only the sample (minutes)")


def pytest_configure(config: pytest.Config) -> None:
    """Score cards also where other processes run the tests, if one is asked for."""
    if config.getoption("--xrt-engine") or config.getoption("--xrt-scorecard"):
        from xrt_core.testing.scorecard import recorder

        recorder(config)
