"""Resize and Upsample against the ONNX backend tests, the reference evaluator, and the older versions' rules."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError

RUNS = [run_numpy, run_jax]


def scales_case(version: int, x: np.ndarray, scales: list[float], **attributes: Any) -> Case:
    """Resize by scales."""
    return node_case("Resize", version, [x, None, np.array(scales, np.float32)], **attributes)


@pytest.mark.parametrize("coordinates", ["half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "nearest", "nearest_mode": "round_prefer_floor"},
        {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
        {"mode": "nearest", "nearest_mode": "floor"},
        {"mode": "nearest", "nearest_mode": "ceil"},
        {"mode": "linear"},
        {"mode": "cubic"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "antialias": 1},
        {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("scales", [[0.45, 0.3], [1.7, 2.0], [2.5, 0.21]], ids=str)
def test_modes_agree_with_the_reference(
    coordinates: str, attributes: dict[str, Any], scales: list[float], rng: np.random.Generator
) -> None:
    """Every mode and transformation gives what the reference evaluator gives, growing, shrinking and both."""
    x = rng.standard_normal((11, 13))
    case = scales_case(19, x, scales, coordinate_transformation_mode=coordinates, **attributes)
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("version", [11, 13, 19])
@pytest.mark.parametrize("out", [3, 5, 7, 10])
def test_nearest_of_tensorflow(version: int, out: int) -> None:
    """tf_half_pixel_for_nn, of Resize-11, which exporters write in later versions: the centre of an element of the
    result, (i + 0.5) / scale, lies in what it copies."""
    x, none = np.arange(5, dtype=np.float32), np.zeros(0, np.float32)
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
    (y,) = run_numpy(node_case("Resize", version, [x, none, none, np.array([out])], **how))
    np.testing.assert_array_equal(y, x[[math.floor((i + 0.5) * 5 / out) for i in range(out)]])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crop_on_some_axes(run: Any, mode: str, rng: np.random.Generator) -> None:
    """tf_crop_and_resize over listed axes, negative ones too, fills what lies outside with extrapolation_value."""
    x = rng.standard_normal((2, 3, 6, 7))
    roi, sizes = np.array([0.1, -0.3, 0.9, 1.2]), np.array([5, 8])
    attributes = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.5, "mode": mode}
    (y,) = run(node_case("Resize", 18, [x, roi, None, sizes], axes=(-2, -1), **attributes))
    case = node_case("Resize", 18, [x, roi, None, sizes], axes=(2, 3), **attributes)
    want = run_reference(case)[0]
    assert (want == 7.5).any()
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("run", RUNS)
def test_integers_round_and_saturate(run: Any) -> None:
    """Interpolated integers round half to even, and cubic overshoot saturates."""
    x = np.array([0, 0, 0, 255, 255, 255], np.uint8)
    (y,) = run(scales_case(13, x, [2.0], mode="cubic"))
    assert y.dtype == np.uint8
    assert (y.min(), y.max()) == (0, 255)
    np.testing.assert_array_equal(y, run_reference(scales_case(13, x, [2.0], mode="cubic"))[0])
    big = np.array([2**63 - 1, 2**63 - 1, -(2**63), -(2**63)], np.int64)
    (y,) = run(scales_case(13, big, [2.0], mode="cubic"))
    assert y.dtype == np.int64
    assert (int(y[0]), int(y[-1])) == (2**63 - 1, -(2**63))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.bool_, np.complex64, np.int8, np.uint64], ids=lambda d: d.__name__
)
def test_dtypes(run: Any, dtype: Any, rng: np.random.Generator) -> None:
    """Every dtype of the schema keeps its dtype; nearest copies exactly; linear of narrow floats rounds once."""
    x = rng.integers(0, 2, (1, 1, 4, 4)).astype(dtype)
    (y,) = run(scales_case(13, x, [1, 1, 2, 2], mode="nearest"))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x.repeat(2, axis=2).repeat(2, axis=3))
    (y,) = run(scales_case(13, x, [1, 1, 2, 1.5], mode="linear"))
    assert (y.dtype, y.shape) == (x.dtype, (1, 1, 8, 6))


def test_strings_copy() -> None:
    """Strings can be resampled by nearest, on the host."""
    x = np.array([["a", "b"]], object)
    (y,) = run_numpy(scales_case(13, x, [1, 2.0], mode="nearest"))
    assert y.tolist() == [["a", "a", "b", "b"]]


@pytest.mark.parametrize("run", RUNS)
def test_version_10(run: Any) -> None:
    """Resize 10 has asymmetric coordinates: it floors growing and ceils shrinking; linear interpolates from there."""
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    (y,) = run(node_case("Resize", 10, [x, np.array([0.6, 0.6], np.float32)]))
    np.testing.assert_array_equal(y, [[1, 3]])
    (y,) = run(node_case("Resize", 10, [x, np.array([1, 1.5], np.float32)]))
    np.testing.assert_array_equal(y[0], [1, 1, 2, 3, 3, 4])
    (y,) = run(node_case("Resize", 10, [x, np.array([1, 2], np.float32)], mode="linear"))
    np.testing.assert_allclose(y[0], [1, 1.5, 2, 2.5, 3, 3.5, 4, 4])


@pytest.mark.parametrize("run", RUNS)
def test_upsample(run: Any) -> None:
    """Upsample takes scales as an attribute in version 7 and as an input in version 9."""
    x = np.array([[[[1, 2], [3, 4]]]], np.float32)
    want = x.repeat(2, axis=2).repeat(3, axis=3)
    np.testing.assert_array_equal(run(node_case("Upsample", 7, [x], scales=(1.0, 1.0, 2.0, 3.0)))[0], want)
    scales = np.array([1, 1, 2, 3], np.float32)
    np.testing.assert_array_equal(run(node_case("Upsample", 9, [x, scales]))[0], want)
    (y,) = run(node_case("Upsample", 9, [x, np.array([1, 1, 2, 1], np.float32)], mode="linear"))
    np.testing.assert_allclose(y[0, 0], [[1, 2], [2, 3], [3, 4], [3, 4]])


@pytest.mark.parametrize(("policy", "shape"), [("not_larger", (3, 4)), ("not_smaller", (6, 8)), ("stretch", (6, 4))])
def test_aspect_ratio(policy: str, shape: tuple[int, int]) -> None:
    """Policies keep the ratio of the listed axes, within or around the sizes asked for."""
    x = np.zeros((2, 3, 4), np.float32)
    case = node_case("Resize", 19, [x, None, None, np.array([6, 4])], axes=(1, 2), keep_aspect_ratio_policy=policy)
    assert run_numpy(case)[0].shape == (2, *shape)


@pytest.mark.parametrize("run", RUNS)
def test_empty_and_identity(run: Any) -> None:
    """An empty batch stays empty, an axis may shrink to nothing, and scale 1 copies."""
    (y,) = run(scales_case(13, np.zeros((0, 2, 4), np.float32), [1, 1, 2], mode="linear"))
    assert y.shape == (0, 2, 8)
    (y,) = run(scales_case(13, np.zeros((2, 1), np.float32), [1, 0.3], mode="linear"))
    assert y.shape == (2, 0)
    x = np.array([1, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(run(scales_case(13, x, [1], mode="cubic"))[0], x)


def test_misuse_is_named() -> None:
    """Neither scales nor sizes, unknown modes and a resized empty axis are ShapeErrors that say so."""
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ShapeError, match="scales or sizes"):
        run_numpy(node_case("Resize", 13, [x]))
    with pytest.raises(ShapeError, match="mode = 'area'"):
        run_numpy(scales_case(13, x, [2, 2], mode="area"))
    with pytest.raises(ShapeError, match="axis 1 is empty"):
        run_numpy(node_case("Resize", 13, [x[:, :0], None, None, np.array([2, 2])]))
