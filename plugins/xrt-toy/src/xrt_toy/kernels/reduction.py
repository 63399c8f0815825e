"""Reductions, one block for each result: sums, means, products and extrema, Softmax and LayerNormalization."""

# device code states no types: numba finds them
# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_toy import _toolkit
from xrt_toy._toolkit import Scalar, cuda, device_function, element_type, library
from xrt_toy.kernels.context import (
    FLOATS,
    NUMBERS,
    Buffer,
    ToyOpContext,
    accumulator_type,
    only_first_output,
    toy_kernel,
)  # fmt: skip
from xrt_toy.kernels.elementwise import collapse, maximum, minimum, offset, row_major


def _within_block(combine: Callable[..., Any]) -> Any:
    """The device function that combines one value from each thread of a block, and gives all of them the result."""

    @device_function
    def combined(memory, value):
        t, half = cuda.threadIdx.x, cuda.blockDim.x // 2
        memory[t] = value
        cuda.syncthreads()
        while half > 0:
            if t < half:
                memory[t] = combine(memory[t], memory[t + half])
            cuda.syncthreads()
            half //= 2
        result = memory[0]
        cuda.syncthreads()  # the memory may be used again when everybody has read
        return result

    return combined


def _add(a, b):
    return a + b


def _multiply(a, b):
    return a * b


@functools.cache
def _reducing(op_type: str, dtype: np.dtype) -> Any:
    """The kernel of a reduction of elements of `dtype`."""
    scalar = accumulator_type(dtype)
    bounds = (-np.inf, np.inf) if issubclass(scalar, np.floating) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    plain, start = {
        "ReduceSum": (_add, 0), "ReduceMean": (_add, 0), "ReduceProd": (_multiply, 1),
        "ReduceMax": (maximum(library(scalar)), bounds[0]), "ReduceMin": (minimum(library(scalar)), bounds[1]),
    }[op_type]  # fmt: skip
    combine, first, mean = device_function(plain), scalar(start), op_type == "ReduceMean"
    combined, element = _within_block(combine), element_type(scalar)

    def reduce(out, x, n, kept, kept_strides, count, shape, strides):
        memory = cuda.shared.array(0, element)
        for o in range(cuda.blockIdx.x, n, cuda.gridDim.x):
            base = offset(o, kept, kept_strides)
            value = first
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                value = combine(value, scalar(x[base + offset(i, shape, strides)]))
            value = combined(memory, value)
            if cuda.threadIdx.x == 0:
                out[o] = value / scalar(count) if mean else value

    return reduce


def _launch_rows(ctx: ToyOpContext, kernel: Any, rows: int, scalar: Scalar, *arguments: Any) -> None:
    """A block for each row, with shared memory for one value of each thread."""
    threads = _toolkit.THREADS
    ctx.launch(kernel, rows, *arguments, block=threads, shared=threads * np.dtype(scalar).itemsize)


def reduce_over(ctx: ToyOpContext, op_type: str, x: Buffer, axes: set[int], out: Buffer) -> Buffer:
    """Launch the reduction of x over `axes`, and return `out`, which has the size of what is left."""
    strides = list(enumerate(zip(x.shape, row_major(x.shape), strict=True)))
    kept, over = ([ds for axis, ds in strides if (axis in axes) == inside] for inside in (False, True))
    (ks, kt), (os_, ot) = (collapse(*([d for d, _ in part], [s for _, s in part])) for part in (kept, over))
    count = math.prod(d for d, _ in over)
    kernel = _reducing(op_type, x.dtype)
    _launch_rows(ctx, kernel, out.size, accumulator_type(x.dtype), out, x, out.size, ks, kt, count, os_, ot)
    return out


def _means_floats(node: Node) -> str:
    x = node.inputs[0]
    mean = node.op_type == "ReduceMean" and x is not None and x.dtype not in FLOATS
    return "toy takes the mean of floats only" if mean else ""


_REDUCTIONS: Final = ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin")


@toy_kernel(*_REDUCTIONS, dtypes=NUMBERS, of=(0,), static=(1,), check=_means_floats)
def reduce_(ctx: ToyOpContext, x: Buffer, axes: np.ndarray | None = None) -> Buffer:
    """Over the axes given as an input or an attribute; none given means all, or none with noop_with_empty_axes."""
    given = list(ctx.attr("axes") or ()) if axes is None else axes.reshape(-1).tolist()
    rank, out = len(x.shape), ctx.output()
    if not given:
        given = [] if ctx.attr("noop_with_empty_axes", 0) else list(range(rank))
    return reduce_over(ctx, ctx.node.op_type, x, {int(a) % rank for a in given}, out)


