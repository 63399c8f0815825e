"""Kernels of signal processing: DFT, STFT, MelWeightMatrix and the windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.movement import axis_of
from xrt_core.kernels.namespace import narrow, widen
from xrt_core.kernels.registry import OpContext, kernel


def _scalar(x: Any) -> int:
    return int(np.asarray(x).reshape(-1)[0])


def _complex(x: Any) -> Any:
    """The complex signal of (..., 2), or the real one of (..., 1)."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _forward(xp: Any, x: Any, length: int, axis: int, onesided: bool) -> Any:
    """The spectrum of a real or complex signal as (..., 2); `onesided` keeps the first length // 2 + 1 bins."""
    signal, lead = _complex(x), (slice(None),) * axis
    if x.shape[-1] == 1:  # half the work, and exactly symmetric
        spectrum = xp.fft.rfft(signal, n=length, axis=axis)
        if not onesided:
            mirrored = spectrum[(*lead, slice(1, (length + 1) // 2))][(*lead, slice(None, None, -1))]
            spectrum = xp.concatenate((spectrum, xp.conj(mirrored)), axis=axis)
    else:
        spectrum = xp.fft.fft(signal, n=length, axis=axis)
        if onesided:
            spectrum = spectrum[(*lead, slice(0, length // 2 + 1))]
    return xp.stack((spectrum.real, spectrum.imag), axis=-1)


@kernel("DFT", static=(1, 2))
def dft(ctx: OpContext, x: Any, length: Any = None, axis: Any = None) -> Any:
    """DFT: the axis is an attribute (default 1) in version 17, an input (default -2) from 20; float32 at least.

    onesided with inverse gives a real signal, (..., 1), of length 2 * (bins - 1) unless `dft_length` is given.
    """
    xp = ctx.xp
    if ctx.version < 20:
        where = ctx.attr("axis", 1)
    else:
        where = -2 if axis is None else _scalar(axis)
    where = axis_of(where, x.ndim, "DFT")
    if where == x.ndim - 1:
        raise ShapeError(f"DFT: axis {where} of {list(x.shape)} holds real and imaginary parts; give one before it")
    inverse, onesided = bool(ctx.attr("inverse", 0)), bool(ctx.attr("onesided", 0))
    size = x.shape[where]
    if length is not None:
        size = _scalar(length)
    elif inverse and onesided:
        size = 2 * (size - 1)
    wide = widen(x)
    if not inverse:
        out = _forward(xp, wide, size, where, onesided)
    elif onesided:
        out = xp.fft.irfft(_complex(wide), n=size, axis=where)[..., None]
    else:
        signal = xp.fft.ifft(_complex(wide), n=size, axis=where)
        out = xp.stack((signal.real, signal.imag), axis=-1)
    return narrow(out, x.dtype)


@kernel("STFT", static=(1, 3))
def stft(ctx: OpContext, x: Any, step: Any, window: Any = None, length: Any = None) -> Any:
    """STFT of (batch, signal, 1 or 2): (batch, frames, bins, 2); without a window the frames are rectangular.

    A signal (batch, signal) is real, as torch's exporters write it.
    """
    xp = ctx.xp
    if x.ndim == 2:
        x = x[..., None]
    if length is not None:
        size = _scalar(length)
    else:
        size = x.shape[1] if window is None else window.shape[0]
    hop = _scalar(step)
    if hop < 1 or size > x.shape[1]:
        raise ShapeError(f"STFT: frames of {size} every {hop} samples do not fit a signal of {x.shape[1]}")
    frames = (x.shape[1] - size) // hop + 1
    used = size if window is None else min(size, window.shape[0])
    at = np.arange(frames)[:, None] * hop + np.arange(used)[None, :]
    cut = xp.take(widen(x), xp.asarray(at), axis=1)
    if window is not None:
        cut = cut * widen(window)[:used, None]
    return narrow(_forward(xp, cut, size, 2, bool(ctx.attr("onesided", 1))), x.dtype)


def _cosine_window(ctx: OpContext, size: Any, weights: tuple[float, ...]) -> Any:
    """w0 - w1 cos(a) + w2 cos(2a) with a = 2 pi n / N, N one less where the window is symmetric."""
    count = _scalar(size)
    span = count if ctx.attr("periodic", 1) else count - 1
    angle = 2 * np.pi * np.arange(count) / max(span, 1)
    values = sum((-1) ** k * w * np.cos(k * angle) for k, w in enumerate(weights))
    if count == 1:
        values = np.ones(1)
    return ctx.xp.asarray(np.asarray(values).astype(ONNX_TO_DTYPE[ctx.attr("output_datatype", 1)]))


@kernel("HannWindow", static=(0,))
def hann_window(ctx: OpContext, size: Any) -> Any:
    """HannWindow of `size` samples; a window of one sample is 1."""
    return _cosine_window(ctx, size, (0.5, 0.5))


@kernel("HammingWindow", static=(0,))
def hamming_window(ctx: OpContext, size: Any) -> Any:
    """HammingWindow with ONNX's weights 25/46 and 21/46."""
    return _cosine_window(ctx, size, (25 / 46, 21 / 46))


@kernel("BlackmanWindow", static=(0,))
def blackman_window(ctx: OpContext, size: Any) -> Any:
    """BlackmanWindow with weights 0.42, 0.5 and 0.08."""
    return _cosine_window(ctx, size, (0.42, 0.5, 0.08))


@kernel("MelWeightMatrix", static=(0, 1, 2, 3, 4))
def mel_weight_matrix(ctx: OpContext, bins: Any, dft_length: Any, rate: Any, low: Any, high: Any) -> Any:
    """MelWeightMatrix (dft_length // 2 + 1, bins): triangles whose corners are evenly spaced in mel.

    The spacing is (high - low) / (bins + 2), as the operator's reference has it.
    """
    count, length = _scalar(bins), _scalar(dft_length)
    edges = np.array([float(np.asarray(v).reshape(-1)[0]) for v in (low, high)])
    mel = 2595 * np.log10(1 + edges / 700)
    corners = mel[0] + np.arange(count + 2) * (mel[1] - mel[0]) / (count + 2)
    hertz = 700 * (10 ** (corners / 2595) - 1)
    bin_of = ((length + 1) * hertz // _scalar(rate)).astype(np.int64)
    left, centre, right = bin_of[:-2], bin_of[1:-1], bin_of[2:]
    row = np.arange(length // 2 + 1)[:, None]
    rising = (row - left) / np.maximum(centre - left, 1)
    falling = (right - row) / np.maximum(right - centre, 1)
    out = np.where((row >= left) & (row < centre), rising, 0.0)
    out = np.where((row > centre) & (row < right), falling, out)
    out = np.where(row == centre, 1.0, out)
    return ctx.xp.asarray(out.astype(ONNX_TO_DTYPE[ctx.attr("output_datatype", 1)]))
