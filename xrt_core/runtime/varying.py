"""VaryingShapes: which dimensions of a graph's inputs are symbols, as declared by the user or as seen between calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from xrt_core.errors import InputError
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, Symbol, SymbolicSignature, expression
from xrt_core.ir.types import Dim, TensorType, ValueType

_MOST: Final = 4
"""Symbolic signatures of one graph; what they do not cover is planned by exact shapes."""
_SEEN: Final = 16
"""Signatures of which the sizes are kept."""
_MANY: Final = 4
"""Of more signatures than these that come before engines are chosen, sizes are taken to vary."""
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

Parts = Sequence[Any]
"""For each argument its (dtype, shape), or its type where it is no array."""


class SignatureStore(Protocol):
    """Where the signatures of one graph between which sizes varied are kept for other processes."""

    def read(self) -> list[Parts]:
        """Those of an earlier process; none where it is not known."""

    def write(self, signatures: Sequence[Parts]) -> None:
        """Keep signatures in the place of earlier ones; none: forget those."""


class VaryingShapes:
    """Proposes the symbolic signatures of one graph. Thread-safe.

    A signature that differs from an earlier one in sizes alone is taken as a sign that these vary. Then every dimension
    that differed, or that the graph declares without a number, is a symbol: dimensions of one declared name, or with
    the same sizes in all calls so far, are one.

    declared: the shapes that the user declared, planned so from the first call on. wanted_after: how many exact
    signatures there should be before a symbolic one, None where no engine takes it, or none is chosen yet; asked at
    each new signature. wanted_again: the same for a graph for which a symbolic plan was live in an earlier process, or
    of which many signatures came before engines were chosen.
    varied_alone: dimensions are symbols that differed, and no others that the graph leaves open. on_end: called with
    the reason where it has proposed as many as it may.
    """

    def __init__(
        self,
        graph: Graph,
        declared: Declared | None,
        wanted_after: Callable[[], int | None],
        varied_alone: bool = False,
        wanted_again: Callable[[], int | None] | None = None,
        on_end: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.declared = declared
        self._on_end = on_end
        self._varied_alone = varied_alone
        self.reason = ""
        self._names = tuple(v.name or f"input_{i}" for i, v in enumerate(graph.inputs))
        self._types = tuple(v.type for v in graph.inputs)
        self._wanted_after = wanted_after
        self._wanted_again = wanted_again
        self._seen: dict[Hashable, list[tuple[tuple[int, ...], ...]]] = {}
        self._proposed = 0
        self._lock = threading.Lock()

    def note_earlier(self, signatures: Sequence[Parts]) -> None:
        """Take signatures into account between which sizes varied in an earlier process."""
        for parts in signatures:
            self.note(parts)
        if signatures and self._wanted_again is not None:
            self._wanted_after = self._wanted_again

    def note(self, parts: Parts) -> None:
        """Take a signature into account that there was before."""
        if parts and all(type(p) is tuple for p in parts):
            with self._lock:
                self._note(parts)

    def seen_like(self, parts: Parts) -> list[Parts]:
        """The signatures so far that differ from `parts` in sizes alone, itself among them."""
        with self._lock:
            return [[(d, s) for (d, _), s in zip(parts, shapes, strict=True)] for shapes in self._note(parts)]

    def give_up(self, reason: str) -> None:
        """Propose nothing any more."""
        self.reason = self.reason or reason

    def signature_for(self, parts: Parts, at_once: bool = False) -> SymbolicSignature | None:
        """The symbolic signature for arguments like these, of which there is no plan yet; None for an exact plan.

        at_once: the second signature makes one, wherever an engine takes it.
        """
        if self.reason or not parts or not all(type(p) is tuple for p in parts):
            return None
        shapes = tuple(tuple(s) for _, s in parts)
        if self.declared is not None and any(0 in s for s in shapes):
            return None  # libraries differ in what they make of empty tensors
        with self._lock:
            after = self._wanted_after()
            if after is None and self._wanted_again is not None and len(self._note(parts)) > _MANY:
                after = self._wanted_again()  # none is chosen yet, and each shape would be built by itself once one is
            after = min(after, 1) if at_once and after is not None else after
            found = self._declared(shapes) if self.declared is not None else self._seen_to_vary(parts, shapes, after)
            if found is None or after is None:
                return None
            self._proposed += 1
            if self._proposed > _MOST:
                self.give_up(f"{_MOST} symbolic plans did not cover the shapes that came")
                self._on_end(self.reason)
                return None
            return found

    def _declared(self, shapes: Sequence[tuple[int, ...]]) -> SymbolicSignature | None:
        """That of the declared shapes. An input that is not among them has the dimensions that the graph declares in
        terms of the same symbols, and beside these the sizes of this call."""
        assert self.declared is not None
        given = [d for d in self.declared.shapes if d is not None]
        own = {s for d in given for e in d if (x := expression(e)) is not None for s in x.symbols}
        taken, dims = set(own), []
        for d, t, s in zip(self.declared.shapes, self._types, shapes, strict=True):
            if d is not None:
                made: list[Dim] = []
                for e in d:
                    made.append(self._fresh("any", taken) if e is None else e)
                    taken |= {str(made[-1])} if e is None else set()
                dims.append(tuple(made))
                continue
            known = t.shape if isinstance(t, TensorType) and t.shape is not None else s
            shared = [isinstance(e, str) and (x := expression(e)) is not None and x.symbols <= own for e in known]
            dims.append(tuple(e if is_shared else n for e, is_shared, n in zip(known, shared, s, strict=True)))
        declared = Declared(self._names, tuple(dims), self.declared.symbols)
        sizes = declared.admits(shapes)
        return SymbolicSignature(declared, sizes) if sizes else None

    @property
    def supersedes(self) -> bool:
        """Whether a symbolic plan takes the place of exact ones: not if these may be faster, on another engine."""
        return self._wanted_after() in (0, 1)

    def _seen_to_vary(
        self, parts: Parts, shapes: tuple[tuple[int, ...], ...], after: int | None
    ) -> SymbolicSignature | None:
        seen = self._note(parts)
        if after is None or len(seen) <= after:
            return None
        names: dict[tuple[str | None, tuple[int, ...]], str] = {}
        taken: set[str] = set()
        dims: list[list[Dim]] = [list(s) for s in shapes]
        open_: list[tuple[int, int, str | None, tuple[int, ...]]] = []
        for i, shape in enumerate(shapes):
            t = self._types[i]
            own: Sequence[Dim] = t.shape if isinstance(t, TensorType) and t.shape is not None else (None,) * len(shape)
            for axis in range(len(shape)):
                sizes = tuple(s[i][axis] for s in seen)
                if isinstance(own[axis], int) or shape[axis] == 0:
                    continue
                if self._varied_alone and len(set(sizes)) == 1:
                    continue
                name = own[axis]
                open_.append((i, axis, name if isinstance(name, str) and _IDENTIFIER.match(name) else None, sizes))
        for named in (True, False):
            for i, axis, name, sizes in open_:
                if (name is not None) is not named:
                    continue
                known = names.get((name, sizes))
                if known is None and name is None and len(set(sizes)) > 1:
                    known = next((k for (_, h), k in names.items() if h == sizes), None)
                if known is None:
                    known = name if name is not None and name not in taken else self._fresh(name or "n", taken)
                    taken.add(known)
                names[name if len(set(sizes)) > 1 or name else f"{i}.{axis}", sizes] = known
                dims[i][axis] = known
        declared = Declared(self._names, tuple(map(tuple, dims)), {})
        sizes_now = declared.admits(shapes)
        return SymbolicSignature(declared, sizes_now) if sizes_now else None

    def _note(self, parts: Parts) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of signatures that differ from this one in sizes alone, this one among them."""
        # sizes of 0 stay as they are, as libraries differ in what they make of empty tensors
        seen = self._seen.setdefault(tuple((d, len(s), *(i for i, n in enumerate(s) if n == 0)) for d, s in parts), [])
        shapes = tuple(tuple(s) for _, s in parts)
        if shapes not in seen:
            seen.append(shapes)
            del seen[:-_SEEN]
        return seen

    @staticmethod
    def _fresh(stem: str, taken: set[str]) -> str:
        return next(n for k in range(len(taken) + 1) if (n := f"{stem}{k}") not in taken)


