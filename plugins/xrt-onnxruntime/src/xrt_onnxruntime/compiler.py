"""OnnxRuntimeCompiler: a Function as a session."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from xrt_core.engine.contract import (
    CompileOptions,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    Tolerance,
)
from xrt_core.engine.onnx_bridge import OnnxModel, as_onnx_text, onnx_model, without_missing_bounds
from xrt_core.engine.serialization import adds_int8_in_16_bits
from xrt_core.errors import CompileError, EngineUnavailableError, OptionError, XRTError, nearest
from xrt_onnxruntime import _toolkit
from xrt_onnxruntime.deviations import avoided
from xrt_onnxruntime.device import DeviceExecutable
from xrt_onnxruntime.executable import OnnxRuntimeExecutable, load_executable
from xrt_onnxruntime.integer_products import with_integer_products
from xrt_onnxruntime.shared_constants import unshared
from xrt_onnxruntime.weights import Weights

_OPTIONS: Final = (
    "inter_op_threads", "memory_arena", "optimization", "parallel", "provider", "provider_options", "session", "tf32",
)  # fmt: skip
_TF32: Final = Tolerance(2e-3, 5e-4, reason="factors are rounded to the 10 bits of TF32")
_FLOAT16: Final = Tolerance(1.4e-3, 2e-2, reason="TensorRT may keep sums in float16", accumulates="float16")

_UNTIL_DONE: Final = {"session.force_spinning_stop": "1"}
"""Threads spin while a call runs, and sleep once it is done."""
_PRECISE: Final = {"session.x64quantprecision": "1"}
"""Products of uint8 and int8 take kernels that do not saturate, and are slower for few rows
(`benchmarks/int8_products.py`). Source: `onnxruntime_session_options_config_keys.h`."""


def tolerance_of(options: CompileOptions, device: bool) -> Mapping[str, Tolerance]:
    """What results on a device may be off by: TF32, if it is asked for; TensorRT's provider takes it unasked, and may
    keep sums of float16 in float16."""
    by_tensorrt = device and options.extra.get("provider") == "tensorrt"
    takes = by_tensorrt or (device and options.extra.get("tf32") is True)
    return {**({"float32": _TF32} if takes else {}), **({"float16": _FLOAT16} if by_tensorrt else {})}


class OnnxRuntimeCompiler(GraphCompiler):
    """Compiles Functions for the CPU, or for the GPU of number `index`.

    `CompileOptions.threads` is the number of intra-op threads. Options of its own (`CompileOptions.extra`):
    `optimization`, "disable", "basic", "extended" or "all" (default); `parallel`, whether independent nodes run side
    by side, and `inter_op_threads` to do so; `memory_arena` (default True); `session`, a mapping of the library's
    session configuration entries such as {"session.intra_op.allow_spinning": "1"}. Where
    nothing is said, threads spin until the end of a run beside other clusters on the same cores
    (`CompileOptions.shared`), and where the program uses the cores next (`release_cores`): for some milliseconds after
    a run threads that spin take the cores from whoever comes next. Processors without VNNI multiply 8-bit integers by
    kernels that do not saturate in 16 bits, but for `optimization` below "extended". On a GPU: `provider`, "cuda"
    (default) or "tensorrt", `provider_options`, a mapping of the library's options for it, and `tf32` (default False).
    """

    stages = MappingProxyType(
        {"onnx": "the model that the library is given", "onnx-optimized": "the model after its graph optimisations"}
    )

    def __init__(self, options: CompileOptions, index: int | None = None) -> None:
        extra = options.extra
        self.index = index
        unknown = sorted(set(extra) - set(_OPTIONS))
        if unknown:
            hint = nearest(unknown[0], _OPTIONS)
            raise OptionError(f"onnxruntime: unknown option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}{hint}")
        self._level = extra.get("optimization", "all")
        if self._level not in _toolkit.LEVELS:
            known = ", ".join(_toolkit.LEVELS)
            raise OptionError(f"onnxruntime: option 'optimization' is {self._level!r}; it takes {known}")
        if not options.fused:
            self._level = "disable"
        self._threads = options.threads
        self._inter_op_threads = _count(extra, "inter_op_threads")
        self._parallel = _flag(extra, "parallel", False)
        self._memory_arena = _flag(extra, "memory_arena", True)
        self._providers = self._read_providers(extra)
        entries = extra.get("session", {})
        idle: Mapping[str, str] = {}
        if options.shared or options.release_cores:
            idle = _UNTIL_DONE
        precise = _PRECISE if adds_int8_in_16_bits() else {}
        try:
            self._entries = {**precise, **idle, **{str(k): str(v) for k, v in entries.items()}}
        except AttributeError:
            raise OptionError(f"onnxruntime: option 'session' is {entries!r}; it takes a mapping of texts") from None

    def _read_providers(self, extra: Mapping[str, Any]) -> list[Any] | None:
        """What sessions are made with; None on the CPU. Raises OptionError for bad values, EngineUnavailableError for a
        provider that the library has not."""
        name, entries, tf32 = (
            extra.get("provider", "cuda"),
            extra.get("provider_options", {}),
            _flag(extra, "tf32", False),
        )
        if name not in _toolkit.GPU_PROVIDERS:
            known = ", ".join(_toolkit.GPU_PROVIDERS)
            raise OptionError(f"onnxruntime: option 'provider' is {name!r}; it takes {known}")
        if not isinstance(entries, Mapping):
            raise OptionError(f"onnxruntime: option 'provider_options' is {entries!r}; it takes a mapping of texts")
        if self.index is None:
            return None
        if name not in _toolkit.gpu_providers():
            raise EngineUnavailableError(
                f"onnxruntime: this build {_toolkit.version()} has no {_toolkit.GPU_PROVIDERS[name]}; install "
                "onnxruntime-gpu in the place of onnxruntime"
            )
        read = {str(k): str(v) for k, v in entries.items()}
        return _toolkit.providers_for(name, self.index, tf32=tf32, entries=read)

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """A session of `function`, its large constants read where they are: in files, else in memory.

        Raises CompileError with the library's own first line.
        """
        on_cpu = self._providers is None
        exported = _exported(function, on_cpu, unaligned=on_cpu, lists_beside=True)
        try:
            weights = Weights(exported, from_files=on_cpu)
            session = self._session(weights)
            if not weights.are_current():  # another model was put in its place meanwhile
                weights = Weights(_exported(function, on_cpu, lists_beside=True), from_files=False)
                session = self._session(weights)
        except Exception as e:
            raise CompileError(
                f"onnxruntime: function {function.name!r} does not compile: {_toolkit.first_line(e)}"
            ) from e
        kind = OnnxRuntimeExecutable if self._providers is None else DeviceExecutable
        model = weights.exported
        return kind(session, entry_params, return_params, model.inputs, model.outputs, self, model)

    def _session(self, weights: Weights) -> Any:
        options = self.session_options()
        if weights.folder is not None:
            _toolkit.read_files_in(options, weights.folder)
        model = weights.exported.to_bytes()
        providers = () if self._providers is None else (self._providers,)
        return _toolkit.make_session(model, options, weights.in_memory, *providers)

    def load(self, blob: bytes) -> Executable:
        """The executable that `serialize` gave `blob` for. Raises CompileError where it does not fit."""
        try:
            return load_executable(blob, self)
        except XRTError:
            raise
        except Exception as e:
            raise CompileError(f"onnxruntime: a serialised executable does not load: {_toolkit.first_line(e)}") from e

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """The model that the library is given, or what its graph optimisations make of it."""
        if stage not in self.stages:
            return super().as_text(function, entry_params, return_params, aliases, stage)
        exported = _exported(function, self._providers is None)
        if stage == "onnx":
            return as_onnx_text(exported.model)
        options = self.session_options()
        with tempfile.TemporaryDirectory(prefix="xrt-onnxruntime-") as folder:
            path = pathlib.Path(folder) / "optimised.onnx"
            options.optimized_model_filepath = str(path)
            given = () if self._providers is None else (self._providers,)
            try:
                _toolkit.make_session(exported.model.SerializeToString(), options, exported.weights, *given)
                return as_onnx_text(path.read_bytes())
            except Exception as e:
                why = _toolkit.first_line(e)
                raise CompileError(f"onnxruntime: function {function.name!r} does not compile: {why}") from e

    def session_options(self, optimised: bool = False) -> Any:
        """Fresh options for a session; `optimised`: of a model that has been optimised before."""
        return _toolkit.session_options(
            threads=self._threads,
            inter_op_threads=self._inter_op_threads,
            parallel=self._parallel,
            level="disable" if optimised else self._level,
            memory_arena=self._memory_arena,
            entries=self._entries,
        )


def _exported(function: Function, on_cpu: bool, **more: bool) -> OnnxModel:
    """The function in the newest opset that the library has kernels for; in a newer one that it takes where some node
    has no older form. Raises CompileError."""
    settled, newest = _toolkit.settled_opset(), _toolkit.newest_opset()
    function = avoided(without_missing_bounds(function))
    if on_cpu:
        function = with_integer_products(function)
        if adds_int8_in_16_bits():
            function = unshared(function)
    try:
        return onnx_model(function, engine="onnxruntime", newest_opset=settled, **more)
    except CompileError:
        if settled == newest:
            raise
        return onnx_model(function, engine="onnxruntime", newest_opset=newest, **more)


def _flag(extra: Any, name: str, default: bool) -> bool:
    value = extra.get(name, default)
    if not isinstance(value, bool):
        raise OptionError(f"onnxruntime: option {name!r} is {value!r}; it takes True or False")
    return value


def _count(extra: Any, name: str) -> int | None:
    value = extra.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"onnxruntime: option {name!r} is {value!r}; it takes a positive integer")
    return value
