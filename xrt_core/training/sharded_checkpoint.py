"""Checkpoints in pieces: a folder with a file for each device of a mesh, written by the process that holds it.

    run/checkpoint.json           what there is: format, seed, the files, and dtype and shape of each array
    run/3-00000.safetensors       pieces on device 0, of the fourth checkpoint in this folder
    run/3-00001.safetensors

Nothing is gathered, on a device or in a process. The index is written last, in the place of the one before, whose files
go then: a folder holds the old checkpoint or the new one. Loading puts the pieces together, for any mesh.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from xrt_core.errors import CheckpointError
from xrt_core.files import Size, decode, encode, reading, replace_file
from xrt_core.ir.types import dtype_from_name, dtype_name
from xrt_core.runtime.arrays import devices_of, held_pieces
from xrt_core.training import checkpoint

INDEX: Final = "checkpoint.json"
_PIECES: Final = "pieces"


class _Array(msgspec.Struct, frozen=True):
    """Of a whole array."""

    dtype: str
    shape: tuple[Size, ...]


class _Index(msgspec.Struct, frozen=True):
    """The contents of `INDEX`. number: of the checkpoint in its folder. metadata: as of a file."""

    number: Size
    metadata: dict[str, str]
    files: Annotated[list[str], msgspec.Meta(max_length=1 << 20)]
    arrays: dict[str, _Array]


class _Piece(msgspec.Struct, frozen=True):
    """A piece of the array `name`, from `start` on."""

    name: str
    start: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A state as this process holds it, copied: device -> pieces by key, and where they lie in their arrays.

    devices: all of the mesh, those of other processes too. whole: whether this process holds all pieces.
    """

    arrays: Mapping[str, _Array]
    held: Mapping[int, dict[str, tuple[_Piece, np.ndarray]]]
    devices: Sequence[int]
    whole: bool


def pieces(state: Mapping[str, Any]) -> Pieces:
    """Copy the pieces of a state that this process writes. NumPy's arrays count as held by the first device."""
    everywhere = {d for a in state.values() for d in devices_of(a)[0]} or {0}
    here = {d for a in state.values() for d in devices_of(a)[1]} or {0}
    held: dict[int, dict[str, tuple[_Piece, np.ndarray]]] = {d: {} for d in sorted(here)}
    for name, array in state.items():
        for device, start, data in held_pieces(array, min(everywhere)):
            if device in held:
                held[device][f"{name}@{','.join(map(str, start))}"] = _Piece(name, start), data
    kinds = {n: _Array(dtype_name(np.dtype(a.dtype)), tuple(a.shape)) for n, a in state.items()}
    return Pieces(kinds, held, sorted(everywhere), here == everywhere)


def save(found: Pieces, folder: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write pieces into a folder, atomically: each process those that it holds, one of them the index.

    Raises CheckpointError where a file cannot be written, here or by another process; the folder's checkpoint is then
    the one before.
    """
    target = pathlib.Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"{target} is no folder and cannot be made one: {e}") from e
    number = _index(target).number + 1 if (target / INDEX).exists() else 0
    names = [f"{number}-{device:05}.safetensors" for device in found.devices]
    failure: CheckpointError | None = None
    try:
        for device, own in found.held.items():
            where = {key: msgspec.to_builtins(piece) for key, (piece, _) in own.items()}
            arrays = {key: data for key, (_, data) in own.items()}
            checkpoint.write(arrays, target / f"{number}-{device:05}.safetensors", {_PIECES: encode(where).decode()})
    except CheckpointError as e:
        failure = e  # the other processes wait for this one below
    checkpoint.once(target, lambda: None)  # all have written
    try:
        checkpoint.once(target, lambda: _finish(target, _Index(number, dict(metadata), names, dict(found.arrays))))
    except CheckpointError as e:
        raise failure or e from None
    if failure is not None:
        raise failure


def _finish(target: pathlib.Path, index: _Index) -> None:
    """Write the index, once all files are there, and remove those of earlier checkpoints."""
    missing = [name for name in index.files if not (target / name).exists()]
    if missing:
        raise CheckpointError(f"{target}: {missing[0]} was not written; the checkpoint before stands")
    try:
        with replace_file(target / INDEX, sync=True) as file:
            file.write(encode(msgspec.to_builtins(index), 1))
    except OSError as e:
        raise CheckpointError(f"{target / INDEX} cannot be written: {e}") from e
    # what a killed process was writing is left as well, under a name that begins with a dot
    for path in [*target.glob("*-*.safetensors"), *target.glob(".*.tmp")]:
        if path.name not in index.files:
            with contextlib.suppress(OSError):
                path.unlink()


def _index(target: pathlib.Path) -> _Index:
    with reading(str(target / INDEX), CheckpointError):
        return decode((target / INDEX).read_bytes(), _Index, str(target / INDEX), CheckpointError)


def load(folder: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The whole arrays of a folder, and the metadata. Raises CheckpointError if a piece is missing or does not fit."""
    target = pathlib.Path(folder)
    index = _index(target)
    with reading(str(target), CheckpointError):
        read: dict[str, list[tuple[_Piece, np.ndarray]]] = {n: [] for n in index.arrays}
        for name in index.files:
            if pathlib.PurePath(name).name != name:
                raise CheckpointError(f"{target / INDEX}: {name!r} is no file of this folder")
            for piece, data in _read(target / name):
                if piece.name not in read or dtype_name(data.dtype) != index.arrays[piece.name].dtype:
                    raise CheckpointError(f"{target / name}: a piece of {piece.name!r} does not fit the index")
                read[piece.name].append((piece, data))
        found = {n: _joined(f"{target}: {n!r}", a, read.pop(n)) for n, a in index.arrays.items()}
    return found, index.metadata


def _joined(what: str, array: _Array, own: Sequence[tuple[_Piece, np.ndarray]]) -> np.ndarray:
    """A whole array of its pieces. Raises CheckpointError unless they cover it, before memory is taken for it."""
    size, count = math.prod(array.shape), sum(data.size for _, data in own)
    if size != count:
        raise CheckpointError(f"{what} has {size} elements, its pieces {count}")
    whole = np.empty(array.shape, dtype_from_name(array.dtype))
    for piece, data in own:
        ends = [a + n for a, n in zip(piece.start, data.shape, strict=True)]
        if len(ends) != len(array.shape) or any(a > b for a, b in zip(ends, array.shape, strict=True)):
            raise CheckpointError(f"{what}: a piece does not fit the index")
        whole[tuple(slice(a, b) for a, b in zip(piece.start, ends, strict=True))] = data
    return whole


def _read(path: pathlib.Path) -> Iterable[tuple[_Piece, np.ndarray]]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the folder has to be copied as a whole")
    arrays, metadata = checkpoint.load(path)
    where = decode(metadata.get(_PIECES, "").encode(), dict[str, _Piece], f"{path}: its pieces", CheckpointError)
    return [(where[key], data) for key, data in arrays.items()]

