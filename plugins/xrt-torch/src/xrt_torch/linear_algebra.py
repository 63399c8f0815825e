"""Linear algebra of small matrices: factorisations and solutions by LAPACK's algorithms, column by column, for all
matrices of a batch at once. Larger ones are LAPACK's, in torch. The exponential is of matrices of any size.

Where a factorisation fails, `info` says so, and torch raises the error as it does by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
MOST: Final = 16
"""Rows or columns of what is factored here, at most: each column is some ten operators."""


def _is_small(*matrices: Tensor) -> bool:
    return all(max(a.shape[-2:], default=0) <= MOST and not a.dtype.is_complex for a in matrices)


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype)


def _lu(a: Tensor, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """L below the diagonal and U above, the rows (from 1 on, int32) that were exchanged, and the first zero pivot."""
    m, n = a.shape[-2:]
    rows, columns = torch.arange(m).unsqueeze(1), torch.arange(n)
    info = torch.zeros(a.shape[:-2], dtype=torch.int32)
    exchanged = []
    for j in range(min(m, n)):
        place = torch.full([*a.shape[:-2], 1, 1], j, dtype=torch.int64)
        if pivot:
            size = torch.where(rows >= j, a.narrow(-1, j, 1).abs(), -1.0)
            place = torch.argmax(size, -2, keepdim=True)
        row = torch.gather(a, -2, place.expand([*a.shape[:-2], 1, n]))
        a = torch.where(rows == j, row, torch.where(rows == place, a.narrow(-2, j, 1), a))
        divisor = row.narrow(-1, j, 1)
        is_zero = divisor == 0
        takes = (rows > j) & ~is_zero
        factor = torch.where(takes, a.narrow(-1, j, 1) / torch.where(is_zero, 1.0, divisor), 0.0)
        reduced = a - factor * torch.where(columns > j, row, 0.0)
        a = torch.where(takes & (columns == j), factor, reduced)
        info = torch.where((info == 0) & is_zero.squeeze((-1, -2)), j + 1, info).to(torch.int32)
        exchanged.append(place.squeeze(-1) + 1)
    if not exchanged:
        return a.clone(), torch.zeros([*a.shape[:-2], 0], dtype=torch.int32), info
    return a, torch.cat(exchanged, -1).to(torch.int32), info


def _permutation(pivots: Tensor, m: int, like: Tensor) -> Tensor:
    """The matrix P of A = P L U."""
    rows = torch.arange(m)
    order = rows.expand([*pivots.shape[:-1], m])
    for j in range(pivots.shape[-1]):
        place = pivots.narrow(-1, j, 1).to(torch.int64) - 1
        other, own = torch.gather(order, -1, place), order.narrow(-1, j, 1)
        order = torch.where(rows == j, other, torch.where(rows == place, own, order))
    return (rows.unsqueeze(1) == order.unsqueeze(-2)).to(like.dtype)


def _unit_lower(lu: Tensor, n: int) -> Tensor:
    made = torch.tril(lu.narrow(-1, 0, n), -1)
    return made + torch.eye(*made.shape[-2:], dtype=lu.dtype)


def _solved(a: Tensor, b: Tensor, lower: bool, unit: bool = False) -> Tensor:
    """X of a X = b with a triangular matrix, whose other half is not read: by halves."""
    n = a.shape[-1]
    if n <= 1:
        return b if unit or not n else b / a
    h = n // 2
    first, second = (0, h), (h, n - h)
    begin, end = (first, second) if lower else (second, first)

    def block(rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        return a.narrow(-2, *rows).narrow(-1, *columns)

    x = _solved(block(begin, begin), b.narrow(-2, *begin), lower, unit)
    rest = b.narrow(-2, *end) - torch.matmul(block(end, begin), x)
    y = _solved(block(end, end), rest, lower, unit)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (t.expand([*batch, *t.shape[-2:]]) for t in (x, y))
    return torch.cat([x, y] if lower else [y, x], -2)


def _lu_solved(lu: Tensor, pivots: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """X of A X = b, or of the transposed matrix."""
    p = _permutation(pivots, lu.shape[-2], lu)
    if transposed:
        y = _solved(lu.mT, _solved(lu.mT, b, lower=True), lower=False, unit=True)
        return torch.matmul(p, y)
    return _solved(lu, _solved(lu, torch.matmul(p.mT, b), lower=True, unit=True), lower=False)


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """X of a X = b, or X a = b."""
    if not _is_small(a):
        return NotImplemented
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    made = _solved(a, b, not upper, unitriangular)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return made.expand([*batch, *made.shape[-2:]]).clone()


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """The same, and a, as torch's older operator gives them."""
    made = aten.linalg_solve_triangular.default(
        a.mT if transpose else a, b, upper=upper != transpose, unitriangular=unitriangular
    )
    return made, a.expand([*made.shape[:-2], *a.shape[-2:]]).clone()


