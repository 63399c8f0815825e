"""Kernels of the dialect: random numbers by counters, gradients over windows, slices written, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel
from xrt_core.kernels.gradient import _threefry

RNG = np.random.default_rng(9)


def run(op: str, *arrays: np.ndarray, xp: Any = np, **attributes: Any) -> Any:
    """One node of the dialect, its result held against the inferred type."""
    inputs = [Value(f"i{k}", TensorType(a.dtype, a.shape)) for k, a in enumerate(arrays)]
    node = Node(op, inputs, [Value("o")], attributes, domain="xrt", version=1)
    found = find_kernel("xrt", op)
    assert found is not None
    result = found.function(OpContext(node, xp), *arrays)
    assert infer_types(node) == (TensorType(np.dtype(result.dtype), tuple(result.shape)),)
    return result


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry(key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    """The known answers of Random123 for threefry2x32 with 20 rounds."""
    words = [np.array([w], np.uint32) for w in (*key, *counter)]
    a, b = _threefry(np, (words[0], words[1]), (words[2], words[3]))

    assert (int(a[0]), int(b[0])) == expected


def test_counter_uniform() -> None:
    """Numbers in [0, 1) that are spread evenly; key and stream both change all of them, and nothing else does."""
    x = run("CounterUniform", np.array(5, np.int64), shape=(200, 250), stream=1)

    assert x.dtype == np.float32
    assert 0 <= x.min() < 1e-3 < 0.999 < x.max() < 1
    counts = np.histogram(x, bins=20, range=(0, 1))[0]
    assert abs(counts - 2500).max() < 250
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.02
    np.testing.assert_array_equal(x, run("CounterUniform", np.array(5, np.int64), shape=(200, 250), stream=1))
    for key, stream in ((6, 1), (5, 2), (5 + (1 << 32), 1)):
        other = run("CounterUniform", np.array(key, np.int64), shape=(200, 250), stream=stream)
        assert np.mean(other == x) < 0.001
        assert abs(np.corrcoef(other.ravel(), x.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (2, 3, 5)])
def test_counter_uniform_is_the_same_everywhere(shape: tuple[int, ...]) -> None:
    """JAX gives the numbers that NumPy gives, of odd and empty shapes too."""
    jax = pytest.importorskip("jax")
    key = np.array(-3 + (7 << 32), np.int64)
    with jax.enable_x64(True):
        there = run("CounterUniform", key, xp=jax.numpy, shape=shape, stream=3)
    np.testing.assert_array_equal(np.asarray(there), run("CounterUniform", key, shape=shape, stream=3))


@pytest.mark.parametrize("group", [1, 2])
def test_conv_filter_grad(group: int) -> None:
    """Every element of the filter gathers input times gradient over all images and positions."""
    x, dy = RNG.standard_normal((2, 4, 6, 5)), RNG.standard_normal((2, 2, 3, 3))
    found = run("ConvFilterGrad", x, dy, kernel_shape=(3, 2), strides=(2, 2), pads=(1, 1, 0, 1), group=group)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (1, 1)))
    expected = np.zeros((2, 4 // group, 3, 2))
    for m, c, i, j in np.ndindex(*expected.shape):
        channel = c + (m * group // 2) * (4 // group)
        for r, s in np.ndindex(3, 3):
            expected[m, c, i, j] += (padded[:, channel, 2 * r + i, 2 * s + j] * dy[:, m, r, s]).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_max_pool_grad_counts_each_window_once() -> None:
    """Of equal maxima the first gets the share; overlapping windows add up."""
    x = np.array([[[1.0, 3.0, 3.0, 2.0]]])
    y = np.array([[[3.0, 3.0, 3.0]]])
    dy = np.array([[[1.0, 10.0, 100.0]]])

    np.testing.assert_array_equal(run("MaxPoolGrad", dy, x, y, kernel_shape=(2,)), [[[0, 11, 100, 0]]])


def test_average_pool_grad() -> None:
    """Each element gets its share of every window over it; padding counts where the attribute says so."""
    dy = np.array([[[1.0, 10.0, 100.0]]])
    found = run("AveragePoolGrad", dy, kernel_shape=(3,), pads=(1, 1), size=(3,))
    np.testing.assert_allclose(found, [[[1 / 2 + 10 / 3, 1 / 2 + 10 / 3 + 50, 10 / 3 + 50]]])
    counted = run("AveragePoolGrad", dy, kernel_shape=(3,), pads=(1, 1), size=(3,), count_include_pad=1)
    np.testing.assert_allclose(counted, [[[11 / 3, 111 / 3, 110 / 3]]])


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 3, 2)])
def test_batch_norm_grad(shape: tuple[int, ...]) -> None:
    """The slopes of the weighed sum of a batch normalised by its own statistics, in all three inputs."""
    x, dy, scale = RNG.standard_normal(shape), RNG.standard_normal(shape), RNG.standard_normal(shape[1])
    axes, channel = (0, *range(2, len(shape))), (-1, *(1,) * (len(shape) - 2))

    def loss(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> float:
        normal = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-3)
        return float(((normal * scale.reshape(channel) + bias.reshape(channel)) * dy).sum())

    given = [x, scale, np.zeros_like(scale)]
    inputs = [Value(f"i{k}", TensorType(a.dtype, a.shape)) for k, a in enumerate((dy, x, scale))]
    node = Node("BatchNormGrad", inputs, [Value(f"o{k}") for k in range(3)], {"epsilon": 1e-3}, domain="xrt", version=1)
    kernel = find_kernel("xrt", "BatchNormGrad")
    assert kernel is not None
    found = kernel.function(OpContext(node, np), dy, x, scale)
    assert infer_types(node) == tuple(TensorType(r.dtype, r.shape) for r in found)
    for k, g in enumerate(found):
        for at in np.ndindex(*g.shape):
            both = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in given]
                moved[k][at] += step
                both.append(loss(*moved))
            assert g[at] == pytest.approx((both[0] - both[1]) / 2e-5, rel=1e-5, abs=1e-7)


def test_assign_and_stop_gradient() -> None:
    """An assignment gives the new value, of the variable's type; a stop gives what it gets."""
    old, new = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert run("Assign", old, new) is new
    assert run("StopGradient", old) is old


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4), (1, 1), (0, 2, 2)])
def test_cofactors(shape: tuple[int, ...]) -> None:
    """det(x) times the transposed inverse, where there is one."""
    x = RNG.standard_normal(shape)
    found = run("Cofactors", x)
    if x.size:
        np.testing.assert_allclose(
            found, np.linalg.det(x)[..., None, None] * np.swapaxes(np.linalg.inv(x), -1, -2), rtol=1e-8, atol=1e-10
        )


