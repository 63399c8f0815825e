"""One file with a model, its weights and its executables, for deployment.

    8 bytes  magic
    4 bytes  version of this layout, little endian
    8 bytes  offset of the manifest
    8 bytes  its length
    20 bytes BLAKE2b digest of the manifest
    weights  where the model's external data points, each begun at a multiple of 64 bytes: they are mapped, not read
    blobs    the model (ONNX), then one for each executable
    manifest UTF-8 JSON, last, because the others' places are known only then

Digests show damage, not intent: who loads a model file runs what its maker put into it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from xrt_core.cache.entry_format import Blob, content_digest
from xrt_core.cache.key import CacheKey
from xrt_core.errors import CacheError
from xrt_core.files import replace_file

MAGIC: Final = b"XRTMODEL"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIQQ20s")
_ALIGN: Final = 64


@dataclass(frozen=True, slots=True)
class StoredExecutable:
    """One executable. whole: its blob is what `Executable.serialize` gave, else what `serialize_code` gave.

    cluster, nodes: what it runs, for people.
    """

    key: CacheKey
    whole: bool
    cluster: str
    nodes: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class _Place:
    key: CacheKey
    whole: bool
    cluster: str
    nodes: int
    blob: Blob


class ModelFile:
    """An open model file. info: what the writer noted down (options, engines, signatures).

    buffer: the whole file, mapped, for the weights.
    """

    def __init__(self, path: Path, buffer: memoryview, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.buffer = buffer
        try:
            self.info: Mapping[str, Any] = dict(manifest["info"])
            self._model = Blob(*manifest["model"])
            places = [
                _Place(
                    CacheKey(tuple((str(a), str(b)) for a, b in e["key"])),
                    bool(e["whole"]),
                    str(e["cluster"]),
                    int(e["nodes"]),
                    Blob(*e["blob"]),
                )
                for e in manifest["executables"]
            ]
        except (KeyError, TypeError, ValueError) as e:
            raise CacheError(f"{path}: its manifest makes no sense: {type(e).__name__}: {e}") from None
        self._executables = {p.key.digest: p for p in places}

    @property
    def verdicts(self) -> Mapping[str, Any]:
        """What the guard decided about the clusters, as plain data, by the fingerprints of their functions."""
        found = self.info.get("verdicts", {})
        return found if isinstance(found, dict) else {}

    @property
    def keys(self) -> list[CacheKey]:
        """The keys of the executables."""
        return [p.key for p in self._executables.values()]

    def model(self) -> memoryview:
        """The ONNX model, whose external data lies in `buffer`. Raises CacheError where it is damaged."""
        return self._read(self._model, "the model")

    def executable(self, key: CacheKey) -> StoredExecutable | None:
        """The executable of a key, None where the file has none. Raises CacheError where it is damaged."""
        p = self._executables.get(key.digest)
        if p is None or p.key != key:
            return None
        return StoredExecutable(p.key, p.whole, p.cluster, p.nodes, bytes(self._read(p.blob, p.cluster)))

    def why_missing(self, key: CacheKey, cluster: str) -> str:
        """Why there is no executable of this key, in words: how the nearest one differs."""
        rows = min((key.differences(p.key) for p in self._executables.values()), key=len, default=[])
        differs = f"the nearest differs in {'; '.join(rows)}" if rows else "it holds no executables"
        return f"{self.path} holds no executable for {cluster}; {differs}"

    def _read(self, blob: Blob, what: str) -> memoryview:
        found = self.buffer[blob.offset : blob.offset + blob.size]
        if len(found) != blob.size or content_digest(found) != blob.digest:
            raise CacheError(f"{self.path}: {what} in it is damaged: its digest does not fit")
        return found


def write_model_file(
    target: Path,
    write_model: Callable[[IO[bytes]], bytes],
    executables: Iterable[StoredExecutable],
    info: Mapping[str, Any],
) -> None:
    """Write a model file, which replaces what was there only once all of it is written.

    write_model: writes the weights into the open file from where it stands, and returns the ONNX model.
    info: plain data. Raises OSError where the file cannot be written.
    """
    with replace_file(target) as file:
        file.write(bytes(_HEAD.size))
        model = _append(file, write_model(file))
        places = [
            {
                "key": [list(row) for row in e.key.rows],
                "whole": e.whole,
                "cluster": e.cluster,
                "nodes": e.nodes,
                "blob": _append(file, e.blob),
            }
            for e in executables
        ]
        text = json.dumps({"info": dict(info), "model": model, "executables": places}, ensure_ascii=False)
        manifest = text.encode("utf-8", "surrogatepass")
        at = file.tell()
        file.write(manifest)
        file.seek(0)
        file.write(_HEAD.pack(MAGIC, VERSION, at, len(manifest), _seal(manifest)))


def is_model_file(path: Path) -> bool:
    """Whether a file begins as `write_model_file` writes it; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_model_file(path: Path, buffer: memoryview) -> ModelFile:
    """The model file whose bytes `buffer` maps. Raises CacheError with what is wrong with it."""
    if len(buffer) < _HEAD.size or bytes(buffer[:8]) != MAGIC:
        raise CacheError(f"{path} is no model file of XRT; XRTModule.save writes such files")
    _, version, at, length, seal = _HEAD.unpack(buffer[: _HEAD.size])
    if version != VERSION:
        raise CacheError(f"{path} has layout {version}, this version of XRT reads {VERSION}")
    manifest = bytes(buffer[at : at + length])
    if _seal(manifest) != seal:
        raise CacheError(f"{path} is damaged or cut off: its manifest does not fit its digest")
    try:
        found = json.loads(manifest.decode("utf-8", "surrogatepass"))
    except ValueError as e:
        raise CacheError(f"{path}: its manifest makes no sense: {e}") from None
    return ModelFile(path, buffer, found)


def _append(file: IO[bytes], content: bytes) -> list[Any]:
    file.write(bytes(-file.tell() % _ALIGN))
    at = file.tell()
    file.write(content)
    return [at, len(content), content_digest(content)]


def _seal(manifest: bytes) -> bytes:
    return hashlib.blake2b(manifest, digest_size=20).digest()
