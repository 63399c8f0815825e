"""Symbolic dimensions: symbols with their ranges, integer expressions over them, and signatures that bind them.

A symbolic dimension stands in a shape (`ir.types.Dim`) as the canonical text of its expression: "n", "2*n + 1",
"b*n", "(n + 3)//4", "min(n, 150)". Equal texts are equal expressions; `expression` reads a text, `str` writes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from msgspec import Struct

from xrt_core.errors import InputError, ShapeError
from xrt_core.ir.types import Dim

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named size that may differ between calls.

    min, max: the sizes that it takes, inclusive (None: no limit). multiple: every size is a multiple of it.
    Raises ShapeError for a name that is no identifier, and for a range without a size.
    """

    name: str
    min: int = 1
    max: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise ShapeError(f"a symbol is named by an identifier such as 'batch', not {self.name!r}")
        for what, n, least in (("min", self.min, 0), ("max", self.max, 0), ("multiple", self.multiple, 1)):
            if what == "max" and n is None:
                continue
            if type(n) is not int or n < least:
                raise ShapeError(f"symbol {self.name!r}: {what}={n!r}; give an integer of at least {least}")
        first = -(-self.min // self.multiple) * self.multiple
        if self.max is not None and first > self.max:
            raise ShapeError(
                f"symbol {self.name!r}: no size from {self.min} to {self.max} is a multiple of {self.multiple}"
            )

    def why_not(self, size: int) -> str | None:
        """What is wrong with a size, or None."""
        if size < self.min:
            return f"is less than the minimum {self.min}"
        if self.max is not None and size > self.max:
            return f"is more than the maximum {self.max}"
        if size % self.multiple:
            return f"is no multiple of {self.multiple}"
        return None

    def __str__(self) -> str:
        end = "" if self.max is None else str(self.max)
        step = f", multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.name} in {self.min}..{end}{step}"


# --- expressions ------------------------------------------------------------------------------------------------------

Bounds = tuple["int | None", "int | None"]
"""A least and a greatest value; None where no limit is known."""
Monomial = tuple["str | Quotient | Minimum", ...]
"""A product of symbols, quotients and minima, sorted; () is 1."""


class Quotient(Struct, frozen=True):
    """An expression divided by a positive integer, rounded down."""

    dividend: Expr
    divisor: int

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in it."""
        return self.dividend.symbols

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Its value for these sizes of its symbols. Raises KeyError for a symbol without one."""
        return self.dividend.evaluate(sizes) // self.divisor

    def bounds(self, symbols: Mapping[str, Symbol]) -> Bounds:
        """As those of `Expr`."""
        low, high = self.dividend.bounds(symbols)
        return None if low is None else low // self.divisor, None if high is None else high // self.divisor

    def substitute(self, sizes: Mapping[str, Expr]) -> Expr:
        """As that of `Expr`."""
        return self.dividend.substitute(sizes) // self.divisor

    def __str__(self) -> str:
        inner = str(self.dividend)
        return f"({inner})//{self.divisor}" if not _NAME.match(inner) else f"{inner}//{self.divisor}"


class Minimum(Struct, frozen=True):
    """The least of several different expressions, sorted by their texts. Built by `least`."""

    items: tuple[Expr, ...]

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in it."""
        return frozenset().union(*(e.symbols for e in self.items))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Its value for these sizes of its symbols. Raises KeyError for a symbol without one."""
        return min(e.evaluate(sizes) for e in self.items)

    def bounds(self, symbols: Mapping[str, Symbol]) -> Bounds:
        """As those of `Expr`."""
        ends = [e.bounds(symbols) for e in self.items]
        lows = [low for low, _ in ends if low is not None]
        return (min(lows) if len(lows) == len(ends) else None), min((h for _, h in ends if h is not None), default=None)

    def substitute(self, sizes: Mapping[str, Expr]) -> Expr:
        """As that of `Expr`."""
        return least(*(e.substitute(sizes) for e in self.items))

    def __str__(self) -> str:
        return f"min({', '.join(map(str, self.items))})"


class Expr:
    """An integer expression over symbols in normal form: a sum of products with integer coefficients. Immutable.

    Built from `Expr.of(7)`, `Expr.of("n")` by `+`, `-`, `*` and `//` (by a positive integer, rounding down), with
    integers and other expressions. Equal expressions of sums and products are equal and have one text.
    """

    __slots__ = ("_hash", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = sorted(((m, c) for m, c in terms.items() if c), key=lambda t: _order(t[0]))
        self.terms = tuple(kept)
        self._hash = hash(self.terms)

    @classmethod
    def of(cls, value: int | str | Expr) -> Expr:
        """The expression of an integer, of a symbol's name, or itself."""
        if isinstance(value, Expr):
            return value
        return cls({(): int(value)} if not isinstance(value, str) else {(value,): 1})

    @property
    def constant(self) -> int | None:
        """Its value where it has no symbols, else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in it."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for a in monomial:
                found |= {a} if isinstance(a, str) else a.symbols
        return frozenset(found)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Its value for these sizes of its symbols. Raises KeyError for a symbol without one."""
        total = 0
        for monomial, c in self.terms:
            for a in monomial:
                c *= sizes[a] if isinstance(a, str) else a.evaluate(sizes)
            total += c
        return total

    def bounds(self, symbols: Mapping[str, Symbol]) -> Bounds:
        """A least and a greatest value over the ranges of the symbols; None where no limit is known. Not tight where a
        symbol stands in several terms."""
        low: int | None = 0
        high: int | None = 0
        for monomial, c in self.terms:
            lo: int | None = 1
            hi: int | None = 1
            for a in monomial:
                first, last = _atom_bounds(a, symbols)
                if first is None or first < 0 or lo is None:  # sizes are not negative; what may be is not looked at
                    lo, hi = None, None
                    break
                lo = lo * first
                hi = None if hi is None or last is None else hi * last
            if c < 0:
                lo, hi = hi, lo
            low = None if low is None or lo is None else low + c * lo
            high = None if high is None or hi is None else high + c * hi
        return low, high

    def substitute(self, sizes: Mapping[str, Expr]) -> Expr:
        """The expression with expressions in the place of symbols; those not named stay."""
        total = Expr({})
        for monomial, c in self.terms:
            product = Expr({(): c})
            for a in monomial:
                product = product * (sizes.get(a, Expr.of(a)) if isinstance(a, str) else a.substitute(sizes))
            total = total + product
        return total

    def __add__(self, other: Expr | int) -> Expr:
        terms = dict(self.terms)
        for m, c in Expr.of(other).terms:
            terms[m] = terms.get(m, 0) + c
        return Expr(terms)

    def __mul__(self, other: Expr | int) -> Expr:
        terms: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in Expr.of(other).terms:
                key = tuple(sorted((*m, *n), key=str))
                terms[key] = terms.get(key, 0) + c * d
        return Expr(terms)

    def __neg__(self) -> Expr:
        return self * -1

    def __sub__(self, other: Expr | int) -> Expr:
        return self + -Expr.of(other)

    def __floordiv__(self, divisor: int) -> Expr:
        """Raises ZeroDivisionError, or ShapeError for a negative divisor."""
        if divisor == 0:
            raise ZeroDivisionError("a dimension is divided by zero")
        if divisor < 0:
            raise ShapeError(f"a dimension is divided by {divisor}: a divisor is positive")
        # (divisor * a + b)//divisor == a + b//divisor, for every a and b
        whole = Expr({m: c // divisor for m, c in self.terms if c % divisor == 0})
        rest = Expr({m: c for m, c in self.terms if c % divisor})
        value = rest.constant
        if value is not None:
            return whole + value // divisor
        if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
            (atom,) = rest.terms[0][0]
            if isinstance(atom, Quotient):  # x//a//b == x//(a*b)
                return whole + Expr({(Quotient(atom.dividend, atom.divisor * divisor),): 1})
        return whole + Expr({(Quotient(rest, divisor),): 1})

    def divided(self, other: Expr) -> Expr | None:
        """The expression that times `other` gives this one; None where there is none of this form."""
        if not other.terms:
            return None
        by, factor = max(other.terms, key=_rank)
        rest, found = self, Expr({})
        while rest.terms:  # the division of polynomials: the leading term goes at every turn
            leading, c = max(rest.terms, key=_rank)
            left = list(leading)
            for a in by:
                if a not in left:
                    return None
                left.remove(a)
            if c % factor:
                return None
            part = Expr({tuple(left): c // factor})
            found, rest = found + part, rest - part * other
        return found

    def __radd__(self, other: int) -> Expr:
        return self + other

    def __rmul__(self, other: int) -> Expr:
        return self * other

    def __rsub__(self, other: int) -> Expr:
        return -self + other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | str):
            other = Expr.of(other)
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = ""
        for i, (m, c) in enumerate(self.terms):
            sign = "-" if c < 0 else "+"
            alone = len(m) == 1 and c == 1
            product = "*".join(f"({a})" if isinstance(a, Quotient) and not alone else str(a) for a in m)
            factor = str(abs(c)) if not m else product if abs(c) == 1 else f"{abs(c)}*{product}"
            text += (f"-{factor}" if c < 0 else factor) if i == 0 else f" {sign} {factor}"
        return text

    def __repr__(self) -> str:
        return f"<Expr {self}>"

    @property
    def dim(self) -> int | str:
        """The dimension that stands for it in a shape: an integer, or its text."""
        value = self.constant
        return str(self) if value is None else value


def least(*items: Expr | int) -> Expr:
    """The least of several expressions."""
    known = [n for e in items if (n := Expr.of(e).constant) is not None]
    found = {str(e): e for e in map(Expr.of, items) if e.constant is None}
    for e in tuple(found.values()):  # the least of what is a minimum itself
        if len(e.terms) == 1 and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1:
            (atom,) = e.terms[0][0]
            if isinstance(atom, Minimum):
                del found[str(e)]
                known += [n for i in atom.items if (n := i.constant) is not None]
                found |= {str(i): i for i in atom.items if i.constant is None}
    kept = [found[t] for t in sorted(found)] + ([Expr.of(min(known))] if known else [])
    return kept[0] if len(kept) == 1 else Expr({(Minimum(tuple(kept)),): 1})


def _order(m: Monomial) -> tuple[bool, int, list[str]]:
    return not m, -len(m), [str(a) for a in m]  # the integer at the end


def _rank(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    """The place of a term in an order that multiplication keeps."""
    return len(term[0]), [str(a) for a in term[0]]


def _atom_bounds(a: str | Quotient | Minimum, symbols: Mapping[str, Symbol]) -> Bounds:
    if not isinstance(a, str):
        return a.bounds(symbols)
    s = symbols.get(a)
    return (0, None) if s is None else (s.min, s.max)


_TOKEN: Final = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z0-9_.]*)|(//|[-+*(),]))")


@lru_cache(maxsize=4096)
def expression(dim: Dim) -> Expr | None:
    """The expression of a dimension: of an integer, of a symbol's name or of the text of an expression. None for an
    unknown dimension, and for a text that is no expression, such as a name with spaces."""
    if dim is None:
        return None
    if isinstance(dim, int):
        return Expr.of(dim)
    tokens: list[str] = []
    at = 0
    text = dim.strip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found.group().strip())
        at = found.end()
    try:
        made, rest = _sum(tokens, 0)
    except (IndexError, ValueError, ShapeError, ZeroDivisionError):
        return None
    return made if rest == len(tokens) else None


def _sum(tokens: Sequence[str], at: int) -> tuple[Expr, int]:
    sign = 1
    if tokens[at] == "-":
        sign, at = -1, at + 1
    total, at = _product(tokens, at)
    total = total * sign
    while at < len(tokens) and tokens[at] in "+-":
        term, after = _product(tokens, at + 1)
        total = total + term if tokens[at] == "+" else total - term
        at = after
    return total, at


def _product(tokens: Sequence[str], at: int) -> tuple[Expr, int]:
    product, at = _factor(tokens, at)
    while at < len(tokens) and tokens[at] in ("*", "//"):
        factor, after = _factor(tokens, at + 1)
        if tokens[at] == "*":
            product = product * factor
        else:
            divisor = factor.constant
            if divisor is None:
                raise ValueError
            product = product // divisor
        at = after
    return product, at


def _factor(tokens: Sequence[str], at: int) -> tuple[Expr, int]:
    token = tokens[at]
    if token == "(":
        inner, at = _sum(tokens, at + 1)
        if tokens[at] != ")":
            raise ValueError
    elif token.isdecimal():
        inner = Expr.of(int(token))
    elif token == "min" and tokens[at + 1 : at + 2] == ["("]:
        items = []
        at += 1
        while tokens[at] != ")":
            item, at = _sum(tokens, at + 1)
            if tokens[at] not in (",", ")"):
                raise ValueError
            items.append(item)
        inner = least(*items)
    elif _NAME.match(token):
        inner = Expr.of(token)
    else:
        raise ValueError
    return inner, at + 1


def size_of(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension for these sizes of symbols; None where it is not known."""
    if isinstance(dim, int):
        return dim
    made = expression(dim)
    if made is None or not made.symbols <= sizes.keys():
        return None
    return made.evaluate(sizes)


def shape_for(shape: Iterable[Dim], sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The sizes of a shape's dimensions, as `size_of` gives them."""
    return tuple(size_of(d, sizes) for d in shape)


# --- signatures -------------------------------------------------------------------------------------------------------


class Declared(Struct, frozen=True):
    """The declared shapes of inputs, and the symbols in them.

    names: of the inputs, for messages. shapes: one per input; a dimension is a size, a symbol's name, the text of an
    expression over symbols, or None (any size). A shape of None holds for any. symbols: by name, those with a range; a
    symbol that is not in it takes every size from 1.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[Dim, ...] | None, ...]
    symbols: Mapping[str, Symbol]

    def bind(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, int]:
        """The sizes of the symbols for inputs of these shapes (None: an input without one).

        Raises InputError for a shape that does not fit: it names input, axis, symbol and both sizes.
        """
        sizes: dict[str, int] = {}
        origin: dict[str, str] = {}
        later = []
        for name, declared, shape in zip(self.names, self.shapes, shapes, strict=True):
            if declared is None or shape is None:
                continue
            if len(declared) != len(shape):
                raise InputError(f"input {name!r}: shape {list(shape)} given, {len(declared)} dimensions expected")
            for axis, (d, size) in enumerate(zip(declared, shape, strict=True)):
                if d is None:
                    continue
                if isinstance(d, int):
                    if d != size:
                        raise InputError(f"input {name!r}, axis {axis}: size {size} given, {d} expected")
                elif not _NAME.match(d):
                    later.append((name, axis, d, size))
                elif d not in sizes:
                    why = self.symbols.get(d, _ANY).why_not(size)
                    if why is not None:
                        raise InputError(f"input {name!r}, axis {axis}: {size} given, which {why} (symbol {d!r})")
                    sizes[d], origin[d] = size, f"input {name!r}, axis {axis}"
                elif sizes[d] != size:
                    raise InputError(
                        f"input {name!r}, axis {axis}: symbol {d!r} = {size}, but {d!r} = {sizes[d]} by {origin[d]}; "
                        "dimensions of one symbol must be equal"
                    )
        for name, axis, d, size in later:
            solved = _solved(d, size, sizes)
            if solved is not None:
                sizes[solved[0]], origin[solved[0]] = solved[1], f"input {name!r}, axis {axis}"
            wanted = size_of(d, sizes)
            if wanted is not None and wanted != size:
                by = ", ".join(f"{s} = {sizes[s]} ({origin[s]})" for s in sorted(expression(d).symbols))  # type: ignore[union-attr]
                raise InputError(f"input {name!r}, axis {axis}: {d} = {wanted} by {by}, but {size} was given")
        return sizes

    def admits(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, int] | None:
        """As `bind`, with None in the place of an error."""
        try:
            return self.bind(shapes)
        except InputError:
            return None

    def __str__(self) -> str:
        inputs = ", ".join(
            f"{n}[{'...' if s is None else ', '.join('?' if d is None else str(d) for d in s)}]"
            for n, s in zip(self.names, self.shapes, strict=True)
        )
        ranges = "; ".join(map(str, self.symbols.values()))
        return f"{inputs}; {ranges}" if ranges else inputs


def _solved(d: str, size: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The one symbol without a size in an expression, and the size that gives the expression this one; None where there
    are several, or none, or no size does."""
    made = expression(d)
    left = () if made is None else tuple(made.symbols - sizes.keys())
    if made is None or len(left) != 1:
        return None
    factor = dict(made.terms).get(left)
    rest = made - Expr({left: factor or 0})
    if factor is None or left[0] in rest.symbols:
        return None
    whole, remainder = divmod(size - rest.evaluate(sizes), factor)
    return None if remainder else (left[0], whole)


class SymbolicSignature(Struct, frozen=True):
    """Declared shapes of a graph's inputs, and the sizes of their symbols in the call that is planned for first."""

    declared: Declared
    sizes: Mapping[str, int]

    @property
    def symbols(self) -> dict[str, Symbol]:
        """Every symbol of the signature, by name."""
        return {name: self.declared.symbols.get(name, Symbol(name)) for name in self.sizes}


_ANY: Final = Symbol("any")


def product(dims: Iterable[Expr]) -> Expr:
    """The product of expressions; 1 for none."""
    return math.prod(dims, start=Expr.of(1))
