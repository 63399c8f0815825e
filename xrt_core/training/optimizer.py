"""Optimizers: they build the nodes that update variables and their slots from gradients."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, cast

import numpy as np

from xrt_core.errors import CheckpointError, OptionError, nearest
from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.callbacks import Callback
from xrt_core.training.gradient_context import where

Schedule = Callable[[int], float]
SCHEDULE: Final = "optimizer/schedule/"
"""Prefix in the state of what schedules know that follow the training."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Values shared by all updates of a step.

    rate: learning rate, float32[]. count: the number of this update, starting at 1, int64[].
    """

    rate: Tensor
    count: Tensor


class Optimizer(ABC):
    """Base class of optimizers: builds the update of a variable from its gradient.

    learning_rate: a number, or a function from the step number (from 0) to one. clip_norm: gradients are scaled so
    that their global norm is at most this (None: no clipping). decay: function of name and shape that selects the
    variables to which weight decay applies; default: those of rank 2 or more. clip_value: gradients are cut at this and
    its negative, before the norm. groups: pattern of variables' names (of `fnmatch`) -> options of its own,
    `learning_rate`, `weight_decay` (which then applies to all ranks), `clip_value` and `clip_norm` (of the norm of the
    group; None: no clipping); the first that fits counts. ema: the decay of
    a running mean of the variables, which `average=True` of `parameters`, `evaluate`, `predict` and `export` takes.

    Learning rates are inputs of the step: a schedule compiles nothing again.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        decay: Callable[[str, tuple[int, ...]], bool] | None = None,
        clip_value: float | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        ema: float | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            known, name = list(_options(type(self))), next(iter(unknown))
            raise OptionError(
                f"{type(self).__name__} has no option {name!r}; it takes {', '.join(known)}{_meant(name, known)}"
            )
        if not callable(learning_rate):
            _within("learning_rate", learning_rate, 0.0)
        _within("weight_decay", weight_decay, 0.0)
        _limit("clip_norm", clip_norm)
        _limit("clip_value", clip_value)
        if ema is not None:
            _within("ema", ema, 0.0, 1.0)
        self.learning_rate = learning_rate
        self.weight_decay = float(weight_decay)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.ema = None if ema is None else float(ema)
        self._decay = decay
        self.groups = {p: _group(p, own) for p, own in (groups or {}).items()}
        self._rates = [learning_rate]  # of all variables, and of the groups that have one of their own
        self._rate_of = {}
        for pattern, own in self.groups.items():
            if "learning_rate" in own:
                self._rate_of[pattern] = len(self._rates)
                self._rates.append(own["learning_rate"])

    def rate_at(self, step: int) -> float:
        """Return the learning rate of step number `step` (from 0), of variables of no group."""
        return _rate(self.learning_rate, step)

    def rates_at(self, step: int) -> np.ndarray:
        """Return what the step graph takes as learning rate: float32[], or float32[n] where groups have their own."""
        rates = np.array([_rate(r, step) for r in self._rates], np.float32)
        return rates if len(rates) > 1 else rates.reshape(())

    def schedule_state(self) -> dict[str, np.ndarray]:
        """Return what schedules know that follow the training, by name in the state."""
        states = {prefix: rate.state_dict() for prefix, rate in self._following().items()}
        return {f"{prefix}{n}": np.array(a) for prefix, own in states.items() for n, a in own.items()}

    def load_schedule_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Give such schedules back what `schedule_state` returned; one that the state does not know stays as it is.

        Raises CheckpointError, with all schedules as they were, where one does not take it.
        """
        before = self.schedule_state()
        for prefix, rate in self._following().items():
            try:
                _load_schedule(prefix, rate, state)
            except Exception as e:
                for other, each in self._following().items():
                    _load_schedule(other, each, before)
                raise CheckpointError(f"the state of the schedule {type(rate).__name__} does not fit it: {e!r}") from e

    def _following(self) -> dict[str, Callback]:
        rates: list[Any] = self._rates
        return {f"{SCHEDULE}{i}/": r for i, r in enumerate(rates) if isinstance(r, Callback)}

    @property
    def is_scheduled(self) -> bool:
        """Whether a learning rate depends on the step."""
        return any(callable(r) for r in self._rates)

    def rate_index(self, name: str) -> int | None:
        """Return the index of a variable's rate in `rates_at`; None where there is one rate."""
        if len(self._rates) == 1:
            return None
        pattern = self._group_of(name)
        return 0 if pattern is None else self._rate_of.get(pattern, 0)

    def _group_of(self, name: str) -> str | None:
        return next((p for p in self.groups if fnmatchcase(name, p)), None)

    def check_groups(self, names: Sequence[str]) -> None:
        """Raise OptionError for a group that has none of the variables `names`."""
        used = {self._group_of(n) for n in names}
        for pattern in self.groups:
            if pattern not in used:
                some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                taken = any(fnmatchcase(n, pattern) for n in names)
                why = "has no variable that an earlier group leaves" if taken else "matches no variable"
                raise OptionError(f"groups: {pattern!r} {why}; there are {some}{nearest(pattern, names)}")

    def decay_of(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the weight decay of one variable."""
        pattern = self._group_of(name)
        if pattern is not None and "weight_decay" in self.groups[pattern]:
            return float(self.groups[pattern]["weight_decay"])
        applies = self._decay(name, shape) if self._decay is not None else len(shape) >= 2
        return self.weight_decay if applies else 0.0

    def clipped(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the variables `names` as the limits of the optimizer and of its groups cut them."""
        owners: dict[str | None, list[int]] = {}  # group with a norm of its own, None for all others -> indices
        made = list(gradients)
        for i, name in enumerate(names):
            pattern = self._group_of(name)
            own = self.groups[pattern] if pattern is not None else {}
            owners.setdefault(pattern if "clip_norm" in own else None, []).append(i)
            limit = own.get("clip_value", self.clip_value)
            if limit is not None:
                made[i] = ops.Clip(made[i], -limit, limit)
        for owner, members in owners.items():
            limit = self.clip_norm if owner is None else self.groups[owner]["clip_norm"]
            if limit is not None:
                chosen = [made[i] for i in members]
                for i, g in zip(members, clipped(chosen, global_norm(chosen), limit), strict=True):
                    made[i] = g
        return made

    def initial(self, slot: str, value: np.ndarray) -> np.ndarray:
        """Return the value of a slot of a variable before the first step."""
        return np.zeros(value.shape, value.dtype)

    @abstractmethod
    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """Return the new value of a variable, then of its slots in the order of the class attribute `slots`."""


def _load_schedule(prefix: str, rate: Callback, state: Mapping[str, np.ndarray]) -> None:
    own = {n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)}
    if own:
        rate.load_state_dict(own)


