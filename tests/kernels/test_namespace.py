"""The adapters for what array namespaces do differently: NumPy and JAX agree with each other and with definitions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xrt_core.kernels import namespace

SPACES = [np, jnp]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf_is_accurate(dtype: Any) -> None:
    """The NumPy erf is within a few units in the last place of the C library's, on both sides of every switch."""
    x = np.concatenate([np.linspace(-7, 7, 20001), [1e-30, -0.0, 0.46875, 3.925, 1e30]]).astype(dtype)
    want = np.array([math.erf(v) for v in x.tolist()])
    np.testing.assert_allclose(namespace.erf(np, x), want, rtol=5e-7 if dtype is np.float32 else 1e-15)
    special = np.array([np.nan, np.inf, -np.inf] * 4, dtype)
    np.testing.assert_array_equal(namespace.erf(np, special), np.array([np.nan, 1, -1] * 4, dtype))
    many = np.linspace(-4, 4, 3 * namespace._BLOCK + 6).astype(dtype).reshape(3, -1, 2)[:, ::-1]
    last = namespace.erf(np, many.reshape(-1)[-9:])[3:]
    np.testing.assert_array_equal(namespace.erf(np, many).reshape(-1)[-6:], last)
    assert namespace.erf(np, many).shape == many.shape


@pytest.mark.parametrize("xp", SPACES)
def test_writes_leave_the_argument_alone(xp: Any) -> None:
    """set_at and add_at copy; repeated indices add up."""
    x = xp.zeros(4, np.float32)
    index = np.array([1, 1, 3])
    np.testing.assert_array_equal(namespace.add_at(xp, x, index, xp.ones(3, np.float32)), [0, 2, 0, 1])
    np.testing.assert_array_equal(namespace.set_at(xp, x, (slice(1, 3),), 5), [0, 5, 5, 0])
    np.testing.assert_array_equal(x, np.zeros(4))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("xp", SPACES)
def test_scan(xp: Any, reverse: bool) -> None:
    """A running sum and its double, forwards and backwards, stacked in the order of the input."""
    x = np.arange(1, 5, dtype=np.float32)

    def step(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        total = carry[0] + row[0]
        return (total,), (total, 2 * total)

    (last,), (sums, doubles) = namespace.scan(
        xp, step, (xp.zeros((), np.float32),), (xp.asarray(x),), 4, reverse=reverse
    )
    want = x[::-1].cumsum()[::-1] if reverse else x.cumsum()
    assert float(last) == 10
    np.testing.assert_array_equal(sums, want)
    np.testing.assert_array_equal(doubles, 2 * want)


@pytest.mark.parametrize("xp", SPACES)
@pytest.mark.parametrize(
    ("window", "strides", "dilations"), [((2, 3), (1, 1), None), ((2, 2), (2, 3), (3, 1)), ((9, 1), (1, 1), None)]
)
def test_sliding_windows(xp: Any, window: Any, strides: Any, dilations: Any) -> None:
    """Each window holds the elements that its position, strides and dilations say; one too large has no position."""
    x = np.arange(2 * 7 * 6).reshape(2, 7, 6)
    got = np.asarray(namespace.sliding(xp, xp.asarray(x), window, strides, dilations))
    d = dilations or (1, 1)
    assert got.shape[3:] == window
    counts = tuple(
        max(0, (s - (w - 1) * e - 1) // t + 1) for s, w, e, t in zip((7, 6), window, d, strides, strict=True)
    )
    assert got.shape == (2, *counts, *window)
    for at in np.ndindex(got.shape):
        n, i, j, a, b = at
        assert got[at] == x[n, i * strides[0] + a * d[0], j * strides[1] + b * d[1]]


@pytest.mark.parametrize("xp", SPACES)
def test_widths(xp: Any) -> None:
    """Narrow floats widen to float32, everything else stays what and where it is."""
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn):
        assert namespace.widen(xp.zeros(2, dtype)).dtype == np.float32
    for dtype in (np.float32, np.int8, np.bool_):
        x = xp.zeros(2, dtype)
        assert namespace.widen(x) is x
        assert namespace.narrow(x, np.dtype(dtype)) is x


def test_bits() -> None:
    """bit_cast reads the same bits under NumPy and under jax.jit, of 0-d and strided arrays too."""
    x = np.array([[1.0, -2.0], [0.5, np.inf]], np.float32)
    for given in (x.T, np.array(1.0, np.float32)):
        want = np.vectorize(lambda v: np.float32(v).view(np.int32))(given)
        got = namespace.bit_cast(np, given, np.dtype(np.int32))
        traced = jax.jit(lambda v: namespace.bit_cast(jnp, v, np.dtype(np.int32)))(given)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(traced, want)
