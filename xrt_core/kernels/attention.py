"""Operators of language models: Attention, RotaryEmbedding, LinearAttention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.kernels.namespace import has_float64, narrow, scan, widen
from xrt_core.kernels.registry import OpContext, kernel

_DOUBLE = 11  # TensorProto.DOUBLE, as attribute softmax_precision names it


def _split_heads(xp: Any, x: Any, heads: int) -> Any:
    """[batch, length, heads * size] -> [batch, heads, length, size]."""
    batch, length, hidden = x.shape
    return xp.swapaxes(xp.reshape(x, (batch, length, heads, hidden // heads)), 1, 2)


def _join_heads(xp: Any, x: Any) -> Any:
    """[batch, heads, length, size] -> [batch, length, heads * size]."""
    batch, heads, length, size = x.shape
    return xp.reshape(xp.swapaxes(x, 1, 2), (batch, length, heads * size))


def _grouped_matmul(xp: Any, a: Any, b: Any) -> Any:
    """a[B, Hq, S, x] @ b[B, Hkv, x, y] where every Hq / Hkv neighbours among a's heads share one of b's."""
    batch, heads, length, inner = a.shape
    shared = b.shape[1]
    if shared == heads:
        return xp.matmul(a, b)
    rows = xp.reshape(a, (batch, shared, (heads // shared) * length, inner))
    return xp.reshape(xp.matmul(rows, b), (batch, heads, length, b.shape[3]))


def _visible(ctx: OpContext, queries: int, keys: int, past: int, nonpad: Any) -> Any | None:
    """The attention mask by position: bool, broadcastable to [B, H, queries, keys]; None if every key is visible.

    Query i has position i + offset; offset is the length of the past, or, per row of the batch, the number of keys
    before the queries according to `nonpad_kv_seqlen`.
    """
    xp = ctx.xp
    left, right = int(ctx.attr("left_window_size", -1)), int(ctx.attr("right_window_size", -1))
    if ctx.attr("is_causal", 0):
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0 and nonpad is None:
        return None
    key = np.arange(keys)
    query = np.arange(queries)[:, None]
    seen: Any = None
    if nonpad is None:
        position: Any = query + past
        space: Any = np
    else:
        lengths = xp.reshape(nonpad, (-1, 1, 1, 1))
        position, space, key = xp.asarray(query) + (lengths - queries), xp, xp.asarray(key)
        seen = key < lengths
    if left >= 0:
        near = key >= position - left
        seen = near if seen is None else space.logical_and(seen, near)
    if right >= 0:
        near = key <= position + right
        seen = near if seen is None else space.logical_and(seen, near)
    return xp.asarray(seen)


def _padded_mask(xp: Any, mask: Any, keys: int) -> Any:
    """The mask extended to `keys` columns; keys beyond its end are masked out."""
    missing = keys - mask.shape[-1]
    if missing <= 0:
        return mask
    shut = False if mask.dtype == np.bool_ else -math.inf
    filler = xp.full((*mask.shape[:-1], missing), shut, dtype=mask.dtype)
    return xp.concatenate([mask, filler], axis=-1)


def _softmax(xp: Any, scores: Any) -> Any:
    """Softmax over the last axis; a row that is all -inf gives zeros."""
    if scores.shape[-1] == 0:
        return scores
    top = xp.max(scores, axis=-1, keepdims=True)
    powers = xp.exp(scores - xp.where(top == -math.inf, xp.zeros_like(top), top))
    total = xp.sum(powers, axis=-1, keepdims=True)
    return powers / xp.where(total == 0, xp.ones_like(total), total)


def _heads_of(ctx: OpContext, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values with an axis of heads. Raises ShapeError if head counts are missing or do not divide."""
    if q.ndim == 3:
        heads, shared = ctx.attr("q_num_heads"), ctx.attr("kv_num_heads")
        if not heads or not shared:
            raise ShapeError(
                f"Attention {ctx.node.name!r}: inputs of rank 3 need the attributes q_num_heads and kv_num_heads, "
                f"got {heads} and {shared}"
            )
        q, k, v = (_split_heads(ctx.xp, a, n) for a, n in ((q, heads), (k, shared), (v, shared)))
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or q.shape[1] % max(k.shape[1], 1):
        raise ShapeError(
            f"Attention {ctx.node.name!r}: Q {tuple(q.shape)}, K {tuple(k.shape)}, V {tuple(v.shape)} must all have "
            "rank 3 or 4, and the heads of Q must be a multiple of those of K and V"
        )
    return q, k, v


