"""ONNX's own node tests through ONNX Runtime and through OpenVINO, each with the host behind it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import pytest

from tests.conformance.node_tests import Outcome, node_tests, run_test
from tests.conformance.test_onnx_nodes import expected_failures

pytestmark = pytest.mark.slow

ENGINES: Final[Mapping[str, float]] = MappingProxyType({"onnxruntime": 0.75, "openvino": 0.42})
"""Engine -> the least share of the tests with static numeric tensors only that leave no node to the host."""

_GIVEN_UP: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("openvino", "test_dynamicquantizelinear_expanded"): (
            "a quotient is next to a tie, which OpenVINO's QuantizeLinear with a zero point rounds the other way"
        )
    }
)
_DAY = 4  # one test in 4 by day, all by night
_outcomes: dict[tuple[str, str], Outcome] = {}


def names() -> list[str]:
    """The tests that XRT passes at all, in order."""
    return sorted(node_tests().keys() - expected_failures().keys())


def _cases() -> list[Any]:
    marks = [pytest.mark.nightly if i % _DAY else () for i in range(len(names()))]
    return [pytest.param(n, marks=m) for n, m in zip(names(), marks, strict=True)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", _cases())
def test_on_an_engine(name: str, engine: str) -> None:
    """The engine, with the host behind it, gives what ONNX expects; a test that is given up still fails."""
    pytest.importorskip(f"xrt_{engine}", reason=f"the engine {engine} is not installed")
    pytest.importorskip(engine, reason="the engine's library is not installed")
    outcome = _outcomes[engine, name] = run_test(node_tests()[name], [engine])
    reason = _GIVEN_UP.get((engine, name))
    if reason is None:
        assert outcome.passed, outcome.error
    else:
        assert not outcome.passed, f"{name} passes on {engine} now: take it off the list ({reason})"


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_takes_its_share(engine: str) -> None:
    """What the engine refuses is run by the host and passes too, so the share of what it takes is held as well."""
    ran = [_outcomes[engine, n] for n in names() if (engine, n) in _outcomes]
    if len(ran) < len(names()):
        pytest.skip("looks at the outcomes of test_on_an_engine, which did not all run")
    static = [o for o in ran if o.static]
    clean = [o for o in static if o.passed and not o.host]
    assert len(clean) >= ENGINES[engine] * len(static)
