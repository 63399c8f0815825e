"""The tables behind the generated cases: operators, their domains, shapes, and rows of arguments with attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: Final = tuple(
    np.dtype(d)
    for d in (
        np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.int32, np.int64, np.int8, np.uint8, np.int16,
        np.uint16, np.uint32, np.uint64, np.bool_,
    )
)  # fmt: skip
"""Element types that operators are tried with, as far as their schemas allow."""

CAST_DTYPES: Final = (*DTYPES, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))

SHAPES: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"scalar": (), "one": (1,), "empty": (2, 0, 3), "matrix": (3, 5), "rank5": (2, 1, 3, 1, 2), "large": (1 << 16,)}
)

BROADCASTS: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
    {
        "scalars": ((), ()),
        "scalar_left": ((), (2, 3)),
        "row": ((3, 4), (4,)),
        "outer": ((3, 1), (1, 4)),
        "rank": ((4,), (2, 1, 4)),
        "middle": ((2, 1, 3), (2, 5, 3)),
        "empty": ((0, 4), (1, 4)),
        "empty_stretched": ((3, 0), (1, 1)),
        "large": ((256, 256), (256,)),
    }
)

UNARY: Final = (
    "Abs", "Neg", "Ceil", "Floor", "Round", "Sign", "Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos", "Tan", "Asin",
    "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Erf", "Sigmoid", "Relu", "LeakyRelu", "Elu",
    "Selu", "Celu", "Softplus", "Softsign", "HardSigmoid", "HardSwish", "Mish", "Gelu", "ThresholdedRelu", "Not",
    "IsNaN", "IsInf", "BitwiseNot", "Identity",
)  # fmt: skip

BINARY: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Add": {}, "Sub": {}, "Mul": {}, "Div": {}, "Pow": {}, "Max": {}, "Min": {}, "Mod": {"fmod": 1},
        "And": {}, "Or": {}, "Xor": {}, "Equal": {}, "Less": {}, "Greater": {}, "LessOrEqual": {},
        "GreaterOrEqual": {}, "BitwiseAnd": {}, "BitwiseOr": {}, "BitwiseXor": {}, "BitShift": {"direction": "LEFT"},
    }
)  # fmt: skip

RANGES: Final[Mapping[tuple[str, int], tuple[float, float]]] = MappingProxyType(
    {
        ("Log", 0): (0.1, 9.0), ("Sqrt", 0): (0.0, 9.0), ("Reciprocal", 0): (0.5, 4.0), ("Acos", 0): (-0.9, 0.9),
        ("Asin", 0): (-0.9, 0.9), ("Atanh", 0): (-0.9, 0.9), ("Acosh", 0): (1.1, 5.0), ("Tan", 0): (-1.0, 1.0),
        ("Div", 1): (1.0, 4.0), ("Mod", 1): (1.0, 4.0), ("Pow", 0): (0.5, 3.0), ("Pow", 1): (0.0, 3.0),
        ("BitShift", -1): (0.0, 3.0), ("ReduceLogSum", 0): (0.5, 4.0), ("ReduceProd", 0): (0.5, 1.5),
        ("BatchNormalization", 4): (0.5, 2.0), ("LpNormalization", 0): (0.5, 2.0), ("Cast", 0): (0.0, 3.0),
    }
)  # fmt: skip
"""(operator, input or -1 for all) -> the values it is tried with, where [-3, 3] makes no sense."""


class Row(NamedTuple):
    """A node's arguments: a shape is filled with numbers of the case's dtype, an array stands for itself."""

    op_type: str
    label: str
    arguments: tuple[tuple[int, ...] | np.ndarray | None, ...]
    attributes: Mapping[str, Any]
    values: str = "plain"


def _i(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def _n(number: int) -> np.ndarray:
    return np.array(number, np.int64)


def _row(op_type: str, label: str, *arguments: Any, **attributes: Any) -> Row:
    return Row(op_type, label, arguments, attributes)


_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
_FLAGS = np.array([[True], [False], [True]])

ROWS: Final[tuple[Row, ...]] = (
    *(_row(op, "last_axis", (3, 4), _i(-1), keepdims=0) for op in _REDUCTIONS),
    *(_row(op, "two_axes", (2, 3, 4), _i(0, -2), keepdims=1) for op in _REDUCTIONS),
    *(_row(op, "everything", (2, 3, 2), keepdims=0) for op in _REDUCTIONS),
    *(_row(op, "scalar", (), keepdims=0) for op in _REDUCTIONS),
    *(_row(op, "no_op", (2, 3), _i(), noop_with_empty_axes=1) for op in ("ReduceSum", "ReduceMax")),
    *(_row(op, "empty", (0, 3), _i(0)) for op in ("ReduceSum", "ReduceProd", "ReduceL2", "ReduceSumSquare")),
    *(_row(op, "large", (512, 512), _i(-1)) for op in ("ReduceSum", "ReduceMax", "ReduceMean")),
    *(Row(op, "special", ((12,), _i(-1)), {}, "special") for op in ("ReduceSum", "ReduceMax", "ReduceMin")),
    *(
        _row(op, f"axis{axis}", shape, axis=axis)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for axis, shape in ((-1, (3, 5)), (-2, (2, 3, 4)), (0, (4,)))
    ),
    _row("Softmax", "empty", (0, 4), axis=-1),
    _row("Softmax", "large", (64, 4096), axis=-1),
    Row("Softmax", "special", ((3, 4),), {"axis": -1}, "special"),
    *(_row(op, "negative_axis", (3, 5), axis=-1, keepdims=0) for op in ("ArgMax", "ArgMin")),
    _row("ArgMax", "last_of_equals", (3, 5), axis=-2, select_last_index=1),
    _row("CumSum", "negative_axis", (2, 3, 4), _n(-1), reverse=1),
    _row("CumSum", "exclusive", (3, 4), _n(-2), exclusive=1),
    _row("Concat", "negative_axis", (2, 3), (2, 1), (2, 2), axis=-1),
    _row("Concat", "with_empty", (2, 3), (0, 3), axis=-2),
    _row("Gather", "negative", (3, 4, 2), np.array([[-1, 0], [1, -3]], np.int64), axis=-2),
    _row("Gather", "scalar_index", (3, 4), _n(-1), axis=0),
    _row("Gather", "no_index", (3, 4), np.zeros((0,), np.int64), axis=1),
    _row("GatherElements", "negative", (3, 4), np.array([[-1, 0], [1, -2], [3, -4]], np.int64), axis=-1),
    _row("GatherND", "negative", (3, 4), np.array([[-1, 0], [1, -2]], np.int64)),
    _row("ScatterElements", "negative", (3, 4), np.array([[-1, 0], [1, -2]], np.int64), (2, 2), axis=-1),
    _row("ScatterND", "rows", (4, 3), np.array([[2], [0]], np.int64), (2, 3)),
    _row("Slice", "backwards", (4, 5), _i(-1, 1), _i(-5, 4), _i(0, -1), _i(-1, 2)),
    _row("Slice", "nothing", (4, 5), _i(3), _i(1), _i(-1)),
    _row("Split", "uneven", (2, 7), axis=-1, num_outputs=3),
    _row("Squeeze", "negative_axes", (2, 1, 3, 1), _i(-1, -3)),
    _row("Unsqueeze", "negative_axes", (2, 3), _i(-1, 0)),
    _row("Unsqueeze", "scalar", (), _i(0)),
    _row("Transpose", "reversed", (2, 3, 4)),
    _row("Transpose", "permuted", (2, 3, 1, 4), perm=(2, 0, 3, 1)),
    _row("Transpose", "empty", (0, 3), perm=(1, 0)),
    _row("Reshape", "inferred", (2, 3, 4), _i(0, -1)),
    _row("Reshape", "to_scalar", (1, 1), _i()),
    _row("Reshape", "empty", (0, 4), _i(2, 0, 3), allowzero=1),
    _row("Flatten", "negative_axis", (2, 3, 4), axis=-1),
    _row("Expand", "broadcast", (3, 1), _i(2, 1, 4)),
    _row("Tile", "twice", (2, 3), _i(2, 3)),
    _row("Pad", "negative_axis", (2, 3), _i(1, 2), None, _i(-1)),
    _row("Pad", "reflected", (4, 5), _i(1, 2, 0, 1), mode="reflect"),
    _row("Where", "broadcast", _FLAGS, (4,), (3, 4)),
    Row("Where", "special", (_FLAGS, (4,), (3, 4)), {}, "special"),
    _row("PRelu", "one_way", (2, 3, 4), (3, 1)),
    _row("Clip", "both", (3, 4), (), ()),
    _row("Clip", "no_bounds", (3, 4)),
    *(_row(op, "three", (3, 1), (1, 4), (4,)) for op in ("Sum", "Mean", "Max", "Min")),
    _row("MatMul", "plain", (3, 4), (4, 5)),
    _row("MatMul", "batches", (2, 1, 3, 4), (5, 4, 2)),
    _row("MatMul", "vectors", (4,), (4,)),
    _row("MatMul", "no_rows", (0, 4), (4, 2)),
    _row("MatMul", "nothing_to_sum", (2, 0), (0, 3)),
    _row("MatMul", "large", (256, 512), (512, 128)),
    _row("Gemm", "transposed", (4, 3), (5, 4), (5,), transA=1, transB=1, alpha=0.5, beta=2.0),
    _row("Einsum", "contraction", (2, 3, 4), (2, 4, 5), equation="bij,bjk->bik"),
    _row("Conv", "padded", (2, 3, 8, 8), (4, 3, 3, 3), (4,), pads=(1, 1, 1, 1), strides=(2, 2)),
    _row("Conv", "grouped_1d", (1, 4, 10), (4, 1, 3), group=4, dilations=(2,)),
    _row("Conv", "large", (1, 16, 56, 56), (32, 16, 3, 3)),
    _row("ConvTranspose", "strided", (1, 2, 4, 4), (2, 3, 3, 3), strides=(2, 2)),
    _row("MaxPool", "padded", (1, 2, 6, 6), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    _row("AveragePool", "uncounted_padding", (1, 2, 6, 6), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
    _row("GlobalAveragePool", "image", (2, 3, 4, 5)),
    _row("GlobalMaxPool", "image", (2, 3, 4, 5)),
    _row("LayerNormalization", "last_axis", (2, 3, 8), (8,), (8,), axis=-1),
    _row("LayerNormalization", "two_axes", (2, 3, 8), (3, 8), axis=-2),
    _row("RMSNormalization", "last_axis", (2, 8), (8,)),
    _row("BatchNormalization", "inference", (2, 3, 4), (3,), (3,), (3,), (3,)),
    _row("InstanceNormalization", "image", (2, 3, 4, 4), (3,), (3,)),
    _row("GroupNormalization", "groups", (2, 4, 3, 3), (4,), (4,), num_groups=2),
    _row("LpNormalization", "negative_axis", (3, 4), axis=-1, p=2),
    _row("TopK", "negative_axis", (3, 6), _i(2), axis=-1),
    _row("OneHot", "negative", np.array([0, -1, 7], np.int64), _n(4), (2,), axis=-1),
    _row("Trilu", "upper", (2, 4, 4), _n(1), upper=1),
    _row("Trilu", "lower", (3, 5), _n(-1), upper=0),
    _row("DepthToSpace", "blocks", (1, 8, 2, 3), blocksize=2),
    _row("SpaceToDepth", "blocks", (1, 2, 4, 6), blocksize=2),
    _row("Shape", "part", (2, 0, 3), start=-2),
    _row("Size", "matrix", (3, 4)),
    _row("Det", "batch", (2, 3, 3)),
    _row("Dropout", "inference", (3, 4)),
    _row("IsInf", "one_sign", (3, 4), detect_negative=0),
    _row("QuantizeLinear", "negative_axis", (3, 4), np.array([0.5, 0.25, 2, 1], np.float32),
         np.array([0, 3, -2, 1], np.int8), axis=-1),
    _row("DequantizeLinear", "negative_axis", np.arange(-6, 6, dtype=np.int8).reshape(3, 4),
         np.array([0.5, 0.25, 2, 1], np.float32), np.array([0, 3, -2, 1], np.int8), axis=-1),
)  # fmt: skip
"""Operators with axes, indices, windows and many inputs."""
