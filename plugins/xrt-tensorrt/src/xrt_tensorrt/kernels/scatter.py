"""Scattering with a reduction, and into zeros: what TensorRT's layer, which only overwrites, does not do.

Where each update goes is a comparison with every place. What meets is reduced over an axis of its own; many large sums
are a product with the matrix of where they go instead, which is rounded as products are (TF32).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels import OpContext
from xrt_tensorrt.kernels.context import FLOATS, INTEGERS, NetworkContext, shapes, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, INT64, Tensor

_LARGEST: Final = 2**26
"""Elements of the matrix of where each update goes; each costs a comparison."""

_EXACT: Final = 2**22
"""Up to so many elements, updates and places apart, sums are added up as they are."""

_OPERATIONS: Final = {"add": "SUM", "mul": "PROD", "max": "MAX", "min": "MIN"}


def _neutral(operation: str, dtype: np.dtype) -> float | int:
    if operation in ("SUM", "PROD"):
        return 0 if operation == "SUM" else 1
    if dtype in FLOATS:
        return -math.inf if operation == "MAX" else math.inf
    limits = np.iinfo(dtype)
    return int(limits.min if operation == "MAX" else limits.max)


def _joined(a: Tensor, b: Tensor, operation: str) -> Tensor:
    combine: Callable[[Tensor], Tensor] = {
        "SUM": a.__add__, "PROD": a.__mul__, "MAX": a.maximum, "MIN": a.minimum,
    }[operation]  # fmt: skip
    return combine(b)


def _wide(x: Tensor) -> Tensor:
    """Floats as float32: what meets is rounded once, at the end."""
    return x.astype(F32) if x.dtype in FLOATS else x


def _nd_check(node: Node) -> str:
    if node.attributes.get("reduction", "none") not in _OPERATIONS:
        return "ScatterND without reduction is the parser's"
    data, indices, _ = shapes(node)
    depth = indices[-1]
    cells, rows = math.prod(data[:depth]), math.prod(indices[:-1])
    into = node.inputs[0]
    by_product = node.attributes["reduction"] == "add" and into is not None and into.dtype in FLOATS
    width = 1 if by_product else math.prod(data[depth:])
    return "" if cells * rows * width <= _LARGEST else f"{cells} places by {rows} updates are too many to compare"


@tensorrt_kernel("ScatterND", dtypes=FLOATS | INTEGERS, train=True, check=_nd_check)
def scatter_nd(ctx: NetworkContext, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Updates added, multiplied, or compared into `data` at the slices that the last axis of `indices` names."""
    operation, dtype = _OPERATIONS[ctx.attr("reduction")], data.dtype
    data, updates = _wide(data), _wide(updates)
    shape, depth = data.sizes(), indices.size(-1)
    cells, rows, width = math.prod(shape[:depth]), math.prod(indices.sizes()[:-1]), math.prod(shape[depth:])
    sizes = np.array(shape[:depth], np.int64)
    strides = np.array([math.prod(shape[i + 1 : depth]) for i in range(depth)], np.int64)
    at = indices.astype(INT64).reshape((rows, depth))
    at = ctx.layers.where(at < 0, at + sizes, at) * strides
    flat = at.reduce("SUM", (1,), keep=True)
    goes = flat.equals(np.arange(cells, dtype=np.int64)[None])  # [rows, cells]
    news = updates.reshape((rows, width))
    if operation == "SUM" and dtype in FLOATS and cells * rows * width > _EXACT:
        moved = goes.astype(F32).transpose((1, 0)).matmul(news)
        return (data + moved.reshape(shape)).astype(dtype)
    neutral = _neutral(operation, news.dtype)
    each = ctx.layers.where(goes.reshape((rows, cells, 1)), news.reshape((rows, 1, width)), neutral)
    moved = each.reduce(operation, (0,))
    return _joined(data, moved.reshape(shape), operation).astype(dtype)


def _elements_check(node: Node) -> str:
    if node.attributes.get("reduction", "none") not in _OPERATIONS:
        return "ScatterElements without reduction is the parser's"
    data, indices, _ = shapes(node)
    axis = OpContext(node, np).attr("axis", 0)
    if math.prod(indices) * data[axis] > _LARGEST:
        return f"{data[axis]} places by {math.prod(indices)} updates are too many to compare"
    return ""


@tensorrt_kernel("ScatterElements", dtypes=FLOATS | INTEGERS, train=True, check=_elements_check)
def scatter_elements(ctx: NetworkContext, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Updates added, multiplied, or compared into `data`, each at its own index along an axis."""
    operation, dtype = _OPERATIONS[ctx.attr("reduction")], data.dtype
    data, updates = _wide(data), _wide(updates)
    axis, neutral = int(ctx.attr("axis", 0)) % data.rank, _neutral(operation, data.dtype)
    length = data.size(axis)
    at = indices.astype(INT64)
    at = ctx.layers.where(at < 0, at + length, at)
    # the axis of places stands before that of the updates
    apart = (*at.shape[:axis], 1, *at.shape[axis:])
    places = np.arange(length, dtype=np.int64).reshape((-1, *(1,) * (data.rank - axis)))
    goes = at.reshape(apart).equals(places.reshape((1,) * axis + places.shape))
    found = ctx.layers.where(goes, updates.reshape(apart), neutral).reduce(operation, (axis + 1,))
    missing = [n - m for n, m in zip(data.sizes(), found.sizes(), strict=True)]
    found = found.padded(range(data.rank), [0] * data.rank, missing, neutral)
    return _joined(data, found, operation).astype(dtype)


@tensorrt_kernel("MaxUnpool", dtypes=FLOATS, of=(0,), static=(2,))
def max_unpool(ctx: NetworkContext, x: Tensor, indices: Tensor, output_shape: np.ndarray | None = None) -> Tensor:
    """x in zeros, where the indices of its maxima say; `output_shape` pads that with zeros."""
    kernel, rank = tuple(map(int, ctx.attr("kernel_shape"))), x.rank - 2
    strides = tuple(map(int, ctx.attr("strides") or (1,) * rank))
    pads = tuple(map(int, ctx.attr("pads") or (0,) * (2 * rank)))
    inner = [(x.size(2 + i) - 1) * strides[i] + kernel[i] - pads[i] - pads[rank + i] for i in range(rank)]
    shape = (*x.sizes()[:2], *inner)
    count = math.prod(shape)
    zeros = ctx.layers.constant(np.zeros(count, np.float32)).astype(x.dtype)
    layer = ctx.layers.network.add_scatter(
        zeros.raw, indices.reshape((-1,)).raw, x.reshape((-1,)).raw, ctx.layers.trt.ScatterMode.ELEMENT
    )
    layer.axis = 0
    made = ctx.layers.of(layer).reshape(shape)
    if output_shape is None:
        return made
    more = [int(n) - m for n, m in zip(output_shape, shape, strict=True)]
    return made.padded(range(x.rank), [0] * x.rank, more, 0)
