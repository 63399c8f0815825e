"""GridSample, AffineGrid, Col2Im and DeformConv against the ONNX backend tests, the reference and definitions."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(("mode", "rank"), [("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3), ("nearest", 3)])
def test_grid_sample_as_the_reference(
    mode: str, rank: int, padding: str, corners: int, rng: np.random.Generator
) -> None:
    """Every mode and padding, on positions far outside too. Cubic with border is checked apart."""
    x = rng.standard_normal((2, 2, *(4, 3, 2)[:rank])).astype(np.float32)
    low = -1.0 if (mode, padding) == ("cubic", "border") else -2.2
    grid = rng.uniform(low, -low, (2, *(3, 2, 2)[:rank], rank)).astype(np.float32)
    if (mode, padding) == ("cubic", "border"):
        grid *= 0.6  # inside, where all agree
    case = node_case("GridSample", 20, [x, grid], mode=mode, padding_mode=padding, align_corners=corners)
    np.testing.assert_allclose(run_numpy(case)[0], run_reference(case)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("corners", [0, 1])
def test_grid_sample_cubic_border_as_pytorch(corners: int, rng: np.random.Generator) -> None:
    """For cubic only the neighbours are clamped, as PyTorch and ONNX Runtime do."""
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((1, 2, 4, 5)).astype(np.float32)
    grid = rng.uniform(-2, 2, (1, 3, 3, 2)).astype(np.float32)
    want = torch.nn.functional.grid_sample(torch.tensor(x), torch.tensor(grid), "bicubic", "border", bool(corners))
    case = node_case("GridSample", 16, [x, grid], mode="bicubic", padding_mode="border", align_corners=corners)
    np.testing.assert_allclose(run_numpy(case)[0], want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.complex64])
def test_grid_sample_dtypes(dtype: Any) -> None:
    """Half precision is interpolated wider, integers are cut at the end, complex numbers stay complex."""
    x = np.array([[[[1, 4], [7, 10]]]]).astype(dtype)
    grid = np.zeros((1, 1, 1, 2), np.float32)
    case = node_case("GridSample", 22, [x, grid])
    for got in (run_numpy(case)[0], run_jax(case)[0]):
        assert got.dtype == dtype
        assert complex(got.reshape(-1)[0]) == (5 if np.dtype(dtype).kind in "iu" else 5.5)


def test_grid_sample_outside_ignores_nan_and_nan_positions() -> None:
    """Zero padding is 0 whatever the pixels are; NaN positions do not break the host."""
    x = np.full((1, 1, 2, 2), np.nan, np.float32)
    far = np.array([[[[9.0, 9.0], [np.nan, 0.0], [1e30, -1e30]]]], np.float32)
    (got,) = run_numpy(node_case("GridSample", 16, [x, far]))
    assert got[0, 0, 0, 0] == 0
    assert got[0, 0, 0, 2] == 0
    (empty,) = run_numpy(node_case("GridSample", 16, [x, far[:, :, :0]]))
    assert empty.shape == (1, 1, 1, 0)


def test_grid_sample_refuses_a_grid_of_another_rank_or_mode() -> None:
    """A grid with the wrong number of coordinates, or an unknown mode, raises ShapeError."""
    x = np.zeros((1, 1, 2, 2), np.float32)
    with pytest.raises(ShapeError, match="3 coordinates for 2"):
        run_numpy(node_case("GridSample", 20, [x, np.zeros((1, 1, 1, 3), np.float32)]))
    with pytest.raises(ShapeError, match="unknown mode 'area'"):
        run_numpy(node_case("GridSample", 20, [x, np.zeros((1, 1, 1, 2), np.float32)], mode="area"))


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_affine_grid_of_the_identity(corners: int, dtype: Any, run: Any) -> None:
    """The identity gives the pixel centres, innermost axis first, in the dtype of theta."""
    theta = np.eye(2, 3)[None].astype(dtype)
    (got,) = run(node_case("AffineGrid", 20, [theta, np.array([1, 1, 2, 4])], align_corners=corners))
    assert (got.dtype, got.shape) == (dtype, (1, 2, 4, 2))
    wide = np.linspace(-1, 1, 4) if corners else np.array([-0.75, -0.25, 0.25, 0.75])
    high = np.array([-1, 1]) if corners else np.array([-0.5, 0.5])
    np.testing.assert_allclose(got[0, 0, :, 0].astype(float), wide, atol=4e-3)
    np.testing.assert_allclose(got[0, :, 0, 1].astype(float), high)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_col2im_with_strides_pads_and_dilations(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Every column element lands where its window put it, overlaps add up (of booleans any one counts)."""
    image, block, strides, pads, dilations = (6, 7), (3, 2), (2, 1), (1, 0, 2, 1), (1, 2)
    spots = [(image[i] + pads[i] + pads[i + 2] - (block[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in (0, 1)]
    x = rng.integers(0, 2, (2, 3 * math.prod(block), math.prod(spots))).astype(dtype)
    padded = np.zeros((2, 3, 9, 8))
    columns = x.reshape(2, 3, *block, *spots).astype(np.float64)
    for i, j, a, b in np.ndindex(*block, *spots):
        padded[:, :, a * 2 + i, b + j * 2] += columns[:, :, i, j, a, b]
    want = padded[:, :, 1:7, :7].astype(dtype)
    (got,) = run(
        node_case("Col2Im", 18, [x, np.array(image), np.array(block)], strides=strides, pads=pads, dilations=dilations)
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("groups", "shared"), [(1, 1), (2, 2), (2, 1)])
def test_deform_conv_as_the_reference(groups: int, shared: int, rng: np.random.Generator) -> None:
    """Groups, offset groups, strides, pads, dilations, bias and mask together."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, w, bias = draw(1, 4, 5, 6), draw(2, 4 // groups, 3, 2), draw(2)
    inputs = [x, w, 2 * draw(1, shared * 12, 3, 5), bias, draw(1, shared * 6, 3, 5)]
    case = node_case(
        "DeformConv", 19, inputs, strides=(2, 1), pads=(1, 0, 2, 1), dilations=(1, 2), group=groups, offset_group=shared
    )
    (want,) = run_reference(case)
    np.testing.assert_allclose(run_numpy(case)[0], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run_jax(case)[0], want, rtol=1e-4, atol=1e-4)


def test_deform_conv_without_offsets_is_a_convolution_in_any_rank(rng: np.random.Generator) -> None:
    """With offsets of 0 a 3D DeformConv is the correlation, in half precision too."""
    x, w = rng.integers(-2, 3, (1, 2, 3, 4, 3)), rng.integers(-2, 3, (2, 2, 2, 2, 2))
    want = np.zeros((1, 2, 2, 3, 2))
    for at in np.ndindex(2, 3, 2):
        cut = x[0][(slice(None), *(slice(a, a + 2) for a in at))]
        want[(0, slice(None), *at)] = (w * cut).sum(axis=(1, 2, 3, 4))
    for dtype in (np.float64, ml_dtypes.bfloat16):
        case = node_case("DeformConv", 22, [x.astype(dtype), w.astype(dtype), np.zeros((1, 24, 2, 3, 2), dtype)])
        (got,) = run_numpy(case)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=8e-3)
