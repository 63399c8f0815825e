"""ONNX models on disk: the mapped file, its external data, and the checks that keep both honest."""

from __future__ import annotations

import mmap
import os
import pathlib
import stat
from typing import TYPE_CHECKING

import numpy as np

from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_wire import Weights

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


def map_file(path: str | os.PathLike[str], what: str = "model file") -> memoryview:
    """The bytes of a regular file, memory-mapped read-only. Raises ModelLoadError where there is no such file."""
    try:
        with open(path, "rb") as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelLoadError(f"{what} {os.fspath(path)!r} is not a regular file")
            if status.st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except IsADirectoryError:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} is a directory; give the file inside it") from None
    except FileNotFoundError:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} does not exist") from None
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{what} {os.fspath(path)!r} cannot be read: {e}") from e


def parse(buffer: memoryview, origin: str) -> tuple[ModelProto, Weights]:
    """The protobuf of a model without its large tensors, and these. Raises ModelLoadError for anything else."""
    import onnx
    from google.protobuf.message import DecodeError

    if not len(buffer):
        raise ModelLoadError(f"{origin} is empty; it is not an ONNX model")
    weights = Weights(buffer)
    try:
        return onnx.ModelProto.FromString(weights.strip()), weights
    except ModelLoadError as e:
        raise ModelLoadError(f"{origin}: {e}") from None
    except (DecodeError, ValueError) as e:
        raise ModelLoadError(f"{origin}: the bytes are not an ONNX model, or are truncated ({e})") from e


class ExternalData:
    """The files beside a model that hold its weights, each mapped once and shared by all the views over it.

    A location is relative and stays inside the model's folder, symbolic links followed; where the model file is
    itself a link (as in download caches), the folder it leads to counts as well.
    """

    def __init__(self, folder: pathlib.Path | None, model: pathlib.Path | None = None) -> None:
        self._folder = folder
        self._roots = [] if folder is None else [folder.resolve()]
        if model is not None:
            self._roots.append(model.resolve().parent)
        self._files: dict[pathlib.Path, np.ndarray] = {}

    def find(self, tensor: TensorProto, where: str) -> np.ndarray:
        """The bytes of a tensor with `data_location` EXTERNAL.

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
        if self._folder is None:
            raise ModelLoadError(
                f"{where} lies in external data {location!r}, but the model came without a file; "
                f"give the folder, or load the model by its path"
            )
        parts = pathlib.PurePosixPath(location.replace("\\", "/"))
        if not location or "\0" in location or parts.is_absolute() or ".." in parts.parts or parts.as_posix()[1:2] == ":":
            raise ModelLoadError(f"{where}: external data {location!r} must be a path inside the model's folder")
        path = self._folder / location
        real = path.resolve()
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelLoadError(f"{where}: external data {location!r} leads out of the model's folder, to {str(real)!r}")
        found = self._files.get(real)
        if found is None:
            buffer = map_file(real, f"{where}: external data file")
            found = self._files[real] = np.frombuffer(buffer, np.uint8)
        return found


def _number(text: str, what: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelLoadError(f"{where}: {what} {text!r} of its external data is not a number")
    return int(text)
