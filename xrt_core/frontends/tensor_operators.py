"""What Python's operators do with a traced tensor: arithmetic, comparisons, bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xrt_core.frontends import application as make
from xrt_core.frontends import arithmetic as ops
from xrt_core.frontends.promotion import BOOL

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor


class Operators:
    """The operators of a tensor. What they cannot do as NumPy would, `arithmetic` does by several nodes."""

    __slots__ = ()

    # arithmetic

    def __add__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Add", self, other)

    def __radd__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Add", other, self)

    def __sub__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Sub", self, other)

    def __rsub__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Sub", other, self)

    def __mul__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Mul", self, other)

    def __rmul__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Mul", other, self)

    def __truediv__(self: Any, other: Any) -> Tensor:
        return ops.divide(self, other)

    def __rtruediv__(self: Any, other: Any) -> Tensor:
        return ops.divide(other, self)

    def __floordiv__(self: Any, other: Any) -> Tensor:
        return ops.floor_divide(self, other)

    def __rfloordiv__(self: Any, other: Any) -> Tensor:
        return ops.floor_divide(other, self)

    def __mod__(self: Any, other: Any) -> Tensor:
        return ops.modulo(self, other)

    def __rmod__(self: Any, other: Any) -> Tensor:
        return ops.modulo(other, self)

    def __divmod__(self: Any, other: Any) -> tuple[Tensor, Tensor]:
        return ops.floor_divide(self, other), ops.modulo(self, other)

    def __pow__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Pow", self, other)

    def __rpow__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("Pow", other, self)

    def __matmul__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("MatMul", self, other)

    def __rmatmul__(self: Any, other: Any) -> Tensor:
        return ops.arithmetic("MatMul", other, self)

    def __neg__(self: Any) -> Tensor:
        return make.apply("Neg", self)

    def __pos__(self: Any) -> Any:
        return self

    def __abs__(self: Any) -> Tensor:
        return make.apply("Abs", self)

    # comparisons; a tensor is hashed by identity, as == gives a tensor

    __hash__ = object.__hash__

    def __eq__(self: Any, other: object) -> Any:
        return NotImplemented if other is None else ops.compare("Equal", self, other)

    def __ne__(self: Any, other: object) -> Any:
        return NotImplemented if other is None else make.apply("Not", ops.compare("Equal", self, other))

    def __lt__(self: Any, other: Any) -> Tensor:
        return ops.compare("Less", self, other)

    def __le__(self: Any, other: Any) -> Tensor:
        return ops.compare("LessOrEqual", self, other)

    def __gt__(self: Any, other: Any) -> Tensor:
        return ops.compare("Greater", self, other)

    def __ge__(self: Any, other: Any) -> Tensor:
        return ops.compare("GreaterOrEqual", self, other)

    # bits and truth

    def __and__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("And", self, other)

    def __rand__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("And", other, self)

    def __or__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("Or", self, other)

    def __ror__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("Or", other, self)

    def __xor__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("Xor", self, other)

    def __rxor__(self: Any, other: Any) -> Tensor:
        return ops.bitwise("Xor", other, self)

    def __invert__(self: Any) -> Tensor:
        return make.apply("Not" if self.dtype == BOOL else "BitwiseNot", self)

    def __lshift__(self: Any, other: Any) -> Tensor:
        return ops.shift("LEFT", self, other)

    def __rlshift__(self: Any, other: Any) -> Tensor:
        return ops.shift("LEFT", other, self)

    def __rshift__(self: Any, other: Any) -> Tensor:
        return ops.shift("RIGHT", self, other)

    def __rrshift__(self: Any, other: Any) -> Tensor:
        return ops.shift("RIGHT", other, self)
