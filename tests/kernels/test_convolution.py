"""Convolution kernels against the ONNX backend tests, a plain definition, and the corners of the attributes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError


def conv_by_definition(
    x: np.ndarray, w: np.ndarray, strides: tuple, dilations: tuple, begin: tuple, end: tuple, groups: int
) -> np.ndarray:
    """Convolution as the sum that defines it, window by window, in float64."""
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    w = w.astype(np.float64)
    kernel = w.shape[2:]
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(x.shape[2:], kernel, dilations, strides, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    per_group, depth = w.shape[0] // groups, w.shape[1]
    for m in range(w.shape[0]):
        g = m // per_group
        for at in itertools.product(*map(range, out)):
            where = tuple(
                slice(o * s, o * s + (k - 1) * d + 1, d)
                for o, s, k, d in zip(at, strides, kernel, dilations, strict=True)
            )
            window = x[(slice(None), slice(g * depth, (g + 1) * depth), *where)]
            y[(slice(None), m, *at)] = (window * w[m]).sum(axis=tuple(range(1, x.ndim)))
    return y


LAYOUTS = [
    # spatial size, kernel, strides, dilations, begin, end, groups, channels a group, filters a group
    ((9,), (3,), (2,), (2,), (1,), (3,), 1, 3, 4),
    ((9,), (3,), (1,), (1,), (0,), (0,), 4, 1, 2),
    ((7, 6), (3, 2), (1, 2), (1, 1), (1, 0), (1, 2), 2, 3, 2),
    ((7, 6), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 1, 5, 3),
    ((7, 6), (1, 1), (2, 3), (1, 1), (1, 0), (0, 1), 2, 2, 3),
    ((7, 6), (3, 3), (2, 1), (1, 2), (1, 2), (1, 2), 5, 1, 1),
    ((4, 5, 6), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1), (1, 0, 1), 1, 2, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_conv_is_its_definition(layout: tuple, run: Any, rng: np.random.Generator) -> None:
    """Conv of 1 to 3 dimensions with strides, dilations, lopsided pads and groups is the defining sum."""
    size, kernel, strides, dilations, begin, end, groups, depth, filters = layout
    x = rng.standard_normal((2, groups * depth, *size)).astype(np.float32)
    w = rng.standard_normal((groups * filters, depth, *kernel)).astype(np.float32)
    b = rng.standard_normal(groups * filters).astype(np.float32)
    case = node_case("Conv", 11, [x, w, b], strides=strides, dilations=dilations, pads=begin + end, group=groups)
    (y,) = run(case)
    want = conv_by_definition(x, w, strides, dilations, begin, end, groups) + b.reshape(-1, *(1,) * len(size))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("auto_pad", "begin", "end"), [("SAME_UPPER", 1, 2), ("SAME_LOWER", 2, 1), ("VALID", 0, 0)])
def test_conv_auto_pad(auto_pad: str, begin: int, end: int, rng: np.random.Generator) -> None:
    """SAME pads to ceil(size / stride) windows, dilation included, the odd element at the end or the begin."""
    x = rng.standard_normal((1, 2, 8)).astype(np.float32)
    w = rng.standard_normal((3, 2, 3)).astype(np.float32)
    (y,) = run_numpy(node_case("Conv", 22, [x, w], auto_pad=auto_pad, strides=(2,), dilations=(2,)))
    np.testing.assert_allclose(y, conv_by_definition(x, w, (2,), (2,), (begin,), (end,), 1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_conv_dtypes(op: str, dtype: Any, rng: np.random.Generator) -> None:
    """Narrow floats accumulate in float32: the result is the float64 one rounded once."""
    x = rng.standard_normal((1, 64, 5, 5)).astype(dtype)
    w = rng.standard_normal((64, 64, 3, 3)).astype(dtype)
    want = run_numpy(node_case(op, 22, [x.astype(np.float64), w.astype(np.float64)]))[0]
    for run in (run_numpy, run_jax):
        (y,) = run(node_case(op, 22, [x, w]))
        assert y.dtype == dtype
        step = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=step, atol=max(step * 1e-2, 1e-4 * step**0.5))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 2, 0, 5)])
def test_conv_of_nothing(shape: tuple[int, ...]) -> None:
    """An empty batch gives an empty batch; an empty axis still has the windows that padding makes."""
    x, w = np.zeros(shape, np.float32), np.ones((3, 2, 3, 3), np.float32)
    for run in (run_numpy, run_jax):
        (y,) = run(node_case("Conv", 11, [x, w], pads=(2, 1, 2, 1)))
        assert y.shape == (shape[0], 3, shape[2] + 2, 5)
        assert not y.any()


def test_conv_batches_of_patches(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfolding few images at a time changes nothing."""
    x = rng.standard_normal((7, 3, 8, 8)).astype(np.float32)
    w = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    case = node_case("Conv", 11, [x, w])
    whole = run_numpy(case)[0]
    monkeypatch.setattr("xrt_core.kernels.convolution._PATCH_BYTES", 2 * 3 * 9 * 36 * 4)
    np.testing.assert_allclose(run_numpy(case)[0], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"strides": (2, 3), "output_padding": (1, 2)},
        {"strides": (2, 2), "pads": (1, 0, 1, 2), "dilations": (2, 1)},
        {"strides": (2, 2), "auto_pad": "SAME_UPPER"},
        {"strides": (2, 2), "auto_pad": "SAME_LOWER"},
        {"strides": (3, 2), "output_shape": (10, 8)},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose_is_the_adjoint(attributes: dict[str, Any], groups: int, rng: np.random.Generator) -> None:
    """<ConvTranspose(x), y> = <x, Conv(y)> over the canvas that the attributes crop."""
    x = rng.standard_normal((2, 4, 3, 3))
    w = rng.standard_normal((4, 3, 3, 3))
    strides, dilations = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    (got,) = run_numpy(node_case("ConvTranspose", 11, [x, w], group=groups, **attributes))
    full = tuple((3 - 1) * s + (3 - 1) * d + 1 for s, d in zip(strides, dilations, strict=True))
    extra = attributes.get("output_padding", (0, 0))
    upper = attributes.get("auto_pad") == "SAME_UPPER"
    out = attributes.get("output_shape") or (tuple(3 * s for s in strides) if "auto_pad" in attributes else None)
    if out:
        total = [max(0, f - o) for f, o in zip(full, out, strict=True)]
        begin = [t // 2 if upper else t - t // 2 for t in total]
    else:
        pads = attributes.get("pads", (0,) * 4)
        begin = list(pads[:2])
        out = tuple(f + e - pads[i] - pads[i + 2] for i, (f, e) in enumerate(zip(full, extra, strict=True)))
    assert got.shape == (2, 3 * groups, *out)
    probe = rng.standard_normal(got.shape)
    canvas = np.zeros((2, 3 * groups, *(f + 4 for f in full)))
    canvas[:, :, begin[0] : begin[0] + out[0], begin[1] : begin[1] + out[1]] = probe
    canvas = canvas[:, :, : full[0], : full[1]]
    back = conv_by_definition(canvas, w, strides, dilations, (0, 0), (0, 0), groups)
    assert math.isclose((got * probe).sum(), (x * back).sum(), rel_tol=1e-9)
    np.testing.assert_allclose(run_jax(node_case("ConvTranspose", 11, [x, w], group=groups, **attributes))[0], got)


def test_conv_integer_per_channel_zero_points(rng: np.random.Generator) -> None:
    """ConvInteger takes a zero point per output channel, and its padding stands for the input's zero point."""
    x = rng.integers(0, 256, (2, 3, 5, 5)).astype(np.uint8)
    w = rng.integers(-128, 128, (4, 3, 3, 3)).astype(np.int8)
    xz, wz = np.uint8(128), np.array([1, -2, 3, -128], np.int8)
    want = conv_by_definition(
        x.astype(int) - 128, w.astype(int) - wz.reshape(-1, 1, 1, 1).astype(int), (1, 1), (1, 1), (1, 1), (1, 1), 1
    )
    case = node_case("ConvInteger", 10, [x, w, np.asarray(xz), wz], pads=(1, 1, 1, 1))
    for run in (run_numpy, run_jax):
        (y,) = run(case)
        assert y.dtype == np.int32
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_qlinear_conv_per_channel(dtype: Any, rng: np.random.Generator) -> None:
    """QLinearConv with a scale per channel and a bias agrees with the formula and saturates."""
    x = rng.integers(0, 100, (1, 4, 6, 6)).astype(dtype)
    w = rng.integers(-60, 60, (4, 2, 3, 3)).astype(np.int8)
    bias = rng.integers(-3000, 3000, 4).astype(np.int32)
    xs, ys = np.array(0.05, np.float32), np.array(0.25, np.float32)
    ws = np.array([0.01, 0.02, 0.3, 0.001], np.float32)
    xz, yz, wz = np.array(7, dtype), np.array(50, dtype), np.zeros(4, np.int8)
    sums = conv_by_definition(x.astype(int) - 7, w, (1, 1), (1, 1), (0, 0), (0, 0), 2) + bias.reshape(-1, 1, 1)
    factor = (xs * ws.reshape(-1, 1, 1) / ys).astype(np.float32)
    limits = np.iinfo(dtype)
    want = np.clip(np.round(sums.astype(np.float32) * factor) + 50, limits.min, limits.max).astype(dtype)
    assert (want == limits.max).any()
    for run in (run_numpy, run_jax):
        (y,) = run(node_case("QLinearConv", 10, [x, xs, xz, w, ws, wz, ys, yz, bias], group=2))
        assert y.dtype == dtype
        assert np.abs(y.astype(int) - want.astype(int)).max() <= 1
        assert (y == want).mean() > 0.99


def test_causal_conv_in_steps_is_the_whole(rng: np.random.Generator) -> None:
    """Feeding the state back, one position at a time, gives what one call over the sequence gives."""
    x = rng.standard_normal((2, 3, 6)).astype(np.float32)
    w = rng.standard_normal((3, 1, 4)).astype(np.float32)
    b = rng.standard_normal(3).astype(np.float32)
    whole, last = run_numpy(node_case("CausalConvWithState", 27, [x, w, b, None], 2, activation="silu"))
    state, parts = np.zeros((2, 3, 3), np.float32), []
    for t in range(6):
        y, state = run_numpy(
            node_case("CausalConvWithState", 27, [x[:, :, t : t + 1], w, b, state], 2, activation="silu")
        )
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, axis=2), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_reference_agrees_on_old_versions(rng: np.random.Generator) -> None:
    """A model of opset 7 (Conv 1) gives what the reference evaluator gives."""
    x = rng.standard_normal((1, 4, 7, 7)).astype(np.float32)
    w = rng.standard_normal((6, 2, 3, 3)).astype(np.float32)
    attributes = {"group": 2, "strides": (2, 2), "pads": (1, 1, 1, 1)}
    case = node_case("Conv", 1, [x, w], **attributes)
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-5, atol=1e-5)


def test_misfits_are_named() -> None:
    """Channels that do not fit, and lists of the wrong length, are ShapeErrors that say which."""
    x, w = np.zeros((1, 3, 5, 5), np.float32), np.zeros((4, 2, 3, 3), np.float32)
    with pytest.raises(ShapeError, match=r"\(1, 3, 5, 5\).*\(4, 2, 3, 3\)"):
        run_numpy(node_case("Conv", 11, [x, w]))
    with pytest.raises(ShapeError, match="strides"):
        run_numpy(node_case("Conv", 11, [x, w[:, :1].repeat(3, axis=1)], strides=(1,)))
    with pytest.raises(ShapeError, match="auto_pad = 'SAME'"):
        run_numpy(node_case("Conv", 11, [x, w[:, :1].repeat(3, axis=1)], auto_pad="SAME"))
