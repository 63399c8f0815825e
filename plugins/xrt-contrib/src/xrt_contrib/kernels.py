"""Host kernels, for what no graph of standard operators expresses: text, hashes, loops that depend on data."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_contrib.schemas import DOMAIN
from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the host. dynamic: why an engine of static shapes cannot run it. infer: the types of its outputs."""

    function: Callable[..., Any]
    dynamic: str | None
    infer: Callable[..., Any] | None = None
    is_constant: bool = True


KERNELS: Final[dict[tuple[str, str], Kernel]] = {}
"""(domain, operator) -> its kernel."""


def kernel(name: str, *, dynamic: str | None = None, infer: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Register the decorated function as the host's kernel of an operator."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[DOMAIN, name] = Kernel(function, dynamic, infer)
        return function

    return register


# --- text and hashes ---


@kernel("Tokenizer", dynamic="the number of tokens depends on the text")
def tokenizer(ctx: OpContext, x: np.ndarray) -> np.ndarray:
    """Split strings by separators, or find the matches of an expression."""
    least, pad, mark = ctx.attr("mincharnum"), ctx.attr("pad_value"), ctx.attr("mark")
    separators, expression = ctx.attr("separators", ()), ctx.attr("tokenexp", "")
    if x.ndim not in (1, 2):
        raise ValueError(f"an input of {x.ndim} axes; it has 1 or 2")
    if bool(separators) == bool(expression):
        raise ValueError("one of separators and tokenexp must be given")
    characters = tuple(separators) == ("",) or expression == "."

    def tokens(text: str) -> list[str]:
        if characters:
            found = list(text)
        elif expression:
            found = [m.group(0) for m in re.finditer(expression, text) if m.group(0)]
        else:
            found = [text]
            for s in separators:
                found = [part for t in found for part in re.split(s, t) if part]
        return found if characters else [t for t in found if len(t) >= least]

    rows = [tokens(str(t)) for t in x.reshape(-1)]
    if mark:
        rows = [["\x02", *r, "\x03"] for r in rows]
    longest = max(map(len, rows), default=0)
    return np.array([[*r, *[pad] * (longest - len(r))] for r in rows], object).reshape(*x.shape, longest)


def _murmur(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32. Source: Appleby, smhasher."""
    mask = 0xFFFFFFFF
    h, end = seed & mask, len(data) // 4 * 4

    def mixed(k: int) -> int:
        k = k * 0xCC9E2D51 & mask
        return ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask

    for i in range(0, end, 4):
        h ^= mixed(int.from_bytes(data[i : i + 4], "little"))
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    if data[end:]:
        h ^= mixed(int.from_bytes(data[end:], "little"))
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor & mask
    return h


def _hash_types(node: Node) -> tuple[TensorType]:
    x = node.inputs[0]
    dtype = np.dtype(np.uint32 if node.attributes.get("positive", 1) else np.int32)
    return (TensorType(dtype, None if x is None else x.shape),)


@kernel("MurmurHash3", dynamic="it hashes on the host", infer=_hash_types)
def murmur_hash3(ctx: OpContext, x: np.ndarray) -> np.ndarray:
    """The hash of each element's bytes, of a string's in UTF-8."""
    seed = int(ctx.attr("seed", 0))
    flat = np.ascontiguousarray(x).reshape(-1)
    parts = [str(t).encode() for t in flat] if x.dtype.kind in "OUST" else [t.tobytes() for t in flat]
    found = np.array([_murmur(p, seed) for p in parts], np.uint32).reshape(x.shape)
    return found if ctx.attr("positive", 1) else found.view(np.int32)


# --- decoding ---


def _like_scores(node: Node) -> tuple[Any]:
    return (None if node.inputs[1] is None else node.inputs[1].type,)


@kernel("NGramRepeatBlock", dynamic="it compares on the host", infer=_like_scores)
def ngram_repeat_block(ctx: OpContext, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Scores of tokens that would repeat an n-gram of their sequence become -inf."""
    size, found = ctx.attr("ngram_size"), scores.copy()
    if size < 1:
        raise ShapeError(f"node {ctx.node.name!r}: ngram_size = {size}; it must be at least 1")
    for row, line in enumerate(ids):
        prefix = line[len(line) - size + 1 :]
        for start in range(len(line) - size + 1):
            if np.array_equal(line[start : start + size - 1], prefix):
                found[row, line[start + size - 1]] = -np.inf
    return found


@kernel("BifurcationDetector", dynamic="the number of tokens depends on their values")
def bifurcation_detector(
    ctx: OpContext, source: np.ndarray, current: np.ndarray, previous: np.ndarray, predicted: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that were predicted, up to where they leave the source, and where the source goes on from there."""
    start = int(previous.reshape(()))
    tokens = current
    if predicted is not None:
        end = 0
        if start < len(source):
            rest = source[start:]
            while end < len(predicted) - 1 and end < len(rest) and predicted[end] == rest[end]:
                end += 1
        tokens = np.concatenate([current, predicted[: end + 1]])
    match = -1
    for size in range(ctx.attr("min_ngram_size", 1), ctx.attr("max_ngram_size", 3) + 1):
        if size > len(tokens):
            break
        suffix = tokens[len(tokens) - size :]
        places = [i for i in range(len(source) - size + 1) if np.array_equal(source[i : i + size], suffix)]
        if len(places) != 1:
            if not places:
                break
            match = -1
            continue
        match = places[0] + size
        break
    return tokens, np.array(min(match, len(source)) if match >= 0 else -1, previous.dtype)


@kernel("DynamicTimeWarping", dynamic="the length of the path depends on the costs")
def dynamic_time_warping(ctx: OpContext, costs: np.ndarray) -> np.ndarray:
    """The path of least cost from the first to the last corner of a matrix."""
    c = costs.reshape(costs.shape[-2:]).astype(np.float64)
    rows, columns = c.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    came = np.zeros((rows + 1, columns + 1), np.int64)
    for j in range(1, columns + 1):
        for i in range(1, rows + 1):
            before = (total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
            best = 0 if before[0] < before[1] and before[0] < before[2] else 1 if before[1] < before[2] else 2
            total[i, j] = c[i - 1, j - 1] + before[best]
            came[i, j] = best
    i, j, path = rows, columns, []
    came[0, :], came[:, 0] = 2, 1
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = came[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return np.array(path[::-1], np.int32).T


def _pooled_types(node: Node) -> tuple[TensorType]:
    x = node.inputs[0]
    if x is None or not x.is_static:
        return (TensorType(None if x is None else x.dtype),)
    return (TensorType(x.dtype, (*x.shape[:2], *(w[0] for w in _windows(node, x.shape)))),)


def _windows(node: Node, shape: Any) -> list[tuple[int, int, int, int]]:
    """Of each spatial axis: number of windows, size, stride, padding before."""
    kernel_shape = node.attributes.get("kernel_shape") or shape[2:]
    rank = len(shape) - 2
    strides = node.attributes.get("strides") or (1,) * rank
    pads = node.attributes.get("pads") or (0,) * (2 * rank)
    auto = node.attributes.get("auto_pad", "NOTSET")
    found = []
    for i in range(rank):
        size, step, length = kernel_shape[i], strides[i], shape[2 + i]
        before, after = pads[i], pads[rank + i]
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            need = max((-(-length // step) - 1) * step + size - length, 0)
            before = need // 2 if auto == "SAME_UPPER" else need - need // 2
            after = need - before
        elif auto == "VALID":
            before = after = 0
        found.append(((length + before + after - size) // step + 1, size, step, before))
    return found


@kernel("MaxpoolWithMask", dynamic="its windows end where the mask is 0", infer=_pooled_types)
def max_pool_with_mask(ctx: OpContext, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The largest of each window; along the last axis a window ends where the mask is 0, but at the first element."""
    windows = _windows(ctx.node, x.shape)
    lines, flat = x.reshape(-1, *x.shape[2:]), mask.reshape(-1)
    count = math.prod(x.shape[2:])
    y = np.full((len(lines), *(w[0] for w in windows)), np.finfo(x.dtype).min, x.dtype)
    for place in np.ndindex(*y.shape):
        line, first = lines[place[0]], place[0] * count % math.prod(mask.shape[:2])  # as ONNX Runtime finds a mask
        ranges = [
            range(max(p * step - before, 0), min(p * step - before + size, length))
            for p, (_, size, step, before), length in zip(place[1:], windows, x.shape[2:], strict=True)
        ]
        for outer in itertools.product(*ranges[:-1]):
            for last in ranges[-1]:
                at = int(np.ravel_multi_index((*outer, last), x.shape[2:]))
                if at > 0 and flat[first + at] == 0:
                    break
                y[place] = max(y[place], line[(*outer, last)])
    return y.reshape(*x.shape[:2], *y.shape[1:])
