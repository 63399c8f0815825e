"""Which nodes the library takes: a model of the one node is read, once per kind of node and process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_openvino import _toolkit
from xrt_openvino.deviations import deviation
from xrt_openvino.export import is_large, to_model

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
            if 0 in t.shape and (v.data is None or what == "output"):
                return f"{what} {v.name!r} of {node.operator} is {t}: an empty tensor is left to the host"
            kinds.append((t.dtype, len(t.shape), v.data is not None))
    if node.attributes and node.subgraphs:
        return f"{node.operator} has subgraphs, which XRT runs step by step with their parts on engines"
    if node.domain:
        return f"{node.operator} is not of the ONNX domain, which is the one openvino is asked about"
    found = deviation(node)
    if found is not None:
        return found
    key = (node.op_type, node.version, _attributes(node), len(node.inputs), *kinds)
    if key not in _verdicts:
        _remember(key, _trial(node, static=False))
    if _verdicts[key] is None:
        return None
    # some operators are only read where sizes are known
    exact = (key, *(_exact(v) for v in (*node.inputs, *node.outputs)))
    if exact not in _verdicts:
        _remember(exact, _trial(node, static=True))
    return _verdicts[exact]


def _exact(v: Value | None) -> Hashable:
    if v is None:
        return None
    return v.shape, v.data.tobytes() if _is_small(v) else None  # type: ignore[union-attr]


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


def _trial(node: Node, static: bool) -> str | None:
    """What the library says to a model of this node; without `static` the sizes of its tensors are unknown to it."""
    inputs: list[Value | None] = []
    entries: list[Value] = []
    for i, v in enumerate(node.inputs):
        if v is None:
            inputs.append(None)
        elif _is_small(v):
            inputs.append(Value(f"c{i}", v.type, v.data))
        else:
            fresh = Value(f"x{i}", v.type)
            inputs.append(fresh)
            entries.append(fresh)
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(node.outputs)]
    returned = [v for v in outputs if v is not None]
    graph = Graph(
        entries, returned, [node.replace(inputs=inputs, outputs=outputs)], opsets={"": node.version}, name="trial"
    )
    try:
        model = to_model(Function.from_graph(graph))
    except XRTError as e:
        return f"{node.operator}-{node.version} does not export: {e}"
    if not static:
        for p in (*model.graph.input, *model.graph.output):
            for d in p.type.tensor_type.shape.dim:
                d.Clear()
    refused = _toolkit.refusal(model.SerializeToString())
    return None if refused is None else f"openvino does not take {node.operator}-{node.version} so: {refused}"


def _unfit(value: Value, node: Node, what: str) -> str:
    """Why a value that is no tensor of known dtype and shape is refused."""
    t: Any = value.type
    where = f"{what} {value.name!r} of {node.operator}"
    if isinstance(t, SequenceType):
        return f"{where} is a sequence; openvino gets tensors only"
    if not isinstance(t, TensorType):
        return f"{where} has type {t or 'unknown'}; openvino gets dense tensors only"
    if t.dtype is None or t.shape is None:
        return f"{where} is {t}: dtype and rank must be known"
    return f"{where} is {t}: every dimension must be known"
