"""Roofline: the memory bandwidth and the floating-point rate of this machine, measured by NumPy and kept on disk.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009). The bandwidth is
that of copying an array larger than the caches, the rate that of a product of two matrices of float32; both on all
processors that NumPy's BLAS uses. A library with a better product than NumPy's gets more than 100 %.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from typing import Final

import msgspec
import numpy as np

from xrt_core.cache.disk import default_folder, prepare_folder
from xrt_core.engine.serialization import instruction_set
from xrt_core.errors import CacheError
from xrt_core.files import decode, replace_file
from xrt_core.options import resolve

_BYTES: Final = 64 << 20  # of the array that is copied: more than the caches hold
_SIDE: Final = 1024  # of the matrices
_SECONDS: Final = 0.25  # for each of the two
_LEAST: Final = 3  # runs of each


class Roofline(msgspec.Struct, frozen=True):
    """What this machine can do at most.

    bandwidth: bytes per second. flops: floating-point operations per second. machine: what it was measured on.
    """

    bandwidth: float
    flops: float
    machine: str

    def seconds(self, moved: int, flops: int) -> float:
        """The least time for moving so many bytes and doing so many operations at once."""
        return max(moved / self.bandwidth, flops / self.flops)

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g} GB/s, {self.flops / 1e9:.3g} GFLOP/s"

    @classmethod
    def measure(cls) -> Roofline:
        """Measure now; takes about half a second."""
        source = np.ones(_BYTES // 8)
        target = np.empty_like(source)
        copied = _best(lambda: np.copyto(target, source))
        a = np.full((_SIDE, _SIDE), 0.5, np.float32)
        product = np.empty_like(a)
        multiplied = _best(lambda: np.matmul(a, a, out=product))
        return cls(2 * _BYTES / copied, 2 * _SIDE**3 / multiplied, _machine())

    @classmethod
    def here(cls, again: bool = False) -> Roofline:
        """What was measured on this machine before, else measured now and kept in the cache's folder. again: measure
        in any case."""
        options = resolve()
        folder = pathlib.Path(options.cache_dir) if options.cache_dir else default_folder()
        path = folder / "roofline.json"
        if not again and options.cache != "off":
            with contextlib.suppress(OSError, CacheError):
                found = decode(path.read_bytes(), cls, str(path), CacheError)
                if found.machine == _machine() and found.bandwidth > 0 and found.flops > 0:
                    return found
        measured = cls.measure()
        if options.cache not in ("off", "read"):
            with contextlib.suppress(OSError, CacheError):
                prepare_folder(folder, write=True)
                with replace_file(path) as file:
                    file.write(json.dumps(msgspec.to_builtins(measured)).encode())
        return measured


def _machine() -> str:
    """What the figures depend on: the processor, how many of it this process may use, and NumPy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{instruction_set()} {cores} numpy {np.__version__} OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}"


def _best(call: object) -> float:
    assert callable(call)
    call()
    best, end, count = float("inf"), time.perf_counter() + _SECONDS, 0
    while count < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best
