"""Operator lists of mixed precision: which compute in a narrow float, stay in float32, or take their inputs' type.

Sources: torch.autocast's operator lists ("Op-specific behavior", https://docs.pytorch.org/docs/stable/amp.html),
OneFlow's white, gray and clear lists (`auto_mixed_precision_lists.cpp`), and the block list of ONNX Runtime's float16
converter. For inputs of both types the rule is torch's: the wider type wins.

The lists are the policy of this pass: they follow measurements by the sources, not properties of operators, which are
in `ir.op_traits`. The functions below read from the schemas which inputs and outputs of an operator share a type, and
which version supports a narrow float.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.schema import find_schema, latest_opset
from xrt_core.ir.types import dtype_name

ALLOW: Final = frozenset({
    "Attention", "CausalConvWithState", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm", "LSTM",
    "LinearAttention", "MatMul", "RNN",
})  # fmt: skip
"""Operators worth a cast: dominated by matrix products, which accumulate in float32 on every engine."""

FOLLOW: Final = frozenset({
    # elementwise, of a slope of at most about one
    "Abs", "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Mean",
    "Min", "Mish", "Mul", "Neg", "PRelu", "Relu", "Selu", "Shrink", "Sigmoid", "Sign", "Softsign", "Sqrt", "Sub",
    "Sum", "SwiGLU", "Swish", "Tanh", "ThresholdedRelu",
    # movement, and choice among elements: nothing is computed
    "Compress", "Concat", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
    "GlobalMaxPool", "Identity", "MaxPool", "Pad", "ReduceMax", "ReduceMin", "Reshape", "ReverseSequence", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
    # short sums, and affine maps with parameters that stay wide where the operator's types allow it
    "AveragePool", "BatchNormalization", "RotaryEmbedding",
})  # fmt: skip
"""Operators that compute in the type of their inputs."""

MOVE: Final = frozenset({
    "Concat", "DepthToSpace", "Flatten", "Identity", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze",
    "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators of the follow list before which a cast can be moved: they only move elements, as do their gradients."""

KEEP: Final = frozenset({
    # steep, or of a large range
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Exp", "Log", "Pow", "Reciprocal", "Sin", "Sinh",
    "Softplus", "Tan",
    # sums over many elements
    "CumProd", "CumSum", "Det", "GlobalAveragePool", "GlobalLpPool", "Hardmax", "LogSoftmax", "LpPool", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare",
    "Softmax",
    # normalisations and losses
    "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization", "LpNormalization",
    "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "RMSNormalization", "SoftmaxCrossEntropyLoss",
    # coordinates
    "AffineGrid", "GridSample", "Resize", "RoiAlign", "Upsample",
    # updates of variables
    "Adagrad", "Adam", "Assign", "Momentum",
})  # fmt: skip
"""Operators that lose too much precision in a narrow float. One on no list stays in float32 as well."""

LOWERED_INPUTS: Final = {"Attention": (0, 1, 2, 4, 5), "BatchNormalization": (0,)}
"""Operators of which only these inputs are lowered, if the types of inputs may differ: masks with large negative
numbers and running statistics stay in float32."""


TEXTS: Final = {"float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}
"""The narrow floats, as schemas write them."""


class Formal(Struct, frozen=True):
    """A formal parameter of a schema: its type variable and its types."""

    variable: str
    types: frozenset[str]

    def takes(self, dtype: np.dtype) -> bool:
        """Whether this narrow float is among its types."""
        return TEXTS[dtype_name(dtype)] in self.types


class Signature(Struct, frozen=True):
    """The formal parameters of one version of an operator; the last input and the last output may be variadic."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]

    def input(self, index: int) -> Formal:
        """The parameter of an input."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def output(self, index: int) -> Formal:
        """The parameter of an output."""
        return self.outputs[min(index, len(self.outputs) - 1)]


@cache
def signature_of(op_type: str, domain: str, version: int) -> Signature | None:
    """The parameters of a standard operator; None if there is no such operator, or it has no inputs or no outputs."""
    schema = find_schema(op_type, domain, version)
    if schema is None or schema.onnx is None:
        return None
    read = [tuple(Formal(p.type_str, frozenset(p.types)) for p in side)
            for side in (schema.onnx.inputs, schema.onnx.outputs)]  # fmt: skip
    return Signature(*read) if all(read) else None


@cache
def version_for(op_type: str, domain: str, version: int, dtype: str) -> int | None:
    """The version itself if it supports `dtype`, or the first later one that does and only adds types, or None."""
    old = find_schema(op_type, domain, version)
    if old is None or old.onnx is None:
        return None
    opset = version
    while opset <= latest_opset(domain):
        new = find_schema(op_type, domain, opset)
        signature = None if new is None else signature_of(op_type, domain, new.since_version)
        if new is not None and signature is not None:
            if any(TEXTS[dtype] in f.types for f in signature.inputs):
                return new.since_version if new is old or _adds_types_alone(old.onnx, new.onnx) else None
            opset = max(opset, new.since_version)
        opset += 1
    return None


def _adds_types_alone(old: Any, new: Any) -> bool:
    """Whether a node of the old schema means the same under the new one, judged by inputs and attributes.

    It is used for operators on the allow and follow lists, whose versions differ in meaning only by these; the test of
    this pass lists all resulting pairs.
    """
    kept = all(n in new.attributes and new.attributes[n].type == a.type for n, a in old.attributes.items())
    optional = not any(a.required for n, a in new.attributes.items() if n not in old.attributes)
    return kept and optional and len(old.inputs) <= len(new.inputs) and new.min_input <= old.min_input
