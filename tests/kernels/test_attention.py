"""Attention, RotaryEmbedding and LinearAttention against the ONNX backend tests and formulas of their own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError

RUNS = [run_numpy, run_jax]


def by_definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, softcap: float = 0.0) -> np.ndarray:
    """softmax(q k' / sqrt(d) + bias) v, one head after the other in float64; heads of k and v are shared in turn."""
    y = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[1] // k.shape[1]
    bias = np.broadcast_to(bias, (*q.shape[:3], k.shape[2]))
    for b, h in np.ndindex(*q.shape[:2]):
        scores = q[b, h].astype(np.float64) @ k[b, h // group].astype(np.float64).T / np.sqrt(q.shape[3])
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = scores + bias[b, h]
        for i, row in enumerate(scores):
            if (row > -np.inf).any():
                p = np.exp(row - row.max())
                y[b, h, i] = p / p.sum() @ v[b, h // group].astype(np.float64)
    return y


def heads(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    """Random heads."""
    return rng.standard_normal(shape).astype(dtype)


def hidden(allowed: np.ndarray) -> np.ndarray:
    """0 where allowed, -inf elsewhere."""
    return np.where(allowed, 0.0, -np.inf)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("run", RUNS)
def test_grouped_queries_in_every_dtype(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Six query heads over two key heads, causal, with softcap: within one rounding of the float64 result."""
    q, k, v = (heads(rng, dtype, *s) for s in ((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 3)))
    y, key, value = run(node_case("Attention", 23, [q, k, v], 3, is_causal=1, softcap=2.0))
    assert (y.dtype, y.shape) == (q.dtype, (2, 6, 5, 3))
    np.testing.assert_array_equal(key, k)
    np.testing.assert_array_equal(value, v)
    want = by_definition(q, k, v, hidden(np.tril(np.ones((5, 5), bool))), 2.0)
    step = float(ml_dtypes.finfo(dtype).eps) * (8 if dtype == np.float32 else 1)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=max(step, 1e-12), atol=max(step / 8, 1e-12))


@pytest.mark.parametrize("run", RUNS)
def test_past_and_causal(run: Any, rng: np.random.Generator) -> None:
    """With a past, query i sees the whole past and the new keys up to i; the presents are past and new joined."""
    q, k, v = (heads(rng, np.float64, 2, 3, 2, 4) for _ in range(3))
    pk, pv = (heads(rng, np.float64, 2, 3, 5, 4) for _ in range(2))
    y, key, value = run(node_case("Attention", 24, [q, k, v, None, pk, pv], 3, is_causal=1))
    np.testing.assert_array_equal(key, np.concatenate([pk, k], axis=2))
    np.testing.assert_array_equal(value, np.concatenate([pv, v], axis=2))
    allowed = np.arange(7) <= np.arange(2)[:, None] + 5
    np.testing.assert_allclose(y, by_definition(q, key, value, hidden(allowed)), rtol=1e-9)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("windows", [{}, {"left_window_size": 1}, {"left_window_size": 2, "right_window_size": 1}])
@pytest.mark.parametrize("causal", [0, 1])
def test_external_cache(run: Any, windows: dict[str, int], causal: int, rng: np.random.Generator) -> None:
    """`nonpad_kv_seqlen` hides what lies past each length, and windows stand at length - queries + i."""
    q, k, v = heads(rng, np.float64, 3, 2, 2, 4), heads(rng, np.float64, 3, 2, 6, 4), heads(rng, np.float64, 3, 2, 6, 4)
    lengths = np.array([1, 4, 6])
    mask = rng.random((2, 5)) < 0.8  # shorter than the cache: the rest is shut
    inputs = [q, k, v, mask, None, None, lengths]
    (y,) = run(node_case("Attention", 25, inputs, is_causal=causal, **windows))
    key, at = np.arange(6), np.arange(2)[:, None] + (lengths - 2).reshape(3, 1, 1, 1)
    allowed = (key < lengths.reshape(3, 1, 1, 1)) & np.pad(mask, ((0, 0), (0, 1)))
    if causal or windows.get("right_window_size", -1) >= 0:
        allowed = allowed & (key <= at + (0 if causal else windows["right_window_size"]))
    if "left_window_size" in windows:
        allowed = allowed & (key >= at - windows["left_window_size"])
    assert not causal or not allowed.any(axis=-1).all()  # some query sees nothing
    np.testing.assert_allclose(y, by_definition(q, k, v, hidden(allowed)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("run", RUNS)
def test_shown_product(mode: int, run: Any, rng: np.random.Generator) -> None:
    """Output 3 is the product, then softcapped, then with bias, then after softmax."""
    q, k, v = (heads(rng, np.float64, 1, 2, 3, 4) for _ in range(3))
    bias = rng.standard_normal((3, 3))
    bias[1] = -np.inf
    case = node_case("Attention", 24, [q, k, v, bias], 4, softcap=1.5, qk_matmul_output_mode=mode, scale=0.3)
    shown = run(case)[3]
    product = np.einsum("bhid,bhjd->bhij", q, k) * 0.3
    capped = 1.5 * np.tanh(product / 1.5)
    powers = np.exp(capped + bias)
    total = powers.sum(axis=-1, keepdims=True)
    want = [product, capped, capped + bias, powers / np.where(total == 0, 1, total)][mode]
    np.testing.assert_allclose(shown, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [1, 10, 11, 16])
def test_softmax_precision_keeps_the_dtype(precision: int, rng: np.random.Generator) -> None:
    """Whatever the softmax is computed in, the output has the dtype of Q."""
    q, k, v = (heads(rng, np.float32, 1, 2, 3, 4) for _ in range(3))
    for run in RUNS:
        (y,) = run(node_case("Attention", 23, [q, k, v], softmax_precision=precision))
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, by_definition(q, k, v, np.zeros(())), rtol=1e-5, atol=1e-6)


def test_double_softmax_without_x64(rng: np.random.Generator) -> None:
    """softmax_precision DOUBLE is float32, silently, where JAX has no float64."""
    import jax.numpy as jnp

    from xrt_core.kernels import OpContext, find_kernel

    q, k, v = (heads(rng, np.float32, 1, 2, 3, 4) for _ in range(3))
    case = node_case("Attention", 23, [q, k, v], softmax_precision=11)
    found = find_kernel("", "Attention")
    assert found is not None
    y = found.function(OpContext(case.node, jnp), *map(jnp.asarray, (q, k, v)))[0]
    np.testing.assert_allclose(y, by_definition(q, k, v, np.zeros(())), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_nothing_to_attend(run: Any, rng: np.random.Generator) -> None:
    """No keys give zeros, no queries give nothing."""
    q, none = heads(rng, np.float32, 1, 2, 3, 4), np.zeros((1, 2, 0, 4), np.float32)
    (y,) = run(node_case("Attention", 23, [q, none, none]))
    np.testing.assert_array_equal(y, np.zeros((1, 2, 3, 4), np.float32))
    (y,) = run(node_case("Attention", 23, [none, q, q]))
    assert y.shape == (1, 2, 0, 4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("run", RUNS)
def test_rotation(dtype: Any, interleaved: int, run: Any, rng: np.random.Generator) -> None:
    """Pairs turn by their angle as complex numbers do; the part past `rotary_embedding_dim` stays as it is."""
    x = heads(rng, dtype, 2, 3, 5, 8)
    angles = rng.uniform(0, 3, (9, 3))
    positions = rng.integers(0, 9, (2, 5))
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    (y,) = run(node_case("RotaryEmbedding", 23, [x, cos, sin, positions], interleaved=interleaved,
                         rotary_embedding_dim=6))  # fmt: skip
    wide = x.astype(np.float64)
    pairs = wide[..., 0:6:2] + 1j * wide[..., 1:6:2] if interleaved else wide[..., :3] + 1j * wide[..., 3:6]
    turned = pairs * (cos.astype(np.float64) + 1j * sin.astype(np.float64))[positions][:, None]
    want = wide.copy()
    if interleaved:
        want[..., 0:6:2], want[..., 1:6:2] = turned.real, turned.imag
    else:
        want[..., :3], want[..., 3:6] = turned.real, turned.imag
    assert y.dtype == dtype
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("run", RUNS)
def test_linear_attention_in_two_parts(rule: str, run: Any, rng: np.random.Generator) -> None:
    """Handing the state on between two calls gives what one call over the whole gives, as does the reference."""
    inputs = [
        heads(rng, np.float32, 2, 6, 4 * 3),
        heads(rng, np.float32, 2, 6, 2 * 3),
        heads(rng, np.float32, 2, 6, 2 * 5),
    ]
    inputs[1] /= np.linalg.norm(inputs[1])
    decay = -rng.random((2, 6, 2 * 3)).astype(np.float32) if "gated" in rule else None
    beta = rng.random((2, 6, 1)).astype(np.float32) if "delta" in rule else None
    how = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    past = heads(rng, np.float32, 2, 2, 3, 5)
    case = node_case("LinearAttention", 27, [*inputs, past, decay, beta], 2, **how)
    whole, state = run(case)
    for got, want in zip((whole, state), run_reference(case), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    parts, carried = [], past
    for part in (slice(0, 4), slice(4, 6)):
        cut = [None if a is None else a[:, part] for a in (*inputs, decay, beta)]
        y, carried = run(node_case("LinearAttention", 27, [*cut[:3], carried, *cut[3:]], 2, **how))
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(carried, state, rtol=1e-4, atol=1e-5)


def test_linear_attention_of_no_time(rng: np.random.Generator) -> None:
    """Zero time steps hand the state through."""
    empty, past = np.zeros((2, 0, 4), np.float16), heads(rng, np.float32, 2, 2, 2, 2)
    case = node_case("LinearAttention", 27, [empty, empty, empty, past], 2, q_num_heads=2, kv_num_heads=2,
                     update_rule="linear")  # fmt: skip
    for run in RUNS:
        y, state = run(case)
        assert (y.shape, y.dtype, state.dtype) == ((2, 0, 4), np.float16, np.float32)
        np.testing.assert_array_equal(state, past)


def test_misuse_is_named(rng: np.random.Generator) -> None:
    """Missing head counts, heads that do not divide, wrong caches and gates are ShapeErrors that say so."""
    x = heads(rng, np.float32, 1, 2, 6)
    with pytest.raises(ShapeError, match="q_num_heads"):
        run_numpy(node_case("Attention", 23, [x, x, x]))
    with pytest.raises(ShapeError, match="multiple"):
        run_numpy(node_case("Attention", 23, [x[:, None].repeat(3, 1), *[x[:, None].repeat(2, 1)] * 2]))
    with pytest.raises(ShapeError, match="num_heads"):
        run_numpy(node_case("RotaryEmbedding", 23, [x, x, x]))
    with pytest.raises(ShapeError, match="need 3"):
        run_numpy(node_case("RotaryEmbedding", 23, [x, x, x], num_heads=1))
    with pytest.raises(ShapeError, match="'gated'"):
        run_numpy(node_case("LinearAttention", 27, [x, x, x], 2, q_num_heads=1, kv_num_heads=1, update_rule="gated"))
