"""What a launch checks of its results at each run, and of its inputs where its caller has checked them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.test_input_checks import _apply, _function, _value
from xrt_core.runtime.input_checks import input_checks
from xrt_core.runtime.launch import LaunchCheck, WrongResults

F = np.dtype(np.float32)


class Array:
    """An array of an engine's library, which counts how often it is asked for its shape."""

    asked = 0

    def __init__(self, *shape: int) -> None:
        self._shape, self.dtype = shape, F

    @property
    def shape(self) -> tuple[int, ...]:
        type(self).asked += 1
        return self._shape


class Other(Array):
    """Another class."""


def test_results_of_fixed_types_are_known_by_class_and_number() -> None:
    """After the first run shapes are not read again; another class or number is looked at in full."""
    x = _value("x", F, 4)
    check = LaunchCheck(_function([x], _apply("Split", x, outputs=2, num_outputs=2)), "some")
    good = [Array(2), Array(2)]
    assert check.results(good) is good
    Array.asked = 0
    assert check.fixed_results(good) is good
    assert Array.asked == 0
    for bad in ([Array(2)], [Array(2), Other(3)], [Array(2), np.zeros(3, np.float32)], None):
        with pytest.raises(WrongResults):
            check.fixed_results(bad)
    shared = np.zeros(2, np.float32)
    found: Any = check.fixed_results([Array(2), shared])
    assert found[1] is not shared


def test_indices_that_the_caller_has_checked_are_not_checked_again() -> None:
    """NumPy's arrays, which callers check; those of other libraries are."""
    from xrt_core.training.checks import IndexRange, without_checked

    table, rows = _value("table", F, 4, 2), _value("rows", np.dtype(np.int64), 3)
    checks = input_checks(_function([table, rows], _apply("Gather", table, rows)))
    assert checks is not None
    arrays = [np.zeros((4, 2), np.float32), np.array([0, 1, 9])]
    assert checks.violates(arrays)

    def after(at: int = 7, low: int = -4, high: int = 4, scale: int = 1) -> Any:
        return without_checked(checks, (3, 7), [IndexRange(at, "rows", low, high, None, "node", scale)])

    assert not after().violates(arrays)
    for other in (after(at=3), after(low=-5), after(high=10), after(scale=2)):  # another input; wider than the node's
        assert other.violates(arrays)
    jnp = pytest.importorskip("jax.numpy")
    assert after().violates([arrays[0], jnp.array([0, 1, 9])])
    assert without_checked(None, (3, 7), []) is None
