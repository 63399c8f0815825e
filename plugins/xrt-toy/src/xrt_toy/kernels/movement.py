"""Operators that move elements: views without a kernel, strided copies, and Gather."""

# device code states no types: numba finds them
# mypy: allow-untyped-defs
from __future__ import annotations

import math

import numpy as np

from xrt_core.engine import op_kernel
from xrt_core.ir.graph import Node
from xrt_toy._toolkit import cuda
from xrt_toy.kernels.context import ANY, Buffer, ToyOpContext, toy_kernel
from xrt_toy.kernels.elementwise import row_major, same, walk


@toy_kernel("Flatten", "Identity", dtypes=ANY)
@toy_kernel("Reshape", "Squeeze", "Unsqueeze", dtypes=ANY, of=(0,), static=(1,))
def view(ctx: ToyOpContext, x: Buffer, _: np.ndarray | None = None) -> Buffer:
    """The same memory in the shape that inference found: no kernel runs."""
    return ctx.view(x, ctx.output().shape)


@op_kernel(
    "Assign",
    domain="xrt",
    engine="toy",
    devices=("cuda",),
    dtypes=ANY,
    train=True,
    mutable_variables=(0,),
    model_update=True,
)
def assign(ctx: ToyOpContext, variable: Buffer, value: Buffer) -> Buffer:
    """The new value of a variable; the function's alias says that it takes the variable's storage."""
    return ctx.view(value, value.shape)


@toy_kernel("Transpose", dtypes=ANY)
def transpose(ctx: ToyOpContext, x: Buffer) -> Buffer:
    """A copy that reads with permuted strides."""
    order = ctx.attr("perm") or tuple(reversed(range(len(x.shape))))
    strides = row_major(x.shape)
    return walk(ctx, same, [x], ctx.output(), strides=[[strides[a] for a in order]])


@toy_kernel("Expand", dtypes=ANY, of=(0,), static=(1,))
def expand(ctx: ToyOpContext, x: Buffer, _: np.ndarray) -> Buffer:
    """A copy that reads with strides of 0 where it repeats."""
    return walk(ctx, same, [x], ctx.output())


@toy_kernel("Concat", dtypes=ANY)
def concat(ctx: ToyOpContext, *inputs: Buffer) -> Buffer:
    """For each input a copy into its part of the output."""
    out = ctx.output()
    strides = row_major(out.shape)
    axis = int(ctx.attr("axis", 1)) % len(out.shape)
    at = 0
    for x in inputs:
        walk(ctx, same, [x], out, shape=x.shape, out_strides=strides, start=at * strides[axis])
        at += x.shape[axis]
    return out


def _beyond_its_edges(node: Node) -> str:
    data = node.inputs[0]
    axis = int(node.attributes.get("axis", 0))  # type: ignore[arg-type]
    empty = data is None or not data.shape or not data.shape[axis]
    return "toy cannot gather from an axis of length 0" if empty else ""


@toy_kernel("Gather", dtypes=ANY, of=(0,), check=_beyond_its_edges)
def gather(ctx: ToyOpContext, data: Buffer, indices: Buffer) -> Buffer:
    """Slices of data along `axis`; negative indices count from the end, and none reaches beyond it."""
    out, axis = ctx.output(), int(ctx.attr("axis", 0)) % len(data.shape)
    inner, length = math.prod(data.shape[axis + 1 :]), data.shape[axis]
    ctx.launch(gather_kernel, out.size, out, data, indices, out.size, indices.size, inner, length)
    return out


def gather_kernel(out, data, indices, n, count, inner, length):
    """out[outer, count, inner] = data[outer, indices[count], inner]."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        row = i // inner
        k = indices[row % count]
        if k < 0:
            k += length
        k = min(max(k, 0), length - 1)  # a bad index reads a wrong element, never foreign memory
        out[i] = data[(row // count * length + k) * inner + i % inner]
