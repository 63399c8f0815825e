"""One file with a model, its weights and its executables, for deployment: a container.

Its blobs are the model (ONNX), then one for each executable. The weights lie where the model's external data points,
between the container's head and its first blob, each begun at a multiple of 64 bytes: they are mapped, not read.

Digests show damage, not intent: who loads a model file runs what its maker put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from xrt_core.cache.key import CacheKey
from xrt_core.engine.serialization import Container, Kind, Writer, open_bytes
from xrt_core.errors import CacheError
from xrt_core.files import replace_file

KIND: Final = Kind(b"XRTMODEL", 2, "a model file of XRT, which XRTModule.save writes", CacheError)


@dataclass(frozen=True, slots=True)
class StoredExecutable:
    """One executable. whole: its blob is what `Executable.serialize` gave, else what `serialize_code` gave.

    cluster, nodes: what it runs, human-readable.
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
    blob: int


class ModelFile:
    """An open model file. info: what the writer noted down (options, engines, signatures).

    buffer: the whole file, mapped, for the weights.
    """

    def __init__(self, path: Path, buffer: memoryview, container: Container) -> None:
        self.path = path
        self.buffer = buffer
        self._container = container
        try:
            self.info: Mapping[str, Any] = dict(container.header["info"])
            places = [
                _Place(
                    CacheKey(tuple((str(a), str(b)) for a, b in e["key"])),
                    bool(e["whole"]),
                    str(e["cluster"]),
                    int(e["nodes"]),
                    i,
                )
                for i, e in enumerate(container.header["executables"], 1)
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
