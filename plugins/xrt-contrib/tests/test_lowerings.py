"""Operators that ONNX Runtime computes on GPUs alone, against NumPy; gradients; what is refused, and how."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases_other import WINDOWED, conv_state
from ort_comparison import Case, by_xrt, fed, model_of
from xrt_contrib import coverage, freeze_schemas
from xrt_contrib.schemas import definitions, table

import xrt_core as xrt
from xrt_core.errors import XRTError
from xrt_core.frontends.tensor import Tensor
from xrt_core.frontends.tracing import current_tracer
from xrt_core.training.autodiff import gradients

R = np.random.default_rng(3)


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (R.standard_normal(shape) * scale).astype(dtype)


def _erf_gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _pairs(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1)


def _complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


def _group_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int) -> np.ndarray:
    g = np.moveaxis(x, -1, 1).reshape(x.shape[0], groups, -1)
    y = (g - g.mean(2, keepdims=True)) / np.sqrt(g.var(2, keepdims=True) + 1e-5)
    return np.moveaxis(y.reshape(np.moveaxis(x, -1, 1).shape), 1, -1) * gamma + beta


def _buckets(rows: int, columns: int, both: bool, buckets: int, farthest: int) -> np.ndarray:
    found = np.zeros((rows, columns), int)
    for i, j in itertools.product(range(rows), range(columns)):
        d, base, count = j - i, 0, buckets
        if both:
            count //= 2
            base, d = (count if d > 0 else 0), abs(d)
        else:
            d = max(-d, 0)
        exact = count // 2
        if d >= exact:
            d = min(exact + int(math.log(d / exact) / math.log(farthest / exact) * (count - exact)), count - 1)
        found[i, j] = base + d
    return found


def _packed_attention(q: Any, k: Any, v: Any, ends: Any, heads: int) -> np.ndarray:
    out = []
    for a, b in itertools.pairwise(ends):
        parts = [x[a:b].reshape(b - a, heads, -1).swapaxes(0, 1) for x in (q, k, v)]
        p = _softmax(parts[0] @ parts[1].swapaxes(1, 2) / math.sqrt(parts[0].shape[2]))
        out.append((p @ parts[2]).swapaxes(0, 1).reshape(b - a, -1))
    return np.concatenate(out)


def _paged(q: Any, k: Any, v: Any, kc: Any, vc: Any, ends: Any, past: Any, table: Any) -> tuple[np.ndarray, ...]:
    heads, (_, block, shared, size) = 4, kc.shape
    keys, values, out = kc.copy(), vc.copy(), np.zeros_like(q)
    for b, (start, end) in enumerate(itertools.pairwise(ends)):
        for t in range(start, end):
            place = past[b] + t - start
            row = table[b, place // block], place % block
            keys[row], values[row] = k[t].reshape(shared, size), v[t].reshape(shared, size)
            rows = [(table[b, p // block], p % block) for p in range(place + 1)]
            for h in range(heads):
                g = h // (heads // shared)
                ks, vs = (np.stack([c[r][g] for r in rows]) for c in (keys, values))
                p = _softmax(ks @ q[t].reshape(heads, size)[h] / math.sqrt(size))
                out[t].reshape(heads, size)[h] = p @ vs
    return out, keys, values


OFFSETS, ENDS = np.array([[0, 3, 4], [1, 2, 5]], np.int32), np.array([0, 1, 3], np.int32)
"""Two sequences, of 1 and 2 tokens, in rows of 3: places of the tokens, then of the padding; ends of the sequences."""

Z = f(2, 4, 5, 2)
X, IMAGE = f(2, 6, 8), f(2, 4, 4, 6)
QKV, TABLE = f(3, 24), f(8, 3)
FLOAT8 = [f(4, 3).astype(ml_dtypes.float8_e4m3fn), f(5, 3).astype(ml_dtypes.float8_e4m3fn)]


def _quantised_mean(x: np.ndarray) -> np.ndarray:
    return np.clip(np.round(((x - 3.0) * 0.1).mean(1, keepdims=True) / 0.05) + 7, 0, 255).astype(np.uint8)


CASES: list[tuple[Case, Callable[..., Any]]] = [
    (Case("BiasAdd", [X, f(8), f(2, 6, 8)]), lambda x, b, s: x + b + s),
    (Case("BiasSplitGelu", [X, f(8)]), lambda x, b: (x + b)[..., :4] * _erf_gelu((x + b)[..., 4:])),
    (Case("BiasSoftmax", [f(2, 3, 4, 5), f(1, 1, 4, 5)], {"axis": 3, "is_inner_broadcast": 0}),
     lambda x, b: _softmax(x + b)),
    (Case("BiasSoftmax", [f(2, 3, 4, 5), f(2, 1, 1, 5)], {"axis": 3, "is_inner_broadcast": 1}),
     lambda x, b: _softmax(x + b)),
    (Case("BiasDropout", [X, f(8), f(2, 6, 8)], {}, (0, 1)), lambda x, b, r: (x + b + r, np.ones(x.shape, bool))),
    (Case("SwiGLU", [X, f(2, 6, 8)], {"limit": 0.5, "activation_alpha": 1.7, "activation_beta": 1.0}),
     lambda g, u: np.minimum(g, 0.5) * _sigmoid(1.7 * np.minimum(g, 0.5)) * (np.clip(u, -0.5, 0.5) + 1)),
    (Case("GemmFastGelu", [f(3, 4), f(4, 5), f(5)]),
     lambda x, w, b: 0.5 * (x @ w + b) * (1 + np.tanh(0.7978845608 * ((x @ w + b) + 0.044715 * (x @ w + b) ** 3)))),
    (Case("FusedMatMulActivation", [f(3, 4), f(5, 4)], {"transB": 1, "alpha": 0.5, "activation": "LeakyRelu",
     "activation_alpha": 0.2}), lambda a, b: np.where(a @ b.T > 0, a @ b.T, 0.2 * (a @ b.T)) * 0.5),
    (Case("GemmFloat8", [*FLOAT8, None, np.float32([0.5]), np.float32([2.0])], {"transB": 1, "dtype": 1}),
     lambda a, b, s, t: (a.astype(np.float32) * s) @ (b.astype(np.float32) * t).T),
    (Case("ComplexMul", [Z, Z[::-1].copy()]), lambda a, b: _pairs(_complex(a) * _complex(b))),
    (Case("ComplexMulConj", [Z, Z[::-1].copy()]), lambda a, b: _pairs(_complex(a) * _complex(b).conj())),
    (Case("Rfft", [f(2, 3, 7)], {"signal_ndim": 1}), lambda x: _pairs(np.fft.rfft(x))),
    (Case("Rfft", [f(2, 6, 8)], {"signal_ndim": 2, "normalized": 1}),
     lambda x: _pairs(np.fft.rfftn(x, axes=(1, 2), norm="ortho"))),
    (Case("Irfft", [_pairs(np.fft.rfft(f(2, 8))).astype(np.float32)], {"signal_ndim": 1}),
     lambda x: np.fft.irfft(_complex(x))),
    (Case("Irfft", [_pairs(np.fft.rfftn(f(2, 6, 8), axes=(1, 2))).astype(np.float32)], {"signal_ndim": 2}),
     lambda x: np.fft.irfftn(_complex(x), axes=(1, 2))),
    (Case("GroupNorm", [IMAGE, f(6), f(6)], {"groups": 3, "activation": 0}), lambda x, g, b: _group_norm(x, g, b, 3)),
    (Case("GroupNorm", [IMAGE, f(6), f(6)], {"groups": 2, "activation": 1}),
     lambda x, g, b: _group_norm(x, g, b, 2) * _sigmoid(_group_norm(x, g, b, 2))),
    (Case("SkipGroupNorm", [IMAGE, f(6), f(6), f(2, 4, 4, 6), f(6)], {"groups": 3, "activation": 0}, (0, 1)),
     lambda x, g, b, s, c: (_group_norm(x + s + c, g, b, 3), x + s + c)),
    (Case("NhwcConv", [f(1, 5, 6, 3), f(4, 3, 2, 2), f(4)]), lambda x, w, b: sum(
        np.einsum("nhwc,oc->nhwo", x[:, i : i + 4, j : j + 5], w[:, :, i, j]) for i in (0, 1) for j in (0, 1)) + b),
    (Case("MulInteger", [np.array([3, 9], np.uint8), np.array(2, np.uint8), np.array([5, 1], np.uint8),
     np.array(4, np.uint8)]), lambda a, z, b, y: (a.astype(np.int32) - z) * (b.astype(np.int32) - y)),
    (Case("ReduceSumInteger", [R.integers(-99, 99, (3, 4, 5)).astype(np.int8)], {"axes": [1], "keepdims": 0}),
     lambda x: x.astype(np.int32).sum(1)),
    (Case("QLinearReduceMean", [R.integers(0, 255, (3, 4)).astype(np.uint8), np.float32(0.1), np.uint8(3),
     np.float32(0.05), np.uint8(7)], {"axes": [1], "keepdims": 1}), lambda x, *q: _quantised_mean(x)),
    (Case("RelativePositionBias", [TABLE, np.array([5]), np.array([9])], {"max_distance": 6}, constants=(1, 2)),
     lambda t: t.reshape(3, 8)[:, _buckets(5, 9, False, 8, 6)][None]),
    (Case("RelativePositionBias", [TABLE, np.array([5]), np.array([9])], {"max_distance": 6, "is_bidirectional": 1},
          constants=(1, 2)), lambda t: t.reshape(3, 8)[:, _buckets(5, 9, True, 8, 6)][None]),
    (Case("RemovePadding", [f(2, 3, 4), np.array([1, 2], np.int32)], {}, (0, 1, 2, 3)),
     lambda x, c: (x.reshape(6, 4)[[0, 3, 4]], OFFSETS, ENDS, np.array([2], np.int32))),
    (Case("RestorePadding", [f(3, 4), OFFSETS]), lambda x, o: np.insert(x, [1, 1, 3], 0, 0).reshape(2, 3, 4)),
    (Case("PackedMultiHeadAttention", [QKV[:, :8].copy(), QKV[:, 8:16].copy(), QKV[:, 16:].copy(), None, OFFSETS,
     ENDS], {"num_heads": 2}), lambda q, k, v, o, e: _packed_attention(q, k, v, e, 2)),
    (Case("PackedAttention", [f(3, 5), f(5, 24), f(24), OFFSETS, ENDS], {"num_heads": 2}),
     lambda x, w, b, o, e: _packed_attention(*np.split(x @ w + b, 3, 1), e, 2)),
    (Case("PagedAttention", [f(5, 32), f(5, 16), f(5, 16), f(6, 4, 2, 8), f(6, 4, 2, 8), np.array([0, 2, 5], np.int32),
     np.array([5, 2], np.int32), np.array([[1, 4, -1], [0, 3, -1]], np.int32)], {"num_heads": 4, "kv_num_heads": 2},
     (0, 1, 2)), _paged),
    (Case("TorchEmbedding", [f(5, 3), np.array([[0, 4]])]), lambda w, i: w[i]),
    (Case("IsAllFinite", [f(3), np.array([np.nan], np.float32)]), lambda *x: np.array(False)),
    (Case("IsAllFinite", [f(3), np.array([np.nan], np.float32)], {"isinf_only": 1}), lambda *x: np.array(True)),
    (Case("GemmaRotaryEmbedding", [f(2, 3, 4), *(f(2, 2, 3, 4) for _ in range(4))], {}, (0, 1)),
     lambda e, q, qr, k, kr: (q * np.cos(e)[:, None] + qr * np.sin(e)[:, None],
                              k * np.cos(e)[:, None] + kr * np.sin(e)[:, None])),
]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[f"{c}"[:80] for c, _ in CASES])
def test_against_numpy(case: Case, expected: Callable[..., Any]) -> None:
    """What the schema's text says, in NumPy."""
    wanted = expected(*fed(case))
    for a, b in zip(by_xrt(case), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1 if case.op.startswith("QLinear") else 1e-4)
        assert a.shape == np.shape(b)


