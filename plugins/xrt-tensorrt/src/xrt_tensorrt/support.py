"""Which nodes TensorRT takes: its own parser is asked, once per kind of node, and op kernels write what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from xrt_core.engine.contract import Function
from xrt_core.engine.onnx_bridge import OnnxModel, frozen, onnx_model, why_unfit
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import DIALECT, latest_opset, opset_range
from xrt_core.ir.types import STRING, TensorType
from xrt_tensorrt import _toolkit, kernels  # noqa: F401  (registers them)
from xrt_tensorrt.carrying import carried, has_uint8, why_not_carried
from xrt_tensorrt.deviations import FROM_BODY, NOT_FROM_BODY, TRAIN, deviation
from xrt_tensorrt.expansion import expand, has_body
from xrt_tensorrt.joining import trial
from xrt_tensorrt.kernels.context import EIGHT_BITS
from xrt_tensorrt.splitting import is_computed_ahead

_MANY: Final = 20_000
_FEW: Final = 4096  # bytes of a constant that the parser may look into; larger ones are weights


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a trial. reason: why the node is not taken, "" where it is.

    way: how it is: by the "parser", by the standard's "body" of its operator, which the parser reads, or by a "kernel"
    of this package.
    """

    reason: str = ""
    way: str = "parser"


_verdicts: dict[Hashable, Verdict] = {}
_lock = threading.Lock()


def verdict(node: Node) -> Verdict:
    """Whether TensorRT takes `node`, and how. A trial takes under a millisecond, a question that was asked a few us."""
    attributes = node.attributes
    key = (
        node.domain,
        node.op_type,
        node.version,
        tuple([(name, frozen(a)) for name, a in attributes.items()]) if attributes else None,
        tuple([None if v is None else _kind(v) for v in node.inputs]),
        tuple([None if v is None else _kind(v) for v in node.outputs]),
    )
    known = _verdicts.get(key)
    if known is None:
        found = why_unfit(node, "tensorrt", open_shapes="results")
        if found is not None:
            return Verdict(found)
        known = _tried(node)
        if any(v is not None and repr(v.name) in known.reason for v in (*node.inputs, *node.outputs)):
            return known  # what names tensors of this node is not said of others
        with _lock:
            if len(_verdicts) >= _MANY:
                _verdicts.clear()
            _verdicts[key] = known
    return known


def has_open_shapes(node: Node) -> bool:
    """Whether the shape of a result depends on data: it is not known where those of the inputs are."""
    known = all(v is None or v.is_static for v in node.inputs)
    return known and any(v is not None and not v.is_static for v in node.outputs)


def takes_for_training(node: Node) -> bool:
    """Whether the operator is one for training: its forward and its gradient need no weights."""
    if not node.domain and node.op_type in TRAIN:
        return True
    entry = op_kernels.find("tensorrt", node.domain, node.op_type)
    return entry is not None and entry.train


def _tried(node: Node) -> Verdict:
    """The parser first, then the standard's body, then a kernel; the first one's reason where none takes it."""
    reason = deviation(node) or ""
    if not reason and node.domain != DIALECT:
        reason = why_not_carried(node) if has_uint8(node) else ""
        if not reason:
            found = _by_parser(carried(node) if has_uint8(node) else node)
            if not found.reason:
                return found
            reason = found.reason
    if op_kernels.find("tensorrt", node.domain, node.op_type) is None:
        return Verdict(reason or f"tensorrt does not take {node.operator}")
    if is_computed_ahead(node):
        return Verdict(way="kernel")
    by_kernel = op_kernels.supports("tensorrt", node, "cuda", "inference")
    if not by_kernel:
        return Verdict(f"{reason}; {by_kernel.reason}" if reason else by_kernel.reason)
    refused = trial(_toolkit.toolkit(), node)
    return Verdict(refused) if refused else Verdict(way="kernel")


