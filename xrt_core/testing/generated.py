"""Cases made from tables: operators by dtypes, shapes and values that the backend tests of ONNX leave out.

A case is one node and its arguments; what it must give is computed by the host in higher precision (`reference`).
Those of `sample` run by default: every operator with the values that break things, and dtypes and shapes dealt out so
that each meets many operators; the others are marked slow.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.errors import GraphError, ShapeError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import find_traits
from xrt_core.ir.schema import find_schema
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.testing.functions import OPSET
from xrt_core.testing.node_cases import Case
from xrt_core.testing.operator_table import (
    BINARY,
    BROADCASTS,
    CAST_DTYPES,
    DTYPES,
    RANGES,
    ROWS,
    SHAPES,
    UNARY,
    Row,
)
from xrt_core.testing.tolerance import is_floating

SPECIAL: Final = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-3, 3e4, -3e4, 2.5)
"""Values that every floating operator has to take."""

Argument = tuple[int, ...] | np.ndarray | None


@dataclass(frozen=True)
class Generated:
    """A case before its arrays are made. sample: whether it runs by default."""

    id: str
    op_type: str
    dtype: np.dtype
    arguments: Sequence[Argument]
    attributes: Mapping[str, Any]
    values: str
    sample: bool

    def case(self) -> Case | None:
        """The case, or None where the operator's schema does not allow it."""
        seed = zlib.crc32(self.id.encode())
        rng = np.random.default_rng(seed)
        arrays = [_array(rng, a, self.dtype, self.op_type, i, self.values) for i, a in enumerate(self.arguments)]
        made = make_node(self.op_type, arrays, self.attributes)
        return None if made is None else Case(self.id, made, arrays, [], 0.0, 0.0, {"": _opset(self.op_type)})


