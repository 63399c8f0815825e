"""Convolutions by 3 x 3 with 16 products for each 2 x 2 results instead of 36: Winograd's minimal filtering.

Tiles of 4 x 4 overlap by two; tile, filter and results go through three small linear maps, and between them stand 16
matrix products over the channels. The maps of float32 add a rounding error of the order of the largest product of a
window. An infinity becomes NaN in them, and numbers near the largest overflow sooner: where a result is not finite
XLA's own convolution runs.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015 (arXiv:1509.09308), F(2 x 2, 3 x 3).

XLA's time to compile is by the number of loops. So what the maps make along an axis is taken in pairs, the outer two of
its four (differences of like rows) and the inner two (a sum and a difference of the same rows): four loops of four
matrices each instead of sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_xla.kernels.context import XlaContext

_CHANNELS: Final = 64
_POSITIONS: Final = 1024
"""From how many channels, of both sides, and positions on its time to compile pays; it is faster from 48 and 192 on."""

_TILES: Final = 6 << 20
"""Bytes of tiles in a round; images beyond them come in a later one, so that the tiles stay in the cache (64 channels,
8 images of 64 x 64: 11 ms instead of 24, XLA's own 15). Fewer would not keep two threads busy."""

_LARGEST: Final = np.float32(2.0**40)
"""Of constant filters: what their matrices hold of larger ones does not give back the taps."""

_OUTER: Final = np.array([[1, 0, 0], [0, 0, 1]], np.float32)
_INNER: Final = np.array([[0.5, 0.5, 0.5], [0.5, -0.5, 0.5]], np.float32)
_SPREAD: Final = tuple(np.kron(row, column) for row in (_OUTER, _INNER) for column in (_OUTER, _INNER))
"""Each [4, 9]: four of a filter's matrices by its taps, in the order of the tiles' matrices."""

_SIGNS: Final = np.array([1, -1], np.float32)

Pair = Sequence[int]


def pays(shape: Sequence[int], positions: int) -> bool:
    """Whether a filter of `shape` (OI...) over so many positions is one of many channels by 3 x 3."""
    return len(shape) == 4 and tuple(shape[2:]) == (3, 3) and min(shape[:2]) >= _CHANNELS and positions >= _POSITIONS


def laid_out(w: np.ndarray) -> np.ndarray:
    """A constant filter [3, 3, I, O] as its matrices [4, 4, I, O]; as its taps [9, I, O] if one is not moderate."""
    taps = np.ascontiguousarray(w).reshape(9, *w.shape[2:])
    if not np.abs(taps).max() < _LARGEST:
        return taps
    return np.stack([np.tensordot(spread, taps, 1) for spread in _SPREAD])


def _taps(xp: Any, u: Any) -> Any:
    """The taps [3, 3, I, O] of a filter of which the matrices are known, up to rounding."""
    u = xp.reshape(u, (2, 2, 2, 2, *u.shape[2:]))  # kind of row, kind of column, row, column
    rows = xp.stack([u[0, :, 0], u[1, :, 0] - u[1, :, 1], u[0, :, 1]])
    return xp.stack([rows[:, 0, 0], rows[:, 1, 0] - rows[:, 1, 1], rows[:, 0, 1]], axis=1)


def _signs(xp: Any, axis: int, rank: int) -> Any:
    return xp.reshape(_SIGNS, [2 if i == axis else 1 for i in range(rank)])


def _outer(ctx: XlaContext, x: Any, axis: int) -> Any:
    """The differences of rows 0 and 2, and of 1 and 3, of each tile along an axis of tiles, which a pair follows."""
    tiles = x.shape[axis] - 1
    return ctx.lax.slice_in_dim(x, 0, tiles, axis=axis) - ctx.lax.slice_in_dim(x, 1, tiles + 1, axis=axis)


def _inner(ctx: XlaContext, x: Any, axis: int) -> Any:
    """The sum of rows 1 and 2 of each tile, and what row 2 has more."""
    cut, tiles = ctx.lax.slice_in_dim, x.shape[axis] - 1
    row1 = cut(cut(x, 0, tiles, axis=axis), 1, 2, axis=axis + 1)
    row2 = cut(cut(x, 1, tiles + 1, axis=axis), 0, 1, axis=axis + 1)
    return row2 + _signs(ctx.xp, axis + 1, x.ndim) * row1


def _padded(ctx: XlaContext, x: Any, begin: Pair, down: int, across: int) -> Any:
    """x[N, H, W, C] as [N, 2 * down + 2, 2 * across + 2, C]: so many tiles of 4 x 4 that overlap by two."""
    sides = ((b, 2 * k + 2 - b - have, 0) for b, k, have in zip(begin, (down, across), x.shape[1:3], strict=True))
    return ctx.lax.pad(x, ctx.xp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)])


