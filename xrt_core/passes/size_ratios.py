"""Sizes in floating point: what exporters write for "the next multiple of 32" (Cast, Div, Ceil, Mul, Cast)."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.symbols import Expr

MOST: Final = 1 << 22
"""Numerators up to which one division in float32 is on the right side of each integer, and what is exact stays so."""
FOLLOWED: Final = (np.dtype(np.float32), np.dtype(np.float64))
_LARGEST: Final = 1 << 12  # numerators and denominators of constants


class Ratio(Struct, frozen=True):
    """An expression of sizes divided by a positive integer, not rounded.

    Floats hold it exactly where the divisor is a power of two; the quotient by another one is rounded once, and may be
    rounded to an integer, but not calculated with. What is neither raises ValueError.
    """

    above: Expr
    below: int = 1

    @classmethod
    def of(cls, value: float) -> Ratio:
        """A constant. Raises ValueError for one that is no quotient of small integers."""
        found = Fraction(value)
        if max(abs(found.numerator), found.denominator) > _LARGEST:
            raise ValueError(f"{value} is no quotient of small integers")
        return cls(Expr.of(found.numerator), found.denominator)

    @property
    def constant(self) -> float | None:
        """Its value where it depends on no size, else None."""
        number = self.above.constant
        return None if number is None else number / self.below

    def __add__(self, other: Ratio) -> Ratio:
        below = max(self._exact(), other._exact())
        parts = [r.above * (below // r.below) for r in (self, other)]
        known = [p.constant for p in parts]
        if any(n is not None and abs(n) > MOST for n in known):
            raise ValueError("a sum with a number beside which others are rounded")
        if all(n is None or abs(n) > _LARGEST for n in known):  # what was large before may be small, and rounded
            raise ValueError("a sum of two sizes, or with a large number")
        return Ratio(parts[0] + parts[1], below)

    def __sub__(self, other: Ratio) -> Ratio:
        return self + other * Ratio(Expr.of(-1))

    def __mul__(self, other: Ratio) -> Ratio:
        if self.above.constant is None and other.above.constant is None:
            raise ValueError("a product of two sizes")
        if any(n is not None and abs(n) > MOST for n in (self.above.constant, other.above.constant)):
            raise ValueError("a product with a number that may be rounded")
        return Ratio(self.above * other.above, self._exact() * other._exact())

    def __truediv__(self, other: Ratio) -> Ratio:
        by = other.above.constant
        if by is None or by <= 0:
            raise ValueError("a quotient by no positive number")
        return Ratio(self.above * other._exact(), self._exact() * by)

    def floor(self) -> Expr:
        """The greatest integer that is not above it."""
        return self.above // self.below

    def ceil(self) -> Expr:
        """The least integer that is not below it."""
        return (self.above + (self.below - 1)) // self.below

    def _exact(self) -> int:
        """The divisor. Raises ValueError where floats round the quotient."""
        if self.below & (self.below - 1):
            raise ValueError("calculated with a rounded quotient")
        return self.below
