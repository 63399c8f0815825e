"""The serialised form of an executable: a container whose header is plain data, with the library's bytes as its blobs.

The processor: what code that was compiled on it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xrt_core.engine import container
from xrt_core.engine.contract import Parameter
from xrt_core.errors import CompileError
from xrt_core.ir.digest import digest
from xrt_core.ir.types import dtype_from_name, dtype_name

__all__ = ["instruction_set", "pack", "parameters_of", "processor_features", "rows_of", "unpack"]


def pack(magic: bytes, header: Mapping[str, Any], parts: Sequence[bytes | memoryview]) -> bytes:
    """The container. magic: 8 bytes, the engine's package and the version of what it writes. header: what JSON can say.

    parts: bytes, or memory that is contiguous.
    """
    return container.pack(_kind(magic), header, parts)


def unpack(
    magic: bytes, blob: bytes, engine: str, made_for: str | None = None
) -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the parts of what `pack` packed, as views. engine: who asks, for messages.

    made_for: what the header must have as "for", such as the engine's fingerprint here; None asks nothing.
    Raises CompileError for bytes that are not of this package, or of another machine or library, cut or damaged.
    """
    found = container.open_bytes(_kind(magic), f"{engine}: the blob", blob)
    if made_for is not None and found.header.get("for") != made_for:
        raise CompileError(f"{engine}: the executable was made for {found.header.get('for')!r}; here is {made_for!r}")
    return found.header, [found.blob(i) for i in range(len(found.blobs))]


def _kind(magic: bytes) -> container.Kind:
    return container.Kind(magic, 1, "a serialised executable of this version of the package", CompileError)


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
    text = "|".join((platform.machine(), platform.processor(), " ".join(sorted(processor_features()))))
    return digest(text.encode())[:16]


@functools.cache
def processor_features() -> frozenset[str]:
    """The features of the processor as Linux names them ("avx2", "avx512f"); empty where it does not say."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        flags = next((line for line in f if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
