"""Insertion of QuantizeLinear and DequantizeLinear around products, by onnxruntime's quantisation library.

Source: `onnxruntime.quantization.qdq_quantizer`; for TensorRT's requirements, its developer guide, "Working with
Quantized Types": symmetric int8, scales in float32, no quantised bias.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import QuantizationError, XRTError
from xrt_core.ir.graph import Graph, Value, substitute
from xrt_core.passes.mixed_precision import Constraint
from xrt_core.quantization.calibration import PRODUCTS, quantised_inputs
from xrt_core.quantization.ranges import Ranges

_PER_CHANNEL_OPSET: Final = 13  # the first with an axis of DequantizeLinear
_INSTALL: Final = "pip install 'xrt-core[quantization]'"


def quantise(graph: Graph, ranges: Ranges, marked: Sequence[str] = ()) -> Graph:
    """Quantise the products of a `prepared` graph to int8: inputs per tensor, weights per channel, all symmetric.

    marked: keys of the option `precision`; nodes that they match are not quantised. Raises QuantizationError if
    onnxruntime is missing, a tensor has no range, or the library rejects the graph.
    """
    library = _library()
    constraints = [Constraint.of(key, "float32") for key in marked]
    import onnx

    from xrt_core.frontends.onnx_export import export_model
    from xrt_core.frontends.onnx_import import import_model

    try:
        # the library creates names such as "x_scale", and "x2" for a shared bias, without checking for collisions
        numbers = {v: f"t{i}_" for i, v in enumerate(_values(graph))}
        model = _at_least(export_model(_renamed(graph, numbers)), _PER_CHANNEL_OPSET)
        model = onnx.shape_inference.infer_shapes(model)
        floats = _float_names(model)
        _check_ranges(graph, ranges, {v.name for v, number in numbers.items() if number in floats})
        known = {
            number: library.TensorData(lowest=np.array(r[0], np.float32), highest=np.array(r[1], np.float32))
            for v, number in numbers.items()
            if (r := ranges.tensors.get(v.name)) is not None and not math.isnan(r[0])
        }
        quantizer = library.QDQQuantizer(
            model,
            per_channel=True,
            reduce_range=False,
            weight_qType=library.QuantType.QInt8,
            activation_qType=library.QuantType.QInt8,
            tensors_range=library.TensorsData(library.CalibrationMethod.MinMax, known),
            nodes_to_quantize=[],
            nodes_to_exclude=[n.name for n in graph.nodes if n.name and any(c.matches(n) for c in constraints)],
            op_types_to_quantize=sorted(PRODUCTS),
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": sorted(PRODUCTS),
            },
        )
        quantizer.quantize_model()
        made = import_model(quantizer.model.model)
    except XRTError:
        raise
    except Exception as e:
        raise QuantizationError(f"{graph.name or 'the graph'} cannot be quantised: {type(e).__name__}: {e}") from e
    ends = zip((*made.outputs, *made.inputs), (*graph.outputs, *graph.inputs), strict=True)
    return _renamed(made, {new: old.name for new, old in ends})


def _values(graph: Graph) -> list[Value]:
    """Return every value of the graph (without subgraphs) once."""
    made = [v for n in graph.nodes for v in n.outputs if v is not None]
    return list(dict.fromkeys((*graph.inputs, *graph.constants, *made)))


def _renamed(graph: Graph, names: Mapping[Value, str]) -> Graph:
    """Return the graph with values renamed according to `names`."""
    new = {v: Value(name, v.type, v.data) for v, name in names.items()}
    nodes = [
        substitute(n, new).replace(outputs=[None if v is None else new.get(v, v) for v in n.outputs])
        for n in graph.nodes
    ]
    inputs, outputs = ([new.get(v, v) for v in side] for side in (graph.inputs, graph.outputs))
    return Graph(inputs, outputs, nodes, opsets=graph.opsets, name=graph.name, doc=graph.doc, metadata=graph.metadata)


class _Library:
    """The objects of `onnxruntime.quantization` that this module uses."""

    def __init__(self) -> None:
        from onnxruntime.quantization import CalibrationMethod, QuantType
        from onnxruntime.quantization.calibrate import TensorData, TensorsData
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        self.CalibrationMethod: Any = CalibrationMethod
        self.QuantType: Any = QuantType
        self.TensorData: Any = TensorData
        self.TensorsData: Any = TensorsData
        self.QDQQuantizer: Any = QDQQuantizer


def _library() -> _Library:
    root = logging.getLogger()
    level = root.level
    try:
        return _Library()
    except ImportError as e:
        raise QuantizationError(f"quantising needs onnxruntime's quantisation library ({e}); {_INSTALL}") from e
    finally:
        root.setLevel(level)


def _at_least(model: Any, opset: int) -> Any:
    """Return the model, converted to `opset` if its own is older. Raises QuantizationError if conversion fails."""
    import onnx

    have = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), opset)
    if have >= opset:
        return model
    try:
        return onnx.version_converter.convert_version(model, opset)
    except Exception as e:
        raise QuantizationError(
            f"the model has opset {have}, weights are quantised per channel from opset {opset} on, and it cannot be "
            f"converted: {e}"
        ) from e


def _float_names(model: Any) -> set[str]:
    """Return the names of the tensors whose type is known to be float32."""
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {v.name for v in values if v.type.tensor_type.elem_type == 1}  # TensorProto.FLOAT


def _check_ranges(graph: Graph, ranges: Ranges, floats: set[str]) -> None:
    needed = list(dict.fromkeys(v.name for n in graph.nodes for v in quantised_inputs(n) if v.name in floats))
    missing = [n for n in needed if n not in ranges.tensors]
    if missing:
        shown = ", ".join(map(repr, missing[:4])) + (f", ... {len(missing)} in all" if len(missing) > 4 else "")
        raise QuantizationError(
            f"no range was recorded for {shown} of {graph.name or 'the graph'}: run the calibration again"
        )
    endless = [n for n in needed if math.isnan(ranges.tensors[n][0])]
    if endless:
        raise QuantizationError(
            f"{endless[0]!r} of {graph.name or 'the graph'} held values that are not finite while its range was "
            "recorded; such a tensor cannot be quantised"
        )