def test_cofactors_of_singular_matrices() -> None:
    """By hand: of [[a, b], [c, d]] they are [[d, -c], [-b, a]], whatever the determinant."""
    np.testing.assert_allclose(run("Cofactors", np.array([[1.0, 2.0], [2.0, 4.0]])), [[4, -2], [-2, 1]], atol=1e-12)
    np.testing.assert_allclose(run("Cofactors", np.zeros((2, 2))), np.zeros((2, 2)))


def test_barrier() -> None:
    """The inputs, as many as there are outputs."""
    a, b, c = np.ones(2), np.zeros(3, np.int64), np.ones(1)
    types = [TensorType(x.dtype, x.shape) for x in (a, b, c)]
    node = Node("Barrier", [Value("", t) for t in types], [Value("p"), Value("q")], domain="xrt", version=1)
    assert infer_types(node) == tuple(types[:2])
    found = find_kernel("xrt", "Barrier")
    assert found is not None
    results = found.function(OpContext(node, np), a, b, c)
    assert len(results) == 2
    assert results[0] is a
    assert results[1] is b


@pytest.mark.parametrize(("start", "first"), [(2, 2), (-5, 0), (9, 3)])
def test_write_slice(start: int, first: int) -> None:
    """Entries are replaced; a start that leaves no room counts as the nearest one that does."""
    jax = pytest.importorskip("jax")
    x, update = np.zeros((2, 5, 3), np.float32), RNG.standard_normal((2, 2, 3)).astype(np.float32)
    want = x.copy()
    want[:, first : first + 2] = update
    for xp in (np, jax.numpy):
        given = [xp.asarray(a) for a in (x, update, np.array(start, np.int32))]
        np.testing.assert_array_equal(run("WriteSlice", *given, xp=xp, axis=1), want)
    assert not x.any()
