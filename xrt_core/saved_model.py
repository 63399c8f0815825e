"""Saved modules: a model with its executables in one file, written by `XRTModule.save`, read by `XRTModule.load`."""

from __future__ import annotations

import base64
import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

import numpy as np
from msgspec import Struct, structs

import xrt_core
from xrt_core.cache.model_file import ModelFile, read_model_file, write_model_file
from xrt_core.compiler.models import CompiledGraph
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.stages import Planned
from xrt_core.engine.contract import Engine
from xrt_core.engine.serialization import ArrayRow, DtypeName, array_of
from xrt_core.errors import CacheError, ModelLoadError, OptionError
from xrt_core.files import Size, reading, storable
from xrt_core.frontends.onnx_file import DataFile, map_file, serialised
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, Symbol, SymbolicSignature, shape_for
from xrt_core.ir.types import TensorType, dtype_from_name, dtype_name
from xrt_core.options import AUTO, TABLE, Options, resolve

_WEIGHTS: Final = "weights"  # the external-data location in the model's protobuf; it refers to the model file itself
SAVED_OPTIONS: Final = frozenset(
    (
        "phase", "engine_options", "minimum_nodes", "maximum_nodes", "strict_clustering", "merge_updates", "prune",
        "marks", "automatic", "buckets", "max_workspace_bytes", "max_batch_size", "threads", "release_cores",
        "parallel", "use_fp16", "use_bf16", "precision", "strict_types", "force_precision_constraints",
        "constant_fold_limit", "custom_op_libraries",
    )
)  # fmt: skip
"""The options that a model file has: they decide what is computed, and by which executables.

Whoever loads a file has not written it, so it decides nothing else: no folders, no caches, no processes, no traces.
"""

Inputs = dict[str, np.ndarray]


class _Engine(Struct, frozen=True):
    name: str
    device: str
    fingerprint: str

    def __str__(self) -> str:
        return f"engine {self.name} on {self.device} ({self.fingerprint})"


class _Symbol(Struct, frozen=True):
    name: str
    min: Size = 1
    max: Size | None = None
    multiple: Size = 1


class _Symbolic(Struct, frozen=True):
    """A symbolic signature. inputs: dtype, dimensions, and the value of one that determines shapes. sizes: of the
    symbols in its first call."""

    inputs: dict[str, tuple[DtypeName, tuple[Size | str, ...], str | None]]
    symbols: tuple[_Symbol, ...]
    sizes: dict[str, Size]


class _Bucket(Struct, frozen=True):
    """A bucket. inputs: dtype and full shape of each. rows: the symbol whose rows do not mix, or "". The others are
    those of `compiler.buckets.Bucket`."""

    inputs: dict[str, tuple[DtypeName, tuple[Size, ...]]]
    sizes: dict[str, Size]
    fixed: dict[str, Size]
    same: dict[str, str]
    lower: dict[str, Size]
    rows: str = ""


class _Info(Struct, frozen=True):
    options: dict[str, Any]
    engines: tuple[_Engine, ...]
    auto: bool
    signatures: tuple[dict[str, tuple[DtypeName, tuple[Size, ...], str | None]], ...]
    symbolic: tuple[_Symbolic, ...] = ()
    buckets: tuple[_Bucket, ...] = ()
    shapes: dict[str, tuple[Size | str | _Symbol | None, ...]] | None = None


