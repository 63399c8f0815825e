"""Reductions against the ONNX backend tests, NumPy, and the reference's older versions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import InputError, ShapeError

RUNS = [run_numpy, run_jax]
REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_axes_as_attribute(op: str, run: Any, rng: np.random.Generator) -> None:
    """Version 11 takes axes (negative ones too) as an attribute."""
    x = (rng.random((2, 3, 4)) + 0.5).astype(np.float32)
    case = node_case(op, 11, [x], axes=(-1, 0), keepdims=0)
    np.testing.assert_allclose(run(case)[0], run_reference(case)[0], rtol=1e-5)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMax", "CumSum"])
def test_axes_out_of_range(op: str) -> None:
    """An axis beyond the rank is an error, also where it is known at run time only; it is not counted round."""
    for axis in (2, -3, 1 << 40):
        given = np.array(axis if op == "CumSum" else [axis], np.int64)
        with pytest.raises(ShapeError, match="out of range for rank 2|allows -2 to 1"):
            run_numpy(node_case(op, 18, [np.ones((2, 3), np.float32), given]))


def test_axes_of_another_type() -> None:
    """Axes that an ill-typed model computes as floats are an error, as where they are known before."""
    with pytest.raises(ShapeError, match=r"\[1.0\] of float32: .* are integers"):
        run_numpy(node_case("ReduceSum", 13, [np.ones((2, 3), np.float32), np.ones(1, np.float32)]))


NO_AXES = {
    "ReduceSum": lambda x: x, "ReduceMax": lambda x: x, "ReduceProd": lambda x: x, "ReduceMean": lambda x: x,
    "ReduceL1": np.abs, "ReduceL2": np.abs, "ReduceSumSquare": np.square, "ReduceLogSumExp": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", NO_AXES)
def test_reduction_over_no_axes(op: str, run: Any) -> None:
    """With noop_with_empty_axes and no axes only the step before and after the reduction is left."""
    x = np.array([[-2.0, 3.0]], np.float32)
    version = 13 if op == "ReduceSum" else 18
    for inputs in ([x], [x, np.zeros(0, np.int64)]):
        (got,) = run(node_case(op, version, inputs, noop_with_empty_axes=1))
        np.testing.assert_allclose(got, NO_AXES[op](x), rtol=1e-6)
        (got,) = run(node_case(op, version, inputs))
        assert got.shape == (1, 1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_accumulate_wide(dtype: Any, run: Any) -> None:
    """Ten thousand small terms do not get lost in a narrow sum, mean or running sum."""
    x = np.full((10000,), 0.25, dtype)
    assert float(run(node_case("ReduceSum", 13, [x], keepdims=0))[0]) == float(np.asarray(2500, dtype))
    assert float(run(node_case("ReduceMean", 18, [x], keepdims=0))[0]) == 0.25
    (got,) = run(node_case("CumSum", 14, [x, np.array(0)]))
    assert got.dtype == dtype
    assert float(got[-1]) == float(np.asarray(2500, dtype))


@pytest.mark.parametrize("run", RUNS)
def test_integers_keep_their_type(run: Any) -> None:
    """Sums of integers wrap in their own type; means truncate toward zero."""
    x = np.array([2**31 - 1, 1], np.int32)
    (got,) = run(node_case("ReduceSum", 13, [x]))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, [-(2**31)])
    np.testing.assert_array_equal(run(node_case("ReduceMean", 18, [np.array([-3, -4], np.int64)]))[0], [-3])
    big = np.array([2**62, 3], np.uint64)
    np.testing.assert_array_equal(run(node_case("ReduceMax", 20, [big]))[0], [2**62])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int32, -(2**31), 2**31 - 1), (np.float32, -np.inf, np.inf)])
def test_extrema_of_nothing(dtype: Any, low: float, high: float, run: Any) -> None:
    """The maximum of an empty set is the type's least value, the minimum its greatest."""
    x, axes = np.zeros((0, 2), dtype), np.array([0])
    np.testing.assert_array_equal(run(node_case("ReduceMax", 18, [x, axes], keepdims=0))[0], np.array([low] * 2, dtype))
    np.testing.assert_array_equal(
        run(node_case("ReduceMin", 18, [x, axes], keepdims=0))[0], np.array([high] * 2, dtype)
    )


