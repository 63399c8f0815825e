"""Repro bundles: one file that reproduces a failed compilation or a wrong result elsewhere.

A zip of `manifest.json` (engine, versions, options, error, types), `function.onnx`, the inputs and the tail of the log.
Large constants are replaced by random ones of the same mean and deviation, as what breaks a compiler is rarely in their
values. Nothing in a bundle is code.
"""

from __future__ import annotations

import math
import pathlib
import platform
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from xrt_core import __version__
from xrt_core.engine.contract import CompileOptions, Engine
from xrt_core.engine.serialization import ArrayRow, array_of
from xrt_core.errors import ModelLoadError
from xrt_core.files import Size, decode, encode, reading, replace_file
from xrt_core.frontends.onnx_sidecar import NodeRow, describe_nodes, restore_types
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Value, substitute
from xrt_core.ir.types import STRING, TensorType, dtype_name, float_like

FORMAT: Final = 1
SUFFIX: Final = ".xrtbundle"
LARGE: Final = 1 << 16
"""Bytes from which a constant is replaced by a random one."""

MAX_BUNDLES: Final = 32
"""Bundles that `save_bundle` keeps in a folder; it deletes the oldest."""

_LOG: Final = 1 << 16  # bytes of a log that are kept
_BOUND: Final = 1 << 31  # bytes that all members together may unpack to
_MOST_WEIGHTS: Final = 1 << 34  # bytes of all random constants together

Stage = Literal["compile", "wrong"]


@dataclass(frozen=True)
class Bundle:
    """A failure of a function on an engine and device, with options.

    stage: "compile", or "wrong" if it did compile. error: its message. inputs: on which it was seen, None for
    synthesized ones. versions: of the packages involved. log: the tail of what the engine's library printed. sizes: of
    the symbols of a symbolic function, where it was seen.
    """

    function: Function
    engine: str
    device: str
    options: CompileOptions
    stage: Stage
    error: str
    inputs: tuple[np.ndarray, ...] | None
    versions: Mapping[str, str]
    log: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Format:
    format: Size


@dataclass(frozen=True, slots=True)
class _Weight:
    """Statistics of a large constant, by which a random one is made."""

    seed: Size
    low: float
    high: float
    mean: float
    std: Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class _Manifest:
    engine: str
    device: str
    options: CompileOptions
    stage: Stage
    error: str
    versions: dict[str, str]
    weights: tuple[_Weight, ...]
    types: tuple[NodeRow, ...]
    inputs: tuple[ArrayRow, ...] | None
    sizes: dict[str, Size] = field(default_factory=dict)


