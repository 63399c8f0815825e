"""Linear maps with known coefficients: spectra, resampling, grids, crops; and products and determinants of matrices."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.kernels import OpContext, find_kernel
from xrt_core.kernels.resize import interpolation_taps, nearest_indices, resize_steps, source_coordinates
from xrt_tensorrt.kernels.context import FLOATS, INTEGERS, NetworkContext, made_shape, shapes, tensorrt_kernel
from xrt_tensorrt.kernels.tensor import F32, Tensor

_LARGEST: Final = 2**24
_WIDEST: Final = 4
_SHRINKS: Final = 16


def _host(ctx: NetworkContext, *inputs: Any) -> Any:
    """What the host's kernel of the node makes of arrays."""
    portable = find_kernel(ctx.node.domain, ctx.node.op_type)
    assert portable is not None
    return portable.function(OpContext(ctx.node, np), *inputs)


def _axis(ctx: NetworkContext, rank: int, axis: np.ndarray | None) -> int:
    if ctx.version < 20:
        return int(ctx.attr("axis", 1)) % rank
    return (-2 if axis is None else int(np.asarray(axis).reshape(-1)[0])) % rank


def _spectrum_check(node: Node) -> str:
    longest = max(*shapes(node)[0], *made_shape(node))
    return "" if 4 * longest**2 <= _LARGEST else f"a spectrum of {longest} elements takes too large a matrix"


@tensorrt_kernel("DFT", dtypes=FLOATS, of=(0,), static=(1, 2), check=_spectrum_check)
def dft(ctx: NetworkContext, x: Tensor, length: np.ndarray | None = None, axis: np.ndarray | None = None) -> Tensor:
    """A product with the matrix of the transform, which is what the host makes of each unit vector."""
    where, last = _axis(ctx, x.rank, axis), x.rank - 1
    size, parts = x.size(where), x.size(last)
    units = np.eye(size * parts, dtype=np.float64).reshape(size * parts, size, parts).astype(np.float32)
    place = np.array(-2, np.int64)
    if ctx.version < 20:  # the axis is an attribute, and there it is 1
        portable = find_kernel("", "DFT")
        assert portable is not None
        node = ctx.node.replace(attributes={**ctx.node.attributes, "axis": 1})
        found = np.asarray(portable.function(OpContext(node, np), units, length))
    else:
        found = np.asarray(_host(ctx, units, length, place))
    made = tuple(found.shape[1:])
    order = [i for i in range(last) if i != where]
    rows = x.astype(F32).transpose((*order, where, last))
    lead = rows.shape[:-2]
    matrix = ctx.layers.constant(found.reshape(size * parts, -1).astype(np.float32))
    product = rows.reshape((*lead, size * parts)).matmul(matrix)
    apart = product.reshape((*lead, *made))
    back = [0] * x.rank
    for i, a in enumerate((*order, where, last)):
        back[a] = i
    return apart.transpose(back).astype(x.dtype)


def _resize_check(node: Node) -> str:
    if not node.attributes.get("antialias", 0):
        return ""
    widest = max(a / max(b, 1) for a, b in zip(shapes(node)[0], made_shape(node), strict=True))
    return "" if widest <= _SHRINKS else f"shrinking {widest:.0f} times with antialiasing would take too many layers"


@tensorrt_kernel("Resize", dtypes=FLOATS, of=(0,), static=(1, 2, 3), check=_resize_check)
def resize(ctx: NetworkContext, x: Tensor, *rest: np.ndarray | None) -> Tensor:
    """Each axis by itself: elements at known places, by known weights, one after another."""
    axes = [a % x.rank for a in ctx.attr("axes") or range(x.rank)]
    shape = [n if n >= 0 or i in axes else 1 for i, n in enumerate(x.shape)]
    steps, sampling = resize_steps(ctx, shape, *rest)
    crops = sampling.coordinates == "tf_crop_and_resize"
    y = x.astype(F32)
    for step in steps:
        if step.out == step.size and step.scale == 1 and (not crops or (step.start, step.stop) == (0.0, 1.0)):
            continue
        x.size(step.axis)
        places, trailing = source_coordinates(step, sampling.coordinates), (1,) * (x.rank - step.axis - 1)
        if sampling.mode == "nearest":
            y = y.take(nearest_indices(step, places, sampling.nearest).astype(np.int32), step.axis)
        else:
            index, weights = interpolation_taps(step, places, sampling)
            total = None
            for tap in np.flatnonzero(weights.any(axis=0)):
                seen = y.take(index[:, tap].astype(np.int32), step.axis)
                seen = seen * weights[:, tap].astype(np.float32).reshape((-1, *trailing))
                total = seen if total is None else total + seen
            y = y.take(index[:, 0].astype(np.int32), step.axis) * 0.0 if total is None else total
        outside = (places < 0) | (places > step.size - 1)
        if crops and outside.any():
            mask = ctx.layers.tensor(outside.reshape((1,) * step.axis + (-1, *trailing)))
            y = ctx.layers.where(mask, float(sampling.extrapolation), y)
    return y.astype(x.dtype)


# --- grids and images -----------------------------------------------------------------------------------------------


