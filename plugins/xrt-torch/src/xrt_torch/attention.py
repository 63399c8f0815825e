"""Attention: torch's fused operator, and its fused layers of transformers, which `torch.nn` calls in evaluation, as
the products that they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_OF_PAIRS, _OF_KEYS = 0, 1
"""What torch calls the types of a mask: of queries and keys, of the keys of each sequence; 2 is a mask of both."""


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """query, key, value: [batch, length, embed_dim]. mask: what is left out, bool [queries, keys], [batch, keys] or
    [batch, num_head, queries, keys] by mask_type. Returns the result, and the weights where they are needed."""
    weights = qkv_weight.split(embed_dim), qkv_bias.split(embed_dim)
    q, k, v = (
        torch.nn.functional.linear(x, w, b).unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x, w, b in zip((query, key, value), *weights, strict=True)
    )
    scores = q * (1 / math.sqrt(embed_dim // num_head)) @ k.transpose(-2, -1)
    if mask is not None:
        if mask_type == _OF_KEYS:
            mask = mask[:, None, None, :]
        scores = torch.where(mask.to(torch.bool), -math.inf, scores)
    shares = torch.softmax(scores, -1)
    made = torch.nn.functional.linear((shares @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return made, None
    return made, shares.mean(1) if average_attn_weights else shares


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """src: [batch, length, embed_dim]."""

    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attended(x: Tensor) -> Tensor:
        attention = (x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
        return multi_head_attention(*attention, need_weights=False, mask_type=mask_type)[0]

    def fed_forward(x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(x, ffn_weight_1, ffn_bias_1)
        x = torch.nn.functional.gelu(x) if use_gelu else torch.relu(x)
        return torch.nn.functional.linear(x, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attended(normed(src, norm_weight_1, norm_bias_1))
        return x + fed_forward(normed(x, norm_weight_2, norm_bias_2))
    x = normed(src + attended(src), norm_weight_1, norm_bias_1)
    return normed(x + fed_forward(x), norm_weight_2, norm_bias_2)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """query: [batch, heads, queries, size]; key, value: [batch, heads or fewer, keys, size]. attn_mask: what is added
    to the scores. Returns the result, and the logarithms of the sums of exponentials, float32 [batch, heads, queries]
    (of float64 float64), which torch's own decomposition has not."""
    if dropout_p:
        return NotImplemented
    kind = torch.float64 if query.dtype is torch.float64 else torch.float32
    q, k, v = (x.to(kind) for x in (query, key, value))
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) @ k.transpose(-2, -1)
    if is_causal:
        scores = torch.where(torch.ones_like(scores, dtype=torch.bool).tril(), scores, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    sums = torch.logsumexp(scores, -1).transpose(1, 2).contiguous().transpose(1, 2)  # as torch's lie in memory
    return (torch.softmax(scores, -1) @ v).to(query.dtype), sums


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> its decomposition."""
    return dict(_OWN)


_OWN: Final[dict[Any, Callable[..., Any]]] = {
    aten._native_multi_head_attention.default: multi_head_attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
}
