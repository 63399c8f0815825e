"""Attention in its many forms, and positions: rotary embedding, relative biases.

Queries, keys and values are [batch, heads, length, size] within; scores are computed in float32 where the tensors are
of 16 bits, as ONNX Runtime's kernels on the CPU do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_contrib.activation import wide
from xrt_contrib.lowering import Call, count_up, difference, lowering, same
from xrt_contrib.normalization import rms
from xrt_core import ops


def lowest(x: Any) -> np.ndarray:
    """The least finite number of the dtype that `x` is computed in."""
    return np.array(np.finfo(np.dtype(np.float32) if x.dtype.itemsize < 4 else x.dtype).min, x.dtype)


def ints(*numbers: int) -> np.ndarray:
    """A vector for shapes and axes."""
    return np.array(numbers, np.int64)


def split_heads(x: Any, heads: int) -> Any:
    """[batch, length, heads * size] -> [batch, heads, length, size]."""
    batch, length, hidden = x.shape
    return ops.Transpose(x.reshape(batch, length, heads, hidden // heads), perm=[0, 2, 1, 3])


def join_heads(x: Any) -> Any:
    """[batch, heads, length, size] -> [batch, length, heads * size]."""
    batch, heads, length, size = x.shape
    return ops.Transpose(x, perm=[0, 2, 1, 3]).reshape(batch, length, heads * size)


def causal(length: Any, total: Any, dtype: Any) -> Any:
    """0 where a query may look, the least number where it may not: the last query sees all."""
    columns, rows = count_up(total)[None, :], count_up(length)[:, None] + (total - length)
    least = np.finfo(np.float32).min
    if isinstance(columns, np.ndarray) and isinstance(rows, np.ndarray):
        return np.where(columns <= rows, 0, least).astype(dtype)
    return ops.Where(ops.LessOrEqual(columns, rows), np.array(0, dtype), np.array(least, dtype))


def scores_of(q: Any, k: Any, scale: float) -> Any:
    """q k^T * scale; several heads of q may share one of k."""
    batch, heads, length, size = q.shape
    shared, total = k.shape[1], k.shape[2]
    keys = ops.Transpose(k, perm=[0, 1, 3, 2])
    if heads == shared:
        return ops.MatMul(q * scale, keys)
    grouped = (q * scale).reshape(batch, shared, (heads // shared) * length, size)
    return ops.MatMul(grouped, keys).reshape(batch, heads, length, total)


def weighted(p: Any, v: Any) -> Any:
    """The sum of values by their probabilities."""
    batch, heads, length, total = p.shape
    shared, size = v.shape[1], v.shape[3]
    if heads == shared:
        return ops.MatMul(p, v)
    return ops.MatMul(p.reshape(batch, shared, (heads // shared) * length, total), v).reshape(
        batch, heads, length, size
    )


def attend(q: Any, k: Any, v: Any, scale: float, *terms: Any) -> tuple[Any, Any]:
    """Attention with terms added to the scores (None for none): the result in q's dtype, and the scores."""
    scores = scores_of(wide(q), wide(k), scale)
    for t in terms:
        if t is not None:
            scores = scores + t
    return weighted(ops.Softmax(scores, axis=-1), wide(v)).astype(q.dtype), scores


def scale_of(n: Call, size: int) -> float:
    """The attribute, or 1 / sqrt(size)."""
    given = n.attr("scale", 0.0)
    return float(given) if given else 1 / math.sqrt(size)


def mask_term(n: Call, mask: Any, batch: Any, length: Any, total: Any, dtype: Any) -> Any:
    """What a mask adds to the scores: lengths, ends and starts, or a mask of 2, 3 or 4 axes."""
    if mask is None:
        return None
    filler = np.array(n.attr("mask_filter_value", -10000.0) or -10000.0, dtype)
    zero = np.array(0, dtype)
    if mask.ndim == 1:
        t, size = count_up(total, np.int32)[None, :], mask.shape[0]
        if (alone := same(size, batch)) or same(size, 3 * batch + 2):
            lengths = mask if alone else mask[:batch]
            look = ops.Less(t, lengths.astype(np.int32).unsqueeze(1))
        else:
            n.check(same(size, 2 * batch), f"a mask of {mask.shape} for a batch of {batch}")
            ends, starts = (mask[i * batch : (i + 1) * batch].astype(np.int32).unsqueeze(1) for i in (0, 1))
            look = ops.And(ops.Less(t, ends), ops.GreaterOrEqual(t, starts))
        return ops.Where(look, zero, filler).unsqueeze([1, 2])
    term = ops.Where(ops.Greater(mask, np.array(0, mask.dtype)), zero, filler)
    if mask.ndim == 2:
        if difference(mask.shape[1], total) < 0:  # of the keys alone: the past is seen
            term = ops.Pad(term, ints(0, total - mask.shape[1], 0, 0))
        return term.unsqueeze([1, 2])
    if mask.ndim == 3:
        return term.unsqueeze(1)
    n.check(mask.ndim == 4, f"a mask of {mask.shape}")
    return term[:, :, total - length : total, :total]


def bias_term(bias: Any, total: Any) -> Any:
    """A bias of the scores; what it has beyond the keys is not read."""
    if bias is None:
        return None
    return wide(bias) if same(bias.shape[3], total) else wide(bias)[:, :, :, :total]


