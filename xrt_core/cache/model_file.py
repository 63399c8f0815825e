"""One file with a model, its weights and its executables, for deployment: a container.

Its blobs are the model (ONNX), then one for each executable. The weights lie where the model's external data points,
between the container's head and its first blob, each begun at a multiple of 64 bytes: they are mapped, not read.

Digests show damage, not intent: who loads a model file runs what its maker put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from msgspec import Struct

from xrt_core.cache.key import CacheKey
from xrt_core.engine.serialization import Container, Kind, Writer, open_bytes
from xrt_core.errors import CacheError
from xrt_core.files import Size, convert, replace_file

T = TypeVar("T")

KIND: Final = Kind(b"XRTMODEL", 2, "a model file of XRT, which XRTModule.save writes", CacheError)


class StoredExecutable(Struct, frozen=True):
    """One executable. whole: its blob is what `Executable.serialize` gave, else what `serialize_code` gave.

    cluster, nodes: what it runs, human-readable.
    """

    key: CacheKey
    whole: bool
    cluster: str
    nodes: int
    blob: bytes


class _Place(Struct, frozen=True):
    key: CacheKey
    whole: bool
    cluster: str
    nodes: int
    blob: int


class _Executable(Struct, frozen=True):
    key: tuple[tuple[str, str], ...]
    whole: bool
    cluster: str
    nodes: Size


class _Header(Struct, frozen=True):
    info: dict[str, Any]
    executables: tuple[_Executable, ...]


class ModelFile:
    """An open model file. buffer: the whole file, mapped, for the weights."""

    def __init__(self, path: Path, buffer: memoryview, container: Container) -> None:
        self.path = path
        self.buffer = buffer
        self._container = container
        header = container.header(_Header)
        self._info = header.info
        places = [_Place(CacheKey(e.key), e.whole, e.cluster, e.nodes, i) for i, e in enumerate(header.executables, 1)]
        self._executables = {p.key.digest: p for p in places}

    @property
    def has_verdicts(self) -> bool:
        """Whether the guard of the module that was saved had decided about clusters."""
        return bool(self._info.get("verdicts"))

    def info(self, type: type[T]) -> T:
        """What the writer noted down, of a type that it declares (see `decoding`). Raises CacheError."""
        return convert(self._info, type, f"{self.path}: its header", CacheError)

    @property
    def keys(self) -> list[CacheKey]:
        """The keys of the executables."""
        return [p.key for p in self._executables.values()]

    def model(self) -> memoryview:
        """The ONNX model, whose external data lies in `buffer`. Raises CacheError where it is damaged."""
        return self._container.blob(0)

    def executable(self, key: CacheKey) -> StoredExecutable | None:
        """The executable of a key, None where the file has none. Raises CacheError where it is damaged."""
        p = self._executables.get(key.digest)
        if p is None or p.key != key:
            return None
        return StoredExecutable(p.key, p.whole, p.cluster, p.nodes, bytes(self._container.blob(p.blob)))

    def why_missing(self, key: CacheKey, cluster: str) -> str:
        """Why there is no executable of this key, in words: how the nearest one differs."""
        rows = min((key.differences(p.key) for p in self._executables.values()), key=len, default=[])
        differs = f"the nearest differs in {'; '.join(rows)}" if rows else "it holds no executables"
        return f"{self.path} holds no executable for {cluster}; {differs}"


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
        writer = Writer(file, KIND)
        writer.add(write_model(file))
        rows = []
        for e in executables:
            writer.add(e.blob)
            key = [list(row) for row in e.key.rows]
            rows.append({"key": key, "whole": e.whole, "cluster": e.cluster, "nodes": e.nodes})
        writer.finish({"info": dict(info), "executables": rows})


def is_model_file(path: Path) -> bool:
    """Whether a file begins as `write_model_file` writes it; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(KIND.magic)) == KIND.magic
    except OSError:
        return False


def read_model_file(path: Path, buffer: memoryview) -> ModelFile:
    """The model file whose bytes `buffer` maps. Raises CacheError with what is wrong with it."""
    return ModelFile(path, buffer, open_bytes(KIND, str(path), buffer))
