"""The Toy engine: a whole engine to learn from, with CUDA kernels written in numba; it also runs without a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import TensorType

if TYPE_CHECKING:
    from xrt_toy.compiler import ToyGraphCompiler

__all__ = ["ToyEngine"]
__version__ = "0.1.0"
_INSTALL: Final = "pip install 'xrt-toy[cuda13]' (with a driver for CUDA 12: [cuda12])"


class ToyEngine(Engine):
    """numba-CUDA as an engine. Importing and constructing it does not import numba."""

    name = "toy"
    devices = ("cuda",)
    variables = ("NUMBA_ENABLE_CUDASIM",)
    array_families = ("cupy", "torch", "jax", "other")
    asynchronous = True
    automatic = False  # it is there to be read: it takes part where somebody asks for it by name

    @property
    def conformance(self) -> Mapping[str, Any]:  # type: ignore[override]  # it depends on the GPU
        """What the conformance kit may expect."""
        simulated = "simulator" in _probe().version
        return {"serialisation": False, "in_place": True, "toolkit": ("numba",), "simulated": simulated}

    def probe(self) -> EngineStatus:
        """numba's version and the GPUs, or the simulator; or why there is neither."""
        return _probe()

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether every tensor around `node` is static and a kernel takes it."""
        status = _probe()
        if not status.available:
            return Support.no(status.reason)
        _load_kernels()
        for value in (*node.inputs, *node.outputs):
            if value is not None and not (isinstance(value.type, TensorType) and value.type.is_static):
                found = value.type or "unknown"
                return Support.no(f"{value.name!r} of {node.operator} is {found}: toy wants static shapes")
        return op_kernels.supports("toy", node, device, phase)

    def compiler(self, device: str, options: CompileOptions) -> ToyGraphCompiler:
        """A compiler for "cuda:0", ... Raises EngineUnavailableError where the device is not there."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"toy cannot be used: {status.reason}; {status.remedy}")
        _load_kernels()
        from xrt_toy.compiler import ToyGraphCompiler

        return ToyGraphCompiler(device, options)

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of numba, and the device's model."""
        from xrt_toy import _toolkit

        model = _toolkit.device_model(_toolkit.device_index(device))
        return f"xrt-toy {__version__} numba {_toolkit.version()} {model}"

    def prepare(self) -> None:
        """Import numba and the kernels now."""
        if _probe().available:
            _load_kernels()
            importlib.import_module("xrt_toy.compiler")


@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [ToyEngine]


@functools.cache
def _load_kernels() -> None:
    importlib.import_module("xrt_toy.kernels")  # registers them


@functools.cache
def _probe() -> EngineStatus:
    try:
        from xrt_toy import _toolkit
    except Exception as e:  # a missing or broken installation raises what it likes
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] in ("numba", "numba_cuda")
        reason = "numba-cuda is not installed" if missing else f"numba.cuda does not import: {type(e).__name__}: {e}"
        return EngineStatus(False, reason=reason, remedy=_INSTALL)
    reason = _toolkit.why_unusable()
    if reason:
        remedy = "unset NUMBA_ENABLE_CUDASIM, or set it to 1 before numba is imported"
        return EngineStatus(False, _toolkit.version(), reason=reason, remedy=remedy)
    return EngineStatus(True, _toolkit.version(), _toolkit.devices())
