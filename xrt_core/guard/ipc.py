"""What the guard's processes exchange, as files in a private temporary folder: functions, arrays and executables.

Weights that are mapped from a model's file are referred to by path and offset instead of copied.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.model_file import StoredExecutable
from xrt_core.cache.store import ExecutableStore
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import Engine
from xrt_core.engine.serialization import ArrayRow, array_of
from xrt_core.errors import ModelLoadError, XRTError
from xrt_core.events import EventLog
from xrt_core.files import Size, convert, decode, encode, reading
from xrt_core.frontends.onnx_sidecar import NodeRow, describe_nodes, restore_types
from xrt_core.ir.file_backed import place_of
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Support
from xrt_core.ir.long_list import LongList
from xrt_core.ir.types import dtype_name
from xrt_core.verify.verdict import Outcome

if TYPE_CHECKING:
    from onnx import TensorProto


@dataclass(frozen=True, slots=True)
class Message:
    """What a worker writes, a line each; the fields of one kind of message are given.

    ready: it has started. stage, engine: how far it is with a request. The answer to a request is one of: error and
    kind, why there is none; outcome; supports and fault, see `capability.Answers`; usable, of a probe.
    """

    ready: Size | None = None
    stage: Literal["compiling", "verifying"] | None = None
    engine: str = ""
    error: str | None = None
    kind: Literal["memory", "raised", "side effect", "unusable"] = "raised"
    outcome: Outcome | None = None
    supports: tuple[Support, ...] | None = None
    fault: str = ""
    usable: bool = False


_MODEL: Final = "function.onnx"
_DATA: Final = "function.data"
_TYPES: Final = "types.json"
_SMALLEST_REFERENCE: Final = 4096  # bytes; smaller constants are stored in the model itself


def write_function(function: Function, folder: pathlib.Path) -> None:
    """Write a function into an empty folder, for `read_function` in another process.

    Constants that are mapped from an unchanged file are stored as references to it, others once each as data.
    Raises OSError, and ExportError for what ONNX cannot express.
    """
    from xrt_core.frontends.onnx_export import export_function
    from xrt_core.frontends.onnx_file import DataFile, serialised
    from xrt_core.frontends.onnx_wire import LongLists

    root = pathlib.Path(folder.resolve().anchor)
    current: dict[str, bool] = {}
    with open(folder / _DATA, "wb") as file:
        own = DataFile(file, (folder.resolve() / _DATA).relative_to(root).as_posix())

        def tensor(array: np.ndarray, name: str) -> TensorProto:
            place = place_of(array) if array.nbytes >= _SMALLEST_REFERENCE else None
            if place is not None:
                state, offset = place
                path = pathlib.Path(state.path)
                if state.path not in current:
                    current[state.path] = path.is_relative_to(root) and state.is_current()
                if current[state.path]:
                    return _reference(array, name, path.relative_to(root).as_posix(), offset)
            return own(array, name)

        attributes = (a for n in function.body.nodes for a in n.attributes.values())
        lists = LongLists() if any(type(a) is LongList for a in attributes) else None
        model = export_function(function, tensor=tensor, long_list=lists)
    written = serialised(model)
    (folder / _MODEL).write_bytes(written if lists is None else lists.fill(written))
    (folder / _TYPES).write_bytes(encode(describe_nodes(function)))


def read_function(folder: pathlib.Path) -> Function:
    """The function that `write_function` wrote into `folder`. Raises ModelLoadError."""
    from xrt_core.frontends.onnx_import import import_function

    # external data is located relative to the root, as references may point anywhere
    function = import_function(folder / _MODEL, folder=folder.resolve().anchor)
    with reading(_TYPES, ModelLoadError):
        content = (folder / _TYPES).read_bytes()
    described = decode(content, tuple[NodeRow, ...], _TYPES, ModelLoadError)
    return restore_types(function, described)


def write_arrays(arrays: Sequence[np.ndarray], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Write arrays into a folder, a file each; returns their descriptions for `read_arrays`. Raises OSError."""
    for i, a in enumerate(arrays):
        np.ascontiguousarray(a).tofile(folder / f"input{i}.raw")
    return [{"dtype": dtype_name(a.dtype), "shape": list(a.shape)} for a in arrays]


def read_arrays(folder: pathlib.Path, rows: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """The arrays that `write_arrays` wrote. Raises ModelLoadError."""
    with reading("an input", ModelLoadError):
        found = convert(rows, tuple[ArrayRow, ...], "the inputs", ModelLoadError)
        return [array_of(row, np.fromfile(folder / f"input{i}.raw", np.uint8)) for i, row in enumerate(found)]


def _reference(array: np.ndarray, name: str, location: str, offset: int) -> TensorProto:
    from onnx import TensorProto

    from xrt_core.ir.onnx_proto import tensor_from_array

    t = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
    t.data_type = tensor_from_array(np.empty(0, array.dtype)).data_type
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(array.nbytes))):
        t.external_data.add(key=key, value=value)
    return t


def describe_engine(engine: Engine | type[Engine]) -> dict[str, str]:
    """Name and class of an engine, from which a worker imports it."""
    owner = engine if isinstance(engine, type) else type(inner_of(engine))
    return {"name": engine.name, "module": owner.__module__, "class": owner.__qualname__}


class ArtifactExchange:
    """Directory through which a worker hands compiled artifacts to its parent: the disk cache if it is writable, else a
    private temporary one, which is deleted with this object. disk: the disk cache, None where it is off."""

    def __init__(self, disk: DiskCache | None, events: EventLog) -> None:
        self._disk = disk
        self._events = events
        self._lock = threading.Lock()
        self._store: ExecutableStore | None = None
        self._shared: DiskCache | None = None

    def disk_cache(self) -> DiskCache | None:
        """The disk cache, None where its folder must not be used."""
        with contextlib.suppress(XRTError):
            if self._disk is not None:
                self._disk.prepare()
                return self._disk
        return None

    def shared_cache(self) -> DiskCache:
        """The cache that the worker writes executables to and the parent reads them from."""
        with self._lock:
            if self._shared is None:
                disk = self.disk_cache()
                if disk is not None and disk.mode != "read" and disk.prepare():
                    self._shared = disk
                else:
                    folder = new_folder("cache")
                    self._shared = DiskCache(folder, 1 << 40)
                    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return self._shared

    @property
    def is_disk_cache(self) -> bool:
        """Whether what the worker writes can be found by any process."""
        return self.shared_cache() is self._disk and self._disk.mode == "readwrite"

    def store(self) -> ExecutableStore:
        """The executables in `shared_cache`."""
        disk = self.shared_cache()
        with self._lock:
            if self._store is None:
                reading = DiskCache(disk.folder, disk.limit) if disk.mode == "verify" else disk
                self._store = ExecutableStore(reading, self._events, shares=False)
            return self._store

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that were loaded through `store`, serialised."""
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
    """The private temporary folder of this process. Made at first use, when those of killed processes are deleted."""
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
        _sweep(folder.parent)  # those of children that a pool killed


def _sweep(parent: pathlib.Path) -> None:
    """Delete the folders of this user's processes that no longer exist."""
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
