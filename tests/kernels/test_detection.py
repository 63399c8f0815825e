"""RoiAlign, MaxRoiPool and NonMaxSuppression against the ONNX backend tests and their definitions."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.kernels import find_kernel


def _regions(rng: np.random.Generator) -> np.ndarray:
    boxes = rng.uniform(-3, 12, (6, 4)).astype(np.float32)
    boxes[:, 2:] = boxes[:, :2] + rng.uniform(0.1, 9, (6, 2))
    return boxes


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("pixel", ["half_pixel", "output_half_pixel"])
def test_roi_align_as_the_reference(mode: str, ratio: int, pixel: str, rng: np.random.Generator) -> None:
    """Regions that reach outside, adaptive and fixed sampling, both coordinate modes."""
    x, boxes, which = rng.standard_normal((2, 3, 8, 9)).astype(np.float32), _regions(rng), rng.integers(0, 2, 6)
    case = node_case(
        "RoiAlign", 16, [x, boxes, which], mode=mode, sampling_ratio=ratio, spatial_scale=0.75, output_height=3,
        output_width=2, coordinate_transformation_mode=pixel,
    )  # fmt: skip
    (want,) = run_reference(case)
    np.testing.assert_allclose(run_numpy(case)[0], want, rtol=1e-3, atol=1e-4)
    if ratio:
        np.testing.assert_allclose(run_jax(case)[0], want, rtol=1e-3, atol=1e-4)
    if pixel == "output_half_pixel":
        attributes = {k: v for k, v in case.node.attributes.items() if k != "coordinate_transformation_mode"}
        old = node_case("RoiAlign", 10, case.inputs, **attributes)
        np.testing.assert_array_equal(run_numpy(old)[0], run_numpy(case)[0])


def test_roi_align_without_a_ratio_is_dynamic() -> None:
    """Adaptive sampling depends on the regions; a fixed ratio does not."""
    found = find_kernel("", "RoiAlign")
    assert found is not None
    x = [np.zeros((1, 1, 2, 2)), np.zeros((1, 4)), np.zeros(1, np.int64)]
    assert "sampling_ratio" in str(found.why_dynamic(node_case("RoiAlign", 16, x).node))
    assert found.why_dynamic(node_case("RoiAlign", 16, x, sampling_ratio=1).node) is None


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_no_regions(run: Any) -> None:
    """Without regions the output is empty, of the image's dtype."""
    x = np.zeros((1, 3, 4, 4), ml_dtypes.bfloat16)
    rois = np.zeros((0, 4), x.dtype)
    (got,) = run(node_case("RoiAlign", 22, [x, rois, np.zeros(0, np.int64)], sampling_ratio=1, output_height=2))
    assert (got.shape, got.dtype) == ((0, 3, 2, 1), x.dtype)
    (got,) = run(node_case("MaxRoiPool", 22, [x, np.zeros((0, 5), x.dtype)], pooled_shape=(2, 2)))
    assert (got.shape, got.dtype) == ((0, 3, 2, 2), x.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_max_roi_pool_by_definition(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Corners are rounded and included, cells overlap by rounding outwards, empty cells are 0."""
    x = rng.standard_normal((2, 3, 8, 9)).astype(dtype)
    rois = np.concatenate([rng.integers(0, 2, (6, 1)), _regions(rng) * 2], axis=1).astype(dtype)
    (got,) = run(node_case("MaxRoiPool", 1, [x, rois], pooled_shape=(3, 2), spatial_scale=0.5))
    assert got.dtype == dtype
    for r, (which, *box) in enumerate(rois.astype(np.float64)):
        x1, y1, x2, y2 = (int(math.copysign(math.floor(abs(v * 0.5) + 0.5), v)) for v in box)
        tall, wide = max(y2 - y1 + 1, 1) / 3, max(x2 - x1 + 1, 1) / 2
        for i, j in np.ndindex(3, 2):
            rows = [min(max(v + y1, 0), 8) for v in (math.floor(i * tall), math.ceil((i + 1) * tall))]
            columns = [min(max(v + x1, 0), 9) for v in (math.floor(j * wide), math.ceil((j + 1) * wide))]
            cell = x[int(which), :, rows[0] : rows[1], columns[0] : columns[1]]
            want = cell.max(axis=(1, 2)) if cell.size else np.zeros(3)
            np.testing.assert_array_equal(got[r, :, i, j], want)


@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_suppression_as_the_reference(centred: int, threshold: float, rng: np.random.Generator) -> None:
    """Random boxes with tied scores, several batches and classes."""
    boxes = rng.uniform(0, 1, (2, 20, 4)).astype(np.float32)
    scores = np.round(rng.uniform(0, 1, (2, 3, 20)), 1).astype(np.float32)
    inputs = [boxes, scores, np.array([5]), np.array([threshold], np.float32), np.array([0.2], np.float32)]
    case = node_case("NonMaxSuppression", 11, inputs, center_point_box=centred)
    (got,) = run_numpy(case)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, run_reference(case)[0])


@pytest.mark.parametrize("moved", [0, 10])
@pytest.mark.parametrize("limit", [7, 200, 1000])
def test_suppression_of_many(limit: int, moved: int, rng: np.random.Generator) -> None:
    """More boxes than are compared at a time, in one place or in several apart, against the definition: a box stays
    unless a better one that stays overlaps it."""
    corners = rng.uniform(0, 6, (500, 2)) + moved * rng.integers(0, 5, (500, 1))
    boxes = np.concatenate([corners, corners + rng.uniform(0, 2, (500, 2))], 1).astype(np.float32)
    scores = rng.permutation(500).astype(np.float32)
    case = node_case("NonMaxSuppression", 11, [boxes[None], scores[None, None], np.array([limit]), np.float32([0.25])])
    kept: list[int] = []
    low, high = boxes[:, :2].astype(np.float64), boxes[:, 2:].astype(np.float64)
    for i in np.argsort(-scores):
        side = np.maximum(np.minimum(high[i], high[kept]) - np.maximum(low[i], low[kept]), 0)
        shared = side.prod(1)
        union = (high[i] - low[i]).prod() + (high[kept] - low[kept]).prod(1) - shared
        if len(kept) < limit and not (shared > 0.25 * union).any():
            kept.append(int(i))
    np.testing.assert_array_equal(run_numpy(case)[0][:, 2], kept)
    assert 128 < len(kept) < 500 or len(kept) == limit


def test_suppression_where_a_corner_is_no_number(rng: np.random.Generator) -> None:
    """It overlaps nothing, and hides no gap between others."""
    boxes = (np.array([[0, 0, 2, 2]]) + 10.0 * rng.integers(0, 9, (300, 1))).astype(np.float32)
    scores = rng.permutation(300).astype(np.float32)
    boxes[5, 2] = boxes[7, 0] = np.nan
    case = node_case("NonMaxSuppression", 11, [boxes[None], scores[None, None], np.array([300]), np.float32([0.5])])
    kept = run_numpy(case)[0][:, 2].tolist()
    places = [boxes[i, 1] for i in kept if i not in (5, 7)]
    assert {5, 7} <= set(kept)
    assert len(places) == len(set(places)) == len({*boxes[:5, 1], *boxes[8:, 1], boxes[6, 1]})


def test_suppression_without_a_limit_selects_nothing() -> None:
    """max_output_boxes_per_class defaults to 0; no boxes give no rows."""
    boxes, scores = np.zeros((1, 2, 4), np.float32), np.ones((1, 1, 2), np.float32)
    assert run_numpy(node_case("NonMaxSuppression", 10, [boxes, scores]))[0].shape == (0, 3)
    empty = [boxes[:, :0], scores[:, :, :0], np.array(3)]
    assert run_numpy(node_case("NonMaxSuppression", 10, empty))[0].shape == (0, 3)
