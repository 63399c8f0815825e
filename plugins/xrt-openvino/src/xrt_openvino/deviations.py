"""Where the library takes a node and computes something else than ONNX says, as far as is known.

OpenVINO's CPU plugin computes in float32: float64 and float16 are converted, int64 is cut to 32 bits, and arithmetic on
integers saturates or loses digits. So integers are taken where they are moved about, index something, or are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.onnx_bridge import has_whole_sizes
from xrt_core.engine.onnx_versions import as_older
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import draws_random, traits_of
from xrt_core.ir.types import dtype_name

NEWEST: Final = 24
"""The library reads a newer version of an operator as the one it knows, and leaves out new attributes silently: models
are of this opset at most."""

_FLOAT: Final = np.dtype(np.float32)
_BOOL: Final = np.dtype(np.bool_)
_BYTES: Final = frozenset(map(np.dtype, (np.uint8, np.int8)))
_INDICES: Final = frozenset(map(np.dtype, (np.int32, np.int64)))
_MOVED: Final = frozenset(map(np.dtype, (np.bool_, np.uint8, np.int8, np.int32)))

# operators of which the library was seen to give out what came in, or what an attribute says
_MOVERS: Final = frozenset(
    ("Concat", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
     "Identity", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where")
)  # fmt: skip
_CONTROL: Final = frozenset(("If", "Loop", "Scan"))
_LOGIC: Final = frozenset(("And", "Equal", "Not", "Or", "Xor"))  # which the library takes of bool
_QUANTISERS: Final = frozenset(("DequantizeLinear", "QuantizeLinear"))

# inputs that index or count, whose values fit into 32 bits wherever they are valid
_INDEX_INPUTS: Final[Mapping[str, frozenset[int]]] = MappingProxyType(
    {
        "ConstantOfShape": frozenset((0,)),
        "Gather": frozenset((1,)),
        "GatherElements": frozenset((1,)),
        "GatherND": frozenset((1,)),
        "ScatterElements": frozenset((1,)),
        "ScatterND": frozenset((1,)),
        "GRU": frozenset((4,)),
        "Loop": frozenset((0,)),
        "LSTM": frozenset((4,)),
        "RNN": frozenset((4,)),
        "ReverseSequence": frozenset((1,)),
    }
)
_INDEX_OUTPUTS: Final[Mapping[str, frozenset[int]]] = MappingProxyType(
    {"ArgMax": frozenset((0,)), "ArgMin": frozenset((0,)), "TopK": frozenset((1,))}
)


def deviation(node: Node) -> str | None:
    """What would go wrong with `node`, or None."""
    for i, v in enumerate(node.inputs):
        if v is not None and not _input_is_exact(node, i, v):
            return _reason(node, v)
    for i, v in enumerate(node.outputs):
        if v is not None and not _output_is_exact(node, i, v):
            return _reason(node, v)
    if node.version > NEWEST:
        made = as_older(node, NEWEST)
        if made is None:
            return f"openvino is asked up to opset {NEWEST}; {node.op_type}-{node.version} has no older form"
        return next((why for n in made if (why := deviation(n)) is not None), None)
    if draws_random(node):
        return f"{node.op_type} draws random numbers, and those are the host's"
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node)


def _input_is_exact(node: Node, index: int, v: Value) -> bool:
    dtype, op = v.dtype, node.op_type
    if dtype == _FLOAT:
        return True
    if dtype in _MOVED and (op in _MOVERS or op in _CONTROL):
        return True
    if dtype == _BOOL:
        return op in _LOGIC or op == "Cast" or v.data is not None
    if dtype in _INDICES and index in _INDEX_INPUTS.get(op, ()):
        return True
    if op in _QUANTISERS:
        return dtype in _BYTES or (v.data is not None and dtype == np.int32)
    if v.data is not None and dtype in _INDICES:
        return index > 0 and _fits(v.data)
    return v.data is not None and dtype in _BYTES and op == "Cast"


def _output_is_exact(node: Node, index: int, v: Value) -> bool:
    dtype, op = v.dtype, node.op_type
    if dtype == _FLOAT:
        return True
    if dtype in _MOVED and (op in _MOVERS or op in _CONTROL):
        return True
    if dtype == _BOOL:
        return traits_of(node).boolean_result
    return index in _INDEX_OUTPUTS.get(op, ()) or (op == "QuantizeLinear" and dtype in _BYTES)


def _fits(data: np.ndarray) -> bool:
    info = np.iinfo(np.int32)
    # the ends of a Slice are often as large as can be, which OpenVINO cuts to the largest it has
    return data.dtype == np.int32 or bool(((data >= info.min) | (data <= -info.max)).all())


def _reason(node: Node, v: Value) -> str:
    name = dtype_name(v.dtype) if v.dtype is not None else "of unknown dtype"
    if v.dtype is not None and v.dtype.kind in "iub":
        return f"openvino's {node.operator} is not exact on {name} ({v.name!r}): it computes in float32 or 32 bits"
    return f"openvino computes in float32; {v.name!r} of {node.operator} is {name}"


def _given(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _fourier(node: Node) -> str | None:
    return f"openvino's {node.op_type} has other shapes or axes, or is less exact than ONNX's backend tests ask for"


def _attention(node: Node) -> str | None:
    if len(node.outputs) > 3 and node.outputs[3] is not None:
        return "openvino gives another qk_matmul_output of Attention"
    return None


def _recurrent(node: Node) -> str | None:
    if node.attributes.get("layout", 0):
        return f"openvino ignores layout=1 of {node.op_type}"
    if node.op_type == "LSTM" and _given(node, 7) is not None:
        return "openvino ignores the peepholes of LSTM"
    if _given(node, 4) is not None and (x := node.inputs[0]) is not None and not x.is_static:
        return f"openvino ignores the lengths of {node.op_type} where sizes vary"
    return None


def _pad(node: Node) -> str | None:
    value = _given(node, 2)
    return "openvino needs to know the value that Pad pads with" if value is not None and value.data is None else None


def _resize(node: Node) -> str | None:
    a = node.attributes
    for name in ("antialias", "exclude_outside"):
        if a.get(name, 0):
            return f"openvino's Resize has other weights with {name}"
    if a.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "openvino ignores keep_aspect_ratio_policy of Resize"
    corners = a.get("coordinate_transformation_mode") == "align_corners"
    if corners and _given(node, 3) is None and not has_whole_sizes(node):
        return "openvino's Resize by scales gives other values with align_corners where a size is rounded"
    return None


def _ceil_pool(node: Node) -> str | None:
    """Rounding up, ONNX leaves out a last window that begins in the padding; the library does so here and there."""
    a, x, y = node.attributes, _given(node, 0), node.outputs[0]
    if not a.get("ceil_mode", 0) or x is None or x.shape is None or y is None or y.shape is None:
        return None
    padded: Any = a.get("pads", ())
    if a.get("count_include_pad", 0) and any(padded):
        return (
            f"openvino's {node.op_type} with ceil_mode and count_include_pad divides by other counts at a padded edge"
        )
    kernel: Any = a.get("kernel_shape", ())
    rank = len(kernel)
    strides: Any = a.get("strides", (1,) * rank)
    dilations: Any = a.get("dilations", (1,) * rank)
    pads: Any = a.get("pads", (0,) * (2 * rank))
    for i, (size, out) in enumerate(zip(x.shape[2:], y.shape[2:], strict=True)):
        span = dilations[i] * (kernel[i] - 1) + 1
        if not (isinstance(size, int) and isinstance(out, int)):
            return f"whether openvino counts the windows of {node.op_type} as ONNX does depends on sizes with ceil_mode"
        if -(-(size + pads[i] + pads[rank + i] - span) // strides[i]) + 1 != out:
            return f"openvino counts the windows of {node.op_type} otherwise with ceil_mode and these sizes"
    return None


def _local_response(node: Node) -> str | None:
    size: Any = node.attributes["size"]
    return "openvino's LRN of an even size begins one channel later" if size % 2 == 0 else None


def _norm(node: Node) -> str | None:
    return f"openvino's {node.op_type} adds to the norm, which shows where numbers are small"


def _extreme(node: Node) -> str | None:
    return f"openvino's {node.op_type} of infinities is the largest finite number"


def _not_a_number(node: Node) -> str | None:
    return f"openvino's {node.op_type} gives numbers, or True, for what is not a number"


def _extreme_of_several(node: Node) -> str | None:
    """With a number for a bound, as variances have 0, it is what Relu and Clip are: right for finite inputs, which the
    guard finds out."""
    bounds = [v.data for v in node.inputs if v is not None and v.data is not None]
    is_bound = len(node.inputs) == 2 and len(bounds) == 1 and bounds[0].dtype.kind == "f" and bounds[0].size == 1
    return None if is_bound and not np.isnan(bounds[0]).any() else _not_a_number(node)


def _split(node: Node) -> str | None:
    """Without sizes ONNX makes the last part smaller where the axis does not divide."""
    x, count = _given(node, 0), len(node.outputs)
    if _given(node, 1) is not None or "split" in node.attributes or x is None or x.shape is None:
        return None
    axis: Any = node.attributes.get("axis", 0)
    size = x.shape[axis]
    if isinstance(size, str):
        return "openvino's Split makes equal parts only, and the size that is split differs between calls"
    return "openvino's Split makes equal parts only" if isinstance(size, int) and size % count else None


def _roi_align(node: Node) -> str | None:
    mode = node.attributes.get("mode", "avg")
    return "openvino's RoiAlign gives other values with mode=max" if mode == "max" else None


_RULES: Final[Mapping[str, Callable[[Node], str | None]]] = MappingProxyType(
    {
        "Attention": _attention,
        "AveragePool": _ceil_pool,
        "DFT": _fourier,
        "GRU": _recurrent,
        "LRN": _local_response,
        "LSTM": _recurrent,
        "LpNormalization": _norm,
        "MaxPool": _ceil_pool,
        "Celu": _not_a_number,
        "Greater": _not_a_number,
        "GreaterOrEqual": _not_a_number,
        "Max": _extreme_of_several,
        "Min": _extreme_of_several,
        "Mod": _not_a_number,
        "Pad": _pad,
        "RoiAlign": _roi_align,
        "Split": _split,
        "ThresholdedRelu": _not_a_number,
        "RNN": _recurrent,
        "ReduceMax": _extreme,
        "ReduceMin": _extreme,
        "Resize": _resize,
        "STFT": _fourier,
    }
)
