"""Freed memory: the C library keeps some of what the host's calls have freed, for calls that may not come."""

from __future__ import annotations

import contextlib


def give_back() -> None:
    """Let glibc give freed memory back to the system (`malloc_trim(3)`), which takes some milliseconds. Other C
    libraries have no such call, and nothing happens."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no library of no name
        ctypes.CDLL(None).malloc_trim(0)
