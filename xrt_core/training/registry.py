"""The registry of gradient rules and compositions of operators.

    @gradient("Sin")
    def sin(ctx):
        return ctx.grad * ops.Cos(ctx.inputs[0])

A rule is traced like `Graph.build`: it takes a `Backward` and returns the gradient of the loss with respect to each
input of the node: one tensor if the operator has one input, else a tuple (None for an input without a gradient, or
with `ctx.wants(i)` False). Plugins register rules for their own domains in the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from xrt_core.errors import RegistrationError
from xrt_core.ir.operator_set import find_operator

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor
    from xrt_core.training.gradient_context import Backward, Forward

    Results: TypeAlias = Tensor | Sequence[Tensor | None] | None
    Rule = Callable[[Backward], Results]
    Composition = Callable[[Forward], Results]

F = TypeVar("F", bound=Callable[..., Any])
Key = tuple[str, str]

FAMILIES = (
    "elementwise", "activation", "linear", "reduction", "movement", "indexing", "normalization", "loss",
    "convolution", "pooling", "resize", "vision", "signal", "random", "control", "recurrent", "sequence", "constant",
)  # fmt: skip
"""Modules of `training.rules`, one per operator family."""

_RULES: dict[Key, Rule] = {}
_COMPOSITIONS: dict[Key, Composition] = {}
_CONSTANT: dict[Key, str] = {}  # operator -> its registrant
_loaded = False


def gradient(*op_types: str, domain: str = "") -> Callable[[F], F]:
    """Register the decorated function as the gradient rule of these operators.

    Raises RegistrationError, naming both, if an operator has a rule already, or is registered as constant.
    """

    def register(function: F) -> F:
        for op_type in op_types:
            _refuse_twice((domain, op_type), _origin(function))
            _RULES[domain, op_type] = function
        return function

    return register


def composition(*op_types: str, domain: str = "") -> Callable[[F], F]:
    """Register the decorated function as the decomposition of these operators into operators that have rules.

    It takes a `Forward` and returns the outputs, or None to use the node's own rule. A node on the backward path is
    replaced by its composing nodes, so that nothing is computed twice.
    """

    def register(function: F) -> F:
        for op_type in op_types:
            taken = _COMPOSITIONS.get((domain, op_type))
            if taken is not None:
                raise RegistrationError(_twice("composition", (domain, op_type), _origin(taken), _origin(function)))
            _COMPOSITIONS[domain, op_type] = function
        return function

    return register


def no_gradient(*op_types: str, domain: str = "", by: str = "") -> None:
    """Register operators whose derivative is zero almost everywhere: gradients end there."""
    for op_type in op_types:
        _refuse_twice((domain, op_type), by or "no_gradient")
        _CONSTANT[domain, op_type] = by or "no_gradient"


def find_rule(domain: str, op_type: str) -> Rule | None:
    """Return the gradient rule of an operator, or None."""
    _load()
    own = find_operator(domain, op_type)
    return _RULES.get((domain, op_type)) or (None if own is None else own.gradient)


def find_composition(domain: str, op_type: str) -> Composition | None:
    """Return the composition of an operator, or None."""
    _load()
    return _COMPOSITIONS.get((domain, op_type))


def is_constant(domain: str, op_type: str) -> bool:
    """Return whether gradients end at an operator (it was registered by `no_gradient`)."""
    _load()
    own = find_operator(domain, op_type)
    return (domain, op_type) in _CONSTANT or (own is not None and own.is_constant)


def rules() -> Mapping[Key, Rule]:
    """Return every gradient rule by (domain, operator); read-only."""
    _load()
    return MappingProxyType(_RULES)


def _refuse_twice(key: Key, by: str) -> None:
    if key in _RULES:
        raise RegistrationError(_twice("gradient", key, _origin(_RULES[key]), by))
    if key in _CONSTANT:
        raise RegistrationError(_twice("gradient", key, _CONSTANT[key], by))


def _twice(what: str, key: Key, first: str, second: str) -> str:
    return f"the {what} of {key[0] or 'ai.onnx'}.{key[1]} is registered twice: by {first} and by {second}"


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _load() -> None:
    global _loaded
    if not _loaded:
        _loaded = True
        for family in FAMILIES:
            importlib.import_module(f"xrt_core.training.rules.{family}")
