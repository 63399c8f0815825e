"""Losses: functions by name, and how the parameters of a function find a model's outputs and a step's arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from xrt_core.errors import GradientError, InputError, OptionError
from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor


def cross_entropy(scores: Tensor, *, labels: Tensor) -> Tensor:
    """The mean cross-entropy of scores (N, C, ...) and integer labels (N, ...)."""
    made: Tensor = ops.SoftmaxCrossEntropyLoss(scores, labels, reduction="mean", outputs=1)
    return made


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
    loss: Any, outputs: Sequence[str] | None = None, output: str | int | None = None
) -> LossFunction | str | int | None:
    """Return a function, or that of a name in `LOSSES`; a number, None or the name of an output unchanged.

    outputs: names of the model's outputs, None if not known yet. output: which of them a function takes first.
    Raises OptionError for anything else.
    """
    if output is not None and outputs is not None:
        output_index(output, outputs)
    if isinstance(loss, str) and loss in LOSSES:
        return LossFunction.of(LOSSES[loss], 0 if output is None else output)
    if callable(loss):
        return LossFunction.of(loss, output)
    if output is not None:
        raise OptionError(f"output={output!r} says what a loss function takes, and loss={loss!r} is none")
    known = outputs is None or not isinstance(loss, str) or loss in outputs
    if known and (loss is None or isinstance(loss, str | int)):
        return loss
    if not known and outputs is not None:
        close = get_close_matches(loss, [*LOSSES, *outputs], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise OptionError(
            f"loss={loss!r}: {hint}it takes a function, one of {', '.join(LOSSES)}, or an output: {', '.join(outputs)}"
        )
    raise OptionError(f"loss={loss!r}: it takes a function, one of {', '.join(LOSSES)}, or an output's name or number")
