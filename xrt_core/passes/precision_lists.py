"""Which operators compute in a narrow float, which stay in float32, and which take the type that arrives.

Sources: torch.autocast's operator lists ("Op-specific behavior", https://docs.pytorch.org/docs/stable/amp.html),
OneFlow's white, gray and clear lists (`auto_mixed_precision_lists.cpp`), and the block list of ONNX Runtime's float16
converter. The rule for what arrives in both types is torch's: the wider one wins.
"""

from __future__ import annotations

from typing import Final

ALLOW: Final = frozenset({
    "Attention", "CausalConvWithState", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm", "LSTM",
    "LinearAttention", "MatMul", "RNN",
})  # fmt: skip
"""Operators worth a cast: nearly all the work is in their products, which accumulate in float32 on every engine."""

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
"""Operators that are computed in the type in which their inputs arrive."""

MOVE: Final = frozenset({
    "Concat", "DepthToSpace", "Flatten", "Identity", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze",
    "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Those of the follow list before which a cast may as well stand as after: they move elements, and their gradients."""

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
"""Operators that lose too much in a narrow float. One on no list stays in float32 as well."""

LOWERED_INPUTS: Final = {"Attention": (0, 1, 2, 4, 5), "BatchNormalization": (0,)}
"""Operators of which only these inputs are lowered where their types may differ: a mask of large negative numbers, and
running statistics, stay as they are."""
