"""Forked processes: what they do first, and how they end where a native library was in use when they were forked.

At its exit, destructors wait for threads that only its parent has: that of a static object, of a client, of a compiled
model. Plain programs with such a library hang there too. What is done about it is what children of `multiprocessing` do
always: the process leaves before the destructors of libraries run. Python's own exit handlers have run by then, what C
wrote is flushed, and the exit code is kept.

Source: https://man7.org/linux/man-pages/man3/on_exit.3.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

T = TypeVar("T")

_is_registered = False


def in_forked_process(call: Callable[[], object]) -> None:
    """Let every process that is forked from now on make a call, before anything else. Nothing where no process forks.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def each_in_forked_process(objects: Collection[T], call: Callable[[T], object]) -> None:
    """The same, for each of the objects that exist then."""

    def call_all() -> None:
        for o in list(objects):
            call(o)

    in_forked_process(call_all)


def keep_for_ever(kept: object) -> None:
    """Let the destructor of an object never run, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def let_forks_end(kept: Callable[[], Iterable[object]] = tuple) -> None:
    """Let processes that are forked from now on end, where the C library has `on_exit` (glibc).

    kept: called in the forked process; gives objects whose destructors must not run there.
    """
    global _is_registered
    def keep() -> None:
        with contextlib.suppress(Exception):
            for o in kept():
                keep_for_ever(o)

    in_forked_process(keep)
    if not _is_registered:
        _is_registered = True
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            on_exit, at_exit = library.on_exit, library.__cxa_atexit
            leave, flush = (ctypes.cast(f, ctypes.c_void_p) for f in (library._exit, library.fflush))

            def leave_early() -> None:
                on_exit(leave, None)  # is called last, with the exit code
                at_exit(flush, None, None)

            in_forked_process(leave_early)
