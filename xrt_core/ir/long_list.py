"""LongList: a long list of numbers or of few texts as an attribute, in an array instead of a tuple of Python objects.

The tables of a tree ensemble are a million elements in a dozen of attributes; as tuples they take ten times the memory
of the file that they came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, overload

import numpy as np

Kind = Literal["floats", "ints", "strings"]

LONG: Final = 1024
"""Lists of so many elements, or more, are read as a LongList; shorter ones are tuples."""

MOST_TEXTS: Final = 256
"""Distinct texts that a LongList may have; lists of more are tuples."""

_INTEGERS: Final = tuple((np.dtype(f"i{size}"), 1 << (8 * size - 1)) for size in (1, 2, 4, 8))


class LongList(Sequence[Any]):
    """A frozen list, equal to the tuple of its elements and hashed as it is; `np.asarray` makes an array of it.

    kind: of the attribute, as in schemas. array: read-only, [elements]: float32; integers in as few bytes as all of
    them fit into; or of texts their places in `texts`, as uint8. texts: the distinct ones, in the order in which they
    come. wire: of texts that were read from a file, their fields of an AttributeProto there, or None.
    """

    __slots__ = ("__weakref__", "_hash", "array", "kind", "texts", "wire")
    kind: Kind
    array: np.ndarray
    texts: tuple[str | bytes, ...]
    wire: memoryview | None

    def __init__(
        self, kind: Kind, array: np.ndarray, texts: Sequence[str | bytes] = (), wire: memoryview | None = None
    ) -> None:
        if kind == "ints":
            array = narrow(array)
        elif kind == "strings":
            array, texts = _in_order(array, texts)
        array = np.ascontiguousarray(array)
        array.flags.writeable = False
        self.kind, self.array, self.texts, self.wire = kind, array, tuple(texts), wire
        self._hash: int | None = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> LongList | None:
        """The list of these elements; None where they are not integers of 64 bits, floats of 32 or texts alone, or are
        more than `MOST_TEXTS` texts."""
        kinds = set(map(type, values))
        if kinds == {int}:
            try:
                return cls("ints", np.array(values, np.int64))
            except OverflowError:
                return None
        if kinds == {float}:
            exact = np.array(values, np.float64)
            with np.errstate(over="ignore"):
                floats = exact.astype(np.float32)
            return None if np.isinf(floats).sum() > np.isinf(exact).sum() else cls("floats", floats)
        if kinds and kinds <= {str, bytes}:
            texts = dict.fromkeys(values)
            if len(texts) <= MOST_TEXTS:
                places = {t: i for i, t in enumerate(texts)}
                return cls("strings", np.fromiter(map(places.__getitem__, values), np.uint8, len(values)), list(texts))
        return None

    def select(self, places: np.ndarray) -> LongList:
        """The elements at `places`."""
        return LongList(self.kind, self.array[places], self.texts)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found: Any = self.array[index].tolist()
        if isinstance(index, slice):
            return tuple(map(self.texts.__getitem__, found)) if self.kind == "strings" else tuple(found)
        return self.texts[found] if self.kind == "strings" else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.kind == "strings":
            return np.asarray(np.array(self.texts, dtype)[self.array])
        plain = np.int64 if self.kind == "ints" else np.float32
        found: np.ndarray = self.array.astype(plain if dtype is None else dtype, copy=bool(copy))
        return found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LongList):
            is_text = self.kind == "strings"
            if is_text != (other.kind == "strings"):
                return False
            return self.texts == other.texts and np.array_equal(self.array, other.array)
        return self[:] == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self[:])
        return self._hash

    def __reduce__(self) -> Any:
        return LongList, (self.kind, self.array, self.texts)

    def __repr__(self) -> str:
        return f"<LongList of {len(self)} {self.kind}>"


def text_of(raw: bytes) -> str | bytes:
    """A text of the file as the IR has it: bytes where it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def narrow(array: np.ndarray) -> np.ndarray:
    """Integers in the smallest signed dtype that has them all, so that equal lists have equal arrays."""
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    fitting = (dtype for dtype, bound in _INTEGERS if -bound <= least and most < bound)
    return array.astype(next(fitting), copy=False)


def _in_order(places: np.ndarray, texts: Sequence[str | bytes]) -> tuple[np.ndarray, Sequence[str | bytes]]:
    """The texts that there are, in the order in which they come."""
    firsts = np.full(len(texts), len(places), np.int64)
    for i in range(len(texts)):
        mask = places == i
        if mask.any():
            firsts[i] = mask.argmax()
    order = [int(i) for i in np.argsort(firsts, kind="stable") if firsts[i] < len(places)]
    if order == list(range(len(texts))):
        return places.astype(np.uint8, copy=False), texts
    renumbered = np.zeros(len(texts), np.uint8)
    renumbered[order] = np.arange(len(order))
    return renumbered[places], [texts[i] for i in order]
