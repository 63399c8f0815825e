"""Pytrees: the nesting of tensors in lists, tuples, namedtuples and dicts, of a call's arguments or results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["leaf", "static", "list", "tuple", "namedtuple", "dict"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree whose leaves are placeholders of tensors; hashable, so that it can be part of a signature.

    kind: the kind of this tree node.
    children: its subtrees, in order.
    keys: the keys of a dict.
    payload: for "static" the pair (type, value), so that 1, 1.0 and True differ; for "namedtuple" its class.
    """

    kind: Kind
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    payload: Any = None
    _hash: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            found: int | None = hash((self.kind, self.children, self.keys, self.payload))
        except TypeError:  # it holds an unhashable object; `__hash__` raises
            found = None
        object.__setattr__(self, "_hash", found)

    def __hash__(self) -> int:
        if self._hash is None:
            raise TypeError(f"{self._unhashable()!r} is not hashable")
        return self._hash

    def _unhashable(self) -> Any:
        bad = next((c for c in self.children if c._hash is None), None)
        return self.payload[1] if bad is None else bad._unhashable()

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return the nested object with `leaves` in place of the placeholders."""
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Any:
        kind = self.kind
        if kind == "leaf":
            return next(leaves)
        if kind == "static":
            return self.payload[1]
        parts = [c._take(leaves) for c in self.children]
        if kind == "list":
            return parts
        if kind == "tuple":
            return tuple(parts)
        if kind == "dict":
            return dict(zip(self.keys, parts, strict=True))
        return self.payload(*parts)

    def paths(self, prefix: str = "") -> list[str]:
        """Return the path of each leaf, joined by dots: 'state.0', 'logits'; `prefix` alone for a bare leaf."""
        if self.kind == "leaf":
            return [prefix]
        found: list[str] = []
        names: Iterable[Any] = range(len(self.children))
        if self.kind == "dict":
            names = self.keys
        elif self.kind == "namedtuple":
            names = self.payload._fields
        for name, child in zip(names, self.children, strict=True):
            found += child.paths(f"{prefix}.{name}" if prefix else str(name))
        return found


LEAF = Structure("leaf")


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure]:
    """Return the leaves of a nested object in order, and its structure. Objects that are neither container nor leaf
    are static."""
    leaves: list[Any] = []
    return leaves, _walk(value, is_leaf, leaves)


def _walk(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> Structure:
    if is_leaf(value):
        leaves.append(value)
        return LEAF
    if isinstance(value, dict):
        return Structure("dict", tuple(_walk(v, is_leaf, leaves) for v in value.values()), tuple(value))
    if isinstance(value, list | tuple):
        children = tuple(_walk(v, is_leaf, leaves) for v in value)
        if isinstance(value, list):
            return Structure("list", children)
        if hasattr(value, "_fields"):
            return Structure("namedtuple", children, payload=type(value))
        return Structure("tuple", children)
    return Structure("static", payload=(type(value), value))
