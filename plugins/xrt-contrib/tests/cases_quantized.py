"""Cases of operators on quantised numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from ort_comparison import Case

R = np.random.default_rng(11)


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (R.standard_normal(shape) * scale).astype(dtype)


def q(*shape: int, dtype: Any = np.uint8, low: int | None = None, high: int | None = None) -> np.ndarray:
    """Integers."""
    info = np.iinfo(dtype)
    low, high = info.min if low is None else low, info.max + 1 if high is None else high
    return R.integers(low, high, shape).astype(dtype)


def s(value: float, dtype: Any = np.float32) -> np.ndarray:
    """A scalar."""
    return np.array(value, dtype)


def _weights(bits: int, n: int, k: int, block: int, zero: str, dtype: Any = np.float32) -> list[Any]:
    count = -(-k // block)
    b = q(n, count, block * bits // 8)
    scales = (R.random((n, count)) * 0.1 + 0.01).astype(dtype)
    zeros = {
        "": None,
        "packed": q(n, -(-count * bits // 8)),
        "float": (R.random((n, count)) * (1 << bits)).astype(dtype),
    }[zero]
    return [b, scales, zeros]


NBITS = [
    *(
        Case("MatMulNBits", [f(2, 3, 48), *_weights(bits, 5, 48, 16, zero), None, bias],
             {"N": 5, "K": 48, "bits": bits, "block_size": 16}, constants=constants, atol=1e-3, rtol=1e-3)
        for bits in (2, 4, 8) for zero in ("", "packed", *(("float",) if bits != 8 else ())) for bias in (None, f(5))
        for constants in ((1, 2, 3, 5), ())
        if not (bits == 2 and not constants)
    ),
    Case("MatMulNBits", [f(3, 40), *_weights(4, 6, 40, 32, "packed")], {"N": 6, "K": 40, "bits": 4, "block_size": 32},
         constants=(1, 2, 3), atol=1e-3, rtol=1e-3),
    Case("MatMulNBits", [f(3, 32, dtype=np.float16), *_weights(4, 6, 32, 32, "packed", np.float16)],
         {"N": 6, "K": 32, "bits": 4, "block_size": 32}, constants=(1, 2, 3), atol=2e-2, rtol=2e-2),
    Case("MatMulNBits", [f(3, 64), *_weights(4, 8, 64, 32, ""), np.repeat([1, 0], 32).astype(np.int32)],
         {"N": 8, "K": 64, "bits": 4, "block_size": 32}, constants=(1, 2, 4), atol=1e-3, rtol=1e-3),
]  # fmt: skip

BNB4 = [
    Case("MatMulBnb4", [f(3, 32), q(8 * 32 // 2), (R.random(16) * 0.3).astype(np.float32)],
         {"N": 8, "K": 32, "block_size": 16, "quant_type": kind}, constants=(1, 2), atol=1e-3)
    for kind in (0, 1)
]  # fmt: skip

GATHER = [
    *(
        Case("GatherBlockQuantized", [q(6, 32, dtype=np.int8, low=-8, high=8).astype(t), i, f(6, 2), z],
             {"block_size": 16, "quantize_axis": 1, "gather_axis": 0}, constants=(0, 2, 3))
        for t in (ml_dtypes.uint4, ml_dtypes.int4)
        for i in (np.array([[0, 5, -1]], np.int64), np.array(3, np.int32))
        for z in (None, q(6, 2, dtype=np.int8, low=0, high=8).astype(t))
    ),
    Case("GatherBlockQuantized", [q(32, 6, dtype=np.int8, low=0, high=8).astype(ml_dtypes.uint4), np.array([[0, 5], [3, 1]], np.int64),
         f(2, 6)], {"block_size": 16, "quantize_axis": 0, "gather_axis": 1}, constants=(0, 2)),
    *(
        Case("GatherBlockQuantized", [q(6, 32 * bits // 8), np.array([[0, 5, 2]], np.int64), f(6, 2), z],
             {"block_size": 16, "quantize_axis": 1, "gather_axis": 0, "bits": bits}, constants=(0, 2, 3))
        for bits in (4, 8) for z in (None, q(6, -(-2 * bits // 8)))
    ),
]  # fmt: skip

PRODUCTS = [
    *(
        Case("MatMulIntegerToFloat", [q(2, 3, 4), q(4, 5, dtype=t, low=-60 if t == np.int8 else 0, high=60), s(0.1), bs, az, bz, b])
        for t in (np.uint8, np.int8)
        for bs, bz in ((s(0.2), None), (s(0.2), s(3, t)), ((R.random(5) * 0.1).astype(np.float32), q(5, dtype=t, low=0, high=9)))
        for az, b in ((s(7, np.uint8), f(5)), (None, None))
    ),
    *(
        Case("DynamicQuantizeMatMul", [f(3, 8), q(8, 5, dtype=t, low=-60 if t == np.int8 else 0, high=60), bs, bz, b], atol=1e-3)
        for t in (np.uint8, np.int8)
        for bs, bz in ((s(0.02), s(3, t)), ((R.random(5) * 0.1).astype(np.float32), q(5, dtype=t, low=0, high=9)))
        for b in (f(5), None)
    ),
    *(
        Case("QGemm", [q(*((4, 3) if ta else (3, 4))), s(0.1), s(5, np.uint8), q(*((5, 4) if tb else (4, 5))), s(0.2), s(9, np.uint8),
             c, ys, None if ys is None else s(100, np.uint8)], {"transA": ta, "transB": tb, "alpha": 0.5}, atol=1e-3 if ys is None else 1)
        for ta in (0, 1) for tb in (0, 1) for c, ys in ((None, None), (q(5, dtype=np.int32, low=-99, high=99), s(3.0)))
    ),
    Case("QGemm", [q(3, 4), s(0.1), s(5, np.uint8), q(4, 5, dtype=np.int8, low=-60, high=60), (R.random(5) * 0.1).astype(np.float32),
         q(5, dtype=np.int8, low=-3, high=4), q(5, dtype=np.int32, low=-99, high=99)], atol=1e-3),
    *(
        Case("QAttention", [q(2, 4, 6), q(6, 24, dtype=t, low=-30 if t == np.int8 else 0, high=30), f(24), s(0.02), s(0.03), m,
             s(120, np.uint8), s(0, t), p], {"num_heads": 2, "unidirectional": u}, (0,) if p is None else (0, 1), constants=(1, 7), atol=1e-3)
        for t in (np.uint8, np.int8)
        for m, p, u in ((None, None, 0), (np.array([3, 4], np.int32), None, 0), (None, f(2, 2, 2, 5, 4), 1))
    ),
]  # fmt: skip


def binary(op: str, dtype: Any) -> Case:
    """A QLinearAdd or Mul with broadcasting."""
    z = [s(v, dtype) for v in (3, 5, 7)]
    given = [q(2, 3, 4, dtype=dtype), s(0.1), z[0], q(3, 1, dtype=dtype), s(0.2), z[1], s(0.3), z[2]]
    return Case(op, given, atol=1, constants=(1, 2, 4, 5, 6, 7))


QLINEAR = [
    *(binary(op, t) for op in ("QLinearAdd", "QLinearMul") for t in (np.uint8, np.int8)),
    *(
        Case(op, [q(3, 7, dtype=t), s(0.05), s(3, t), s(0.01), s(5, t)], a, atol=1, constants=(1, 2, 3, 4))
        for t in (np.uint8, np.int8) for op, a in (("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.2}))
    ),
    *(
        Case("QLinearSoftmax", [q(2, 3, 4, dtype=t), s(0.05), s(3, t), s(1 / 256), s(np.iinfo(t).min, t)],
             {"axis": axis, "opset": opset}, atol=1, constants=(1, 2, 3, 4))
        for t in (np.uint8, np.int8) for axis, opset in ((-1, 13), (1, 13), (1, 12), (2, 12))
    ),
    *(
        Case("QLinearConcat", [s(0.1), s(5, t), q(2, 3, dtype=t), s(0.2), s(1, t), q(2, 4, dtype=t), s(0.05), s(2, t)], {"axis": 1},
             atol=1, constants=(0, 1, 3, 4, 6, 7)) for t in (np.uint8, np.int8)
    ),
    Case("QLinearWhere", [R.random((2, 3)) > 0.5, q(2, 3), s(0.1), s(3, np.uint8), q(3), s(0.2), s(4, np.uint8), s(0.15), s(7, np.uint8)],
         atol=1, constants=(2, 3, 5, 6, 7, 8)),
    *(
        Case("QLinearAveragePool", [q(*((2, 6, 7, 3) if last else (2, 3, 6, 7)), dtype=t), s(0.05), s(3, t), s(0.04), s(5, t)],
             {"kernel_shape": [2, 3], "channels_last": last, **a}, atol=1, constants=(1, 2, 3, 4))
        for t in (np.uint8, np.int8) for last in (0, 1)
        for a in ({}, {"strides": [2, 2], "pads": [1, 1, 0, 1], "count_include_pad": 1}, {"strides": [2, 2], "ceil_mode": 1})
    ),
    *(
        Case("QLinearGlobalAveragePool", [q(*((2, 6, 7, 3) if last else (2, 3, 6, 7)), dtype=t), s(0.05), s(3, t), s(0.04), s(5, t)],
             {"channels_last": last}, atol=1, constants=(1, 2, 3, 4)) for t in (np.uint8, np.int8) for last in (0, 1)
    ),
    *(
        Case("QLinearConv", [q(1, 6, 7, 4), s(0.05), s(3, np.uint8), q(8, 4 // g, 3, 3), s(0.02), s(120, np.uint8), s(0.5), s(100, np.uint8),
             q(8, dtype=np.int32, low=-99, high=99)], {"channels_last": 1, "group": g, "pads": [1, 1, 1, 1], "strides": [2, 1]}, atol=1,
             constants=(1, 2, 3, 4, 5, 6, 7, 8)) for g in (1, 2)
    ),
    *(
        Case("QuantizeLinear", [f(3, 4, scale=9), sc, np.zeros(np.shape(sc), t) + 3], {"axis": 1}, atol=0, note=str(np.dtype(t)))
        for t in (np.uint8, np.int8, np.uint16, np.int16) for sc in (s(0.1), np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    ),
    *(
        Case("DequantizeLinear", [q(3, 4, dtype=t), sc, np.zeros(np.shape(sc), t) + 3], {"axis": 1}, note=str(np.dtype(t)))
        for t in (np.uint8, np.int8, np.uint16, np.int16) for sc in (s(0.1), np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    ),
    Case("DequantizeLinear", [q(3, 4, dtype=np.int32), s(0.1)]),
    *(
        Case("DynamicQuantizeLSTM",
             [f(5, 2, 4), q(d, 4, 12, dtype=t, low=-99 if t == np.int8 else 0, high=99), q(d, 3, 12, dtype=t, low=-99 if t == np.int8 else 0, high=99),
              f(d, 24) if more else None, np.array([5, 3], np.int32) if more else None, f(d, 2, 3) if more else None,
              f(d, 2, 3) if more else None, f(d, 9) if more else None, np.full(d, 0.01, np.float32), np.zeros(d, t), np.full(d, 0.01, np.float32),
              np.zeros(d, t)],
             {"hidden_size": 3, "direction": "bidirectional" if d == 2 else "forward"}, (0, 1, 2), constants=(1, 2, 8, 9, 10, 11), atol=4e-2, rtol=0.1)
        for t in (np.uint8, np.int8) for d in (1, 2) for more in (False, True)
    ),
]  # fmt: skip

ALL = [*NBITS, *BNB4, *GATHER, *PRODUCTS, *QLINEAR]
