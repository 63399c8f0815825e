"""Errors of results relative to a budget, and the option that says it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xrt_core.accuracy.error import error_of, used
from xrt_core.accuracy.regions import choose, regions_of
from xrt_core.errors import OptionError
from xrt_core.ir.graph import Node, Value
from xrt_core.options import resolve
from xrt_core.options.accuracy import Accuracy

X = np.array([0.0, 2.0, -4.0, 1.0], np.float32)


def test_criteria() -> None:
    """The largest difference over the largest element, or the roots of the mean squares."""
    off = X + np.array([0.0, 0.0, 0.0, 0.4], np.float32)
    assert error_of(off, X, "max") == pytest.approx(0.1)
    assert error_of(off, X, "rms") == pytest.approx(0.4 / math.sqrt(21.0))
    assert error_of(X, X, "max") == error_of(X, X, "rms") == 0.0


def test_what_no_number_tells() -> None:
    """Another dtype, shape, infinity or NaN is infinitely wrong; integers count elements that differ."""
    assert error_of(X.astype(np.float64), X, "max") == math.inf
    assert error_of(X[:3], X, "max") == math.inf
    broken = np.array([np.nan, np.inf, 1.0, 2.0], np.float32)
    assert error_of(broken, broken, "max") == 0.0
    assert error_of(X, broken, "max") == error_of(broken, X, "rms") == math.inf
    assert error_of(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), "max") == 0.25
    assert error_of(X, np.zeros(4, np.float32), "max") == math.inf
    assert error_of(X[:0], X[:0], "max") == 0.0


def test_the_worst_output_counts() -> None:
    """Each output against its own budget."""
    budget = Accuracy(0.1, outputs=(("b", 0.01),))
    assert used(budget, ("a", "b"), (X, X * 1.02), (X, X)) == pytest.approx(2.0, rel=1e-3)
    assert used(budget, ("a", "c"), (X, X * 1.02), (X, X)) == pytest.approx(0.2, rel=1e-3)


def test_the_option() -> None:
    """A number, or a mapping; in the environment as text."""
    assert resolve({"accuracy": 1e-2}).accuracy == Accuracy(0.01)
    given = {"error": 0.1, "criterion": "rms", "outputs": {"y": 1e-3}}
    assert resolve({"accuracy": given}).accuracy == Accuracy(0.1, "rms", (("y", 1e-3),))
    assert resolve({}, {"XRT_ACCURACY": "0.02"}).accuracy == Accuracy(0.02)
    assert resolve({}, {"XRT_ACCURACY": '{"error": 0.02, "criterion": "rms"}'}).accuracy == Accuracy(0.02, "rms")
    assert resolve({}, {}).accuracy is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "0 is no positive number"),
        (-1.0, "no positive number"),
        (math.nan, "no positive number"),
        (True, "it takes a positive number"),
        ("much", "it takes a positive number"),
        ({"error": 1, "norm": 2}, "there is no 'norm'"),
        ({"error": 1, "criterion": "l1"}, "'max' or 'rms'"),
        ({"criterion": "rms"}, "does not say the error"),
        ({"error": 1, "outputs": 3}, "outputs is no mapping"),
    ],
)
def test_bad_budgets(given: object, said: str) -> None:
    """Each error says what it takes."""
    with pytest.raises(OptionError, match="option 'accuracy'") as e:
        resolve({"accuracy": given})
    assert said in str(e.value)


def products(count: int) -> list[Node]:
    x = Value("x")
    return [Node("MatMul", [x, x], [Value(f"y{i}")], version=13, name=f"n{i}") for i in range(count)]


def test_regions_have_about_the_same_work() -> None:
    """In order, none empty, at most sixteen."""
    nodes = products(40)
    work = {n.name: 1 + i % 3 for i, n in enumerate(nodes)}
    regions = regions_of(nodes, work)
    assert [n for r in regions for n in r] == nodes
    assert len(regions) <= 16
    sums = [sum(work[n.name] for n in r) for r in regions]
    assert max(sums) <= 2 * min(sums) + 3
    assert len(regions_of(nodes[:3], {})) == 3


def test_the_choice_fills_the_budget() -> None:
    """Independent errors: what is left out is what costs most; the choice stays within the budget."""
    nodes = products(16)
    errors = {n: 0.05 * (i + 1) for i, n in enumerate(nodes)}

    def measure(taken: object) -> float:
        return math.sqrt(sum(errors[n] ** 2 for n in taken))  # type: ignore[attr-defined]

    taken = choose([(n,) for n in nodes], {n.name: 100 for n in nodes}, measure)
    assert measure(taken) <= 1.0
    assert measure([*taken, nodes[len(taken)]]) > 0.9
    assert list(taken) == nodes[: len(taken)]


def test_errors_that_add_up_are_found_out() -> None:
    """Where errors are not independent, the prediction is corrected by what sets were measured to use."""
    nodes = products(16)

    def measure(taken: object) -> float:
        return 0.1 * len(taken)  # type: ignore[arg-type]

    taken = choose([(n,) for n in nodes], {n.name: 100 for n in nodes}, measure)
    assert 5 <= len(taken) <= 10
    assert choose([(n,) for n in nodes], {}, lambda taken: math.inf) == ()
