"""Attributes of operators: from what Python code gives to what the IR holds, checked against the schema's kind."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.frontends.arrays import as_array, is_array
from xrt_core.frontends.locations import trace_error
from xrt_core.ir.graph import Attribute, Graph, SparseTensor
from xrt_core.ir.schema import AttributeKind
from xrt_core.ir.types import (
    DTYPE_TO_ONNX,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
    dtype_from_name,
)

_TYPES = (TensorType, SparseTensorType, SequenceType, OptionalType, MapType)


def attribute_value(kind: AttributeKind, value: Any, where: str, op: str = "") -> Attribute:
    """The IR's form of an attribute of a kind: ints also from dtypes (`to=np.float16`), tensors from any array.

    Raises TraceError, naming `where` and what is expected, for a value of another kind.
    """
    single = _SINGLE.get(kind)
    if single is not None:
        try:
            made: Attribute = single(value)
        except (TypeError, ValueError, OverflowError, GraphError):
            raise trace_error(f"{where} must be {_EXPECTED[kind]}, not {_told(value)}") from None
        if op == "ConstantOfShape" and isinstance(made, np.ndarray) and made.ndim == 0:
            return made.reshape(1)  # ONNX asks for a tensor of one element there
        return made
    one = _LISTS[kind]
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise trace_error(f"{where} must be a list of which each is {_EXPECTED[one]}, not {_told(value)}")
    return tuple(attribute_value(one, v, f"{where}[{i}]") for i, v in enumerate(value))


def _told(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _int(value: Any) -> int:
    if isinstance(value, str):
        return DTYPE_TO_ONNX[dtype_from_name(value)]
    if isinstance(value, np.dtype) or (isinstance(value, type) and not issubclass(value, int | float | bool)):
        return _element_type(np.dtype(value))
    if isinstance(value, type):
        return _element_type(np.dtype({int: np.int64, float: np.float32}.get(value, value)))
    made = operator.index(value)
    if not -(2**63) <= made < 2**63:
        raise OverflowError
    return int(made)


def _element_type(dtype: np.dtype) -> int:
    if dtype not in DTYPE_TO_ONNX:
        raise TypeError
    return DTYPE_TO_ONNX[dtype]


def _float(value: Any) -> float:
    if isinstance(value, int | float | np.integer | np.floating):
        return float(value)
    raise TypeError


def _string(value: Any) -> str | bytes:
    if isinstance(value, str | bytes):
        return value
    raise TypeError


def _tensor(value: Any) -> np.ndarray:
    if is_array(value):
        return as_array(value)
    array = np.asarray(value)
    natural = {"b": np.bool_, "i": np.int64, "f": np.float32, "U": object}.get(array.dtype.kind)
    if natural is None:
        raise TypeError
    return array.astype(natural)


def _instance(kinds: tuple[type, ...]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, kinds):
            return value
        raise TypeError

    return check


_SINGLE: Mapping[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "string": _string,
    "tensor": _tensor,
    "sparse_tensor": _instance((SparseTensor,)),
    "type": _instance(_TYPES),
    "graph": _instance((Graph,)),
}
_LISTS: Mapping[str, AttributeKind] = {
    "ints": "int", "floats": "float", "strings": "string", "tensors": "tensor", "graphs": "graph", "types": "type",
    "sparse_tensors": "sparse_tensor",
}  # fmt: skip
_EXPECTED: Mapping[str, str] = {
    "int": "an integer",
    "float": "a number",
    "string": "a string",
    "tensor": "an array or a number",
    "sparse_tensor": "an xrt_core.ir.graph.SparseTensor",
    "type": "a type such as xrt_core.ir.types.TensorType",
    "graph": "an ir.Graph",
}
