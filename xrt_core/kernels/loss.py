"""Losses: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.kernels.activation import log_softmax
from xrt_core.kernels.movement import check_shape
from xrt_core.kernels.namespace import result, widen
from xrt_core.kernels.registry import OpContext, kernel


def _likelihood_loss(ctx: OpContext, log_prob: Any, target: Any, weight: Any) -> Any:
    """Weighted negative log-likelihood of the targets along axis 1, reduced as `reduction` says.

    Targets equal to `ignore_index` (which need not be a class) have weight 0; "mean" divides by the sum of weights.
    Other targets must be classes: under NumPy an invalid one raises InputError, elsewhere its loss is NaN.
    """
    check_shape(target.shape, (*log_prob.shape[:1], *log_prob.shape[2:]), f"{ctx.node.operator}: labels")
    xp, ignore, reduction = ctx.xp, ctx.attr("ignore_index"), ctx.attr("reduction", "mean")
    counted = None if ignore is None else target != ignore
    safe = target if counted is None else xp.where(counted, target, xp.zeros_like(target))
    classes = log_prob.shape[1]
    outside = (safe < 0) | (safe >= classes)
    if xp is np:
        _refuse(ctx, safe, outside, classes)
    else:
        safe = xp.where(outside, xp.zeros_like(safe), safe)
    loss = -xp.take_along_axis(log_prob, xp.expand_dims(safe, 1), axis=1)[:, 0]
    if xp is not np:
        loss = xp.where(outside, xp.asarray(np.nan, loss.dtype), loss)
    weights = None if weight is None else xp.take(widen(weight), safe, axis=0)
    if counted is not None:
        loss = xp.where(counted, loss, xp.zeros_like(loss))
        mask = counted.astype(log_prob.dtype)
        # chosen, not multiplied: the weight of a class that is ignored may be infinite
        weights = mask if weights is None else xp.where(counted, weights, xp.zeros_like(weights))
    if weights is not None:
        loss = loss * weights
    if reduction == "none":
        return loss
    if reduction == "sum":
        return xp.sum(loss)
    return xp.mean(loss) if weights is None else xp.sum(loss) / xp.sum(weights)


def _refuse(ctx: OpContext, targets: np.ndarray, outside: np.ndarray, classes: int) -> None:
    if outside.any():
        at = tuple(map(int, np.argwhere(outside)[0]))
        raise InputError(
            f"{ctx.node.operator} {ctx.node.name!r}: label {int(targets[at])} at {list(at)}; with {classes} classes "
            f"labels are 0 to {classes - 1}"
            + ("" if ctx.attr("ignore_index") is None else f", or {ctx.attr('ignore_index')}")
        )


@kernel("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(ctx: OpContext, log_prob: Any, target: Any, weight: Any = None) -> Any:
    """Negative log-likelihood of `target` under the log-probabilities (N, C, d1, ...)."""
    return result(ctx.xp, _likelihood_loss(ctx, widen(log_prob), target, weight), log_prob.dtype)


@kernel("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(ctx: OpContext, scores: Any, labels: Any, weights: Any = None) -> Any:
    """Negative log-likelihood of `labels` under the softmax of the scores (N, C, d1, ...); optionally log_prob too."""
    log_prob = log_softmax(ctx.xp, widen(scores), 1)
    loss = result(ctx.xp, _likelihood_loss(ctx, log_prob, labels, weights), scores.dtype)
    return (loss, result(ctx.xp, log_prob, scores.dtype)) if ctx.num_outputs > 1 else loss