def _loss(op: str, count: int, attributes: dict[str, Any]) -> Callable[..., Any]:
    def loss(*inputs: Any) -> Any:
        tracer = current_tracer("a test")
        made = tracer.emit(tracer.schema(op, "com.microsoft"), [x._value for x in inputs], attributes, count)
        y = Tensor(made[0], tracer.scope)
        weights = np.cos(np.arange(math.prod(y.shape))).astype(np.float32).reshape(y.shape)
        return xrt.ops.ReduceSum(y * weights, keepdims=0)

    return loss


@pytest.mark.parametrize(
    ("op", "shapes", "attributes"),
    [
        ("Gelu", [(3, 4)], {}),
        ("SkipLayerNormalization", [(2, 3, 4), (2, 3, 4), (4,), (4,)], {"epsilon": 1e-5}),
        ("FusedMatMul", [(3, 2), (4, 3)], {"alpha": 0.5, "transA": 1, "transB": 1}),
    ],
)
def test_gradients(op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    """Through a lowering, against differences of the loss."""
    arrays = [f(*s) for s in shapes]
    graph = xrt.trace(_loss(op, 1, attributes), *arrays)
    names = [v.name for v in graph.inputs]
    value = xrt.XRTModule(graph, engine="host", cache="off")
    found = xrt.XRTModule(gradients(graph, 0, names), engine="host", cache="off")(*arrays)[1:]
    for i, gradient in enumerate(found):
        direction = f(*shapes[i])
        ends = [[a + s * 1e-2 * direction if k == i else a for k, a in enumerate(arrays)] for s in (1, -1)]
        high, low = (float(np.asarray(value(*a)).reshape(())) for a in ends)
        assert float((np.asarray(gradient) * direction).sum()) == pytest.approx((high - low) / 2e-2, rel=2e-2, abs=2e-3)


NBITS = [f(2, 32), np.zeros((4, 2, 8), np.uint8), f(4, 2)]
SAID = {"N": 4, "K": 32, "block_size": 16}


def grouped(lengths: int, window: int = 0) -> Case:
    """One token behind a cache of four."""
    said = {
        "num_heads": 4,
        "kv_num_heads": 2,
        **({"local_window_size": window, "sliding_window_cache": 1} if window else {}),
    }
    caches = [f(1, 2, 4, 8), f(1, 2, 4, 8)]
    inputs = [f(1, 1, 32), f(1, 1, 16), f(1, 1, 16), *caches, np.array([lengths], np.int32), np.array([5], np.int32)]
    return Case("GroupQueryAttention", inputs, said, (0, 1, 2))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("MatMulNBits", [f(2, 32), np.zeros((4, 2, 8), np.uint8), f(4, 2)], {"N": 5, "K": 32, "block_size": 16}),
         "the_node.*N = 5 times K = 32"),
        (Case("MatMulNBits", [f(2, 32), np.zeros((4, 2, 8), np.uint8), f(4, 2)], {"N": 4, "K": 32, "block_size": 15}),
         "the_node.*block_size = 15"),
        (Case("Attention", [f(1, 2, 4), f(4, 24), f(24)], {"num_heads": 3}), "the_node.*num_heads = 3"),
        (Case("Attention", [f(1, 2, 4), f(4, 24), f(24)], {"num_heads": 2, "do_rotary": 1}), "the_node.*do_rotary"),
        (Case("CDist", [f(1, 2), f(4, 2)], {"metric": "cosine"}), "the_node.*metric = 'cosine'"),
        (Case("MoE", [f(3, 4), f(3, 2), f(2, 5, 4), None, f(2, 4, 5)], {"k": 7}), "the_node.*k = 7 of 2 experts"),
        (conv_state(5, True, True, state_window=9), "the_node.*state_window = 9"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(case: Case, message: str) -> None:
    """It names the node and the attribute."""
    with pytest.raises(XRTError, match=message):
        by_xrt(case)


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_windows_of_states(case: Case) -> None:
    """Each slot is the state after so many tokens, as a call with these alone gives it; the first ones may be empty."""
    window, axis = case.attributes["state_window"], 1 if case.op == "LinearAttention" else 2
    if case.attributes.get("channels_last"):
        axis = 1
    result, states = by_xrt(case)
    past = case.inputs[3]
    plain = dataclasses.replace(case, attributes={**case.attributes, "state_window": 0})
    length = case.inputs[0].shape[axis]
    assert states.shape[0] == window
    for j in range(window):
        tokens = length - window + j + 1
        if tokens < 1:
            assert not states[j].any()
            continue
        inputs = [None if a is None else a for a in case.inputs]
        inputs[3] = None if past is None else past[-1]
        for i in range(len(inputs)) if case.op == "LinearAttention" else (0,):
            if i != 3 and inputs[i] is not None:
                inputs[i] = np.take(inputs[i], range(tokens), axis)
        y, state = by_xrt(dataclasses.replace(plain, inputs=inputs))
        np.testing.assert_allclose(states[j], state, atol=1e-5)
        np.testing.assert_allclose(np.take(result, range(tokens), axis), y, atol=1e-5)


def test_an_unknown_attribute() -> None:
    """The reader holds attributes against the frozen schema."""
    with pytest.raises(XRTError, match="no attribute 'beta'.*alpha"):
        xrt.import_model(model_of(Case("FusedMatMul", [f(2, 2), f(2, 2)], {"beta": 1.0})))


@pytest.mark.nightly
def test_the_frozen_schemas() -> None:
    """The table is that of the ONNX Runtime that it names."""
    ort = pytest.importorskip("onnxruntime", reason="it has the schemas")
    if ort.__version__ != table()["onnxruntime"]:
        pytest.skip(f"the table is of {table()['onnxruntime']}")
    assert freeze_schemas.TABLE.read_text() == freeze_schemas.text(freeze_schemas.frozen())
    assert len(definitions()) >= 136


def test_the_page_of_coverage() -> None:
    """docs/contrib-operators.md is what the code says, and every operator that is absent has a reason."""
    here = pathlib.Path(__file__).resolve()
    path = next((p / "docs" for p in here.parents if (p / "docs" / "contrib-operators.md").exists()), None)
    if path is None:
        pytest.skip("the page is in XRT's repository")
    assert (path / "contrib-operators.md").read_text(encoding="utf-8") == coverage.page()
