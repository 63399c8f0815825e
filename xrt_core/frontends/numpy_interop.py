"""NumPy protocols of traced tensors: operators are traced, any other function raises with the `xrt.ops` equivalent.

Also: detection of arrays of any library among the arguments and attributes of a graph, and conversion to NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.frontends.source_location import trace_error
from xrt_core.ir.foreign_memory import array_of_tensor
from xrt_core.ir.types import DTYPE_TO_ONNX

# `array + tensor` calls np.add(array, tensor), so these ufuncs are traced.
# ufunc -> (the method if the tensor is the first operand, the method if it is the second)
_OPERATORS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "add": ("__add__", "__radd__"), "subtract": ("__sub__", "__rsub__"), "multiply": ("__mul__", "__rmul__"),
        "divide": ("__truediv__", "__rtruediv__"), "floor_divide": ("__floordiv__", "__rfloordiv__"),
        "remainder": ("__mod__", "__rmod__"), "power": ("__pow__", "__rpow__"),
        "matmul": ("__matmul__", "__rmatmul__"), "equal": ("__eq__", "__eq__"), "not_equal": ("__ne__", "__ne__"),
        "less": ("__lt__", "__gt__"), "less_equal": ("__le__", "__ge__"), "greater": ("__gt__", "__lt__"),
        "greater_equal": ("__ge__", "__le__"), "bitwise_and": ("__and__", "__rand__"),
        "bitwise_or": ("__or__", "__ror__"), "bitwise_xor": ("__xor__", "__rxor__"),
        "left_shift": ("__lshift__", "__rlshift__"), "right_shift": ("__rshift__", "__rrshift__"),
    }
)  # fmt: skip

_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("sum", "mean", "max", "min", "prod"), "x.{0}(axis)"),
        **dict.fromkeys(("argmax", "argmin", "all", "any", "std", "var", "cumsum"), "x.{0}(axis)"),
        **dict.fromkeys(("exp", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil"), "xrt.ops.{1}(x), or x.{0}()"),
        **dict.fromkeys(("reshape", "transpose", "squeeze", "swapaxes", "broadcast_to", "clip"), "x.{0}(...)"),
        **dict.fromkeys(("tan", "arcsin", "arccos", "arctan", "sinh", "cosh"), "xrt.ops.{1}(x)"),
        **dict.fromkeys(("maximum", "fmax"), "xrt.ops.Max(x, y)"),
        **dict.fromkeys(("minimum", "fmin"), "xrt.ops.Min(x, y)"),
        **dict.fromkeys(("concatenate", "hstack", "vstack", "stack"), "xrt.ops.Concat(x, y, axis=...)"),
        **dict.fromkeys(("absolute", "fabs"), "abs(x), or xrt.ops.Abs(x)"),
        **dict.fromkeys(("logical_and", "logical_or", "logical_not", "logical_xor"), "& | ^ ~ on tensors of bool"),
        "add.reduce": "x.sum(axis)",
        "amax": "x.max(axis)",
        "amin": "x.min(axis)",
        "arcsinh": "xrt.ops.Asinh(x)",
        "arccosh": "xrt.ops.Acosh(x)",
        "arctanh": "xrt.ops.Atanh(x)",
        "dot": "x @ y",
        "einsum": "xrt.ops.Einsum(x, y, equation=...)",
        "expand_dims": "x.unsqueeze(axis)",
        "expm1": "x.exp() - 1",
        "isinf": "xrt.ops.IsInf(x)",
        "isnan": "xrt.ops.IsNaN(x)",
        "log1p": "(x + 1).log()",
        "maximum.reduce": "x.max(axis)",
        "minimum.reduce": "x.min(axis)",
        "negative": "-x",
        "nonzero": "xrt.ops.NonZero(x)",
        "pad": "xrt.ops.Pad(x, pads)",
        "reciprocal": "1 / x",
        "rint": "xrt.ops.Round(x)",
        "round": "x.round()",
        "sign": "xrt.ops.Sign(x)",
        "split": "xrt.ops.Split(x, axis=...)",
        "square": "x * x",
        "take": "xrt.ops.Gather(x, indices, axis=...)",
        "tile": "xrt.ops.Tile(x, repeats)",
        "topk": "xrt.ops.TopK(x, k)",
        "tril": "xrt.ops.Trilu(x, upper=0)",
        "triu": "xrt.ops.Trilu(x)",
        "where": "xrt.ops.Where(condition, x, y)",
    }
)
_NAMES: Final[Mapping[str, str]] = MappingProxyType({"arcsin": "Asin", "arccos": "Acos", "arctan": "Atan"})
_KNOWN: Final = frozenset({"shape", "ndim", "size"})


def ufunc_of_tensors(self: Any, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    """`__array_ufunc__`: trace an operator between an array and a tensor. Raises TraceError for other ufuncs."""
    name = ufunc.__name__
    if method != "__call__":
        raise _refusal(f"{name}.{method}")
    if name not in _OPERATORS:
        raise _refusal(name)
    if options:  # `array += tensor`, too
        given = ", ".join(f"{k}=" for k in options)
        raise trace_error(f"np.{name} with {given} cannot be traced: write a = a + b, and the like, without it")
    a, b = inputs
    first, second = _OPERATORS[name]
    return getattr(a, first)(b) if isinstance(a, type(self)) else getattr(b, second)(a)


def refuse(self: Any, function: Any, types: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`__array_function__`: answer np.shape, np.ndim and np.size; raise TraceError with the replacement for others."""
    if function.__name__ in _KNOWN and len(args) == 1 and not options:
        return getattr(args[0], function.__name__)
    raise _refusal(function.__name__)


def _refusal(name: str) -> Exception:
    instead = _INSTEAD.get(name, "xrt.ops.<Operator>, or the tensor's own methods and operators")
    instead = instead.format(name, _NAMES.get(name, name.capitalize()))
    return trace_error(f"np.{name} needs numbers, which are not known while tracing; use {instead}")


def is_array(obj: object) -> bool:
    """Return whether an object is an array of some library (NumPy scalars are, Python numbers are not)."""
    if isinstance(obj, np.ndarray | np.generic):
        return True
    kind = type(obj)
    return hasattr(kind, "__dlpack__") or hasattr(kind, "__array__")


def as_array(obj: Any) -> np.ndarray:
    """Convert an array-like object to a NumPy array, without a copy if its memory is host memory.

    Raises TraceError for an object that is not convertible, and for a dtype without an ONNX element type.
    """
    array: np.ndarray = obj
    if not isinstance(obj, np.ndarray):
        if hasattr(obj, "detach"):  # torch: a parameter that requires a gradient cannot be exported otherwise
            obj = _torch_view(obj.detach().cpu())
        try:
            array = np.asarray(obj)
        except Exception:
            try:
                array = np.from_dlpack(obj)
            except Exception as e:
                raise trace_error(f"{type(obj).__name__} object cannot become a NumPy array: {e}") from None
    if array.dtype.kind in "UST":
        array = array.astype(object)
    if array.dtype not in DTYPE_TO_ONNX:
        raise trace_error(f"ONNX has no element type for {array.dtype} (an array of shape {array.shape})")
    return array


def _torch_view(tensor: Any) -> Any:
    """Return the tensor, or for a dtype that torch cannot export to NumPy an array over its bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return tensor
    code = {1: "uint8", 2: "int16"}[tensor.element_size()]
    raw = array_of_tensor(tensor.contiguous().view(getattr(sys.modules["torch"], code)), np.dtype(code).str)
    return raw.view(getattr(ml_dtypes, name))