def declared_shapes(
    names: Sequence[str], types: Sequence[ValueType | None], shapes: Mapping[str, Sequence[Any]]
) -> Declared:
    """The shapes that a user declares for inputs of these names and types; inputs that are not named have none.

    shapes: input -> its dimensions: sizes, symbols by name or with a range (`Symbol`), texts of expressions over
    symbols, or None for any size. Raises InputError for what is none of these, or contradicts the model or itself.
    """
    symbols: dict[str, Symbol] = {}
    found: list[tuple[Dim, ...] | None] = []
    for name, t in zip(names, types, strict=True):
        given = shapes.get(name)
        if given is None:
            found.append(None)
            continue
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InputError(f"shapes: {name!r} is given {given!r}; give a tuple of dimensions such as ('batch', 128)")
        own = t.shape if isinstance(t, TensorType) else None
        if own is not None and len(own) != len(given):
            raise InputError(f"shapes: {name!r} is given {len(given)} dimensions, the model declares {t}")
        dims: list[Dim] = []
        for axis, d in enumerate(given):
            if isinstance(d, Symbol):
                if symbols.setdefault(d.name, d) != d:
                    raise InputError(f"shapes: symbol {d.name!r} is declared as {symbols[d.name]} and as {d}")
                d = d.name
            if isinstance(d, bool) or not (d is None or isinstance(d, int | str)):
                raise InputError(f"shapes: {name!r}, axis {axis}: {d!r} is no size, symbol, expression or None")
            if isinstance(d, str) and expression(d) is None:
                raise InputError(f"shapes: {name!r}, axis {axis}: {d!r} is no expression over symbols, such as 'n + 1'")
            fixed = own[axis] if own is not None else None
            if isinstance(d, int) and isinstance(fixed, int) and fixed != d:
                raise InputError(f"shapes: {name!r}, axis {axis}: {d} is given, the model declares {t}")
            dims.append(fixed if isinstance(fixed, int) else d)
        found.append(tuple(dims))
    return Declared(tuple(names), tuple(found), symbols)


def types_of(signature: SymbolicSignature, parts: Sequence[tuple[np.dtype, Any]]) -> list[TensorType]:
    """The types of the inputs of a symbolic signature. parts: of the arguments, whose dtypes they have."""
    return [
        TensorType(dtype, tuple(shape) if dims is None else dims)
        for dims, (dtype, shape) in zip(signature.declared.shapes, parts, strict=True)
    ]
