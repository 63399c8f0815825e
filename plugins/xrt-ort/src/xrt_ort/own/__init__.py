"""The library's API where the library is not installed: the same names, on models of XRT.

What needs the library itself is not there: sparse tensors, adapters, compilation to files, custom operators, and the
folders quantization, tools, transformers and training.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from xrt_ort.own import kinds
from xrt_ort.own.kinds import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    ModelMetadata,
    NodeArg,
    OrtAllocatorType,
    OrtMemoryInfo,
    OrtMemType,
    RunOptions,
    SessionOptions,
)
from xrt_ort.own.session import InferenceSession
from xrt_ort.own.values import IOBinding, OrtDevice, OrtDeviceVendorId, OrtValue

__version__ = "1.32.0"  # of the API

__all__ = [
    "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "ModelMetadata",
    "NodeArg", "OrtAllocatorType", "OrtDevice", "OrtDeviceVendorId", "OrtMemType", "OrtMemoryInfo", "OrtValue",
    "RunOptions", "SessionOptions", "disable_telemetry_events", "enable_telemetry_events", "get_all_providers",
    "get_available_providers", "get_build_info", "get_device", "get_version_string", "set_default_logger_severity",
    "set_default_logger_verbosity", "set_seed",
]  # fmt: skip


def get_available_providers() -> list[str]:
    """The providers beside XRT's."""
    return ["CPUExecutionProvider"]


get_all_providers = get_available_providers


def get_device() -> str:
    """The device for which the library was made."""
    return "CPU"


def get_version_string() -> str:
    """The version of the API."""
    return __version__


def get_build_info() -> str:
    """What answers."""
    return f"XRT's implementation of the API of onnxruntime {__version__}"


def set_default_logger_severity(severity: int) -> None:
    """Set the level of the logger "xrt": 0 verbose, 1 info, 2 warning, 3 error, 4 fatal."""
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    logging.getLogger("xrt").setLevel(levels[min(max(int(severity), 0), 4)])


def set_default_logger_verbosity(verbosity: int) -> None:
    """Accepted: the logger has no levels below debug."""


def set_seed(seed: int) -> None:
    """Set the seed of NumPy, with which XRT's host draws."""
    import numpy as np

    np.random.seed(seed % 2**32)


def enable_telemetry_events() -> None:
    """Accepted: XRT sends nothing."""


def disable_telemetry_events() -> None:
    """Accepted: XRT sends nothing."""


def _state() -> dict[str, Any]:
    found = {n: getattr(kinds, n) for n in dir(kinds) if isinstance(getattr(kinds, n), type) and n[0].isupper()}
    return {**found, **{n: globals()[n] for n in __all__}}


capi = SimpleNamespace(
    onnxruntime_pybind11_state=SimpleNamespace(**_state()),
    _pybind_state=SimpleNamespace(**_state()),
    onnxruntime_inference_collection=SimpleNamespace(**_state()),
)


def modules(shim: ModuleType) -> dict[str, ModuleType]:
    """The modules that `import onnxruntime...` finds, by name. shim: for the name itself."""
    name = "onnxruntime"
    shim.__path__ = []
    made: dict[str, ModuleType] = {name: shim}
    package = ModuleType(f"{name}.capi")
    package.__path__ = []
    made[package.__name__] = package
    for child in ("onnxruntime_pybind11_state", "_pybind_state", "onnxruntime_inference_collection"):
        module = ModuleType(f"{name}.capi.{child}")
        module.__dict__.update(_state())
        setattr(package, child, module)
        made[module.__name__] = module
    shim.capi = package  # type: ignore[attr-defined]
    return made
