"""OpenVinoCompiler: a Function as a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler, InputOutputAlias, Parameter
from xrt_core.engine.onnx_bridge import OnnxModel, as_onnx_text, onnx_model, without_missing_bounds
from xrt_core.errors import CompileError, EngineUnavailableError, OptionError, XRTError, nearest
from xrt_openvino import _toolkit
from xrt_openvino.deviations import NEWEST
from xrt_openvino.executable import OpenVinoExecutable, load_executable

_OPTIONS: Final = ("config", "streams")


class OpenVinoCompiler(GraphCompiler):
    """Compiles Functions for the CPU.

    `CompileOptions.threads` is the number of inference threads. Options of its own (`CompileOptions.extra`):
    `streams`, how many calls may run side by side (default 1; more wait); `config`, a mapping of the library's
    properties such as {"ENABLE_CPU_PINNING": False}, which win over what this engine sets to keep float32 exact.
    """

    stages = MappingProxyType(
        {
            "onnx": "the model that the library is given",
            "ir": "the same in OpenVINO's IR (XML), as the library reads it",
            "runtime": "the model that it runs, after fusions, as XML",
            "execution": "the operations of that, a line each, with their kernels",
        }
    )

    def __init__(self, options: CompileOptions) -> None:
        extra = options.extra
        unknown = sorted(set(extra) - set(_OPTIONS))
        if unknown:
            hint = nearest(unknown[0], _OPTIONS)
            raise OptionError(f"openvino: unknown option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}{hint}")
        self.config: dict[str, Any] = dict(_toolkit.EXACT)
        if options.threads is not None:
            self.config["INFERENCE_NUM_THREADS"] = options.threads
        streams = extra.get("streams")
        if streams is not None:
            if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
                raise OptionError(f"openvino: option 'streams' is {streams!r}; it takes a positive integer")
            self.config["NUM_STREAMS"] = streams
        try:
            self.config.update(extra.get("config", {}))
        except (TypeError, ValueError):
            raise OptionError(f"openvino: option 'config' is {extra['config']!r}; it takes a mapping") from None
        if self.config.get("INFERENCE_PRECISION_HINT") == "f16" and not _toolkit.computes_in_float16():
            raise EngineUnavailableError(
                "openvino: INFERENCE_PRECISION_HINT is 'f16', but this processor has no arithmetic of float16, and the "
                "library would compute in bfloat16: ask for 'bf16'"
            )

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        """A compiled model of `function`. Raises CompileError with the library's own words."""
        m = _exported(function)
        try:
            compiled = _toolkit.compile_model(m.model.SerializeToString(), m.weights, self.config)
            return OpenVinoExecutable(compiled, entry_params, return_params, m.inputs, m.outputs, m.weights)
        except Exception as e:
            why = _toolkit.first_line(e)
            raise CompileError(f"openvino: function {function.name!r} does not compile: {why}") from e

    def as_text(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
        stage: str,
    ) -> str:
        """The model that the library is given, or what it makes of it; else what the executable shows."""
        if stage not in ("onnx", "ir", "runtime"):
            return super().as_text(function, entry_params, return_params, aliases, stage)
        m = _exported(function)
        if stage == "onnx":
            return as_onnx_text(m.model)
        try:
            return _toolkit.xml(m.model.SerializeToString(), m.weights, self.config if stage == "runtime" else None)
        except Exception as e:
            why = _toolkit.first_line(e)
            raise CompileError(f"openvino: function {function.name!r} does not compile: {why}") from e

    def load(self, blob: bytes) -> Executable:
        """The executable that `serialize` gave `blob` for. Raises CompileError where it does not fit."""
        try:
            return load_executable(blob, self.config)
        except XRTError:
            raise
        except Exception as e:
            raise CompileError(f"openvino: a serialised executable does not load: {_toolkit.first_line(e)}") from e


def _exported(function: Function) -> OnnxModel:
    function = without_missing_bounds(function)
    return onnx_model(function, engine="openvino", newest_opset=NEWEST, location=_toolkit.location)
