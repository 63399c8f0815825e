"""One cache entry as one file: a container whose header holds the key, and whose blobs have names.

One file, because a rename then replaces an entry as a whole: a reader sees the old entry or the new one, never a
manifest of one with a blob of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from xrt_core.cache.key import CacheKey
from xrt_core.engine.container import Blob, Container, Kind, Writer, open_file
from xrt_core.errors import CacheError

KIND: Final = Kind(b"XRTCACHE", 2, "a cache entry", CacheError)
EXECUTABLE: Final = "executable"
FUNCTION: Final = "function"
"""The blobs of an entry: what the engine serialised, and the canonical text of the function, compressed."""
NOT_STORED: Final = "not stored"
"""The field of `info` that says why an entry holds no executable, so that no process tries again to store it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry says about itself. info: what is good to know and decides nothing (cluster, seconds, versions).

    size: of the file in bytes.
    """

    key: CacheKey
    info: Mapping[str, Any]
    blobs: Mapping[str, Blob]
    size: int
    container: Container


def write_entry(file: BinaryIO, key: CacheKey, info: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Write an entry into an empty file."""
    writer = Writer(file, KIND)
    for blob in blobs.values():
        writer.add(blob)
    writer.finish({"key": [list(row) for row in key.rows], "info": dict(info), "names": list(blobs)})


def read_manifest(file: BinaryIO) -> Manifest:
    """The manifest of an entry in an open file. Raises CacheError with what is wrong with the file."""
    found = open_file(KIND, "the file", file)
    try:
        key = CacheKey(tuple((str(label), str(row)) for label, row in found.header["key"]))
        names = tuple(map(str, found.header["names"]))
        info = dict(found.header["info"])
    except (ValueError, TypeError, KeyError) as e:
        raise CacheError(f"its manifest makes no sense: {type(e).__name__}: {e}") from None
    if len(set(names)) != len(found.blobs):
        raise CacheError(f"it has {len(found.blobs)} blobs and {len(set(names))} names for them")
    return Manifest(key, info, dict(zip(names, found.blobs, strict=True)), found.size, found)


def read_blob(manifest: Manifest, name: str) -> bytes:
    """A blob whose digest has been checked; the manifest's file must be open. Raises CacheError with what is wrong."""
    if name not in manifest.blobs:
        raise CacheError(f"the entry holds no {name!r}")
    return bytes(manifest.container.blob(list(manifest.blobs).index(name)))


def check_entry(file: BinaryIO) -> str:
    """What is wrong with an entry, "" for nothing. All digests are checked, nothing is loaded."""
    try:
        manifest = read_manifest(file)
        for name in manifest.blobs:
            read_blob(manifest, name)
    except (CacheError, OSError) as e:
        return str(e)
    wanted = {FUNCTION} if NOT_STORED in manifest.info else {FUNCTION, EXECUTABLE}
    return "" if set(manifest.blobs) == wanted else f"it holds {', '.join(manifest.blobs) or 'nothing'}"