class SavedModel(Struct, frozen=True):
    """An open model file. options: those of `SAVED_OPTIONS` that were given when the module was created.

    ignored: names of others that the file has.
    """

    file: ModelFile
    graph: Graph
    info: _Info
    options: Mapping[str, Any]
    ignored: Sequence[str] = ()

    def engine_names(self) -> tuple[str, ...] | str:
        """The engines whose executables the file holds, by priority; "auto" if saved with it, "host" for none."""
        if self.info.auto:
            return AUTO
        return tuple(e.name for e in self.info.engines) or "host"

    def check(self, engines: Sequence[tuple[Engine, str]]) -> None:
        """Raise CacheError unless the engines of this process match those that compiled the executables."""
        here = _described(engines)
        for made in self.info.engines:
            found = next((e for e in here if e.name == made.name), None)
            if found != made:
                raise CacheError(
                    f"{self.file.path} was made for {made}; here is "
                    f"{found or 'no such engine among those chosen'}. "
                    "XRTModule.load(..., recompile=True), or --recompile, compiles them again"
                )

    def signatures(self) -> Iterator[Inputs]:
        """Yield inputs for each saved signature: zeros, except for the values that determine shapes."""
        for saved in self.info.signatures:
            with reading(f"{self.file.path}: a saved signature", CacheError):
                inputs = {name: _example(*row) for name, row in saved.items()}
            yield inputs

    def symbolic(self) -> Iterator[tuple[Inputs, SymbolicSignature]]:
        """Yield each saved symbolic signature with inputs of its first sizes."""
        for saved in self.info.symbolic:
            with reading(f"{self.file.path}: a saved signature", CacheError):
                inputs = {
                    name: _example(dtype, [int(d or 0) for d in shape_for(dims, saved.sizes)], value)
                    for name, (dtype, dims, value) in saved.inputs.items()
                }
                symbols = {s.name: Symbol(s.name, s.min, s.max, s.multiple) for s in saved.symbols}
                dims = tuple(row[1] for row in saved.inputs.values())
                declared = Declared(tuple(saved.inputs), dims, symbols)
            yield inputs, SymbolicSignature(declared, saved.sizes)

    def restore_buckets(self, bind: Callable[[Inputs], tuple[CompiledGraph, Sequence[Any]]]) -> None:
        """Make each saved bucket. bind: inputs -> what runs them, and its arrays."""
        for saved in self.info.buckets:
            with reading(f"{self.file.path}: a saved bucket", CacheError):
                inputs = {name: _example(dtype, shape, None) for name, (dtype, shape) in saved.inputs.items()}
                caller, arrays = bind(inputs)
                if caller.buckets is None:
                    return  # they are off here
                caller.buckets.restore(saved.sizes, saved.fixed, saved.same, saved.lower, saved.rows, arrays)

    def shapes(self) -> dict[str, tuple[Any, ...]] | None:
        """The shapes that the user declared for inputs, None for none."""
        if self.info.shapes is None:
            return None
        with reading(f"{self.file.path}: the declared shapes", CacheError):
            return {
                name: tuple(Symbol(d.name, d.min, d.max, d.multiple) if isinstance(d, _Symbol) else d for d in dims)
                for name, dims in self.info.shapes.items()
            }


def open_saved(path: str | os.PathLike[str]) -> SavedModel:
    """Open a model file; its weights are memory-mapped, not read.

    Raises ModelLoadError if the file cannot be read, CacheError if it is not a model file or is damaged.
    """
    from xrt_core.frontends.onnx_import import import_model

    file = read_model_file(pathlib.Path(path), map_file(path))
    try:
        graph = import_model(file.model(), mapped={_WEIGHTS: file.buffer})
    except ModelLoadError as e:
        raise ModelLoadError(f"{os.fspath(path)!r}: {e}") from e
    info = file.info(_Info)
    options = {k: v for k, v in info.options.items() if k in SAVED_OPTIONS}
    try:
        resolve(options)
    except OptionError as e:
        raise CacheError(f"{os.fspath(path)}: it was saved with options that are none here: {e}") from e
    return SavedModel(file, graph, info, options, sorted(set(info.options) - SAVED_OPTIONS))


