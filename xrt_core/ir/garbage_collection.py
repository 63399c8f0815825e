"""Garbage collection: pauses of the cyclic collector, and what is known of objects until they are collected.

The collector is paused while many objects are made that hold no cycles: collections are begun by the number of new
containers, and each of the oldest generation looks at everything that the process holds.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_lock = threading.RLock()  # a finalizer may build a graph as well
_bodies: set[object] = set()
_usual = True
"""Whether the collector is on outside of the bodies, while there are some."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection in the body; reference counting goes on.

    Bodies may overlap. After the last one the collector is on again if it was.
    """
    global _usual
    body = object()
    try:
        with _lock:
            if not _bodies:
                _usual = gc.isenabled()
            _bodies.add(body)
            gc.disable()
        yield
    finally:  # also where a signal ends the body before it began
        with _lock:
            if body in _bodies:
                _bodies.discard(body)
                if not _bodies and _usual:
                    gc.enable()


def is_usually_on() -> bool:
    """Whether the collector is on outside of such bodies."""
    with _lock:
        return gc.isenabled() or (bool(_bodies) and _usual)


def _after_fork() -> None:
    """The bodies are the parent's."""
    global _lock
    _lock = threading.RLock()
    if _bodies and _usual:
        gc.enable()
    _bodies.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class WeakIdentityMap(Generic[K, V]):
    """Values by the identity of objects that cannot be keys, such as arrays, for as long as they live.

    Thread-safe without a lock: entries go when the collector runs, which may be in the midst of a method, in the thread
    that would hold the lock; each step is one operation on a dict.
    """

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
