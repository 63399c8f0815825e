"""The OpenVINO engine: clusters as compiled models on the CPU, for inference."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support, Tolerance
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node

if TYPE_CHECKING:
    from xrt_openvino.compiler import OpenVinoCompiler

__all__ = ["OpenVinoEngine"]
__version__ = "0.1.0"
_INSTALL: Final = "pip install -U 'openvino>=2026.4'"
_HINTS: Final = MappingProxyType({"bfloat16": "bf16", "float16": "f16"})
"""How the library calls what it computes float32 in, where its own default or an option says so."""


class OpenVinoEngine(Engine):
    """OpenVINO's CPU plugin as an engine. Importing and constructing it does not import OpenVINO."""

    name = "openvino"
    devices = ("cpu",)
    dynamic_dims = "any"
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 0, "inference": 20})
    reduced_precisions: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            dtype: {"config": {"INFERENCE_PRECISION_HINT": hint, "EXECUTION_MODE_HINT": "PERFORMANCE"}}
            for dtype, hint in _HINTS.items()
        }
    )

    def probe(self) -> EngineStatus:
        """The library's version, or why it cannot be used."""
        return _probe()

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether the library compiles `node` and computes what ONNX says; tried once per kind of node."""
        if phase != "inference":
            return Support.no("openvino is for inference only")
        status = _probe()
        if not status.available:
            return Support.no(status.reason)
        from xrt_openvino.support import why_not

        reason = why_not(node)
        return Support.yes() if reason is None else Support.no(reason)

    def compiler(self, device: str, options: CompileOptions) -> OpenVinoCompiler:
        """A compiler for "cpu". Raises EngineUnavailableError for another device."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"openvino cannot be used: {status.reason}; {status.remedy}")
        if device not in ("cpu", "cpu:0"):
            raise EngineUnavailableError(f"openvino: no device {device!r} here; this engine drives cpu")
        from xrt_openvino.compiler import OpenVinoCompiler

        return OpenVinoCompiler(options)

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        """That of bfloat16 or float16 where the option `config` asks for computing in it."""
        config = options.extra.get("config")
        hint = config.get("INFERENCE_PRECISION_HINT") if isinstance(config, Mapping) else None
        dtype: Literal["bfloat16", "float16"]
        for dtype in ("bfloat16", "float16"):
            if hint == _HINTS[dtype]:
                why = f"the option 'config' asks for computing in {dtype}"
                return {"float32": Tolerance(0.0, 0.0, reason=why, computed_in=dtype)}
        return self.tolerance

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of OpenVINO, and the processor's instruction set."""
        from xrt_openvino import _toolkit

        return f"xrt-openvino {__version__} {_toolkit.fingerprint()}"

    def prepare(self) -> None:
        """Import OpenVINO now."""
        if _probe().available:
            importlib.import_module("xrt_openvino.compiler")
            importlib.import_module("xrt_openvino.support")


@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [OpenVinoEngine]


@functools.cache
def _probe() -> EngineStatus:
    try:
        from xrt_openvino import _toolkit
    except Exception as e:  # a missing or broken installation raises what it likes
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] == "openvino"
        why = "OpenVINO is not installed" if missing else f"OpenVINO does not import: {type(e).__name__}: {e}"
        return EngineStatus(False, reason=why, remedy=_INSTALL)
    why = _toolkit.why_unusable()
    if why:
        return EngineStatus(False, _toolkit.version(), reason=why, remedy=_INSTALL)
    return EngineStatus(True, _toolkit.version(), ("cpu",))
