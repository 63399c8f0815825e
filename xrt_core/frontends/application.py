"""From operators and Python objects to tensors: appending nodes, making constants, bringing operands together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.frontends import promotion
from xrt_core.frontends import tensor as _tensor  # a cycle: the class calls these functions, which make its objects
from xrt_core.frontends.arrays import as_array, is_array
from xrt_core.frontends.locations import trace_error
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64, is_float
from xrt_core.frontends.tracing import current_tracer
from xrt_core.ir.graph import Attribute, Value
from xrt_core.ir.schema import schema_dtypes
from xrt_core.ir.types import DTYPE_TO_ONNX, dtype_from_name

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor


def as_dtype(dtype: Any) -> np.dtype:
    """The dtype behind a NumPy dtype, a Python or NumPy type or a name. Raises TraceError for one ONNX has not."""
    try:
        found = dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        if isinstance(dtype, type) and dtype in (float, int):  # torch's and ONNX's float, not NumPy's
            found = FLOAT32 if dtype is float else INT64
    except (TypeError, GraphError) as e:
        raise trace_error(f"{dtype!r} is no dtype: {e}") from None
    if found not in DTYPE_TO_ONNX:
        raise trace_error(f"ONNX has no element type for {found}")
    return found


def value_of(tensor: Tensor) -> Value:
    """The value behind a tensor. Raises TraceError where it belongs to another trace, or to a body already closed."""
    tracer = current_tracer("a tensor")
    scope = tensor._scope
    if scope.tracer is not tracer:
        raise trace_error(f"{tensor!r} belongs to another trace ({scope.label}), which cannot be mixed with this one")
    if scope.closed:
        raise trace_error(f"{tensor!r} was made inside {scope.label}, outside of which it does not exist: return it")
    return tensor._value


def wrap(value: Value) -> Tensor:
    """The tensor for a value of the scope that is recorded now."""
    return _tensor.Tensor(value, current_tracer("a tensor").scope)


def literal(data: Any, dtype: np.dtype) -> Tensor:
    """A constant for a number or a nested list of them."""
    tracer = current_tracer("a constant")
    return _tensor.Tensor(tracer.literal(data, dtype), tracer.scope)


def constant(obj: Any, dtype: np.dtype | None = None) -> Tensor:
    """A constant for an array of any library; the same object gives the same constant."""
    tracer = current_tracer("a constant")
    return _tensor.Tensor(tracer.constant(obj, dtype), tracer.scope)


def stack_scalars(parts: Sequence[Any]) -> Tensor:
    """A vector of int64 from integers and integer tensors of one element."""
    pieces: list[Tensor] = []
    for p in parts:
        if isinstance(p, _tensor.Tensor):
            pieces.append(p.astype(INT64).reshape(1) if p.shape != (1,) else p.astype(INT64))
        else:
            pieces.append(literal([p], INT64))
    return pieces[0] if len(pieces) == 1 else apply("Concat", *pieces, axis=0)


def apply(op_type: str, *inputs: Tensor, **attributes: Attribute) -> Tensor:
    """Append a node of one output; in the nearest wider dtype where the operator does not take the inputs'."""
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
    """An operator with axes, which are an input in newer opsets and an attribute in older ones."""
    if "axes" in current_tracer(op_type).schema(op_type).attributes:
        return apply(op_type, x, axes=tuple(axes), **attributes)
    return apply(op_type, x, literal(list(axes), INT64), **attributes)


def both(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands, one of them a tensor at least, in the dtype in which they meet."""
    tensor, other = (a, b) if isinstance(a, _tensor.Tensor) else (b, a)
    floating = promotion.is_weak_float(other) and not is_float(tensor.dtype)
    a, b = _beside(a, tensor.dtype), _beside(b, tensor.dtype)
    if a._value.dtype == b._value.dtype:
        return a, b
    dtype = FLOAT32 if floating else promotion.promoted(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _beside(x: Any, dtype: np.dtype) -> Tensor:
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
