"""Checkpoints: named arrays in a safetensors file, written atomically.

Format: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from xrt_core.errors import CheckpointError, PluginError
from xrt_core.files import decode, reading, replace_file
from xrt_core.ir.types import dtype_from_name, dtype_name
from xrt_core.plugins import plugins

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
        "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    }
)  # fmt: skip
_DTYPES: Final = {code: dtype_from_name(name) for name, code in _NAMES.items()}
_METADATA: Final = "__metadata__"
STEP: Final = "{step}"


def save(arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write arrays and metadata to `path`, atomically; in a program of several processes once (`xrt_write_checkpoint`).

    Raises CheckpointError for a dtype that the format lacks, and if the file cannot be written.
    """
    once(path, partial(write, arrays, pathlib.Path(path), metadata))


def once(path: str | os.PathLike[str], write: Callable[[], None]) -> None:
    """Call `write`, which writes `path`; in a program of several processes in one of them, as plugins say."""
    for name, owner, call in plugins.each("xrt_write_checkpoint", path=str(path), write=write):
        try:
            if call():
                return
        except PluginError as e:
            plugins.problem(f"plugin {name}", owner, str(e))
    write()


def write(arrays: Mapping[str, np.ndarray], target: pathlib.Path, metadata: Mapping[str, str]) -> None:
    """`save` in this process."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    parts: list[np.ndarray] = []
    at = 0
    # the widest elements first, so that every array is aligned to its element size
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        code = _NAMES.get(dtype_name(array.dtype))
        if code is None:
            raise CheckpointError(f"{target}: {name!r} is {array.dtype}, which safetensors has not")
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
        parts.append(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target, sync=True) as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for array in parts:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    except OSError as e:
        raise CheckpointError(f"{target} cannot be written: {e}") from e


def numbered(path: str | os.PathLike[str], step: int) -> pathlib.Path:
    """The path with the step's number in the place of `STEP`, if its name has that."""
    whole = pathlib.Path(path)
    return whole.with_name(whole.name.replace(STEP, str(step)))


def saved(path: str | os.PathLike[str]) -> list[tuple[int, pathlib.Path]]:
    """The checkpoints of a path with `STEP` in its name, and their steps, in order."""
    whole = pathlib.Path(path)
    before, _, after = whole.name.partition(STEP)
    found = []
    for entry in whole.parent.glob("*"):
        number = entry.name.removeprefix(before).removesuffix(after)
        if entry.name == f"{before}{number}{after}" and number.isascii() and number.isdigit():
            found.append((int(number), entry))
    return sorted(found)


def latest(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """The checkpoint of the highest step, for a path with "{step}" in its name as `callbacks.Checkpoint` takes it; None
    where there is none."""
    found = saved(path)
    return found[-1][1] if found else None


def remove(path: pathlib.Path) -> None:
    """Remove a checkpoint, a file or a folder; one that another process removes too is no error."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and metadata of a safetensors file. Raises CheckpointError if it is truncated or malformed."""
    target = pathlib.Path(path)
    try:
        import safetensors
    except ImportError as e:
        raise CheckpointError(f"{target} is read by the package safetensors: pip install 'xrt-core[training]'") from e
    with reading(str(target), CheckpointError):
        raw = target.read_bytes()
        if len(raw) < 8:
            raise CheckpointError(f"{target} has {len(raw)} bytes: it is no safetensors file, or it is cut off")
        try:
            found: Any = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as e:
            raise CheckpointError(f"{target} is no safetensors file, or it is cut off or damaged: {e}") from e
        (length,) = struct.unpack_from("<Q", raw)
        header = decode(memoryview(raw)[8 : 8 + length], _Header, f"{target}: its header", CheckpointError)
        return {name: _array(name, entry) for name, entry in found}, header.metadata


class _Header(msgspec.Struct, frozen=True):
    """What the library does not give; the rest of the header it has checked."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def _array(name: str, entry: Mapping[str, Any]) -> np.ndarray:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"tensor {name!r} is of the unknown dtype {entry['dtype']!r}")
    return np.frombuffer(bytearray(entry["data"]), np.uint8).view(dtype).reshape(entry["shape"])
