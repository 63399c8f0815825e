"""Insertion of QuantizeLinear and DequantizeLinear around products, by onnxruntime's quantisation library.

Source: `onnxruntime.quantization.qdq_quantizer`; for TensorRT's requirements, its developer guide, "Working with
Quantized Types": symmetric int8, scales in float32, no quantised bias.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import QuantizationError, XRTError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.passes.mixed_precision import Constraint
from xrt_core.quantization.calibration import PRODUCTS, quantised_inputs
from xrt_core.quantization.ranges import Ranges

_PER_CHANNEL_OPSET: Final = 13  # the first with an axis of DequantizeLinear
_INSTALL: Final = "pip install 'xrt-core[quantization]'"


class QuantisedProducts:
    """The products of a `prepared` graph in int8, each of which can be taken or left (`with_products`).

    ranges: of the tensors that products read; inputs are quantised per tensor and symmetric, weights per channel, as
    TensorRT requires (`quantise`). None: inputs are quantised by each call's own range (DynamicQuantizeLinear), and
    only products with constant weights (MatMul) are. narrow: weights have 7 bits, so that two products of 8-bit inputs
    fit in 16 bits (`adds_int8_in_16_bits`).

    Raises QuantizationError if onnxruntime is missing, a tensor has no range, or the library rejects the graph.
    """

    def __init__(
        self, graph: Graph, ranges: Ranges | None, marked: Sequence[str] = (), *, narrow: bool = False
    ) -> None:
        self.graph = graph
        self.ranges = {} if ranges is None else ranges.tensors
        self._made = _quantised(graph, ranges, marked, narrow)
        own = {v for n in graph.nodes for v in n.outputs if v is not None} | set(graph.inputs)
        self._producers = {v: n for n in self._made.nodes for v in n.outputs if v is not None}
        self._steps: dict[Node, tuple[Node, ...]] = {}
        for n in graph.nodes:
            if n.op_type in PRODUCTS and not n.domain and (steps := self._computing(n.outputs[0], own)) is not None:
                self._steps[n] = steps
        # a node that the library left as it was is one step: itself, written anew
        self.products = tuple(n for n, steps in self._steps.items() if len(steps) > 1)

    def with_products(self, taken: Collection[Node]) -> Graph:
        """The graph with these products in int8, and all else as it was."""
        order = {n: i for i, n in enumerate(self._made.nodes)}
        nodes: list[Node] = []
        seen: set[Node] = set()
        for n in self.graph.nodes:
            for step in sorted(self._steps[n], key=order.__getitem__) if n in taken else (n,):
                if step not in seen:
                    seen.add(step)
                    nodes.append(step)
        opsets = {**self.graph.opsets, **self._made.opsets}
        return self.graph.replace(nodes=nodes, opsets=opsets)

    def _computing(self, output: Value | None, own: Collection[Value]) -> tuple[Node, ...] | None:
        """The nodes of the quantised graph that compute a value of the graph from others of it; None if none does."""
        found: dict[Node, None] = {}
        left = [output]
        while left:
            v = left.pop()
            node = None if v is None else self._producers.get(v)
            if node is None or node in found:
                if node is None and v is output:
                    return None
                continue
            found[node] = None
            left += [x for x in node.inputs if x is not None and x.data is None and x not in own]
        return tuple(found)


def quantise(graph: Graph, ranges: Ranges, marked: Sequence[str] = ()) -> Graph:
    """Quantise the products of a `prepared` graph to int8: inputs per tensor, weights per channel, all symmetric.

    marked: keys of the option `precision`; nodes that they match are not quantised. Raises QuantizationError if
    onnxruntime is missing, a tensor has no range, or the library rejects the graph.
    """
    return _quantised(graph, ranges, marked)


def _quantised(graph: Graph, ranges: Ranges | None, marked: Sequence[str], narrow: bool = False) -> Graph:
    """The graph as the library quantises it; values that both have are the same objects."""
    library = _library(narrow)
    constraints = [Constraint.of(key, "float32") for key in marked]
    import onnx

    from xrt_core.frontends.onnx_export import export_model
    from xrt_core.frontends.onnx_import import import_model

    try:
        # the library creates names such as "x_scale", and "x2" for a shared bias, without checking for collisions
        numbers = {v: f"t{i}_" for i, v in enumerate(_values(graph))}
        model = _at_least(export_model(_renamed(graph, numbers)), _PER_CHANNEL_OPSET)
        model = onnx.shape_inference.infer_shapes(model)
        excluded = [n.name for n in graph.nodes if n.name and any(c.matches(n) for c in constraints)]
        if ranges is None:
            quantizer = library.dynamic(model, excluded)
        else:
            floats = _float_names(model)
            _check_ranges(graph, ranges, {v.name for v, number in numbers.items() if number in floats})
            known = {
                number: (r[0], r[1])
                for v, number in numbers.items()
                if (r := ranges.tensors.get(v.name)) is not None and not math.isnan(r[0])
            }
            quantizer = library.static(model, known, excluded)
        quantizer.quantize_model()
        made = import_model(quantizer.model.model)
    except XRTError:
        raise
    except Exception as e:
        raise QuantizationError(f"{graph.name or 'the graph'} cannot be quantised: {type(e).__name__}: {e}") from e
    return _with_values(made, {number: v for v, number in numbers.items()})


def _values(graph: Graph) -> list[Value]:
    """Return every value of the graph (without subgraphs) once."""
    made = [v for n in graph.nodes for v in n.outputs if v is not None]
    return list(dict.fromkeys((*graph.inputs, *graph.constants, *made)))


def _with_values(made: Graph, own: Mapping[str, Value]) -> Graph:
    """The graph with its values replaced by those of the same name in `own`. What it has besides keeps its name."""
    new = {v: own[v.name] for v in _values(made) if v.name in own}
    nodes = [
        substitute(n, new).replace(outputs=[None if v is None else new.get(v, v) for v in n.outputs])
        for n in made.nodes
    ]
    return made.replace(
        inputs=[new.get(v, v) for v in made.inputs], outputs=[new.get(v, v) for v in made.outputs], nodes=nodes
    )


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
    """The quantisers of `onnxruntime.quantization` that this module uses. narrow: weights have 7 bits."""

    def __init__(self, narrow: bool) -> None:
        from onnxruntime.quantization import CalibrationMethod, QuantType
        from onnxruntime.quantization.calibrate import TensorData, TensorsData
        from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
        from onnxruntime.quantization.quant_utils import QuantizationMode

        self._narrow = narrow
        self._method: Any = CalibrationMethod.MinMax
        self._int8: Any = QuantType.QInt8
        self._uint8: Any = QuantType.QUInt8
        self._integer_operators: Any = QuantizationMode.IntegerOps
        self._TensorData: Any = TensorData
        self._TensorsData: Any = TensorsData
        self._QDQQuantizer: Any = QDQQuantizer
        self._ONNXQuantizer: Any = ONNXQuantizer

    def static(self, model: Any, ranges: Mapping[str, tuple[float, float]], excluded: Sequence[str]) -> Any:
        """A quantiser of a model by ranges of its tensors."""
        known = {
            name: self._TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
            for name, (low, high) in ranges.items()
        }
        return self._QDQQuantizer(
            model,
            per_channel=True,
            reduce_range=self._narrow,
            weight_qType=self._int8,
            activation_qType=self._int8,
            tensors_range=self._TensorsData(self._method, known),
            nodes_to_quantize=[],
            nodes_to_exclude=list(excluded),
            op_types_to_quantize=sorted(PRODUCTS),
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": sorted(PRODUCTS),
            },
        )

    def dynamic(self, model: Any, excluded: Sequence[str]) -> Any:
        """A quantiser of a model's products with constants, by the ranges of each call."""
        return self._ONNXQuantizer(
            model,
            per_channel=True,
            reduce_range=self._narrow,
            mode=self._integer_operators,
            static=False,
            weight_qType=self._int8,
            activation_qType=self._uint8,
            tensors_range=None,
            nodes_to_quantize=[],
            nodes_to_exclude=list(excluded),
            op_types_to_quantize=["MatMul"],
            extra_options={"WeightSymmetric": True, "MatMulConstBOnly": True},
        )


def _library(narrow: bool) -> _Library:
    root = logging.getLogger()
    level = root.level
    try:
        return _Library(narrow)
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
