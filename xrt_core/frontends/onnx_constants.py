"""What ONNX writes in several ways: the forms of a Constant, sparse tensors, and names a subgraph takes from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto

from xrt_core.errors import ModelLoadError
from xrt_core.ir.graph import Attribute, SparseTensor
from xrt_core.ir.types import STRING


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


def free_names(a: AttributeProto, into: dict[str, None]) -> None:
    """Add the names that the subgraphs of an attribute use without making them."""
    if a.type == AttributeProto.GRAPH:
        _free_names(a.g, into)
    elif a.type == AttributeProto.GRAPHS:
        for g in a.graphs:
            _free_names(g, into)


def _free_names(g: GraphProto, into: dict[str, None]) -> None:
    own = {p.name for p in g.input}
    own.update(t.name for t in g.initializer)
    own.update(s.values.name for s in g.sparse_initializer)
    used: dict[str, None] = {}
    for p in g.node:
        own.update(p.output)
        used.update(dict.fromkeys(p.input))
        for a in p.attribute:
            free_names(a, used)
    used.update(dict.fromkeys(p.name for p in g.output))
    into.update((n, None) for n in used if n and n not in own)
