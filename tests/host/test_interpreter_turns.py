"""The switch interval while XRT computes in Python beside its caller."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from xrt_core.host.interpreter_turns import shorter_turns


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_body_ends() -> None:
    """Bodies may overlap in any order."""
    first, second = shorter_turns(), shorter_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_an_error_in_the_body() -> None:
    """It passes through, and the interval is what it was."""
    with pytest.raises(ZeroDivisionError), shorter_turns():
        _ = 1 / 0
    assert sys.getswitchinterval() == pytest.approx(5e-3)


@pytest.mark.parametrize("own", [1e-2, 1e-5])
def test_what_somebody_sets_meanwhile_stays(own: float) -> None:
    """As does an interval that is shorter already."""
    with shorter_turns():
        sys.setswitchinterval(own)
    assert sys.getswitchinterval() == pytest.approx(own)
    with shorter_turns():
        assert sys.getswitchinterval() == pytest.approx(min(own, 2e-4))
    assert sys.getswitchinterval() == pytest.approx(own)