@pytest.mark.parametrize("op", REDUCTIONS)
def test_scalars_stay_arrays(op: str) -> None:
    """Full reduction without keepdims, and reduction of a 0-d input, give 0-d arrays."""
    for x in (np.ones((2, 3), np.float32), np.ones((), np.float32)):
        (got,) = run_numpy(node_case(op, 13, [x], keepdims=0))
        assert type(got) is np.ndarray
        assert got.shape == ()


@pytest.mark.parametrize("run", RUNS)
def test_log_sum_exp_does_not_overflow(run: Any) -> None:
    """Large and infinite terms do not turn into NaN."""
    x = np.array([[1000, 1000], [-np.inf, -np.inf], [np.inf, 0]], np.float32)
    (got,) = run(node_case("ReduceLogSumExp", 18, [x, np.array([1])], keepdims=0))
    np.testing.assert_allclose(got, [1000 + np.log(2), -np.inf, np.inf])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_arg_extremum_of_equals(op: str, run: Any) -> None:
    """Among equals the first counts, or the last with select_last_index; the default axis is 0."""
    x = np.array([[1, 2], [1, 2], [1, 2]], ml_dtypes.bfloat16)
    for last, want in ((0, 0), (1, 2)):
        (got,) = run(node_case(op, 13, [x], select_last_index=last))
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, [[want, want]])
    assert run(node_case(op, 13, [x], axis=-1, keepdims=0))[0].shape == (3,)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize(("op", "version"), [("CumSum", 14), ("CumProd", 26)])
def test_cumulative_by_definition(op: str, version: int, reverse: int, exclusive: int, run: Any) -> None:
    """Each element is the sum or product of those before it (after it in reverse), itself left out if exclusive."""
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int64)
    combine = np.sum if op == "CumSum" else np.prod
    want = np.empty_like(x)
    for j in range(4):
        want[:, j] = combine(x[:, j + exclusive :] if reverse else x[:, : j + 1 - exclusive], axis=1)
    case = node_case(op, version, [x, np.array([-1])], reverse=reverse, exclusive=exclusive)
    np.testing.assert_array_equal(run(case)[0], want)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8])
def test_top_k_breaks_ties_by_index(dtype: Any, largest: int, run: Any) -> None:
    """Equal elements come in the order of their indices; unsigned ones turn round without overflow."""
    x = np.array([[3, 1, 3, 0], [0, 0, 0, 5]], np.int32).astype(dtype)
    values, index = run(node_case("TopK", 11, [x, np.array([3])], 2, largest=largest))
    assert values.dtype == dtype
    np.testing.assert_array_equal(index, [[0, 2, 1], [3, 0, 1]] if largest else [[3, 1, 0], [0, 1, 2]])
    np.testing.assert_array_equal(values, np.take_along_axis(x, index, 1))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("largest", "want"), [(1, [3, 6, 5, 4, 0, 1, 2, 7]), (0, [7, 0, 1, 2, 4, 5, 3, 6])])
def test_top_k_of_zeros_and_nan(largest: int, want: list[int], run: Any) -> None:
    """Zeros of both signs are equal; NaN counts as the greatest."""
    x = np.array([-0.0, 0.0, -0.0, np.nan, 1, np.inf, -np.nan, -np.inf], np.float32)
    np.testing.assert_array_equal(run(node_case("TopK", 11, [x, np.array([8])], 2, largest=largest))[1], want)


@pytest.mark.parametrize("run", RUNS)
def test_top_k_of_version_1(run: Any) -> None:
    """k was an attribute."""
    x = np.array([[1, 5], [4, 2], [3, 3]], np.float32)
    values, index = run(node_case("TopK", 1, [x], 2, k=2, axis=0))
    np.testing.assert_array_equal(values, [[4, 5], [3, 3]])
    np.testing.assert_array_equal(index, [[1, 0], [2, 2]])


@pytest.mark.parametrize("k", [-1, 4])
def test_top_k_of_more_than_there_are(k: int) -> None:
    """It is refused, by an input and by an attribute."""
    x = np.zeros((2, 3), np.float32)
    for case in (node_case("TopK", 11, [x, np.array([k])], 2), node_case("TopK", 1, [x], 2, k=k)):
        with pytest.raises(InputError, match=f"K = {k}; axis -1 of .2, 3. allows 0 to 3"):
            run_numpy(case)
