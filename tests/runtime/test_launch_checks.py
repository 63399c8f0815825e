"""What a launch checks of its results at each run, and of its inputs where its caller has checked them."""

from __future__ import annotations

from types import SimpleNamespace
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


KEPT = np.ones(4, np.float32)


def _that(run: Any) -> Any:
    """An executable that runs so."""
    return SimpleNamespace(run=run)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda xs: [xs[0]], id="an input"),
        pytest.param(lambda xs: [xs[0][:]], id="a view of an input"),
        pytest.param(lambda xs: [KEPT], id="an array that the engine keeps"),
        pytest.param(lambda xs: [KEPT[:]], id="a view of that"),
        pytest.param(lambda xs: [np.zeros(8, np.float32)[::2]], id="not contiguous"),
        pytest.param(lambda xs: [np.broadcast_to(np.float32(1), 4)], id="read-only"),
    ],
)
def test_both_checks_as_one_function_copy_what_is_not_the_callers(run: Any) -> None:
    """As the two do, one after the other; and they see that an input is not written into."""
    x = _value("x", F, 4)
    check = LaunchCheck(_function([x], _apply("Neg", x)), "some")
    given = np.arange(4, dtype=np.float32)
    for call in (check.around(_that(run)), lambda arrays: check.results(run(check.inputs(arrays)))):
        (found,) = call([given])
        assert found.flags.carray
        assert not any(np.shares_memory(found, a) for a in (given, KEPT))


def test_both_checks_as_one_function() -> None:
    """A fresh result comes as it is, also in a tuple's place or among several; inputs are read-only; what does not fit
    is refused; results that somebody else has as well are copied."""
    x = _value("x", F, 4)
    check = LaunchCheck(_function([x], _apply("Neg", x)), "some")
    made: list[int] = []

    def fresh(xs: Any) -> Any:
        assert not xs[0].flags.writeable
        result = xs[0] + 1
        made.append(id(result))
        return [result]

    given = np.zeros(4, np.float32)
    assert id(check.around(_that(fresh))([given])[0]) == made[0]
    assert id(check.around(_that(lambda xs: tuple(fresh(xs))))([given])[0]) == made[1]
    held: list[np.ndarray] = []

    def shared(xs: Any) -> Any:
        held[:] = [xs[0] + 1]
        return held

    (found,) = check.around(_that(shared))([given])
    assert not np.shares_memory(found, held[0])
    for bad in ([np.zeros(3, np.float32)], [np.zeros(4)], [], None, [given, given]):
        with pytest.raises(WrongResults):
            check.around(_that(lambda xs, bad=bad: bad))([given])
    both = LaunchCheck(_function([x], _apply("Split", x, outputs=2, num_outputs=2)), "some")
    results = both.around(_that(lambda xs: [xs[0][:2] + 1, xs[0][2:] + 1]))([given])
    assert [r.base is None and r.flags.carray for r in results] == [True, True]


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
