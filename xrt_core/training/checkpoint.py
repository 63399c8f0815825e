"""Checkpoints: named arrays in a safetensors file, written atomically.

Format: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.errors import CheckpointError
from xrt_core.files import replace_file
from xrt_core.ir.types import dtype_from_name, dtype_name

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
        "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    }
)  # fmt: skip
_DTYPES: Final = {code: dtype_from_name(name) for name, code in _NAMES.items()}
_HEADER_LIMIT: Final = 100 << 20
_METADATA: Final = "__metadata__"


def save(arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write arrays and metadata to `path`, atomically.

    Raises CheckpointError for a dtype that the format lacks, and if the file cannot be written.
    """
    target = pathlib.Path(path)
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
        with replace_file(target, sync=True) as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for array in parts:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    except OSError as e:
        raise CheckpointError(f"{target} cannot be written: {e}") from e


def load(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and metadata of a safetensors file. Raises CheckpointError if it is truncated or malformed."""
    target = pathlib.Path(path)
    try:
        raw = target.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{target} cannot be read: {e}") from e
    if len(raw) < 8:
        raise CheckpointError(f"{target} has {len(raw)} bytes: it is no safetensors file, or it is cut off")
    (length,) = struct.unpack_from("<Q", raw)
    if length > min(_HEADER_LIMIT, len(raw) - 8):
        raise CheckpointError(f"{target}: a header of {length} bytes in {len(raw)}; no safetensors file, or cut off")
    try:
        header = json.loads(raw[8 : 8 + length])
        metadata = dict(header.pop(_METADATA, {}))
        arrays = {name: _array(raw, 8 + length, name, entry) for name, entry in header.items()}
    except CheckpointError as e:
        raise CheckpointError(f"{target}: {e}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{target}: its header cannot be read: {e}") from e
    return arrays, metadata


def _array(raw: bytes, base: int, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    first, last = (int(o) for o in entry["data_offsets"])
    shape = tuple(int(d) for d in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"tensor {name!r} is of the unknown dtype {entry['dtype']!r}")
    if not 0 <= first <= last or base + last > len(raw):
        raise CheckpointError(f"tensor {name!r} ends at byte {base + last} of {len(raw)}: the file is cut off")
    count = int(np.prod(shape, dtype=np.int64))
    if count * dtype.itemsize != last - first:
        raise CheckpointError(f"tensor {name!r} of {dtype}{list(shape)} has {last - first} bytes")
    return np.frombuffer(raw, np.uint8, last - first, base + first).copy().view(dtype).reshape(shape)
