"""Chebyshev polynomials of any degrees, by their closed forms; computed in float64.

The degree is a tensor, so that a recurrence would have a length that data decide. Within (-1, 1) the polynomials are
quotients of cosines and sines of multiples of acos(x), outside of hyperbolic ones (DLMF 18.5.1 to 18.5.4). At 1 and -1
they are known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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


def _of_degree(function: Callable[..., Tensor], shifted: bool, x: Any, n: Any) -> Tensor:
    """x, n: tensors, or numbers; as with torch the degree is cut to an integer, and below 0 the result is 0."""
    kind = torch.result_type(x, n)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    x, n = (v.to(torch.float64) if isinstance(v, Tensor) else torch.full([], v, dtype=torch.float64) for v in (x, n))
    n = torch.trunc(n)
    x = 2 * x - 1 if shifted else x
    x, n = torch.broadcast_tensors(x, n)
    sign = 1 - 2 * torch.remainder(n, 2)
    made = function(x, torch.clamp(n, min=0), sign)
    made = torch.where(n == 0, 1.0, torch.where(torch.isnan(x), math.nan, made))
    return torch.where(n < 0, 0.0, made).to(kind)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen's operator -> function."""
    made: dict[Any, Callable[..., Any]] = {}
    for letter, function in (("t", _first), ("u", _second), ("v", _third), ("w", _fourth)):
        for prefix in ("", "shifted_"):
            packet = getattr(aten, f"special_{prefix}chebyshev_polynomial_{letter}")
            for overload in ("default", "x_scalar", "n_scalar"):
                made[getattr(packet, overload)] = functools.partial(_of_degree, function, bool(prefix))
    return made
