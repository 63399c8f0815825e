"""Gradients that finite differences do not hold as they stand: shared ones, statistics, sequences, optionals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import GradientError
from xrt_core.frontends import ops
from xrt_core.training import gradients

R = np.random.default_rng(0)


def slopes(f: Callable[..., Any], *arrays: np.ndarray, wrt: tuple[int, ...] = (0,)) -> list[np.ndarray]:
    """Gradients of the scalar that `f` gives, run by the whole pipeline on the host."""
    graph = xrt.trace(f, *arrays)
    made = gradients(graph, 0, [graph.inputs[i] for i in wrt])
    return list(xrt.XRTModule(made, engine="host")(*arrays)[1:])


@pytest.mark.parametrize("how", ["max", "min"])
def test_equal_updates_share(how: str) -> None:
    """Where the data and two updates are equal and win, each gets a third, as in PyTorch; where one wins, all."""
    x, u = np.array([1.0, 5.0, -5.0]), np.array([1.0, 1.0, 2.0])
    indices = np.array([0, 0, 1 if how == "min" else 2])

    def f(x: Any, u: Any) -> Any:
        y = ops.ScatterElements(x, indices, u, reduction=how)
        return (y * np.array([3.0, 2.0, 4.0])).sum()

    by_x, by_u = slopes(f, x, u, wrt=(0, 1))
    won = [0.0, 4.0] if how == "min" else [2.0, 0.0]
    np.testing.assert_allclose(by_x, [1.0, *won])
    np.testing.assert_allclose(by_u, [1.0, 1.0, 2.0 if how == "min" else 4.0])


def test_statistics_of_layer_normalization() -> None:
    """Gradients by all three outputs are those of the same written with means."""
    arrays = [R.standard_normal(s).astype(np.float32) for s in ((2, 3, 2), (3, 2), (3, 2))]

    def weighed(y: Any, mean: Any, inverse: Any) -> Any:
        return (y * y).sum() * 0.3 + (mean * mean).sum() + (inverse * inverse * inverse).sum()

    def composed(x: Any, s: Any, b: Any) -> Any:
        mean = x.mean((1, 2), keepdims=True)
        inverse = 1.0 / ops.Sqrt(((x - mean) ** 2).mean((1, 2), keepdims=True) + 1e-5)
        return weighed((x - mean) * inverse * s + b, mean, inverse)

    found = slopes(lambda *a: weighed(*ops.LayerNormalization(*a, axis=1, outputs=3)), *arrays, wrt=(0, 1, 2))
    for a, b in zip(found, slopes(composed, *arrays, wrt=(0, 1, 2)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    (alone,) = slopes(lambda *a: (ops.LayerNormalization(*a, axis=1, outputs=3)[2] ** 2.0).sum(), *arrays)
    assert np.abs(alone).max() > 0


def sequences() -> dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]]:
    """Functions with sequences and optionals, each with the same without."""

    def built(a: Any, b: Any) -> Any:
        s = ops.SequenceInsert(ops.SequenceConstruct(a, b), a * b, 1)
        return ops.SequenceAt(s, 1) * ops.SequenceAt(ops.SequenceErase(s, 0), -1)

    def split(a: Any, b: Any) -> Any:
        parts = ops.SplitToSequence(a, np.array([1, 2]), axis=0)
        first, rest = (ops.SequenceAt(parts, k).reshape(n, 2) for k, n in ((0, 1), (1, 2)))
        return ops.Concat(rest, first * b[:1], axis=0)

    return {
        "construct": (built, lambda a, b: a * b * b),
        "stack": (
            lambda a, b: ops.ConcatFromSequence(ops.SequenceConstruct(a, b), axis=-1, new_axis=1).reshape(3, 4)[:, :2],
            lambda a, b: ops.Concat(a.unsqueeze(-1), b.unsqueeze(-1), axis=-1).reshape(3, 4)[:, :2],
        ),
        "split": (split, lambda a, b: ops.Concat(a[1:], a[:1] * b[:1], axis=0)),
        "optional": (lambda a, b: ops.OptionalGetElement(ops.Optional(a)) * b, lambda a, b: a * b),
        "tensor": (lambda a, b: ops.OptionalGetElement(a) * b, lambda a, b: a * b),
    }


@pytest.mark.parametrize("name", sequences())
def test_sequences(name: str) -> None:
    """Gradients go through sequences whose elements are known to the elements."""
    arrays = [R.standard_normal((3, 2)) for _ in range(2)]
    weights = R.standard_normal((3, 2))

    def loss(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def whole(a: Any, b: Any) -> Any:
            return (f(a, b) * weights).sum()

        return whole

    own, plain = sequences()[name]
    for a, b in zip(*(slopes(loss(f), *arrays, wrt=(0, 1)) for f in (own, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_position_that_depends_on_data() -> None:
    """It is said why there is no gradient."""
    with pytest.raises(GradientError, match="SequenceAt.*position of SequenceAt depends on data"):
        slopes(
            lambda a, i: ops.SequenceAt(ops.SequenceConstruct(a, a * 2.0), i).sum(), np.ones(2), np.array(1), wrt=(0,)
        )


def test_affine_grid() -> None:
    """Its function body is differentiated."""
    theta = R.standard_normal((1, 2, 3))

    def f(theta: Any) -> Any:
        return (ops.AffineGrid(theta, np.array([1, 1, 3, 2])) ** 2.0).sum()

    (found,) = slopes(f, theta)
    loss = xrt.XRTModule(xrt.trace(f, theta), engine="host")
    for at in np.ndindex(*theta.shape):
        both = []
        for sign in (1, -1):
            moved = theta.copy()
            moved[at] += sign * 1e-6
            both.append(float(loss(moved)))
        np.testing.assert_allclose(found[at], (both[0] - both[1]) / 2e-6, rtol=1e-5, atol=1e-6)