def save_module(
    path: str | os.PathLike[str],
    graph: Graph,
    callers: Sequence[CompiledGraph],
    pipeline: Pipeline,
    shapes: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write a model file with `graph` and every executable of `pipeline` that is in use, atomically. shapes: those that
    the user declared for its inputs.

    Raises UnsupportedError for an engine whose executables cannot be serialised, CacheError if the file cannot be
    written; an existing file is then unchanged.
    """
    from xrt_core.frontends.onnx_export import export_model

    def write(file: IO[bytes]) -> bytes:
        return serialised(export_model(graph, tensor=DataFile(file, _WEIGHTS)))

    info = {
        "xrt-core": xrt_core.__version__,
        "options": _given(pipeline.options),
        "engines": [structs.asdict(e) for e in _described(pipeline.engines)],
        "auto": pipeline.options.auto,
        "signatures": list(_signatures(callers)),
        "symbolic": list(_symbolic(callers)),
        "buckets": list(_buckets(callers)),
        "shapes": None if shapes is None else {k: [_plain(d) for d in dims] for k, dims in shapes.items()},
    }
    target = pathlib.Path(path)
    executables = {e.key.digest: e for e in pipeline.services.executables.stored()}
    guard = pipeline.services.guard
    if guard is not None:
        executables |= {e.key.digest: e for e in guard.stored()}
        info["verdicts"] = {k: v.to_json() for k, v in guard.outcomes().items()}
    try:
        write_model_file(target, write, executables.values(), info)
    except OSError as e:
        raise CacheError(f"{target} cannot be written: {e.strerror or e}") from e


def _given(options: Options) -> dict[str, Any]:
    """Return the explicitly set options that are stored with the model."""
    return {
        name: getattr(options, name) for name in TABLE if name in SAVED_OPTIONS and options.source(name) != "default"
    }


def _described(engines: Collection[tuple[Engine, str]]) -> list[_Engine]:
    return [_Engine(e.name, d, storable(e.fingerprint(d))) for e, d in engines]


def _example(dtype: str, shape: Sequence[int], value: str | None) -> np.ndarray:
    if value is None:
        return np.zeros(shape, dtype_from_name(dtype))
    return array_of(ArrayRow(dtype, tuple(shape)), np.frombuffer(base64.b64decode(value, validate=True), np.uint8))


def _plain(d: Any) -> Any:
    return dataclasses.asdict(d) if isinstance(d, Symbol) else d


def _symbolic(callers: Iterable[CompiledGraph]) -> Iterator[dict[str, Any]]:
    for caller in callers:
        for plan in caller.plans.plans():
            assert isinstance(plan, Planned)
            types, known = plan.signature
            if plan.symbolic is not None:
                yield {
                    "inputs": {
                        name: [dtype_name(t.dtype), list(t.shape or ()), _value(known.get(i))]
                        for i, (name, t) in enumerate(zip(caller.names, types, strict=True))
                        if isinstance(t, TensorType) and t.dtype is not None
                    },
                    "symbols": [dataclasses.asdict(s) for s in plan.symbolic.declared.symbols.values()],
                    "sizes": dict(plan.symbolic.sizes),
                }


def _buckets(callers: Iterable[CompiledGraph]) -> Iterator[dict[str, Any]]:
    for caller in callers:
        for row in () if caller.buckets is None else caller.buckets.saved():
            shapes = row.pop("shapes")
            types = [v.type for v in caller.graph.inputs]
            yield row | {
                "inputs": {
                    name: [dtype_name(t.dtype), shape]
                    for name, t, shape in zip(caller.names, types, shapes, strict=True)
                    if isinstance(t, TensorType) and t.dtype is not None
                }
            }


def _value(known: np.ndarray | None) -> str | None:
    return None if known is None else base64.b64encode(known.tobytes()).decode()


def _signatures(callers: Iterable[CompiledGraph]) -> Iterator[dict[str, Any]]:
    for caller in callers:
        for plan in caller.plans.plans():
            assert isinstance(plan, Planned)
            types, known = plan.signature
            if all(isinstance(t, TensorType) and t.is_static for t in types):
                yield {
                    name: [
                        dtype_name(t.dtype),
                        list(t.shape or ()),
                        _value(known.get(i)),
                    ]
                    for i, (name, t) in enumerate(zip(caller.names, types, strict=True))
                    if isinstance(t, TensorType) and t.dtype is not None
                }
