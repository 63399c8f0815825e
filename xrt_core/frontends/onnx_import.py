"""ONNX import: read a path, bytes, a ModelProto or an `onnx_ir.Model` into a Graph or a Function."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Union

from xrt_core.errors import GraphError, InputError, ModelLoadError
from xrt_core.files import decode
from xrt_core.frontends.onnx_file import ExternalData, map_file, parse
from xrt_core.frontends.plugin_models import import_object
from xrt_core.ir.function import Function, InputOutputAlias, Parameter
from xrt_core.ir.garbage_collection import collector_paused
from xrt_core.ir.graph import Graph, Value, every_node
from xrt_core.ir.schema import domain_version
from xrt_core.ir.types import Shape, TensorType

if TYPE_CHECKING:
    from onnx import ModelProto

    from xrt_core.frontends.onnx_wire import Weights

ModelSource = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, "ModelProto", Any]
"""A path, the bytes of a model file, a ModelProto, or an `onnx_ir.Model`."""

ALIASES: Final = "xrt.aliases"
"""Key of the model's metadata that stores a Function's aliases, as 'output:input output:input'."""
ELEMENTS: Final = "xrt.elements"
"""Key of the model's metadata that stores what is known of elements of a Function's params, as JSON: index -> list."""


def import_model(
    source: ModelSource,
    *,
    folder: str | os.PathLike[str] | None = None,
    mapped: Mapping[str, memoryview] | None = None,
    example: Any = None,
) -> Graph:
    """Import an ONNX model as a graph, with model-local functions inlined and weights not copied.

    source: a path, bytes, a `ModelProto`, or an `onnx_ir.Model`; anything else, and the path of a ZIP archive, is
    offered to the frontends of plugins.
    folder: the folder of external data; by default that of the path. mapped: location -> external data that is mapped
    already; given together with bytes. example: arguments of the model, for the frontends of plugins that need them.

    Weights of a path or of bytes are read-only views over the mapped file or over the bytes; protobuf does not parse
    them. Their offset in the file is arbitrary: an array may be unaligned (`array.flags.aligned`).

    Raises InputError for an example of an ONNX model, and ModelLoadError, naming node and value, for anything that is
    not a valid model of opset 7 or newer. A model of an older opset is accepted if each of its operators is unchanged
    at opset 7.
    """
    if not _is_onnx(source):
        return import_object(source, example)
    if example is not None:
        raise InputError(f"example is for models that do not say what they take; a {type(source).__name__} does")
    return _import(source, folder, mapped)[0]


def import_function(source: ModelSource, *, folder: str | os.PathLike[str] | None = None) -> Function:
    """Import a Function that `export_function` exported, with its aliases. source, folder: as of `import_model`.

    Raises ModelLoadError also if an input has no declared static type, or an output none of known rank.
    """
    graph, model = _import(source, folder)
    outputs = [_declared(v, p) for v, p in zip(graph.outputs, model.graph.output, strict=True)]
    if graph.name == "":
        raise ModelLoadError("the model's graph has no name to give to the function")
    params = _with_elements([_parameter(v, v.type) for v in graph.inputs], graph.metadata.get(ELEMENTS))
    returns = [_parameter(v, t, may_be_open=True) for v, t in zip(graph.outputs, outputs, strict=True)]
    aliases = []
    for pair in graph.metadata.get(ALIASES, "").split():
        out, _, into = pair.partition(":")
        if not (out.isdecimal() and into.isdecimal()):
            raise ModelLoadError(f"metadata {ALIASES!r}: {pair!r} is not of the form output:input")
        aliases.append(InputOutputAlias(int(out), int(into)))
    return Function(graph.name, params, returns, graph, aliases)


def _with_elements(params: list[Parameter], text: str | None) -> list[Parameter]:
    """Params with the elements that metadata say are known."""
    if text is None:
        return params
    found = decode(text.encode(), dict[int, Shape], f"metadata {ELEMENTS!r}", ModelLoadError)
    for i, elements in found.items():
        p = params[i] if 0 <= i < len(params) else None
        if p is None or not p.is_static or math.prod(p.shape) != len(elements):
            raise ModelLoadError(f"metadata {ELEMENTS!r}: input {i} has not {len(elements)} elements")
        params[i] = Parameter(p.name, p.dtype, p.dims, elements)
    return params


def _is_onnx(source: Any) -> bool:
    if isinstance(source, str | os.PathLike):
        return not _is_archive(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return True
    import onnx

    return isinstance(source, onnx.ModelProto) or _is_onnx_ir(source)


def _is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a ZIP archive, which no ONNX model is: a frontend may know it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"
    return False


def _is_onnx_ir(source: Any) -> bool:
    return type(source).__name__ == "Model" and type(source).__module__.partition(".")[0] == "onnx_ir"


def _declared(value: Value, proto: Any) -> Any:
    from xrt_core.ir.onnx_proto import type_from_proto

    return type_from_proto(proto.type, f"output {value.name!r}") or value.type


def _parameter(value: Value, declared: Any, *, may_be_open: bool = False) -> Parameter:
    t = declared
    if not isinstance(t, TensorType) or t.dtype is None or t.shape is None or (None in t.shape and not may_be_open):
        raise ModelLoadError(f"{value.name!r} has type {t or 'unknown'}; a function needs tensors of known shape")
    return Parameter(value.name, t.dtype, t.shape)


def _import(
    source: ModelSource, folder: str | os.PathLike[str] | None, mapped: Mapping[str, memoryview] | None = None
) -> tuple[Graph, ModelProto]:
    import onnx

    base = None if folder is None else pathlib.Path(folder)
    weights: Weights | None = None
    external = ExternalData(base, mapped=mapped)
    origin = "the model"
    if isinstance(source, str | os.PathLike):
        path = pathlib.Path(source)
        origin = f"model {os.fspath(source)!r}"
        buffer = map_file(path)
        model, weights = parse(buffer, origin)
        external = ExternalData(base or path.parent, None if base else path)
    elif isinstance(source, bytes | bytearray | memoryview):
        model, weights = parse(memoryview(source).cast("B"), "the model's bytes")
    elif isinstance(source, onnx.ModelProto):
        model = source
    elif _is_onnx_ir(source):
        model, base = _from_onnx_ir(source, base)
        external = ExternalData(base)
    else:
        raise ModelLoadError(
            f"{type(source).__module__}.{type(source).__qualname__} is not a model: give a path, the bytes of an ONNX "
            f"file, a ModelProto or an onnx_ir.Model"
        )
    try:
        with collector_paused():  # collections double the time
            return _read(model, weights, external), model
    except ModelLoadError as e:
        raise ModelLoadError(f"{origin}: {e}") from e.__cause__
    except GraphError as e:
        raise ModelLoadError(f"{origin}: {e}") from e
    except (UnicodeDecodeError, TypeError) as e:  # protobuf returns strings that are not UTF-8 as bytes
        raise ModelLoadError(f"{origin}: a name in the model is not UTF-8 text; the file is damaged ({e})") from e
    except RecursionError as e:
        raise ModelLoadError(f"{origin}: functions or subgraphs are nested too deeply") from e


def _read(model: ModelProto, weights: Weights | None, external: ExternalData) -> Graph:
    from xrt_core.frontends.onnx_reader import Reader
    from xrt_core.frontends.onnx_scope import check_opsets, text

    if not model.HasField("graph"):
        raise ModelLoadError("there is no graph in it; this is not an ONNX model")
    opsets = check_opsets(model)
    reader = Reader(model, opsets, weights, external)
    graph = reader.main()
    kept = {
        d: v
        for d, v in {**reader.function_opsets(), **opsets}.items()
        if domain_version(d) or any(n.domain == d for n in every_node(graph))
    }
    metadata = {text(p.key): text(p.value) for p in model.metadata_props}
    metadata.update(graph.metadata)
    return Graph(
        graph.inputs,
        graph.outputs,
        graph.nodes,
        opsets=kept,
        name=graph.name,
        defaults=graph.defaults,
        doc=graph.doc,
        metadata=metadata,
    )


def _from_onnx_ir(source: Any, folder: pathlib.Path | None) -> tuple[ModelProto, pathlib.Path | None]:
    """Return the ModelProto of an `onnx_ir.Model`, and the folder of its external tensors if there is exactly one."""
    if folder is None:
        constants = (getattr(v, "const_value", None) for v in source.graph.initializers.values())
        bases = {str(b) for c in constants if (b := getattr(c, "base_dir", ""))}
        if len(bases) > 1:
            raise ModelLoadError(f"external tensors lie in {len(bases)} folders ({', '.join(sorted(bases))}); give one")
        folder = pathlib.Path(bases.pop()) if bases else None
    return sys.modules["onnx_ir"].serde.serialize_model(source), folder
