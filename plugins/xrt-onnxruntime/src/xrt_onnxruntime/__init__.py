"""The ONNX Runtime engine: clusters as sessions on the CPU, for inference and a training's forward parts."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node

if TYPE_CHECKING:
    from xrt_onnxruntime.compiler import OnnxRuntimeCompiler
    from xrt_onnxruntime.custom_ops import CustomOps

__all__ = ["OnnxRuntimeEngine", "register_custom_ops"]
__version__ = "0.1.0"
_INSTALL: Final = "pip install -U 'onnxruntime>=1.23'"


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime's CPU provider as an engine. Importing and constructing it does not import ONNX Runtime."""

    name = "onnxruntime"
    devices = ("cpu",)
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 0, "inference": 30})
    variables = ("ORT_DISABLE_TELEMETRY",)

    def probe(self) -> EngineStatus:
        """The library's version, or why it cannot be used."""
        return _probe()

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether the library makes a session of `node` and computes what ONNX says; tried once per kind of node.

        In training it takes the model's own nodes, which are the same there, and no gradients or updates.
        """
        if node.annotations.phase == "train":
            return Support.no("onnxruntime takes the model's own nodes, no gradients or updates")
        status = _probe()
        if not status.available:
            return Support.no(status.reason)
        from xrt_onnxruntime.support import why_not

        reason = why_not(node)
        return Support.yes() if reason is None else Support.no(reason)

    def compiler(self, device: str, options: CompileOptions) -> OnnxRuntimeCompiler:
        """A compiler for "cpu". Raises EngineUnavailableError for another device."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"onnxruntime cannot be used: {status.reason}; {status.remedy}")
        if device not in ("cpu", "cpu:0"):
            raise EngineUnavailableError(f"onnxruntime: no device {device!r} here; this engine drives cpu")
        from xrt_onnxruntime.compiler import OnnxRuntimeCompiler

        return OnnxRuntimeCompiler(options)

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of ONNX Runtime, and the processor's instruction set."""
        from xrt_onnxruntime import _toolkit

        return f"xrt-onnxruntime {__version__} {_toolkit.fingerprint()}"

    def prepare(self) -> None:
        """Import ONNX Runtime now."""
        if _probe().available:
            importlib.import_module("xrt_onnxruntime.compiler")
            importlib.import_module("xrt_onnxruntime.support")


def register_custom_ops(library: str | os.PathLike[str], domain: str, version: int = 1) -> CustomOps:
    """Make the operators of a custom-operator library known: see `custom_ops.register_custom_ops`."""
    from xrt_onnxruntime import custom_ops

    return custom_ops.register_custom_ops(library, domain, version)


@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [OnnxRuntimeEngine]


@functools.cache
def _probe() -> EngineStatus:
    try:
        from xrt_onnxruntime import _toolkit
    except Exception as e:  # a missing or broken installation raises what it likes
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] == "onnxruntime"
        why = "ONNX Runtime is not installed" if missing else f"ONNX Runtime does not import: {type(e).__name__}: {e}"
        return EngineStatus(False, reason=why, remedy=_INSTALL)
    why = _toolkit.why_unusable()
    if why:
        return EngineStatus(False, _toolkit.version(), reason=why, remedy=_INSTALL)
    return EngineStatus(True, _toolkit.version(), ("cpu",))