def make_bundle(
    function: Function,
    engine: Engine,
    device: str,
    options: CompileOptions,
    stage: Stage,
    error: str,
    inputs: Sequence[np.ndarray] | None = None,
    log: str = "",
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Bundle:
    """The bundle of a failure in this process."""
    versions = {"xrt-core": __version__, "python": platform.python_version(), "numpy": np.__version__}
    versions[engine.name] = engine.fingerprint(device)
    given = None if inputs is None else tuple(inputs)
    return Bundle(function, engine.name, device, options, stage, error, given, versions, log[-_LOG:], dict(sizes))


def write_bundle(bundle: Bundle, path: pathlib.Path, large: int = LARGE) -> None:
    """Write a bundle atomically. large: bytes from which constants are replaced.

    Raises OSError, and ExportError for a function that ONNX cannot express.
    """
    from xrt_core.frontends.onnx_export import export_function

    small, weights = _without_large(bundle.function, large)
    options = {f.name: getattr(bundle.options, f.name) for f in fields(bundle.options)}
    manifest = {
        "format": FORMAT,
        "engine": bundle.engine,
        "device": bundle.device,
        "options": {k: dict(v) if isinstance(v, Mapping) else v for k, v in options.items()},
        "stage": bundle.stage,
        "error": bundle.error,
        "versions": dict(bundle.versions),
        "fingerprint": bundle.function.fingerprint,
        "weights": weights,
        "types": describe_nodes(small),
        "sizes": dict(bundle.sizes),
        "inputs": None
        if bundle.inputs is None
        else [{"dtype": dtype_name(x.dtype), "shape": list(x.shape)} for x in bundle.inputs],
    }
    with replace_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", encode(manifest, indent=1, default=str))
        archive.writestr("function.onnx", export_function(small).SerializeToString())
        archive.writestr("log.txt", bundle.log.encode("utf-8", "replace"))
        for i, x in enumerate(bundle.inputs or ()):
            archive.writestr(f"input{i}.raw", np.ascontiguousarray(x).tobytes())


def read_bundle(path: pathlib.Path) -> Bundle:
    """Read a bundle, with random large constants. Raises ModelLoadError for a file that is none."""
    from xrt_core.frontends.onnx_import import import_function

    if not path.exists():
        raise ModelLoadError(f"bundle {path} does not exist")
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise ModelLoadError(f"{path} is not a bundle of XRT")
    where = f"bundle {path}"
    with reading(where, ModelLoadError), zipfile.ZipFile(path) as archive:
        size = sum(m.file_size for m in archive.infolist())
        if size > _BOUND:
            raise ModelLoadError(f"{where} would unpack to {size} bytes, more than {_BOUND}")
        content = archive.read("manifest.json")
        version = decode(content, _Format, where, ModelLoadError).format
        if version != FORMAT:
            raise ModelLoadError(f"{path}: a bundle of format {version}; this XRT reads {FORMAT}")
        manifest = decode(content, _Manifest, where, ModelLoadError)
        function = import_function(archive.read("function.onnx"))
        inputs = [
            array_of(row, np.frombuffer(archive.read(f"input{i}.raw"), np.uint8))
            for i, row in enumerate(manifest.inputs or ())
        ]
        return Bundle(
            _with_large(restore_types(function, manifest.types), manifest.weights),
            manifest.engine,
            manifest.device,
            manifest.options,
            manifest.stage,
            manifest.error,
            None if manifest.inputs is None else tuple(inputs),
            manifest.versions,
            archive.read("log.txt").decode("utf-8", "replace"),
            manifest.sizes,
        )


def save_bundle(bundle: Bundle, folder: pathlib.Path, most: int = MAX_BUNDLES) -> pathlib.Path:
    """Write a bundle into a folder, named after engine, stage and function, and delete the oldest ones.

    The same failure of the same function overwrites its file. Raises as `write_bundle`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bundle.engine}-{bundle.stage}-{bundle.function.fingerprint[:12]}{SUFFIX}"
    write_bundle(bundle, path)
    there = sorted(folder.glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime)
    for old in there[: max(len(there) - most, 0)]:
        old.unlink(missing_ok=True)
    return path


def _without_large(function: Function, large: int) -> tuple[Function, list[dict[str, Any]]]:
    """The function with its large constants as additional params, and the statistics of each."""
    body = function.body
    chosen = [
        v
        for v in body.constants
        if v.data is not None and v.data.nbytes >= large and v.data.dtype != STRING and v not in body.outputs
    ]
    if not chosen:
        return function, []
    new = {v: Value(f"weight{k}", TensorType(v.data.dtype, v.data.shape)) for k, v in enumerate(chosen)}  # type: ignore[union-attr]
    graph = body.replace(inputs=[*body.inputs, *new.values()], nodes=[substitute(n, new) for n in body.nodes])
    rows = [_statistics(v.data, k) for k, v in enumerate(chosen) if v.data is not None]
    made = Function.from_graph(graph, name=function.name, aliases=function.aliases)
    params = (*function.params, *made.params[len(function.params) :])  # which say what is known of their elements
    return Function(made.name, params, made.returns, made.body, made.aliases), rows


def _statistics(array: np.ndarray, seed: int) -> dict[str, Any]:
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    finite = np.abs(wide[np.isfinite(wide)]) if array.dtype.kind == "c" else wide[np.isfinite(wide)]
    ends = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    mean, std = (float(finite.mean()), float(finite.std())) if finite.size else (0.0, 0.0)
    # the square of a large number may be infinite, which JSON does not have
    return dict(zip(("seed", "low", "high", "mean", "std"), (seed, *map(_finite, (*ends, mean, std))), strict=True))


def _finite(number: float) -> float:
    return float(np.nan_to_num(number))


def _sample(type_: TensorType, row: _Weight) -> np.ndarray:
    assert type_.dtype is not None
    assert type_.shape is not None
    rng = np.random.default_rng(row.seed)
    shape = tuple(d for d in type_.shape if isinstance(d, int))
    if float_like(type_.dtype) or type_.dtype.kind == "c":
        values: Any = np.clip(rng.normal(row.mean, row.std, shape), row.low, row.high)
    else:
        values = rng.integers(int(row.low), int(row.high) + 1, shape)
    return np.asarray(values).astype(type_.dtype)


def _with_large(function: Function, rows: Sequence[_Weight]) -> Function:
    body = function.body
    own = len(body.inputs) - len(rows)
    size = sum(math.prod(p.shape) * p.dtype.itemsize for p in function.params[own:])
    if own < 0 or size > _MOST_WEIGHTS:
        raise ValueError(f"it describes {len(rows)} weights of {size} bytes")
    new = {}
    for v, row in zip(body.inputs[own:], rows, strict=True):
        if not isinstance(v.type, TensorType):
            raise ValueError(f"weight {v.name!r} has no type")
        new[v] = Value.constant(_sample(v.type, row), v.name)
    if not new:
        return function
    graph = body.replace(inputs=body.inputs[:own], nodes=[substitute(n, new) for n in body.nodes])
    return Function(function.name, function.params[:own], function.returns, graph, function.aliases)