@tensorrt_kernel("AffineGrid", dtypes=FLOATS, of=(0,), static=(1,))
def affine_grid(ctx: NetworkContext, theta: Tensor, size: np.ndarray) -> Tensor:
    """Positions in [-1, 1], innermost axis first, by each image's matrix."""
    dims = [int(d) for d in np.asarray(size).reshape(-1)[2:]]
    rank = len(dims)
    units = np.zeros((rank + 1, rank, rank + 1), np.float32)
    units[np.arange(rank + 1), 0, np.arange(rank + 1)] = 1
    count = np.array([rank + 1, 1, *dims], np.int64)
    places = np.asarray(_host(ctx, units, count))[..., 0].reshape(rank + 1, -1)  # [rank + 1, points]
    made = theta.astype(F32).matmul(ctx.layers.constant(places.astype(np.float32)[None])).transpose((0, 2, 1))
    return made.reshape((theta.shape[0], *dims, rank)).astype(theta.dtype)


@tensorrt_kernel("Col2Im", dtypes=FLOATS, of=(0,), static=(1, 2), train=True)
def col2im(ctx: NetworkContext, x: Tensor, image_shape: np.ndarray, block_shape: np.ndarray) -> Tensor:
    """Columns (N, C * block, positions) added up into an image."""
    image, block = ([int(d) for d in np.asarray(v).reshape(-1)] for v in (image_shape, block_shape))
    rank, taps = len(image), math.prod(block)
    strides, dilations = (tuple(ctx.attr(name) or (1,) * rank) for name in ("strides", "dilations"))
    pads = tuple(ctx.attr("pads") or (0,) * (2 * rank))
    padded = [n + pads[i] + pads[rank + i] for i, n in enumerate(image)]
    places = [(p - (k - 1) * d - 1) // s + 1 for p, k, d, s in zip(padded, block, dilations, strides, strict=True)]
    columns = x.astype(F32).reshape((x.shape[0], x.size(1) // taps, taps, *places))
    total = None
    for i, tap in enumerate(itertools.product(*map(range, block))):
        part = columns.window((2,), (i,), (1,)).reshape((x.shape[0], x.size(1) // taps, *places))
        for axis in range(rank):
            part = part.spaced(2 + axis, strides[axis])
        starts = [-t * d for t, d in zip(tap, dilations, strict=True)]
        part = part.window(range(2, 2 + rank), starts, padded, fill=0)
        total = part if total is None else total + part
    assert total is not None
    return total.window(range(2, 2 + rank), pads[:rank], image).astype(x.dtype)


@tensorrt_kernel("CenterCropPad", dtypes=FLOATS | INTEGERS, of=(0,), static=(1,))
def center_crop_pad(ctx: NetworkContext, x: Tensor, shape: np.ndarray) -> Tensor:
    """The middle of each axis, or the axis in the middle of zeros; of an odd difference one more is at the end."""
    axes = [a % x.rank for a in ctx.attr("axes") or range(x.rank)]
    sizes = [int(n) for n in np.asarray(shape).reshape(-1)]
    spare = [x.size(a) - n for a, n in zip(axes, sizes, strict=True)]
    return x.window(axes, [n // 2 if n > 0 else -(-n // 2) for n in spare], sizes, fill=0)


# --- matrices -------------------------------------------------------------------------------------------------------


@tensorrt_kernel("MatMul", dtypes=FLOATS, train=True)
def matrix_product(ctx: NetworkContext, a: Tensor, b: Tensor) -> Tensor:
    """Where one of the two is a vector, as a row or a column."""
    left = a.reshape((1, -1)) if a.rank == 1 else a
    right = b.reshape((-1, 1)) if b.rank == 1 else b
    made = left.matmul(right)
    shape = list(made.shape)
    if b.rank == 1:
        del shape[-1]
    if a.rank == 1:
        del shape[-1 if b.rank == 1 else -2]
    return made.reshape(shape)


def _small_matrix(node: Node) -> str:
    return "" if shapes(node)[0][-1] <= _WIDEST else f"determinants of matrices above {_WIDEST} x {_WIDEST}"


@tensorrt_kernel("Det", dtypes=FLOATS, check=_small_matrix)
def determinant(ctx: NetworkContext, x: Tensor) -> Tensor:
    """By Leibniz's sum over permutations, of small matrices."""
    n, r = x.size(-1), x.rank
    wide = x.astype(F32)
    cells = {
        (i, j): wide.window((r - 2, r - 1), (i, j), (1, 1)).reshape(x.shape[:-2]) for i in range(n) for j in range(n)
    }
    total = None
    for order in itertools.permutations(range(n)):
        swaps = sum(order[i] > order[j] for i in range(n) for j in range(i + 1, n))
        part = cells[0, order[0]]
        for i in range(1, n):
            part = part * cells[i, order[i]]
        if swaps % 2:
            part = -part
        total = part if total is None else total + part
    assert total is not None
    return total.astype(x.dtype)


@tensorrt_kernel("CumProd", dtypes=FLOATS | INTEGERS, of=(0,), static=(1,))
def cumulative_product(ctx: NetworkContext, x: Tensor, axis: np.ndarray) -> Tensor:
    """Products of ever longer runs: each step multiplies what lies twice as far apart."""
    where = int(np.asarray(axis).reshape(-1)[0]) % x.rank
    length, backward = x.size(where), bool(ctx.attr("reverse", 0))
    step = -1 if backward else 1

    def moved(y: Tensor, by: int) -> Tensor:
        return y.window((where,), (-step * by,), (length,), fill=1)

    y = moved(x, 1) if ctx.attr("exclusive", 0) else x
    by = 1
    while by < length:
        y = y * moved(y, by)
        by *= 2
    return y
