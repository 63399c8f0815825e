"""Gradients of the losses: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.training.gradient_context import Backward, emit, sum_over, where
from xrt_core.training.registry import gradient


def _scaled(ctx: Backward, loss_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the one-hot labels along axis 1, the gradient by each sample's likelihood with axis 1 of size 1)."""
    scores, labels, weight = ctx.inputs[0], ctx.inputs[1], ctx.input(2)
    classes = scores.shape[1]
    if not isinstance(classes, int):
        raise ctx.error(f"the number of classes is {classes}; specialise the graph for a signature first")
    if labels.shape is not None and len(labels.shape) != scores.ndim - 1:
        raise ctx.error(
            f"the labels are of shape {list(labels.shape)}, the scores of {list(scores.shape)}; class numbers "
            f"are of shape {[scores.shape[0], *scores.shape[2:]]}: reshape the labels"
        )
    ignore = ctx.attr("ignore_index")
    counted = None if ignore is None else ~(labels == int(ignore))
    safe = labels if counted is None else where(counted, labels, 0)
    each: Tensor | None = None
    if weight is not None:
        each = ops.Gather(weight, safe)
    if counted is not None:
        mask = counted.astype(scores.dtype)
        each = mask if each is None else each * mask
    share = loss_grad
    reduction = str(ctx.attr("reduction", "mean"))
    if reduction == "mean":
        if each is not None:
            share = share / each.sum()
        else:
            ones = mean_of_count(labels, scores)
            share = share * ones
    scale = share if each is None else share * each
    if scale.ndim < labels.ndim:
        scale = scale.reshape([1] * scores.ndim)
    else:
        scale = scale.unsqueeze(1)
    index = literal(np.arange(classes).reshape([classes] + [1] * (scores.ndim - 2)), labels.dtype)
    return (safe.unsqueeze(1) == index).astype(scores.dtype), scale


def mean_of_count(labels: Tensor, scores: Tensor) -> Any:
    """Return 1 / number of samples: a number, or a tensor if it is symbolic."""
    if labels._value.is_static:
        return 1.0 / max(labels.size, 1)
    return ops.Reciprocal(ops.Size(labels).astype(scores.dtype))


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood(ctx: Backward) -> Any:
    """Minus the sample's weight at its label, 0 elsewhere."""
    hot, scale = _scaled(ctx, ctx.grad)
    by_weight = _by_weight(ctx, ctx.grad, hot, ctx.inputs[0]) if ctx.wants(2) else None
    return (-(hot * scale), None, by_weight)[: len(ctx.inputs)]


def _by_weight(ctx: Backward, by_loss: Tensor, hot: Tensor, log_prob: Tensor) -> Tensor:
    """The gradient by the weights of classes: each sample's loss at its class, less the mean where it is one."""
    weight, labels, ignore = ctx.inputs[2], ctx.inputs[1], ctx.attr("ignore_index")
    each = -sum_over(hot * log_prob, [1])
    counted = hot if ignore is None else hot * (labels != int(ignore)).unsqueeze(1).astype(hot.dtype)
    if by_loss.ndim == labels.ndim and labels.ndim:  # reduction none
        share = by_loss.unsqueeze(1) * each
    elif str(ctx.attr("reduction", "mean")) == "mean":
        total = (counted * weight.reshape([1, -1, *[1] * (hot.ndim - 2)])).sum()
        share = by_loss / total * (each - ctx.outputs[0])
    else:
        share = by_loss * each
    return sum_over(counted * share, [i for i in range(hot.ndim) if i != 1], keepdims=False)


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(ctx: Backward) -> Any:
    """(softmax - one-hot labels) times the sample's weight, plus the gradient through log_prob."""
    scores = ctx.inputs[0]
    by_loss, by_log = ctx.grads[0], ctx.grads[1] if len(ctx.grads) > 1 else None
    log_prob = ctx.outputs[1] if len(ctx.outputs) > 1 else None
    soft = ops.Exp(log_prob) if log_prob is not None else _softmax(scores)
    total: Tensor | None = None
    by_weight: Tensor | None = None
    if by_loss is not None:
        hot, scale = _scaled(ctx, by_loss)
        total = (soft - hot) * scale
        if ctx.wants(2):
            logs = log_prob if log_prob is not None else emit("LogSoftmax", [scores], opset=13, axis=1)
            by_weight = _by_weight(ctx, by_loss, hot, logs)
    if by_log is not None:
        through = by_log - soft * sum_over(by_log, [1])
        total = through if total is None else total + through
    return (total, None, by_weight)[: len(ctx.inputs)]


def _softmax(scores: Tensor) -> Tensor:
    made: Tensor = emit("Softmax", [scores], opset=13, axis=1)  # before, it flattened
    return made