@kernel("Attention")
def attention(
    ctx: OpContext,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad: Any = None,
) -> Any:
    """Attention: everything at least in float32, with one rounding at the end; softmax_precision can only widen that.

    A query with no visible key gives zeros. `qk_matmul_output_mode` selects output 3: 0 the plain product, 1 after
    softcap, 2 after masks, 3 after softmax.
    """
    xp, dtype, packed = ctx.xp, q.dtype, q.ndim == 3
    q, k, v = _heads_of(ctx, q, k, v)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k = xp.concatenate([past_key, k], axis=2)
        v = xp.concatenate([past_value, v], axis=2)
    present_key, present_value = k, v
    scale = ctx.attr("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = _grouped_matmul(xp, widen(q) * root, xp.swapaxes(widen(k) * root, 2, 3))
    mode = int(ctx.attr("qk_matmul_output_mode", 0)) if ctx.wants(3) else None
    shown = scores
    softcap = float(ctx.attr("softcap", 0.0))
    if softcap > 0:
        scores = softcap * xp.tanh(scores / softcap)
        shown = scores if mode == 1 else shown
    visible = _visible(ctx, q.shape[2], k.shape[2], past, nonpad)
    if mask is not None:
        mask = _padded_mask(xp, mask, k.shape[2])
        if mask.dtype == np.bool_:
            visible = mask if visible is None else visible & mask
        else:
            scores = scores + mask.astype(scores.dtype)
    if visible is not None:
        scores = xp.where(visible, scores, xp.asarray(-math.inf, dtype=scores.dtype))
    shown = scores if mode == 2 else shown
    if ctx.attr("softmax_precision") == _DOUBLE and has_float64(xp):
        scores = scores.astype(np.float64)
    values = widen(v)
    weights = narrow(_softmax(xp, scores), values.dtype)
    shown = weights if mode == 3 else shown
    y = narrow(_grouped_matmul(xp, weights, values), dtype)
    y = _join_heads(xp, y) if packed else y
    results = (y, present_key, present_value, None if mode is None else narrow(shown, dtype))
    return tuple(r if ctx.wants(i) else None for i, r in enumerate(results))[: ctx.num_outputs]


@kernel("RotaryEmbedding")
def rotary_embedding(ctx: OpContext, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    """RotaryEmbedding: pairs are halves of the rotated part, or neighbours where `interleaved`; the rest passes."""
    xp, dtype, packed = ctx.xp, x.dtype, x.ndim == 3
    if packed:
        heads = ctx.attr("num_heads")
        if not heads:
            raise ShapeError(f"RotaryEmbedding {ctx.node.name!r}: an input of rank 3 needs the attribute num_heads")
        x = _split_heads(xp, x, heads)
    rotated = int(ctx.attr("rotary_embedding_dim", 0)) or x.shape[3]
    if positions is not None:
        cos, sin = xp.take(cos, positions, axis=0), xp.take(sin, positions, axis=0)
    if cos.shape[-1] != rotated // 2 or sin.shape[-1] != rotated // 2:
        raise ShapeError(
            f"RotaryEmbedding {ctx.node.name!r}: caches end in {cos.shape[-1]} and {sin.shape[-1]}, but "
            f"{rotated} rotated elements a head need {rotated // 2}"
        )
    cos, sin = widen(cos)[:, None], widen(sin)[:, None]
    part, rest = widen(x[..., :rotated]), x[..., rotated:]
    if ctx.attr("interleaved", 0):
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : rotated // 2], part[..., rotated // 2 :]
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    if ctx.attr("interleaved", 0):
        turned = xp.reshape(xp.stack([real, imaginary], axis=-1), part.shape)
    else:
        turned = xp.concatenate([real, imaginary], axis=-1)
    y = narrow(turned, dtype)
    y = xp.concatenate([y, rest], axis=-1) if rest.shape[-1] else y
    return _join_heads(xp, y) if packed else y


def _time_first(xp: Any, x: Any, heads: int) -> Any:
    """[batch, time, heads * size] -> [time, batch, heads, size], widened."""
    batch, time, hidden = x.shape
    return xp.swapaxes(xp.reshape(widen(x), (batch, time, heads, hidden // heads)), 0, 1)


@kernel("LinearAttention")
def linear_attention(
    ctx: OpContext, query: Any, key: Any, value: Any, past: Any = None, decay: Any = None, beta: Any = None
) -> Any:
    """LinearAttention: the recurrence of `update_rule` over time, in float32; `chunk_size` changes no result.

    The new state has the dtype of `past_state`, or that of the query where none is given.
    """
    xp = ctx.xp
    rule = ctx.attr("update_rule", "gated_delta")
    gated, corrected = rule in ("gated", "gated_delta"), rule in ("delta", "gated_delta")
    heads, shared = int(ctx.attr("q_num_heads")), int(ctx.attr("kv_num_heads"))
    if not (gated or corrected or rule == "linear") or gated != (decay is not None) or corrected != (beta is not None):
        raise ShapeError(
            f"LinearAttention {ctx.node.name!r}: update_rule = {rule!r} with decay "
            f"{'given' if decay is not None else 'left out'} and beta {'given' if beta is not None else 'left out'}; "
            "gated rules take decay, delta rules take beta, 'linear' takes neither"
        )
    batch, time = query.shape[:2]
    size, value_size = query.shape[2] // heads, value.shape[2] // shared
    group = heads // shared
    scale = float(ctx.attr("scale", 0.0)) or 1 / math.sqrt(size)
    q = xp.reshape(_time_first(xp, query, heads), (time, batch, shared, group, size)) * scale
    xs = [q, _time_first(xp, key, shared), _time_first(xp, value, shared)]
    if decay is not None:
        xs.append(xp.exp(_time_first(xp, decay, shared))[..., None])  # [..., 1 or size, 1]
    if beta is not None:
        xs.append(_time_first(xp, beta, beta.shape[2]))

    def step(carry: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (state,) = carry
        q_t, k_t, v_t, *rest = now
        if gated:
            state = state * rest[0]
        if corrected:
            recalled = xp.matmul(k_t[..., None, :], state)[..., 0, :]
            v_t = rest[-1] * (v_t - recalled)
        state = state + k_t[..., :, None] * v_t[..., None, :]
        return (state,), (xp.matmul(q_t, state),)

    start = xp.zeros((batch, shared, size, value_size), dtype=q.dtype) if past is None else widen(past)
    if time:
        (state,), (outs,) = scan(xp, step, (start,), tuple(xs), time)
    else:
        state, outs = start, xp.zeros((0, batch, shared, group, value_size), dtype=q.dtype)
    y = xp.reshape(xp.swapaxes(outs, 0, 1), (batch, time, heads * value_size))
    return narrow(y, query.dtype), narrow(state, query.dtype if past is None else past.dtype)
