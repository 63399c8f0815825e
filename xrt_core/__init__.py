"""XRT (X-Runtime): makes ML computation graphs run faster by handing their subgraphs to compute engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xrt_core import errors, training
    from xrt_core.compiler.passes import register_pass, unregister_pass
    from xrt_core.engine.converters import register_array_type
    from xrt_core.engine.manager import register_converter
    from xrt_core.errors import (
        BrokenContextError,
        CacheError,
        CheckpointError,
        CompileError,
        ConverterError,
        DeviceNotFoundError,
        EngineError,
        EngineNotFoundError,
        EngineUnavailableError,
        ExecutionError,
        ExportError,
        GradientError,
        GraphError,
        InputError,
        InternalError,
        ModelLoadError,
        OptionError,
        PassError,
        PluginError,
        QuantizationError,
        RegistrationError,
        ShapeError,
        TraceError,
        TrainingError,
        UnsupportedError,
        XRTError,
    )
    from xrt_core.events import FallbackEvent, subscribe
    from xrt_core.frontends import ops
    from xrt_core.frontends.custom_op import custom_op
    from xrt_core.frontends.graph import Graph, trace
    from xrt_core.frontends.onnx_export import export_model
    from xrt_core.frontends.onnx_import import import_model
    from xrt_core.frontends.ops import shard
    from xrt_core.frontends.tracing import device, power_by_engine
    from xrt_core.generation.generate import generate
    from xrt_core.ir import sharding as sbp
    from xrt_core.ir.sharding import Mesh
    from xrt_core.ir.symbols import Symbol
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule, warmup
    from xrt_core.options import process_config as config
    from xrt_core.options.process_config import init_subblock_optimizer
    from xrt_core.plugins import hookimpl
    from xrt_core.profiling import profile
    from xrt_core.progress import show_progress
    from xrt_core.quantization.calibration import ptq_calibration_mode
    from xrt_core.reports import assert_offloaded
    from xrt_core.training import optimizer as optim
    from xrt_core.training.variables import Variable

__all__ = [
    "BrokenContextError",
    "CacheError",
    "CheckpointError",
    "CompileError",
    "ConverterError",
    "DeviceNotFoundError",
    "EngineError",
    "EngineNotFoundError",
    "EngineUnavailableError",
    "ExecutionError",
    "ExportError",
    "FallbackEvent",
    "GradientError",
    "Graph",
    "GraphError",
    "InputError",
    "InternalError",
    "Mesh",
    "ModelLoadError",
    "OptionError",
    "PassError",
    "PluginError",
    "QuantizationError",
    "RegistrationError",
    "ShapeError",
    "Symbol",
    "TensorType",
    "TraceError",
    "TrainingError",
    "UnsupportedError",
    "Variable",
    "XRTError",
    "XRTModule",
    "__version__",
    "assert_offloaded",
    "config",
    "custom_op",
    "device",
    "errors",
    "export_model",
    "generate",
    "hookimpl",
    "import_model",
    "init_subblock_optimizer",
    "ops",
    "optim",
    "power_by_engine",
    "profile",
    "ptq_calibration_mode",
    "register_array_type",
    "register_converter",
    "register_pass",
    "sbp",
    "shard",
    "sharding",
    "show_progress",
    "subscribe",
    "trace",
    "training",
    "unregister_pass",
    "warmup",
]

# Nothing is imported before it is used: `import xrt_core` costs next to nothing. What is not listed here is an error.
_HOME: Final = {
    "FallbackEvent": "events",
    "Graph": "frontends.graph",
    "Mesh": "ir.sharding",
    "Symbol": "ir.symbols",
    "TensorType": "ir.types",
    "Variable": "training.variables",
    "XRTModule": "module",
    "assert_offloaded": "reports",
    "custom_op": "frontends.custom_op",
    "device": "frontends.tracing",
    "export_model": "frontends.onnx_export",
    "generate": "generation.generate",
    "hookimpl": "plugins",
    "import_model": "frontends.onnx_import",
    "init_subblock_optimizer": "options.process_config",
    "power_by_engine": "frontends.tracing",
    "profile": "profiling",
    "ptq_calibration_mode": "quantization.calibration",
    "register_array_type": "engine.converters",
    "register_converter": "engine.manager",
    "register_pass": "compiler.passes",
    "shard": "frontends.ops",
    "show_progress": "progress",
    "subscribe": "events",
    "trace": "frontends.graph",
    "unregister_pass": "compiler.passes",
    "warmup": "module",
}
_MODULES: Final = {
    "config": "options.process_config",
    "errors": "errors",
    "ops": "frontends.ops",
    "optim": "training.optimizer",
    "sbp": "ir.sharding",
    "sharding": "sharding",
    "training": "training",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    elif name in __all__:
        found = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    else:
        from xrt_core.errors import nearest

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
