"""Products of a matrix of 8-bit integers that DequantizeLinear reads and a constant one: found, and made ready to be
multiplied as the integers they are.

As float32 a product of 400 x 384 x 1536 takes 4.5 ms of one thread (AVX-512 with VNNI), of 8-bit integers 3.0. What is
exact there is rounded here as well: sums of integers are exact in int32, and are scaled once.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_xla.kernels.context import Layout
from xrt_xla.kernels.quantized import signed

_EIGHT_BIT: Final = (np.dtype(np.int8), np.dtype(np.uint8))
_ROWS: Final = 128
_SIDE: Final = 64
"""From how many rows, and elements of the constant matrix along each axis, on it pays; with two threads 32 rows take
longer than as float32."""

_DEPTH: Final = 1 << 15
"""Products of two numbers of 8 bits and a sign, of which the sum stays within int32."""


class Dequantized(NamedTuple):
    """(x - zero) * scale, of int8 or uint8: the scale float32, one or one for each column; the zero one int."""

    x: Value
    scale: np.ndarray
    zero: int


class IntegerProduct(NamedTuple):
    """a @ b of integers is this: a @ b - offset, times scale. b: the constant, and how it is laid out."""

    a: Value
    b: np.ndarray
    layout: Layout | None
    offset: np.ndarray
    scale: np.ndarray


def dequantized(node: Node, known: tuple[np.ndarray | None, ...]) -> Dequantized | None:
    """What a DequantizeLinear to float32 reads; None where it is another node or has other parameters.

    known: the values of its inputs where they are constants.
    """
    if node.op_type != "DequantizeLinear" or node.domain:
        return None
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y is None or y.dtype != np.float32:
        return None
    scale, zero = known[1], known[2] if len(known) > 2 else None
    if x.dtype not in _EIGHT_BIT or scale is None or scale.dtype != np.float32 or node.attributes.get("block_size", 0):
        return None
    if len(known) > 2 and node.inputs[2] is not None and zero is None:
        return None
    zeros = np.zeros(1, np.int32) if zero is None else zero.astype(np.int32).reshape(-1)
    if scale.size == 0 or zeros.size == 0 or (zeros != zeros[0]).any():
        return None
    if scale.size > 1 and node.attributes.get("axis", 1) not in (-1, len(x.shape or ()) - 1):
        return None
    return Dequantized(x, scale.reshape(-1), int(zeros[0]))


def integer_product(node: Node, a: Dequantized | None, b: Dequantized | None, data: Any) -> IntegerProduct | None:
    """A MatMul of two such as a product of integers; None where it is another node, or that does not pay.

    data: the constant that `b` reads, if it reads one.
    """
    if node.op_type != "MatMul" or node.domain or a is None or b is None or data is None or data.ndim != 2:
        return None
    is_signed = data.dtype == np.int8
    shape = [d for d in a.x.shape or () if isinstance(d, int)]
    if len(shape) < 2 or len(shape) != len(a.x.shape or ()) or a.scale.size != 1:
        return None
    rows = math.prod(shape[:-1])
    if rows < _ROWS or min(data.shape) < _SIDE or data.shape[0] > _DEPTH or b.zero != (0 if is_signed else 128):
        return None  # with another zero point the sums of the rows of `a` were needed
    with np.errstate(all="ignore"):
        scale = a.scale * b.scale
        parts = np.concatenate([a.scale, b.scale, scale])
        # neither lost nor infinite on the way, as the float32 product is not
        moderate = np.abs(parts[parts != 0])
    if not np.isfinite(parts).all() or (moderate.size and not 1e-30 < moderate.min() <= moderate.max() < 1e20):
        return None
    zero = a.zero - (128 if a.x.dtype == np.uint8 else 0)
    taps = signed(np, data)
    offset = zero * taps.sum(axis=0, dtype=np.int32)
    return IntegerProduct(a.x, data, None if is_signed else Layout("int8", signed), offset.astype(np.int32), scale)
