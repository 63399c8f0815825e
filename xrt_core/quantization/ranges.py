"""Recorded ranges of a model's tensors, and their files: one JSON file per model, written atomically."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from xrt_core.errors import QuantizationError
from xrt_core.files import Size, decode, encode, reading, replace_file
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.graph import Graph, Value, substitute

_FORMAT: Final = "xrt-ranges-1"
Range = tuple[float, float]


@dataclass(slots=True)
class Ranges:
    """Minimum and maximum of each tensor over all batches so far; both NaN if an element was not finite."""

    model: str
    fingerprint: str
    batches: int = 0
    tensors: dict[str, Range] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Range], batches: int = 1) -> None:
        """Widen the ranges to include those of further batches."""
        self.batches += batches
        for name, (low, high) in tensors.items():
            known = self.tensors.get(name)
            if not (math.isfinite(low) and math.isfinite(high)) or (known is not None and math.isnan(known[0])):
                self.tensors[name] = (math.nan, math.nan)
            elif known is None:
                self.tensors[name] = (low, high)
            else:
                self.tensors[name] = (min(low, known[0]), max(high, known[1]))

    def save(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Write the ranges into the folder; returns the path of the file. Raises QuantizationError."""
        path = file_of(folder, self.fingerprint)
        tensors = {n: None if math.isnan(low) else [low, high] for n, (low, high) in self.tensors.items()}
        content = {"format": _FORMAT, "model": self.model, "fingerprint": self.fingerprint, "batches": self.batches,
                   "tensors": tensors}  # fmt: skip
        try:
            with replace_file(path) as file:
                file.write(encode(content, indent=1))
        except OSError as e:
            raise QuantizationError(f"ranges cannot be written to {path}: {e.strerror or e}") from e
        return path


def identity(graph: Graph) -> str:
    """Return a fingerprint of the model that is independent of the batch: it excludes the types of values."""
    made = [v for n in graph.nodes for v in n.outputs if v is not None]
    new = {v: Value(v.name) for v in (*graph.inputs, *made)}
    nodes = [
        substitute(n, new).replace(outputs=[None if v is None else new[v] for v in n.outputs]) for n in graph.nodes
    ]
    bare = Graph([new[v] for v in graph.inputs], [new.get(v, v) for v in graph.outputs], nodes, opsets=graph.opsets)
    return graph_fingerprint(bare)


def file_of(folder: str | os.PathLike[str], fingerprint: str) -> pathlib.Path:
    """Return the path of a model's ranges."""
    return pathlib.Path(folder).expanduser() / f"{fingerprint}.json"


def prepare_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Create the folder and return its absolute path. Raises QuantizationError if it is not writable."""
    path = pathlib.Path(folder).expanduser().absolute()  # the working directory may change before the write
    try:
        path.mkdir(parents=True, exist_ok=True)
        with replace_file(path / ".writable"):
            pass
        (path / ".writable").unlink(missing_ok=True)
    except OSError as e:
        raise QuantizationError(f"ranges cannot be written to {path}: {e.strerror or e}") from e
    return path


def find_ranges(folder: str | os.PathLike[str], fingerprint: str) -> Ranges | None:
    """Return the ranges of a model in the folder, or None. Raises QuantizationError for an unreadable file."""
    path = file_of(folder, fingerprint)
    return _parse(_read(path), path) if path.exists() else None


def load_ranges(folder: str | os.PathLike[str], fingerprint: str, model: str) -> Ranges:
    """Return the ranges of a model. Raises QuantizationError, listing the models in the folder, if there are none."""
    found = find_ranges(folder, fingerprint)
    if found is not None:
        return found
    path = pathlib.Path(folder).expanduser()
    how = f"record them with: with xrt.ptq_calibration_mode({str(path)!r}): XRTModule(model)(inputs)"
    if not path.is_dir():
        raise QuantizationError(f"there is no folder of ranges {path}; {how}")
    others = [_parse(_read(p), p) for p in sorted(path.glob("*.json"))]
    if not others:
        raise QuantizationError(f"the folder {path} holds no ranges; {how}")
    shown = ", ".join(f"{o.model or 'a graph'} ({o.fingerprint[:8]})" for o in others[:4])
    raise QuantizationError(
        f"the folder {path} holds no ranges of {model or 'this graph'} ({fingerprint[:8]}), only of {shown}. Another "
        f"model, or other weights, need ranges of their own; {how}"
    )


class _File(Struct, frozen=True):
    format: str
    model: str
    fingerprint: str
    batches: Size
    tensors: dict[str, Range | None]


def _parse(content: bytes, path: pathlib.Path) -> Ranges:
    try:
        found = decode(content, _File, str(path), QuantizationError)
        if found.format != _FORMAT:
            raise QuantizationError(f"{path} is damaged: its format is {found.format!r}, not {_FORMAT!r}")
        if any(r is not None and r[0] > r[1] for r in found.tensors.values()):
            raise QuantizationError(f"{path} is damaged: it has a minimum above its maximum")
    except QuantizationError as e:
        raise QuantizationError(f"{e}. Delete it and record the ranges again") from e
    tensors = {n: (math.nan, math.nan) if r is None else r for n, r in found.tensors.items()}
    return Ranges(found.model, found.fingerprint, found.batches, tensors)


def _read(path: pathlib.Path) -> bytes:
    with reading(f"ranges {path}", QuantizationError):
        if not path.is_file():
            raise QuantizationError(f"ranges cannot be read from {path}: it is no regular file")
        return path.read_bytes()
