"""Losses against the ONNX backend tests and plain sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import InputError

RUNS = [run_numpy, run_jax]


def by_definition(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, ignore: int | None) -> tuple[Any, Any]:
    """Each element's weighted loss and its weight, one element at a time."""
    shifted = scores.astype(np.float64) - scores.max(1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    loss, weight = np.zeros(labels.shape), np.zeros(labels.shape)
    for at in np.ndindex(*labels.shape):
        if labels[at] != ignore:
            weight[at] = weights[labels[at]]
            loss[at] = -weight[at] * log_prob[(at[0], labels[at], *at[1:])]
    return loss, weight


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignore", [None, 1, -100])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(
    version: int, reduction: str, ignore: int | None, weighted: bool, run: Any, rng: np.random.Generator
) -> None:
    """Every reduction, with and without weights, with an ignored label that is or is not a class."""
    scores = (rng.standard_normal((3, 4, 2)) * 5).astype(np.float32)
    labels = rng.integers(0, 4, (3, 2))
    if ignore is not None:
        labels[1, 0] = ignore
    weights = np.array([0.5, 1, 2, 0.25], np.float32)
    attributes: dict[str, Any] = {"reduction": reduction}
    if ignore is not None:
        attributes["ignore_index"] = ignore
    inputs = [scores, labels] + ([weights] if weighted else [])
    loss, log_prob = run(node_case("SoftmaxCrossEntropyLoss", version, inputs, 2, **attributes))
    each, weight = by_definition(scores, labels, weights if weighted else np.ones(4), ignore)
    want = {"none": each, "sum": each.sum(), "mean": each.sum() / weight.sum()}[reduction]
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.exp(log_prob).sum(1), 1, rtol=1e-5)
    nll_case = node_case("NegativeLogLikelihoodLoss", version, [log_prob, *inputs[1:]], **attributes)
    np.testing.assert_allclose(run(nll_case)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """The loss has the type of the scores, takes int32 labels, and is a 0-d array; one output is no tuple of two."""
    scores = rng.standard_normal((5, 3)).astype(dtype)
    labels = np.array([0, 2, 1, 1, 0], np.int32)
    (got,) = run(node_case("SoftmaxCrossEntropyLoss", 13, [scores, labels]))
    each, _ = by_definition(scores.astype(np.float64), labels, np.ones(3), None)
    assert type(got) is np.ndarray
    assert got.dtype == dtype
    assert got.shape == ()
    np.testing.assert_allclose(got.astype(np.float64), each.mean(), rtol=1e-2 if got.itemsize == 2 else 1e-12)


@pytest.mark.parametrize("label", [-1, 4, 1000])
@pytest.mark.parametrize("operator", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_labels_that_are_no_class(operator: str, label: int) -> None:
    """NumPy's kernels name the label and where it is; others give NaN, also where NumPy would count from the end."""
    scores, labels = np.ones((3, 4), np.float32), np.array([0, label, -7])
    with pytest.raises(InputError, match=rf"label {label} at \[1\]; with 4 classes labels are 0 to 3, or -7"):
        run_numpy(node_case(operator, 13, [scores, labels], 1, ignore_index=-7))
    made = node_case(operator, 13, [scores, labels], 1, ignore_index=-7, reduction="none")
    found = np.asarray(run_jax(made)[0])
    np.testing.assert_array_equal(np.isnan(found), [False, True, False])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_weight_of_an_ignored_class_does_not_matter(run: Any, reduction: str) -> None:
    """It may be infinite, or NaN."""
    scores, labels = np.arange(12, dtype=np.float32).reshape(3, 4) / 7, np.array([1, 0, 3])
    for weight in (np.inf, -np.inf, np.nan):
        weights = np.array([weight, 1, 1, 1], np.float32)
        case = node_case("SoftmaxCrossEntropyLoss", 13, [scores, labels, weights], ignore_index=0, reduction=reduction)
        plain = node_case("SoftmaxCrossEntropyLoss", 13, [scores, labels], ignore_index=0, reduction=reduction)
        np.testing.assert_allclose(run(case)[0], run(plain)[0], rtol=1e-6)
