"""The serialised form of an executable: a header of plain data, and the library's own bytes behind it.

    magic    8 bytes: the engine's package, and the version of what it writes
    length   of the header in bytes: 8 bytes, unsigned, little-endian
    header   JSON in UTF-8; "parts" has the length of each part, all else is the package's
    parts    bytes, one behind another

The processor: what code that was compiled on it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from xrt_core.engine.contract import Parameter
from xrt_core.errors import CompileError
from xrt_core.ir.types import dtype_from_name, dtype_name

__all__ = ["instruction_set", "pack", "parameters_of", "rows_of", "unpack"]


_LENGTH: Final = struct.Struct("<Q")


def pack(magic: bytes, header: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """One piece of bytes. magic: 8 bytes. header: what JSON can say, without the key "parts"."""
    text = json.dumps({**header, "parts": [len(p) for p in parts]}).encode()
    return b"".join((magic, _LENGTH.pack(len(text)), text, *parts))


def unpack(magic: bytes, blob: bytes, engine: str, made_for: str | None = None) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the parts of what `pack` packed. engine: who asks, for messages.

    made_for: what the header must have as "for", such as the engine's fingerprint here; None asks nothing.
    Raises CompileError for bytes that are not of this package, or of another machine or library, cut or damaged.
    """
    start = len(magic) + _LENGTH.size
    if blob[: len(magic)] != magic or len(blob) < start:
        raise CompileError(f"{engine}: this is not a serialised executable of this package")
    (length,) = _LENGTH.unpack_from(blob, len(magic))
    try:
        header = json.loads(blob[start : start + length])
        sizes = [int(n) for n in header.pop("parts")]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CompileError(f"{engine}: a serialised executable is damaged: {type(e).__name__}: {e}") from None
    if made_for is not None and header.get("for") != made_for:
        raise CompileError(f"{engine}: the executable was made for {header.get('for')!r}; here is {made_for!r}")
    at = start + length
    if min(sizes, default=0) < 0 or at + sum(sizes) != len(blob):
        raise CompileError(f"{engine}: a serialised executable of {len(blob)} bytes should have {at + sum(sizes)}")
    parts = []
    for size in sizes:
        parts.append(blob[at : at + size])
        at += size
    return header, parts


def rows_of(parameters: Iterable[Parameter]) -> list[list[Any]]:
    """Parameters as plain data for a header."""
    return [[p.name, dtype_name(p.dtype), list(p.shape)] for p in parameters]


def parameters_of(rows: Iterable[Sequence[Any]]) -> list[Parameter]:
    """The parameters that `rows_of` wrote."""
    return [Parameter(name, dtype_from_name(dtype), tuple(shape)) for name, dtype, shape in rows]


@functools.cache
def instruction_set() -> str:
    """A digest of the processor's kind and features, 16 hexadecimal digits: what was compiled for one that has more may
    not run here."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        flags = next((line for line in f if line.startswith(("flags", "Features"))), "")
    text = "|".join((platform.machine(), platform.processor(), " ".join(sorted(flags.split()))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
