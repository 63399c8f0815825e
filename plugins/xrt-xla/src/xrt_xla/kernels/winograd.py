"""Convolutions by 3 x 3 with 16 products for each 2 x 2 results instead of 36: Winograd's minimal filtering.

Tiles of 4 x 4 overlap by two; tile, filter and results go through three small linear maps, and between them stand 16
matrix products over the channels. The maps of float32 add a rounding error of the order of the largest product of a
window. An infinity would become NaN in them, and large numbers would overflow sooner: then XLA's own convolution runs.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015 (arXiv:1509.09308), F(2 x 2, 3 x 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xrt_xla.kernels.context import XlaContext

_LARGEST: Final = np.float32(2.0**40)
"""Up to this, of data and filters, nothing overflows in between: a product of a tile by a filter is at most 9 times
that of their largest elements, and a result adds 9 such sums over the channels; the rest is room for what `moderate`
misses."""

_CHANNELS: Final = 64
_POSITIONS: Final = 1024
"""From how many channels, of both sides, and positions on it is faster."""

_SLICED: Final = 1 << 21
"""Elements of a filter's 16 matrices up to which they are cut out of the array: 16 products are faster than a batched
one, and a slice is copied."""

_ROWS: Final = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_SPREAD: Final = np.kron(_ROWS, _ROWS)
"""[16, 9]: a filter's matrices by its taps, one product: 16 sums make the program of a step longer to compile."""

Pair = Sequence[int]


def pays(shape: Sequence[int], positions: int) -> bool:
    """Whether a filter of `shape` (OI...) over so many positions is one of many channels by 3 x 3."""
    return len(shape) == 4 and tuple(shape[2:]) == (3, 3) and min(shape[:2]) >= _CHANNELS and positions >= _POSITIONS


def laid_out(w: np.ndarray) -> np.ndarray:
    """A constant filter [3, 3, I, O] as its 16 matrices [16, I, O]; as its taps [9, I, O] if one is not moderate."""
    taps = np.ascontiguousarray(w).reshape(9, *w.shape[2:])
    if not np.abs(taps).max() < _LARGEST:
        return taps
    return np.tensordot(_SPREAD, taps, 1)


def _filter_of(u: Any) -> list[list[Any]]:
    """The taps of a filter of which the 16 matrices are known, up to rounding."""
    rows = [[u[4 * a], u[4 * a + 1] - u[4 * a + 2], u[4 * a + 3]] for a in range(4)]
    middle = [p - q for p, q in zip(rows[1], rows[2], strict=True)]
    return [rows[0], middle, rows[3]]


def _tile(d: Sequence[Any]) -> list[Any]:
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _result(m: Sequence[Any]) -> list[Any]:
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _in_two(change: Callable[[Sequence[Any]], list[Any]], parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A map along both axes of parts[row][column]."""
    columns = [change(column) for column in zip(*parts, strict=True)]
    return [change(row) for row in zip(*columns, strict=True)]


def moderate(ctx: XlaContext, *arrays: Any) -> Any:
    """Whether all elements are finite and far from what overflows: a bool scalar.

    By a product with one irregular column, which takes half the time of any other reduction on the CPU: large numbers
    of opposite signs do not cancel in it.
    """
    lax, xp = ctx.lax, ctx.xp
    found = None
    for x in arrays:
        rows = xp.reshape(x, (-1, x.shape[-1]))
        column = 1 + np.modf(np.arange(1, 1 + x.shape[-1]) * math.sqrt(2))[0]
        sums = lax.dot(rows, column[:, None].astype(np.float32))
        small = xp.all(xp.abs(sums) < _LARGEST)  # not of NaN
        found = small if found is None else found & small
    return found


def _count(size: Pair) -> tuple[int, int]:
    return -(-size[0] // 2), -(-size[1] // 2)


def _tiles(ctx: XlaContext, x: Any, begin: Pair, size: Pair) -> list[Any]:
    """The 16 matrices [tiles, channels] of x[N, H, W, C] for results of a size, row by row."""
    xp, (n, height, width, channels), (down, across) = ctx.xp, x.shape, _count(size)
    sides = ((b, 2 * k + 2 - b - have, 0) for b, k, have in zip(begin, (down, across), (height, width), strict=True))
    x = ctx.lax.pad(x, xp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)])
    x = ctx.lax.optimization_barrier(xp.reshape(x, (n, down + 1, 2, across + 1, 2, channels)))
    steps = ((0, 0), (0, 1), (1, 0), (1, 1))
    parts = [[x[:, i : i + down, p, j : j + across, q] for j, q in steps] for i, p in steps]
    return [xp.reshape(v, (n * down * across, channels)) for row in _in_two(_tile, parts) for v in row]


def convolve(ctx: XlaContext, x: Any, u: Any, begin: Pair, size: Pair) -> Any:
    """Correlate x[N, H, W, C], padded by `begin` zeros in front, with the filter whose 16 matrices are u[16, I, O]. The
    results are [N, *size, O]."""
    xp, lax, n, (down, across) = ctx.xp, ctx.lax, x.shape[0], _count(size)
    tiles, highest = _tiles(ctx, x, begin, size), lax.Precision.HIGHEST
    if u.size > max(_SLICED, 16 * tiles[0].size):
        made = xp.matmul(xp.stack(tiles), u, precision=highest)
    else:
        made = [lax.dot(v, u[i], precision=highest) for i, v in enumerate(tiles)]
    filters = made[0].shape[-1]
    parts = _in_two(_result, [[made[4 * a + b] for b in range(4)] for a in range(4)])
    shaped = [xp.stack([xp.reshape(y, (n, down, across, filters)) for y in row], axis=3) for row in parts]
    y = xp.reshape(xp.stack(shaped, axis=2), (n, 2 * down, 2 * across, filters))
    return y if y.shape[1:3] == tuple(size) else y[:, : size[0], : size[1]]


def correlate(ctx: XlaContext, x: Any, w: Any, begin: Pair, size: Pair) -> Any:
    """`convolve` where the numbers allow it, else XLA's own convolution. w: a filter [3, 3, I, O], or what `laid_out`
    made of a constant one."""

    def direct(x: Any, taps: Any) -> Any:
        pads = [(b, s + 2 - b - have) for b, s, have in zip(begin, size, x.shape[1:3], strict=True)]
        axes = ctx.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
        return ctx.lax.conv_general_dilated(
            x, taps, (1, 1), pads, dimension_numbers=axes, precision=ctx.lax.Precision.HIGHEST
        )

    def restored(x: Any, u: Any) -> Any:
        return direct(x, ctx.xp.stack([ctx.xp.stack(row) for row in _filter_of(u)]))

    def transformed(x: Any, taps: Any) -> Any:
        u = ctx.lax.dot(_SPREAD, ctx.xp.reshape(taps, (9, -1)), precision=ctx.lax.Precision.HIGHEST)
        return convolve(ctx, x, ctx.xp.reshape(u, (16, *taps.shape[2:])), begin, size)

    if w.ndim == 4:
        return ctx.lax.cond(moderate(ctx, x, w), transformed, direct, x, w)
    if w.shape[0] == 9:
        return direct(x, ctx.xp.reshape(w, (3, 3, *w.shape[1:])))
    return ctx.lax.cond(moderate(ctx, x), lambda x, u: convolve(ctx, x, u, begin, size), restored, x, w)
