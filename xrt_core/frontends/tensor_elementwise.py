"""The elementwise methods of a traced tensor, and softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xrt_core.frontends import application as make
from xrt_core.frontends import arithmetic as ops

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor


class Elementwise:
    """Methods of a tensor, each of which appends one operator."""

    __slots__ = ()

    def exp(self: Any) -> Tensor:
        """e to the power of each element."""
        return make.apply("Exp", ops.floating(self))

    def log(self: Any) -> Tensor:
        """The natural logarithm."""
        return make.apply("Log", ops.floating(self))

    def sqrt(self: Any) -> Tensor:
        """The square root."""
        return make.apply("Sqrt", ops.floating(self))

    def sin(self: Any) -> Tensor:
        """The sine."""
        return make.apply("Sin", ops.floating(self))

    def cos(self: Any) -> Tensor:
        """The cosine."""
        return make.apply("Cos", ops.floating(self))

    def tanh(self: Any) -> Tensor:
        """The hyperbolic tangent."""
        return make.apply("Tanh", ops.floating(self))

    def sigmoid(self: Any) -> Tensor:
        """1 / (1 + exp(-x))."""
        return make.apply("Sigmoid", ops.floating(self))

    def relu(self: Any) -> Tensor:
        """Zero where an element is negative."""
        return make.apply("Relu", self)

    def erf(self: Any) -> Tensor:
        """The error function."""
        return make.apply("Erf", self)

    def abs(self: Any) -> Tensor:
        """The absolute value."""
        return make.apply("Abs", self)

    def floor(self: Any) -> Tensor:
        """The largest integer not above each element."""
        return make.apply("Floor", self)

    def ceil(self: Any) -> Tensor:
        """The smallest integer not below each element."""
        return make.apply("Ceil", self)

    def round(self: Any) -> Tensor:
        """The nearest integer, halves to even."""
        return make.apply("Round", self)

    def pow(self: Any, exponent: Any) -> Tensor:
        """Each element to a power."""
        return ops.arithmetic("Pow", self, exponent)

    def matmul(self: Any, other: Any) -> Tensor:
        """The matrix product."""
        return ops.arithmetic("MatMul", self, other)

    def clip(self: Any, min: Any = None, max: Any = None) -> Tensor:
        """The elements held between two bounds, either of which may be left out."""
        result = self
        if min is not None:
            result = ops.arithmetic("Max", result, min)
        return result if max is None else ops.arithmetic("Min", result, max)

    def softmax(self: Any, axis: int = -1) -> Tensor:
        """exp(x) over its sum along an axis."""
        return make.apply("Softmax", self, axis=axis)
