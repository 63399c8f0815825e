"""Tensor: the symbolic array passed to `Graph.build`; every operation on it appends a node to the traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xrt_core.frontends import numpy_semantics as semantics
from xrt_core.frontends.numpy_interop import refuse, ufunc_of_tensors
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64, is_float, sum_dtype
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tracing import Scope, current_tracer
from xrt_core.ir.graph import Value
from xrt_core.ir.types import DTYPE_TO_ONNX, Dim, ValueType

if TYPE_CHECKING:
    from xrt_core.frontends.numpy_semantics import Axes


class Tensor:
    """A value of the graph being traced.

    It has a dtype and a shape but no data. Arithmetic, comparisons and indexing follow NumPy; Python numbers take the
    tensor's dtype (a float with an integer tensor gives float32), two dtypes are promoted as in NumPy. `/` of integers
    gives float32. A data-dependent dimension is None.
    """

    __slots__ = ("_scope", "_value")
    __array_ufunc__ = ufunc_of_tensors
    __array_function__ = refuse

    def __init__(self, value: Value, scope: Scope) -> None:
        self._value = value
        self._scope = scope

    # what is known

    @property
    def type(self) -> ValueType | None:
        """The type: a TensorType for dense tensors, else a sequence, optional or map type; None if unknown."""
        return self._value.type

    @property
    def name(self) -> str:
        """The name of the value in the graph."""
        return self._value.name

    @property
    def dtype(self) -> np.dtype:
        """The element dtype. Raises TraceError if it is unknown."""
        dtype = self._value.dtype
        if dtype is None:
            raise trace_error(f"{self!r} has no known dtype")
        return dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The dimensions: integers, None for a data-dependent one. Raises TraceError if the rank is unknown."""
        shape = self._value.shape
        if shape is None:
            raise trace_error(f"{self!r} has no known shape: it depends on data")
        return shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements. Raises TraceError if it depends on data."""
        return math.prod(self._known_dim(i) for i in range(self.ndim))

    def __len__(self) -> int:
        if self.ndim == 0:
            raise trace_error("len() of a scalar tensor")
        return self._known_dim(0)

    def _known_dim(self, axis: int) -> int:
        d = self.shape[axis]
        if not isinstance(d, int):
            raise trace_error(f"dimension {axis} of {self!r} depends on data; xrt.ops.Shape gives it as a tensor")
        return d

    def __iter__(self) -> Iterator[Tensor]:
        if self.ndim == 0:
            raise trace_error("a scalar tensor cannot be iterated over")
        return iter([self[i] for i in range(self._known_dim(0))])

    def __repr__(self) -> str:
        return f"<Tensor {self._value.name or '(unnamed)'}: {self._value.type or '?'}>"

    # what a traced tensor cannot do

    def _no_numbers(self, what: str, instead: str) -> NoReturn:
        raise trace_error(f"{what} needs the numbers in {self!r}, which are not known while tracing; {instead}")

    def __bool__(self) -> bool:
        self._no_numbers("a truth value (if, while, and, or, not, in)", "use xrt.ops.Where, xrt.ops.If, or & | ~")

    def __float__(self) -> float:
        self._no_numbers("float()", "stay with tensors, or use .astype")

    def __int__(self) -> int:
        self._no_numbers("int()", "stay with tensors; sizes are integers in .shape")

    def __complex__(self) -> complex:
        self._no_numbers("complex()", "stay with tensors")

    def __index__(self) -> int:
        self._no_numbers("an integer index", "use xrt.ops.Gather, or tensor[tensor]; sizes are integers in .shape")

    def item(self) -> NoReturn:
        """Raise TraceError: a traced tensor has no data."""
        self._no_numbers("item()", "return the tensor from build instead")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._no_numbers("a NumPy function", "use xrt.ops.<Operator> or the tensor's own methods and operators")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise trace_error("tensors cannot be written to: use xrt.ops.Where, ScatterND or ScatterElements")

    # training

    def backward(self) -> None:
        """Declare this tensor as the loss that `training.TrainModule` minimises; inference is not affected.

        Raises TraceError unless it is a float scalar, inside the body of a loop or branch, and at a second call.
        """
        tracer = current_tracer("backward()")
        value = semantics.value_of(self)
        if value.dtype is None or not is_float(value.dtype) or value.shape is None or any(d != 1 for d in value.shape):
            raise trace_error(f"backward() of {self!r}: a loss is a float scalar; reduce it with .mean() or .sum()")
        if tracer.scope.parent is not None:
            raise trace_error(f"backward() inside {tracer.scope.label}: call it in build itself")
        if tracer.loss is not None:
            raise trace_error("backward() is called twice: add the losses, and call it on their sum")
        tracer.loss = value

    # indexing

    def __getitem__(self, key: Any) -> Tensor:
        from xrt_core.frontends.indexing import index

        return index(self, key)

    # dtype

    def astype(self, dtype: Any) -> Tensor:
        """The tensor in another dtype (a NumPy dtype or its name, 'bfloat16' included)."""
        wanted = semantics.as_dtype(dtype)
        return self if wanted == self._value.dtype else semantics.apply("Cast", self, to=DTYPE_TO_ONNX[wanted])

    def to(self, dtype: Any) -> Tensor:
        """The same as `astype`."""
        return self.astype(dtype)

    # shape

    def reshape(self, *shape: Any) -> Tensor:
        """Reshape to the given dimensions (integers, at most one of them -1) or to a tensor that holds the shape."""
        target = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        if isinstance(target, Tensor) and target.ndim == 1:
            return semantics.apply("Reshape", self, target)
        dims = list(target) if isinstance(target, list | tuple) else [target]
        if any(isinstance(d, Tensor) for d in dims):
            return semantics.apply("Reshape", self, semantics.stack_scalars(dims))
        if any(d is None for d in dims):
            raise trace_error(f"reshape: {dims} has an unknown dimension; write -1, or take it from xrt.ops.Shape")
        if 0 in dims and -1 not in dims and "allowzero" in current_tracer("reshape").schema("Reshape").attributes:
            return semantics.apply("Reshape", self, semantics.literal(dims, INT64), allowzero=1)
        return semantics.apply("Reshape", self, semantics.literal(dims, INT64))

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Merge the axes from `start` to `end` (inclusive)."""
        rank = self.ndim
        if rank == 0:
            return self.reshape(-1)
        a, b = semantics.axis_of(start, rank), semantics.axis_of(end, rank)
        kept = [d if isinstance(d, int) else -1 for d in self.shape]
        middle = self.shape[a : b + 1]
        one = math.prod(middle) if all(isinstance(d, int) for d in middle) else -1  # type: ignore[arg-type]
        return self.reshape([*kept[:a], one, *kept[b + 1 :]])

    def transpose(self, *axes: Any) -> Tensor:
        """Permute the axes; reverse them if no order is given."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        if order is None or len(order) == 0:
            return semantics.apply("Transpose", self)
        return semantics.apply("Transpose", self, perm=tuple(semantics.axis_of(a, self.ndim) for a in order))

    def permute(self, *axes: Any) -> Tensor:
        """The same as `transpose` with an order."""
        return self.transpose(*axes)

    @property
    def T(self) -> Tensor:
        """The tensor with its axes in reverse order."""
        return self.transpose()

    @property
    def mT(self) -> Tensor:
        """The tensor with its last two axes swapped."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, first: int, second: int) -> Tensor:
        """The tensor with two axes swapped."""
        order = list(range(self.ndim))
        a, b = semantics.axis_of(first, self.ndim), semantics.axis_of(second, self.ndim)
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Remove the given axes, which must have size 1; by default all axes of size 1."""
        if axis is None:
            axis = [i for i, d in enumerate(self.shape) if d == 1]
        axes = semantics.axes_of(axis, self.ndim)
        return semantics.with_axes("Squeeze", self, axes) if axes else self

    def unsqueeze(self, axis: int | Sequence[int]) -> Tensor:
        """Insert axes of size 1, numbered as in the result."""
        count = 1 if isinstance(axis, int) else len(axis)
        axes = semantics.axes_of(axis, self.ndim + count)
        return semantics.with_axes("Unsqueeze", self, axes) if axes else self

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a shape; -1 keeps a dimension."""
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape)
        return semantics.apply("Expand", self, semantics.literal([1 if d == -1 else d for d in wanted], INT64))

    def broadcast_to(self, shape: Sequence[int]) -> Tensor:
        """Broadcast to a shape."""
        return self.expand(tuple(shape))

    # reductions

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The sum over axes (default: all); integers and bools are summed in 64 bits."""
        return semantics.reduce("ReduceSum", self.astype(sum_dtype(self.dtype)), axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The product over axes; integers and bools are multiplied in 64 bits."""
        return semantics.reduce("ReduceProd", self.astype(sum_dtype(self.dtype)), axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The mean over axes; that of integers is float32."""
        return semantics.reduce("ReduceMean", self if is_float(self.dtype) else self.astype(FLOAT32), axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The largest element over axes."""
        return semantics.reduce("ReduceMax", self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The smallest element over axes."""
        return semantics.reduce("ReduceMin", self, axis, keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The variance over axes (divided by the count, as NumPy does)."""
        off = self - self.mean(axis, keepdims=True)
        return (off * off).mean(axis, keepdims)

    def std(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The standard deviation over axes (divided by the count, as NumPy does)."""
        return self.var(axis, keepdims).sqrt()

    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether any element over axes is not zero."""
        return semantics.reduce("ReduceMax", self.astype(BOOL).astype(np.int32), axis, keepdims).astype(BOOL)

    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether no element over axes is zero."""
        return semantics.reduce("ReduceMin", self.astype(BOOL).astype(np.int32), axis, keepdims).astype(BOOL)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The index of the first maximum, along an axis or in the flat tensor; int64."""
        return semantics.where_extreme("ArgMax", self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The index of the first minimum, along an axis or in the flat tensor; int64."""
        return semantics.where_extreme("ArgMin", self, axis, keepdims)

    def cumsum(self, axis: int) -> Tensor:
        """The running sum along an axis."""
        return semantics.apply("CumSum", self, semantics.literal(semantics.axis_of(axis, self.ndim), INT64))

    # Python's operators

    # arithmetic

    def __add__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return semantics.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return semantics.divide(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return semantics.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return semantics.floor_divide(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return semantics.modulo(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return semantics.modulo(other, self)

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return semantics.floor_divide(self, other), semantics.modulo(self, other)

    def __pow__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return semantics.arithmetic("Pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return semantics.arithmetic("MatMul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return semantics.arithmetic("MatMul", other, self)

    def __neg__(self) -> Tensor:
        return semantics.apply("Neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Tensor:
        return semantics.apply("Abs", self)

    # comparisons; a tensor is hashed by identity, as == gives a tensor

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return NotImplemented if other is None else semantics.compare("Equal", self, other)

    def __ne__(self, other: object) -> Any:
        return NotImplemented if other is None else semantics.apply("Not", semantics.compare("Equal", self, other))

    def __lt__(self, other: Any) -> Tensor:
        return semantics.compare("Less", self, other)

    def __le__(self, other: Any) -> Tensor:
        return semantics.compare("LessOrEqual", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return semantics.compare("Greater", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return semantics.compare("GreaterOrEqual", self, other)

    # bits and truth

    def __and__(self, other: Any) -> Tensor:
        return semantics.bitwise("And", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return semantics.bitwise("And", other, self)

    def __or__(self, other: Any) -> Tensor:
        return semantics.bitwise("Or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return semantics.bitwise("Or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return semantics.bitwise("Xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return semantics.bitwise("Xor", other, self)

    def __invert__(self) -> Tensor:
        return semantics.apply("Not" if self.dtype == BOOL else "BitwiseNot", self)

    def __lshift__(self, other: Any) -> Tensor:
        return semantics.shift("LEFT", self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return semantics.shift("LEFT", other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return semantics.shift("RIGHT", self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return semantics.shift("RIGHT", other, self)

    # elementwise

    def exp(self) -> Tensor:
        """e to the power of each element."""
        return semantics.apply("Exp", semantics.floating(self))

    def log(self) -> Tensor:
        """The natural logarithm."""
        return semantics.apply("Log", semantics.floating(self))

    def sqrt(self) -> Tensor:
        """The square root."""
        return semantics.apply("Sqrt", semantics.floating(self))

    def sin(self) -> Tensor:
        """The sine."""
        return semantics.apply("Sin", semantics.floating(self))

    def cos(self) -> Tensor:
        """The cosine."""
        return semantics.apply("Cos", semantics.floating(self))

    def tanh(self) -> Tensor:
        """The hyperbolic tangent."""
        return semantics.apply("Tanh", semantics.floating(self))

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x))."""
        return semantics.apply("Sigmoid", semantics.floating(self))

    def relu(self) -> Tensor:
        """Zero where an element is negative."""
        return semantics.apply("Relu", self)

    def erf(self) -> Tensor:
        """The error function."""
        return semantics.apply("Erf", self)

    def abs(self) -> Tensor:
        """The absolute value."""
        return semantics.apply("Abs", self)

    def floor(self) -> Tensor:
        """The largest integer not above each element."""
        return semantics.apply("Floor", self)

    def ceil(self) -> Tensor:
        """The smallest integer not below each element."""
        return semantics.apply("Ceil", self)

    def round(self) -> Tensor:
        """The nearest integer, halves to even."""
        return semantics.apply("Round", self)

    def pow(self, exponent: Any) -> Tensor:
        """Each element to a power."""
        return semantics.arithmetic("Pow", self, exponent)

    def matmul(self, other: Any) -> Tensor:
        """The matrix product."""
        return semantics.arithmetic("MatMul", self, other)

    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        """The elements clamped to two bounds, each optional."""
        result = self
        if min is not None:
            result = semantics.arithmetic("Max", result, min)
        return result if max is None else semantics.arithmetic("Min", result, max)

    def softmax(self, axis: int = -1) -> Tensor:
        """exp(x) over its sum along an axis."""
        return semantics.apply("Softmax", self, axis=axis)