def _rate(rate: float | Schedule, step: int) -> float:
    if not callable(rate):
        return float(rate)
    found = rate(step)
    _within(f"learning_rate of step {step}", found, 0.0)
    return float(found)


def _group(pattern: str, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in ("clip_norm", "clip_value"):
            _limit(f"{name} of {pattern!r}", given[name])
        elif name not in ("learning_rate", "weight_decay"):
            raise OptionError(
                f"groups: {pattern!r} has the option {name!r}; it takes learning_rate, weight_decay, clip_norm and "
                f"clip_value{_meant(name, ('learning_rate', 'weight_decay', 'clip_norm', 'clip_value'))}"
            )
        elif not callable(given[name]):
            _within(f"{name} of {pattern!r}", given[name], 0.0)
    return dict(given)


_ELSEWHERE: Final = {"lr": ("learning_rate",), "eps": ("epsilon",), "betas": ("beta1", "beta2")}
"""PyTorch's names of options."""


def _meant(name: str, known: Sequence[str]) -> str:
    """What an unknown option may be meant for, as the end of a message."""
    names = _ELSEWHERE.get(name, ())
    if names and all(n in known for n in names):
        return f"; PyTorch's {name} is {' and '.join(names)} here"
    return nearest(name, known)


def _limit(name: str, value: Any) -> None:
    if value is not None and not (_is_number(value) and float(value) > 0):
        raise OptionError(f"{name}={value!r}: it takes a number above 0, or None")


def _options(kind: type) -> list[str]:
    """Return the keyword arguments of an optimizer's constructors, those of its own class first."""
    found: dict[str, None] = {}
    for cls in kind.__mro__:
        if "__init__" in vars(cls) and issubclass(cls, Optimizer):
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            found.update({p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)})
    return list(found)


def _is_number(value: Any) -> bool:
    """Whether it is a number, or an array of one of any library, such as a schedule of optax gives."""
    if isinstance(value, bool | str | bytes):
        return False
    return isinstance(value, int | float | np.number) or (
        getattr(value, "shape", None) == () and hasattr(value, "__float__")
    )


