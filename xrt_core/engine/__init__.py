"""The engine SDK: what an engine package imports, and the engines of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from xrt_core.engine.contract import (
    API_VERSION,
    CompileOptions,
    Engine,
    EngineStatus,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    Phase,
    RunOptions,
    Support,
    Tolerance,
)
from xrt_core.engine.device_kinds import (
    DeviceArrays,
    DeviceKind,
    DeviceKindListing,
    Streams,
    device_kind,
    device_kinds,
    register_device_kind,
)
from xrt_core.engine.op_kernels import (
    OpKernel,
    OpKernelRegistry,
    op_kernel,
    op_kernels,
    register_portable_kernels,
    register_standard_kernels,
)

if TYPE_CHECKING:
    from xrt_core.engine.manager import EngineListing, EngineManager
    from xrt_core.plugins import hookimpl

__all__ = [
    "API_VERSION",
    "CompileOptions",
    "DeviceArrays",
    "DeviceKind",
    "DeviceKindListing",
    "Engine",
    "EngineListing",
    "EngineManager",
    "EngineStatus",
    "Executable",
    "Function",
    "GraphCompiler",
    "InputOutputAlias",
    "OpKernel",
    "OpKernelRegistry",
    "Parameter",
    "Phase",
    "RunOptions",
    "Streams",
    "Support",
    "Tolerance",
    "device_kind",
    "device_kinds",
    "engines",
    "hookimpl",
    "op_kernel",
    "op_kernels",
    "register_device_kind",
    "register_engine",
    "register_portable_kernels",
    "register_standard_kernels",
]

engines: EngineManager
"""The engines of this process."""
_LAZY: Final = {
    "hookimpl": "plugins",
    "EngineListing": "engine.manager",
    "EngineManager": "engine.manager",
    "engines": "engine.manager",
}


def register_engine(engine: type[Engine]) -> type[Engine]:
    """Add an engine of this process, beside the installed ones; usable as a class decorator.

    Raises RegistrationError for a class that breaks the contract, or a name that is taken.
    """
    from xrt_core.engine.manager import engines

    return engines.register(engine)


def __getattr__(name: str) -> Any:
    # the manager stands on pluggy, which an engine package does not need in order to be imported
    if name in _LAZY:
        from importlib import import_module

        found: Any = getattr(import_module(f"xrt_core.{_LAZY[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, found)
