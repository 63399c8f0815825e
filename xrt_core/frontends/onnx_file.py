"""ONNX models on disk: the memory-mapped model file, its external data, their validation, and writing of both."""

from __future__ import annotations

import mmap
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.errors import ExportError, ModelLoadError
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.file_backed import note_mapping
from xrt_core.ir.types import STRING

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_ALIGNMENT: Final = 64  # bytes; engines accept a tensor of this alignment without a copy
_SMALL: Final = 1024  # bytes; a smaller tensor stays in the model file


def map_file(path: str | os.PathLike[str], what: str = "model file") -> memoryview:
    """Memory-map a regular file read-only. Raises ModelLoadError if it is missing, unreadable or not a regular file."""
    try:
        # without O_NONBLOCK, opening a named pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError
            if not stat.S_ISREG(status.st_mode):
                raise ModelLoadError(f"{what} {os.fspath(path)!r} is not a regular file")
            if status.st_size == 0:
                return memoryview(b"")
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            note_mapping(mapped, path, status)
            return memoryview(mapped)
        finally:
            os.close(descriptor)
    except IsADirectoryError:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} is a directory; give the file inside it") from None
    except FileNotFoundError:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} does not exist") from None
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} cannot be read: {e}") from e


def parse(buffer: memoryview, origin: str) -> tuple[ModelProto, Weights]:
    """Parse a model into its protobuf without large tensors, and these. Raises ModelLoadError for other bytes."""
    import onnx

    if not len(buffer):
        raise ModelLoadError(f"{origin} is empty; it is not an ONNX model")
    weights = Weights(buffer)
    try:
        return onnx.ModelProto.FromString(weights.strip()), weights
    except ModelLoadError as e:
        raise ModelLoadError(f"{origin}: {e}") from None
    except Exception as e:  # protobuf's DecodeError; its class depends on the protobuf implementation
        raise ModelLoadError(f"{origin}: the bytes are not an ONNX model, or are truncated ({e})") from e


class ExternalData:
    """The external data files of a model, each mapped once and shared by all views over it.

    A location is relative and must resolve, symbolic links followed, to a file inside the model's folder; if the model
    file is itself a link (as in download caches), the folder of its target is allowed as well. mapped: location ->
    bytes that are mapped already; no file is opened then.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        model: pathlib.Path | None = None,
        mapped: Mapping[str, memoryview] | None = None,
    ) -> None:
        self._located = {k: np.frombuffer(v, np.uint8) for k, v in (mapped or {}).items()}
        self._folder = folder
        self._roots = [] if folder is None else [_resolved(folder, "the model's folder")]
        if model is not None:
            self._roots.append(_resolved(model, "the model").parent)
        self._files: dict[pathlib.Path, np.ndarray] = {}

    def find(self, tensor: TensorProto, where: str) -> np.ndarray:
        """Return the bytes of a tensor with `data_location` EXTERNAL.

        Raises ModelLoadError for a missing file, a location outside the folder, or a range outside the file.
        """
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        data = self._file(location, where)
        offset = _number(entries.get("offset", "0"), "offset", where)
        length = _number(entries["length"], "length", where) if "length" in entries else data.size - offset
        if length < 0 or offset + length > data.size:
            raise ModelLoadError(
                f"{where}: bytes {offset} to {offset + max(length, 0)} of external data {location!r}, which has only "
                f"{data.size}; the file is truncated or belongs to another model"
            )
        return data[offset : offset + length]

    def _file(self, location: str, where: str) -> np.ndarray:
        known = self._located.get(location)
        if known is not None:
            return known
        if self._folder is None:
            raise ModelLoadError(
                f"{where} lies in external data {location!r}, but the model came without a file; "
                f"give the folder, or load the model by its path"
            )
        parts = pathlib.PurePosixPath(location.replace("\\", "/"))
        drive = location[1:2] == ":"
        if not location or "\0" in location or parts.is_absolute() or drive or ".." in parts.parts:
            raise ModelLoadError(f"{where}: external data {location!r} must be a path inside the model's folder")
        path = self._folder / location
        real = _resolved(path, f"{where}: external data")
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelLoadError(
                f"{where}: external data {location!r} leads out of the model's folder, to {str(real)!r}"
            )
        found = self._files.get(real)
        if found is None:
            buffer = map_file(real, f"{where}: external data file")
            found = self._files[real] = np.frombuffer(buffer, np.uint8)
        self._located[location] = found
        return found


def _resolved(path: pathlib.Path, what: str) -> pathlib.Path:
    """The path with links followed. Raises ModelLoadError for links in a circle and names that cannot be."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as e:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} cannot be located: {e}") from e


def _number(text: str, what: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelLoadError(f"{where}: {what} {text!r} of its external data is not a number")
    return int(text)


class DataFile:
    """A TensorWriter that appends large tensors to an external data file, each aligned to `_ALIGNMENT` bytes."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file = file
        self._location = location
        self._known: dict[int, tuple[np.ndarray, int]] = {}

    def __call__(self, array: np.ndarray, name: str) -> TensorProto:
        from onnx import TensorProto

        from xrt_core.ir.onnx_proto import tensor_from_array

        if array.nbytes < _SMALL or array.dtype == STRING:
            return tensor_from_array(array, name)
        if array.dtype.name.endswith(("int4", "int2", "e2m1fn")):
            raw: Any = tensor_from_array(array).raw_data
        else:
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        known = self._known.get(id(array))
        if known is None:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            known = self._known[id(array)] = (array, self._file.tell())
            self._file.write(raw)
        t = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        t.data_type = tensor_from_array(array.reshape(-1)[:0]).data_type
        for key, value in (("location", self._location), ("offset", str(known[1])), ("length", str(len(raw)))):
            t.external_data.add(key=key, value=value)
        return t


def serialised(model: ModelProto) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except Exception as e:
        raise ExportError(f"the model cannot be written as one file ({e}); save with external_data=True") from e
