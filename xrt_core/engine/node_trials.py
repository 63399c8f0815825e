"""Which nodes a library of ONNX models takes: it is given a model of the one node, once per kind of node."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.onnx_model import is_large, onnx_model
from xrt_core.errors import XRTError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.types import STRING, SequenceType, TensorType

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["NodeTrials", "frozen", "why_unfit"]

_REMEMBERED: Final = 10_000


def why_unfit(node: Node, engine: str) -> str | None:
    """Why a library of static ONNX models cannot take `node`, whatever it computes; None where it might.

    Every input and output must be a tensor of known dtype and shape, and the node must have no subgraphs.
    """
    for what, values in (("input", node.inputs), ("output", node.outputs)):
        for v in values:
            if v is None:
                continue
            t = v.type
            if type(t) is not TensorType or t.dtype is None or t.shape is None or not t.is_static:
                return _unfit(v, f"{what} {v.name!r} of {node.operator}", engine)
    if node.attributes and node.subgraphs:
        return f"{node.operator} has subgraphs, which XRT runs step by step with their parts on engines"
    return None


class NodeTrials:
    """What a library says to models of single nodes, remembered.

    engine: its name, for messages. refusal: what the library says when it refuses a model, in one line, or None.
    newest_opset: as in `onnx_model`. May be asked from many threads.
    """

    def __init__(
        self, engine: str, refusal: Callable[[ModelProto], str | None], *, newest_opset: int | None = None
    ) -> None:
        self._engine = engine
        self._refusal = refusal
        self._newest_opset = newest_opset
        self._verdicts: dict[Hashable, str | None] = {}

    def why_not(self, node: Node) -> str | None:
        """Why the library does not take `node`, which `why_unfit` lets pass; None where it takes it.

        The first trial of a kind (operator, version, attributes, dtypes and ranks, which inputs are known) tells the
        library no sizes. What it refuses so is tried again with the sizes and known values of this very node: some
        operators are only taken with them.
        """
        kind = (
            node.domain,
            node.op_type,
            node.version,
            tuple((name, frozen(a)) for name, a in node.attributes.items()),
            len(node.inputs),
            *(_kind(v) for v in (*node.inputs, *node.outputs)),
        )
        if self._verdict(kind, node, sizes=False) is None:
            return None
        return self._verdict((kind, *(_exact(v) for v in (*node.inputs, *node.outputs))), node, sizes=True)

    def _verdict(self, key: Hashable, node: Node, *, sizes: bool) -> str | None:
        try:
            return self._verdicts[key]
        except KeyError:
            verdict = self._trial(node, sizes)
        if len(self._verdicts) >= _REMEMBERED:
            self._verdicts.clear()
        self._verdicts[key] = verdict
        return verdict

    def _trial(self, node: Node, sizes: bool) -> str | None:
        try:
            function = _alone(node, self._newest_opset)
            model = onnx_model(function, engine=self._engine, newest_opset=self._newest_opset).model
        except XRTError as e:
            return f"{node.operator}-{node.version} does not export: {e}"
        if not sizes:
            for p in (*model.graph.input, *model.graph.output):
                for d in p.type.tensor_type.shape.dim:
                    d.Clear()
        refused = self._refusal(model)
        return None if refused is None else f"{self._engine} does not take {node.operator}-{node.version} so: {refused}"


def _alone(node: Node, opset: int | None) -> Function:
    """A function of the one node. Its small constants stay constants; every other input is a parameter."""
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
    opsets = {"": node.version if opset is None else opset}
    return Function.from_graph(
        Graph(entries, returned, [node.replace(inputs=inputs, outputs=outputs)], opsets=opsets, name="trial")
    )


def _is_small(v: Value) -> bool:
    return v.data is not None and not is_large(v.data)


def _kind(v: Value | None) -> Hashable:
    return None if v is None else (v.dtype, len(v.shape or ()), _is_small(v))


def _exact(v: Value | None) -> Hashable:
    if v is None:
        return None
    return v.shape, frozen(v.data) if _is_small(v) else None


def frozen(attribute: Any) -> Hashable:
    """What tells an attribute, or a constant, from others, hashable."""
    if isinstance(attribute, np.ndarray):
        content = tuple(attribute.ravel().tolist()) if attribute.dtype == STRING else attribute.tobytes()
        return attribute.dtype, attribute.shape, content
    if isinstance(attribute, SparseTensor):
        return frozen(attribute.values), frozen(attribute.indices), attribute.dims
    if isinstance(attribute, tuple):
        return tuple(map(frozen, attribute))
    found: Hashable = attribute
    return type(attribute), found


def _unfit(value: Value, where: str, engine: str) -> str:
    t: Any = value.type
    if isinstance(t, SequenceType):
        return f"{where} is a sequence; {engine} gets tensors only"
    if not isinstance(t, TensorType):
        return f"{where} has type {t or 'unknown'}; {engine} gets dense tensors only"
    if t.dtype is None or t.shape is None:
        return f"{where} is {t}: dtype and rank must be known"
    return f"{where} is {t}: every dimension must be known"
