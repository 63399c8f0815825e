"""Support vector machines: SVMClassifier and SVMRegressor of ai.onnx.ml.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html, whose classifier is that of LIBSVM (Chang and Lin,
"LIBSVM: A library for support vector machines", 2011): a decision for each two classes, votes, and probabilities by the
second method of Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise coupling", 2004.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Node
from xrt_core.ir.ml_limits import class_count, svm_vectors
from xrt_core.kernels.class_scores import chosen, labels_of, logistic, transformed, two_classes
from xrt_core.kernels.namespace import has_float64, is_jax
from xrt_core.kernels.registry import OpContext, kernel


class Machine(Struct, frozen=True):
    """The tables of a machine with support vectors.

    vectors [vectors, features], less `center`, their mean. norms [vectors]: of what is left. coefficients: as given.
    """

    vectors: np.ndarray
    center: np.ndarray
    norms: np.ndarray
    coefficients: np.ndarray


@kernel("SVMRegressor", domain="ai.onnx.ml")
def svm_regressor(ctx: OpContext, x: Any) -> Any:
    """[rows, 1]: kernels with the support vectors, weighted, plus rho; its sign (1 or -1) where `one_class`."""
    xp = ctx.xp
    x = _matrix(x)
    vectors = int(ctx.attr("n_supports", 0))
    if vectors:
        machine: Machine = ctx.prepared(lambda node: _machine(node, vectors))
        products = _kernels(ctx, machine, x)
        score = xp.matmul(products, xp.asarray(machine.coefficients.astype(products.dtype)))[:, None]
    else:
        score = xp.matmul(x, xp.asarray(np.array(ctx.attr("coefficients"), x.dtype)))[:, None]
    score = score + score.dtype.type(ctx.attr("rho")[0])
    if ctx.attr("one_class", 0):
        score = xp.where(score > 0, xp.ones_like(score), -xp.ones_like(score))
    return transformed(xp, score, str(ctx.attr("post_transform", "NONE"))).astype(np.float32)


@kernel("SVMClassifier", domain="ai.onnx.ml", strings=True)
def svm_classifier(ctx: OpContext, x: Any) -> Any:
    """Labels [rows] and scores: a probability for each class where prob_a is given, else a decision for each two."""
    xp, node = ctx.xp, ctx.node
    x = _matrix(x)
    labels = labels_of(ctx, "classlabels_ints", "classlabels_strings")
    assert labels is not None  # by the limits of attributes
    count, vectors = class_count(node.attributes), svm_vectors(node.attributes)
    transform = str(ctx.attr("post_transform", "NONE"))
    if not vectors:
        return _linear(ctx, x, labels, transform)
    machine: Machine = ctx.prepared(lambda node: _machine(node, vectors))
    decisions = _decisions(ctx, machine, x, count)
    first, second = np.triu_indices(count, 1)
    classes = np.arange(count)
    for_first = (decisions > 0).astype(np.float32)
    votes = xp.matmul(for_first, xp.asarray((first[:, None] == classes).astype(np.float32)))
    votes = votes + xp.matmul(1 - for_first, xp.asarray((second[:, None] == classes).astype(np.float32)))
    chosen_labels = chosen(xp, labels, xp.argmax(votes, axis=1))
    if ctx.attr("prob_a"):
        found = transformed(xp, _probabilities(ctx, decisions, count), transform)
    elif count == 2:
        found = two_classes(xp, decisions[:, 0], transform, complement=transform != "NONE")
    else:
        found = transformed(xp, decisions, transform)
    return chosen_labels, found.astype(np.float32)


def _matrix(x: Any) -> Any:
    x = x if x.dtype == np.float64 else x.astype(np.float32)
    return x.reshape(1, -1) if x.ndim == 1 else x


def _linear(ctx: OpContext, x: Any, labels: np.ndarray, transform: str) -> Any:
    """Without support vectors: a row of coefficients for each class."""
    xp = ctx.xp
    table = np.array(ctx.attr("coefficients"), x.dtype).reshape(len(labels), -1)
    scores = xp.matmul(x, xp.asarray(table.T)) + x.dtype.type(ctx.attr("rho")[0])
    return chosen(xp, labels, xp.argmax(scores, axis=1)), transformed(xp, scores, transform).astype(np.float32)


def _machine(node: Node, count: int) -> Machine:
    attributes: Any = node.attributes
    vectors = np.array(attributes["support_vectors"], np.float64).reshape(count, -1)
    center = vectors.mean(axis=0) if attributes.get("kernel_type", "LINEAR") == "RBF" else np.zeros(vectors.shape[1])
    vectors = vectors - center
    return Machine(vectors, center, (vectors * vectors).sum(axis=1), np.array(attributes["coefficients"], np.float64))


def _kernels(ctx: OpContext, machine: Machine, x: Any) -> Any:
    """[rows, vectors] in the dtype of x: products in float64 where there is one, for the distances of RBF cancel."""
    xp = ctx.xp
    gamma, coef0, degree = ctx.attr("kernel_params") or (0.0, 0.0, 0.0)
    exact = np.dtype(np.float64 if has_float64(xp) else np.float32)
    given, vectors = x.astype(exact), xp.asarray(machine.vectors.astype(exact))
    name = str(ctx.attr("kernel_type", "LINEAR"))
    if name == "RBF":
        given = given - xp.asarray(machine.center.astype(exact))
        squares = xp.sum(given * given, axis=1, keepdims=True) + xp.asarray(machine.norms.astype(exact))
        distances = squares - 2 * xp.matmul(given, vectors.T)
        return xp.exp((distances * exact.type(-gamma)).astype(x.dtype))
    products = xp.matmul(given, vectors.T)
    if name == "LINEAR":
        return products.astype(x.dtype)
    products = products * exact.type(gamma) + exact.type(coef0)
    if name == "SIGMOID":
        return xp.tanh(products.astype(x.dtype))
    return (products ** int(degree)).astype(x.dtype) if degree == int(degree) else (products**degree).astype(x.dtype)


def _decisions(ctx: OpContext, machine: Machine, x: Any, count: int) -> Any:
    """[rows, pairs of classes]: positive for the first one. A vector has a coefficient against each other class."""
    xp = ctx.xp
    products = _kernels(ctx, machine, x)
    table = machine.coefficients.reshape(count - 1, -1).astype(products.dtype)
    ends = np.cumsum(ctx.attr("vectors_per_class"))
    parts = [
        xp.matmul(products[:, end - size : end], xp.asarray(np.ascontiguousarray(table[:, end - size : end].T)))
        for end, size in zip(ends.tolist(), ctx.attr("vectors_per_class"), strict=True)
    ]
    against = xp.stack(parts, axis=1)  # [rows, class, other class, itself left out]
    first, second = np.triu_indices(count, 1)
    rho = np.array(ctx.attr("rho"), products.dtype)
    return against[:, first, second - 1] + against[:, second, first] + xp.asarray(rho)


def _probabilities(ctx: OpContext, decisions: Any, count: int) -> Any:
    """[rows, classes] from the decisions, by pairwise coupling: LIBSVM's iteration with its bound, for all rows."""
    xp = ctx.xp
    exact = np.dtype(np.float64 if has_float64(xp) else np.float32)
    a, b = (xp.asarray(np.array(ctx.attr(name), exact)) for name in ("prob_a", "prob_b"))
    pair = xp.clip(logistic(xp, -(decisions.astype(exact) * a + b)), 1e-7, 1 - 1e-7)
    first, second = np.triu_indices(count, 1)
    where = np.zeros((count, count), np.intp)
    where[first, second] = where[second, first] = np.arange(len(first))
    upper = (np.arange(count)[:, None] < np.arange(count)).astype(bool)
    r = xp.where(xp.asarray(upper), pair[:, where], 1 - pair[:, where])  # [rows, i, j]: of i against j
    apart = xp.asarray(1 - np.eye(count, dtype=exact))
    r = r * apart
    q = -xp.swapaxes(r, 1, 2) * r
    diagonal = xp.sum(r * r, axis=1)  # of column t: squares of r[j, t]
    q = q + diagonal[:, :, None] * xp.asarray(np.eye(count, dtype=exact))
    p = xp.full((decisions.shape[0], count), 1.0 / count, exact)
    bound = 0.005 / count

    def step(p: Any, q: Any, diagonal: Any) -> tuple[Any, Any]:
        qp = xp.matmul(q, p[:, :, None])[:, :, 0]
        pqp = xp.sum(p * qp, axis=1)
        going = xp.max(xp.abs(qp - pqp[:, None]), axis=1) >= bound
        new = p
        for t in range(count):
            diff = (pqp - qp[:, t]) / diagonal[:, t]
            scale = 1 + diff
            pqp = (pqp + diff * (diff * diagonal[:, t] + 2 * qp[:, t])) / scale / scale
            qp = (qp + diff[:, None] * q[:, t, :]) / scale[:, None]
            one = xp.asarray((np.arange(count) == t).astype(exact))
            new = (new + diff[:, None] * one) / scale[:, None]
        return xp.where(going[:, None], new, p), going

    most = max(100, count)
    if is_jax(xp):
        import jax

        def body(state: Any) -> Any:
            p, _, n = state
            p, going = step(p, q, diagonal)
            return p, xp.any(going), n + 1

        return jax.lax.while_loop(lambda s: s[1] & (s[2] < most), body, (p, xp.asarray(True), 0))[0]
    rows = xp.arange(len(p))
    for _ in range(most):
        p[rows], going = step(p[rows], q[rows], diagonal[rows])
        rows = rows[going]
        if not rows.size:
            break
    return p
