"""Containers: plain data and blobs in one piece of bytes, in memory or in a file, with digests of all of it.

    8 bytes  magic: who writes it
    4 bytes  version of what the owner writes, little endian
    8 bytes  offset of the manifest
    8 bytes  its length
    20 bytes BLAKE3 digest of the manifest
    blobs    each begun at a multiple of 64 bytes, so that arrays in them can be used where they lie
    manifest {"header": {...}, "blobs": [[offset, size, digest], ...]}, UTF-8 JSON

The manifest comes last, so that blobs can be written before all of them are known. Entries of the cache, saved modules
and serialised executables are containers. Digests show damage, not intent.

`pack` and `unpack` are for executables: the header is plain data, the blobs are the library's bytes. Code that was
compiled on a processor depends on its `instruction_set`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from xrt_core.engine.contract import Parameter
from xrt_core.errors import CompileError, XRTError
from xrt_core.files import Size as Size
from xrt_core.files import decode, encode, reading
from xrt_core.ir.function import SIZE, digest
from xrt_core.ir.types import ONNX_TO_DTYPE, dtype_from_name, dtype_name

T = TypeVar("T")

DtypeName = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(map(dtype_name, ONNX_TO_DTYPE.values()))})\Z")]
ParameterRow = tuple[str, DtypeName, tuple[Size | Annotated[str, msgspec.Meta(max_length=1000)] | None, ...]]
"""Types for headers: the name of a dtype, and what `rows_of` makes of a Parameter."""


class ArrayRow(Struct, frozen=True):
    """Dtype and shape of an array whose bytes lie elsewhere."""

    dtype: DtypeName
    shape: tuple[Size, ...]


_HEAD: Final = struct.Struct(f"<8sIQQ{SIZE}s")
_ALIGN: Final = 64
_MAX_MANIFEST: Final = 1 << 28


class Kind(Struct, frozen=True):
    """What a container holds. magic: 8 bytes. version: of what the owner writes; another one is refused.

    name: with its article, for messages ("a cache entry"). error: what readers raise.
    """

    magic: bytes
    version: int
    name: str
    error: type[XRTError]


class Blob(Struct, frozen=True):
    """Where a blob lies, and its digest."""

    offset: int
    size: int
    digest: str


class _Manifest(msgspec.Struct, frozen=True):
    header: msgspec.Raw
    blobs: tuple[tuple[Size, Size, str], ...]


class _Made(msgspec.Struct, frozen=True):
    """What every header of an executable may say: what it was made for."""

    made_for: str | None = msgspec.field(name="for", default=None)


class Writer:
    """Writes a container into a file that is open for writing and seeking, and empty."""

    def __init__(self, file: BinaryIO, kind: Kind) -> None:
        self._file = file
        self._kind = kind
        self._blobs: list[Blob] = []
        file.write(bytes(_HEAD.size))

    def add(self, content: bytes | memoryview) -> int:
        """Write a blob at the next aligned place. Returns its number. What others wrote into the file stays."""
        view = memoryview(content)
        self._file.write(bytes(-self._file.tell() % _ALIGN))
        self._blobs.append(Blob(self._file.tell(), view.nbytes, digest(view)))
        self._file.write(view)
        return len(self._blobs) - 1

    def finish(self, header: Mapping[str, Any]) -> None:
        """Write the manifest. header: what JSON can say."""
        text = encode({"header": dict(header), "blobs": [[b.offset, b.size, b.digest] for b in self._blobs]})
        at = self._file.tell()
        self._file.write(text)
        self._file.seek(0)
        self._file.write(_HEAD.pack(self._kind.magic, self._kind.version, at, len(text), _seal(text)))


def pack_container(kind: Kind, header: Mapping[str, Any], blobs: Iterable[bytes | memoryview] = ()) -> bytes:
    """A container in memory."""
    file = io.BytesIO()
    writer = Writer(file, kind)
    for blob in blobs:
        writer.add(blob)
    writer.finish(header)
    return file.getvalue()


class Container:
    """A container that is read: its header, and blobs that are checked when they are asked for.

    blobs: where they lie, as far as the manifest says.
    where: the subject of messages ("model.xrt"). Raises `kind.error` for what is no such container, of another version,
    cut off or damaged.
    """

    def __init__(self, kind: Kind, where: str, size: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        self.size = size
        self._kind = kind
        self._where = where
        self._read = read
        head = bytes(read(0, _HEAD.size))
        if len(head) < _HEAD.size or head[:8] != kind.magic:
            raise self._error(f"is not {kind.name}" if size else "is empty")
        _, version, at, length, seal = _HEAD.unpack(head)
        if version != kind.version:
            raise self._error(f"has layout {version}, this version of XRT reads {kind.version}")
        if length > _MAX_MANIFEST:
            raise self._error(f"claims a manifest of {length} bytes")
        text = bytes(read(at, length)) if at + length <= size else b""
        if len(text) != length or _seal(text) != seal:
            raise self._error("is damaged or cut off: its manifest does not fit its digest")
        if at + length != size:
            raise self._error(f"has {size} bytes, its manifest describes {at + length}")
        found = decode(text, _Manifest, f"{where}: its manifest", kind.error)
        self._header = bytes(found.header)
        self.blobs = tuple(Blob(*row) for row in found.blobs)
        for number, blob in enumerate(self.blobs):
            if blob.offset + blob.size > at:
                raise self._error(f"is damaged: blob {number} does not end before the manifest")

    def header(self, type: type[T]) -> T:
        """The header, of a type that the owner declares (see `decoding`). Raises `kind.error`."""
        return decode(self._header, type, f"{self._where}: its header", self._kind.error)

    def blob(self, number: int) -> memoryview:
        """A blob whose digest has been checked: a view, where the container is in memory or mapped."""
        try:
            blob = self.blobs[number]
        except IndexError:
            raise self._error(f"holds {len(self.blobs)} blobs, not blob {number}") from None
        content = memoryview(self._read(blob.offset, blob.size))
        if len(content) != blob.size or digest(content) != blob.digest:
            raise self._error(f"is damaged: the digest of blob {number} does not fit")
        return content

    def _error(self, text: str) -> XRTError:
        return self._kind.error(f"{self._where} {text}")


def open_bytes(kind: Kind, where: str, content: bytes | memoryview) -> Container:
    """A container in memory, or mapped. Its blobs are views. Raises `kind.error`."""
    view = memoryview(content)
    return Container(kind, where, len(view), lambda at, size: view[at : at + size])


def open_file(kind: Kind, where: str, file: BinaryIO) -> Container:
    """A container in an open file, of which only what is asked for is read. Raises `kind.error`, OSError."""

    def read(at: int, size: int) -> bytes:
        file.seek(at)
        return file.read(size)

    return Container(kind, where, file.seek(0, os.SEEK_END), read)


def _seal(text: bytes) -> bytes:
    return bytes.fromhex(digest(text))


def pack(magic: bytes, header: Mapping[str, Any], parts: Sequence[bytes | memoryview]) -> bytes:
    """A serialised executable. magic: 8 bytes, the engine's package and the version of what it writes.

    header: what JSON can say. parts: bytes, or memory that is contiguous.
    """
    return pack_container(_kind(magic), header, parts)


def unpack(
    magic: bytes, blob: bytes, engine: str, header: type[T], made_for: str | None = None
) -> tuple[T, list[memoryview]]:
    """The header and the parts of what `pack` packed, the parts as views. engine: its name, for messages.

    header: its type, a frozen dataclass of what the engine wrote; `ParameterRow` and `Size` are types for its fields.
    made_for: what the header must have as "for", such as the engine's fingerprint here; None asks nothing.
    Raises CompileError for bytes that are not of this package, or of another machine or library, cut or damaged.
    """
    found = open_bytes(_kind(magic), f"{engine}: the blob", blob)
    if made_for is not None and (known := found.header(_Made).made_for) != made_for:
        raise CompileError(f"{engine}: the executable was made for {known!r}; here is {made_for!r}")
    return found.header(header), [found.blob(i) for i in range(len(found.blobs))]


def loading(engine: str) -> contextlib.AbstractContextManager[None]:
    """A context in which an engine makes an executable of what `unpack` gave: every error is a CompileError."""
    return reading(f"{engine}: a serialised executable", CompileError)


def _kind(magic: bytes) -> Kind:
    return Kind(magic, 1, "a serialised executable of this version of the package", CompileError)


def rows_of(parameters: Iterable[Parameter]) -> list[list[Any]]:
    """Parameters as plain data for a header, in which `ParameterRow` is the type of each."""
    return [[p.name, dtype_name(p.dtype), list(p.dims)] for p in parameters]


def parameters_of(rows: Iterable[ParameterRow]) -> list[Parameter]:
    """The parameters that `rows_of` wrote."""
    return [Parameter(name, dtype_from_name(dtype), shape) for name, dtype, shape in rows]


def array_of(row: ArrayRow, raw: np.ndarray) -> np.ndarray:
    """The array over its bytes. Raises ValueError, TypeError where they are not as many."""
    return raw.view(dtype_from_name(row.dtype)).reshape(row.shape)


@functools.cache
def instruction_set() -> str:
    """A digest of the processor's kind and features, 16 hexadecimal digits: what was compiled for one that has more may
    not run here."""
    # not platform.processor(), which starts a process: a fork of this one meanwhile would wait for it for ever
    text = "|".join((platform.machine(), " ".join(sorted(processor_features()))))
    return digest(text.encode())[:16]


@functools.cache
def processor_features() -> frozenset[str]:
    """The features of the processor as Linux names them ("avx2", "avx512f"); empty where it does not say."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        flags = next((line for line in f if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def adds_int8_in_16_bits() -> bool:
    """Whether libraries add products of uint8 and int8 in 16 bits on this processor, two at a time, so that sums may
    saturate: by VPMADDUBSW, of x86 without VNNI. False where the system does not name the processor's features."""
    features = processor_features()
    return "ssse3" in features and features.isdisjoint(("avx512_vnni", "avx_vnni"))
