"""Types, tensors and attributes between ONNX protobufs and the IR, both ways.

This module imports `onnx`; `import xrt_core` does not import this module.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any, Final, cast

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, TensorProto, TypeProto

from xrt_core.errors import ExportError, ModelLoadError
from xrt_core.ir.graph import Attribute, Graph, SparseTensor
from xrt_core.ir.long_list import LONG, MOST_TEXTS, LongList, text_of
from xrt_core.ir.types import (
    DTYPE_TO_ONNX,
    ONNX_TO_DTYPE,
    STRING,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
    ValueType,
    dtype_name,
)

# bits of an element where it takes less than a byte in raw_data
_SUB_BYTE = {
    np.dtype(ml_dtypes.uint4): 4, np.dtype(ml_dtypes.int4): 4, np.dtype(ml_dtypes.float4_e2m1fn): 4,
    np.dtype(ml_dtypes.uint2): 2, np.dtype(ml_dtypes.int2): 2,
}  # fmt: skip


def dtype_from_onnx(elem_type: int, where: str) -> np.dtype | None:
    """The dtype of a TensorProto.DataType number; None for UNDEFINED. Raises ModelLoadError for an unknown number."""
    if elem_type == 0:
        return None
    try:
        return ONNX_TO_DTYPE[elem_type]
    except KeyError:
        raise ModelLoadError(f"{where}: unknown element type {elem_type} (known: 1 to {max(ONNX_TO_DTYPE)})") from None


def dtype_to_onnx(dtype: np.dtype) -> int:
    """The TensorProto.DataType number of a dtype. Raises ExportError where ONNX has none."""
    try:
        return DTYPE_TO_ONNX[dtype]
    except KeyError:
        raise ExportError(f"dtype {dtype} has no ONNX element type") from None


def type_from_proto(proto: TypeProto, where: str) -> ValueType | None:
    """The IR type of a TypeProto; None where the proto says nothing.

    A dimension that is missing, empty or negative is unknown (None).
    """
    kind = proto.WhichOneof("value")
    if kind == "tensor_type" or kind == "sparse_tensor_type":
        t = proto.tensor_type if kind == "tensor_type" else proto.sparse_tensor_type
        dtype = dtype_from_onnx(t.elem_type, where)
        shape: tuple[Dim, ...] | None = None
        if t.HasField("shape"):
            dims: list[Dim] = []
            for d in t.shape.dim:
                field = d.WhichOneof("value")
                if field == "dim_value":
                    dims.append(d.dim_value if d.dim_value >= 0 else None)
                else:
                    dims.append((_symbol(d.dim_param) or None) if field else None)
            shape = tuple(dims)
        return TensorType(dtype, shape) if kind == "tensor_type" else SparseTensorType(dtype, shape)
    if kind == "sequence_type":
        return SequenceType(type_from_proto(proto.sequence_type.elem_type, where))
    if kind == "optional_type":
        return OptionalType(type_from_proto(proto.optional_type.elem_type, where))
    if kind == "map_type":
        key = dtype_from_onnx(proto.map_type.key_type, where)
        return MapType(key or np.dtype(np.int64), type_from_proto(proto.map_type.value_type, where))
    return None


def _symbol(name: str | bytes) -> str:
    # protobuf gives a string that is not UTF-8 as bytes
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


def type_to_proto(type: ValueType | None, proto: TypeProto | None = None) -> TypeProto:
    """The TypeProto of an IR type (written into `proto` where one is given)."""
    proto = TypeProto() if proto is None else proto
    if isinstance(type, TensorType | SparseTensorType):
        t = proto.tensor_type if isinstance(type, TensorType) else proto.sparse_tensor_type
        t.elem_type = 0 if type.dtype is None else dtype_to_onnx(type.dtype)
        if type.shape is not None:
            t.shape.SetInParent()
            for d in type.shape:
                dim = t.shape.dim.add()
                if isinstance(d, str):
                    dim.dim_param = d
                elif d is not None:  # of NumPy's types as well
                    dim.dim_value = d
    elif isinstance(type, SequenceType):
        proto.sequence_type.SetInParent()
        type_to_proto(type.element, proto.sequence_type.elem_type)
    elif isinstance(type, OptionalType):
        proto.optional_type.SetInParent()
        type_to_proto(type.element, proto.optional_type.elem_type)
    elif isinstance(type, MapType):
        proto.map_type.key_type = dtype_to_onnx(type.key)
        type_to_proto(type.value, proto.map_type.value_type)
    return proto


def unpack(raw: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """`count` sub-byte elements out of packed bytes, low bits first, one byte each in the result."""
    bits = _SUB_BYTE[dtype]
    per = 8 // bits
    out = np.empty((raw.size, per), np.uint8)
    for i in range(per):
        out[:, i] = (raw >> (bits * i)) & ((1 << bits) - 1)
    flat: np.ndarray = out.reshape(-1)[:count]
    if dtype.name in ("int4", "int2"):  # ml_dtypes keeps the sign in the whole byte
        sign = 1 << (bits - 1)
        return ((flat ^ sign).astype(np.int16) - sign).astype(np.int8).astype(dtype)
    return flat.view(dtype)


def pack(array: np.ndarray) -> bytes:
    """The packed bytes of a sub-byte array, low bits first, the last byte filled with zeros."""
    bits = _SUB_BYTE[array.dtype]
    per = 8 // bits
    flat = array.reshape(-1)
    signed = array.dtype.name in ("int4", "int2")
    codes: np.ndarray = (flat.astype(np.int8) if signed else flat).view(np.uint8)
    codes = codes & ((1 << bits) - 1)
    padded = np.zeros(-(-codes.size // per) * per, np.uint8)
    padded[: codes.size] = codes
    out = np.zeros(padded.size // per, np.uint8)
    for i in range(per):
        out |= padded[i::per] << (bits * i)
    return out.tobytes()


def array_from_bytes(raw: Any, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    """The array over a buffer in ONNX's raw layout (little-endian), without a copy except for sub-byte types.

    Raises ModelLoadError where the buffer has not the size that dtype and shape ask for.
    """
    buffer = np.frombuffer(raw, np.uint8) if not isinstance(raw, np.ndarray) else raw
    count = math.prod(shape)  # of Python's integers, which do not wrap round
    bits = _SUB_BYTE.get(dtype, dtype.itemsize * 8)
    need = -(-count * bits // 8)
    if buffer.nbytes != need:
        raise ModelLoadError(
            f"{where}: {buffer.nbytes} bytes of data for {dtype_name(dtype)}{list(shape)}, which takes {need}"
        )
    found = unpack(buffer, dtype, count) if dtype in _SUB_BYTE else buffer.view(dtype)
    try:
        return found.reshape(shape)
    except ValueError as e:  # of no elements, with a dimension that no array has
        raise ModelLoadError(f"{where}: no array has the shape {list(shape)}: {e}") from e


def array_from_tensor(t: TensorProto, where: str, folder: pathlib.Path | None = None) -> np.ndarray:
    """The array of a TensorProto that is not stored externally. Raises ModelLoadError for damaged data."""
    dtype = dtype_from_onnx(t.data_type, where)
    if dtype is None:
        raise ModelLoadError(f"{where}: the tensor has no element type")
    shape = tuple(t.dims)
    if any(d < 0 for d in shape):
        raise ModelLoadError(f"{where}: negative dimension in {list(shape)}")
    if t.HasField("raw_data") and dtype != STRING:
        return array_from_bytes(t.raw_data, dtype, shape, where)
    try:
        if dtype == STRING:
            data = np.array([s.decode("utf-8", "surrogateescape") for s in t.string_data], dtype=object)
            return data.reshape(shape)
        return np.asarray(onnx.numpy_helper.to_array(t)).reshape(shape)
    except (ValueError, TypeError, RuntimeError) as e:
        raise ModelLoadError(f"{where}: tensor data does not fit {dtype_name(dtype)}{list(shape)}: {e}") from e


def tensor_from_array(array: np.ndarray, name: str = "") -> TensorProto:
    """The TensorProto of an array, in raw layout (strings in `string_data`)."""
    t = TensorProto(name=name, data_type=dtype_to_onnx(array.dtype), dims=array.shape)
    if array.dtype == STRING:
        for s in array.reshape(-1):
            t.string_data.append(s if isinstance(s, bytes) else str(s).encode("utf-8", "surrogateescape"))
    elif array.dtype in _SUB_BYTE:
        t.raw_data = pack(array)
    else:
        t.raw_data = array.tobytes()
    return t


def attribute_from_proto(a: AttributeProto, graph: Callable[[GraphProto], Graph], where: str) -> Attribute:
    """The IR value of an attribute: int, float, str (bytes where not UTF-8), array, Graph, type, or a tuple of them,
    or a LongList.

    `graph` imports a subgraph. Raises ModelLoadError for an attribute of unknown kind or damaged data.
    """
    kind = a.type
    where = f"{where}, attribute {a.name!r}"
    if kind == AttributeProto.INT:
        return a.i
    if kind == AttributeProto.INTS:
        return tuple(a.ints) if len(a.ints) < LONG else LongList("ints", np.fromiter(a.ints, np.int64, len(a.ints)))
    if kind == AttributeProto.FLOAT:
        return a.f
    if kind == AttributeProto.FLOATS:
        if len(a.floats) < LONG:
            return tuple(a.floats)
        return LongList("floats", np.fromiter(a.floats, np.float32, len(a.floats)))
    if kind == AttributeProto.STRING:
        return text_of(a.s)
    if kind == AttributeProto.STRINGS:
        texts = {s: text_of(s) for s in dict.fromkeys(a.strings)}  # tables say the same few words in each row
        if len(a.strings) < LONG or len(texts) > MOST_TEXTS:
            return tuple(map(texts.__getitem__, a.strings))
        places = {s: i for i, s in enumerate(texts)}
        array = np.fromiter(map(places.__getitem__, a.strings), np.uint8, len(a.strings))
        return LongList("strings", array, list(texts.values()))
    if kind == AttributeProto.TENSOR:
        return array_from_tensor(a.t, where)
    if kind == AttributeProto.TENSORS:
        return tuple(array_from_tensor(t, where) for t in a.tensors)
    if kind == AttributeProto.GRAPH:
        return graph(a.g)
    if kind == AttributeProto.GRAPHS:
        return tuple(graph(g) for g in a.graphs)
    if kind == AttributeProto.TYPE_PROTO:
        found = type_from_proto(a.tp, where)
        if found is None:
            raise ModelLoadError(f"{where}: the type is empty")
        return found
    if kind == AttributeProto.TYPE_PROTOS:
        return tuple(t for p in a.type_protos if (t := type_from_proto(p, where)) is not None)
    if kind == AttributeProto.SPARSE_TENSOR:
        s = a.sparse_tensor
        return SparseTensor(array_from_tensor(s.values, where), array_from_tensor(s.indices, where), tuple(s.dims))
    raise ModelLoadError(f"{where}: attribute type {kind} is not known")


ListWriter = Callable[[AttributeProto, LongList], bool]
_LIST_KINDS: Final = {"floats": AttributeProto.FLOATS, "ints": AttributeProto.INTS, "strings": AttributeProto.STRINGS}


def attribute_to_proto(
    name: str,
    value: Attribute,
    graph: Callable[[Graph], GraphProto] | None = None,
    kind: int = 0,
    long_list: ListWriter | None = None,
) -> AttributeProto:
    """The AttributeProto of an IR attribute value.

    `graph` exports a subgraph; `kind` is the schema's AttributeProto.AttributeType, which an empty tuple needs.
    `long_list` may take the elements of a LongList: it returns False for those that are to be written here.
    Raises ExportError for a value that ONNX attributes cannot hold.
    """
    a = AttributeProto(name=name)
    if isinstance(value, bool | int | np.integer):
        a.type, a.i = AttributeProto.INT, int(value)
    elif isinstance(value, float | np.floating):
        a.type, a.f = AttributeProto.FLOAT, float(value)
    elif isinstance(value, str | bytes):
        a.type, a.s = AttributeProto.STRING, _bytes(value)
    elif isinstance(value, np.ndarray):
        a.type = AttributeProto.TENSOR
        a.t.CopyFrom(tensor_from_array(value))
    elif isinstance(value, Graph):
        a.type = AttributeProto.GRAPH
        a.g.CopyFrom(_export(graph, name, value))
    elif isinstance(value, SparseTensor):
        a.type = AttributeProto.SPARSE_TENSOR
        a.sparse_tensor.values.CopyFrom(tensor_from_array(value.values))
        a.sparse_tensor.indices.CopyFrom(tensor_from_array(value.indices))
        a.sparse_tensor.dims.extend(value.dims)
    elif isinstance(value, ValueType):
        a.type = AttributeProto.TYPE_PROTO
        type_to_proto(value, a.tp)
    elif isinstance(value, tuple):
        _list_to_proto(a, value, graph, kind)
    elif isinstance(value, LongList):
        a.type = _LIST_KINDS[value.kind]
        if long_list is None or not long_list(a, value):
            _list_to_proto(a, value[:], graph, kind)
    else:
        raise ExportError(f"attribute {name!r} holds a {type(value).__name__}, which ONNX has no attribute type for")
    return a


def _list_to_proto(
    a: AttributeProto, values: tuple[Any, ...], graph: Callable[[Graph], GraphProto] | None, kind: int
) -> None:
    first = values[0] if values else None
    if first is None:
        a.type = cast(Any, kind or AttributeProto.INTS)
    elif isinstance(first, float) or any(issubclass(t, float) for t in set(map(type, values))):
        a.type = AttributeProto.FLOATS
        a.floats.extend(values)
    elif isinstance(first, int | np.integer):
        a.type = AttributeProto.INTS
        a.ints.extend(values)
    elif isinstance(first, str | bytes):
        a.type = AttributeProto.STRINGS
        texts = {v: _bytes(v) for v in set(values)}
        a.strings.extend(map(texts.__getitem__, values))
    elif isinstance(first, np.ndarray):
        a.type = AttributeProto.TENSORS
        a.tensors.extend(tensor_from_array(v) for v in values)
    elif isinstance(first, Graph):
        a.type = AttributeProto.GRAPHS
        a.graphs.extend(_export(graph, a.name, v) for v in values)
    elif isinstance(first, ValueType):
        a.type = AttributeProto.TYPE_PROTOS
        a.type_protos.extend(type_to_proto(v) for v in values)
    else:
        raise ExportError(f"attribute {a.name!r}: a list of {type(first).__name__} has no ONNX attribute type")


def _export(graph: Callable[[Graph], GraphProto] | None, name: str, value: Graph) -> GraphProto:
    if graph is None:
        raise ExportError(f"attribute {name!r} is a subgraph, which is not exported here")
    return graph(value)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
