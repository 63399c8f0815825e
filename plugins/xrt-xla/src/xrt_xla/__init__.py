"""The XLA engine: compiles clusters through JAX, for CPU, CUDA and TPU, for inference and training."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from xrt_core import hookimpl
from xrt_core.engine.contract import CompileOptions, Engine, EngineStatus, Phase, Support
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import EngineUnavailableError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import STRING, SequenceType, TensorType, dtype_name
from xrt_xla import _installed

if TYPE_CHECKING:
    from xrt_xla.compiler import XlaGraphCompiler

__all__ = ["XlaEngine"]
__version__ = "0.1.0"
_INSTALL: Final = "pip install -U 'jax>=0.8.3' (with CUDA: 'xrt-xla[cuda13]')"

# XLA's CPU backend aborts the process on some programs over 2-bit integers (a concatenation is one), so only these
# operators, which were tried one by one, may see them.
_TWO_BIT = frozenset(("int2", "uint2"))
_TWO_BIT_OPERATORS = frozenset(
    ("Cast", "CastLike", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Slice", "Squeeze",
     "Transpose", "Unsqueeze")
)  # fmt: skip


class XlaEngine(Engine):
    """JAX's compiler as an engine. Importing and constructing it does not import JAX."""

    name = "xla"
    devices = ("cpu", "cuda", "tpu")
    priority: ClassVar[Mapping[Phase, int]] = MappingProxyType({"train": 100, "inference": 50})
    switch = "use_xla_jit"
    variables = ("JAX_PLATFORMS", "XLA_FLAGS")
    array_families = ("jax",)
    asynchronous = True
    meshes = True
    shares_weights = True

    def probe(self) -> EngineStatus:
        """Version and devices of JAX, or why it cannot be used."""
        return _probe()

    def probe_installed(self) -> EngineStatus | None:
        """Version and device of JAX where that is the CPU alone."""
        return EngineStatus(True, _installed.library_version(), ("cpu",)) if _installed.finds_one_cpu() else None

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        """Whether every tensor around `node` is static and of a dtype XLA has, and a kernel takes it."""
        _load_kernels()
        for value in node.inputs:
            if value is not None and (reason := _refuse(value, node, "input")):
                return Support.no(reason)
        for value in node.outputs:
            if value is not None and (reason := _refuse(value, node, "output")):
                return Support.no(reason)
        found = op_kernels.supports("xla", node, device, phase)
        if not found.ok or not node.attributes or not node.subgraphs:
            return found
        for inner in (n for body in node.subgraphs for n in body.nodes):
            if not (said := self.supports(inner, device, phase)).ok:
                return Support.no(f"in the body of {node.operator}: {said.reason}")
        return found

    def compiler(self, device: str, options: CompileOptions) -> XlaGraphCompiler:
        """A compiler for "cpu", "cuda:0", ... Raises EngineUnavailableError where the device is not there."""
        status = _probe()
        if not status.available:
            raise EngineUnavailableError(f"xla cannot be used: {status.reason}; {status.remedy}")
        _load_kernels()
        from xrt_xla.compiler import XlaGraphCompiler

        return XlaGraphCompiler(device, options)

    def fingerprint(self, device: str) -> str:
        """Versions of this package and of JAX, the device's model, and on a CPU its instruction set."""
        if device in ("cpu", "cpu:0") and _installed.finds_one_cpu():
            return f"xrt-xla {__version__} {_installed.of_cpu()}"
        from xrt_xla import _toolkit

        return f"xrt-xla {__version__} {_toolkit.fingerprint_of(_toolkit.device_named(device))}"

    def prepare(self) -> None:
        """Import JAX and the kernels now."""
        if _probe().available:
            _load_kernels()
            importlib.import_module("xrt_xla.compiler")


@hookimpl
def xrt_engines() -> list[type[Engine]]:
    """The engine of this package."""
    return [XlaEngine]


@functools.cache
def _load_kernels() -> None:
    importlib.import_module("xrt_xla.kernels")  # registers them


@functools.cache
def _probe() -> EngineStatus:
    try:
        from xrt_xla import _toolkit
    except ImportError as e:
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] in ("jax", "jaxlib")
        reason = "JAX is not installed" if missing else f"JAX does not import: {e}"
        return EngineStatus(False, reason=reason, remedy=_INSTALL)
    except Exception as e:  # a broken installation raises what it likes
        return EngineStatus(False, reason=f"JAX does not import: {type(e).__name__}: {e}", remedy=_INSTALL)
    try:
        found = _toolkit.devices()
    except Exception as e:
        return EngineStatus(
            False, _installed.library_version(), reason=f"JAX finds no device: {e}", remedy="check JAX_PLATFORMS"
        )
    if not found:
        return EngineStatus(
            False, _installed.library_version(), reason="JAX finds no device", remedy="check JAX_PLATFORMS"
        )
    return EngineStatus(True, _installed.library_version(), tuple(found))


def _refuse(value: Value, node: Node, what: str) -> str | None:
    """Why XLA cannot hold `value`, or None."""
    t = value.type
    if type(t) is not TensorType:
        if isinstance(t, SequenceType):
            return f"{what} {value.name!r} of {node.operator} is a sequence; XLA has tensors only"
        return f"{what} {value.name!r} of {node.operator} has type {t or 'unknown'}; XLA has dense tensors only"
    dtype, shape = t.dtype, t.shape
    if dtype is None or shape is None:
        return f"{what} {value.name!r} of {node.operator} is {t}: dtype and rank must be known"
    for d in shape:
        if type(d) is not int:
            return f"{what} {value.name!r} of {node.operator} is {t}: every dimension must be known"
    kind = dtype.kind
    if kind == "V":
        if dtype.name in _TWO_BIT and node.op_type not in _TWO_BIT_OPERATORS:
            return f"XLA cannot run {node.operator} on {dtype.name}"
    elif dtype == STRING or kind not in "biufc":
        return f"{what} {value.name!r} of {node.operator} is {dtype_name(dtype)}; XLA has numbers only"
    return None
