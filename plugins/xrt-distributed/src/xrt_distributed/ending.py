"""What is done when a program ends and threads still have to be started for it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its own end must be registered before: the last one goes first
import threading
from collections.abc import Callable
from typing import Any


def at_end(call: Callable[[], object]) -> None:
    """Call a function when the program ends, before the interpreter ends its pools of threads; where it has no place
    for that, at `atexit`.

    At `atexit` pools take no more work, and asyncio resolves names in one: what S3 is to be told then is lost.
    """
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(call)
    except RuntimeError:  # the end has begun
        atexit.register(call)
