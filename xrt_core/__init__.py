"""XRT (X-Runtime): makes ML computation graphs run faster by handing their subgraphs to compute engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xrt_core import config, errors
    from xrt_core.frontends import Graph, import_model, ops, power_by_engine, trace
    from xrt_core.ir.types import TensorType
    from xrt_core.module import XRTModule

__all__ = [
    "Graph",
    "TensorType",
    "XRTModule",
    "__version__",
    "config",
    "errors",
    "import_model",
    "ops",
    "power_by_engine",
    "trace",
]

# Nothing is imported before it is used: `import xrt_core` costs next to nothing.
_HOME: Final = {
    "Graph": "frontends",
    "TensorType": "ir.types",
    "XRTModule": "module",
    "import_model": "frontends",
    "ops": "frontends",
    "power_by_engine": "frontends",
    "trace": "frontends",
}
_MODULES: Final = ("config", "errors")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
