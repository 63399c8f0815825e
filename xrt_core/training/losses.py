"""Losses: functions by name, and how the parameters of a function find a model's outputs and a step's arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np

from xrt_core.errors import GradientError, InputError, OptionError, nearest
from xrt_core.frontends import ops
from xrt_core.frontends.promotion import is_float
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.ir.types import dtype_name
from xrt_core.training.gradient_context import sum_over, where, wide


def cross_entropy(
    scores: Tensor,
    *,
    labels: Tensor,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    class_weights: Any = None,
) -> Tensor:
    """The mean cross-entropy of scores (N, C, ...) and labels: class numbers (N, ...), or probabilities (N, C, ...).

    ignore_index: a label that does not count (None: there is none); if no label counts, the loss is 0. label_smoothing:
    the share of each label that is spread over all classes. class_weights: C numbers by which the samples of a class
    count. The mean is over what counts, by weight (of probabilities: over the samples), as in PyTorch.
    Raises InputError for labels that do not fit the scores, OptionError for options that do not.
    """
    scores, smoothing = wide(scores), float(label_smoothing)
    if not 0.0 <= smoothing < 1.0:
        raise OptionError(f"label_smoothing={label_smoothing!r}: it takes a number of at least 0 and below 1")
    weights = None if class_weights is None else np.asarray(class_weights, np.float64)
    form = scores._value.shape
    classes = form[1] if form is not None and len(form) > 1 else None
    if weights is not None and (weights.ndim != 1 or classes not in (None, weights.size) or not (weights >= 0).all()):
        raise OptionError(f"class_weights: it takes {classes} numbers of at least 0, not {class_weights!r}")
    if is_float(labels.dtype):
        return _of_probabilities(scores, _fitting(scores, labels), smoothing, weights)
    labels = _fitting(scores, labels)
    each = None if weights is None else literal(weights, scores.dtype)
    kept = {} if ignore_index is None else {"ignore_index": int(ignore_index)}
    made: Any = ops.SoftmaxCrossEntropyLoss(
        scores, labels, each, reduction="sum", outputs=2 if smoothing else 1, **kept
    )  # fmt: skip
    total, log_prob = made if smoothing else (made, None)
    counted = None if ignore_index is None else labels != int(ignore_index)
    count: Any = None if counted is None else counted.astype(scores.dtype)
    if each is not None:
        own = ops.Gather(each, labels if counted is None else where(counted, labels, 0))
        count = own if count is None else own * count
    if smoothing:
        spread: Any = log_prob if each is None else log_prob * each.reshape([1, -1, *[1] * (scores.ndim - 2)])
        spread = sum_over(spread, [1], keepdims=False)
        spread = spread if counted is None else where(counted, spread, 0.0)
        total = total * (1.0 - smoothing) - spread.sum() * (smoothing / scores.shape[1])
    if count is None:
        return cast(Tensor, total / ops.Size(labels).astype(scores.dtype))
    count = count.sum()
    return cast(Tensor, total / where(count > 0.0, count, 1.0))


def _of_probabilities(scores: Tensor, labels: Tensor, smoothing: float, weights: np.ndarray | None) -> Tensor:
    labels = labels.astype(scores.dtype)
    if smoothing:
        labels = labels * (1.0 - smoothing) + smoothing / scores.shape[1]
    if weights is not None:
        labels = labels * literal(weights.reshape([1, -1, *[1] * (scores.ndim - 2)]), scores.dtype)
    made: Tensor = ops.LogSoftmax(scores, axis=1) * labels
    return -sum_over(made, [1], keepdims=False).mean()


def _fitting(scores: Tensor, labels: Tensor) -> Tensor:
    """The labels as integers that the operator takes, or as floats. Raises InputError for shapes that do not fit."""
    have, want = labels._value.shape, scores._value.shape
    if have is None or want is None:
        return labels
    if len(want) < 2:
        raise InputError(
            f"loss='cross_entropy': the scores are of shape {list(want)}; they need an axis of classes, (N, C, ...)"
        )
    numbers, shown = (want[0], *want[2:]), list(have)
    if is_float(labels.dtype):
        if tuple(have) == tuple(want):
            return labels
        raise InputError(
            f"loss='cross_entropy': the labels are {dtype_name(labels.dtype)}{shown}; class numbers are integers of "
            f"shape {list(numbers)} (labels.astype('int64')), probabilities floats of shape {list(want)}"
        )
    if tuple(have) == numbers:
        return labels if labels.dtype in (np.int32, np.int64) else labels.astype(np.int64)
    hint = f"the scores {list(want)} take class numbers of shape {list(numbers)}"
    if len(have) == len(want) and 1 in have and [d for d in have if d != 1] == [d for d in numbers if d != 1]:
        hint += f": labels.reshape({tuple(numbers)})"
    elif tuple(have) == tuple(want):
        hint += ", or probabilities as floats: labels.astype('float32')"
    elif len(want) > 2 and tuple(have) == tuple(want[:-1]):
        hint += "; the classes are axis 1: if they are the last, transpose the scores in a loss of your own"
    raise InputError(f"loss='cross_entropy': the labels are of shape {shown}; {hint}")


def mse(prediction: Tensor, *, target: Tensor) -> Tensor:
    """The mean squared difference. Raises GradientError for shapes that are not equal: they would be broadcast."""
    if prediction.shape is not None and target.shape is not None and prediction.shape != target.shape:
        raise GradientError(
            f"loss='mse': the prediction is of shape {list(prediction.shape)}, the target of {list(target.shape)}; "
            f"give the target that shape: target.reshape({tuple(prediction.shape)})"
        )
    off = prediction - target.astype(prediction.dtype)  # integers, or float64 of NumPy, would widen the whole step
    return (off * off).mean()


LOSSES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({"cross_entropy": cross_entropy, "mse": mse})


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss and its parameters without default.

    positional: names of those that may be given by position; each is an output of the model or an array of the step.
    inputs: names of the keyword-only ones, which are arrays of the step. takes_all: it has `*outputs`. output: name or
    index of the output that the first parameter takes; None for the first output.
    """

    function: Callable[..., Any]
    positional: tuple[str, ...]
    inputs: tuple[str, ...]
    takes_all: bool = False
    output: str | int | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], output: str | int | None = None) -> LossFunction:
        """Read the signature of a function."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of a function in C: it takes the outputs
            return cls(function, (), (), True, output)
        needed = [p for p in parameters if p.default is p.empty]
        return cls(
            function,
            tuple(p.name for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            tuple(p.name for p in needed if p.kind is p.KEYWORD_ONLY),
            any(p.kind is p.VAR_POSITIONAL for p in parameters),
            output,
        )

    def labels(
        self, outputs: Sequence[str] | None, own: Collection[str], count: int, given: Collection[str]
    ) -> tuple[str, ...]:
        """The parameters that are arrays of a step, in order.

        outputs: names of the model's outputs; None if they are not known yet. own: of its inputs. count, given: how
        many arrays a step has by position, and the names of the others.

        Keyword-only parameters are. A positional one is an output by its name; where none has an output's name, the
        first is an output, then those whose arrays are given are the step's, and the others are outputs in their order.
        """
        if self.takes_all or not self.positional:
            return self.inputs
        if self._by_name(outputs):
            assert outputs is not None
            return (*(p for p in self.positional if p not in outputs and p not in own), *self.inputs)
        others = [p for p in self.positional[1:] if p not in own]
        beyond = max(0, count - len(own) - len(self.inputs))
        places = 1 if self.output is not None else len(others) + 1 if outputs is None else len(outputs)
        taken = set(others[len(others) - beyond :] if beyond else ()) | set(others[max(places - 1, 0) :])
        return (*(p for p in others if p in taken or p in given), *self.inputs)

    def __call__(
        self,
        outputs: Sequence[Tensor],
        names: Sequence[str],
        inputs: Mapping[str, Tensor],
        labels: Mapping[str, Tensor],
    ) -> Any:
        """The loss of a model's outputs. inputs: of the model, by name. labels: the step's own arrays, by name.

        Raises InputError for a parameter that nothing is there for, OptionError for an `output` that the model lacks.
        """
        if self.takes_all:
            return self.function(*outputs, **{n: labels[n] if n in labels else inputs[n] for n in self.inputs})
        table = dict(zip(names, outputs, strict=True))
        rest = list(outputs)
        if self.output is not None:
            rest = [outputs[output_index(self.output, names)]]
        by_name = self._by_name(names)
        args = []
        for k, name in enumerate(self.positional):
            if by_name and name in table:
                args.append(table[name])
            elif name in labels:
                args.append(labels[name])
            elif name in inputs and (k or by_name):
                args.append(inputs[name])
            elif rest and not by_name:
                args.append(rest.pop(0))
            else:
                raise InputError(
                    f"missing input {name!r} of the loss: the model has the outputs {', '.join(names)}, and a step "
                    f"gave {', '.join([*inputs, *labels])}"
                )
        return self.function(*args, **{n: labels[n] if n in labels else inputs[n] for n in self.inputs})

    def _by_name(self, outputs: Sequence[str] | None) -> bool:
        return self.output is None and outputs is not None and any(p in outputs for p in self.positional)


def output_index(output: str | int, names: Sequence[str]) -> int:
    """The index of an output by its name or number. Raises OptionError for one that the model has not."""
    if isinstance(output, str) and output in names:
        return names.index(output)
    if isinstance(output, int) and -len(names) <= output < len(names):
        return output % len(names)
    raise OptionError(f"output {output!r}: the model has the outputs {', '.join(names)}, by name or from 0 on")


def loss_of(
    loss: Any,
    outputs: Sequence[str] | None = None,
    output: str | int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> LossFunction | str | int | None:
    """Return a function, or that of a name in `LOSSES`; a number, None or the name of an output unchanged.

    outputs: names of the model's outputs, None if not known yet. output: which of them a function takes first.
    options: of a loss by name. Raises OptionError for anything else.
    """
    if output is not None and outputs is not None:
        output_index(output, outputs)
    if isinstance(loss, str) and loss in LOSSES:
        known = [n for n, p in inspect.signature(LOSSES[loss]).parameters.items() if p.default is not p.empty]
        for name in options:
            if name not in known:
                takes = ", ".join(known) or "none"
                raise OptionError(f"loss={loss!r} has no option {name!r}; it takes {takes}{nearest(name, known)}")
        return LossFunction.of(partial(LOSSES[loss], **options), 0 if output is None else output)
    if options:
        raise OptionError(f"loss_options: they are those of {', '.join(LOSSES)}, and loss={loss!r} is none of these")
    if callable(loss):
        return LossFunction.of(loss, output)
    if output is not None:
        raise OptionError(f"output={output!r} says what a loss function takes, and loss={loss!r} is none")
    if isinstance(loss, str) and outputs is not None and loss not in outputs:
        raise unknown_loss(loss, outputs)
    if isinstance(loss, str) and outputs is None and get_close_matches(loss.lower().replace("-", "_"), LOSSES, n=1):
        raise unknown_loss(loss, ())  # a written graph's outputs are known at its first step
    if loss is None or isinstance(loss, str | int):
        return loss
    raise OptionError(f"loss={loss!r}: it takes a function, one of {', '.join(LOSSES)}, or an output's name or number")


def unknown_loss(loss: str, outputs: Sequence[str]) -> OptionError:
    """The error of a name that is neither a loss nor one of the outputs."""
    close = get_close_matches(loss.lower().replace("-", "_"), [*LOSSES, *outputs], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = f": {', '.join(outputs)}" if outputs else ""
    return OptionError(f"loss={loss!r}: {hint}it takes a function, one of {', '.join(LOSSES)}, or an output{shown}")
