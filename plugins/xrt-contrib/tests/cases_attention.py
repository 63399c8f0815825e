"""Cases of attention."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from ort_comparison import Case

R = np.random.default_rng(7)


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return (R.standard_normal(shape) * scale).astype(dtype)


def i32(*values: Any) -> np.ndarray:
    """A vector of int32."""
    return np.array(values, np.int32)


def _masks(batch: int, length: int, total: int) -> list[Any]:
    some = (R.random((batch, total)) > 0.3).astype(np.int32)
    some[:, 0] = 1
    full = (R.random((batch, length, total)) > 0.3).astype(np.int32)
    full[:, :, 0] = 1
    return [None, some, full, R.integers(1, total + 1, batch, np.int32),
            np.concatenate([np.full(batch, total), np.arange(batch)]).astype(np.int32)]  # fmt: skip


ATTENTION = [
    *(
        Case("Attention", [f(2, 4, 6), f(6, 24), f(24), m, None, b], {"num_heads": 2, "unidirectional": u}, (0,))
        for m in _masks(2, 4, 4) for b in (None, f(1, 2, 4, 4), f(2, 1, 4, 4)) for u in (0, 1)
        if not (u and m is not None and m.ndim == 1)
    ),
    Case("Attention", [f(2, 4, 6), f(6, 24), None], {"num_heads": 2, "scale": 0.3, "mask_filter_value": -5.0}),
    Case("Attention", [f(2, 4, 6), f(6, 24), f(24), np.tril(np.ones((2, 4), np.int32))],
         {"num_heads": 2, "mask_filter_value": -5.0}),
    *(
        Case("Attention", [f(2, 3, 6), f(6, 24), f(24), m, f(2, 2, 2, 5, 4)], {"num_heads": 2, "unidirectional": u}, (0, 1))
        for m in _masks(2, 3, 8)[:3] for u in (0, 1)
    ),
    Case("Attention", [f(2, 3, 6), f(6, 24), f(24)], {"num_heads": 2, "unidirectional": 1}, (0, 1)),
    Case("Attention", [f(2, 3, 6), f(6, 28), f(28)], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]}),
]  # fmt: skip

MULTI_HEAD = [
    *(
        Case("MultiHeadAttention", [f(2, 4, 8), f(2, 4, 8), f(2, 4, 8), b, m, a], {"num_heads": 2, "unidirectional": u})
        for b in (None, f(24)) for m in _masks(2, 4, 4)[:4] for a in (None, f(1, 1, 4, 4)) for u in (0, 1)
    ),
    Case("MultiHeadAttention", [f(2, 4, 8), f(2, 6, 8), f(2, 6, 12), f(28)], {"num_heads": 2, "scale": 0.2}),
    Case("MultiHeadAttention", [f(2, 4, 8), f(2, 2, 6, 4), f(2, 2, 6, 4)], {"num_heads": 2}),
    Case("MultiHeadAttention", [f(2, 4, 8), f(2, 2, 6, 4), f(2, 2, 6, 4), f(24)], {"num_heads": 2}),
    Case("MultiHeadAttention", [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8), f(24), None, None, f(2, 2, 5, 4), f(2, 2, 5, 4)],
         {"num_heads": 2}, (0, 1, 2)),
    Case("MultiHeadAttention", [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8), None, None, f(2, 2, 3, 8), f(2, 2, 5, 4),
         f(2, 2, 5, 4)], {"num_heads": 2, "unidirectional": 1}, (0, 1, 2)),
    Case("MultiHeadAttention", [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8)], {"num_heads": 2}, (0, 1, 2, 3), types=["FLOAT"] * 4),
    *(
        Case("DecoderMaskedMultiHeadAttention", [f(4, 1, 8), f(4, 1, 8), f(4, 1, 8), m, a, f(4, 2, 9, 4), f(4, 2, 9, 4),
             i32(5), beam and i32(2), beam and R.integers(0, 2, (2, 2, 9), np.int32), b],
             {"num_heads": 2, "past_present_share_buffer": 1}, (0, 1, 2))
        for m in (None, _masks(4, 1, 6)[1]) for a in (None, f(1, 2, 1, 6)) for beam in (None, True) for b in (None, f(24))
    ),
    Case("DecoderMaskedMultiHeadAttention", [f(2, 1, 8), f(2, 2, 6, 4), f(2, 2, 6, 4)], {"num_heads": 2}),
    Case("DecoderMaskedMultiHeadAttention", [f(2, 1, 8), f(2, 2, 6, 4), f(2, 2, 6, 4)],
         {"num_heads": 2, "output_qk": 1}, (0, 3), types=["FLOAT"] * 2),
]  # fmt: skip


def gqa(
    batch: int = 2, length: int = 3, past: int = 4, *, packed: bool = False, rotary: bool = False, buffer: int = 0,
    positions: bool = False, bias: bool = False, sink: bool = False, dtype: Any = np.float32, no_past: bool = False,
    ragged: bool = True, outputs: Any = (0, 1, 2), size: int = 16, **attributes: Any,
) -> Case:  # fmt: skip
    """A GroupQueryAttention of 4 heads that share 2. no_past: the first prompt."""
    heads, shared = 4, 2
    total = length if no_past else past + length
    query = f(batch, length, (heads + (2 * shared if packed else 0)) * size, dtype=dtype)
    key, value = (None if packed else f(batch, length, shared * size, dtype=dtype) for _ in range(2))
    lengths = np.full(batch, total - 1, np.int32)
    if ragged and not no_past and batch > 1:
        lengths[1] -= 1
    rows = buffer or (0 if no_past else past)
    caches = [f(batch, shared, rows, size, dtype=dtype) for _ in range(2)] if rows else [None, None]
    caps = [f(32, size // 2, dtype=dtype) for _ in range(2)] if rotary else [None, None]
    at = R.integers(0, 32, (batch, length)).astype(np.int64) if positions else None
    inputs = [query, key, value, *caches, lengths, i32(total).reshape(1), *caps, at,
              f(1, heads, length, total, dtype=dtype) if bias else None, f(heads, dtype=dtype) if sink else None]  # fmt: skip
    said = {"num_heads": heads, "kv_num_heads": shared, **({"do_rotary": 1} if rotary else {}), **attributes}
    return Case("GroupQueryAttention", inputs, said, outputs, note="buffer" if buffer else "")


def resident(total: int, capacity: int, window: int) -> int:
    """Rows of a window cache that hold something."""
    step = capacity - window + 1
    return total - step * max(0, -(-(total - capacity) // step))


def windowed(
    length: int, past: int, batch: int = 2, *, capacity: int = 6, window: int = 6, packed: bool = False,
    bias: bool = False, **attributes: Any,
) -> Case:  # fmt: skip
    """A GroupQueryAttention whose cache holds the newest tokens alone."""
    heads, shared, size, total = 4, 2, 16, past + length
    query = f(batch, length, (heads + (2 * shared if packed else 0)) * size)
    key, value = (None if packed else f(batch, length, shared * size) for _ in range(2))
    caches = [f(batch, shared, capacity, size) for _ in range(2)]
    lengths = np.full(batch, total - 1, np.int32)
    caps = [f(32, size // 2) for _ in range(2)] if attributes.get("do_rotary") else [None, None]
    inputs = [query, key, value, *caches, lengths, i32(total).reshape(1), *caps, None,
              f(1, heads, length, total) if bias else None]  # fmt: skip
    said = {"num_heads": heads, "kv_num_heads": shared, "local_window_size": min(window, capacity),
            "sliding_window_cache": 1, **attributes}  # fmt: skip
    rows = resident(total, capacity, min(window, capacity))
    note = f"window{capacity}past{past}"
    return Case("GroupQueryAttention", inputs, said, (0, 1, 2), note=note, rows=rows)


def quantised(kind: str, bits: int) -> Case:
    """A GroupQueryAttention with a cache of int8, or of two numbers in a byte."""
    heads, shared, size, batch, length, past = 4, 2, 16, 2, 1, 5
    packed = size if bits == 8 else size // 2
    dtype = np.int8 if bits == 8 else np.uint8
    caches = [R.integers(-100 if bits == 8 else 0, 100, (batch, shared, past, packed)).astype(dtype) for _ in range(2)]
    shape = (1,) if kind == "PER_TENSOR" else (1, shared, 1, size)
    scales = [(0.02 if bits == 8 else 0.3) * (1 + np.abs(f(*shape))) for _ in range(2)]
    inputs = [f(batch, length, heads * size), *(f(batch, length, shared * size) for _ in range(2)), *caches,
              np.full(batch, past, np.int32), i32(past + length).reshape(1), *[None] * 5, *scales]  # fmt: skip
    said = {"num_heads": heads, "kv_num_heads": shared, "k_quant_type": kind, "v_quant_type": kind,
            "kv_cache_bit_width": bits}  # fmt: skip
    return Case("GroupQueryAttention", inputs, said, (0, 1, 2), rtol=2e-3, atol=2e-3, note=f"{kind}{bits}")


GROUPED = [
    gqa(no_past=True),
    gqa(no_past=True, packed=True, rotary=True),
    gqa(no_past=True, rotary=True, rotary_interleaved=1),
    gqa(no_past=True, buffer=12),
    gqa(length=1),
    gqa(length=1, packed=True, rotary=True),
    gqa(length=1, buffer=12, rotary=True),
    gqa(length=1, batch=1, buffer=12, rotary=True),
    gqa(length=1, batch=1, scale=0.3, softcap=5.0),
    gqa(batch=1),
    gqa(batch=1, rotary=True, packed=True, buffer=12),
    gqa(batch=1, rotary=True, positions=True),
    gqa(no_past=True, length=7, local_window_size=3),
    gqa(length=1, past=9, local_window_size=4),
    gqa(length=1, bias=True, ragged=False),
    gqa(no_past=True, bias=True),
    gqa(no_past=True, bias=True, softcap=3.0),
    gqa(no_past=True, smooth_softmax=1),
    gqa(no_past=True, sink=True),
    gqa(length=1, sink=True, softcap=2.0),
    gqa(no_past=True, length=5, outputs=(0, 1, 2, 3), qk_output=1),
    gqa(no_past=True, length=5, outputs=(0, 1, 2, 3), qk_output=2),
    gqa(no_past=True, dtype=np.float16, rotary=True),
    gqa(length=1, dtype=np.float16, rotary=True),
    gqa(no_past=True, causal=0),
    *(windowed(*p) for p in ((1, 9), (1, 3), (3, 9, 1), (5, 8, 1), (9, 11, 1), (1, 7), (1, 6))),
    windowed(1, 9, packed=True, do_rotary=1, softcap=3.0),
    windowed(4, 9, 1, do_rotary=1),
    windowed(1, 9, capacity=8),
    windowed(1, 8, capacity=8, do_rotary=1),
    windowed(6, 0, 1),
    windowed(2, 9, 1, bias=True),
    quantised("PER_TENSOR", 8),
    quantised("PER_CHANNEL", 8),
    quantised("PER_TENSOR", 4),
    quantised("PER_CHANNEL", 4),
]


def rotary(shape: tuple[int, ...], half: int, single: bool = False, dtype: Any = np.float32, **attributes: Any) -> Case:
    """A RotaryEmbedding."""
    batch, length = shape[0], shape[-2]
    at = np.array([3], np.int64) if single else R.integers(0, 20, (batch, length)).astype(np.int64)
    caches = [f(24, half, dtype=dtype) for _ in range(2)]
    return Case("RotaryEmbedding", [f(*shape, dtype=dtype), at, *caches], attributes)


ROTARY = [
    *(rotary((2, 3, 16), 4, single, interleaved=i) for single in (False, True) for i in (0, 1)),
    *(rotary((2, 3, 5, 8), 4, interleaved=i) for i in (0, 1)),
    rotary((2, 3, 24), 4, num_heads=2, rotary_embedding_dim=8),
    rotary((2, 3, 16), 4, dtype=np.float16),
    rotary((2, 2, 3, 8), 4, scale=2.0),
    *(
        Case("MRotaryEmbedding", [f(2, 3, 24), R.integers(0, 20, (3, 2, 3)).astype(np.int64), f(24, 6), f(24, 6)],
             {"mrope_section": s, "mrope_layout": layout, "interleaved": i, "num_heads": 2})
        for s, layout in (([2, 3, 1], 0), ([2, 2, 2], 1)) for i in (0, 1)
    ),
]  # fmt: skip


def _layout(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = [], []
    for a in range(2):
        row, column = [0], []
        for r in range(blocks):
            column += [c for c in range(r + 1) if c in (0, r) or (c + r + a) % 2 == 0]
            row.append(len(column))
        rows.append(row)
        columns.append(column)
    most = max(map(len, columns))
    return np.array(rows, np.int32), np.array([c + [-1] * (most - len(c)) for c in columns], np.int32)


def sparse(length: int, past: int, do_rotary: int = 0, packed: bool = False) -> Case:
    """A SparseAttention over 4 blocks of 16."""
    heads, shared, size, batch = 4, 2, 16, 2
    total = past + length
    row, column = _layout(4)
    q = f(batch, length, (heads + (2 * shared if packed else 0)) * size)
    kv = [None if packed else f(batch, length, shared * size) for _ in range(2)]
    past_kv = [f(batch, shared, 64, size) for _ in range(2)]
    caps = [f(64, size // 2) for _ in range(2)] if do_rotary else []
    inputs = [q, *kv, *past_kv, row, column, i32(total), np.full(batch, total, np.int32), *caps]
    said = {"num_heads": heads, "kv_num_heads": shared, "sparse_block_size": 16, "do_rotary": do_rotary}
    return Case("SparseAttention", inputs, said, (0, 1, 2))


SPARSE = [sparse(40, 0), sparse(40, 0, 1), sparse(1, 37), sparse(1, 37, 1, True)]

ALL = [*ATTENTION, *MULTI_HEAD, *GROUPED, *ROTARY, *SPARSE]
assert itertools
