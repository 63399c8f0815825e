"""NumPy semantics of the operators on traced tensors: type promotion, constants, and the nodes that are appended.

Operators without an ONNX equivalent (floor division, remainders, shifts, some reductions) are composed of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.frontends import numpy_semantics as make
from xrt_core.frontends import promotion
from xrt_core.frontends import tensor as _tensor  # circular: its methods call these functions
from xrt_core.frontends.numpy_interop import as_array, is_array
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64, is_float
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tracing import current_tracer
from xrt_core.ir.graph import Attribute, Value
from xrt_core.ir.schema import schema_dtypes
from xrt_core.ir.types import DTYPE_TO_ONNX, dtype_from_name

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor


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
    return _tensor.Tensor(value, current_tracer("a tensor").scope)


def literal(data: Any, dtype: np.dtype) -> Tensor:
    """Return a constant for a number or a nested list of numbers."""
    tracer = current_tracer("a constant")
    return _tensor.Tensor(tracer.literal(data, dtype), tracer.scope)


def constant(obj: Any, dtype: np.dtype | None = None) -> Tensor:
    """Return a constant for an array of any library; the same object always maps to the same constant."""
    tracer = current_tracer("a constant")
    return _tensor.Tensor(tracer.constant(obj, dtype), tracer.scope)


def stack_scalars(parts: Sequence[Any]) -> Tensor:
    """Return an int64 vector of integers and one-element integer tensors."""
    pieces: list[Tensor] = []
    for p in parts:
        if isinstance(p, _tensor.Tensor):
            pieces.append(p.astype(INT64).reshape(1) if p.shape != (1,) else p.astype(INT64))
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
    return _tensor.Tensor(made[0], tracer.scope)


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
    tensor, other = (a, b) if isinstance(a, _tensor.Tensor) else (b, a)
    floating = promotion.is_weak_float(other) and not is_float(tensor.dtype)
    a, b = _promoted_operand(a, tensor.dtype), _promoted_operand(b, tensor.dtype)
    if a._value.dtype == b._value.dtype:
        return a, b
    dtype = FLOAT32 if floating else promotion.promoted(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _promoted_operand(x: Any, dtype: np.dtype) -> Tensor:
    if isinstance(x, _tensor.Tensor):
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
        return make.apply(op_type, x, keepdims=int(keepdims))
    axes = axes_of(axis, x.ndim)
    return make.with_axes(op_type, x, axes, keepdims=int(keepdims)) if axes else x


def where_extreme(op_type: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is not None:
        return make.apply(op_type, x, axis=axis_of(axis, x.ndim), keepdims=int(keepdims))
    found: Tensor = make.apply(op_type, x.reshape(-1), axis=0, keepdims=0)
    return found.reshape([1] * x.ndim) if keepdims else found


def arithmetic(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        if op_type in ("Add", "Mul", "Max", "Min"):  # NumPy's semantics for bools
            return make.apply("Or" if op_type in ("Add", "Max") else "And", x, y)
        if op_type == "Sub":
            raise trace_error("bools cannot be subtracted: use ^, or .astype(...) first")
        x, y = x.astype(INT64), y.astype(INT64)
    return make.apply(op_type, x, y)


def divide(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    return make.apply("Div", floating(x), floating(y))


def modulo(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if not is_float(x.dtype):
        return make.apply("Mod", x, y)
    rest, wrong = _remainder(x, y)
    return make.apply("Where", wrong, rest + y, rest)


def _remainder(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return C's remainder, and a mask of the elements whose sign differs from the divisor's (as Python requires)."""
    rest = make.apply("Mod", x, y, fmod=1)
    return rest, (rest != 0) & ((rest < 0) != (y < 0))


def floor_divide(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if x.dtype.kind == "u":
        return make.apply("Div", x, y)
    if is_float(x.dtype):
        # x - remainder is a multiple of y, so rounding the quotient is exact where floor(x / y) can be off by one
        rest, wrong = _remainder(x, y)
        quotient = make.apply("Div", x - rest, y)
        whole = make.apply("Round", make.apply("Where", wrong, quotient - 1, quotient))
        return make.apply("Where", y == 0, make.apply("Div", x, y), whole)
    quotient = make.apply("Div", x, y)  # towards zero
    rest = x - quotient * y
    above: Tensor = (rest != 0) & ((rest < 0) != (y < 0))
    return quotient - above.astype(x.dtype)


def compare(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    return make.apply(op_type, x, y)


def bitwise(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if is_float(x.dtype):
        raise trace_error(f"& | ^ take bools and integers, not {x!r} and {y!r}")
    return make.apply(op_type if x.dtype == BOOL else f"Bitwise{op_type}", x, y)


def shift(direction: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype.kind == "u":
        return make.apply("BitShift", x, y, direction=direction)
    if x.dtype.kind != "i":
        raise trace_error(f"<< and >> take integers, not {x!r}")
    dtype = x.dtype  # ONNX shifts unsigned integers only
    unsigned = np.dtype(f"u{dtype.name}")
    if direction == "LEFT":
        return make.apply("BitShift", x.astype(unsigned), y.astype(unsigned), direction=direction).astype(dtype)
    sign = make.apply("Where", x < 0, make.literal(-1, dtype), make.literal(0, dtype))  # all ones where x is negative
    shifted = make.apply("BitShift", (x ^ sign).astype(unsigned), y.astype(unsigned), direction=direction)
    return shifted.astype(dtype) ^ sign
