"""Where a session reads its large constants: in the files that they were mapped from, else in this process's memory.

The library packs the constants of products anew. What it has read from a file by itself it lets go of then; what it was
given in memory stays beside the packed form.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from xrt_core.engine.onnx_bridge import OnnxModel, in_place
from xrt_core.ir.file_backed import FileState, let_go, place_of


class Weights:
    """The constants of an `OnnxModel` that was made `unaligned`.

    exported: the model, whose initializers now name the files. folder: of the files, None where there is none.
    in_memory: those that the session must be given; they must outlive it.
    """

    def __init__(self, exported: OnnxModel, from_files: bool = True) -> None:
        self._files: set[FileState] = set()
        self.folder: str | None = None
        self.in_memory: Mapping[str, np.ndarray] = {}
        if from_files and os.name == "posix":
            self._name_files(exported)
        read = {n for n, a in exported.weights.items() if self._file_of(a) is not None}
        held = {n: a if n in read else in_place(a) for n, a in exported.weights.items()}
        self.exported = replace(exported, weights=MappingProxyType(held))
        self.in_memory = MappingProxyType({n: a for n, a in held.items() if n not in read})

    def are_current(self) -> bool:
        """Whether the files are still those that were mapped."""
        return all(f.is_current() for f in self._files)

    def _name_files(self, exported: OnnxModel) -> None:
        """Point initializers to files. A session reads in one folder: that of the first constant."""
        for initializer in exported.model.graph.initializer:
            array = exported.weights.get(initializer.name)
            place = None if array is None else place_of(array)
            if array is None or place is None:
                continue
            file, offset = place
            folder, name = os.path.split(file.path)
            if file not in self._files:
                if self.folder not in (None, folder) or not _is_text(file.path) or not file.is_current():
                    continue
                self._files.add(file)
                self.folder = folder
            let_go(array)  # its digest was taken; the library maps the file by itself
            del initializer.external_data[:]
            for key, value in (("location", name), ("offset", str(offset)), ("length", str(array.nbytes))):
                initializer.external_data.add(key=key, value=value)

    def _file_of(self, array: np.ndarray) -> FileState | None:
        place = place_of(array) if self._files else None
        return place[0] if place is not None and place[0] in self._files else None


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # bytes of a name that are no UTF-8, which a model cannot hold
        return False
    return True
