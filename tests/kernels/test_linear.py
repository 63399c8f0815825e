"""Matrix products against the ONNX backend tests, float64 and exact integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case

RUNS = [run_numpy, run_jax]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Einsum"])
def test_narrow_floats_accumulate_wide(op: str, dtype: Any, run: Any) -> None:
    """The sum of 10 000 products is rounded once, at the end."""
    a, b = np.full((1, 10000), 0.25, dtype), np.full((10000, 1), 1, dtype)
    (got,) = run(
        node_case(op, 13 if op != "Einsum" else 12, [a, b], **({"equation": "ij,jk"} if op == "Einsum" else {}))
    )
    assert got.dtype == dtype
    assert float(got[0, 0]) == float(np.asarray(2500, dtype))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("left", "right"), [((3,), (3,)), ((3,), (2, 3, 4)), ((2, 4, 3), (3,)), ((5, 1, 2, 3), (4, 3, 2)), ((2, 0), (0, 3))]
)
def test_shapes_of_products(left: tuple[int, ...], right: tuple[int, ...], run: Any, rng: np.random.Generator) -> None:
    """Vectors, stacks and empty matrices follow NumPy's rules; a scalar product is a 0-d array."""
    a, b = rng.integers(-5, 5, left).astype(np.int32), rng.integers(-5, 5, right).astype(np.int32)
    (got,) = run(node_case("MatMul", 13, [a, b]))
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, np.asarray(np.matmul(a.astype(np.int64), b.astype(np.int64))))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("bias", [None, (), (1,), (4,), (3, 1)])
def test_gemm_by_definition(bias: tuple[int, ...] | None, dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """alpha A' B' + beta C with every broadcast of C, of integers too."""
    a, b = rng.integers(-4, 5, (2, 3)).astype(dtype), rng.integers(-4, 5, (4, 2)).astype(dtype)
    c = None if bias is None else rng.integers(-4, 5, bias).astype(dtype)
    case = node_case("Gemm", 13, [a, b] + ([] if c is None else [c]), alpha=2.0, beta=3.0, transA=1, transB=1)
    want = 2 * (a.T @ b.T) + (0 if c is None else 3 * c)
    (got,) = run(case)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij, ...jk -> ...ik", [(5, 2, 3), (5, 3, 4)]),
        ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 5, 4)]),
        ("ii", [(3, 3)]),
        ("i,j,k->kji", [(2,), (3,), (4,)]),
        ("ba", [(2, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], run: Any, rng: np.random.Generator) -> None:
    """Ellipsis, diagonals, three operands, spaces, and implicit outputs in alphabetical order."""
    xs = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    case = node_case("Einsum", 12, xs, equation=equation)
    want = np.einsum(equation.replace(" ", ""), *(x.astype(np.float64) for x in xs))
    (got,) = run(case)
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integer_products_are_exact(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Zero points per row of A and column of B, and sums beyond float32's 24 bits."""
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max + 1, (3, 2000)).astype(dtype)
    b = rng.integers(info.min, info.max + 1, (2000, 4)).astype(dtype)
    a_zero, b_zero = np.array([info.min, 1, info.max], dtype), np.array([0, 5, info.max, info.min], dtype)
    (got,) = run(node_case("MatMulInteger", 10, [a, b, a_zero, b_zero]))
    want = (a.astype(np.int64) - a_zero[:, None]) @ (b.astype(np.int64) - b_zero)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        run(node_case("MatMulInteger", 10, [a[0], b, a_zero[:1]]))[0], want_vector(a, b, a_zero)
    )


def want_vector(a: np.ndarray, b: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """The product of the first row alone."""
    return (a[0].astype(np.int64) - zero[0]) @ b.astype(np.int64)


@pytest.mark.parametrize("run", RUNS)
def test_quantised_product(run: Any, rng: np.random.Generator) -> None:
    """QLinearMatMul is the product of the dequantised matrices, quantised; scales per row and column."""
    a, b = rng.integers(0, 256, (3, 8)).astype(np.uint8), rng.integers(-128, 128, (8, 4)).astype(np.int8)
    a_scale, b_scale = np.array([0.5, 0.25, 1], np.float32), np.array([0.5, 1, 2, 0.125], np.float32)
    a_zero, b_zero = np.array([128, 100, 7], np.uint8), np.array([0, 1, -1, 3], np.int8)
    y_scale, y_zero = np.array(16.0, np.float32), np.array(-3, np.int8)
    (got,) = run(node_case("QLinearMatMul", 21, [a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero]))
    left = (a.astype(np.float64) - a_zero[:, None]) * a_scale[:, None]
    right = (b.astype(np.float64) - b_zero) * b_scale
    want = np.clip(np.rint(left @ right / 16) - 3, -128, 127)
    assert got.dtype == np.int8
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", RUNS)
def test_determinant(run: Any) -> None:
    """A stack gives one number per matrix, a single matrix a 0-d array, float16 included."""
    x = np.array([[[1, 2], [3, 4]], [[2, 0], [0, 5]]])
    (got,) = run(node_case("Det", 22, [x.astype(np.float16)]))
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float64), [-2, 10], rtol=1e-3)
    (one,) = run(node_case("Det", 11, [x[0].astype(np.float64)]))
    assert type(one) is np.ndarray
    np.testing.assert_allclose(one, -2)
