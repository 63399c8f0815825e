"""The ONNX Runtime engine: clusters as sessions on the CPU or a GPU, for inference and a training's forward parts."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from xrt_core import hookimpl
from xrt_core.engine import cuda
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support, Tolerance
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node

if TYPE_CHECKING:
    from xrt_core.ir.operator_set import OperatorSet
    from xrt_onnxruntime.compiler import OnnxRuntimeCompiler
    from xrt_onnxruntime.custom_ops import CustomOps

__all__ = ["OnnxRuntimeEngine", "register_custom_ops"]
__version__ = "0.1.0"
_INSTALL: Final = "pip install -U 'onnxruntime>=1.24.1'"
NATIVE: Final = tuple(
    f"com.microsoft.{op}"
    for op in (
        "Attention", "DecoderMaskedMultiHeadAttention", "GatherBlockQuantized", "GroupQueryAttention",
        "LinearAttention", "MatMulBnb4", "MatMulNBits", "MoE", "MultiHeadAttention", "QMoE", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )
)  # fmt: skip
"""Operators of its own domain that ONNX Runtime does not put together again from their lowering, and is exact in."""


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime's CPU, CUDA and TensorRT providers as an engine. Importing and constructing it does not import ONNX
    Runtime."""

    name = "onnxruntime"
    devices = ("cpu", "cuda")
    array_families = ("cupy",)
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 0, "inference": 30})
    variables = ("ORT_DISABLE_TELEMETRY",)

    dynamic_dims = "any"
    open_shapes = "any"
    checks_indices = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")
    native_operators = NATIVE

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

        reason = why_not(node, on_cpu=device.startswith("cpu"))
        return Support.yes() if reason is None else Support.no(reason)

    def compiler(self, device: str, options: CompileOptions) -> OnnxRuntimeCompiler:
        """A compiler for "cpu", "cuda:0", ... Raises EngineUnavailableError for a device that is not here."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"onnxruntime cannot be used: {status.reason}; {status.remedy}")
        here = {"cpu:0": None, "cpu": None} | {"cuda": 0} | {f"cuda:{i}": i for i in range(len(status.devices))}
        if device not in here or (here[device] is not None and f"cuda:{here[device]}" not in status.devices):
            drives = ", ".join(status.devices)
            raise EngineUnavailableError(f"onnxruntime: no device {device!r} here; this engine drives {drives}")
        from xrt_onnxruntime.compiler import OnnxRuntimeCompiler

        return OnnxRuntimeCompiler(options, here[device])

    def tolerance_with(self, options: CompileOptions) -> Mapping[str, Tolerance]:
        """That of TF32 on a GPU, where it is asked for, and with TensorRT's provider."""
        from xrt_onnxruntime.compiler import tolerance_of

        return tolerance_of(options, device=len(_probe().devices) > 1)

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of ONNX Runtime, and the processor's instruction set."""
        from xrt_onnxruntime import _toolkit

        where = "" if device.startswith("cpu") else f" {device.partition(':')[0]}"
        return f"xrt-onnxruntime {__version__} {_toolkit.fingerprint()}{where}"

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


@hookimpl
def xrt_open_operators(library: str, operators: Collection[tuple[str, str]]) -> list[OperatorSet]:
    """What a custom-operator library of ONNX Runtime has of these."""
    status = _probe()
    if not status.available:
        raise EngineUnavailableError(f"custom operators of {library!r}: {status.reason}; {status.remedy}")
    from xrt_onnxruntime import custom_ops

    return custom_ops.open_operators(library, operators)


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
    gpus = cuda.count() if _toolkit.gpu_providers() else 0  # a build for GPUs may be where there is none
    return EngineStatus(True, _toolkit.version(), (*(f"cuda:{i}" for i in range(gpus)), "cpu"))
