"""Loss functions by name, for models that output scores or predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import GradientError, OptionError
from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of scores (N, C, ...) and integer labels (N, ...)."""
    made: Tensor = ops.SoftmaxCrossEntropyLoss(scores, labels, reduction="mean", outputs=1)
    return made


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference. Raises GradientError for shapes that are not equal: they would be broadcast."""
    if prediction.shape is not None and target.shape is not None and prediction.shape != target.shape:
        raise GradientError(
            f"loss='mse': the prediction is of shape {list(prediction.shape)}, the target of {list(target.shape)}; "
            f"give the target that shape: target.reshape({tuple(prediction.shape)})"
        )
    off = prediction - target.astype(prediction.dtype)  # integers, or float64 of NumPy, would widen the whole step
    return (off * off).mean()


LOSSES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({"cross_entropy": cross_entropy, "mse": mse})


def loss_named(loss: Any, outputs: Sequence[str] | None = None) -> Any:
    """Return the function of a name in `LOSSES`; a function, a number, None or the name of an output unchanged.

    outputs: names of the model's outputs, None if not known yet. Raises OptionError for anything else.
    """
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    known = outputs is None or not isinstance(loss, str) or loss in outputs
    if known and (loss is None or callable(loss) or isinstance(loss, str | int)):
        return loss
    if not known and outputs is not None:
        close = get_close_matches(loss, [*LOSSES, *outputs], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise OptionError(
            f"loss={loss!r}: {hint}it takes a function, one of {', '.join(LOSSES)}, or an output: {', '.join(outputs)}"
        )
    raise OptionError(f"loss={loss!r}: it takes a function, one of {', '.join(LOSSES)}, or an output's name or number")
