"""Kernels that draw random numbers: RandomNormal, RandomUniform, Multinomial, Bernoulli, Dropout.

With a seed the numbers are the same at each call, under every namespace and NumPy version: NumPy's frozen
`RandomState` generates them on the host, as constants of static shape.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.types import ONNX_TO_DTYPE
from xrt_core.kernels.namespace import narrow, wide, widen
from xrt_core.kernels.registry import OpContext, kernel

_FRESH = "draws new numbers at every call; set the attribute seed"


def random_state(seed: float | None) -> np.random.RandomState:
    """The generator of a seed attribute; a fresh one without a seed (None or NaN)."""
    if seed is None or math.isnan(seed):
        return np.random.RandomState()
    if 0 <= seed < 2**32 and seed == int(seed):
        return np.random.RandomState(int(seed))
    return np.random.RandomState(np.frombuffer(struct.pack("<d", seed), np.uint32))


def _unseeded(node: Node) -> str | None:
    return _FRESH if node.attributes.get("seed") is None else None


def _dtype(ctx: OpContext, fallback: np.dtype) -> np.dtype:
    code = ctx.attr("dtype")
    return fallback if code is None else ONNX_TO_DTYPE[code]


def _normal(ctx: OpContext, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    drawn = random_state(ctx.attr("seed")).standard_normal(shape)
    return ctx.xp.asarray(np.asarray(drawn * ctx.attr("scale", 1.0) + ctx.attr("mean", 0.0)).astype(dtype))


def _uniform(ctx: OpContext, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    low, high = ctx.attr("low", 0.0), ctx.attr("high", 1.0)
    drawn = np.asarray(random_state(ctx.attr("seed")).random_sample(shape))
    return ctx.xp.asarray((low + drawn * (high - low)).astype(dtype))


@kernel("RandomNormal", dynamic=_unseeded)
def random_normal(ctx: OpContext) -> Any:
    """RandomNormal: `shape` normal numbers of `mean` and standard deviation `scale`."""
    return _normal(ctx, tuple(ctx.attr("shape")), _dtype(ctx, np.dtype(np.float32)))


@kernel("RandomNormalLike", dynamic=_unseeded)
def random_normal_like(ctx: OpContext, x: Any) -> Any:
    """RandomNormalLike: the shape, and without `dtype` the dtype, of the input."""
    return _normal(ctx, x.shape, _dtype(ctx, x.dtype))


@kernel("RandomUniform", dynamic=_unseeded)
def random_uniform(ctx: OpContext) -> Any:
    """RandomUniform: `shape` numbers between `low` and `high`."""
    return _uniform(ctx, tuple(ctx.attr("shape")), _dtype(ctx, np.dtype(np.float32)))


@kernel("RandomUniformLike", dynamic=_unseeded)
def random_uniform_like(ctx: OpContext, x: Any) -> Any:
    """RandomUniformLike: the shape, and without `dtype` the dtype, of the input."""
    return _uniform(ctx, x.shape, _dtype(ctx, x.dtype))


@kernel("Bernoulli", dynamic=_unseeded)
def bernoulli(ctx: OpContext, x: Any) -> Any:
    """Bernoulli: 1 with the probability given for each element, else 0."""
    drawn = random_state(ctx.attr("seed")).random_sample(x.shape)
    return (ctx.xp.asarray(drawn) < x.astype(np.float64)).astype(_dtype(ctx, x.dtype))


@kernel("Multinomial", dynamic=_unseeded)
def multinomial(ctx: OpContext, x: Any) -> Any:
    """Multinomial: `sample_size` classes a row, drawn by unnormalised log-probabilities (inverse of the CDF)."""
    xp, (batch, classes) = ctx.xp, x.shape
    count = ctx.attr("sample_size", 1)
    logits = x.astype(np.float64)
    weights = xp.cumsum(xp.exp(logits - xp.max(logits, axis=1, keepdims=True)), axis=1)
    rows = xp.arange(batch)[:, None]
    cdf = weights / weights[:, -1:] + rows  # one ascending table for all rows
    drawn = xp.asarray(random_state(ctx.attr("seed")).random_sample((batch, count))) + rows
    found = xp.searchsorted(xp.reshape(cdf, (-1,)), xp.reshape(drawn, (-1,)), side="right")
    index = xp.reshape(found, (batch, count)) - rows * classes
    return xp.clip(index, 0, classes - 1).astype(_dtype(ctx, np.dtype(np.int32)))


def _trains(node: Node) -> bool | None:
    """Whether a Dropout is in training mode; None where that is an input not known yet."""
    if node.version < 12 or len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    data = node.inputs[2].data
    return None if data is None else bool(np.asarray(data).reshape(-1)[0])


def _dropout_reason(node: Node) -> str | None:
    if _trains(node) is False or _unseeded(node) is None:
        return None
    ratio = node.inputs[1]
    if ratio is not None and ratio.data is not None and not np.asarray(ratio.data).astype(np.float32).any():
        return None
    return _FRESH


@kernel("Dropout", static=(2,), dynamic=_dropout_reason)
def dropout(ctx: OpContext, x: Any, ratio: Any = None, training: Any = None) -> Any:
    """Dropout: identity and a mask of ones unless `training_mode` (an input from version 12) is true."""
    xp = ctx.xp
    if ctx.version < 12 or training is None or not bool(np.asarray(training).reshape(-1)[0]):
        if ctx.num_outputs == 1:
            return x
        return x, xp.ones(x.shape, x.dtype if ctx.version < 10 else np.bool_) if ctx.wants(1) else None
    share = xp.asarray(0.5, wide(x.dtype)) if ratio is None else xp.reshape(widen(ratio), ())
    keep = xp.asarray(random_state(ctx.attr("seed")).random_sample(x.shape)) >= share
    value = xp.where(keep, widen(x) * (1 / (1 - share)).astype(wide(x.dtype)), xp.zeros((), wide(x.dtype)))
    value = narrow(value, x.dtype)
    return (value, keep) if ctx.num_outputs > 1 else value
