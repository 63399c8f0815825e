"""Geometry of sliding windows of Conv and the pooling operators, from their attributes, and iteration over taps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from xrt_core.errors import ShapeError
from xrt_core.kernels.namespace import is_jax
from xrt_core.kernels.registry import OpContext


class Windows(Struct, frozen=True):
    """Windows over the spatial axes: one entry an axis, everything known from attributes and static shapes.

    begin, end: padding of the attributes; out: number of windows. With `ceil_mode` a window may reach beyond
    `size + end`: `overhang` is the number of missing elements.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.size)

    @property
    def overhang(self) -> tuple[int, ...]:
        """Elements to add at the end of each axis so that every window is complete (at least `end`)."""
        reach = (self.reach(i) - self.size[i] - self.begin[i] for i in range(self.rank))
        return tuple(max(need, e, 0) for need, e in zip(reach, self.end, strict=True))

    @property
    def is_padded(self) -> bool:
        """Whether any window leaves the input."""
        return any(self.begin) or any(self.overhang)

    def reach(self, axis: int) -> int:
        """Length that the windows span along `axis`, from the start of the padded input."""
        if self.out[axis] == 0:
            return 0
        return (self.out[axis] - 1) * self.strides[axis] + (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def span(self, axis: int, tap: int) -> slice:
        """The elements along `axis` of the padded input that `tap` of every window meets."""
        if self.out[axis] == 0:
            return slice(0, 0)
        start = tap * self.dilations[axis]
        return slice(start, start + (self.out[axis] - 1) * self.strides[axis] + 1, self.strides[axis])

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """The spatial slices of every kernel position, in row-major order."""
        for tap in itertools.product(*map(range, self.kernel)):
            yield tuple(self.span(i, t) for i, t in enumerate(tap))

    def positions(self, axis: int) -> np.ndarray:
        """Coordinates in the unpadded input, int64[out, kernel], along `axis`; those outside it lie in padding."""
        outs = np.arange(self.out[axis], dtype=np.int64)[:, None] * self.strides[axis]
        return outs + np.arange(self.kernel[axis], dtype=np.int64) * self.dilations[axis] - self.begin[axis]

    def counts(self, dtype: np.dtype, include_pad: bool) -> np.ndarray:
        """How many elements each window's mean is over, of `dtype`, over the spatial axes; at least 1.

        include_pad: count the padding of the attributes as well; elements that `ceil_mode` adds never count.
        """
        found = np.ones((), dtype)
        for axis in range(self.rank):
            at = self.positions(axis)
            pads = (self.begin[axis], self.end[axis]) if include_pad else (0, 0)
            count = ((at >= -pads[0]) & (at < self.size[axis] + pads[1])).sum(axis=1).astype(dtype)
            found = found * count.reshape((-1,) + (1,) * (self.rank - axis - 1))
        return np.maximum(found, np.ones((), dtype))


def spatial_attribute(ctx: OpContext, name: str, rank: int, default: int) -> tuple[int, ...]:
    """An attribute with one integer for each spatial axis. Raises ShapeError where its length is another."""
    values = ctx.attr(name)
    if not values:
        return (default,) * rank
    if len(values) != rank:
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: attribute {name} = {tuple(values)} has {len(values)} entries, "
            f"but the input has {rank} spatial axes; give one entry an axis"
        )
    return tuple(int(v) for v in values)


def explicit_pads(ctx: OpContext, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Attribute `pads` as (begins, ends). Raises ShapeError where its length is not twice the rank."""
    pads = ctx.attr("pads") or (0,) * (2 * rank)
    if len(pads) != 2 * rank:
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: attribute pads = {tuple(pads)} must have {2 * rank} entries, "
            "all begins and then all ends"
        )
    return tuple(map(int, pads[:rank])), tuple(map(int, pads[rank:]))


def windows_of(ctx: OpContext, size: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of a Conv or pooling node over spatial axes of `size`.

    With `ceil_mode`, windows that would start in the right padding are omitted, as in PyTorch and as ONNX requires from
    opset 22; earlier versions do not specify them.
    """
    size, kernel = tuple(map(int, size)), tuple(map(int, kernel))
    rank = len(size)
    strides, dilations = (spatial_attribute(ctx, name, rank, 1) for name in ("strides", "dilations"))
    auto_pad = ctx.attr("auto_pad", "NOTSET") or "NOTSET"
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    begin = end = (0,) * rank
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        out = [-(-n // s) for n, s in zip(size, strides, strict=True)]
        need = [max(0, (o - 1) * s + e - n) for o, s, e, n in zip(out, strides, extents, size, strict=True)]
        small, large = tuple(p // 2 for p in need), tuple(p - p // 2 for p in need)
        begin, end = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
        return Windows(size, kernel, strides, dilations, begin, end, tuple(out))
    if auto_pad == "NOTSET":
        begin, end = explicit_pads(ctx, rank)
    elif auto_pad != "VALID":
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: auto_pad = {auto_pad!r}; "
            "it takes NOTSET, SAME_UPPER, SAME_LOWER or VALID"
        )
    out = []
    for i in range(rank):
        room = size[i] + begin[i] + end[i] - extents[i]
        if ctx.attr("ceil_mode", 0):
            n = -(-room // strides[i]) + 1
            if (n - 1) * strides[i] >= size[i] + begin[i]:
                n -= 1
        else:
            n = room // strides[i] + 1
        out.append(max(n, 0))
    return Windows(size, kernel, strides, dilations, begin, end, tuple(out))


def pad_with(xp: Any, x: Any, begin: Sequence[int], end: Sequence[int], value: Any) -> Any:
    """`x` with its last len(begin) axes padded by a constant; `x` itself where there is nothing to add."""
    if not any(begin) and not any(end):
        return x
    lead = x.ndim - len(begin)
    if is_jax(xp):
        widths = [(0, 0)] * lead + list(zip(begin, end, strict=True))
        return xp.pad(x, widths, constant_values=xp.asarray(value, dtype=x.dtype))
    shape = x.shape[:lead] + tuple(b + n + e for b, n, e in zip(begin, x.shape[lead:], end, strict=True))
    padded = xp.full(shape, value, dtype=x.dtype) if value else xp.zeros(shape, dtype=x.dtype)
    padded[(..., *(slice(b, b + n) for b, n in zip(begin, x.shape[lead:], strict=True)))] = x
    return padded
