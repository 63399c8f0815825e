"""Training: automatic differentiation in the IR, variables, optimizers, and TrainModule, which runs training steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xrt_core.training.autodiff import gradients, stop_gradient
    from xrt_core.training.checkpoint import latest
    from xrt_core.training.module import TrainModule
    from xrt_core.training.optimizer import LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Optimizer
    from xrt_core.training.recomputation import recompute
    from xrt_core.training.registry import composition, gradient, no_gradient
    from xrt_core.training.step import LossScale
    from xrt_core.training.variables import Variable

_HOME: Final = {
    "LAMB": "optimizer",
    "SGD": "optimizer",
    "Adagrad": "optimizer",
    "Adam": "optimizer",
    "AdamW": "optimizer",
    "LossScale": "step",
    "Momentum": "optimizer",
    "Optimizer": "optimizer",
    "TrainModule": "module",
    "Variable": "variables",
    "composition": "registry",
    "gradient": "registry",
    "gradients": "autodiff",
    "latest": "checkpoint",
    "no_gradient": "registry",
    "recompute": "recomputation",
    "stop_gradient": "autodiff",
}

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LossScale",
    "Momentum",
    "Optimizer",
    "TrainModule",
    "Variable",
    "composition",
    "gradient",
    "gradients",
    "latest",
    "no_gradient",
    "recompute",
    "stop_gradient",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
