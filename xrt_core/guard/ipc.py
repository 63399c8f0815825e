"""A Function as files, on its way to another process: weights that lie in a file stay there, by path and offset.

Crossing: the cache on disk as the guard uses it, through which executables come from the child.

The temporary folder of this process's guard: jobs, logs, executables on their way. It goes with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.model_file import StoredExecutable
from xrt_core.cache.store import ExecutableStore
from xrt_core.errors import ModelLoadError, XRTError
from xrt_core.events import EventLog
from xrt_core.frontends.onnx_sidecar import describe_node, restore_types
from xrt_core.ir.file_backed import place_of
from xrt_core.ir.function import Function
from xrt_core.ir.types import dtype_from_name, dtype_name

if TYPE_CHECKING:
    from onnx import TensorProto


_MODEL: Final = "function.onnx"
_DATA: Final = "function.data"
_TYPES: Final = "types.json"
_LEAST: Final = 4096  # bytes; smaller constants travel in the model


def write_function(function: Function, folder: pathlib.Path) -> None:
    """Write a function into an empty folder, from which `read_function` of another process takes it.

    Constants mapped from a file that has not changed since are referred to; others are written, once each.
    Raises OSError, and ExportError for what ONNX cannot express.
    """
    from xrt_core.frontends.onnx_export import export_function
    from xrt_core.frontends.onnx_file import DataFile, serialised

    root = pathlib.Path(folder.resolve().anchor)
    current: dict[str, bool] = {}
    with open(folder / _DATA, "wb") as file:
        beside = DataFile(file, (folder.resolve() / _DATA).relative_to(root).as_posix())

        def tensor(array: np.ndarray, name: str) -> TensorProto:
            place = place_of(array) if array.nbytes >= _LEAST else None
            if place is not None:
                state, offset = place
                path = pathlib.Path(state.path)
                if state.path not in current:
                    current[state.path] = path.is_relative_to(root) and state.is_current()
                if current[state.path]:
                    return _reference(array, name, path.relative_to(root).as_posix(), offset)
            return beside(array, name)

        model = export_function(function, tensor=tensor)
    (folder / _MODEL).write_bytes(serialised(model))
    (folder / _TYPES).write_text(json.dumps([describe_node(n) for n in function.body.nodes]), encoding="utf-8")


def read_function(folder: pathlib.Path) -> Function:
    """The function that `write_function` left in `folder`. Raises ModelLoadError."""
    from xrt_core.frontends.onnx_import import import_function

    # the root as the folder of external data: what the writer referred to may lie anywhere
    function = import_function(folder / _MODEL, folder=folder.resolve().anchor)
    described = json.loads((folder / _TYPES).read_text(encoding="utf-8"))
    if len(described) != len(function.body.nodes):
        raise ModelLoadError(f"{len(function.body.nodes)} nodes arrived, {len(described)} were sent")
    return restore_types(function, described)


def write_arrays(arrays: Sequence[np.ndarray], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Write arrays into a folder, a file each; returns what `read_arrays` needs to know. Raises OSError."""
    rows = []
    for i, a in enumerate(arrays):
        np.ascontiguousarray(a).tofile(folder / f"input{i}.raw")
        rows.append({"dtype": dtype_name(a.dtype), "shape": list(a.shape)})
    return rows


def read_arrays(folder: pathlib.Path, rows: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """What `write_arrays` wrote. Raises OSError and ValueError."""
    return [
        np.fromfile(folder / f"input{i}.raw", np.uint8).view(dtype_from_name(r["dtype"])).reshape(r["shape"])
        for i, r in enumerate(rows)
    ]


def _reference(array: np.ndarray, name: str, location: str, offset: int) -> TensorProto:
    from onnx import TensorProto

    from xrt_core.ir.onnx_proto import tensor_from_array

    t = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
    t.data_type = tensor_from_array(np.empty(0, array.dtype)).data_type
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(array.nbytes))):
        t.external_data.add(key=key, value=value)
    return t


class ArtifactExchange:
    """disk: the cache on disk, None where it is off."""

    def __init__(self, disk: DiskCache | None, events: EventLog) -> None:
        self._disk = disk
        self._events = events
        self._lock = threading.Lock()
        self._store: ExecutableStore | None = None
        self._between: DiskCache | None = None

    def usable(self) -> DiskCache | None:
        """The cache on disk, where its folder may be used."""
        with contextlib.suppress(XRTError):
            if self._disk is not None:
                self._disk.prepare()
                return self._disk
        return None

    def between(self) -> DiskCache:
        """The cache through which executables come from the child: the one on disk, or where that cannot be written, a
        folder of its own, which goes with it."""
        with self._lock:
            if self._between is None:
                disk = self.usable()
                if disk is not None and disk.mode != "read" and disk.prepare():
                    self._between = disk
                else:
                    folder = new_folder("cache")
                    self._between = DiskCache(folder, 1 << 40)
                    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return self._between

    @property
    def is_the_cache(self) -> bool:
        """Whether what the child makes lies where any process looks for it."""
        return self.between() is self._disk and self._disk.mode == "readwrite"

    def store(self) -> ExecutableStore:
        """The executables of `between`."""
        disk = self.between()
        with self._lock:
            if self._store is None:
                reading = DiskCache(disk.folder, disk.limit) if disk.mode == "verify" else disk
                self._store = ExecutableStore(reading, self._events)
            return self._store

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that came through `store`, serialised."""
        with self._lock:
            store = self._store
        return [] if store is None else store.stored()


_PREFIX: Final = "xrt-guard-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)-\w+")
_lock = threading.Lock()
_folder: pathlib.Path | None = None
_owner = 0


def new_folder(what: str) -> pathlib.Path:
    """A new empty folder that only this user can read. Raises OSError."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{what}-", dir=process_folder()))


def process_folder() -> pathlib.Path:
    """The folder that holds all others; made at first use, when those of processes that were killed are taken away."""
    global _folder, _owner
    with _lock:
        if _folder is None or _owner != os.getpid() or not _folder.is_dir():  # a forked process has its own
            _sweep(pathlib.Path(tempfile.gettempdir()))
            _folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
            _owner = os.getpid()
            atexit.register(_remove, _folder, _owner)
        return _folder


def _remove(folder: pathlib.Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: pathlib.Path) -> None:
    """Take away what processes of this user left that are no more."""
    if not hasattr(os, "geteuid"):
        return
    with contextlib.suppress(OSError), os.scandir(parent) as found:
        for entry in found:
            named = _NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                if named and entry.stat(follow_symlinks=False).st_uid == os.geteuid() and not _is_alive(int(named[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
