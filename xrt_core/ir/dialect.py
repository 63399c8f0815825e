"""Schemas of the dialect's operators for training: gradients that no composition of ONNX operators expresses well."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION, AttributeKind, AttributeSchema, Schema, register_schema
from xrt_core.ir.types import Dim, TensorType, ValueType

Types = tuple[ValueType | None, ...]
_MANY: Final = 2**31 - 1


def _tensor(node: Node, index: int) -> TensorType:
    v = node.inputs[index]
    return v.type if v is not None and isinstance(v.type, TensorType) else TensorType(None)


def _like(index: int) -> object:
    def infer(node: Node) -> Types:
        v = node.inputs[index]
        return (None if v is None else v.type,)

    return infer


def _filter(node: Node) -> Types:
    """ConvFilterGrad: [channels of dy, channels of x / group, *kernel_shape]."""
    x, dy = _tensor(node, 0), _tensor(node, 1)
    kernel = tuple(node.attributes["kernel_shape"])  # type: ignore[arg-type]
    group = node.attributes.get("group", 1)
    channels: Dim = None
    if x.shape is not None and isinstance(x.shape[1], int):
        assert isinstance(group, int)
        channels = x.shape[1] // group
    if x.shape is not None and len(x.shape) != len(kernel) + 2:
        raise ShapeError(f"ConvFilterGrad {node.name!r}: kernel_shape {kernel} for an input of rank {len(x.shape)}")
    return (TensorType(x.dtype, (dy.shape[1] if dy.shape is not None else None, channels, *kernel)),)


def _same(node: Node) -> Types:
    """Barrier: each output is the input of its number."""
    return tuple(None if v is None else v.type for v in node.inputs[: len(node.outputs)])


def _input_shape(node: Node) -> Types:
    """AveragePoolGrad: the channels of dy, over `size`."""
    dy = _tensor(node, 0)
    lead = (None, None) if dy.shape is None else dy.shape[:2]
    return (TensorType(dy.dtype, (*lead, *node.attributes["size"])),)  # type: ignore[misc]


def _batch_norm(node: Node) -> Types:
    """BatchNormGrad: gradients by x, by the scale, and by the bias, which is of the scale's type."""
    return _tensor(node, 1), _tensor(node, 2), _tensor(node, 2)


def _uniform(node: Node) -> Types:
    """CounterUniform: `shape` numbers of float32."""
    import numpy as np

    return (TensorType(np.dtype(np.float32), tuple(node.attributes["shape"])),)  # type: ignore[arg-type]


_WINDOW: Final[dict[str, AttributeKind]] = {
    "kernel_shape": "ints", "strides": "ints", "dilations": "ints", "pads": "ints", "auto_pad": "string",
}  # fmt: skip
_POOL: Final[dict[str, AttributeKind]] = {**_WINDOW, "ceil_mode": "int"}


def _own(name: str, inputs: int, infer: object, required: tuple[str, ...] = (), **attributes: AttributeKind) -> None:
    table = {k: AttributeSchema(k, kind, k in required) for k, kind in attributes.items()}
    register_schema(
        Schema(
            DIALECT, name, DIALECT_VERSION, inputs, inputs, 1, 1, MappingProxyType(table),
            infer=infer,  # type: ignore[arg-type]
        )
    )  # fmt: skip


_own("StopGradient", 1, _like(0))
_own("Assign", 2, _like(0))
register_schema(Schema(DIALECT, "Barrier", DIALECT_VERSION, 1, _MANY, 1, _MANY, infer=_same))
_own("Cofactors", 1, _like(0))
_own("ConvFilterGrad", 2, _filter, ("kernel_shape",), **_WINDOW, group="int")
_own("MaxPoolGrad", 3, _like(1), ("kernel_shape",), **_POOL)
_own("AveragePoolGrad", 1, _input_shape, ("kernel_shape", "size"), **_POOL, count_include_pad="int", size="ints")
register_schema(
    Schema(
        DIALECT, "BatchNormGrad", DIALECT_VERSION, 3, 3, 1, 3,
        MappingProxyType({"epsilon": AttributeSchema("epsilon", "float", False)}), infer=_batch_norm,
    )
)  # fmt: skip
_own("CounterUniform", 1, _uniform, ("shape", "stream"), shape="ints", stream="int")
