"""The processor: what code that was compiled on it depends on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform

__all__ = ["instruction_set"]


@functools.cache
def instruction_set() -> str:
    """A digest of the processor's kind and features, 16 hexadecimal digits: what was compiled for one that has more may
    not run here."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        flags = next((line for line in f if line.startswith(("flags", "Features"))), "")
    text = "|".join((platform.machine(), platform.processor(), " ".join(sorted(flags.split()))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
