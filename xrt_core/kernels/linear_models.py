"""Linear models: LinearClassifier and LinearRegressor of ai.onnx.ml, products with a matrix of coefficients.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.ir.ml_limits import linear_classes
from xrt_core.kernels.class_scores import chosen, labels_of, transformed, two_classes
from xrt_core.kernels.registry import OpContext, kernel


@kernel("LinearRegressor", domain="ai.onnx.ml")
def linear_regressor(ctx: OpContext, x: Any) -> Any:
    """[rows, targets]: x @ coefficients' + intercepts, transformed."""
    scores = _scores(ctx, x, int(ctx.attr("targets", 1)))
    return transformed(ctx.xp, scores, str(ctx.attr("post_transform", "NONE"))).astype(np.float32)


@kernel("LinearClassifier", domain="ai.onnx.ml", strings=True)
def linear_classifier(ctx: OpContext, x: Any) -> Any:
    """Labels [rows] and scores [rows, classes]. One score for two labels is that of the second."""
    xp = ctx.xp
    count = linear_classes(ctx.node.attributes)
    scores = _scores(ctx, x, count)
    labels = labels_of(ctx, "classlabels_ints", "classlabels_strings")
    transform = str(ctx.attr("post_transform", "NONE"))
    if count > 1:
        assert labels is not None  # by the limits of attributes
        index = xp.argmax(scores, axis=1)
        return chosen(xp, labels, index), transformed(xp, scores, transform).astype(np.float32)
    has_two = labels is not None and len(labels) == 2
    if labels is None or not has_two:
        labels = np.array([0, 1]) if labels is None or labels.dtype != object else np.array(["0", "1"], object)
    index = (scores[:, 0] > 0).astype(np.intp)
    if has_two and transform in ("NONE", "LOGISTIC"):
        score = transformed(xp, scores[:, 0], transform)
        found = two_classes(xp, score, "NONE", complement=True)
    elif has_two:
        found = two_classes(xp, scores[:, 0], transform, complement=False)
    else:
        found = transformed(xp, scores, transform)
    return chosen(xp, labels, index), found.astype(np.float32)


def _scores(ctx: OpContext, x: Any, count: int) -> Any:
    """[rows, count]: products, in float32 unless x is of float64."""
    xp = ctx.xp
    x = x if x.dtype == np.float64 else x.astype(np.float32)
    x = x.reshape(1, -1) if x.ndim == 1 else x
    coefficients, intercepts = ctx.prepared(lambda _: _parameters(ctx, count))
    scores = xp.matmul(x, xp.asarray(coefficients.astype(x.dtype)))
    return scores if intercepts is None else scores + xp.asarray(intercepts.astype(x.dtype))


def _parameters(ctx: OpContext, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    intercepts = ctx.attr("intercepts")
    coefficients = np.ascontiguousarray(np.array(ctx.attr("coefficients"), np.float32).reshape(count, -1).T)
    return coefficients, np.array(intercepts, np.float32) if intercepts else None
