"""Operators at which gradients end: their derivative is zero almost everywhere."""

from __future__ import annotations

from xrt_core.training.registry import no_gradient

no_gradient(
    "Shape", "Size", "Constant", "ConstantOfShape", "EyeLike", "Range", "NonZero", "Unique", "ArgMax", "ArgMin",
    "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf",
    "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitCast",
    "Sign", "Floor", "Ceil", "Round", "Hardmax", "Binarizer",
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli",
    "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix",
    "QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul",
    "NonMaxSuppression", "StringNormalizer", "TfIdfVectorizer", "SequenceLength",
    "StringConcat", "StringSplit", "RegexFullMatch", "ImageDecoder", "OptionalHasElement",
    by="xrt_core.training.rules.constant",
)  # fmt: skip
no_gradient("StopGradient", domain="xrt", by="xrt_core.training.rules.constant")
