"""Gradient transformations of optax as optimizers: steps compute gradients, JAX applies the transformation to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from xrt_core.errors import OptionError
from xrt_core.frontends.tensor import Tensor
from xrt_core.runtime.arrays import to_numpy
from xrt_core.training.optimizer import Moment, Optimizer


def is_transformation(given: Any) -> bool:
    """Whether an object is an optax `GradientTransformation`: it has the functions `init` and `update`."""
    return callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))


def gradient_name(variable: str) -> str:
    """Return the name in the state of the gradient that the transformation takes."""
    return f"optimizer/gradient/{variable}"


class Transformation(Optimizer):
    """An optimizer that a `GradientTransformation` defines: rates, schedules, clipping and decay are its own.

    Its state is a part of the training state, "optimizer/optax/0" and so on, in the order of its leaves. Variables and
    leaves keep their dtypes.
    Raises OptionError if JAX is not installed.
    """

    def __init__(self, transformation: Any) -> None:
        super().__init__(0.0)
        try:
            import jax
        except ImportError:
            raise OptionError("an optimizer of optax needs JAX, which is not installed") from None
        self._jax, self._transformation = jax, transformation
        self._structure: Any = None
        self._is_double = False  # whether a variable is of float64, which JAX computes in on demand alone
        self._apply = jax.jit(self._updated)

    def __deepcopy__(self, memo: dict[int, Any]) -> Transformation:
        return self  # it holds functions alone

    def update(
        self, at: Moment, x: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], decay: float
    ) -> Sequence[Tensor]:
        """Return the variable as it is: `applied` updates it."""
        return (x,)

    def leaves(self, variables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the entries of the state before the first step: those of the transformation, and the gradients."""
        self._is_double = any(a.dtype == np.float64 for a in variables.values())
        with self._precision():
            made = self._transformation.init({n: self._jax.numpy.asarray(a) for n, a in variables.items()})
        found, self._structure = self._jax.tree_util.tree_flatten(made)
        leaves = {f"optimizer/optax/{i}": np.array(to_numpy(leaf)) for i, leaf in enumerate(found)}
        return leaves | {gradient_name(n): np.zeros(a.shape, a.dtype) for n, a in variables.items()}

    def applied(self, state: Mapping[str, Any], names: Sequence[str], is_finite: Any = True) -> dict[str, Any]:
        """Return the new values of the variables `names` and of the transformation's state, from the gradients in
        `state`; the old ones where `is_finite`, a bool or a bool[], is false."""
        variables, gradients = {n: state[n] for n in names}, {n: state[gradient_name(n)] for n in names}
        inner = [state[f"optimizer/optax/{i}"] for i in range(self._structure.num_leaves)]
        with self._precision():
            new, leaves = self._apply(gradients, inner, variables, is_finite)
        return {**new, **{f"optimizer/optax/{i}": leaf for i, leaf in enumerate(leaves)}}

    def _updated(self, gradients: Any, leaves: Any, variables: Any, is_finite: Any) -> Any:
        tree, numpy = self._jax.tree_util, self._jax.numpy

        def chosen(new: Any, old: Any) -> Any:
            return numpy.where(is_finite, numpy.asarray(new).astype(old.dtype), old)

        inner = tree.tree_unflatten(self._structure, leaves)
        updates, after = self._transformation.update(gradients, inner, variables)
        moved = tree.tree_map(lambda x, u: chosen(x + u, x), variables, updates)
        return moved, [chosen(new, old) for new, old in zip(tree.tree_leaves(after), leaves, strict=True)]

    def _precision(self) -> Any:
        return self._jax.enable_x64(True) if self._is_double else nullcontext()


__all__ = ["Transformation", "gradient_name", "is_transformation"]
