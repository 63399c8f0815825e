"""The library's API where the library is not installed: the same names, on models of XRT.

What needs the library itself is not there: sparse tensors, adapters, compilation to files, custom operators, its
private names, and the folders quantization, tools, transformers and training.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from xrt_ort.own import arguments, backend, kinds
from xrt_ort.own.kinds import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    ModelMetadata,
    NodeArg,
    OrtAllocatorType,
    OrtArenaCfg,
    OrtDeviceMemoryType,
    OrtMemoryInfo,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    RunOptions,
    SessionOptions,
)
from xrt_ort.own.session import InferenceSession, global_threads
from xrt_ort.own.values import IOBinding, OrtDevice, OrtDeviceVendorId, OrtValue

__version__ = "1.32.0"  # of the API

__all__ = [
    "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "ModelMetadata",
    "NodeArg", "OrtAllocatorType", "OrtArenaCfg", "OrtDevice", "OrtDeviceMemoryType", "OrtDeviceVendorId",
    "OrtMemType", "OrtMemoryInfo", "OrtMemoryInfoDeviceType", "OrtValue", "RunOptions", "SessionOptions", "backend",
    "create_and_register_allocator", "disable_telemetry_events", "enable_telemetry_events", "get_all_providers",
    "get_available_providers", "get_build_info", "get_device", "get_version_string", "preload_dlls",
    "set_default_logger_callback",
    "set_default_logger_severity", "set_default_logger_verbosity", "set_global_thread_pool_sizes", "set_seed",
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
    return f"ORT Build Info: XRT's implementation of the API of onnxruntime {__version__}"


_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def set_default_logger_severity(severity: int) -> None:
    """Set the level of the logger "xrt": 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.

    Raises TypeError for what is no number.
    """
    if not isinstance(severity, int):
        raise TypeError(f"severity={severity!r}: it is 0 to 4")
    logging.getLogger("xrt").setLevel(_LEVELS[min(max(severity, 0), 4)])


class _Caller(logging.Handler):
    """Gives each message to a function, as (severity, category, id, place, text)."""

    def __init__(self, callback: Callable[[int, str, str, str, str], Any]) -> None:
        super().__init__()
        self._callback = callback

    def emit(self, record: logging.LogRecord) -> None:
        """Call the function; what it raises is written to stderr, and no concern of the program."""
        severity = sum(record.levelno > level for level in _LEVELS[:-1])
        try:
            self._callback(severity, "xrt", "", f"{record.filename}:{record.lineno}", record.getMessage())
        except Exception as e:
            print(f"exception ignored in a callback for messages: {e!r}", file=sys.stderr)


def set_default_logger_callback(callback: Any, severity: int = 2) -> None:
    """Give messages of this severity and above to a function instead of the handlers of the logger "xrt".

    callback: takes (severity, category, id, place, text); None: the handlers again. Raises RuntimeError for what is no
    function, and for a severity that is not 0 to 4.
    """
    if callback is not None and not callable(callback):
        raise RuntimeError("callback must be a callable or None")
    if severity not in range(5):
        raise RuntimeError(f"severity={severity!r}: it is 0 to 4")
    logger = logging.getLogger("xrt")
    for handler in [h for h in logger.handlers if isinstance(h, _Caller)]:
        logger.removeHandler(handler)
    if callback is not None:
        logger.addHandler(_Caller(callback))
        set_default_logger_severity(severity)


def set_default_logger_verbosity(verbosity: int) -> None:
    """Accepted: the logger has no levels below debug."""


def set_seed(seed: int) -> None:
    """Set the seed of NumPy, with which XRT's host draws."""
    import numpy as np

    np.random.seed(seed % 2**32)


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """Accepted: engines load what they need."""


def create_and_register_allocator(mem_info: OrtMemoryInfo, arena_cfg: OrtArenaCfg | None = None) -> None:
    """Accepted: NumPy and the engines allocate."""


def set_global_thread_pool_sizes(intra_op_num_threads: int, inter_op_num_threads: int) -> None:
    """Let sessions made from now on share the threads of the process: they need use_per_session_threads=False."""
    global_threads.shared = True


def enable_telemetry_events() -> None:
    """Accepted: XRT sends nothing."""


def disable_telemetry_events() -> None:
    """Accepted: XRT sends nothing."""


def _state() -> dict[str, Any]:
    names = {"check_and_normalize_provider_args": arguments.check_and_normalize_provider_args}
    names["get_default_session_options"] = SessionOptions
    found = {n: getattr(kinds, n) for n in dir(kinds) if isinstance(getattr(kinds, n), type) and n[0].isupper()}
    return {**found, **names, **{n: globals()[n] for n in __all__}}


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
    made[f"{name}.backend"] = backend
    return made
