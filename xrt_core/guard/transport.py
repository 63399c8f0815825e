"""A Function as files, on its way to another process: weights that lie in a file stay there, by path and offset."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.errors import ModelLoadError
from xrt_core.ir.annotations import NO_ANNOTATIONS
from xrt_core.ir.file_backed import place_of
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import dtype_from_name, dtype_name, type_from_text

if TYPE_CHECKING:
    from onnx import TensorProto

_MODEL: Final = "function.onnx"
_DATA: Final = "function.data"
_TYPES: Final = "types.json"
_ANNOTATIONS: Final = ("engine", "region", "device", "sbp", "placement", "phase", "model_update", "aliases")
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
    (folder / _TYPES).write_text(json.dumps([described(n) for n in function.body.nodes]), encoding="utf-8")


def read_function(folder: pathlib.Path) -> Function:
    """The function that `write_function` left in `folder`. Raises ModelLoadError."""
    from xrt_core.frontends.onnx_import import import_function

    # the root as the folder of external data: what the writer referred to may lie anywhere
    function = import_function(folder / _MODEL, folder=folder.resolve().anchor)
    described = json.loads((folder / _TYPES).read_text(encoding="utf-8"))
    if len(described) != len(function.body.nodes):
        raise ModelLoadError(f"{len(function.body.nodes)} nodes arrived, {len(described)} were sent")
    return typed(function, described)


def described(node: Node) -> dict[str, Any]:
    """What a model file says nothing about: the types of a node's outputs, and the annotations that engines see."""
    a = node.annotations
    return {
        "outputs": [None if v is None or v.type is None else str(v.type) for v in node.outputs],
        "annotations": None if a is NO_ANNOTATIONS else {name: getattr(a, name) for name in _ANNOTATIONS},
    }


def typed(function: Function, described: Sequence[dict[str, Any]]) -> Function:
    """The function with types on its inner values, and annotations on its nodes."""
    body = function.body
    new: dict[Value, Value] = {}
    for entry, p in zip(body.inputs, function.params, strict=True):
        new[entry] = entry if entry.type == p.type else Value(entry.name, p.type)
    nodes = []
    for node, row in zip(body.nodes, described, strict=True):
        outputs: list[Value | None] = []
        for v, text in zip(node.outputs, row["outputs"], strict=True):
            found = None if v is None else Value(v.name, v.type if text is None else type_from_text(text))
            if v is not None and found is not None:
                new[v] = found
            outputs.append(found)
        more = {k: _tuples(x) for k, x in (row["annotations"] or {}).items()}
        annotations = replace(node.annotations, **more) if more else node.annotations
        inputs = [None if v is None else new.get(v, v) for v in node.inputs]
        nodes.append(node.replace(inputs=inputs, outputs=outputs, annotations=annotations))
    graph = body.replace(
        inputs=[new[v] for v in body.inputs], outputs=[new.get(v, v) for v in body.outputs], nodes=nodes
    )
    return Function(function.name, function.params, function.returns, graph, function.aliases)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


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
