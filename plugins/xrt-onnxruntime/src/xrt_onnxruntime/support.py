"""Which nodes the library takes: a session of the one node is tried, once per kind of node and process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.types import STRING, SequenceType, TensorType, dtype_name
from xrt_onnxruntime import _toolkit
from xrt_onnxruntime.deviations import deviation
from xrt_onnxruntime.export import is_large, to_model

_PACKED: Final = frozenset(("int4", "uint4", "int2", "uint2", "float4_e2m1fn"))
_MANY: Final = 10_000  # kinds of nodes remembered

_verdicts: dict[Hashable, str | None] = {}


def why_not(node: Node) -> str | None:
    """Why the library cannot take `node`, or does not compute what ONNX says; None where it can and does."""
    kinds: list[Hashable] = []
    for what, values in (("input", node.inputs), ("output", node.outputs)):
        for v in values:
            if v is None:
                kinds.append(None)
                continue
            t = v.type
            if type(t) is not TensorType or t.dtype is None or t.shape is None or not t.is_static:
                return _unfit(v, node, what)
            dtype = t.dtype
            if dtype == STRING or (v.data is None and dtype.kind == "V" and dtype.name in _PACKED):
                name = dtype_name(dtype)
                return f"{what} {v.name!r} of {node.operator} is {name}; onnxruntime gets numbers of a byte or more"
            kinds.append((dtype, len(t.shape)))
    if node.attributes and node.subgraphs:
        return f"{node.operator} has subgraphs, which XRT runs step by step with their parts on engines"
    if node.domain not in ("", "ai.onnx.ml"):
        return f"{node.operator} is of no domain that onnxruntime's CPU kernels are for"
    if not node.domain and node.version > _toolkit.newest_opset():
        known = f"onnxruntime {_toolkit.version()} knows opsets up to {_toolkit.newest_opset()}"
        return f"{known}; {node.op_type}-{node.version} is newer"
    found = deviation(node)
    if found is not None:
        return found
    key = (node.domain, node.op_type, node.version, _attributes(node), len(node.inputs), *kinds)
    if key not in _verdicts:
        _remember(key, _trial(node, constants=False))
    reason = _verdicts[key]
    if reason is None or not any(v is not None and _is_small(v) for v in node.inputs):
        return reason
    # some kernels want to know an input when the session is made
    data = tuple((v.data.shape, v.data.tobytes()) if v is not None and _is_small(v) else None for v in node.inputs)  # type: ignore[union-attr]
    if (key, data) not in _verdicts:
        _remember((key, data), _trial(node, constants=True))
    return _verdicts[key, data]


def _is_small(v: Value) -> bool:
    return v.data is not None and not is_large(v.data)


def _remember(key: Hashable, verdict: str | None) -> None:
    if len(_verdicts) >= _MANY:
        _verdicts.clear()
    _verdicts[key] = verdict


def _attributes(node: Node) -> Hashable:
    return tuple((name, _frozen(a)) for name, a in node.attributes.items())


def _frozen(attribute: Any) -> Hashable:
    """What tells an attribute from others, hashable."""
    if isinstance(attribute, np.ndarray):
        return attribute.dtype, attribute.shape, attribute.tobytes()
    if isinstance(attribute, SparseTensor):
        return _frozen(attribute.values), _frozen(attribute.indices), attribute.dims
    if isinstance(attribute, tuple):
        return tuple(map(_frozen, attribute))
    found: Hashable = attribute
    return type(attribute), found


def _trial(node: Node, constants: bool) -> str | None:
    """What the library says to a model of this node, whose inputs are of unknown sizes unless they are `constants`."""
    inputs: list[Value | None] = []
    entries: list[Value] = []
    for i, v in enumerate(node.inputs):
        if v is None:
            inputs.append(None)
        elif constants and _is_small(v):
            inputs.append(Value(f"c{i}", v.type, v.data))
        else:
            fresh = Value(f"x{i}", v.type)
            inputs.append(fresh)
            entries.append(fresh)
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(node.outputs)]
    returned = [v for v in outputs if v is not None]
    opsets = {"": _toolkit.newest_opset()}
    graph = Graph(entries, returned, [node.replace(inputs=inputs, outputs=outputs)], opsets=opsets, name="trial")
    try:
        model = to_model(Function.from_graph(graph), opsets[""])
    except XRTError as e:
        return f"{node.operator}-{node.version} does not export: {e}"
    if not constants:
        for p in (*model.graph.input, *model.graph.output):
            for d in p.type.tensor_type.shape.dim:
                d.Clear()
    refused = _toolkit.refusal(model.SerializeToString())
    return None if refused is None else f"onnxruntime does not take {node.operator}-{node.version} so: {refused}"


def _unfit(value: Value, node: Node, what: str) -> str:
    """Why a value that is no tensor of known dtype and shape is refused."""
    t: Any = value.type
    where = f"{what} {value.name!r} of {node.operator}"
    if isinstance(t, SequenceType):
        return f"{where} is a sequence; onnxruntime gets tensors only"
    if not isinstance(t, TensorType):
        return f"{where} has type {t or 'unknown'}; onnxruntime gets dense tensors only"
    if t.dtype is None or t.shape is None:
        return f"{where} is {t}: dtype and rank must be known"
    return f"{where} is {t}: every dimension must be known"
