"""Direct convolution and pooling over one or two spatial axes, and BatchNormalization of inference."""

# device code states no types: numba finds them
# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels.windows import Windows, windows_of
from xrt_toy._toolkit import Scalar, cuda, device_function, library
from xrt_toy.kernels.context import FLOATS, Buffer, ToyOpContext, compute_type, only_first_output, toy_kernel
from xrt_toy.kernels.elementwise import maximum, walk


def _one_or_two_axes(node: Node) -> str:
    x = node.inputs[0]
    rank = len(x.shape or ()) - 2 if x is not None else 0
    return only_first_output(node) or ("" if rank in (1, 2) else f"toy slides windows over 1 or 2 axes, not {rank}")


def _geometry(windows: Windows) -> tuple[tuple[int, ...], ...]:
    """(height, width) of input, kernel, strides, dilations, padding at the begin, and output; one axis has height 1."""
    neutral = (1, 1, 1, 1, 0, 1)
    rows = (windows.size, windows.kernel, windows.strides, windows.dilations, windows.begin, windows.out)
    return tuple((*(d,) * (2 - len(row)), *row) for d, row in zip(neutral, rows, strict=True))


@functools.cache
def _convolving(scalar: Scalar) -> Any:
    """The kernel of Conv: each thread sums over the window and the channels of one output element."""
    zero = scalar(0)

    def conv(out, x, w, b, with_bias, n, channels, filters, groups, size, kernel, strides, dilations, begin, result):
        area, per_group, inputs = result[0] * result[1], filters // groups, channels // groups
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            column, row = i % result[1], i // result[1] % result[0]
            f, image = i // area % filters, i // area // filters
            total = scalar(b[f]) if with_bias else zero
            for c in range(inputs):
                plane = (image * channels + f // per_group * inputs + c) * size[0] * size[1]
                taps = (f * inputs + c) * kernel[0] * kernel[1]
                for u in range(kernel[0]):
                    y = row * strides[0] + u * dilations[0] - begin[0]
                    if y >= 0 and y < size[0]:
                        for v in range(kernel[1]):
                            z = column * strides[1] + v * dilations[1] - begin[1]
                            if z >= 0 and z < size[1]:
                                total += scalar(x[plane + y * size[1] + z]) * scalar(w[taps + u * kernel[1] + v])
            out[i] = total

    return conv


@toy_kernel("Conv", dtypes=FLOATS, check=_one_or_two_axes)
def conv_(ctx: ToyOpContext, x: Buffer, w: Buffer, b: Buffer | None = None) -> Buffer:
    """Convolution with groups, strides, dilations and padding."""
    out, windows = ctx.output(), windows_of(ctx, x.shape[2:], w.shape[2:])
    ctx.launch(
        _convolving(compute_type(x.dtype)), out.size, out, x, w, b or w, int(b is not None), out.size,
        x.shape[1], w.shape[0], int(ctx.attr("group", 1)), *_geometry(windows),
    )  # fmt: skip
    return out


@functools.cache
def _pooling(scalar: Scalar) -> Any:
    """The kernel of MaxPool: each thread goes over the window of one output element."""
    larger, lowest = device_function(maximum(library(scalar))), scalar(-np.inf)

    def max_pool(out, x, n, size, kernel, strides, dilations, begin, result):
        area = result[0] * result[1]
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            column, row, plane = i % result[1], i // result[1] % result[0], i // area * size[0] * size[1]
            best = lowest
            for u in range(kernel[0]):
                y = row * strides[0] + u * dilations[0] - begin[0]
                if y >= 0 and y < size[0]:
                    for v in range(kernel[1]):
                        z = column * strides[1] + v * dilations[1] - begin[1]
                        if z >= 0 and z < size[1]:
                            best = larger(best, scalar(x[plane + y * size[1] + z]))
            out[i] = best

    return max_pool


@toy_kernel("MaxPool", dtypes=FLOATS, check=_one_or_two_axes)
def max_pool_(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """The largest element of each window; padding never wins."""
    out, windows = ctx.output(), windows_of(ctx, x.shape[2:], ctx.attr("kernel_shape"))
    ctx.launch(_pooling(compute_type(x.dtype)), out.size, out, x, out.size, *_geometry(windows))
    return out


def _factor(m: SimpleNamespace, epsilon: float) -> Callable[..., Any]:
    """scale / sqrt(variance + epsilon)."""
    small, sqrt = m.T(epsilon), m.sqrt
    return lambda scale, variance: scale / sqrt(variance + small)


def _scaled(m: SimpleNamespace) -> Callable[..., Any]:
    """(x - mean) factor."""
    return lambda x, mean, factor: (x - mean) * factor


def _shifted(m: SimpleNamespace) -> Callable[..., Any]:
    """x + bias."""
    return lambda x, bias: x + bias


def _of_inference(node: Node) -> str:
    training = node.attributes.get("training_mode", 0) or node.version < 9
    return "toy's BatchNormalization is that of inference" if training else only_first_output(node)


@toy_kernel("BatchNormalization", dtypes=FLOATS, check=_of_inference)
def batch_normalization(
    ctx: ToyOpContext, x: Buffer, scale: Buffer, bias: Buffer, mean: Buffer, variance: Buffer
) -> Buffer:
    """Three elementwise launches: a factor for each channel in a temporary, then the product, then the sum."""

    def per_channel(b: Buffer) -> Buffer:
        return ctx.view(b, (b.size, *(1,) * (len(x.shape) - 2)))

    factor = ctx.temporary(scale.shape, scale.dtype)
    walk(ctx, _factor, [scale, variance], factor, parameters=(float(ctx.attr("epsilon", 1e-5)),))
    out = walk(ctx, _scaled, [x, per_channel(mean), per_channel(factor)], ctx.output())
    return walk(ctx, _shifted, [out, per_channel(bias)], out)
