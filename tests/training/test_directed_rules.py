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

    def mapped(a: Any, b: Any) -> Any:
        s = ops.SequenceMap(ops.SequenceConstruct(a, b), b, body=lambda x, y: ops.Sin(x) * y)
        return ops.SequenceAt(s, 0) + ops.SequenceAt(s, 1) * a

    return {
        "map": (mapped, lambda a, b: ops.Sin(a) * b + ops.Sin(b) * b * a),
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


def check_by_differences(f: Callable[..., Any], formula: Callable[..., np.ndarray], *arrays: np.ndarray) -> None:
    """Gradients of an operator that takes float32 alone, against finite differences of a NumPy formula in float64."""
    narrow = [a.astype(np.float32) for a in arrays]
    given = [a.astype(np.float64) for a in narrow]
    found = slopes(f, *narrow, wrt=tuple(range(len(arrays))))
    for k, g in enumerate(found):
        wanted = np.zeros(g.shape)
        for at in np.ndindex(*g.shape):
            both = []
            for sign in (1, -1):
                moved = [a.copy() for a in given]
                moved[k][at] += sign * 1e-6
                both.append(float(formula(*moved)))
            wanted[at] = (both[0] - both[1]) / 2e-6
        np.testing.assert_allclose(g, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention(rule: str) -> None:
    """By every input and both results, with groups of heads; the state may be left out, the rates shared."""
    n, t, heads, kv, size, value_size = 2, 3, 4, 2, 2, 3
    shared = rule == "gated_delta"
    arrays = [R.standard_normal(s) * 0.5 for s in ((n, t, heads * size), (n, t, kv * size), (n, t, kv * value_size))]
    if rule != "linear":
        arrays.append(R.standard_normal((n, kv, size, value_size)))
    if "gated" in rule:
        arrays.append(-R.random((n, t, kv if shared else kv * size)))
    if "delta" in rule:
        arrays.append(R.random((n, t, 1 if shared else kv)))
    factors = R.standard_normal((n, t, heads * value_size)), R.standard_normal((n, kv, size, value_size))

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        past, *rates = more or (None,)
        y, last = ops.LinearAttention(
            q, k, v, past, rates[0] if "gated" in rule else None, rates[-1] if "delta" in rule else None,
            q_num_heads=heads, kv_num_heads=kv, update_rule=rule, outputs=2,
        )  # fmt: skip
        return (y * factors[0].astype(np.float32)).sum() + (last * factors[1].astype(np.float32)).sum()

    def formula(q: Any, k: Any, v: Any, *more: Any) -> Any:
        past, *rates = more or (np.zeros((n, kv, size, value_size)),)
        state, ys = past, []
        for i in range(t):
            key, value = k[:, i].reshape(n, kv, size), v[:, i].reshape(n, kv, value_size)
            if "gated" in rule:
                state = state * np.exp(rates[0][:, i]).reshape(n, kv, -1, 1)
            if "delta" in rule:
                value = (value - np.einsum("nhkv,nhk->nhv", state, key)) * rates[-1][:, i][:, :, None]
            state = state + key[..., None] * value[:, :, None]
            query = q[:, i].reshape(n, heads, size)
            ys.append(np.einsum("nhkv,nhk->nhv", np.repeat(state, heads // kv, axis=1), query) * size**-0.5)
        y = np.stack(ys, 1).reshape(n, t, -1)
        return (y * factors[0]).sum() + (state * factors[1]).sum()

    check_by_differences(f, formula, *arrays)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_convolution(activation: str) -> None:
    """By every input and both results."""
    arrays = [R.standard_normal(s) for s in ((2, 3, 4), (3, 1, 3), (3,), (2, 3, 2))]
    factors = R.standard_normal((2, 3, 4)), R.standard_normal((2, 3, 2))

    def f(*given: Any) -> Any:
        y, last = ops.CausalConvWithState(*given, activation=activation, outputs=2)
        return (y * factors[0].astype(np.float32)).sum() + (last * factors[1].astype(np.float32)).sum()

    def formula(x: Any, w: Any, b: Any, state: Any) -> Any:
        whole = np.concatenate([state, x], axis=2)
        y = sum(whole[:, :, k : k + 4] * w[:, 0, k, None] for k in range(3)) + b[:, None]
        y = y / (1 + np.exp(-y)) if activation == "silu" else y
        return (y * factors[0]).sum() + (whole[:, :, 4:] * factors[1]).sum()

    check_by_differences(f, formula, *arrays)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved: int) -> None:
    """By the vectors and by both tables, whose rows are chosen by positions; a part of each vector stays as it is."""
    positions, factors = np.array([[0, 2, 1], [3, 5, 5]]), R.standard_normal((2, 2, 3, 6))
    arrays = [R.standard_normal(s) for s in ((2, 2, 3, 6), (6, 2), (6, 2))]

    def f(*given: Any) -> Any:
        y = ops.RotaryEmbedding(*given, positions, interleaved=interleaved, rotary_embedding_dim=4)
        return (y * factors.astype(np.float32)).sum()

    def formula(x: Any, cosines: Any, sines: Any) -> Any:
        c, s = (a[positions][:, None] for a in (cosines, sines))
        one, two = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
        y = x.copy()
        turned = c * one - s * two, s * one + c * two
        if interleaved:
            y[..., 0:4:2], y[..., 1:4:2] = turned
        else:
            y[..., :2], y[..., 2:4] = turned
        return (y * factors).sum()

    check_by_differences(f, formula, *arrays)
