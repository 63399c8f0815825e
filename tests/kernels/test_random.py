"""Random kernels: Dropout's backend tests, repeatable seeds, fresh numbers without, and the distributions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.ir.graph import Node, Value
from xrt_core.kernels import find_kernel

BIG = np.zeros((200, 50), np.float32)


def _seeded(seed: float | None) -> list[Case]:
    s = {} if seed is None else {"seed": seed}
    return [
        node_case("RandomNormal", 1, [], shape=(200, 50), mean=2.0, scale=3.0, **s),
        node_case("RandomNormalLike", 1, [BIG], mean=2.0, scale=3.0, **s),
        node_case("RandomUniform", 1, [], shape=(200, 50), low=-1.0, high=5.0, **s),
        node_case("RandomUniformLike", 1, [BIG], low=-1.0, high=5.0, **s),
        node_case("Bernoulli", 15, [BIG + 0.25], **s),
        node_case("Multinomial", 7, [np.array([[np.log(0.1), -np.inf, np.log(0.9)]] * 3)], sample_size=2000, **s),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0.0, 7.0, 0.5, -1.0, 1e20])
def test_a_seed_fixes_the_numbers(seed: float) -> None:
    """Any float is a seed, and gives the same numbers at each call, under NumPy and under JAX."""
    for case in _seeded(seed):
        found = find_kernel("", case.node.op_type)
        assert found is not None
        assert found.why_dynamic(case.node) is None
        once = run_numpy(case)[0]
        np.testing.assert_array_equal(once, run_numpy(case)[0])
        np.testing.assert_array_equal(once, run_jax(case)[0])


def test_without_a_seed_numbers_are_fresh() -> None:
    """Two calls differ, and the kernel says why an engine must not freeze it."""
    for case in _seeded(None):
        found = find_kernel("", case.node.op_type)
        assert found is not None
        assert "new numbers at every call" in str(found.why_dynamic(case.node))
        assert not np.array_equal(run_numpy(case)[0], run_numpy(case)[0])


def test_distributions() -> None:
    """Means, spreads, ranges and shares are those asked for (10000 numbers, five standard errors)."""
    normal, like, uniform, uniform_like, coin, classes = (run_numpy(c)[0] for c in _seeded(3.0))
    for x in (normal, like):
        assert abs(x.mean() - 2) < 0.15
        assert abs(x.std() - 3) < 0.15
    for x in (uniform, uniform_like):
        assert x.min() >= -1
        assert x.max() <= 5
        assert abs(x.mean() - 2) < 0.1
    assert set(np.unique(coin)) == {0.0, 1.0}
    assert abs(coin.mean() - 0.25) < 0.025
    assert classes.dtype == np.int32
    for row in classes:
        assert set(np.unique(row)) == {0, 2}
        assert abs((row == 2).mean() - 0.9) < 0.04


@pytest.mark.parametrize("dtype", [1, 10, 11, 16])
def test_dtypes_of_draws(dtype: int) -> None:
    """The dtype attribute decides; without it the like-kernels follow their input."""
    want = {1: np.float32, 10: np.float16, 11: np.float64, 16: ml_dtypes.bfloat16}[dtype]
    assert run_numpy(node_case("RandomNormal", 22, [], shape=(2,), seed=1.0, dtype=dtype))[0].dtype == want
    assert run_numpy(node_case("RandomUniformLike", 22, [np.zeros(2)], seed=1.0, dtype=dtype))[0].dtype == want
    assert run_numpy(node_case("RandomNormalLike", 22, [np.zeros(2, want)], seed=1.0))[0].dtype == want
    assert run_numpy(node_case("Bernoulli", 22, [np.ones(2)], seed=1.0, dtype=9))[0].dtype == np.bool_
    assert run_numpy(node_case("Multinomial", 22, [np.zeros((1, 2))], seed=1.0, dtype=7))[0].dtype == np.int64


@pytest.mark.parametrize("run", [run_numpy, run_jax])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_dropout_in_training_scales_what_stays(run: Any, dtype: Any) -> None:
    """A share of about the ratio is 0, the rest is divided by one minus the ratio."""
    x = np.ones((100, 50), dtype)
    case = node_case("Dropout", 13, [x, np.array(0.2, np.float32), np.array(True)], outputs=2, seed=5)
    y, mask = run(case)
    assert (y.dtype, mask.dtype) == (x.dtype, np.bool_)
    np.testing.assert_allclose(y.astype(np.float32), np.where(mask, 1.25, 0))
    assert abs(mask.mean() - 0.8) < 0.03


@pytest.mark.parametrize(("version", "mask_dtype"), [(7, np.float16), (10, np.bool_), (13, np.bool_)])
def test_dropout_in_inference_is_identity(version: int, mask_dtype: Any) -> None:
    """Before version 12, and without training_mode, nothing is dropped and the mask is all ones."""
    x = np.full((2, 0, 3), 2, np.float16) if version == 10 else np.full((2, 3), 2, np.float16)
    y, mask = run_numpy(node_case("Dropout", version, [x], outputs=2))
    np.testing.assert_array_equal(y, x)
    assert mask.dtype == mask_dtype
    assert mask.all()
    (alone,) = run_numpy(node_case("Dropout", version, [x]))
    np.testing.assert_array_equal(alone, x)


def test_when_dropout_is_dynamic() -> None:
    """Only training (or an unknown mode) without a seed and with a ratio that may drop something."""
    found = find_kernel("", "Dropout")
    assert found is not None

    def reason(ratio: Value | None, mode: Value | None, version: int = 13, **attributes: Any) -> str | None:
        inputs = [Value("x"), ratio, mode][: 3 if version > 10 else 1]
        return found.why_dynamic(Node("Dropout", inputs, [Value("y")], attributes, version=version))

    on, off, half = (Value.constant(np.array(v)) for v in (True, False, 0.5))
    assert reason(half, None) is None
    assert reason(half, off) is None
    assert reason(half, on, seed=1) is None
    assert reason(Value.constant(np.array(0.0)), on) is None
    assert reason(None, None, version=10) is None
    assert "new numbers" in str(reason(half, on))
    assert "new numbers" in str(reason(half, Value("mode")))
    assert "new numbers" in str(reason(None, on))
