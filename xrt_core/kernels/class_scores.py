"""Class scores: the transforms of scores that operators of ai.onnx.ml name, and the labels that scores choose.

Source: the attribute `post_transform` of https://onnx.ai/onnx/operators/index_ai_onnx_ml.html; for what the text leaves
open (scores of two classes from one), what libraries agree on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.kernels.registry import OpContext


def transformed(xp: Any, scores: Any, transform: str) -> Any:
    """The scores [rows, classes] after LOGISTIC, SOFTMAX, SOFTMAX_ZERO (zeros stay near zero), PROBIT or NONE."""
    if transform == "LOGISTIC":
        return logistic(xp, scores)
    if transform == "SOFTMAX":
        e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        return e / xp.sum(e, axis=-1, keepdims=True)
    if transform == "SOFTMAX_ZERO":
        most = xp.max(scores, axis=-1, keepdims=True)
        is_zero = xp.abs(scores) <= scores.dtype.type(1e-7)
        e = xp.where(is_zero, scores * xp.exp(-most), xp.exp(scores - most))
        total = xp.sum(e, axis=-1, keepdims=True)
        half = scores.dtype.type(0.5)
        return xp.where(total == 0, half, e / xp.where(total == 0, xp.ones_like(total), total))
    if transform == "PROBIT":
        return _probit(xp, scores)
    return scores


def logistic(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, xp.ones_like(e)) / (1 + e)


def _probit(xp: Any, p: Any) -> Any:
    """The quantile of the normal distribution, with Winitzki's approximation of the inverse error function."""
    x = 2 * p - 1
    rest = (1 - x) * (1 + x)
    log = xp.log(xp.where(rest == 0, xp.ones_like(rest), rest))
    v = p.dtype.type(2 / (math.pi * 0.147)) + log / 2
    root = xp.sqrt(xp.sqrt(v * v - log * p.dtype.type(1 / 0.147)) - v)
    return xp.sign(x) * xp.where(rest == 0, p.dtype.type(math.inf), root * p.dtype.type(math.sqrt(2)))


def two_classes(xp: Any, score: Any, transform: str, complement: bool) -> Any:
    """The scores of two classes from that of the second, [rows]: -s and s, transformed; 1 - s and s for a probability,
    which PROBIT takes, and NONE leaves where `complement` says that it is one."""
    if transform == "PROBIT" or (complement and transform == "NONE"):
        return transformed(xp, xp.stack([1 - score, score], axis=1), transform)
    return transformed(xp, xp.stack([-score, score], axis=1), transform)


def labels_of(ctx: OpContext, ints: str, strings: str) -> np.ndarray | None:
    """The labels of the classes, as the attributes `ints` or `strings` give them; None where neither does."""
    named = ctx.attr(strings)
    if named:
        out = np.empty(len(named), object)
        out[:] = named
        return out
    numbers = ctx.attr(ints)
    return np.array(numbers, np.int64) if numbers else None


def chosen(xp: Any, labels: np.ndarray, index: Any) -> Any:
    """The labels at `index`."""
    if labels.dtype == object:
        return labels[np.asarray(index)]
    if (labels == np.arange(len(labels))).all():
        return index.astype(np.int64)
    return xp.take(xp.asarray(labels), index)
