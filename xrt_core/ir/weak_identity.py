"""WeakIdentityMap: what is known of objects that cannot be keys, such as arrays, for as long as they live."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WeakIdentityMap(Generic[K, V]):
    """Values by object identity. Thread-safe without a lock: entries go when the collector runs, which may be in the
    midst of a method, in the thread that would hold the lock; each step is one operation on a dict."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of an object; None where there is none."""
        found = self._entries.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def put(self, key: K, value: V) -> None:
        """Set the value of an object. The value must not hold the object."""
        place, entries = id(key), self._entries

        def forget(dead: weakref.ref[K]) -> None:  # before another object can have the identity
            kept = entries.get(place)
            if kept is not None and kept[0] is dead:
                entries.pop(place, None)

        entries[place] = weakref.ref(key, forget), value