def lu_factor_ex(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """L and U in one matrix, pivots, info."""
    return _lu(a, pivot) if _is_small(a) and not check_errors else NotImplemented


def lu_unpack(lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """P, L and U; empty where they are not wanted."""
    if not _is_small(lu):
        return NotImplemented
    m, n = lu.shape[-2:]
    none = torch.empty([0], dtype=lu.dtype)
    p = _permutation(pivots, m, lu) if unpack_pivots else none
    if not unpack_data:
        return p, none, none.clone()
    return p, _unit_lower(lu, min(m, n)), torch.triu(lu.narrow(-2, 0, min(m, n)))


def lu(a: Tensor, *, pivot: bool = True) -> Any:
    """P, L and U of A = P L U."""
    return lu_unpack(*_lu(a, pivot)[:2], unpack_pivots=pivot) if _is_small(a) else NotImplemented


def lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Any:
    """X of A X = b, or X A = b."""
    if not _is_small(lu):
        return NotImplemented
    return _lu_solved(lu, pivots, b, adjoint).clone() if left else _lu_solved(lu, pivots, b.mT, not adjoint).mT.clone()


def solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """X of a X = b, or X a = b, and the factorisation."""
    if not _is_small(a) or check_errors:
        return NotImplemented
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    made, pivots, info = _lu(a)
    x = lu_solve(made, pivots, b.unsqueeze(-1) if is_vector else b, left=left)
    return x.squeeze(-1) if is_vector else x, made, pivots, info


def inv_ex(a: Tensor, *, check_errors: bool = False) -> Any:
    """The inverse, and info."""
    if not _is_small(a) or check_errors:
        return NotImplemented
    made, pivots, info = _lu(a)
    return _lu_solved(made, pivots, _eye(a.shape[-1], a).expand(a.shape), False).clone(), info


def _of_determinant(a: Tensor) -> tuple[Tensor, Tensor]:
    """LU and pivots as torch has them for determinants, which it differentiates by: of the transposed matrix where it
    is contiguous."""
    return _lu(a.mT if a.is_contiguous() else a)[:2]


def _signs(pivots: Tensor, like: Tensor) -> Tensor:
    """The determinant of the permutation."""
    exchanged = (pivots != torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)).sum(-1)
    return 1 - 2 * torch.remainder(exchanged, 2).to(like.dtype)


def det(a: Tensor) -> Any:
    """The determinant, and the factorisation."""
    if not _is_small(a):
        return NotImplemented
    made, pivots = _of_determinant(a)
    return made.diagonal(0, -2, -1).prod(-1) * _signs(pivots, a), made, pivots


def slogdet(a: Tensor) -> Any:
    """Sign and logarithm of the determinant, and the factorisation."""
    if not _is_small(a):
        return NotImplemented
    made, pivots = _of_determinant(a)
    diagonal = made.diagonal(0, -2, -1)
    sign = torch.sign(diagonal).prod(-1) * _signs(pivots, a)
    return sign, torch.log(diagonal.abs()).sum(-1), made, pivots


def cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """L of A = L L^T, or its transpose, and the first pivot that is not positive."""
    if not _is_small(a) or check_errors:
        return NotImplemented
    n = a.shape[-1]
    a = a.mT if upper else a
    rows = torch.arange(n).unsqueeze(1)
    info = torch.zeros(a.shape[:-2], dtype=torch.int32)
    columns = []
    for j in range(n):
        pivot = a.narrow(-2, j, 1).narrow(-1, j, 1)
        fails = ~(pivot > 0)
        column = torch.where(rows >= j, a.narrow(-1, j, 1) / torch.sqrt(torch.where(fails, 1.0, pivot)), 0.0)
        columns.append(column)
        a = a - torch.matmul(column, column.mT)
        info = torch.where((info == 0) & fails.squeeze((-1, -2)), j + 1, info).to(torch.int32)
    made = torch.cat(columns, -1) if columns else a.clone()
    return made.mT.clone() if upper else made, info


def cholesky_solve(b: Tensor, a: Tensor, upper: bool = False) -> Any:
    """X of A X = b, given A's factor."""
    if not _is_small(a):
        return NotImplemented
    lower = a.mT if upper else a
    return _solved(lower.mT, _solved(lower, b, lower=True), lower=False).clone()


def cholesky_inverse(a: Tensor, upper: bool = False) -> Any:
    """A's inverse, given its factor."""
    return cholesky_solve(_eye(a.shape[-1], a).expand(a.shape), a, upper)


def _reflector(packed: Tensor, j: int) -> Tensor:
    """v of the j-th reflection, as LAPACK keeps it: below the diagonal, where it is 1."""
    rows = torch.arange(packed.shape[-2]).unsqueeze(1)
    return torch.where(rows == j, 1.0, torch.where(rows > j, packed.narrow(-1, j, 1), 0.0)).to(packed.dtype)


def _reflections(a: Tensor) -> tuple[Tensor, Tensor]:
    """R and, below its diagonal, the reflections of Householder; their factors."""
    m, n = a.shape[-2:]
    rows, columns = torch.arange(m).unsqueeze(1), torch.arange(n)
    factors = []
    for j in range(min(m, n)):
        column = a.narrow(-1, j, 1)
        first = column.narrow(-2, j, 1)
        tail = torch.where(rows > j, column, 0.0)
        square = (tail * tail).sum(-2, keepdim=True)
        is_zero = square == 0
        size = torch.sqrt(first * first + square)
        beta = torch.where(is_zero, first, torch.where(first < 0, size, -size))
        factor = torch.where(is_zero, 0.0, (beta - first) / torch.where(is_zero, 1.0, beta)).to(a.dtype)
        rest = torch.where(is_zero, 0.0, tail / torch.where(is_zero, 1.0, first - beta))
        v = torch.where(rows == j, 1.0, rest).to(a.dtype)
        reflected = a - factor * v * torch.matmul(v.mT, a)
        own = torch.where(rows == j, beta, torch.where(rows > j, v, column))
        a = torch.where(columns == j, own, torch.where(columns > j, reflected, a))
        factors.append(factor.squeeze(-1))
    if not factors:
        return a.clone(), torch.zeros([*a.shape[:-2], 0], dtype=a.dtype)
    return a, torch.cat(factors, -1)


def _product(packed: Tensor, factors: Tensor, columns: int) -> Tensor:
    """The first columns of the product of all reflections."""
    m = packed.shape[-2]
    made = torch.eye(m, columns, dtype=packed.dtype).expand([*packed.shape[:-2], m, columns])
    for j in reversed(range(factors.shape[-1])):
        v = _reflector(packed, j)
        made = made - factors.narrow(-1, j, 1).unsqueeze(-1) * v * torch.matmul(v.mT, made)
    return made.clone()


def geqrf(a: Tensor) -> Any:
    """R with the reflections, and their factors."""
    return _reflections(a) if _is_small(a) else NotImplemented


def qr(a: Tensor, mode: str = "reduced") -> Any:
    """Q and R."""
    if not _is_small(a):
        return NotImplemented
    m, n = a.shape[-2:]
    packed, factors = _reflections(a)
    size = m if mode == "complete" else min(m, n)
    r = torch.triu(packed.narrow(-2, 0, size))
    return torch.empty([0], dtype=a.dtype) if mode == "r" else _product(packed, factors, size), r


def householder_product(a: Tensor, factors: Tensor) -> Any:
    """The product of reflections, as many columns of it as are given."""
    return _product(a, factors, a.shape[-1]) if _is_small(a) else NotImplemented


def ormqr(a: Tensor, factors: Tensor, b: Tensor, left: bool = True, transpose: bool = False) -> Any:
    """b times the product of reflections."""
    if not _is_small(a):
        return NotImplemented
    q = _product(a, factors, a.shape[-2])
    q = q.mT if transpose else q
    return torch.matmul(q, b) if left else torch.matmul(b, q)


_TERMS: Final = 18
_SQUARINGS: Final = 11


def matrix_exp(a: Tensor) -> Any:
    """Taylor's series of the matrix divided by a power of two, and its squares; computed in float64."""
    if a.dtype.is_complex or not a.numel():
        return NotImplemented
    wide = a.to(torch.float64)
    norm = wide.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    halvings = torch.clamp(torch.ceil(torch.log2(torch.clamp(norm, min=1.0))), max=_SQUARINGS)
    x = wide / torch.pow(2.0, halvings)
    unit = _eye(a.shape[-1], wide)
    made = unit + x / _TERMS
    for k in range(_TERMS - 1, 0, -1):
        made = unit + torch.matmul(x, made) / k
    for k in range(_SQUARINGS):
        made = torch.where(halvings > k, torch.matmul(made, made), made)
    return torch.where(norm < math.inf, made, math.nan).to(a.dtype)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operators of linear algebra."""
    return {
        aten._linalg_det.default: det,
        aten._linalg_slogdet.default: slogdet,
        aten._linalg_solve_ex.default: solve_ex,
        aten.cholesky_inverse.default: cholesky_inverse,
        aten.cholesky_solve.default: cholesky_solve,
        aten.geqrf.default: geqrf,
        aten.linalg_cholesky_ex.default: cholesky_ex,
        aten.linalg_householder_product.default: householder_product,
        aten.linalg_inv_ex.default: inv_ex,
        aten.linalg_lu.default: lu,
        aten.linalg_lu_factor_ex.default: lu_factor_ex,
        aten.linalg_lu_solve.default: lu_solve,
        aten.linalg_matrix_exp.default: matrix_exp,
        aten.linalg_qr.default: qr,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten.lu_unpack.default: lu_unpack,
        aten.ormqr.default: ormqr,
        aten.triangular_solve.default: triangular_solve,
    }
