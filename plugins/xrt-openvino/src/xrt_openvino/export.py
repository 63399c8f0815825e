"""A Function as the bytes of an ONNX model, with its large constants beside them, untouched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from xrt_core.engine.contract import Function, Parameter
from xrt_core.errors import CompileError, ExportError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import STRING
from xrt_openvino import _toolkit

if TYPE_CHECKING:
    from onnx import ModelProto

EXTERNAL_BYTES: Final = 4096
"""Constants from this size on stay out of the model: they are handed over as memory."""

_SUB_BYTE: Final = frozenset(("int4", "uint4", "int2", "uint2", "float4_e2m1fn"))  # packed in ONNX, one byte each here


@dataclass(frozen=True, slots=True)
class Exported:
    """An ONNX model: its bytes, the names of its inputs and outputs, and the constants that are not in the bytes."""

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, np.ndarray]


def export(function: Function) -> Exported:
    """The model of `function`.

    Raises CompileError for a function that ONNX cannot express, or whose nodes belong to opsets that no one model has.
    """
    large = _large_constants(function.body)
    stand_ins = {v: Value(v.name, v.type) for v in large}
    model = to_model(_with_inputs(function, stand_ins))
    count = len(function.params)
    graph = model.graph
    weights = {}
    for v, p in zip(large, graph.input[count:], strict=True):
        weights[p.name] = _contiguous(v.data)
        t = graph.initializer.add(name=p.name, data_type=p.type.tensor_type.elem_type)
        t.dims.extend(weights[p.name].shape)
        t.data_location = t.EXTERNAL
        for key, value in _toolkit.location(weights[p.name]).items():
            t.external_data.add(key=key, value=value)
    del graph.input[count:]
    return Exported(
        model.SerializeToString(), tuple(p.name for p in graph.input), tuple(p.name for p in graph.output), weights
    )


def to_model(function: Function) -> ModelProto:
    """The ONNX model of `function`, constants and all, for the library. Raises CompileError as `export`."""
    try:
        model = function.to_onnx()
    except ExportError as e:
        raise CompileError(f"openvino: function {function.name!r} does not export: {e}") from e
    if model.functions:  # how the exporter writes nodes of another opset; the library reads them at the model's opset
        mixed = ", ".join(sorted({f"{n.operator}-{n.version}" for n in function.body.nodes}))
        raise CompileError(f"openvino: function {function.name!r} mixes nodes that no one opset has: {mixed}")
    del model.graph.value_info[:]  # the library infers the types itself
    return model


def _large_constants(body: Graph) -> list[Value]:
    """Constants that nodes read and that are worth handing over as memory, in order of use."""
    used = dict.fromkeys(v for n in body.nodes for v in n.inputs if v is not None and v.data is not None)
    returned = set(body.outputs)
    return [v for v in used if v not in returned and is_large(v.data)]


def is_large(data: np.ndarray | None) -> bool:
    """Whether a constant is handed over as memory."""
    return (
        data is not None and data.nbytes >= EXTERNAL_BYTES and data.dtype != STRING and data.dtype.name not in _SUB_BYTE
    )


def _with_inputs(function: Function, stand_ins: Mapping[Value, Value]) -> Function:
    """`function` with some constants as further inputs."""
    if not stand_ins:
        return function
    get = stand_ins.get
    nodes = [
        n.replace(inputs=[v if v is None else get(v, v) for v in n.inputs])
        if any(v in stand_ins for v in n.inputs if v is not None)
        else n
        for n in function.body.nodes
    ]
    body = function.body.replace(inputs=[*function.body.inputs, *stand_ins.values()], nodes=nodes)
    further = [Parameter(v.name or f"constant_{i}", v.data.dtype, v.data.shape) for i, v in enumerate(stand_ins)]  # type: ignore[union-attr]
    return Function(function.name, [*function.params, *further], function.returns, body)


def _contiguous(data: np.ndarray | None) -> np.ndarray:
    """The array itself where its memory can be handed over, else a copy (a memory map may start anywhere)."""
    assert data is not None
    return np.require(data, requirements=("C", "A"))