def _within(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not _is_number(value) or not low <= float(value) < high:
        top = "" if high == float("inf") else f" and below {high:g}"
        raise OptionError(f"{name}={value!r}: it takes a number of at least {low:g}{top}")


def _like(scalar: Tensor, x: Tensor) -> Tensor:
    return scalar.astype(x.dtype)


class SGD(Optimizer):
    """x - rate (g + decay x)."""

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        g = gradient + x * decay if decay else gradient
        return (x - g * _like(at.rate, x),)


class Momentum(Optimizer):
    """Gradient descent with momentum, as the ONNX operator Momentum: standard, or Nesterov's."""

    slots = ("momentum",)

    def __init__(
        self, learning_rate: float | Schedule, momentum: float = 0.9, *, nesterov: bool = False, **options: Any
    ) -> None:
        super().__init__(learning_rate, **options)
        _within("momentum", momentum, 0.0)
        self.momentum, self.nesterov = float(momentum), bool(nesterov)

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        made: Sequence[Tensor] = ops.training.Momentum(
            at.rate, at.count, x, gradient, slots["momentum"], alpha=self.momentum, beta=1.0, norm_coefficient=decay,
            mode="nesterov" if self.nesterov else "standard",
        )  # fmt: skip
        return made


class Adagrad(Optimizer):
    """The ONNX operator Adagrad: the rate falls with the sum of squared gradients."""

    slots = ("square",)

    def __init__(
        self, learning_rate: float | Schedule, *, epsilon: float = 1e-6, decay_factor: float = 0.0, **options: Any
    ) -> None:
        super().__init__(learning_rate, **options)
        _within("epsilon", epsilon, 0.0)
        _within("decay_factor", decay_factor, 0.0)
        self.epsilon, self.decay_factor = float(epsilon), float(decay_factor)

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        made: Sequence[Tensor] = ops.training.Adagrad(
            at.rate, at.count - 1, x, gradient, slots["square"], epsilon=self.epsilon,
            decay_factor=self.decay_factor, norm_coefficient=decay,
        )  # fmt: skip
        return made


class _Moments(Optimizer):
    """Base class of optimizers with first and second moments: running means of gradients and of their squares."""

    slots = ("mean", "square")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        *,
        epsilon: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        _within("beta1", beta1, 0.0, 1.0)
        _within("beta2", beta2, 0.0, 1.0)
        _within("epsilon", epsilon, 0.0)
        self.beta1, self.beta2, self.epsilon = float(beta1), float(beta2), float(epsilon)

    def corrected(self, at: Moment, g: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean / (sqrt(square) + epsilon) with bias correction of both, the new mean, the new square)."""
        mean = slots["mean"] * self.beta1 + g * (1 - self.beta1)
        square = slots["square"] * self.beta2 + g * g * (1 - self.beta2)
        count = at.count.astype(np.float32)
        first = _like(1.0 - ops.Pow(np.float32(self.beta1), count), g)
        second = _like(1.0 - ops.Pow(np.float32(self.beta2), count), g)
        return mean / first / (ops.Sqrt(square / second) + self.epsilon), mean, square


class Adam(_Moments):
    """The ONNX operator Adam, with bias correction; weight decay is added to the gradient.

    epsilon is added to the square root before the bias correction, as the operator defines.
    """

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        made: Sequence[Tensor] = ops.training.Adam(
            at.rate, at.count, x, gradient, slots["mean"], slots["square"], alpha=self.beta1, beta=self.beta2,
            epsilon=self.epsilon, norm_coefficient=decay, norm_coefficient_post=0.0,
        )  # fmt: skip
        return made


class AdamW(_Moments):
    """Adam with decoupled weight decay. Source: Loshchilov and Hutter, arXiv 1711.05101."""

    def __init__(self, learning_rate: float | Schedule = 1e-3, *args: float, weight_decay: float = 0.01,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(learning_rate, *args, weight_decay=weight_decay, **options)

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        direction, mean, square = self.corrected(at, gradient, slots)
        if decay:
            direction = direction + x * decay
        return x - direction * _like(at.rate, x), mean, square


class LAMB(_Moments):
    """AdamW's direction, scaled per variable by the ratio of norms. Source: You et al., arXiv 1904.00962."""

    def __init__(self, learning_rate: float | Schedule = 1e-3, *args: float, weight_decay: float = 0.01,
                 epsilon: float = 1e-6, **options: Any) -> None:  # fmt: skip
        super().__init__(learning_rate, *args, weight_decay=weight_decay, epsilon=epsilon, **options)

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """See `Optimizer.update`."""
        direction, mean, square = self.corrected(at, gradient, slots)
        if decay:
            direction = direction + x * decay
        own, other = (ops.Sqrt((t * t).sum()) for t in (x, direction))
        whole = (own > 0.0) & (other > 0.0)
        ratio = where(whole, own / where(other > 0.0, other, 1.0), 1.0)
        return x - direction * (ratio * _like(at.rate, x)), mean, square


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global norm of all gradients, float32[]."""
    parts = [(g.astype(np.float32) * g.astype(np.float32)).sum() for g in gradients]
    total = parts[0] if len(parts) == 1 else ops.Sum(*parts)
    made: Tensor = ops.Sqrt(total)
    return made


def clipped(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> list[Tensor]:
    """Return the gradients scaled so that their global norm is at most `limit`."""
    factor = ops.Min(limit / (norm + 1e-6), 1.0)
    return [g * factor.astype(g.dtype) for g in gradients]


def finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return whether all gradients are finite, bool[]."""
    checks = [
        ops.ReduceMax(ops.Abs(g.astype(np.float32)), keepdims=0) <= float(np.finfo(np.float32).max)
        for g in gradients
        if not g._value.is_static or g.size
    ]
    total = checks[0]
    for c in checks[1:]:
        total = total & c
    return cast(Tensor, total)


__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Moment", "Momentum", "Optimizer", "Schedule"]


def __dir__() -> list[str]:
    return list(__all__)
