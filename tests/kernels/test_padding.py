"""Pad, CenterCropPad, Trilu and ReverseSequence against the ONNX backend tests, np.pad and the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import InputError, ShapeError


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("widths", [((2, 1), (0, 3)), ((5, 7), (9, 4))])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_pad_repeats_as_numpy(mode: str, widths: tuple, run: Any) -> None:
    """Borders wider than the tensor keep folding or repeating, as np.pad does."""
    x = np.arange(12, dtype=np.float16).reshape(3, 4)
    pads = np.array([w[0] for w in widths] + [w[1] for w in widths], np.int64)
    (got,) = run(node_case("Pad", 19, [x, pads], mode=mode))
    np.testing.assert_array_equal(got, np.pad(x, widths, mode=mode))
    assert got.dtype == x.dtype


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_negative_pads_crop(run: Any) -> None:
    """A negative pad removes elements, before the other side is padded."""
    x = np.arange(12).reshape(3, 4)
    (got,) = run(node_case("Pad", 13, [x, np.array([-1, 2, 1, -3]), np.array(7)]))
    np.testing.assert_array_equal(got, [[7, 7, 4], [7, 7, 8], [7, 7, 7]])
    (reflected,) = run(node_case("Pad", 18, [x, np.array([-1, 2]), None, np.array([-1])], mode="reflect"))
    np.testing.assert_array_equal(reflected[0], [1, 2, 3, 2, 1])


def test_pad_before_opset_11_has_attributes() -> None:
    """Pad 2 takes pads and value as attributes, in the input's dtype."""
    x = np.ones((1, 2), ml_dtypes.bfloat16)
    (got,) = run_numpy(node_case("Pad", 2, [x], pads=(0, 1, 0, 1), value=2.5))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.astype(np.float32), [[2.5, 1, 1, 2.5]])


def test_pad_of_strings_booleans_and_empty() -> None:
    """The default padding is the empty string or False; an empty tensor can be padded with a constant only."""
    (strings,) = run_numpy(node_case("Pad", 13, [np.array(["a"], object), np.array([0, 1])]))
    assert strings.tolist() == ["a", ""]
    (flags,) = run_numpy(node_case("Pad", 13, [np.array([True]), np.array([1, 0])]))
    assert flags.tolist() == [False, True]
    (filled,) = run_numpy(node_case("Pad", 13, [np.zeros(0), np.array([1, 1]), np.array(3.0)]))
    assert filled.tolist() == [3.0, 3.0]
    with pytest.raises(ShapeError, match="axis of size 0"):
        run_numpy(node_case("Pad", 13, [np.zeros(0), np.array([1, 1])], mode="edge"))


def test_wrong_pads_are_named() -> None:
    """Too few pads and an unknown mode raise ShapeError."""
    x = np.zeros((2, 2))
    with pytest.raises(ShapeError, match="3 pads for 2 axes"):
        run_numpy(node_case("Pad", 13, [x, np.array([1, 1, 1])]))
    with pytest.raises(ShapeError, match="unknown mode 'mirror'"):
        run_numpy(node_case("Pad", 13, [x, np.array([1, 1, 1, 1])], mode="mirror"))


@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_trilu_on_batches_of_narrow_dtypes(run: Any) -> None:
    """Both triangles over the last two axes of a batch, NaN outside the triangle included."""
    x = np.full((2, 3, 2), np.nan).astype(ml_dtypes.bfloat16)
    (lower,) = run(node_case("Trilu", 14, [x, np.array(-1)], upper=0))
    assert lower.dtype == x.dtype
    np.testing.assert_array_equal(np.isnan(lower[1].astype(np.float32)), [[0, 0], [1, 0], [1, 1]])
    (empty,) = run(node_case("Trilu", 14, [np.zeros((0, 3), np.int32)]))
    assert empty.shape == (0, 3)


@pytest.mark.parametrize(("time", "batch"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_reverse_sequence_with_trailing_axes(time: int, batch: int, run: Any) -> None:
    """Lengths 0 and 1 leave a sequence alone; further axes move along."""
    x = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    lengths = np.array([0, 1, 3, 2][: x.shape[batch]], np.int64)
    case = node_case("ReverseSequence", 10, [x, lengths], time_axis=time, batch_axis=batch)
    np.testing.assert_array_equal(run(case)[0], run_reference(case)[0])


@pytest.mark.parametrize("wrong", [4, -1])
def test_reversed_lengths_that_no_sequence_has(wrong: int) -> None:
    """They are InputErrors that say which; a negative one left the sequence as it was."""
    x, lengths = np.zeros((3, 2), np.float32), np.array([3, wrong], np.int64)
    with pytest.raises(InputError, match=f"length {wrong}: the input has 3 steps"):
        run_numpy(node_case("ReverseSequence", 10, [x, lengths]))
