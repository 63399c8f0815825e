"""Gradients where a derivative is infinite or undefined and a factor is 0: finite wherever PyTorch's are.

The numbers are PyTorch's (2.13.0, float64), to which all of these were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.checks import Case, run, with_gradients
from xrt_core.frontends import ops

INF, NAN = float("inf"), float("nan")
F = np.float64
MASK = np.array([[True, False, True], [False] * 3, [True] * 3])
"""Of keys (columns) for queries (rows); the second query sees nothing."""

TABLE: list[tuple[str, Callable[[Any], Any], list[Any], list[Any]]] = [
    ("L2 norm at 0", lambda x: ops.ReduceL2(x, np.array([1]), keepdims=0), [[0, 0], [3, 4]], [[0, 0], [0.6, 0.8]]),
    ("L1 norm at 0", lambda x: ops.ReduceL1(x, np.array([1]), keepdims=0), [[0, 0], [3, -4]], [[0, 0], [1, -1]]),
    ("x^2", lambda x: ops.Pow(x, F(2)), [0, -1, 2], [0, -2, 4]),
    ("x^1", lambda x: ops.Pow(x, F(1)), [0, -1, 2], [1, 1, 1]),
    ("x^0", lambda x: ops.Pow(x, F(0)), [0, -1, 2], [0, 0, 0]),
    ("x^1.5", lambda x: ops.Pow(x, F(1.5)), [0, 4], [0, 3]),
    ("x^0.5", lambda x: ops.Pow(x, F(0.5)), [0, 4], [INF, 0.25]),
    ("sqrt of a safe choice", lambda x: ops.Where(x > 0.0, ops.Sqrt(ops.Where(x > 0.0, x, F(1))), F(0)), [0, 4],
     [0, 0.25]),
    ("sqrt of an unsafe choice", lambda x: ops.Where(x > 0.0, ops.Sqrt(x), F(0)), [0, 4], [NAN, 0.25]),
    ("softmax with a masked value", lambda x: ops.Softmax(x)[0], [0, -INF, 0], [0.25, 0, -0.25]),
    ("log-softmax with a masked value", lambda x: ops.LogSoftmax(x)[0], [0, -INF, 0], [0.5, 0, -0.5]),
    ("logsumexp with a masked value", lambda x: ops.ReduceLogSumExp(x, np.array([0]), keepdims=0), [0, -INF, 0],
     [0.5, 0, 0.5]),
    ("product with a zero", lambda x: ops.ReduceProd(x, np.array([0]), keepdims=0), [0, 2, 3], [6, 0, 0]),
    ("product with two zeros", lambda x: ops.ReduceProd(x, np.array([0]), keepdims=0), [0, 0, 3], [0, 0, 0]),
    ("elu far out", ops.Elu, [0, 1e200, -1e200], [1, 1, 0]),
    ("softplus far out", ops.Softplus, [0, 1e200, -1e200, INF], [0.5, 1, 0, 1]),
    ("mish far out", ops.Mish, [1e200, -1e200], [1, 0]),
    ("gelu far out", ops.Gelu, [0, 1e200, -1e200], [0.5, 1, 0]),
    ("leaky relu at 0", lambda x: ops.LeakyRelu(x, alpha=0.1), [0, 1, -1], [0.1, 1, 0.1]),
    ("prelu at 0", lambda x: ops.PRelu(x, F([0.1])), [0, 1, -1], [0.1, 1, 0.1]),
    ("clip at and beyond the bounds", lambda x: ops.Clip(x, F(-1), F(1)), [INF, -INF, 1, -1, 0], [0, 0, 1, 1, 1]),
    ("maximum of equal values", lambda x: ops.ReduceMax(x, np.array([0]), keepdims=0), [INF, INF, 1], [0.5, 0.5, 0]),
]  # fmt: skip


def gradient(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Of the sum of the results, by every input."""
    _, made = with_gradients(Case("", lambda *a: [function(*a).sum()], arrays), list(arrays))
    weighed = run(made, list(arrays))
    scale = 1 / np.random.default_rng(0).uniform(0.5, 1.5, ())  # `with_gradients` weighs the one result
    return [g * scale for g in weighed[1:]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("function", "at", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_gradients(function: Callable[[Any], Any], at: list[Any], wanted: list[Any]) -> None:
    """As PyTorch has them, NaN included."""
    (found,) = gradient(function, np.array(at, F))
    np.testing.assert_allclose(found, np.array(wanted, F), rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mask", [MASK, np.where(MASK, 0.0, -INF)], ids=["bool", "float"])
def test_attention_of_a_query_that_sees_nothing(mask: np.ndarray) -> None:
    """Its gradient is 0, and all others are those without it."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 3, 4)) for i in range(3))
    found = gradient(lambda q, k, v: ops.Attention(q, k, v, mask), q, k, v)
    seen = [0, 2]
    wanted = gradient(lambda q, k, v: ops.Attention(q, k, v, mask[seen]), q[:, :, seen], k, v)
    np.testing.assert_array_equal(found[0][:, :, 1], 0.0)
    np.testing.assert_allclose(found[0][:, :, seen], wanted[0], rtol=1e-9)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
