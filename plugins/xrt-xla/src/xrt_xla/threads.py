"""XLA's worker threads on a CPU, each on a processor of its own where there are two.

XLA's threads sleep between two calls, and Linux may wake both on one processor, where they stay for milliseconds: on
two processors an encoder of 128 tokens takes 7.7 ms in call after call, 12.5 after a rest of 30 ms, and 8.6 then with a
thread on each (a table is in benchmarks/README.md of XRT). ONNX Runtime places its threads so as well. With more
processors nothing is done: it was not measured there, and threads of several processes that stay where they are could
meet on one while others are idle.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from typing import Final

_NAME: Final = "tf_XLAEigen"
"""What the system calls a thread of the pool that loops and products are divided among (jaxlib 0.10.2)."""
_MOST: Final = 2
"""Processors of this process up to which its threads are placed, and Eigen divides most products better."""


@functools.cache
def place_workers(tasks: pathlib.Path = pathlib.Path("/proc/self/task")) -> bool:
    """Place each worker thread on one of the processors that this process may use, once; whether that was done.

    Nothing is done where the system does not tell (it is no Linux), where there are more processors or not as many
    threads (of a client of several devices), or where somebody has placed them already. tasks: folders of this
    process's threads, as Linux gives them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    with contextlib.suppress(OSError, ValueError):
        processors = sorted(os.sched_getaffinity(os.getpid()))
        found = sorted(int(t.name) for t in tasks.iterdir() if (t / "comm").read_text().strip() == _NAME)
        is_free = all(os.sched_getaffinity(t) == set(processors) for t in found)
        if is_free and 1 < len(found) == len(processors) <= _MOST:
            for thread, processor in zip(found, processors, strict=True):
                os.sched_setaffinity(thread, {processor})
            return True
    return False


def has_few_processors() -> bool:
    """Whether this process may use two at most; False where the system does not tell."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(os.getpid())) <= _MOST
