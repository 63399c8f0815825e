"""Tensor: the symbolic array passed to `Graph.build`; every operation on it appends a node to the traced graph.

The functions below the class implement its methods: they append nodes and create constants, compose Python operators
that ONNX lacks (floor division, remainders, shifts, some reductions), and lower NumPy index expressions to Slice,
Gather, GatherND and Compress nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.frontends import promotion
from xrt_core.frontends.numpy_interop import as_array, is_array, refuse, ufunc_of_tensors
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64, is_float, is_integer, sum_dtype
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tracing import Scope, current_tracer
from xrt_core.ir.graph import Attribute, Value
from xrt_core.ir.schema import schema_dtypes
from xrt_core.ir.types import DTYPE_TO_ONNX, Dim, TensorType, ValueType, dtype_from_name

_LAST = 2**63 - 1
_FIRST = -(2**63)
_NEW = object()  # None in the key: an axis of size 1


class Tensor:
    """A value of the graph being traced.

    It has a dtype and a shape but no data. Arithmetic, comparisons and indexing follow NumPy; Python numbers take the
    tensor's dtype (a float with an integer tensor gives float32), two dtypes are promoted as in NumPy. `/` of integers
    gives float32.
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
    def shape(self) -> tuple[Any, ...]:
        """The dimensions: integers; None for a data-dependent one; where inputs are traced with symbols, such as
        "float32[batch, 4]", a `Size` for each that is no integer. Raises TraceError if the rank is unknown."""
        dims = self._dims
        if not self._scope.tracer.has_symbols or all(isinstance(d, int) for d in dims):
            return dims
        return tuple(d if isinstance(d, int) else size_of(self, i) for i, d in enumerate(dims))

    @property
    def _dims(self) -> tuple[Dim, ...]:
        """The dimensions as the graph has them. Raises TraceError if the rank is unknown."""
        shape = self._value.shape
        if shape is None:
            raise trace_error(f"{self!r} has no known shape: it depends on data")
        return shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._dims)

    @property
    def size(self) -> int:
        """The number of elements. Raises TraceError if it depends on data."""
        return math.prod(self._known_dim(i) for i in range(self.ndim))

    def __len__(self) -> int:
        if self.ndim == 0:
            raise trace_error("len() of a scalar tensor")
        return self._known_dim(0)

    def _known_dim(self, axis: int) -> int:
        d = self._dims[axis]
        if not isinstance(d, int):
            raise trace_error(f"dimension {axis} of {self!r} is not known; xrt.ops.Shape gives it as a tensor")
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
        value = value_of(self)
        if value.dtype is None or not is_float(value.dtype) or value.shape is None or any(d != 1 for d in value.shape):
            raise trace_error(f"backward() of {self!r}: a loss is a float scalar; reduce it with .mean() or .sum()")
        if tracer.scope.parent is not None:
            raise trace_error(f"backward() inside {tracer.scope.label}: call it in build itself")
        if tracer.loss is not None:
            raise trace_error("backward() is called twice: add the losses, and call it on their sum")
        tracer.loss = value

    # indexing

    def __getitem__(self, key: Any) -> Tensor:
        return index(self, key)

    # dtype

    def astype(self, dtype: Any) -> Tensor:
        """The tensor in another dtype (a NumPy dtype or its name, 'bfloat16' included)."""
        wanted = as_dtype(dtype)
        return self if wanted == self._value.dtype else apply("Cast", self, to=DTYPE_TO_ONNX[wanted])

    def to(self, dtype: Any) -> Tensor:
        """The same as `astype`."""
        return self.astype(dtype)

    # shape

    def reshape(self, *shape: Any) -> Tensor:
        """Reshape to the given dimensions (integers, at most one of them -1) or to a tensor that holds the shape."""
        target = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        if isinstance(target, Tensor) and target.ndim == 1:
            return apply("Reshape", self, target)
        dims = list(target) if isinstance(target, list | tuple) else [target]
        if any(isinstance(d, Tensor) for d in dims):
            return _reshaped_to_sizes(self, dims)
        if any(d is None for d in dims):
            raise trace_error(f"reshape: {dims} has an unknown dimension; write -1, or take it from xrt.ops.Shape")
        if 0 in dims and -1 not in dims and "allowzero" in current_tracer("reshape").schema("Reshape").attributes:
            return apply("Reshape", self, literal(dims, INT64), allowzero=1)
        return apply("Reshape", self, literal(dims, INT64))

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Merge the axes from `start` to `end` (inclusive)."""
        rank = self.ndim
        if rank == 0:
            return self.reshape(-1)
        a, b = axis_of(start, rank), axis_of(end, rank)
        kept = [d if isinstance(d, int) else -1 for d in self._dims]
        middle = self._dims[a : b + 1]
        one = math.prod(middle) if all(isinstance(d, int) for d in middle) else -1  # type: ignore[arg-type]
        return self.reshape([*kept[:a], one, *kept[b + 1 :]])

    def transpose(self, *axes: Any) -> Tensor:
        """Permute the axes; reverse them if no order is given."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        if order is None or len(order) == 0:
            return apply("Transpose", self)
        return apply("Transpose", self, perm=tuple(axis_of(a, self.ndim) for a in order))

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
        a, b = axis_of(first, self.ndim), axis_of(second, self.ndim)
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Remove the given axes, which must have size 1; by default all axes of size 1."""
        if axis is None:
            axis = [i for i, d in enumerate(self._dims) if d == 1]
        axes = axes_of(axis, self.ndim)
        return with_axes("Squeeze", self, axes) if axes else self

    def unsqueeze(self, axis: int | Sequence[int]) -> Tensor:
        """Insert axes of size 1, numbered as in the result."""
        count = 1 if isinstance(axis, int) else len(axis)
        axes = axes_of(axis, self.ndim + count)
        return with_axes("Unsqueeze", self, axes) if axes else self

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a shape; -1 keeps a dimension."""
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape)
        wanted = [1 if not isinstance(d, Tensor) and d == -1 else d for d in wanted]
        traced = any(isinstance(d, Tensor) for d in wanted)
        return apply("Expand", self, stack_scalars(wanted) if traced else literal(wanted, INT64))

    def broadcast_to(self, shape: Sequence[int]) -> Tensor:
        """Broadcast to a shape."""
        return self.expand(tuple(shape))

    # reductions

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The sum over axes (default: all); integers and bools are summed in 64 bits."""
        return reduce("ReduceSum", self.astype(sum_dtype(self.dtype)), axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The product over axes; integers and bools are multiplied in 64 bits."""
        return reduce("ReduceProd", self.astype(sum_dtype(self.dtype)), axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The mean over axes; that of integers is float32."""
        return reduce("ReduceMean", self if is_float(self.dtype) else self.astype(FLOAT32), axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The largest element over axes."""
        return reduce("ReduceMax", self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The smallest element over axes."""
        return reduce("ReduceMin", self, axis, keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The variance over axes (divided by the count, as NumPy does)."""
        off = self - self.mean(axis, keepdims=True)
        return (off * off).mean(axis, keepdims)

    def std(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """The standard deviation over axes (divided by the count, as NumPy does)."""
        return self.var(axis, keepdims).sqrt()

    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether any element over axes is not zero."""
        return reduce("ReduceMax", self.astype(BOOL).astype(np.int32), axis, keepdims).astype(BOOL)

    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether no element over axes is zero."""
        return reduce("ReduceMin", self.astype(BOOL).astype(np.int32), axis, keepdims).astype(BOOL)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The index of the first maximum, along an axis or in the flat tensor; int64."""
        return where_extreme("ArgMax", self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The index of the first minimum, along an axis or in the flat tensor; int64."""
        return where_extreme("ArgMin", self, axis, keepdims)

    def cumsum(self, axis: int) -> Tensor:
        """The running sum along an axis."""
        return apply("CumSum", self, literal(axis_of(axis, self.ndim), INT64))

    # Python's operators

    # arithmetic

    def __add__(self, other: Any) -> Tensor:
        return arithmetic("Add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return arithmetic("Add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return arithmetic("Sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return arithmetic("Sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return arithmetic("Mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return arithmetic("Mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return divide(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return floor_divide(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return modulo(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return modulo(other, self)

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return floor_divide(self, other), modulo(self, other)

    def __pow__(self, other: Any) -> Tensor:
        return arithmetic("Pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return arithmetic("Pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return arithmetic("MatMul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return arithmetic("MatMul", other, self)

    def __neg__(self) -> Tensor:
        return apply("Neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Tensor:
        return apply("Abs", self)

    # comparisons; a tensor is hashed by identity, as == gives a tensor

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return NotImplemented if other is None else compare("Equal", self, other)

    def __ne__(self, other: object) -> Any:
        return NotImplemented if other is None else apply("Not", compare("Equal", self, other))

    def __lt__(self, other: Any) -> Tensor:
        return compare("Less", self, other)

    def __le__(self, other: Any) -> Tensor:
        return compare("LessOrEqual", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return compare("Greater", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return compare("GreaterOrEqual", self, other)

    # bits and truth

    def __and__(self, other: Any) -> Tensor:
        return bitwise("And", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return bitwise("And", other, self)

    def __or__(self, other: Any) -> Tensor:
        return bitwise("Or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return bitwise("Or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return bitwise("Xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return bitwise("Xor", other, self)

    def __invert__(self) -> Tensor:
        return apply("Not" if self.dtype == BOOL else "BitwiseNot", self)

    def __lshift__(self, other: Any) -> Tensor:
        return shift("LEFT", self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return shift("LEFT", other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return shift("RIGHT", self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return shift("RIGHT", other, self)

    # elementwise

    def exp(self) -> Tensor:
        """e to the power of each element."""
        return apply("Exp", floating(self))

    def log(self) -> Tensor:
        """The natural logarithm."""
        return apply("Log", floating(self))

    def sqrt(self) -> Tensor:
        """The square root."""
        return apply("Sqrt", floating(self))

    def sin(self) -> Tensor:
        """The sine."""
        return apply("Sin", floating(self))

    def cos(self) -> Tensor:
        """The cosine."""
        return apply("Cos", floating(self))

    def tanh(self) -> Tensor:
        """The hyperbolic tangent."""
        return apply("Tanh", floating(self))

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x))."""
        return apply("Sigmoid", floating(self))

    def relu(self) -> Tensor:
        """Zero where an element is negative."""
        return apply("Relu", self)

    def erf(self) -> Tensor:
        """The error function."""
        return apply("Erf", self)

    def abs(self) -> Tensor:
        """The absolute value."""
        return apply("Abs", self)

    def floor(self) -> Tensor:
        """The largest integer not above each element."""
        return apply("Floor", self)

    def ceil(self) -> Tensor:
        """The smallest integer not below each element."""
        return apply("Ceil", self)

    def round(self) -> Tensor:
        """The nearest integer, halves to even."""
        return apply("Round", self)

    def pow(self, exponent: Any) -> Tensor:
        """Each element to a power."""
        return arithmetic("Pow", self, exponent)

    def matmul(self, other: Any) -> Tensor:
        """The matrix product."""
        return arithmetic("MatMul", self, other)

    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        """The elements clamped to two bounds, each optional."""
        result = self
        if min is not None:
            result = arithmetic("Max", result, min)
        return result if max is None else arithmetic("Min", result, max)

    def softmax(self, axis: int = -1) -> Tensor:
        """exp(x) over its sum along an axis."""
        return apply("Softmax", self, axis=axis)


class Size(Tensor):
    """A size that differs between calls: an int64 scalar, which takes part in arithmetic as the integer does that it is
    in a trace with static shapes.

    Sums, differences, products, quotients (`//`) and remainders of sizes and integers are sizes. A tensor's dtype
    counts beside it. Python's own decisions, containers and functions that need the number raise TraceError.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # an integer would be found in a set by its number
    __array_ufunc__ = None  # type: ignore[assignment]  # NumPy leaves operators to the methods below

    def __repr__(self) -> str:
        return f"<Size {self._value.name or '(unnamed)'}>"

    @property
    def dim(self) -> Dim:
        """The dimension that it is, as the graph has it: the text of an expression; None for one that depends on data,
        and for what was computed from sizes."""
        return self._scope.tracer.dims.get(self._value)

    def _no_numbers(self, what: str, instead: str) -> NoReturn:
        raise trace_error(f"{what} needs the number in {self!r}, which differs between the calls of this graph")

    def __add__(self, other: Any) -> Tensor:
        return sized(self, other, lambda a, b: arithmetic("Add", a, b))

    def __radd__(self, other: Any) -> Tensor:
        return sized(other, self, lambda a, b: arithmetic("Add", a, b))

    def __sub__(self, other: Any) -> Tensor:
        return sized(self, other, lambda a, b: arithmetic("Sub", a, b))

    def __rsub__(self, other: Any) -> Tensor:
        return sized(other, self, lambda a, b: arithmetic("Sub", a, b))

    def __mul__(self, other: Any) -> Tensor:
        return sized(self, other, lambda a, b: arithmetic("Mul", a, b))

    def __rmul__(self, other: Any) -> Tensor:
        return sized(other, self, lambda a, b: arithmetic("Mul", a, b))

    def __floordiv__(self, other: Any) -> Tensor:
        return sized(self, other, floor_divide)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return sized(other, self, floor_divide)

    def __mod__(self, other: Any) -> Tensor:
        return sized(self, other, modulo)

    def __rmod__(self, other: Any) -> Tensor:
        return sized(other, self, modulo)

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __neg__(self) -> Tensor:
        return 0 - self

    def __truediv__(self, other: Any) -> Tensor:
        return divide(*self._beside("/", self, other))

    def __rtruediv__(self, other: Any) -> Tensor:
        return divide(*self._beside("/", other, self))

    def __pow__(self, other: Any) -> Tensor:
        return arithmetic("Pow", *self._beside("**", self, other))

    def __rpow__(self, other: Any) -> Tensor:
        return arithmetic("Pow", *self._beside("**", other, self))

    def _beside(self, what: str, a: Any, b: Any) -> tuple[Any, Any]:
        """Two operands, one of them a tensor that is no size: of numbers alone the result would be a Python number."""
        if not any(isinstance(x, Tensor) and not isinstance(x, Size) for x in (a, b)):
            self._no_numbers(what, "")
        return a, b


def size_of(x: Tensor, axis: int) -> Size:
    """Return a size of a tensor as what the graph computes: of a symbol, or data-dependent."""
    tracer = current_tracer("a size")
    key = (tracer.scope, value_of(x), axis)
    found = tracer.sizes.get(key)
    if found is None:
        made = apply("Gather", apply("Shape", x), literal(axis, INT64), axis=0)
        found = tracer.sizes[key] = made._value
        tracer.dims[found] = x._dims[axis]
    return Size(found, tracer.scope)


def sized(a: Any, b: Any, compute: Callable[[Any, Any], Tensor]) -> Tensor:
    """`compute(a, b)`: a size, where both are sizes or integers. Raises TraceError beside what is no tensor either."""
    a, b = (int(x) if isinstance(x, np.integer) else x for x in (a, b))
    if not all(isinstance(x, Tensor | int) and not isinstance(x, bool) for x in (a, b)):
        raise trace_error(f"{a!r} and {b!r}: beside a size that differs between calls take a tensor or an integer")
    made = compute(a, b)
    whole = all(isinstance(x, Size | int) for x in (a, b))
    return Size(made._value, made._scope) if whole else made


def _reshaped_to_sizes(x: Tensor, dims: Sequence[Any]) -> Tensor:
    """Reshape to integers and sizes; those that are known keep their place in the result's type."""
    tracer = current_tracer("Reshape")
    target = stack_scalars(dims)
    if tracer.data_of(target._value) is not None:
        return apply("Reshape", x, target)
    known: tuple[Dim, ...] = tuple(
        tracer.dims.get(d._value) if isinstance(d, Tensor) else int(d) if d > 0 else None for d in dims
    )
    made = tracer.emit(
        tracer.schema("Reshape"), [value_of(x), value_of(target)], {}, 1, [TensorType(x._value.dtype, known)]
    )
    return Tensor(made[0], tracer.scope)


# nodes, constants and operators


def as_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of a NumPy dtype, a Python or NumPy type, or a name. Raises TraceError if ONNX lacks it."""
    try:
        found = dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        if isinstance(dtype, type) and dtype in (float, int):  # float32, as in torch and ONNX, not NumPy's float64
            found = FLOAT32 if dtype is float else INT64
    except (TypeError, GraphError) as e:
        raise trace_error(f"{dtype!r} is no dtype: {e}") from None
    if found not in DTYPE_TO_ONNX:
        raise trace_error(f"ONNX has no element type for {found}")
    return found


def value_of(tensor: Tensor) -> Value:
    """Return the IR value of a tensor. Raises TraceError if it belongs to another trace, or to a finished body."""
    tracer = current_tracer("a tensor")
    scope = tensor._scope
    if scope.tracer is not tracer:
        raise trace_error(f"{tensor!r} belongs to another trace ({scope.label}), which cannot be mixed with this one")
    if scope.closed:
        raise trace_error(f"{tensor!r} was made inside {scope.label}, outside of which it does not exist: return it")
    return tensor._value


def wrap(value: Value) -> Tensor:
    """Return the tensor of a value of the current scope."""
    return Tensor(value, current_tracer("a tensor").scope)


def literal(data: Any, dtype: np.dtype) -> Tensor:
    """Return a constant for a number or a nested list of numbers."""
    tracer = current_tracer("a constant")
    return Tensor(tracer.literal(data, dtype), tracer.scope)


def constant(obj: Any, dtype: np.dtype | None = None) -> Tensor:
    """Return a constant for an array of any library; the same object always maps to the same constant."""
    tracer = current_tracer("a constant")
    return Tensor(tracer.constant(obj, dtype), tracer.scope)


def stack_scalars(parts: Sequence[Any]) -> Tensor:
    """Return an int64 vector of integers and one-element integer tensors."""
    pieces: list[Tensor] = []
    for p in parts:
        if isinstance(p, Tensor):
            pieces.append(p.astype(INT64).reshape(1) if p._dims != (1,) else p.astype(INT64))
        else:
            pieces.append(literal([p], INT64))
    return pieces[0] if len(pieces) == 1 else apply("Concat", *pieces, axis=0)


def apply(op_type: str, *inputs: Tensor, **attributes: Attribute) -> Tensor:
    """Append a node with one output. If the operator does not take the inputs' dtype, compute in the next wider one."""
    tracer = current_tracer(op_type)
    schema = tracer.schema(op_type)
    first = schema.onnx.inputs[0]
    dtype = inputs[0]._value.dtype
    if dtype is not None and dtype not in _allowed(schema.onnx, first.type_str):
        wider = _wider(dtype, _allowed(schema.onnx, first.type_str))
        if wider is not None:
            formals = schema.onnx.inputs
            kinds = [formals[min(i, len(formals) - 1)].type_str for i in range(len(inputs))]
            same = [x.astype(wider) if k == first.type_str else x for x, k in zip(inputs, kinds, strict=True)]
            result = apply(op_type, *same, **attributes)
            back = schema.onnx.outputs[0].type_str == first.type_str
            return result.astype(dtype) if back else result
    made = tracer.emit(schema, [value_of(x) for x in inputs], attributes, 1)
    return Tensor(made[0], tracer.scope)


_allowed_cache: dict[tuple[str, int, str], frozenset[np.dtype]] = {}


def _allowed(schema: Any, type_str: str) -> frozenset[np.dtype]:
    key = (schema.name, schema.since_version, type_str)
    found = _allowed_cache.get(key)
    if found is None:
        texts = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == type_str), [type_str])
        found = _allowed_cache[key] = schema_dtypes(texts)
    return found


def _wider(dtype: np.dtype, allowed: frozenset[np.dtype]) -> np.dtype | None:
    if dtype == BOOL or promotion.is_integer(dtype):
        for candidate in (np.int32, np.uint32, np.int64, np.uint64):
            found = np.dtype(candidate)
            fits = dtype.kind in "bV" or np.can_cast(dtype, found)
            if found in allowed and fits:
                return found
    elif is_float(dtype) and FLOAT32 in allowed and dtype != promotion.FLOAT64:
        return FLOAT32
    return None


def with_axes(op_type: str, x: Tensor, axes: Sequence[int], **attributes: Attribute) -> Tensor:
    """Append an operator whose axes are an input in newer opsets and an attribute in older ones."""
    if "axes" in current_tracer(op_type).schema(op_type).attributes:
        return apply(op_type, x, axes=tuple(axes), **attributes)
    return apply(op_type, x, literal(list(axes), INT64), **attributes)


def both(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Convert two operands, at least one of them a tensor, to tensors of their promoted dtype."""
    tensor, other = (b, a) if not isinstance(a, Tensor) or (isinstance(a, Size) and isinstance(b, Tensor)) else (a, b)
    floating = promotion.is_weak_float(other) and not is_float(tensor.dtype)
    a, b = _promoted_operand(a, tensor.dtype), _promoted_operand(b, tensor.dtype)
    if a._value.dtype == b._value.dtype:
        return a, b
    dtype = FLOAT32 if floating else promotion.promoted(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _promoted_operand(x: Any, dtype: np.dtype) -> Tensor:
    if isinstance(x, Size):
        wanted = promotion.literal_dtype(1, dtype)
        if is_integer(wanted) and wanted.itemsize < 4:
            raise trace_error(f"{x!r} may be more than {dtype} holds")
        return x.astype(wanted)
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float):
        return literal(x, promotion.literal_dtype(x, dtype))
    if isinstance(x, str):
        return literal(x, np.dtype(object))
    if isinstance(x, list | tuple):
        x = np.asarray(x)
    if is_array(x):
        array = x if isinstance(x, np.ndarray) else as_array(x)
        return constant(x, promotion.array_dtype(array, dtype))
    raise trace_error(f"{x!r} ({type(x).__name__}) is neither a tensor nor a number nor an array")


Axes = int | Sequence[int] | None


def axis_of(axis: int, rank: int) -> int:
    if not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        raise trace_error(f"axis {axis!r} is not one of the {rank} axes")
    return int(axis) % rank


def axes_of(axis: Axes, rank: int) -> list[int]:
    if axis is None:
        return list(range(rank))
    given = [axis] if isinstance(axis, int | np.integer) else list(axis)
    found = sorted({axis_of(a, rank) for a in given})
    if len(found) != len(given):
        raise trace_error(f"axes {given} name one axis twice")
    return found


def floating(x: Tensor) -> Tensor:
    return x if is_float(x.dtype) else x.astype(FLOAT32)


def reduce(op_type: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    if axis is None:
        return apply(op_type, x, keepdims=int(keepdims))
    axes = axes_of(axis, x.ndim)
    return with_axes(op_type, x, axes, keepdims=int(keepdims)) if axes else x


def where_extreme(op_type: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is not None:
        return apply(op_type, x, axis=axis_of(axis, x.ndim), keepdims=int(keepdims))
    found: Tensor = apply(op_type, x.reshape(-1), axis=0, keepdims=0)
    return found.reshape([1] * x.ndim) if keepdims else found


def arithmetic(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    if x.dtype == BOOL:
        if op_type in ("Add", "Mul", "Max", "Min"):  # NumPy's semantics for bools
            return apply("Or" if op_type in ("Add", "Max") else "And", x, y)
        if op_type == "Sub":
            raise trace_error("bools cannot be subtracted: use ^, or .astype(...) first")
        x, y = x.astype(INT64), y.astype(INT64)
    return apply(op_type, x, y)


def divide(a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    return apply("Div", floating(x), floating(y))


def modulo(a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if not is_float(x.dtype):
        return apply("Mod", x, y)
    rest, wrong = _remainder(x, y)
    return apply("Where", wrong, rest + y, rest)


def _remainder(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return C's remainder, and a mask of the elements whose sign differs from the divisor's (as Python requires)."""
    rest = apply("Mod", x, y, fmod=1)
    return rest, (rest != 0) & ((rest < 0) != (y < 0))


def floor_divide(a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if x.dtype.kind == "u":
        return apply("Div", x, y)
    if is_float(x.dtype):
        # x - remainder is a multiple of y, so rounding the quotient is exact where floor(x / y) can be off by one
        rest, wrong = _remainder(x, y)
        quotient = apply("Div", x - rest, y)
        whole = apply("Round", apply("Where", wrong, quotient - 1, quotient))
        return apply("Where", y == 0, apply("Div", x, y), whole)
    quotient = apply("Div", x, y)  # towards zero
    rest = x - quotient * y
    above: Tensor = (rest != 0) & ((rest < 0) != (y < 0))
    return quotient - above.astype(x.dtype)


def compare(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    return apply(op_type, x, y)


def bitwise(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    if is_float(x.dtype):
        raise trace_error(f"& | ^ take bools and integers, not {x!r} and {y!r}")
    return apply(op_type if x.dtype == BOOL else f"Bitwise{op_type}", x, y)


def shift(direction: str, a: Any, b: Any) -> Tensor:
    x, y = both(a, b)
    if x.dtype.kind == "u":
        return apply("BitShift", x, y, direction=direction)
    if x.dtype.kind != "i":
        raise trace_error(f"<< and >> take integers, not {x!r}")
    dtype = x.dtype  # ONNX shifts unsigned integers only
    unsigned = np.dtype(f"u{dtype.name}")
    if direction == "LEFT":
        return apply("BitShift", x.astype(unsigned), y.astype(unsigned), direction=direction).astype(dtype)
    sign = apply("Where", x < 0, literal(-1, dtype), literal(0, dtype))  # all ones where x is negative
    shifted = apply("BitShift", (x ^ sign).astype(unsigned), y.astype(unsigned), direction=direction)
    return shifted.astype(dtype) ^ sign


# indexing


def index(x: Tensor, key: Any) -> Tensor:
    """`x[key]` with NumPy's semantics: integers, slices, None, Ellipsis, masks, integer arrays and tensors, and mixes.

    Raises TraceError for too many indices, one out of range, or a kind that cannot index.
    """
    parts = _expanded(x, key)
    advanced = [p for p in parts if isinstance(p, Tensor | np.ndarray)]
    if advanced and all(isinstance(p, Tensor) and p.ndim == 0 and p.dtype != BOOL for p in advanced):
        return _with_scalars(x, parts)  # selects one position per axis, as an integer does
    whole = sum(1 for p in parts if isinstance(p, slice) and p == slice(None))
    if len(advanced) == 1 and len(parts) == 1 + whole:
        single = _single(x, parts, advanced[0])
        if single is not None:
            return single
    return _basic(x, parts) if not advanced else _advanced(x, parts)


def _expanded(x: Tensor, key: Any) -> list[Any]:
    """Normalise the key to one entry per axis: ints, slices, _NEW, and arrays or tensors of integers or bools."""
    given = [_part(k) for k in (key if isinstance(key, tuple) else (key,))]
    rank = x.ndim
    used = sum(_consumed(p) for p in given)
    if used > rank:
        raise trace_error(f"{used} indices for {x!r}, which has {rank} axes")
    dots = [i for i, p in enumerate(given) if p is Ellipsis]
    if len(dots) > 1:
        raise trace_error("an index can have one Ellipsis only")
    at = dots[0] if dots else len(given)
    return given[:at] + [slice(None)] * (rank - used) + given[at + 1 :]


def _part(k: Any) -> Any:
    if k is None:
        return _NEW
    if k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, bool | np.bool_):
        raise trace_error("a single True or False cannot index a tensor; use None for a new axis")
    if isinstance(k, Tensor):
        if k.dtype != BOOL and not is_integer(k.dtype):
            raise trace_error(f"{k!r} cannot index: integers or bools are needed")
        return k
    if isinstance(k, int | np.integer):
        return int(k)
    if isinstance(k, list):
        k = np.asarray(k, dtype=np.int64) if not k else np.asarray(k)
    if is_array(k):
        array = k if isinstance(k, np.ndarray) else as_array(k)
        if array.dtype == BOOL or array.dtype.kind in "iu":
            return array
    try:
        return operator.index(k)
    except TypeError:
        raise trace_error(f"{k!r} ({type(k).__name__}) cannot index a tensor") from None


def _consumed(part: Any) -> int:
    """Return the number of axes that an index consumes."""
    if part is _NEW or part is Ellipsis:
        return 0
    if isinstance(part, Tensor | np.ndarray) and part.dtype == BOOL:
        return part.ndim
    return 1


# integers and slices


def _basic(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Apply integers, slices and new axes; an axis indexed by an array or a tensor is left unchanged."""
    bounds: list[tuple[Any, Any, int, int]] = []  # start, end, axis, step
    dropped: list[int] = []
    added: list[int] = []
    axis = place = 0
    for p in parts:
        if p is _NEW:
            added.append(place)
            place += 1
            continue
        if isinstance(p, int):
            at = _position(p, x._dims[axis], axis, x)
            bounds.append((at, _LAST if at == -1 else at + 1, axis, 1))
            dropped.append(axis)
        elif isinstance(p, slice):
            found = _slice(p, x._dims[axis])
            if found is not None:
                bounds.append((found[0], found[1], axis, found[2]))
            place += 1
        else:
            place += _consumed(p)
            axis += _consumed(p) - 1
        axis += 1
    if bounds:
        x = _slice_node(x, bounds)
    if dropped:
        x = with_axes("Squeeze", x, dropped)
    return with_axes("Unsqueeze", x, added) if added else x


def _slice_node(x: Tensor, bounds: Sequence[tuple[Any, Any, int, int]]) -> Tensor:
    starts, ends, axes, steps = (list(c) for c in zip(*bounds, strict=True))
    if "starts" in current_tracer("Slice").schema("Slice").attributes:
        if any(s != 1 for s in steps) or any(isinstance(b, Tensor) for b in (*starts, *ends)):
            raise trace_error("slices with steps or with tensors as bounds need opset 10 or newer")
        return apply("Slice", x, starts=tuple(starts), ends=tuple(ends), axes=tuple(axes))
    traced = any(isinstance(b, Tensor) for b in (*starts, *ends))
    pack = stack_scalars if traced else (lambda values: literal(values, INT64))
    inputs = [pack(starts), pack(ends), literal(axes, INT64)]
    if any(s != 1 for s in steps):
        inputs.append(literal(steps, INT64))
    return apply("Slice", x, *inputs)


def _position(i: int, dim: Any, axis: int, x: Tensor) -> int:
    if not isinstance(dim, int):
        return i
    if not -dim <= i < dim:
        raise trace_error(f"index {i} is out of range for axis {axis} of {x!r}")
    return i % dim


def _slice(s: slice, dim: Any) -> tuple[Any, Any, int] | None:
    """Return (start, end, step) as Slice takes them; None if the slice keeps the whole axis."""
    step = _bound(s.step, 1)
    if isinstance(step, Tensor) or step == 0:
        raise trace_error(f"a slice's step must be an integer other than 0, not {s.step!r}")
    if s.start is None and s.stop is None and step == 1:
        return None
    start = _bound(s.start, 0 if step > 0 else _LAST)
    end = _bound(s.stop, _LAST if step > 0 else _FIRST)
    if isinstance(start, Tensor) or isinstance(end, Tensor) or not isinstance(dim, int):
        return start, end, step
    whole = slice(s.start if s.start is None else start, s.stop if s.stop is None else end, step)
    a, b, step = whole.indices(dim)
    if (a, b, step) == (0, dim, 1):
        return None
    return a, _FIRST if b < 0 else b, step


def _bound(b: Any, default: int) -> Any:
    if b is None:
        return default
    if isinstance(b, Tensor):
        if not is_integer(b.dtype):
            raise trace_error(f"{b!r} cannot bound a slice: an integer is needed")
        return b
    try:
        return operator.index(b)
    except TypeError:
        raise trace_error(f"{b!r} ({type(b).__name__}) cannot bound a slice") from None


# arrays and tensors


def _with_scalars(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Scalar tensors among basic indices: Gather per axis, from the last on, so that earlier axes stay in place."""
    axis = sum(_consumed(p) for p in parts)
    for i in reversed(range(len(parts))):
        axis -= _consumed(parts[i])
        if isinstance(parts[i], Tensor):
            x = apply("Gather", x, _indices(parts[i]), axis=axis)
    return _basic(x, [p for p in parts if not isinstance(p, Tensor)])


def _single(x: Tensor, parts: Sequence[Any], part: Any) -> Tensor | None:
    """One array or tensor and nothing else: Gather, or Compress for a mask along one axis; None for other masks."""
    axis = next(i for i, p in enumerate(parts) if p is part)
    if part.dtype == BOOL:
        if part.ndim != 1:
            return None
        if isinstance(part, np.ndarray):
            (part,) = _positions(part, axis, x)
        else:
            _check_mask(part._dims, axis, x)
            return apply("Compress", x, part, axis=axis)
    _check_range(part, x._dims[axis], axis, x)
    return apply("Gather", x, _indices(part), axis=axis)


def _advanced(x: Tensor, parts: Sequence[Any]) -> Tensor:
    """Any mix: basic indices first, then one GatherND over the axes that arrays and tensors index."""
    rest: list[Any] = []  # index of each axis left after basic indexing; masks as one integer index per axis
    fancy = [i for i, p in enumerate(parts) if isinstance(p, Tensor | np.ndarray | int)]
    adjacent = fancy == list(range(fancy[0], fancy[-1] + 1))
    axis = 0
    for p in parts:
        if p is _NEW or isinstance(p, slice):
            rest.append(None)
        elif isinstance(p, int):
            _position(p, x._dims[axis], axis, x)
        elif p.dtype == BOOL:
            _check_mask(p._dims if isinstance(p, Tensor) else p.shape, axis, x)
            rest.extend(_positions(p, axis, x) if isinstance(p, np.ndarray) else _traced_positions(p))
        else:
            _check_range(p, x._dims[axis], axis, x)
            rest.append(p)
        axis += _consumed(p)
    # NumPy puts the indexed axes at the position of the first index if all are adjacent, else in front
    front = parts[: fancy[0]] if adjacent else []
    lead = sum(1 for p in front if p is _NEW or isinstance(p, slice))
    x = _basic(x, parts)
    where = [i for i, p in enumerate(rest) if p is not None]
    others = [i for i, p in enumerate(rest) if p is None]
    if where + others != list(range(len(rest))):
        x = x.transpose(where + others)
    indices, rank = _stacked([rest[i] for i in where])
    found = apply("GatherND", x, indices)
    if lead == 0:
        return found
    order = [*range(rank, rank + lead), *range(rank), *range(rank + lead, rank + len(others))]
    return found.transpose(order)


def _stacked(parts: Sequence[Any]) -> tuple[Tensor, int]:
    """Broadcast the indices and stack them along a new last axis; return the stack and the rank of the broadcast."""
    if all(isinstance(p, np.ndarray) for p in parts):
        try:
            arrays = np.broadcast_arrays(*parts)
        except ValueError:
            raise trace_error(f"index arrays of shapes {[p.shape for p in parts]} do not broadcast") from None
        stacked = np.stack([a.astype(np.int64) for a in arrays], axis=-1)
        return constant(stacked), stacked.ndim - 1
    tensors = [_indices(p) for p in parts]
    rank = max(t.ndim for t in tensors)
    if len({t._dims for t in tensors}) > 1 or any(None in t._dims for t in tensors):
        total = tensors[0]
        for t in tensors[1:]:  # a sum has the broadcast shape, also where dimensions depend on data
            total = total + t
        zero = total - total
        tensors = [t + zero for t in tensors]
    columns = [t.unsqueeze(-1) for t in tensors]
    return (columns[0] if len(columns) == 1 else apply("Concat", *columns, axis=-1)), rank


def _indices(part: Any) -> Tensor:
    return part.astype(INT64) if isinstance(part, Tensor) else constant(part.astype(np.int64))


def _positions(mask: np.ndarray, axis: int, x: Tensor) -> list[np.ndarray]:
    _check_mask(mask.shape, axis, x)
    return list(np.nonzero(mask))


def _traced_positions(mask: Tensor) -> list[Tensor]:
    found = apply("NonZero", mask)  # one row per axis
    return [apply("Gather", found, literal(i, INT64), axis=0) for i in range(mask.ndim)]


def _check_mask(shape: Sequence[Any], axis: int, x: Tensor) -> None:
    for i, (a, b) in enumerate(zip(shape, x._dims[axis:], strict=False)):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise trace_error(f"a mask of shape {tuple(shape)} does not fit axis {axis + i} of {x!r}")


def _check_range(part: Any, dim: Any, axis: int, x: Tensor) -> None:
    if isinstance(part, np.ndarray) and isinstance(dim, int) and part.size:
        low, high = int(part.min()), int(part.max())
        if low < -dim or high >= dim:
            raise trace_error(f"index {low if low < -dim else high} is out of range for axis {axis} of {x!r}")
