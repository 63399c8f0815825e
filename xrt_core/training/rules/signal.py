"""Gradients of the Fourier transform and of its short-time form."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.training.gradient_context import Backward, Forward, emit, wide
from xrt_core.training.registry import composition, gradient
from xrt_core.training.rules.movement import pad


def _dft(x: Tensor, length: int, axis: int, inverse: bool = False, onesided: bool = False) -> Tensor:
    """Return the transform of x[..., 1 or 2], cropped or zero-padded to `length`, along `axis`."""
    given = [x, literal(length, INT64), literal(axis, INT64)]
    made: Tensor = emit("DFT", given, opset=20, inverse=int(inverse), onesided=int(onesided))
    return made


@gradient("DFT")
def dft(ctx: Backward) -> Any:
    """The transform is linear; its gradient is the adjoint: the opposite transform, times or over the length.

    One-sided spectra: in the forward transform omitted bins contribute nothing; in the inverse, all bins except the
    first and the one at half the length count twice.
    """
    x, g = ctx.inputs[0], wide(ctx.grad)
    axis = int(ctx.attr("axis", 1))
    if ctx.version >= 20:
        axis = -2 if ctx.input(2) is None else int(ctx.known(2, "axis").reshape(()))
    axis %= x.ndim
    inverse, onesided = bool(ctx.attr("inverse", 0)), bool(ctx.attr("onesided", 0))
    size = ctx.shape(x)[axis]
    length = 2 * (size - 1) if inverse and onesided else size
    if ctx.input(1) is not None:
        length = int(ctx.known(1, "dft_length").reshape(()))
    if inverse and onesided:
        weights = np.full(length // 2 + 1, 2.0 / length)
        weights[0] = 1.0 / length
        if length % 2 == 0:
            weights[-1] = 1.0 / length
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        back = _dft(g, length, axis, onesided=True) * literal(weights.reshape(shape), g.dtype)
    elif inverse:
        back = _dft(g, length, axis) / float(length)
    else:
        back = _dft(g, length, axis, inverse=True) * float(length)
    have = ctx.shape(back)[axis]
    if have > size:
        back = ops.Slice(back, [0], [size], [axis])
    elif have < size:
        back = pad(back, [0] * (x.ndim + axis) + [size - have] + [0] * (x.ndim - axis - 1))
    if ctx.shape(x)[-1] == 1:
        back = ops.Slice(back, [0], [1], [x.ndim - 1])
    return back.astype(x.dtype), None, None


@composition("STFT")
def stft(ctx: Forward) -> Any:
    """The frames, gathered and multiplied by the window, then transformed."""
    x, window = ctx.inputs[0], ctx.input(2)
    x = x.unsqueeze(2) if x.ndim == 2 else x
    hop, total = int(ctx.known(1, "frame_step").reshape(())), ctx.shape(x)[1]
    size = total if window is None else ctx.shape(window)[0]
    if ctx.input(3) is not None:
        size = int(ctx.known(3, "frame_length").reshape(()))
    if hop < 1 or size > total:
        raise ctx.error(f"frames of {size} every {hop} samples do not fit a signal of {total}")
    used = size if window is None else min(size, ctx.shape(window)[0])
    at = np.arange((total - size) // hop + 1)[:, None] * hop + np.arange(used)[None, :]
    frames = ops.Gather(wide(x), literal(at, INT64), axis=1)
    if window is not None:
        frames = frames * wide(window)[:used].astype(frames.dtype).unsqueeze(1)
    return _dft(frames, size, 2, onesided=bool(ctx.attr("onesided", 1))).astype(x.dtype)
