"""Lets a process that was forked while a native library was in use end, where the library would wait for ever.

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
from collections.abc import Callable, Iterable

_is_registered = False


def keep_for_ever(kept: object) -> None:
    """Let the destructor of an object never run, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def let_forks_end(undying: Callable[[], Iterable[object]] = tuple) -> None:
    """Let processes that are forked from now on end, where the C library has `on_exit` (glibc).

    undying: called in the forked process; gives objects whose destructors must not run there.
    """
    global _is_registered
    if not hasattr(os, "register_at_fork"):
        return

    def keep() -> None:
        with contextlib.suppress(Exception):
            for o in undying():
                keep_for_ever(o)

    os.register_at_fork(after_in_child=keep)
    if not _is_registered:
        _is_registered = True
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            on_exit, at_exit = library.on_exit, library.__cxa_atexit
            leave, flush = (ctypes.cast(f, ctypes.c_void_p) for f in (library._exit, library.fflush))

            def leave_early() -> None:
                on_exit(leave, None)  # is called last, with the exit code
                at_exit(flush, None, None)

            os.register_at_fork(after_in_child=leave_early)
