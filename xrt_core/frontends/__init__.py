"""Graph import and export: tracing of Python classes, and ONNX models. Submodules are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xrt_core.frontends import ops
    from xrt_core.frontends.graph import Graph, trace
    from xrt_core.frontends.onnx_import import import_model
    from xrt_core.frontends.tensor import Tensor
    from xrt_core.frontends.tracing import power_by_engine

__all__ = ["Graph", "Tensor", "import_model", "ops", "power_by_engine", "trace"]

_HOME: Final = {
    "Graph": "graph",
    "Tensor": "tensor",
    "import_model": "onnx_import",
    "power_by_engine": "tracing",
    "trace": "graph",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module(f"{__name__}.ops")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