def _merged_weights(n: Call, hidden: int) -> tuple[int, int, int]:
    sizes = n.attr("qkv_hidden_sizes", ()) if "qkv_hidden_sizes" in n.definition.attributes else ()
    if sizes:
        n.check(len(sizes) == 3 and sum(sizes) == hidden, f"qkv_hidden_sizes = {sizes} for {hidden} columns")
        return tuple(sizes)
    n.check(hidden % 3 == 0, f"{hidden} columns of the weights are not three equal parts")
    return (hidden // 3,) * 3


def self_attention(
    n: Call, projected: Any, mask: Any, past: Any, bias: Any, past_length: Any = None
) -> tuple[Any, Any]:
    """Attention over the merged projection [batch, length, q + k + v]; its result and present."""
    if n.attr("do_rotary", 0):
        raise n.refuse("do_rotary is not lowered: ONNX Runtime has it for GPUs alone; use RotaryEmbedding")
    heads = n.attr("num_heads")
    batch, length, hidden = projected.shape
    sizes = _merged_weights(n, hidden)
    n.check(all(s % heads == 0 for s in sizes), f"num_heads = {heads} does not divide {sizes}")
    q, k, v = (split_heads(p, heads) for p in ops.Split(projected, ints(*sizes), axis=2))
    present = None
    if past is not None:
        pk, pv = (p.squeeze(0) for p in ops.Split(past, axis=0, num_outputs=2))
        if n.attr("past_present_share_buffer", 0):
            start = int(n.known(6).reshape(()))
            pk, pv = pk[:, :, :start], pv[:, :, :start]
        k, v = ops.Concat(pk, k, axis=2), ops.Concat(pv, v, axis=2)
    total = k.shape[2]
    if n.wants(1):
        present = ops.Concat(k.unsqueeze(0), v.unsqueeze(0), axis=0)
        if past is not None and past.shape[3] > total:
            present = ops.Concat(present, past[:, :, :, total:], axis=3)
    dtype = wide(q).dtype
    look = causal(length, total, dtype) if n.attr("unidirectional", 0) else None
    term = mask_term(n, mask, batch, length, total, dtype)
    if look is not None and term is not None:
        term = ops.Where(look < 0, look, term)  # the mask's value is not added to the least number
    elif look is not None:
        term = look
    result, _ = attend(q, k, v, scale_of(n, q.shape[3]), term, bias_term(bias, total))
    return join_heads(result), present


@lowering("Attention")
def _attention(
    n: Call, x: Any, weights: Any, bias: Any, mask: Any, past: Any, attention_bias: Any, past_length: Any
) -> Any:
    projected = ops.MatMul(x, weights)
    return self_attention(n, projected if bias is None else projected + bias, mask, past, attention_bias, past_length)


@lowering("MultiHeadAttention")
def _multi_head(
    n: Call, query: Any, key: Any, value: Any, bias: Any, mask: Any, attention_bias: Any, past_key: Any,
    past_value: Any, past_length: Any, indirection: Any,
) -> Any:  # fmt: skip
    heads = n.attr("num_heads")
    if indirection is not None or past_length is not None:
        raise n.refuse("past_sequence_length and cache_indirection are not lowered; ONNX Runtime has them for GPUs")
    q, k, v = _separate(n, heads, query, key, value, bias)
    if past_key is not None:
        k, v = ops.Concat(past_key, k, axis=2), ops.Concat(past_value, v, axis=2)
    batch, _, length, size = q.shape
    total = k.shape[2]
    dtype = wide(q).dtype
    look = causal(length, total, dtype) if n.attr("unidirectional", 0) else None
    term = mask_term(n, mask, batch, length, total, dtype)
    if look is not None and term is not None:
        term = ops.Where(look < 0, look, term)
    elif look is not None:
        term = look
    result, scores = attend(q, k, v, scale_of(n, size), term, bias_term(attention_bias, total))
    shown = [ops.Identity(x) if n.wants(i) else None for i, x in ((1, k), (2, v))]
    return join_heads(result), *shown, scores.astype(q.dtype) if n.wants(3) else None


def _separate(n: Call, heads: int, query: Any, key: Any, value: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values by heads, with their biases, from packed and separate inputs."""
    if query.ndim == 5:  # [batch, length, heads, 3, size]
        q, k, v = (ops.Transpose(p.squeeze(3), perm=[0, 2, 1, 3]) for p in ops.Split(query, axis=3, num_outputs=3))
        if bias is not None:
            parts = ops.Split(bias.reshape(1, 3 * heads, 1, -1), axis=1, num_outputs=3)
            q, k, v = (x + b for x, b in zip((q, k, v), parts, strict=True))
        return q, k, v
    n.check(query.shape[2] % heads == 0, f"num_heads = {heads} does not divide the hidden size {query.shape[2]}")
    n.check(key is not None, "query is not packed, and there is no key")
    hidden = query.shape[2]
    if key.ndim == 5:  # [batch, length, heads, 2, size]
        k, v = (ops.Transpose(p.squeeze(3), perm=[0, 2, 1, 3]) for p in ops.Split(key, axis=3, num_outputs=2))
        if bias is not None:
            query = query + bias[:hidden]
        return split_heads(query, heads), k, v
    n.check(value is not None, "there is a key without a value")
    if key.ndim == 4:
        return split_heads(query if bias is None else query + bias[:hidden], heads), key, value
    if bias is not None:
        parts = ops.Split(bias, ints(hidden, key.shape[2], value.shape[2]), axis=0)
        query, key, value = (x + b for x, b in zip((query, key, value), parts, strict=True))
    return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)


@lowering("DecoderMaskedMultiHeadAttention")
def _decoder_masked(
    n: Call, query: Any, key: Any, value: Any, mask: Any, attention_bias: Any, past_key: Any, past_value: Any,
    past_length: Any, beam_width: Any, indirection: Any, bias: Any,
) -> Any:  # fmt: skip
    """One query a sequence. In a shared buffer the new key goes to row `past_sequence_length`; each earlier row is that
    of the beam that `cache_indirection` names."""
    heads = n.attr("num_heads")
    if key is None:
        n.check(query.shape[2] % 3 == 0, f"a packed query of {query.shape}")
        query, key, value = ops.Split(query, axis=2, num_outputs=3)
    q, k, v = _separate(n, heads, query, key, value, bias)
    batch, _, length, size = q.shape
    present_key = present_value = None
    if past_key is not None and n.attr("past_present_share_buffer", 0):
        start = int(n.known(7).reshape(()))
        rest = [p[:, :, start + length :] for p in (past_key, past_value)]
        before = [p[:, :, :start] for p in (past_key, past_value)]
        present_key, present_value = (ops.Concat(b, x, r, axis=2) for b, x, r in zip(before, (k, v), rest, strict=True))
        if indirection is not None and start:
            width = indirection.shape[1]
            beams = indirection.reshape(batch, -1)[:, :start].astype(np.int64)
            rows = beams + (np.arange(batch, dtype=np.int64) // width * width)[:, None]
            where = ops.Expand(rows.reshape(batch, 1, start, 1), ints(batch, heads, start, 1))
            index = [ops.Expand(g, ints(batch, heads, start, 1)) for g in _grid(batch, heads, start)[1:]]
            at = ops.Concat(where, *index, axis=3)
            before = [ops.GatherND(b, at) for b in before]
        k, v = ops.Concat(before[0], k, axis=2), ops.Concat(before[1], v, axis=2)
    elif past_key is not None:
        k, v = ops.Concat(past_key, k, axis=2), ops.Concat(past_value, v, axis=2)
    if present_key is None and (n.wants(1) or n.wants(2)):
        present_key, present_value = ops.Identity(k), ops.Identity(v)
    total = k.shape[2]
    dtype = wide(q).dtype
    term = mask_term(n, mask, batch, length, total, dtype)
    result, scores = attend(q, k, v, scale_of(n, size), term, bias_term(attention_bias, total))
    return join_heads(result), present_key, present_value, scores.astype(np.float32) if n.wants(3) else None


def _grid(batch: int, heads: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(g[..., None].astype(np.int64) for g in np.meshgrid(
        np.arange(batch), np.arange(heads), np.arange(length), indexing="ij"
    ))  # fmt: skip


# --- rotary embedding ---


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Turn pairs of the first 2 * cos.shape[-1] numbers of each head; the rest stays.

    cos, sin: [batch or 1, 1, length, half].
    """
    dtype = x.dtype
    half = cos.shape[-1]
    size = x.shape[-1]
    w, c, s = wide(x), wide(cos), wide(sin)
    turned, rest = (w, None) if 2 * half == size else ops.Split(w, ints(2 * half, size - 2 * half), axis=-1)
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        a, b = (p.squeeze(-1) for p in ops.Split(pairs, axis=-1, num_outputs=2))
        first, second = a * c - b * s, b * c + a * s
        y = ops.Concat(first.unsqueeze(-1), second.unsqueeze(-1), axis=-1).reshape(*turned.shape)
    else:
        a, b = ops.Split(turned, axis=-1, num_outputs=2)
        y = ops.Concat(a * c - b * s, b * c + a * s, axis=-1)
    return (y if rest is None else ops.Concat(y, rest, axis=-1)).astype(dtype)


def _angles_at(cache: Any, positions: Any) -> Any:
    """Rows of a cache at positions [batch, length]: [batch, 1, length, half]."""
    return ops.Gather(cache, positions, axis=0).unsqueeze(1)


def _heads_for_rotation(n: Call, x: Any, half: int) -> tuple[Any, bool]:
    heads, rotary = n.attr("num_heads", 0), n.attr("rotary_embedding_dim", 0)
    n.check(not rotary or heads > 0, "rotary_embedding_dim needs num_heads")
    size = x.shape[3] if x.ndim == 4 else x.shape[2] // (heads or max(1, x.shape[2] // (2 * half)))
    turned = rotary or size
    n.check(2 * half == turned, f"cos_cache has {half} columns; to turn {turned} numbers takes half as many")
    if x.ndim == 4:
        return x, False
    count = heads if heads else x.shape[2] // (2 * half)
    return split_heads(x, count), True


@lowering("RotaryEmbedding")
def _rotary(n: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[1]
    h, joined = _heads_for_rotation(n, x, half)
    length = h.shape[2]
    if positions.ndim == 1:
        positions = (positions + count_up(length)).unsqueeze(0)
    y = rotate(h, _angles_at(cos, positions), _angles_at(sin, positions), bool(n.attr("interleaved", 0)))
    return join_heads(y) if joined else y


@lowering("MRotaryEmbedding")
def _m_rotary(n: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    """Three positions a token; each number of the half belongs to one of them."""
    half = cos.shape[1]
    sections = n.attr("mrope_section")
    n.check(len(sections) == 3 and sum(sections) == half, f"mrope_section = {sections} for a half of {half}")
    h, joined = _heads_for_rotation(n, x, half)
    if n.attr("mrope_layout", 0):
        stream = np.zeros(half, np.int64)
        for axis in (1, 2):
            stream[axis : 3 * sections[axis] : 3] = axis
    else:
        stream = np.repeat(np.arange(3), sections)
    streams = [p.squeeze(0) for p in ops.Split(positions, axis=0, num_outputs=3)]

    def chosen(cache: Any) -> Any:
        found = [_angles_at(cache, p) for p in streams]
        return ops.Where(stream == 0, found[0], ops.Where(stream == 1, found[1], found[2]))

    y = rotate(h, chosen(cos), chosen(sin), bool(n.attr("interleaved", 0)))
    return join_heads(y) if joined else y


@lowering("GemmaRotaryEmbedding")
def _gemma_rotary(n: Call, emb: Any, q: Any, q_rot: Any, k: Any, k_rot: Any) -> Any:
    sin, cos = ops.Sin(emb).unsqueeze(1).astype(q.dtype), ops.Cos(emb).unsqueeze(1).astype(q.dtype)
    return q * cos + q_rot * sin, k * cos + k_rot * sin


# --- grouped queries ---


def placed(past: Any, new: Any, start: Any, count: Any, length: int, keep: bool = False) -> Any:
    """A cache of `length` rows: the past's before `start` [batch, 1], then the first `count` of `new`, then zeros, or
    the past's again with `keep`.

    past: [batch, heads, rows, size] or None. start None: at the beginning.
    """
    batch, added = new.shape[0], new.shape[2]
    if start is None and keep:
        return new if added == length else ops.Concat(new, past[:, :, added:length], axis=2)
    if start is None:
        return new if added == length else ops.Pad(new, ints(0, 0, 0, 0, 0, 0, length - added, 0))
    t = np.arange(length, dtype=np.int64)[None, :]
    offset = t - start  # [batch, length]
    is_new = ops.And(ops.GreaterOrEqual(offset, ints(0)[0]), ops.Less(offset, count)).unsqueeze([1, 3])
    index = ops.Clip(offset, ints(0)[0], ints(added - 1)[0])
    if batch == 1:
        rows = ops.Gather(new, index.squeeze(0), axis=2)
    else:
        moved = ops.Transpose(new, perm=[0, 2, 1, 3])
        rows = ops.Transpose(ops.GatherND(moved, index.unsqueeze(2), batch_dims=1), perm=[0, 2, 1, 3])
    zero = np.array(0, new.dtype)
    if past is None or past.shape[2] == 0:
        return ops.Where(is_new, rows, zero)
    old = past if past.shape[2] == length else ops.Pad(past, ints(0, 0, 0, 0, 0, 0, length - past.shape[2], 0))
    if keep:
        return ops.Where(is_new, rows, old)
    is_old = ops.Less(offset, ints(0)[0]).unsqueeze([1, 3])
    return ops.Where(is_new, rows, ops.Where(is_old, old, zero))


def _qkv(n: Call, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    heads, shared = n.attr("num_heads"), n.attr("kv_num_heads")
    n.check(heads % shared == 0, f"kv_num_heads = {shared} does not divide num_heads = {heads}")
    if key is None:
        size, odd = divmod(query.shape[-1], heads + 2 * shared)
        n.check(odd == 0, f"a packed query of {query.shape} for {heads} and {shared} heads")
        query, key, value = ops.Split(query, ints(heads * size, shared * size, shared * size), axis=-1)
    return query, key, value


def _dequantized(n: Call, cache: Any, scale: Any, kind: str, size: int, dtype: Any) -> Any:
    """A cache of int8 or of packed int4 (two in a byte, the low one first, 8 added) in floating point."""
    if cache is None or kind == "NONE":
        return cache
    if n.attr("kv_cache_bit_width", 8) == 4:
        low = ops.BitwiseAnd(cache, np.array(15, np.uint8))
        high = ops.BitShift(cache, np.array(4, np.uint8), direction="RIGHT")
        pairs = ops.Concat(low.unsqueeze(-1), high.unsqueeze(-1), axis=-1)
        q = pairs.reshape(*cache.shape[:-1], size).astype(np.float32) - 8.0
    else:
        q = cache.astype(np.float32)
    return (q * _cache_scale(scale, kind, cache.shape[1], size)).astype(dtype)


def _cache_scale(scale: Any, kind: str, heads: int, size: int) -> Any:
    return scale.reshape(1, heads, 1, size) if kind == "PER_CHANNEL" else scale.reshape(1)


def _quantized(n: Call, x: Any, scale: Any, kind: str) -> Any:
    """New rows as the cache holds them."""
    q = ops.Round(x.astype(np.float32) / _cache_scale(scale, kind, x.shape[1], x.shape[3]))
    if n.attr("kv_cache_bit_width", 8) != 4:
        return ops.Clip(q, np.float32(-128), np.float32(127)).astype(np.int8)
    nibbles = (ops.Clip(q, np.float32(-8), np.float32(7)) + 8.0).astype(np.uint8)
    pairs = nibbles.reshape(*x.shape[:-1], x.shape[3] // 2, 2)
    low, high = (p.squeeze(-1) for p in ops.Split(pairs, axis=-1, num_outputs=2))
    return ops.BitwiseOr(low, ops.BitShift(high, np.array(4, np.uint8), direction="LEFT"))


@lowering("GroupQueryAttention", static=(6,))
def _group_query(
    n: Call, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, lengths: Any, total_length: Any,
    cos: Any, sin: Any, position_ids: Any, attention_bias: Any, sink: Any, k_scale: Any, v_scale: Any, q_norm: Any,
    k_norm: Any, query_lengths: Any,
) -> Any:  # fmt: skip
    """Keys and values are appended to a cache whose rows are valid up to `seqlens_k`, a length for each sequence."""
    heads, shared = n.attr("num_heads"), n.attr("kv_num_heads")
    query, key, value = _qkv(n, query, key, value)
    q, k, v = split_heads(query, heads), split_heads(key, shared), split_heads(value, shared)
    batch, _, length, size = q.shape
    window = n.attr("local_window_size", -1)
    kinds = n.attr("k_quant_type", "NONE"), n.attr("v_quant_type", "NONE")
    if q_norm is not None:
        epsilon = n.attr("qk_norm_epsilon", 1e-6)
        q = rms(wide(q), wide(q_norm), n.attr("q_norm_epsilon", epsilon))[0].astype(query.dtype)
        k = rms(wide(k), wide(k_norm), n.attr("k_norm_epsilon", epsilon))[0].astype(query.dtype)
    bound = int(n.known(6).reshape(-1)[0])  # of all sequences, with the new tokens
    evicts = bool(n.attr("sliding_window_cache", 0))
    first = bound == length and query_lengths is None and not evicts
    total = _counted(lengths.reshape(batch, 1), bound)
    if query_lengths is not None:
        added: Any = query_lengths.reshape(batch, 1).astype(np.int64)
    else:
        added = ops.Min(total, ints(length)) if evicts else length
    start = None if first else total - added
    steps = np.arange(length, dtype=np.int64)[None, :]
    positions = steps if start is None else start + steps  # [batch or 1, length]
    if n.attr("do_rotary", 0):
        n.check(cos is not None and sin is not None, "do_rotary needs cos_cache and sin_cache")
        at = positions
        if position_ids is not None:
            at = position_ids
        elif isinstance(at, np.ndarray):
            at = ops.Identity(at)
        c, s = (_angles_at(t, at) for t in (cos, sin))
        turn = bool(n.attr("rotary_interleaved", 0))
        q, k = rotate(q, c, s, turn), rotate(k, c, s, turn)
    if evicts:
        new = [
            x if kind == "NONE" else _quantized(n, x, scale, kind)
            for x, scale, kind in ((k, k_scale, kinds[0]), (v, v_scale, kinds[1]))
        ]
        caches, rows_at, kept = _window(n, past_key, past_value, new, start, total, added, window)
        seen_keys = _dequantized(n, caches[0], k_scale, kinds[0], size, q.dtype)
        seen_values = _dequantized(n, caches[1], v_scale, kinds[1], size, q.dtype)
        return (
            _attended_in_window(
                n, q, seen_keys, seen_values, positions, rows_at, window, attention_bias, sink, query.dtype
            ),
            *kept,
            None,
        )
    rows = max(bound, past_key.shape[2] if past_key is not None else 0)
    if kinds == ("NONE", "NONE"):
        present_key, present_value = (placed(p, x, start, added, rows) for p, x in ((past_key, k), (past_value, v)))
        keys, values = present_key, present_value
    else:
        present_key = placed(past_key, _quantized(n, k, k_scale, kinds[0]), start, added, rows)
        present_value = placed(past_value, _quantized(n, v, v_scale, kinds[1]), start, added, rows)
        keys = _dequantized(n, present_key, k_scale, kinds[0], size, q.dtype)
        values = _dequantized(n, present_value, v_scale, kinds[1], size, q.dtype)
    seen_keys, seen_values = keys, values
    if rows > bound:  # of a shared buffer the rows of this step alone
        seen_keys, seen_values = keys[:, :, :bound], values[:, :, :bound]
    scores = scores_of(wide(q), wide(seen_keys), scale_of(n, size))
    softcap = n.attr("softcap", 0.0)
    if softcap:
        scores = softcap * ops.Tanh(scores / softcap)
    term = bias_term(attention_bias, bound)
    scores = scores if term is None else scores + term
    if n.attr("causal", 1):
        t = np.arange(bound, dtype=np.int64)
        here = positions[:, :, None] if isinstance(positions, np.ndarray) else positions.unsqueeze(2)
        look = t <= here if isinstance(here, np.ndarray) else ops.LessOrEqual(t, here)
        if window > 0:
            near = t > here - window if isinstance(here, np.ndarray) else ops.Greater(t, here - window)
            look = look & near if isinstance(look, np.ndarray) else ops.And(look, near)
        look = look[:, None] if isinstance(look, np.ndarray) else look.unsqueeze(1)
    else:
        look = ops.Less(np.arange(bound, dtype=np.int64), total).unsqueeze([1, 2])
    raw, scores = scores, ops.Where(look, scores, lowest(scores))
    probabilities = softmax_with_sink(n, scores, sink)
    result = join_heads(weighted(probabilities, wide(seen_values)).astype(query.dtype))
    shown = None
    if n.wants(3):
        kind = n.attr("qk_output", 0)
        n.check(kind in (1, 2), f"output_qk is wanted, and qk_output is {kind}")
        shown = (ops.Where(look, raw, np.array(0, raw.dtype)) if kind == 1 else probabilities).astype(query.dtype)
    return result, present_key, present_value, shown


def _counted(lengths: Any, bound: int) -> Any:
    """`seqlens_k` + 1. One that is not in [0, bound) is an index out of range, which whoever runs the node tells."""
    index = ops.Where(ops.Less(lengths, np.array(0, lengths.dtype)), np.array(bound, lengths.dtype), lengths)
    return ops.Gather(np.arange(1, bound + 1, dtype=np.int64), index, axis=0)


def _resident(total: Any, capacity: int, window: int) -> Any:
    """Rows of a window cache after `total` tokens; as many go at once as its capacity exceeds the window, and one."""
    step = capacity - window + 1
    over = ops.Max(total - capacity, ints(0))
    return total - (over + (step - 1)) // step * step


def _window(
    n: Call, past_key: Any, past_value: Any, new: list[Any], start: Any, total: Any, added: Any, window: int
) -> tuple[list[Any], Any, list[Any]]:
    """Caches of a window's size: the past's rows with the new ones behind them, the position of each of these rows, -1
    for those that hold nothing, and the caches after the step, whose first row is the oldest that is kept."""
    n.check(past_key is not None and past_value is not None, "sliding_window_cache needs past_key and past_value")
    if n.wants(3):
        raise n.refuse("output_qk with sliding_window_cache is in no kernel of ONNX Runtime, and not lowered")
    capacity, length = past_key.shape[2], new[0].shape[2]
    n.check(0 < window <= capacity, f"local_window_size = {window} with a cache of {capacity} rows")
    before, after = _resident(start, capacity, window), _resident(total, capacity, window)
    row, step = np.arange(capacity, dtype=np.int64)[None, :], np.arange(length, dtype=np.int64)[None, :]
    old = ops.Where(ops.Less(row, before), start - before + row, ints(-1))
    fresh = ops.Where(ops.Less(step, added), start + step, ints(-1))
    caches = [ops.Concat(p, x, axis=2) for p, x in zip((past_key, past_value), new, strict=True)]
    position = total - after + row
    source = ops.Where(ops.Less(position, start), position - (start - before), position - start + capacity)
    source = ops.Clip(source, ints(0)[0], ints(capacity + length - 1)[0])

    def kept(cache: Any) -> Any:
        if cache.shape[0] == 1:
            return ops.Gather(cache, source.squeeze(0), axis=2)
        moved = ops.Transpose(cache, perm=[0, 2, 1, 3])
        return ops.Transpose(ops.GatherND(moved, source.unsqueeze(2), batch_dims=1), perm=[0, 2, 1, 3])

    return caches, ops.Concat(old, fresh, axis=1), [kept(c) for c in caches]


def _attended_in_window(
    n: Call, q: Any, keys: Any, values: Any, positions: Any, at: Any, window: int, attention_bias: Any, sink: Any,
    dtype: Any,
) -> Any:  # fmt: skip
    """Attention of queries at `positions` over rows at positions `at` [batch, rows]."""
    batch, heads, length, size = q.shape
    n.check(n.attr("causal", 1) == 1, "sliding_window_cache with causal = 0")
    scores = scores_of(wide(q), wide(keys), scale_of(n, size))
    softcap = n.attr("softcap", 0.0)
    if softcap:
        scores = softcap * ops.Tanh(scores / softcap)
    if attention_bias is not None:  # of absolute positions
        shape = ints(batch, heads, length, at.shape[1])
        column = ops.Expand(ops.Max(at, ints(0)).unsqueeze([1, 2]), shape)
        every = ops.Expand(attention_bias, ints(batch, heads, length, attention_bias.shape[3]))
        scores = scores + ops.GatherElements(wide(every), column, axis=3)
    here, there = positions.unsqueeze(2), at.unsqueeze(1)
    near = ops.And(ops.LessOrEqual(there, here), ops.Greater(there, here - window))
    look = ops.And(near, ops.GreaterOrEqual(there, ints(0))).unsqueeze(1)
    probabilities = softmax_with_sink(n, ops.Where(look, scores, lowest(scores)), sink)
    return join_heads(weighted(probabilities, wide(values)).astype(dtype))


def softmax_with_sink(n: Call, scores: Any, sink: Any) -> Any:
    """Softmax with one more logit in its denominator: a head's sink, or 0 with smooth_softmax."""
    smooth = "smooth_softmax" in n.definition.attributes and n.attr("smooth_softmax", 0) > 0
    if sink is None and not smooth:
        return ops.Softmax(scores, axis=-1)
    batch, heads, length, total = scores.shape
    zero = np.zeros((1, heads, 1, 1), scores.dtype)
    extra = zero if sink is None else wide(sink).reshape(1, heads, 1, 1)
    more = ops.Concat(scores, ops.Expand(extra, ints(batch, heads, length, 1)), axis=-1)
    return ops.Softmax(more, axis=-1)[:, :, :, :total]


@lowering("SparseAttention", static=(5, 6, 7))
def _sparse(
    n: Call, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, rows: Any, columns: Any, total: Any,
    totals: Any, cos: Any, sin: Any,
) -> Any:  # fmt: skip
    """Causal attention over the blocks that a layout, as compressed sparse rows, allows each head."""
    heads, shared, block = n.attr("num_heads"), n.attr("kv_num_heads"), n.attr("sparse_block_size")
    query, key, value = _qkv(n, query, key, value)
    q, k, v = split_heads(query, heads), split_heads(key, shared), split_heads(value, shared)
    batch, _, length, size = q.shape
    bound = int(n.known(7).reshape(-1)[0])
    first = bound == length
    start = None if first else totals.reshape(batch, 1).astype(np.int64) - length
    steps = np.arange(length, dtype=np.int64)[None, :]
    positions = ops.Identity(steps) if start is None else start + steps
    if n.attr("do_rotary", 0):
        c, s = (_angles_at(t, positions) for t in (cos, sin))
        turn = bool(n.attr("rotary_interleaved", 0))
        q, k = rotate(q, c, s, turn), rotate(k, c, s, turn)
    kept = past_key.shape[2]
    present_key, present_value = (placed(p, x, start, length, kept, True) for p, x in ((past_key, k), (past_value, v)))
    starts, indices = n.known(5), n.known(6)
    layouts, blocks = starts.shape[0], starts.shape[1] - 1
    dense = np.zeros((layouts, blocks, blocks), bool)
    for a in range(layouts):
        for r in range(blocks):
            dense[a, r, indices[a, starts[a, r] : starts[a, r + 1]]] = True
    seen = dense.repeat(block, axis=1).repeat(block, axis=2)[:, :, :bound]
    if seen.shape[2] < bound:
        raise n.misfit(f"a layout of {blocks} blocks of {block} for {bound} tokens")
    look = ops.Gather(seen, positions, axis=1)  # [layouts, batch or 1, length, bound]
    t = np.arange(bound, dtype=np.int64)
    look = ops.And(ops.Transpose(look, perm=[1, 0, 2, 3]), ops.LessOrEqual(t, positions.unsqueeze(2)).unsqueeze(1))
    look = ops.Tile(look, ints(1, heads // layouts, 1, 1))
    scores = scores_of(wide(q), wide(present_key[:, :, :bound]), scale_of(n, size))
    probabilities = ops.Softmax(ops.Where(look, scores, lowest(scores)), axis=-1)
    result = weighted(probabilities, wide(present_value[:, :, :bound])).astype(query.dtype)
    return join_heads(result), present_key, present_value


# --- packed batches ---


def _unpacked(x: Any, offsets: Any, tokens: int) -> Any:
    """Tokens [tokens, ...] at their places in [batch, length, ...], zeros elsewhere."""
    batch, length = offsets.shape
    at = offsets.reshape(-1)[:tokens].astype(np.int64).unsqueeze(1)
    zeros = ops.Expand(np.array(0, x.dtype), ints(batch * length, *x.shape[1:]))
    return ops.ScatterND(zeros, at, x).reshape(batch, length, *x.shape[1:])


def _packed(n: Call, q: Any, k: Any, v: Any, offsets: Any, ends: Any, bias: Any, tokens: int) -> Any:
    batch, length = offsets.shape
    counts = (ends[1:] - ends[:-1]).astype(np.int64).reshape(batch, 1, 1, 1)
    look = ops.Less(np.arange(length, dtype=np.int64), counts)
    filler = ops.Where(look, np.array(0, wide(q).dtype), np.array(-10000.0, wide(q).dtype))
    result, _ = attend(q, k, v, scale_of(n, q.shape[3]), filler, bias_term(bias, length))
    flat = join_heads(result).reshape(batch * length, -1)
    return ops.Gather(flat, offsets.reshape(-1)[:tokens], axis=0)


@lowering("PackedAttention")
def _packed_attention(n: Call, x: Any, weights: Any, bias: Any, offsets: Any, ends: Any, attention_bias: Any) -> Any:
    tokens = x.shape[0]
    projected = ops.MatMul(x, weights)
    projected = _unpacked(projected if bias is None else projected + bias, offsets, tokens)
    sizes = _merged_weights(n, projected.shape[2])
    q, k, v = (split_heads(p, n.attr("num_heads")) for p in ops.Split(projected, ints(*sizes), axis=2))
    return _packed(n, q, k, v, offsets, ends, attention_bias, tokens)


@lowering("PackedMultiHeadAttention")
def _packed_multi_head(
    n: Call, query: Any, key: Any, value: Any, bias: Any, offsets: Any, ends: Any, attention_bias: Any
) -> Any:
    tokens, heads = query.shape[0], n.attr("num_heads")
    if query.ndim == 4:  # [tokens, heads, 3, size]
        query, key, value = (p.reshape(tokens, -1) for p in ops.Split(query, axis=2, num_outputs=3))
    if bias is not None:
        parts = ops.Split(bias, ints(query.shape[1], key.shape[1], value.shape[1]), axis=0)
        query, key, value = (x + b for x, b in zip((query, key, value), parts, strict=True))
    q, k, v = (split_heads(_unpacked(x, offsets, tokens), heads) for x in (query, key, value))
    return _packed(n, q, k, v, offsets, ends, attention_bias, tokens)


@lowering("RestorePadding")
def _restore_padding(n: Call, x: Any, offsets: Any) -> Any:
    return _unpacked(x, offsets, x.shape[0])


@lowering("PagedAttention")
def _paged(
    n: Call, query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, ends: Any, past: Any, table: Any,
    cos: Any, sin: Any, slots: Any, sink: Any, q_norm: Any, k_norm: Any, k_scale: Any, v_scale: Any, metadata: Any,
) -> Any:  # fmt: skip
    """Tokens of many sequences, packed; their keys and values lie in blocks that a table names for each sequence."""
    for name, plain in (
        ("kv_cache_layout", "SEPARATE"), ("k_quant_type", "NONE"), ("v_quant_type", "NONE"), ("k_cache_dtype", ""),
        ("v_cache_dtype", ""),
    ):  # fmt: skip
        if n.attr(name, plain) != plain:
            raise n.refuse(f"{name} = {n.attr(name)!r} is not lowered")
    if n.attr("rotary_offset", 0) or n.attr("v_head_size", 0):
        raise n.refuse("rotary_offset and v_head_size are not lowered")
    heads, shared = n.attr("num_heads"), n.attr("kv_num_heads")
    query, key, value = _qkv(n, query, key, value)
    tokens, blocks, block, size = query.shape[0], key_cache.shape[0], key_cache.shape[1], key_cache.shape[3]
    q, k, v = query.reshape(tokens, heads, size), key.reshape(tokens, shared, size), value.reshape(tokens, shared, size)
    if q_norm is not None:
        epsilon = n.attr("qk_norm_epsilon", 1e-6) or 1e-6
        q = rms(wide(q), wide(q_norm), epsilon)[0].astype(query.dtype)
        k = rms(wide(k), wide(k_norm), epsilon)[0].astype(query.dtype)
    ends, past = ends.astype(np.int64), past.astype(np.int64)
    index = np.arange(tokens, dtype=np.int64)
    after = ops.GreaterOrEqual(index[:, None], ends[1:].unsqueeze(0)).astype(np.int64)
    sequence = ops.ReduceSum(after, ints(1), keepdims=0)  # of each token
    position = ops.Gather(past, sequence, axis=0) + index - ops.Gather(ends, sequence, axis=0)
    if n.attr("do_rotary", 0):
        n.check(cos is not None and sin is not None, "do_rotary needs cos_cache and sin_cache")
        c, s = (ops.Gather(x, position, axis=0).unsqueeze(1) for x in (cos, sin))
        turn = bool(n.attr("rotary_interleaved", 0))
        q, k = rotate(q, c, s, turn), rotate(k, c, s, turn)
    page = ops.Concat(sequence.unsqueeze(1), (position / block).unsqueeze(1).astype(np.int64), axis=1)
    rows = table.astype(np.int64)
    if slots is None:
        slots = ops.GatherND(rows, page) * block + ops.Mod(position, np.array(block, np.int64))
    slots = slots.astype(np.int64)
    spare = np.array(blocks * block, np.int64)  # a row that is dropped again, for tokens that are not stored
    at = ops.Where(ops.Less(slots, ints(0)[0]), spare, slots).unsqueeze(1)

    def stored(cache: Any, new: Any) -> Any:
        flat = ops.Pad(cache.reshape(blocks * block, shared, size), ints(0, 0, 0, 1, 0, 0))
        return ops.ScatterND(flat, at, new.astype(cache.dtype))[: blocks * block]

    keys, values = stored(key_cache, k), stored(value_cache, v)
    first = ops.Max(rows, ints(0)[0]).unsqueeze(2) * block + np.arange(block, dtype=np.int64)
    places = ops.Gather(first.reshape(rows.shape[0], -1), sequence, axis=0)  # [tokens, rows of the sequence]
    length = rows.shape[1] * block
    seen_keys, seen_values = (ops.Transpose(ops.Gather(x, places, axis=0), perm=[0, 2, 1, 3]) for x in (keys, values))
    scores = scores_of(wide(q).unsqueeze(2), wide(seen_keys), scale_of(n, size))
    softcap = n.attr("softcap", 0.0)
    if softcap:
        scores = softcap * ops.Tanh(scores / softcap)
    t = np.arange(length, dtype=np.int64)
    if n.attr("is_causal", 1) is None or n.attr("is_causal", 1):
        look = ops.LessOrEqual(t, position.unsqueeze(1))
    else:
        look = ops.Less(t, ops.Gather(past + ends[1:] - ends[:-1], sequence, axis=0).unsqueeze(1))
    window = n.attr("local_window_size", -1)
    if window is not None and window > 0:
        look = ops.And(look, ops.Greater(t, position.unsqueeze(1) - window))
    scores = ops.Where(look.unsqueeze([1, 2]), scores, lowest(scores))
    result = weighted(softmax_with_sink(n, scores, sink), wide(seen_values)).astype(query.dtype)
    return result.reshape(tokens, heads * size), keys.reshape(*key_cache.shape), values.reshape(*value_cache.shape)


# --- relative positions ---


@lowering("RelativePositionBias", static=(1, 2))
def _relative_bias(n: Call, table: Any, query_length: Any, key_length: Any) -> Any:
    """T5's buckets of distances. The table holds the buckets of a head next to each other."""
    rows, columns = (int(n.known(i).reshape(-1)[0]) for i in (1, 2))
    buckets, heads = table.shape
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    base = np.zeros_like(distance)
    if n.attr("is_bidirectional", 0):
        buckets //= 2
        base, distance = (distance > 0) * buckets, np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        far = exact + (np.log(distance / exact) / math.log(n.attr("max_distance") / exact) * (buckets - exact)).astype(
            np.float32
        ).clip(0, buckets).astype(np.int64)
    bucket = base + np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return ops.Gather(table.reshape(heads, -1), bucket.astype(np.int64), axis=1).unsqueeze(0)


@lowering("GatedRelativePositionBias")
def _gated_relative_bias(
    n: Call, query: Any, query_bias: Any, rel: Any, weight: Any, bias: Any, eco: Any, offsets: Any
) -> Any:
    heads = n.attr("num_heads")
    if offsets is not None:
        query = _unpacked(query, offsets, query.shape[0])
    q = split_heads(query + query_bias, heads)
    gates = ops.MatMul(q, weight) + bias
    batch, _, length, _ = q.shape
    halves = gates.reshape(batch, heads, length, 2, -1)
    update, reset = ops.Split(ops.Sigmoid(ops.ReduceSum(halves, ints(-1), keepdims=0)), axis=-1, num_outputs=2)
    return (update * (reset * eco - 1.0) + 2.0) * rel