def _by_parser(node: Node) -> Verdict:
    has = node.op_type not in NOT_FROM_BODY and has_body(node)
    if has and node.op_type in FROM_BODY:
        reason = _trial(node, by_body=True)
        return Verdict(reason, "" if reason else "body")
    reason = _trial(node, by_body=False)
    if reason and has and not _trial(node, by_body=True):
        return Verdict(way="body")
    return Verdict(reason)


def _trial(node: Node, *, by_body: bool) -> str:
    """What the parser says to a model of this node, "" where it takes it and sees the same results.

    by_body: to the standard's body, in the first and in the last opset that has the operator in this version.
    """
    if not by_body or node.domain:
        return _said(node, max(node.version, 1), by_body)
    return next(
        (said for o in sorted(set(opset_range(node.op_type, "", node.version))) if (said := _said(node, o, True))), ""
    )


def _said(node: Node, opset: int, by_body: bool) -> str:
    function = _alone(node, opset)
    what = f"{node.operator}-{node.version}"
    try:
        model = onnx_model(function, engine="tensorrt")
        if by_body:
            expanded = expand(model.model, function.body.nodes, (0,))
            model = OnnxModel(expanded, model.inputs, model.outputs, model.weights)
        network = _toolkit.toolkit().parse(model)
    except _toolkit.Refusal as e:
        return f"TensorRT's parser refuses {what}: {e}"
    except (XRTError, ValueError) as e:
        return f"{what} does not export: {e}"
    misfit = misfits(network, function)
    return f"TensorRT makes something else of {what}: {misfit}" if misfit else ""


def misfits(network: _toolkit.Network, function: Function, batch: int | None = None) -> str:
    """How inputs and outputs of a network differ from the parameters of the function, "" where they do not.

    batch: what their first dimensions are instead, -1 where they are left open.
    """
    toolkit = network.toolkit
    for what, tensors, names, params in (
        ("input", network.inputs, network.model.inputs, function.params),
        ("output", network.outputs, network.model.outputs, function.returns),
    ):
        by_name = {t.name: t for t in tensors}
        for name, p in zip(names, params, strict=True):
            t = by_name.get(name)
            if t is None:
                return f"it has no {what} {name!r}"
            shape, dtype = tuple(t.shape), toolkit.dtype(t.dtype)
            wanted = p.shape if batch is None else (batch, *p.shape[1:])
            if dtype != p.dtype or shape != wanted:
                return f"{what} {name!r} is {dtype}{list(shape)}, expected {p.dtype}{list(wanted)}"
    return ""


def _alone(node: Node, opset: int) -> Function:
    """A function of the one node; what is constant stays constant, for TensorRT asks for that in places."""
    fresh: dict[Value, Value] = {}
    inputs: list[Value | None] = []
    entries: list[Value] = []
    for i, v in enumerate(node.inputs):
        if v is None:
            inputs.append(None)
        elif v in fresh:
            inputs.append(fresh[v])
        else:
            fresh[v] = Value(f"x{i}", v.type, v.data)
            inputs.append(fresh[v])
            if v.data is None:
                entries.append(fresh[v])
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(node.outputs)]
    returned = [v for v in outputs if v is not None]
    opsets = {"": opset} if not node.domain else {"": latest_opset(""), node.domain: node.version}
    graph = Graph(entries, returned, [node.replace(inputs=inputs, outputs=outputs)], opsets=opsets, name="trial")
    return Function.from_graph(graph)


def _kind(v: Value) -> Hashable:
    """What of a tensor the parser may look at: its type, and its values where they are few."""
    t, data = v.type, v.data
    if type(t) is not TensorType:
        return str(t)
    if data is None:
        return t.dtype, t.shape
    if data.nbytes < _FEW and data.dtype != STRING:
        return t.dtype, t.shape, data.tobytes()
    # of zero points, which have one axis, the parser asks that all are zero
    return t.dtype, t.shape, "constant", data.ndim == 1 and data.dtype in EIGHT_BITS and bool(data.any())
