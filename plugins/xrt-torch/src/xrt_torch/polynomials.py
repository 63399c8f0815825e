"""Orthogonal polynomials, whose degree is a tensor; computed in float64.

Chebyshev's have closed forms: within (-1, 1) they are quotients of cosines and sines of multiples of acos(x), outside
of hyperbolic ones (DLMF 18.5.1 to 18.5.4). At 1 and -1 they are known. Those of Hermite, Laguerre and Legendre are
computed by their recurrences (DLMF 18.9.1), in a loop whose length the largest degree decides: the operator
`xrt.recurrence`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten


def _growing(t: Tensor, k: Any, over: Any, sign: float) -> Tensor:
    """(exp(k t) + sign exp(-k t)) / (exp(over t) + sign exp(-over t)), which does not overflow before its result."""
    last = 1 + sign * torch.exp(-2 * k * t)
    first = 1 + sign * torch.exp(-2 * over * t)
    return torch.exp((k - over) * t) * (last / torch.where(first == 0, 1.0, first))


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return a / torch.where(b == 0, 1.0, b)


class _Angles:
    """Of |x|, where angles near 0 are as exact as others: inner is acos(x) up to 1, outer acosh(x) from there."""

    def __init__(self, x: Tensor) -> None:
        self.size = x.abs()
        self.inner = torch.acos(torch.where(self.size < 1, self.size, 0.0))
        above = torch.clamp(self.size - 1, min=0)
        self.outer = torch.log1p(above + torch.sqrt(above * (above + 2)))

    def chosen(self, inside: Tensor, outside: Tensor, at_one: Any) -> Tensor:
        """The number for |x|."""
        return torch.where(self.size == 1, at_one, torch.where(self.size < 1, inside, outside))


def _first(x: Tensor, n: Tensor, sign: Tensor) -> Tensor:
    a = _Angles(x)
    grown = torch.exp(n * a.outer) * (0.5 + 0.5 * torch.exp(-2 * n * a.outer))
    made = a.chosen(torch.cos(n * a.inner), grown, 1.0)
    return torch.where(x < 0, sign * made, made)


def _second(x: Tensor, n: Tensor, sign: Tensor) -> Tensor:
    a = _Angles(x)
    inside = _quotient(torch.sin((n + 1) * a.inner), torch.sin(a.inner))
    made = a.chosen(inside, _growing(a.outer, n + 1, 1.0, -1.0), n + 1)
    return torch.where(x < 0, sign * made, made)


def _third_and_fourth(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """For |x|; for -x each is the other one, with the sign of the degree."""
    a = _Angles(x)
    inside = torch.cos((n + 0.5) * a.inner) / torch.cos(a.inner / 2)
    third = a.chosen(inside, _growing(a.outer, n + 0.5, 0.5, 1.0), 1.0)
    inside = _quotient(torch.sin((n + 0.5) * a.inner), torch.sin(a.inner / 2))
    return third, a.chosen(inside, _growing(a.outer, n + 0.5, 0.5, -1.0), 2 * n + 1)


def _third(x: Tensor, n: Tensor, sign: Tensor) -> Tensor:
    third, fourth = _third_and_fourth(x, n)
    return torch.where(x < 0, sign * fourth, third)


def _fourth(x: Tensor, n: Tensor, sign: Tensor) -> Tensor:
    third, fourth = _third_and_fourth(x, n)
    return torch.where(x < 0, sign * third, fourth)


def _in_double(x: Any, n: Any) -> tuple[Tensor, Tensor, torch.dtype]:
    """Argument and degree in float64 and of one shape, the degree cut to a whole number, and the result's dtype."""
    kind = torch.result_type(x, n)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    x, n = (v.to(torch.float64) if isinstance(v, Tensor) else torch.full([], v, dtype=torch.float64) for v in (x, n))
    x, n = torch.broadcast_tensors(x, torch.trunc(n))
    return x, n, kind


def _of_degree(function: Callable[..., Tensor], shifted: bool, x: Any, n: Any) -> Tensor:
    """x, n: tensors, or numbers; of degrees below 0 the result is 0, as with torch."""
    x, n, kind = _in_double(x, n)
    x = 2 * x - 1 if shifted else x
    sign = 1 - 2 * torch.remainder(n, 2)
    made = function(x, torch.clamp(n, min=0), sign)
    made = torch.where(n == 0, 1.0, torch.where(torch.isnan(x), math.nan, made))
    return torch.where(n < 0, 0.0, made).to(kind)


_RECURRENCES: Final = {
    "hermite_polynomial_h": (0.0, 2.0, 0.0, 2.0, 0.0),
    "hermite_polynomial_he": (0.0, 1.0, 0.0, 1.0, 0.0),
    "laguerre_polynomial_l": (1.0, -1.0, 0.0, 1.0, 1.0),
    "legendre_polynomial_p": (0.0, 1.0, 2.0, 1.0, 1.0),
}
"""The coefficients that `recurrence` takes."""
_MOST: Final = {torch.float32: 128, torch.float64: 512}
"""The degrees up to which torch computes Hermite's polynomials."""


@torch.library.custom_op("xrt::recurrence", mutates_args=())
def recurrence(x: Tensor, n: Tensor, a: float, b: float, c: float, d: float, e: float) -> Tensor:
    """The polynomial p(n) of x: p(0) = 1, (1 + e k) p(k + 1) = (a (2k + 1) + (b + c k) x) p(k) - d k p(k - 1).

    x, n: float64 of one shape, n whole numbers from 0 on. Returns the same shape.
    """
    before, made = torch.zeros_like(x), torch.ones_like(x)
    for k in range(int(n.max()) if n.numel() else 0):
        following = ((a * (2 * k + 1) + (b + c * k) * x) * made - d * k * before) / (1 + e * k)
        goes_on = k < n
        before, made = torch.where(goes_on, made, before), torch.where(goes_on, following, made)
    return made


@recurrence.register_fake
def _(x: Tensor, n: Tensor, a: float, b: float, c: float, d: float, e: float) -> Tensor:
    return torch.empty_like(x)


def _by_recurrence(family: str, x: Any, n: Any) -> Tensor:
    """x, n: tensors, or numbers, as of `_of_degree`."""
    x, n, kind = _in_double(x, n)
    degree = torch.clamp(n, min=0)
    most = _MOST.get(kind) if family.startswith("hermite") else None
    degree = degree if most is None else torch.clamp(degree, max=most)
    made = torch.ops.xrt.recurrence.default(x, degree, *_RECURRENCES[family])
    if most is not None:
        made = torch.where(n > most, math.nan, made)
    return torch.where(n < 0, 0.0, made).to(kind)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operator -> function."""
    made: dict[Any, Callable[..., Any]] = {}
    for letter, function in (("t", _first), ("u", _second), ("v", _third), ("w", _fourth)):
        for prefix in ("", "shifted_"):
            packet = getattr(aten, f"special_{prefix}chebyshev_polynomial_{letter}")
            for overload in ("default", "x_scalar", "n_scalar"):
                made[getattr(packet, overload)] = functools.partial(_of_degree, function, bool(prefix))
    for family in _RECURRENCES:
        for overload in ("default", "x_scalar", "n_scalar"):
            made[getattr(getattr(aten, f"special_{family}"), overload)] = functools.partial(_by_recurrence, family)
    return made
