"""One cache entry as one file: a sealed JSON manifest, then blobs, each with its size and digest.

    8 bytes  magic
    4 bytes  version of this layout, little endian
    4 bytes  length of the manifest
    20 bytes BLAKE2b digest of the manifest
    manifest {"key": [[label, text], ...], "info": {...}, "blobs": [[name, size, digest], ...]}, UTF-8 JSON
    blobs    in that order, each begun at a multiple of 64 bytes

One file, because a rename then replaces an entry as a whole: a reader sees the old entry or the new one, never a
manifest of one with a blob of the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from xrt_core.cache.key import CacheKey
from xrt_core.errors import CacheError

MAGIC: Final = b"XRTCACHE"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sII20s")
_ALIGN: Final = 64
_MAX_MANIFEST: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a blob lies in the file, and its digest."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry says about itself. info: what is good to know and decides nothing (cluster, seconds, versions)."""

    key: CacheKey
    info: Mapping[str, Any]
    blobs: Mapping[str, Blob]
    size: int


EXECUTABLE: Final = "executable"
FUNCTION: Final = "function"
"""The blobs of an entry: what the engine serialised, and the canonical text of the function, compressed."""
NOT_STORED: Final = "not stored"
"""The field of `info` that says why an entry holds no executable, so that no process tries again to store it."""


def content_digest(content: bytes | memoryview) -> str:
    """The digest that covers a blob."""
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def pack(key: CacheKey, info: Mapping[str, Any], blobs: Mapping[str, bytes]) -> list[bytes]:
    """The file's contents, in pieces."""
    manifest = {
        "key": [list(row) for row in key.rows],
        "info": dict(info),
        "blobs": [[name, len(b), content_digest(b)] for name, b in blobs.items()],
    }
    text = json.dumps(manifest, ensure_ascii=False).encode("utf-8", "surrogatepass")
    parts = [_HEAD.pack(MAGIC, VERSION, len(text), hashlib.blake2b(text, digest_size=20).digest()), text]
    at = len(parts[0]) + len(text)
    for blob in blobs.values():
        parts += [bytes(-at % _ALIGN), blob]
        at += -at % _ALIGN + len(blob)
    return parts


def read_manifest(file: BinaryIO) -> Manifest:
    """The manifest at the start of an entry's file, held against the file's size.

    Raises CacheError with what is wrong with the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[:8] != MAGIC:
        raise CacheError("the file is no cache entry" if size else "the file is empty")
    _, version, length, seal = _HEAD.unpack(head)
    if version != VERSION:
        raise CacheError(f"the entry has layout {version}, this version of XRT reads {VERSION}")
    if length > _MAX_MANIFEST:
        raise CacheError(f"its manifest claims {length} bytes")
    text = file.read(length)
    if hashlib.blake2b(text, digest_size=20).digest() != seal:
        raise CacheError("its manifest is damaged or cut off")
    try:
        found = json.loads(text.decode("utf-8", "surrogatepass"))
        key = CacheKey(tuple((str(label), str(row)) for label, row in found["key"]))
        blobs = {}
        at = _HEAD.size + length
        for name, blob_size, digest in found["blobs"]:
            at += -at % _ALIGN
            blobs[str(name)] = Blob(at, int(blob_size), str(digest))
            at += int(blob_size)
        info = dict(found["info"])
    except (ValueError, TypeError, KeyError) as e:
        raise CacheError(f"its manifest makes no sense: {type(e).__name__}: {e}") from None
    if at != size:
        raise CacheError(f"the file has {size} bytes, its manifest describes {at}")
    return Manifest(key, info, blobs, size)


def read_blob(file: BinaryIO, manifest: Manifest, name: str) -> bytes:
    """A blob whose digest has been checked. Raises CacheError with what is wrong."""
    blob = manifest.blobs.get(name)
    if blob is None:
        raise CacheError(f"the entry holds no {name!r}")
    file.seek(blob.offset)
    content = file.read(blob.size)
    if len(content) != blob.size or content_digest(content) != blob.digest:
        raise CacheError(f"{name!r} in it is damaged: its digest does not fit")
    return content


def check_entry(file: BinaryIO) -> str:
    """What is wrong with an entry, "" for nothing. All digests are checked, nothing is loaded."""
    try:
        manifest = read_manifest(file)
        for name in manifest.blobs:
            read_blob(file, manifest, name)
    except (CacheError, OSError) as e:
        return str(e)
    wanted = {FUNCTION} if NOT_STORED in manifest.info else {FUNCTION, EXECUTABLE}
    return "" if set(manifest.blobs) == wanted else f"it holds {', '.join(manifest.blobs) or 'nothing'}"
