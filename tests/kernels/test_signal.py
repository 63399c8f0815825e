"""Signal kernels against the ONNX backend tests, the reference evaluator and exact properties."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError


@pytest.mark.parametrize("length", [None, 5, 8, 9])
@pytest.mark.parametrize(("inverse", "onesided", "parts"), [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 2)])
@pytest.mark.parametrize("version", [17, 20])
def test_dft_as_the_reference(
    version: int, inverse: int, onesided: int, parts: int, length: int | None, rng: np.random.Generator
) -> None:
    """Both directions, one- and two-sided, cut and zero-padded, with the axis as attribute and as input."""
    x = rng.standard_normal((2, 7, 3, parts)).astype(np.float32)
    inputs = [x, None if length is None else np.array(length)]
    attributes = {"inverse": inverse, "onesided": onesided}
    if version == 17:
        case = node_case("DFT", 17, inputs[: 1 if length is None else 2], axis=1, **attributes)
    else:
        case = node_case("DFT", 20, [*inputs, np.array(-3)], **attributes)
    (want,) = run_reference(case)
    runs = [run_numpy(case)[0]] + ([run_jax(case)[0]] if length in (None, 9) and version == 20 else [])
    for got in runs:
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_dft_there_and_back(n: int, run: Any, rng: np.random.Generator) -> None:
    """The inverse of the transform of float64 is the signal; the spectrum of a real signal is exactly symmetric."""
    x = rng.standard_normal((2, n, 1))
    (spectrum,) = run(node_case("DFT", 20, [x]))
    np.testing.assert_array_equal(spectrum[:, 1:, 0], spectrum[:, :0:-1, 0])
    (back,) = run(node_case("DFT", 20, [spectrum], inverse=1))
    np.testing.assert_allclose(back[..., 0], x[..., 0], atol=1e-12)
    np.testing.assert_allclose(back[..., 1], 0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_dft_of_half_precision(dtype: Any) -> None:
    """Half precision is transformed in float32 and rounded once."""
    x = np.arange(16).reshape(1, 16, 1).astype(dtype)
    (got,) = run_numpy(node_case("DFT", 20, [x]))
    assert got.dtype == dtype
    want = np.fft.fft(np.arange(16))
    np.testing.assert_allclose(got[0, :, 0].astype(np.float64), want.real, rtol=4e-3, atol=1e-5)


def test_dft_refuses_the_axis_of_parts() -> None:
    """The last axis holds real and imaginary parts."""
    with pytest.raises(ShapeError, match="real and imaginary"):
        run_numpy(node_case("DFT", 20, [np.zeros((2, 4, 1)), None, np.array(2)]))


@pytest.mark.parametrize(("parts", "onesided"), [(1, 1), (1, 0), (2, 0)])
@pytest.mark.parametrize(("window", "length"), [(True, False), (False, True), (True, True)])
def test_stft_as_the_reference(parts: int, onesided: int, window: bool, length: bool, rng: np.random.Generator) -> None:
    """Frames from the window, from the length, or both."""
    x = rng.standard_normal((2, 31, parts)).astype(np.float32)
    shape = rng.standard_normal(8).astype(np.float32) if window else None
    case = node_case("STFT", 17, [x, np.array(3), shape, *([np.array(8)] if length else [])], onesided=onesided)
    (want,) = run_reference(case)
    for got in (run_numpy(case)[0], run_jax(case)[0]):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_real_signal_may_have_two_axes(rng: np.random.Generator) -> None:
    """As ONNX Runtime takes it, and as torch's exporters write it: the results are those of one with an axis of 1."""
    x, shape = rng.standard_normal((2, 31)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    flat, whole = (node_case("STFT", 17, [signal, np.array(3), shape]) for signal in (x, x[..., None]))
    (want,) = run_reference(whole)
    for got in (run_numpy(flat)[0], run_jax(flat)[0]):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_stft_longer_than_the_signal_says_so() -> None:
    """A frame longer than the signal raises ShapeError."""
    with pytest.raises(ShapeError, match="frames of 8"):
        run_numpy(node_case("STFT", 17, [np.zeros((1, 4, 1)), np.array(1), np.ones(8)]))


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(op: str, periodic: int) -> None:
    """The formulas of the reference in float64; symmetric windows mirror; one sample is 1; sizes 0 and dtypes."""
    case = node_case(op, 17, [np.array(9)], periodic=periodic, output_datatype=11)
    (want,) = run_reference(case)
    (got,) = run_numpy(case)
    np.testing.assert_allclose(got, want, atol=1e-12)
    if not periodic:
        np.testing.assert_allclose(got, got[::-1], atol=1e-12)
    assert run_numpy(node_case(op, 17, [np.array(1)], periodic=periodic))[0].tolist() == [1.0]
    (empty,) = run_numpy(node_case(op, 17, [np.array(0, np.int32)], periodic=periodic, output_datatype=16))
    assert (empty.shape, empty.dtype) == ((0,), ml_dtypes.bfloat16)


def test_mel_weights_as_the_reference(rng: np.random.Generator) -> None:
    """Random banks, also those whose triangles are a bin wide or less."""
    for bins in (1, 3, 8, 19):
        values = [np.array(bins), np.array(int(rng.integers(16, 256))), np.array(8000)]
        edges = [np.array(rng.uniform(0, 300), np.float32), np.array(rng.uniform(500, 4000), np.float32)]
        case = node_case("MelWeightMatrix", 17, values + edges)
        np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], atol=1e-6)