@toy_kernel("GlobalAveragePool", dtypes=FLOATS)
def global_average_pool(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """The mean over all spatial axes."""
    return reduce_over(ctx, "ReduceMean", x, set(range(2, len(x.shape))), ctx.output())


@functools.cache
def _softmax(scalar: Scalar, logarithm: bool) -> Any:
    """The kernel of Softmax and LogSoftmax: a block finds the maximum and the sum of its row, then writes it."""
    m = library(scalar)
    exp, log, zero, lowest, element = m.exp, m.log, m.T(0), m.T(-np.inf), element_type(scalar)
    larger = device_function(maximum(m))
    max_of, sum_of = _within_block(larger), _within_block(device_function(_add))

    def softmax(out, x, rows, count, step):
        memory = cuda.shared.array(0, element)
        for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            base = row // step * count * step + row % step
            top, total = lowest, zero
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                top = larger(top, scalar(x[base + i * step]))
            top = max_of(memory, top)
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                total += exp(scalar(x[base + i * step]) - top)
            total = sum_of(memory, total)
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                y = scalar(x[base + i * step]) - top
                out[base + i * step] = y - log(total) if logarithm else exp(y) / total

    return softmax


@toy_kernel("Softmax", "LogSoftmax", dtypes=FLOATS)
def softmax_(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """Along one axis; before version 13 over all axes from that one on."""
    out, old = ctx.output(), ctx.version < 13
    axis = int(ctx.attr("axis", 1 if old else -1)) % max(len(x.shape), 1)
    count = math.prod(x.shape[axis:]) if old else math.prod(x.shape[axis : axis + 1])
    step = 1 if old else math.prod(x.shape[axis + 1 :])
    scalar = accumulator_type(x.dtype)
    kernel = _softmax(scalar, ctx.node.op_type == "LogSoftmax")
    _launch_rows(ctx, kernel, x.size // count if count else 0, scalar, out, x, x.size // max(count, 1), count, step)
    return out


@functools.cache
def _normalizing(scalar: Scalar, epsilon: float) -> Any:
    """The kernel of LayerNormalization: mean, then variance around it, then the row."""
    one, zero, small, sqrt = scalar(1), scalar(0), scalar(epsilon), library(scalar).sqrt
    sum_of, element = _within_block(device_function(_add)), element_type(scalar)

    def layer_norm(out, x, scale, bias, rows, count, scale_step, bias_step, with_bias):
        memory = cuda.shared.array(0, element)
        for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            base, total, squares = row * count, zero, zero
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                total += scalar(x[base + i])
            mean = sum_of(memory, total) / scalar(count)
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                away = scalar(x[base + i]) - mean
                squares += away * away
            factor = one / sqrt(sum_of(memory, squares) / scalar(count) + small)
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                y = (scalar(x[base + i]) - mean) * factor * scalar(scale[i * scale_step])
                out[base + i] = y + scalar(bias[i * bias_step]) if with_bias else y

    return layer_norm


def _whole_rows(node: Node) -> str:
    """Scale and bias must cover the normalised axes, or be single elements."""
    x = node.inputs[0]
    shape = tuple(x.shape or ()) if x is not None else ()
    axis = int(node.attributes.get("axis", -1)) % max(len(shape), 1)  # type: ignore[arg-type]
    for v in node.inputs[1:]:
        given = tuple(v.shape or ()) if v is not None else ()
        if v is not None and given != shape[axis:] and any(d != 1 for d in given):
            return f"toy wants scale and bias of LayerNormalization to have the shape {list(shape[axis:])}"
    return only_first_output(node)


@toy_kernel("LayerNormalization", dtypes=FLOATS, check=_whole_rows)
def layer_normalization(ctx: ToyOpContext, x: Buffer, scale: Buffer, bias: Buffer | None = None) -> Buffer:
    """Rows of all axes from `axis` on, brought to mean 0 and variance 1, then scaled and shifted."""
    out, axis = ctx.output(), int(ctx.attr("axis", -1)) % len(x.shape)
    count, rows = math.prod(x.shape[axis:]), math.prod(x.shape[:axis])
    scalar = accumulator_type(x.dtype)
    steps = [0 if b is None or b.size == 1 else 1 for b in (scale, bias)]
    _launch_rows(
        ctx, _normalizing(scalar, float(ctx.attr("epsilon", 1e-5))), rows if count else 0, scalar,
        out, x, scale, bias or scale, rows, count, *steps, int(bias is not None),
    )  # fmt: skip
    return out
