"""The one table of tolerances: what passes, and that doubled and zeroed results do not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from xrt_core.testing import TOLERANCES, assert_close
from xrt_core.testing.tolerance import EXACT, is_floating, tolerance_for

RNG = np.random.default_rng(11)
FLOATS = [np.dtype(n) if n.startswith(("float", "complex")) and "_" not in n else np.dtype(getattr(ml_dtypes, n))
          for n in TOLERANCES]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_doubled_and_zeroed_results_fail(dtype: np.dtype) -> None:
    """Whatever the dtype, twice the result, half of it and nothing at all are wrong; the rounded result is right."""
    want = RNG.uniform(0.5, 2, 50)
    good = want.astype(dtype)
    assert_close(good, want, dtype=dtype)
    for bad in (2 * want, want / 2, 0 * want):
        with pytest.raises(AssertionError, match="elements out of bounds"):
            assert_close(bad.astype(dtype), want, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_doubled_and_zeroed_results_fail_where_they_are_small(dtype: np.dtype) -> None:
    """The absolute part follows the size of the results: small ones are not waved through."""
    scale = 1e-3 if dtype.itemsize == 2 else 1e-2 if dtype.itemsize == 1 else 1e-6
    want = RNG.uniform(4, 8, 50) * scale
    for bad in (2 * want, 0 * want):
        with pytest.raises(AssertionError, match="elements out of bounds"):
            assert_close(bad.astype(dtype), want, dtype=dtype)


def test_no_tolerance_lets_half_of_a_result_through() -> None:
    """Every row of the table is far from 1."""
    assert all(t.relative + t.absolute < 0.5 for t in TOLERANCES.values())


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_, ml_dtypes.int4], ids=str)
def test_integers_are_exact(dtype: object) -> None:
    """Nothing but the number itself will do."""
    want = np.array([0, 1, 1], np.int64).astype(dtype)
    assert tolerance_for(want.dtype, [np.dtype(np.float16)]) == EXACT
    assert_close(want.copy(), want)
    with pytest.raises(AssertionError, match=r"at \[2\] it is"):
        assert_close(np.array([0, 1, 0], np.int64).astype(dtype), want)


def test_dtype_and_shape_are_exact() -> None:
    """The right numbers in another dtype or shape are wrong."""
    want = np.ones((2, 1), np.float32)
    with pytest.raises(AssertionError, match="sum: dtype is float64, expected float32"):
        assert_close(np.ones((2, 1)), want, what="sum")
    with pytest.raises(AssertionError, match=r"shape is \[2\], expected \[2, 1\]"):
        assert_close(np.ones(2, np.float32), want)


def test_nan_and_infinities_are_in_place() -> None:
    """NaN matches NaN only, an infinity only itself."""
    want = np.array([np.nan, np.inf, -np.inf, 1])
    assert_close(want.copy(), want)
    for i, bad in ((0, 1.0), (1, -np.inf), (1, np.nan), (2, -1e300), (3, np.nan), (3, np.inf)):
        got = want.copy()
        got[i] = bad
        with pytest.raises(AssertionError, match=rf"at \[{i}\]"):
            assert_close(got, want)


def test_overflow_of_the_narrow_type_is_right() -> None:
    """What is finite in the reference's dtype and infinite in the result's is an infinity."""
    assert_close(np.array([np.inf], np.float16), np.array([1e6]), dtype=np.dtype(np.float16))


def test_the_coarsest_input_counts() -> None:
    """A float32 result of float16 inputs may be as far off as float16 is; rounding of large terms is allowed for."""
    want = np.array([1.0], np.float32)
    got = want + np.float32(2e-3)
    with pytest.raises(AssertionError):
        assert_close(got, want)
    assert_close(got, want, inputs=[np.ones(1, np.float16)])
    tiny = np.array([1e-7], np.float32)
    zero = np.zeros(1, np.float32)
    assert_close(zero, tiny, inputs=[np.full(1, 100, np.float32)])
    with pytest.raises(AssertionError):
        assert_close(zero, tiny, inputs=[np.full(1, 100, np.float32)], sums=False)


def test_narrow_floats_are_told_from_narrow_integers() -> None:
    """Both have kind 'V' in NumPy."""
    assert is_floating(np.dtype(ml_dtypes.bfloat16))
    assert is_floating(np.dtype(ml_dtypes.float8_e5m2))
    assert not is_floating(np.dtype(ml_dtypes.int4))
    assert not is_floating(np.dtype(np.int32))
