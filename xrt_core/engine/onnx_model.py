"""A Function as an ONNX model, for engines whose library reads those: its large constants stay beside it, untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from xrt_core.engine.opsets import aligned
from xrt_core.errors import CompileError, ExportError
from xrt_core.ir.function import Function
from xrt_core.ir.onnx_proto import dtype_to_onnx, tensor_from_array
from xrt_core.ir.types import STRING

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

__all__ = ["EXTERNAL_BYTES", "SUB_BYTE", "OnnxModel", "is_large", "onnx_model"]

EXTERNAL_BYTES: Final = 4096
"""Constants from this size on stay out of the model unless told otherwise."""

SUB_BYTE: Final = frozenset(("int4", "uint4", "int2", "uint2", "float4_e2m1fn"))
"""Names of the dtypes that ONNX packs into bytes, while an array has a byte for each element."""


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A Function as an ONNX model.

    model: its nodes have unique names, its constants below the limit are in it, the types of inner values are not.
    inputs, outputs: names, in the order of the Function's params and returns.
    weights: the large constants by name, C-contiguous and aligned, as they are where their memory allows it. Each is an
        initializer of `model` that says it lies elsewhere (data_location EXTERNAL): the library is to be given the
        memory, and where it reads it in place, the arrays must outlive it.
    """

    model: ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, np.ndarray]


def beside_the_model(array: np.ndarray) -> Mapping[str, str]:
    """The `external_data` of a constant whose memory the library is given by the constant's name."""
    return {"location": "xrt", "length": str(array.nbytes)}


def is_large(data: np.ndarray | None, external_bytes: int = EXTERNAL_BYTES) -> bool:
    """Whether a constant of this data stays out of the model: it has `external_bytes` bytes or more, laid out as ONNX
    has them, which leaves out strings and elements of less than a byte."""
    if data is None or data.nbytes < external_bytes:
        return False
    return data.dtype != STRING and data.dtype.name not in SUB_BYTE


def onnx_model(
    function: Function,
    *,
    engine: str,
    newest_opset: int | None = None,
    location: Callable[[np.ndarray], Mapping[str, str]] = beside_the_model,
    external_bytes: int = EXTERNAL_BYTES,
) -> OnnxModel:
    """The ONNX model of `function`.

    engine: who asks, for messages.
    newest_opset: of the standard domain, the newest that the library knows; the model is of that or an older one where
        the nodes' versions allow it. Nodes of several opsets come into one where that changes their types alone
        (`opsets.aligned`).
    location: the entries of `external_data` that tell the library where a large constant lies.
    external_bytes: the size from which constants stay out of the model.

    Raises CompileError for a function that ONNX cannot express, or whose nodes belong to opsets that no one model has.
    """
    body = function.body
    if newest_opset is not None:
        opsets = {**body.opsets, "": min(body.opsets.get("", newest_opset), newest_opset)}
        function = Function(function.name, function.params, function.returns, body.replace(opsets=opsets))
    weights: dict[str, np.ndarray] = {}
    returned = {id(v.data) for v in body.outputs if v.data is not None}

    def write(array: np.ndarray, name: str) -> TensorProto:
        if id(array) in returned or not is_large(array, external_bytes):
            return tensor_from_array(array, name)
        # a memory map may start anywhere, and a library may want the alignment that the dtype has
        weights[name] = array = np.require(array, requirements=("C", "A"))
        return _elsewhere(array, name, location(array))

    try:
        model = function.to_onnx(tensor=write)
        if model.functions and (same := aligned(function, newest_opset)) is not function:
            weights.clear()
            model = same.to_onnx(tensor=write)
    except ExportError as e:
        raise CompileError(f"{engine}: function {function.name!r} does not export: {e}") from e
    if model.functions:  # how the exporter writes nodes of another opset; libraries read them at the model's opset
        mixed = ", ".join(sorted({f"{n.operator}-{n.version}" for n in body.nodes}))
        raise CompileError(f"{engine}: function {function.name!r} mixes nodes that no one opset has: {mixed}")
    graph = model.graph
    del graph.value_info[:]  # the library infers the types itself
    taken: set[str] = set()
    for i, n in enumerate(graph.node):
        if n.name in taken:
            n.name = f"{n.name}#{i}"
        taken.add(n.name)
    inputs, outputs = (tuple(p.name for p in ports) for ports in (graph.input, graph.output))
    return OnnxModel(model, inputs, outputs, MappingProxyType(weights))


def _elsewhere(array: np.ndarray, name: str, location: Mapping[str, str]) -> TensorProto:
    from onnx import TensorProto

    t = TensorProto(name=name, data_type=dtype_to_onnx(array.dtype), dims=array.shape)
    t.data_location = TensorProto.EXTERNAL
    for key, value in location.items():
        t.external_data.add(key=key, value=value)
    return t