def _tiles(ctx: XlaContext, x: Any) -> list[Any]:
    """Four of [4, tiles, channels] of padded x[N, H, W, C]."""
    xp, (n, height, width, channels) = ctx.xp, x.shape
    x = ctx.lax.optimization_barrier(xp.reshape(x, (n, height // 2, 2, width // 2, 2, channels)))
    made = [column(ctx, row(ctx, x, 1), 3) for row in (_outer, _inner) for column in (_outer, _inner)]
    return [xp.reshape(xp.transpose(v, (2, 4, 0, 1, 3, 5)), (4, -1, channels)) for v in made]


def _results(ctx: XlaContext, products: Sequence[Any], n: int, down: int, across: int) -> Any:
    """The results [N, 2 * down, 2 * across, O] of four of [4, tiles, O]."""
    xp, filters = ctx.xp, products[0].shape[-1]

    def along(outer: Any, inner: Any, axis: int) -> Any:  # of a pair each: i + j + o, i - j - o
        i, j = (ctx.lax.slice_in_dim(inner, k, k + 1, axis=axis) for k in (0, 1))
        return i + _signs(xp, axis, inner.ndim) * (j + outer)

    parts = [xp.reshape(m, (2, 2, n, down, across, filters)) for m in products]
    y = along(along(parts[0], parts[1], 1), along(parts[2], parts[3], 1), 0)
    return xp.reshape(xp.transpose(y, (2, 3, 0, 4, 1, 5)), (n, 2 * down, 2 * across, filters))


def _piece(n: int, down: int, row: int) -> tuple[int, int]:
    """How many of n images, and of their rows of tiles, go in a round: a row of tiles has so many bytes."""
    images = next(k for k in range(1, n + 1) if n % k == 0 and (k == n or k * down * row >= _TILES))
    bands = max(1, down * row // _TILES) if images == 1 else 1
    return images, -(-down // bands)


def convolve(ctx: XlaContext, x: Any, u: Sequence[Any], begin: Pair, size: Pair) -> Any:
    """Correlate x[N, H, W, C], padded by `begin` zeros in front, with the filter of four of [4, I, O] matrices. The
    results are [N, *size, O]."""
    xp, lax, (n, *_, channels), (down, across) = ctx.xp, ctx.lax, x.shape, (-(-s // 2) for s in size)
    # images on several devices are no axis to go along
    images, rows = (n, down) if ctx.on_mesh else _piece(n, down, 16 * across * channels * x.dtype.itemsize)
    bands = -(-down // rows)

    def of(x: Any) -> Any:
        batched = (((2,), (1,)), ((0,), (0,)))
        tiles = _tiles(ctx, _padded(ctx, x, begin, rows, across))
        made = [lax.dot_general(v, w, batched, precision=lax.Precision.HIGHEST) for v, w in zip(tiles, u, strict=True)]
        return _results(ctx, made, images, rows, across)

    if bands > 1:
        sides = (0, 0, 0), (begin[0], 2 * bands * rows + 2 - begin[0] - x.shape[1], 0), (0, 0, 0), (0, 0, 0)
        x, begin = lax.pad(x, xp.zeros((), x.dtype), sides), (0, begin[1])
        x = xp.stack([x[:, 2 * b * rows : 2 * (b + 1) * rows + 2] for b in range(bands)], axis=1)
    rounds = n // images * bands
    y = of(x) if rounds == 1 else lax.map(of, xp.reshape(x, (rounds, images, *x.shape[-3:])))
    y = xp.reshape(y, (n, 2 * rows * bands, 2 * across, y.shape[-1]))
    return y if y.shape[1:3] == tuple(size) else y[:, : size[0], : size[1]]


def _is_finite(ctx: XlaContext, y: Any) -> Any:
    """Whether all elements are, a bool scalar: by their sum, which is not where one is not; nor where it overflows.

    By products with eight rows and eight columns of ones, which a library makes: there is nothing to compile.
    """
    rows = ctx.xp.reshape(y, (-1, y.shape[-1]))
    sums = ctx.lax.dot(np.ones((8, rows.shape[0]), np.float32), rows)
    return ctx.xp.isfinite(ctx.lax.dot(sums, np.ones((rows.shape[1], 8), np.float32))[0, 0])


def correlate(ctx: XlaContext, x: Any, w: Any, begin: Pair, size: Pair) -> Any:
    """`convolve` where its results are finite, else XLA's own convolution. w: a filter [3, 3, I, O], or what `laid_out`
    made of a constant one.

    What is not finite, in a window or on the way, is never lost: each element of a window takes part in each of its
    results.
    """
    xp, lax = ctx.xp, ctx.lax

    def direct(x: Any, taps: Any) -> Any:
        pads = [(b, s + 2 - b - have) for b, s, have in zip(begin, size, x.shape[1:3], strict=True)]
        axes = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
        return lax.conv_general_dilated(x, taps, (1, 1), pads, dimension_numbers=axes, precision=lax.Precision.HIGHEST)

    if w.ndim == 3:
        return direct(x, xp.reshape(w, (3, 3, *w.shape[1:])))
    is_laid_out = w.shape[:2] == (4, 4)
    if is_laid_out:
        u = list(w)
    else:
        flat = xp.reshape(w, (9, -1))
        u = [xp.reshape(lax.dot(s, flat, precision=lax.Precision.HIGHEST), (4, *w.shape[2:])) for s in _SPREAD]
    # between barriers, so that equal layers have equal loops, which XLA compiles once
    x = lax.optimization_barrier(x)
    y = lax.optimization_barrier(convolve(ctx, x, u, begin, size))

    def again(y: Any, x: Any, w: Any) -> Any:
        return direct(x, _taps(xp, w) if is_laid_out else w)

    return lax.cond(_is_finite(ctx, y), lambda y, x, w: y, again, y, x, w)
