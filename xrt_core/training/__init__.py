"""Training: gradients built in the IR, variables and their updates, and the module that takes steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xrt_core.training.reverse import gradients, stop_gradient
    from xrt_core.training.registry import composition, gradient, no_gradient

__all__ = ["composition", "gradient", "gradients", "no_gradient", "stop_gradient"]

_HOME: Final = {
    "composition": "registry",
    "gradient": "registry",
    "gradients": "reverse",
    "no_gradient": "registry",
    "stop_gradient": "reverse",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
