"""ONNX's own node tests through XRT as an ONNX backend: on the host alone, and on XLA with the host behind it."""

from __future__ import annotations

import pathlib

import pytest

from tests.conformance.node_tests import Outcome, node_tests, run_test

pytestmark = pytest.mark.slow

_LIST = pathlib.Path(__file__).with_name("expected_failures.txt")
_outcomes: dict[str, Outcome] = {}


def expected_failures() -> dict[str, str]:
    """Test name -> reason, from the list beside this file."""
    lines = [x for x in _LIST.read_text().splitlines() if x and not x.startswith("#")]
    return {name: reason.strip() for name, _, reason in (x.partition(":") for x in lines)}


def _check(name: str, outcome: Outcome) -> None:
    reason = expected_failures().get(name)
    if reason is None:
        assert outcome.passed, outcome.error
    elif "bernoulli" not in name:  # ten draws of 0 or 1 are the stored ones now and then
        assert not outcome.passed, f"{name} passes now: take it off the list ({reason})"


def test_the_list_of_failures_is_short_and_reasoned() -> None:
    """At most ten tests are given up, each for a reason, and each exists."""
    listed = expected_failures()

    assert len(listed) <= 10
    assert all(len(reason) > 10 for reason in listed.values())
    assert set(listed) <= set(node_tests())


@pytest.mark.parametrize("name", sorted(node_tests()))
def test_on_the_host(name: str) -> None:
    """The host alone gives what ONNX expects."""
    _check(name, run_test(node_tests()[name], "host"))


def _by_day() -> list[object]:
    """All tests by night; by day one in four: the kernels run all of them in tests/kernels/test_backend.py."""
    marks = [pytest.mark.nightly if i % 4 else () for i in range(len(node_tests()))]
    return [pytest.param(n, marks=m) for n, m in zip(sorted(node_tests()), marks, strict=True)]


@pytest.mark.parametrize("name", _by_day())
def test_on_xla(name: str) -> None:
    """XLA, with the host behind it, gives what ONNX expects."""
    pytest.importorskip("xrt_xla", reason="the XLA engine is not installed")
    outcome = _outcomes[name] = run_test(node_tests()[name], ["xla"])
    _check(name, outcome)


@pytest.mark.nightly
def test_static_numeric_tests_run_on_the_engine() -> None:
    """Of the tests that have static numeric tensors only, at least 90 % leave no node on the host."""
    if len(_outcomes) < len(node_tests()):
        pytest.skip("looks at the outcomes of test_on_xla, which did not all run")
    static = [o for o in _outcomes.values() if o.static]
    clean = [o for o in static if o.passed and not o.host]

    assert len(clean) >= 0.9 * len(static)
