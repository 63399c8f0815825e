"""The interpreter's end while a thread of the guard is within an engine's library.

A daemon thread that comes back from C++ when the interpreter is gone is ended by unwinding its stack, which C++ answers
by aborting the process. So the end waits until such a thread is out of the library, some seconds at most, and none goes
in any more. Importing a library, asking about nodes and loading executables is over that soon; who hangs is left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

_LIMIT: Final = 5.0  # seconds that the interpreter's end waits at most
_condition = threading.Condition()
_here = threading.local()
_inside = 0
_begun = False
_registered = False


class Leaving(Exception):
    """The interpreter is ending."""


def begin() -> None:
    """Say that the interpreter is ending."""
    global _begun
    _begun = True


def begun() -> bool:
    """Whether the interpreter is ending: its main thread is through, and so are all others that are no daemons."""
    main = threading.main_thread()
    return _begun or not (main.is_alive() or any(t is not main and not t.daemon for t in threading.enumerate()))


def check() -> None:
    """Raises Leaving where the interpreter is ending."""
    if begun():
        raise Leaving("the interpreter is ending")


@contextlib.contextmanager
def within_library() -> Iterator[None]:
    """While this lasts the interpreter does not end. Raises Leaving where it has begun to."""
    global _inside, _registered
    with _condition:
        check()
        _inside += 1
        _here.depth = getattr(_here, "depth", 0) + 1
        if not _registered:
            _registered = True
            atexit.register(_leave)
    try:
        yield
    finally:
        with _condition:
            _inside -= 1
            _here.depth -= 1
            _condition.notify_all()


@contextlib.contextmanager
def outside_library() -> Iterator[None]:
    """For while a thread that is `within_library` waits for something else. Raises Leaving where the end has begun."""
    global _inside
    inside = getattr(_here, "depth", 0)
    with _condition:
        _inside -= inside
        _condition.notify_all()
    try:
        yield
    finally:
        with _condition:
            _inside += inside
    check()


def _leave() -> None:
    with _condition:
        begin()
        _condition.wait_for(lambda: not _inside, _LIMIT)


def _forked() -> None:
    """A forked process has none of the parent's threads."""
    global _condition, _inside
    _condition, _inside = threading.Condition(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
