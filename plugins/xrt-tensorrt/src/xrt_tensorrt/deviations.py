"""Where TensorRT's parser says yes, and what comes of it is not what ONNX says, or is not built at all."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import draws_random
from xrt_core.ir.types import dtype_name
from xrt_core.kernels import OpContext

FROM_BODY: Final = frozenset(("Attention",))
"""Operators that are taken by the body the standard gives them although the parser takes them as they are: TensorRT-RTX
1.7 parses all forms of Attention and builds five of the 34 that the node tests have."""

NOT_FROM_BODY: Final = frozenset(("AffineGrid",))
"""Operators whose body the parser takes, and TensorRT-RTX 1.7 does not build."""

TRAIN: Final = frozenset(
    (
        "Abs", "Add", "And", "ArgMax", "ArgMin", "Attention", "AveragePool", "BatchNormalization", "Cast",
        "Ceil", "Clip", "Concat", "Conv", "ConvTranspose", "Cos", "Cosh", "CumSum", "DepthToSpace", "Div",
        "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements",
        "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual",
        "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
        "InstanceNormalization", "LRN", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log",
        "LogSoftmax", "LpNormalization", "MatMul", "Max", "MaxPool", "Mean", "MeanVarianceNormalization",
        "Min", "Mish", "Mul", "Neg", "NegativeLogLikelihoodLoss", "Not", "OneHot", "Or", "PRelu", "Pad",
        "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum",
        "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
        "ReduceSumSquare", "Relu", "Reshape", "Resize", "RotaryEmbedding", "Round", "ScatterElements",
        "ScatterND", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Slice", "Softmax", "SoftmaxCrossEntropyLoss",
        "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "SwiGLU", "Swish",
        "Tan", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
    )
)  # fmt: skip
"""Operators that the parser reads and that are for training: forward and gradient take variables as plain inputs."""

_NEEDS: Final = MappingProxyType({"float8_e4m3fn": (8, 9), "bfloat16": (8, 0)})
"""The least compute capability for a dtype."""

_PRODUCTS: Final = frozenset(
    (
        "AffineGrid", "Attention", "DFT", "Einsum", "FlexAttention", "GRU", "Gemm", "LSTM", "LinearAttention",
        "MatMul", "MatMulInteger", "QLinearMatMul", "RNN", "ScatterND",
    )
)  # fmt: skip
"""Operators that become products of matrices, of float32 where their inputs are not of float16."""

_PACKED: Final = frozenset(("int4", "float4_e2m1fn"))
_EIGHT: Final = frozenset(("float8_e4m3fn",))
_QUANTISING: Final = frozenset(("QuantizeLinear", "DequantizeLinear"))
_KNOWN: Final = frozenset(
    ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", *_EIGHT, "int4", "float4_e2m1fn")
)
_LARGEST_K: Final = 3840
"""Of ITopKLayer; the parser takes more, and nothing is built of it."""


def deviation(node: Node) -> str | None:
    """Why `node` must not be given to TensorRT, whatever its parser says; None where nothing is known against it."""
    if draws_random(node):
        return f"{node.operator} draws random numbers, and TensorRT would draw others"
    for v in (*node.inputs, *node.outputs):
        if v is None or v.dtype is None:
            continue
        name = dtype_name(v.dtype)
        if v.dtype.name not in _KNOWN:  # the parser would round a constant of float64 to 32 bits
            return f"{v.name!r} of {node.operator} is {name}, which TensorRT does not have"
        if v.dtype.name in _PACKED and (v.data is None or node.op_type != "DequantizeLinear"):
            return f"{v.name!r} of {node.operator} is {name}; TensorRT has it only as a constant that is dequantised"
        if v.dtype.name in _EIGHT and node.op_type not in _QUANTISING:
            where = "between QuantizeLinear and DequantizeLinear"
            return f"{v.name!r} of {node.operator} is {name}; TensorRT has it only {where}"
        if v.data is not None and v.dtype.name == "int8" and not (node.op_type in _QUANTISING or widens(node)):
            return f"{v.name!r} of {node.operator} is a constant of int8; TensorRT has those only to be dequantised"
    if node.op_type in _QUANTISING:
        return _quantising(node)
    return _not_built(node)


def beyond(node: Node, capability: tuple[int, int], *, is_rtx: bool) -> str:
    """Why a GPU of this compute capability does not run a node that TensorRT takes elsewhere, "" where it does."""
    here = "{}.{}".format(*capability)
    for v in (*node.inputs, *node.outputs):
        least = _NEEDS.get(v.dtype.name) if v is not None and v.dtype is not None else None
        if v is not None and v.dtype is not None and least is not None and capability < least:
            needs = "needs compute capability {}.{}".format(*least)
            return f"{v.name!r} of {node.operator} is {v.dtype.name}: it {needs}, this is {here}"
    if is_rtx and capability < (8, 0):
        x = node.inputs[0] if node.inputs else None
        solid = node.op_type == "ConvTranspose" and x is not None and len(x.shape or ()) > 4
        narrow = any(v is not None and v.dtype == np.float16 for v in node.inputs)
        if (solid or node.op_type in _PRODUCTS) and not narrow:
            return f"TensorRT-RTX multiplies no float32 matrices ({node.operator}) on compute capability {here}"
    return ""


def _not_built(node: Node) -> str | None:
    """Why the builder refuses what the parser reads."""
    made = node.outputs[0] if node.outputs else None
    if node.domain or made is None or made.shape is None:
        return None
    if node.op_type == "TopK" and made.shape:
        k = made.shape[OpContext(node, np).attr("axis", -1)]
        if isinstance(k, int) and k > _LARGEST_K:
            return f"TopK of {k} elements; TensorRT gives {_LARGEST_K} at most"
    if node.op_type == "Mod" and node.attributes.get("fmod", 0) and made.dtype == np.int8:
        return "TensorRT parses Mod of int8 with fmod and does not build it"
    return None


def widens(node: Node) -> bool:
    """Whether the node casts a constant of int8 to float32, which is to dequantise it by a scale of 1."""
    if node.op_type != "Cast" or node.domain or node.inputs[0] is None or node.outputs[0] is None:
        return False
    data = node.inputs[0].data
    return data is not None and data.dtype == np.int8 and node.outputs[0].dtype == np.float32


def dequantised(node: Node, opset: int) -> Node:
    """The DequantizeLinear that gives what a node that `widens` gives. opset: of the graph."""
    import onnx

    one = Value.constant(np.ones((), np.float32), "one")
    version = onnx.defs.get_schema("DequantizeLinear", opset).since_version
    return Node("DequantizeLinear", [node.inputs[0], one], node.outputs, version=version, name=node.name)


def _quantising(node: Node) -> str | None:
    """Scales and zero points must be known when the network is built."""
    names = ("scale", "zero point")
    for what, v in zip(names, node.inputs[1:3], strict=False):
        if isinstance(v, Value) and v.data is None:
            return f"the {what} {v.name!r} of {node.operator} is not known when the engine is built"
    return None
