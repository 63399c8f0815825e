"""Movement kernels against the ONNX backend tests, older versions, every dtype and the corners of the attributes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case, run_reference
from xrt_core.errors import ShapeError


def _i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

OLD = [
    node_case("Reshape", 5, [X, _i(0, -1)]),
    node_case("Reshape", 13, [X, _i(4, 0, -1)]),
    node_case("Flatten", 9, [X]),
    node_case("Flatten", 11, [X], axis=-1),
    node_case("Squeeze", 1, [X[:1]], axes=(0,)),
    node_case("Squeeze", 11, [X[:, :1]], axes=(-2,)),
    node_case("Squeeze", 13, [X[:1, :, :1]]),
    node_case("Unsqueeze", 1, [X], axes=(0, 4)),
    node_case("Unsqueeze", 11, [X], axes=(-1,)),
    node_case("Split", 2, [X], outputs=3, axis=1),
    node_case("Split", 11, [X], outputs=2, axis=-1, split=(1, 3)),
    node_case("Split", 13, [X, _i(3, 0)], outputs=2, axis=1),
    node_case("Slice", 1, [X], starts=(0, -3), ends=(1, 1000), axes=(0, 2)),
    node_case("Slice", 10, [X, _i(3), _i(-9), _i(2), _i(-2)]),
    node_case("Slice", 13, [X, _i(1, 0)[:1], np.array([2**63 - 1]), _i(-1)]),
    node_case("Slice", 13, [X, np.array([2**63 - 1]), np.array([-(2**63)]), _i(1), _i(-1)]),
    node_case("Expand", 8, [X[:, :1], _i(3, 1)]),
    node_case("Tile", 6, [X, _i(1, 2, 0)]),
    node_case("Concat", 4, [X, X[:, :2]], axis=1),
    node_case("DepthToSpace", 1, [np.arange(32, dtype=np.float32).reshape(1, 8, 2, 2)], blocksize=2),
    node_case("SpaceToDepth", 1, [np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)], blocksize=2),
    node_case("Shape", 1, [X]),
    node_case("Shape", 15, [X], start=-2, end=9),
    node_case("Shape", 1, [np.float32(3).reshape(())]),
    node_case("Size", 1, [np.zeros((0, 4))]),
]


@pytest.mark.parametrize("case", OLD, ids=lambda c: f"{c.name}-{c.node.version}")
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_as_the_reference(case: Case, run: Any) -> None:
    """Older versions and clamped arguments give what the reference evaluator gives."""
    got, want = run(case), run_reference(case)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float8_e4m3fn, bool])
@pytest.mark.parametrize("run", [run_numpy, run_jax])
def test_dtypes_pass_through(dtype: Any, run: Any) -> None:
    """Narrow dtypes go through joins, cuts and repeats unchanged."""
    x = np.array([[0, 1], [1, 1]]).astype(dtype)
    (joined,) = run(node_case("Concat", 13, [x, x[:1]], axis=0))
    assert joined.dtype == x.dtype
    np.testing.assert_array_equal(joined.astype(np.float32), [[0, 1], [1, 1], [0, 1]])
    (cut,) = run(node_case("Slice", 13, [x, _i(-1), _i(-5), _i(1), _i(-1)]))
    np.testing.assert_array_equal(cut.astype(np.float32), [[1, 0], [1, 1]])
    (tiled,) = run(node_case("Tile", 13, [x, _i(1, 2)]))
    assert tiled.dtype == x.dtype
    np.testing.assert_array_equal(tiled.astype(np.float32), [[0, 1, 0, 1], [1, 1, 1, 1]])


def test_strings_move() -> None:
    """Strings are object arrays and stay so."""
    x = np.array([["a", "bc"]], object)
    for case in (
        node_case("Transpose", 13, [x]),
        node_case("Concat", 13, [x, x], axis=0),
        node_case("Tile", 13, [x, _i(1, 3)]),
    ):
        (got,) = run_numpy(case)
        assert got.dtype == object
        assert got.reshape(-1)[-1] == "bc"


@pytest.mark.parametrize(
    ("shape", "target", "allowzero", "want"),
    [
        ((0, 3, 4), (0, -1), 0, (0, 12)),
        ((0, 3), (-1, 3), 0, (0, 3)),
        ((0,), (-1,), 0, (0,)),
        ((0, 5), (7, 0), 1, (7, 0)),
        ((), (-1,), 0, (1,)),
        ((1, 1), (), 0, ()),
    ],
)
def test_reshape_of_empty_and_scalar(shape: tuple, target: tuple, allowzero: int, want: tuple) -> None:
    """-1 is found from the dimensions that are not copied, also where the tensor is empty."""
    attributes = {"allowzero": 1} if allowzero else {}
    (got,) = run_numpy(node_case("Reshape", 14, [np.zeros(shape), np.array(target, np.int64)], **attributes))
    assert got.shape == want


def test_split_18_ends_with_smaller_parts() -> None:
    """Equal parts are rounded up; what is left for the last ones may be nothing."""
    parts = run_numpy(node_case("Split", 18, [np.arange(5)], outputs=4, num_outputs=4))
    assert [p.tolist() for p in parts] == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (node_case("Reshape", 14, [X, _i(5, -1)]), "does not fit"),
        (node_case("Reshape", 14, [X, _i(2, 3, 4, 0)]), "copies dimension 3"),
        (node_case("Squeeze", 13, [X, _i(1)]), "only size 1"),
        (node_case("Unsqueeze", 13, [X, _i(0, 0)]), "twice"),
        (node_case("Split", 13, [X, _i(1, 1)], outputs=2, axis=1), "do not fit axis 1"),
        (node_case("Concat", 13, [X, X], axis=3), "axis 3 is out of range"),
        (node_case("Expand", 13, [X, _i(5, 4)]), "cannot be broadcast"),
        (node_case("Slice", 13, [X, _i(0), _i(1), _i(0), _i(0)]), "step is 0"),
    ],
)
def test_what_does_not_fit_says_so(case: Case, message: str) -> None:
    """Arguments that do not fit raise ShapeError with the shapes."""
    with pytest.raises(ShapeError, match=message):
        run_numpy(case)
