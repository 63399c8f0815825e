"""The cyclic garbage collector, paused while many objects are made that hold no cycles.

Collections are begun by the number of new containers, and each of the oldest generation looks at everything that the
process holds.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
