"""Cases of activations, products, normalisations and spectra."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from ort_comparison import Case

R = np.random.default_rng(5)


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (R.standard_normal(shape) * scale).astype(dtype)


ACTIVATIONS = [
    Case("Gelu", [f(3, 7)]),
    Case("FastGelu", [f(2, 3, 8)]),
    Case("FastGelu", [f(2, 3, 8), f(8)]),
    Case("QuickGelu", [f(4, 5)], {"alpha": 0.7}),
    Case("QuickGelu", [f(4, 5)]),
    Case("BiasGelu", [f(2, 3, 8), f(8)]),
    Case("ScaledSiLU", [f(4, 5)], {"alpha": 0.7}),
    Case("ScaledSiLU", [f(4, 5), np.array(0.3, np.float32)]),
    *(
        Case("FusedGemm", [f(3, 4), f(4, 5), f(5)], {"activation": a, "alpha": 0.5, "beta": 2.0})
        for a in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign")
    ),
    Case(
        "FusedGemm", [f(4, 3), f(5, 4)], {"activation": "LeakyRelu", "activation_alpha": 0.3, "transA": 1, "transB": 1}
    ),
    Case("FusedGemm", [f(3, 4), f(4, 5)], {"activation": "Relu"}),
]

LINEAR = [
    Case("FusedMatMul", [f(3, 4), f(4, 5)], {"alpha": 0.5}),
    Case("FusedMatMul", [f(2, 4, 3), f(2, 5, 4)], {"transA": 1, "transB": 1}),
    Case("FusedMatMul", [f(2, 6, 3, 4), f(2, 6, 4, 5)], {"alpha": -2.0}),
    Case("FusedMatMul", [f(4), f(4, 5)]),
    Case("FusedMatMul", [f(3, 4), f(5, 3, 4)], {"transB": 1}),
    *(
        Case("FusedMatMul", [a, b], {"transA": ta, "transB": tb, "transBatchA": ba, "transBatchB": bb, "alpha": 1.5})
        for ta, tb, ba, bb in itertools.product((0, 1), repeat=4)
        for a in [
            np.moveaxis(f(*((2, 4, 3) if ta else (2, 3, 4))), 0, -2).copy()
            if ba
            else f(*((2, 4, 3) if ta else (2, 3, 4)))
        ]
        for b in [
            np.moveaxis(f(*((2, 5, 4) if tb else (2, 4, 5))), 0, -2).copy()
            if bb
            else f(*((2, 5, 4) if tb else (2, 4, 5)))
        ]
        if not (ba and ta) and not (bb and tb)
    ),
    Case("FusedMatMul", [f(4, 2, 3), f(2, 4, 5)], {"transA": 1, "transBatchA": 1}),
    Case("TransposeMatMul", [f(4, 3), f(5, 4)], {"transA": 1, "transB": 1, "alpha": 2.0}),
    Case("Inverse", [f(2, 4, 4)], rtol=1e-3, atol=1e-3),
    Case("Inverse", [f(5, 5, dtype=np.float64)], rtol=1e-8),
    Case("CDist", [f(5, 3), f(4, 3)], {"metric": "euclidean"}),
    Case("CDist", [f(5, 3), f(4, 3)], {"metric": "sqeuclidean"}),
    Case("CDist", [f(5, 3, dtype=np.float64), f(4, 3, dtype=np.float64)]),
    Case("MatMulInteger16", [R.integers(-99, 99, (2, 3, 4), np.int16), R.integers(-99, 99, (4, 5), np.int16)]),
]

NORMALIZATION = [
    Case("SimplifiedLayerNormalization", [f(2, 3, 8), f(8)], {"axis": -1, "epsilon": 1e-3}, (0, 1), domain=""),
    Case("SimplifiedLayerNormalization", [f(2, 3, 8), f(3, 8)], {"axis": 1}, domain=""),
    Case("SimplifiedLayerNormalization", [f(2, 8, dtype=np.float16), f(8, dtype=np.float16)], domain=""),
    *(
        Case("SkipLayerNormalization", [f(2, 3, 8), s, f(8), b, c], {"epsilon": 1e-4}, o)
        for s in (f(2, 3, 8), f(3, 8), f(1, 3, 8)) for b in (f(8), None) for c, o in ((f(8), (0, 3)), (None, (0,)))
    ),
    Case("SkipLayerNormalization", [f(2, 3, 8, dtype=np.float16), f(2, 3, 8, dtype=np.float16), f(8, dtype=np.float16)]),
    *(
        Case("SkipSimplifiedLayerNormalization", [f(2, 3, 8), s, f(8), c], {"epsilon": 1e-4}, o)
        for s in (f(2, 3, 8), f(3, 8)) for c, o in ((f(8), (0, 3)), (None, (0,)))
    ),
    *(
        Case(
            "EmbedLayerNormalization",
            [
                R.integers(0, 9, (2, 5), np.int32), seg and R.integers(0, 2, (2, 5), np.int32), f(9, 8), f(7, 8),
                seg and f(2, 8), f(8), f(8), m if m is None else (R.random((2, 5)) > 0.3).astype(np.int32),
                p if p is None else R.integers(0, 7, (2, 5), np.int32),
            ],
            {"epsilon": 1e-5, **({"mask_index_type": 1} if m else {})},
            (0, 1, 2) if m else (0, 1),
        )
        for seg in (True, None) for m in (1, None) for p in (1, None)
    ),
]  # fmt: skip

ALL = [*ACTIVATIONS, *LINEAR, *NORMALIZATION]
