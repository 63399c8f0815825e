"""The option `accuracy`: how far a model's results may be off for the sake of speed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from xrt_core.options.kinds import Kind, Reason

Criterion = Literal["max", "rms"]


class Accuracy(Struct, frozen=True):
    """A budget of errors.

    error: how far an output may be off. criterion: what is compared, "max": the largest difference of an element, over
    the largest element of the output; "rms": the root of the mean squared difference, over that of the output.
    outputs: (name, error) of outputs with another budget.
    """

    error: float
    criterion: Criterion = "max"
    outputs: tuple[tuple[str, float], ...] = ()

    def of(self, output: str) -> float:
        """The budget of an output."""
        return dict(self.outputs).get(output, self.error)

    def __str__(self) -> str:
        others = "".join(f", {name} {error:g}" for name, error in self.outputs)
        return f"{self.error:g} ({self.criterion}{others})"


def _accept(value: Any) -> Accuracy:
    if isinstance(value, Accuracy):
        return value
    if not isinstance(value, Mapping):
        return Accuracy(_error(value))
    unknown = sorted(set(map(str, value)) - {"error", "criterion", "outputs"})
    if unknown:
        raise Reason(f"there is no {unknown[0]!r} in it")
    criterion = value.get("criterion", "max")
    if criterion not in get_args(Criterion):
        raise Reason(f"the criterion is {criterion!r}; it can be {' or '.join(map(repr, get_args(Criterion)))}")
    outputs = value.get("outputs", {})
    if not isinstance(outputs, Mapping):
        raise Reason("outputs is no mapping of names to errors")
    rows = tuple((str(name), _error(error)) for name, error in outputs.items())
    if "error" not in value:
        raise Reason("it does not say the error")
    return Accuracy(_error(value["error"]), criterion, rows)


def _error(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    error = float(value)
    if not (math.isfinite(error) and error > 0):
        raise Reason(f"{value!r} is no positive number")
    return error


def _parse(text: str) -> Accuracy:
    return _accept(json.loads(text) if text.lstrip().startswith("{") else float(text))


ACCURACY: Final = Kind(
    "a positive number, such as 1e-2, or a mapping with 'error', 'criterion' ('max' or 'rms') and 'outputs' (name -> "
    "error); in the environment a number, or such a mapping as JSON",
    _accept,
    _parse,
)
