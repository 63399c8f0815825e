"""Normalisations against the ONNX backend tests, float64 formulas and older versions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference

RUNS = [run_numpy, run_jax]


def statistics(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    """Scale, bias, mean and a positive variance."""
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)] + [(rng.random(shape) + 0.5).astype(dtype)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("version", [7, 9, 14, 15])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_batch_inference(version: int, dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Every version normalises by the given statistics."""
    x = rng.standard_normal((2, 3, 4, 5)).astype(dtype)
    parameters = statistics(rng, (3,), dtype)
    (got,) = run(node_case("BatchNormalization", version, [x, *parameters], epsilon=1e-3))
    s, b, m, v = (p.astype(np.float64).reshape(3, 1, 1) for p in parameters)
    want = (x.astype(np.float64) - m) / np.sqrt(v + 1e-3) * s + b
    assert got.dtype == dtype
    tolerance = 5e-3 if dtype is np.float16 else 1e-5
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("version", "outputs"), [(7, 5), (9, 5), (14, 3), (15, 3)])
def test_batch_training(version: int, outputs: int, run: Any, rng: np.random.Generator) -> None:
    """Training takes the batch's statistics and moves the running ones; before 14 it shows in the outputs asked for."""
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    scale, bias, mean, var = statistics(rng, (3,))
    attributes = {"training_mode": 1} if version >= 14 else {}
    got = run(
        node_case("BatchNormalization", version, [x, scale, bias, mean, var], outputs, momentum=0.75, **attributes)
    )
    m, v = x.mean((0, 2)), x.var((0, 2))
    want = (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * scale[:, None] + bias[:, None]
    expected = [want, mean * 0.75 + m * 0.25, var * 0.75 + v * 0.25, m, v][:outputs]
    assert len(got) == outputs
    for g, w in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_batch_per_element_and_flat(run: Any, rng: np.random.Generator) -> None:
    """Version 7 with spatial=0 has statistics per element; version 9 takes a batch of one channel."""
    x = rng.standard_normal((4, 3, 2)).astype(np.float32)
    s, b, m, v = statistics(rng, (3, 2))
    (got,) = run(node_case("BatchNormalization", 7, [x, s, b, m, v], spatial=0))
    np.testing.assert_allclose(got, (x - m) / np.sqrt(v + 1e-5) * s + b, rtol=1e-4, atol=1e-5)
    s, b, m, v = statistics(rng, (1,))
    (got,) = run(node_case("BatchNormalization", 9, [x[:, 0, 0], s, b, m, v]))
    np.testing.assert_allclose(got, (x[:, 0, 0] - m) / np.sqrt(v + 1e-5) * s + b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_large_means_do_not_cancel(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Layer and RMS normalisation of a narrow float with a large mean are the float64 ones, rounded."""
    x = (rng.standard_normal((3, 64)) * 4 + 200).astype(dtype)
    one = np.ones(64, dtype)
    wide = x.astype(np.float64)
    y, mean, inverse = run(node_case("LayerNormalization", 17, [x, one], 3))
    deviation = np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert (y.dtype, mean.dtype, inverse.dtype) == (dtype, np.float32, np.float32)
    tolerance = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), (wide - wide.mean(1, keepdims=True)) / deviation, tolerance, 1e-3)
    np.testing.assert_allclose(mean, wide.mean(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=1e-4)
    (y,) = run(node_case("RMSNormalization", 23, [x, one]))
    root = np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.astype(np.float64), wide / root, rtol=tolerance)


@pytest.mark.parametrize("run", RUNS)
def test_layer_statistics_in_bfloat16(run: Any) -> None:
    """stash_type names the type of Mean and InvStdDev."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    _, mean, inverse = run(node_case("LayerNormalization", 17, [x, np.ones(3, np.float32)], 3, stash_type=16))
    assert mean.dtype == inverse.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(mean.astype(np.float32), [[1], [4]])


@pytest.mark.parametrize("run", RUNS)
def test_rms_result_takes_the_type_of_the_scale(run: Any) -> None:
    """A float16 input with a float32 scale gives float32."""
    x = np.array([[3, 4]], np.float16)
    (got,) = run(node_case("RMSNormalization", 23, [x, np.array([1, 2], np.float32)]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.array([[3, 8]]) / np.sqrt(12.5), rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("version", [18, 21])
def test_group_parameters(version: int, run: Any, rng: np.random.Generator) -> None:
    """Scale and bias belong to groups in version 18, to channels from 21 on."""
    x = rng.standard_normal((2, 6, 3)).astype(np.float32)
    size = 2 if version == 18 else 6
    scale, bias = rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    (got,) = run(node_case("GroupNormalization", version, [x, scale, bias], num_groups=2))
    groups = x.reshape(2, 2, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    s, b = (np.repeat(p, 6 // size)[:, None] for p in (scale, bias))
    np.testing.assert_allclose(got, normal.reshape(x.shape) * s + b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_lrn_by_definition(size: int, run: Any, rng: np.random.Generator) -> None:
    """An even window reaches one channel further up than down."""
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    (got,) = run(node_case("LRN", 13, [x], size=size, alpha=0.5, beta=0.6, bias=2.0))
    want = np.empty_like(x)
    for c in range(5):
        near = x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1]
        want[:, c] = x[:, c] / (2 + 0.5 / size * (near**2).sum(1)) ** 0.6
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("p", [1, 2])
def test_norm_of_zero(p: int, run: Any) -> None:
    """Where the norm is zero the result is zero, not NaN."""
    x = np.array([[0, 0], [3, -4]], np.float32)
    (got,) = run(node_case("LpNormalization", 22, [x], p=p))
    np.testing.assert_allclose(got, [[0, 0], np.array([3, -4]) / (7 if p == 1 else 5)], rtol=1e-6)


@pytest.mark.parametrize(("op", "version"), [("InstanceNormalization", 6), ("MeanVarianceNormalization", 9)])
def test_against_the_reference(op: str, version: int, rng: np.random.Generator) -> None:
    """Older versions give the reference's numbers."""
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    extra = [np.array([1, 2, 3], np.float32), np.array([0, 1, -1], np.float32)] if op[0] == "I" else []
    case = node_case(op, version, [x, *extra])
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-4, atol=1e-5)
