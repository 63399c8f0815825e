"""Attributes and tensors of one model: references resolved, bytes taken from where they lie, constants made arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_file import ExternalData
from xrt_core.frontends.onnx_scope import Context, Scope, missing_attribute, node_label
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.graph import Attribute, Graph, SparseTensor
from xrt_core.ir.onnx_proto import array_from_bytes, array_from_tensor, attribute_from_proto, dtype_from_onnx
from xrt_core.ir.schema import ATTRIBUTE_KINDS, Schema
from xrt_core.ir.types import STRING

_INT: Final = AttributeProto.INT
_INTS: Final = AttributeProto.INTS

GraphReader = Callable[[GraphProto, Context, Scope], Graph]


def constant_array(attributes: Mapping[str, Attribute], where: str) -> np.ndarray:
    """The array that a Constant node holds, in whichever of its attributes. Raises ModelLoadError for none or two."""
    forms = [n for n in attributes if n.startswith(("value", "sparse_value"))]
    if len(forms) != 1:
        raise ModelLoadError(f"{where}: a Constant needs exactly one of its value attributes, not {forms or 'none'}")
    name, value = forms[0], attributes[forms[0]]
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, SparseTensor):
        return dense(value, where)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    if name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    made = np.empty((len(value),) if isinstance(value, tuple) else (), STRING)
    made[...] = value
    return made


def dense(sparse: SparseTensor, where: str) -> np.ndarray:
    """The dense array of a COO tensor: indices are linear [count] or by coordinate [count, rank].

    Raises ModelLoadError where values, indices and dims do not fit each other.
    """
    values, indices, dims = sparse.values, sparse.indices, tuple(int(d) for d in sparse.dims)
    count = values.size
    try:
        if any(d < 0 for d in dims):
            raise ValueError(f"negative dimension in {list(dims)}")
        if indices.dtype != np.int64 or indices.shape not in ((count,), (count, len(dims))):
            raise ValueError(f"indices {indices.dtype}{list(indices.shape)} for {count} values of rank {len(dims)}")
        if indices.ndim == 1:
            if count and not 0 <= int(indices.min()) <= int(indices.max()) < int(np.prod(dims, dtype=object)):
                raise ValueError("an index lies outside the tensor")
            place: Any = np.unravel_index(indices, dims)
        else:
            if count and (indices.min() < 0 or np.any(indices >= np.array(dims))):
                raise ValueError("an index lies outside the tensor")
            place = tuple(indices.T)
        out = np.full(dims, "", STRING) if values.dtype == STRING else np.zeros(dims, values.dtype)
        out[place] = values.reshape(-1)
    except (ValueError, MemoryError) as e:
        raise ModelLoadError(f"{where}: sparse tensor of dims {list(dims)} is damaged: {e}") from e
    return out


class AttributeReader:
    """Attributes of the nodes of one model.

    weights resolves the markers of `onnx_wire`, external resolves external data, graph reads a subgraph.
    """

    def __init__(self, weights: Weights | None, external: ExternalData, graph: GraphReader) -> None:
        self._weights = weights
        self._external = external
        self._graph = graph

    def all_of(self, p: NodeProto, schema: Schema, scope: Scope, context: Context) -> dict[str, Attribute] | None:
        found: dict[str, Attribute] = {}
        known = schema.attributes
        for a in p.attribute:
            name, kind = a.name, a.type
            if name in found:
                raise ModelLoadError(f"{node_label(p)}: attribute {name!r} is given twice")
            spec = known.get(name)
            if spec is None:
                if not name.startswith("__"):
                    raise ModelLoadError(
                        f"{node_label(p)}: {schema.operator} (of opset {schema.since_version}) has no attribute "
                        f"{name!r}; it has {sorted(known) or 'none'}"
                    )
            elif ATTRIBUTE_KINDS.get(kind) != spec.kind:
                raise ModelLoadError(
                    f"{node_label(p)}: attribute {name!r} is of kind {ATTRIBUTE_KINDS.get(kind, kind)!r}, "
                    f"but {schema.operator} takes {spec.kind!r}"
                )
            if kind == _INT and context.references is None:
                found[name] = a.i
            else:
                resolved = self.kind_and_value(a, scope, context, node_label(p))
                if resolved is not None:
                    found[name] = resolved[1]
        for name in schema.required_attributes:
            if name not in found:
                raise missing_attribute(p, name)
        return found

    def kind_and_value(
        self, a: AttributeProto, scope: Scope, context: Context, where: str
    ) -> tuple[int, Attribute] | None:
        """Kind and value of an attribute, taken from the caller where it is a reference; None where not given."""
        kind = a.type
        if a.ref_attr_name:
            if context.references is None:
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} refers to {a.ref_attr_name!r}, but stands outside a function"
                )
            found = context.references.get(a.ref_attr_name)
            if found is not None and kind not in (found[0], AttributeProto.UNDEFINED):
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} of kind {ATTRIBUTE_KINDS.get(kind, kind)!r} refers to "
                    f"{a.ref_attr_name!r}, which is given as {ATTRIBUTE_KINDS.get(found[0], found[0])!r}"
                )
            return found
        return kind, self.value(a, kind, scope, context, where)

    def value(self, a: AttributeProto, kind: int, scope: Scope, context: Context, where: str) -> Attribute:
        if kind == _INT:
            return a.i
        if kind == _INTS:
            return tuple(a.ints)
        if kind == AttributeProto.FLOAT:
            return a.f
        if kind == AttributeProto.TENSOR:
            return self.array(a.t, f"{where}, attribute {a.name!r}")
        if kind == AttributeProto.TENSORS:
            return tuple(self.array(t, f"{where}, attribute {a.name!r}") for t in a.tensors)
        if kind == AttributeProto.SPARSE_TENSOR:
            s = a.sparse_tensor
            at = f"{where}, attribute {a.name!r}"
            return SparseTensor(self.array(s.values, at), self.array(s.indices, at), tuple(s.dims))
        return attribute_from_proto(a, lambda g: self._graph(g, context, scope), where)

    def dense(self, s: Any, where: str) -> np.ndarray:
        return dense(SparseTensor(self.array(s.values, where), self.array(s.indices, where), tuple(s.dims)), where)

    def array(self, t: TensorProto, where: str) -> np.ndarray:
        """The array of a tensor, wherever its bytes lie."""
        if t.data_location == TensorProto.EXTERNAL:
            raw: np.ndarray | None = self._external.find(t, where)
        else:
            raw = None if self._weights is None else self._weights.find(t)
        if raw is None:
            return array_from_tensor(t, where)
        dtype = dtype_from_onnx(t.data_type, where)
        if dtype is None or dtype == STRING:
            kind = "no type" if dtype is None else "strings"
            raise ModelLoadError(f"{where}: a tensor of {kind} cannot be stored as raw bytes")
        if any(d < 0 for d in t.dims):
            raise ModelLoadError(f"{where}: negative dimension in {list(t.dims)}")
        return array_from_bytes(raw, dtype, tuple(t.dims), where)
