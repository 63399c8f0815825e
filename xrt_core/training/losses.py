"""Losses by name, for models that give scores or predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import OptionError
from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of scores (N, C, ...) and integer labels (N, ...)."""
    made: Tensor = ops.SoftmaxCrossEntropyLoss(scores, labels, reduction="mean", outputs=1)
    return made


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference."""
    off = prediction - target
    return (off * off).mean()


LOSSES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({"cross_entropy": cross_entropy, "mse": mse})


def loss_named(loss: Any) -> Any:
    """The function behind a name of `LOSSES`; a function, a number, None or the name of an output as it is."""
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    if loss is None or callable(loss) or isinstance(loss, str | int):
        return loss
    raise OptionError(f"loss={loss!r}: it takes a function, one of {', '.join(LOSSES)}, or an output's name or number")