def make_node(op_type: str, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> Node | None:
    """A typed node of `op_type` over these arrays, or None where its schema does not take their dtypes."""
    schema = find_schema(op_type, "", _opset(op_type))
    if schema is None:
        return None
    count = int(attributes.get("num_outputs", max(1, schema.min_outputs)))
    inputs = [None if x is None else Value(f"x{i}") for i, x in enumerate(arrays)]
    outputs = [Value(f"y{i}") for i in range(count)]
    return retyped(Node(op_type, inputs, outputs, attributes, version=schema.since_version, name="node"), arrays)


def retyped(node: Node, arrays: Sequence[Any]) -> Node | None:
    """`node` with the types of these arrays and what follows from them, or None where its schema does not take them."""
    schema = find_schema(node.op_type, node.domain, node.version)
    if schema is None or schema.onnx is None or not _allowed(schema.onnx, arrays):
        return None
    typed = [
        None if v is None else Value(v.name, TensorType(x.dtype, x.shape))
        for v, x in zip(node.inputs, arrays, strict=True)
    ]
    known = [None if v is None else Value(v.name, v.type, x) for v, x in zip(typed, arrays, strict=True)]
    try:
        types = infer_types(node.replace(inputs=known))
    except (ShapeError, GraphError):
        return None
    outputs = [None if v is None else Value(v.name, t) for v, t in zip(node.outputs, types, strict=True)]
    if not all(v is None or v.is_static for v in outputs):
        return None
    return node.replace(inputs=typed, outputs=outputs)


@functools.cache
def all_generated() -> tuple[Generated, ...]:
    """The whole grid, in a fixed order."""
    return (*_unary(), *_binary(), *_casts(), *_rows())


def _unary() -> Iterator[Generated]:
    for k, op_type in enumerate(UNARY):
        pairs = list(itertools.product(DTYPES, SHAPES.items()))
        legal = [i for i, (d, _) in enumerate(pairs) if make_node(op_type, [np.zeros(1, d)], {})]
        dealt = {legal[(7 * k + k // len(SHAPES) + j * 8) % len(legal)] for j in range(2)} if legal else set()
        for i, (dtype, (label, shape)) in enumerate(pairs):
            yield Generated(f"{op_type}-{dtype_name(dtype)}-{label}", op_type, dtype, [shape], {}, "plain", i in dealt)
        for j, dtype in enumerate(d for d in DTYPES if is_floating(d)):
            yield Generated(
                f"{op_type}-{dtype_name(dtype)}-special", op_type, dtype, [(len(SPECIAL),)], {}, "special", j == 0
            )


def _binary() -> Iterator[Generated]:
    for k, (op_type, attributes) in enumerate(BINARY.items()):
        pairs = list(itertools.product(DTYPES, BROADCASTS.items()))
        legal = [i for i, (d, _) in enumerate(pairs) if make_node(op_type, [np.zeros(1, d)] * 2, attributes)]
        dealt = {legal[(11 * k + j * 5) % len(legal)] for j in range(2)} if legal else set()
        for i, (dtype, (label, shapes)) in enumerate(pairs):
            yield Generated(
                f"{op_type}-{dtype_name(dtype)}-{label}", op_type, dtype, shapes, attributes, "plain", i in dealt
            )
        for j, dtype in enumerate(d for d in DTYPES if is_floating(d)):
            shapes = ((len(SPECIAL), 1), (len(SPECIAL),))
            yield Generated(
                f"{op_type}-{dtype_name(dtype)}-special", op_type, dtype, shapes, attributes, "special", j == 0
            )


def _casts() -> Iterator[Generated]:
    from xrt_core.ir.types import DTYPE_TO_ONNX

    for i, (source, target) in enumerate(itertools.product(CAST_DTYPES, CAST_DTYPES)):
        name = f"Cast-{dtype_name(source)}-to-{dtype_name(target)}"
        yield Generated(name, "Cast", source, [(3, 5)], {"to": DTYPE_TO_ONNX[target]}, "plain", i % 13 == 0)


def _rows() -> Iterator[Generated]:
    for k, row in enumerate(ROWS):
        others = [d for d in DTYPES if d != np.float32]
        legal = [d for d in others if _takes(row, d)]
        dealt = legal[k % len(legal)] if legal and k % 2 else None
        shaped = any(isinstance(a, tuple) for a in row.arguments)
        for dtype in (np.dtype(np.float32), *(others if shaped else ())):
            name = f"{row.op_type}-{dtype_name(dtype)}-{row.label}"
            sample = dtype == np.float32 or dtype == dealt
            yield Generated(name, row.op_type, dtype, row.arguments, row.attributes, row.values, sample)


def _takes(row: Row, dtype: np.dtype) -> bool:
    arrays = [None if a is None else np.zeros(1, dtype) if isinstance(a, tuple) else a for a in row.arguments]
    schema = find_schema(row.op_type, "", _opset(row.op_type))
    return schema is not None and _allowed(schema.onnx, arrays)


def _opset(op_type: str) -> int:
    return _NEWER.get(op_type, OPSET)


_NEWER: Final = {"RMSNormalization": 23}
"""Operators that came after `OPSET`."""


def _allowed(schema: Any, arrays: Sequence[Any]) -> bool:
    """Whether the schema's type constraints admit the arrays' dtypes."""
    bound: dict[str, np.dtype] = {}
    formals = list(schema.inputs)
    for i, x in enumerate(arrays):
        formal = formals[min(i, len(formals) - 1)]
        if x is None:
            continue
        name = _TYPE_NAMES.get(dtype_name(x.dtype), dtype_name(x.dtype))
        if f"tensor({name})" not in formal.types:
            return False
        homogeneous = i < len(formals) or formal.is_homogeneous
        if homogeneous and bound.setdefault(formal.type_str, x.dtype) != x.dtype:
            return False
    return True


_TYPE_NAMES: Final = {
    "float32": "float", "float64": "double", "float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2",
}  # fmt: skip


def _array(rng: np.random.Generator, a: Argument, dtype: np.dtype, op_type: str, index: int, values: str) -> Any:
    if a is None or isinstance(a, np.ndarray):
        return a
    if values == "special" and is_floating(dtype):
        return np.resize(np.array(SPECIAL), a).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.integers(0, 2, a)).astype(bool)
    if find_traits(op_type).comparison:  # few values, so that equal ones meet
        return np.asarray(rng.integers(0, 3, a)).astype(dtype)
    low, high = RANGES.get((op_type, index)) or RANGES.get((op_type, -1)) or (-3.0, 3.0)
    if is_floating(dtype):
        # multiples of 1/64 are exact in every type with seven bits, so that inputs are no source of error
        steps = rng.integers(int(np.ceil(low * 64)), int(np.floor(high * 64)) + 1, a)
        return np.asarray(steps / 64).astype(dtype)
    if dtype.kind == "u" or dtype in (ml_dtypes.uint4, ml_dtypes.uint2):
        low, high = max(low, 0.0), max(high, 2.0)
    return np.asarray(rng.integers(int(np.ceil(low)), int(np.floor(high)) + 1, a)).astype(dtype)


