"""Tensor: Python operators, indexing and methods against NumPy's results."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontends.tracing_runs import traced_run
from tests.profiles import examples
from xrt_core import Graph, ops, trace
from xrt_core.errors import TraceError
from xrt_core.frontends import numpy_interop
from xrt_core.frontends.tensor import Tensor

F = np.float32
X = np.arange(24, dtype=F).reshape(2, 3, 4) - 7


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod], ids=repr)
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.float32, np.float64])
def test_arithmetic_of_two_tensors_is_numpys(op: Callable[..., Any], dtype: Any) -> None:
    """+ - * // % give NumPy's numbers and dtype, negative operands included."""
    a = np.array([7, -7, 7, -7, 6, 0, 5], np.int64).astype(dtype)
    b = np.array([2, 2, -2, -2, 3, 5, 5], np.int64).astype(dtype)
    if dtype is np.uint8:
        b = np.array([2, 2, 3, 250, 3, 5, 5], dtype)
    got = traced_run(op, a, b)
    np.testing.assert_array_equal(got, op(a, b), strict=True)


def test_floor_division_of_floats_is_pythons_where_rounding_matters() -> None:
    """1 // 0.1 is 9 as in Python, although 1 / 0.1 rounds to 10; infinities and zero divisors follow NumPy."""
    a = np.array([1.0, -1.0, 3.0, -1.0, 1.0, 1.0], np.float64)
    b = np.array([0.1, 0.1, -0.3, np.inf, np.inf, 0.0], np.float64)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(traced_run(operator.floordiv, a, b), a // b, strict=True)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, np.bool_])
def test_true_division_of_integers_gives_float32(dtype: Any) -> None:
    """`/` divides truly; integers and bools become float32."""
    got = traced_run(lambda x, y: x / y, np.array([1, 3], dtype), np.array([2, 2], dtype))
    expected = np.array([1, 3], dtype).astype(F) / np.array([2, 2], dtype).astype(F)
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
def test_python_numbers_take_the_tensors_dtype(dtype: Any) -> None:
    """An int or a bool beside a tensor changes nothing about its dtype, on either side."""
    x = np.array([1, 2, 3], dtype)
    got = traced_run(lambda x: (x + 1, 2 * x, 10 - x, x * True, x**2), x)
    for a, b in zip(got, (x + dtype(1), x * dtype(2), dtype(10) - x, x, x**2), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_a_float_beside_integers_gives_float32() -> None:
    """int tensor + 0.5 is float32; bool + 1 is int64; float16 + 0.5 stays float16; bfloat16 too."""
    i, b, h = np.array([1], np.int64), np.array([True]), np.array([1], np.float16)
    w = np.array([1], ml_dtypes.bfloat16)
    got = traced_run(lambda i, b, h: (i + 0.5, b + 1, h + 0.5), i, b, h)
    assert [g.dtype for g in got] == [np.float32, np.int64, np.float16]
    np.testing.assert_array_equal(got[0], np.array([1.5], F))
    assert trace(lambda w: w + 0.5, w).outputs[0].dtype == ml_dtypes.bfloat16


def test_an_integer_out_of_range_is_an_error() -> None:
    """300 is no uint8: nothing wraps silently."""
    with pytest.raises(TraceError, match="300"):
        trace(lambda x: x + 300, np.zeros(3, np.uint8))


@pytest.mark.parametrize(
    ("a", "b"),
    [(np.float32, np.float64), (np.int32, np.float32), (np.uint8, np.int8), (np.bool_, np.int16), (np.int64, np.int32)],
)
def test_two_dtypes_meet_in_numpys(a: Any, b: Any) -> None:
    """Tensors of two dtypes are cast to what np.promote_types says."""
    x, y = np.array([1, 1], a), np.array([1, 2], b)
    np.testing.assert_array_equal(traced_run(lambda x, y: x + y, x, y), x + y, strict=True)


def test_dtypes_of_ml_dtypes_meet_in_the_floating_or_wider_one() -> None:
    """bfloat16 with int64 is bfloat16; with float16, which neither contains, float32."""
    w = np.zeros(2, ml_dtypes.bfloat16)
    assert trace(lambda a, b: a + b, w, np.zeros(2, np.int64)).outputs[0].dtype == w.dtype
    assert trace(lambda a, b: a + b, w, np.zeros(2, np.float16)).outputs[0].dtype == np.float32


def test_arrays_of_numpys_default_dtypes_give_way_others_do_not() -> None:
    """float64 and int64 arrays take the tensor's dtype; a float32 array lifts a float16 tensor, from either side."""
    x, h = np.array([1, 2], F), np.array([1, 2], np.float16)
    got = traced_run(
        lambda x, h: (x + np.array([0.5, 1.5]), np.arange(2) * x, h + np.ones(2, F), np.float64(2) - x, x - [1, 2]),
        x,
        h,
    )
    assert [g.dtype for g in got] == [np.float32] * 5
    np.testing.assert_array_equal(got[0], x + np.array([0.5, 1.5], F))
    np.testing.assert_array_equal(got[3], 2 - x)


def test_comparisons_and_logic() -> None:
    """< <= > >= == != and & | ^ ~ on bools and integers."""
    x, y = np.array([1, 2, 3], np.int32), np.array([3, 2, 1], np.int32)

    def f(a: Any, b: Any) -> Any:
        p, q = a < b, a >= 2
        return a < b, a <= b, a > b, a >= b, a == b, a != b, p & q, p | q, p ^ q, ~p, a & b, a | 4, 1 ^ b, ~a, 2 > a  # noqa: SIM300 - the reflected form is what is tested

    for got, expected in zip(traced_run(f, x, y), f(x, y), strict=True):
        np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16])
def test_shifts_of_signed_integers_are_arithmetic(dtype: Any) -> None:
    """<< and >> on signed integers, which ONNX's BitShift does not take."""
    x = np.array([5, 100, 0, 1, 64], dtype)
    if np.dtype(dtype).kind == "i":
        x = np.concatenate([x, -x - 1]).astype(dtype)
    got = traced_run(lambda x: (x << 1, x >> 2, 1 << (x & 3)), x)
    for a, b in zip(got, (x << dtype(1), x >> dtype(2), dtype(1) << (x & dtype(3))), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_matmul_pow_negation_and_absolute_value() -> None:
    """@ ** - abs, with an array on the left too."""
    w = np.arange(12, dtype=F).reshape(3, 4)
    x = np.arange(8, dtype=F).reshape(4, 2)
    got = traced_run(lambda x: (w @ x, x**2, 2.0**x, -x, abs(-x), +x), x)
    for a, b in zip(got, (w @ x, x**2, F(2) ** x, -x, x, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_small_integers_are_computed_in_wider_ones_where_onnx_wants_it() -> None:
    """int8 @ int8 has no ONNX operator: it runs in int32 and comes back as NumPy's int8."""
    a = np.array([[100, 2], [3, 4]], np.int8)
    np.testing.assert_array_equal(traced_run(lambda a: a @ a, a), a @ a, strict=True)


_KEYS: list[Any] = [
    0, -1, (0, 1), (1, 2, 3), slice(None), slice(1, None), slice(None, None, -1), slice(3, 0, -2), slice(-100, 100),
    slice(5, 1), (slice(None), slice(0, 2)), (..., 0), (..., slice(1, 3)), (0, ..., slice(None, None, 2)), None,
    (None, 0, None), (slice(None), None, 1), (..., None), (), (slice(None), slice(None), slice(-3, -1)),
    [0, 1, 1], ([0, 1], [1, 2]), (slice(None), [0, 2, 2]), (slice(None), [[0, 1], [2, 0]]),
    (0, slice(None), [1, 2]), (slice(None), 0, [1, 2]), ([0, 1], slice(None), [1, 2]), ([[0], [1]], [0, 2]),
    (None, [0, 1], slice(1, 2)), (slice(1, 2), [0, 1], [2, 3]), (-1, [-1, 0]), ([True, False],),
    (slice(None), [True, False, True]), X > 0, X[0] > -5 if X[0].shape == (2, 3) else X[:, :, 0] > -5,
    (X[:, :, 0] > -5, slice(1, 3)), (slice(None), X[0] > -5), (slice(None), [True, False, True], [0, 1]),
    np.array(1), np.zeros((0,), np.int64), (np.array([1, 0], np.int8), ...),
]  # fmt: skip


@pytest.mark.parametrize("key", _KEYS, ids=[f"{i}" for i in range(len(_KEYS))])
def test_indexing_with_constants_is_numpys(key: Any) -> None:
    """Every kind of key gives NumPy's elements in NumPy's order of axes."""
    key = np.asarray(key) if isinstance(key, list) else key
    np.testing.assert_array_equal(traced_run(lambda x: x[key] + 0, X), X[key], strict=True)


_TRACED_KEYS: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "vector": (lambda x, i: x[i], [np.array([1, 0, -1])]),
    "second axis": (lambda x, i: x[:, i], [np.array([[2, 0], [1, 1]], np.int32)]),
    "scalar": (lambda x, i: x[i], [np.array(1)]),
    "scalar and slice": (lambda x, i: x[1:, i, ::2], [np.array(-1)]),
    "two scalars": (lambda x, i, j: x[i, None, :, j], [np.array(1), np.array(2)]),
    "pair": (lambda x, i, j: x[i, j], [np.array([0, 1]), np.array([2, 1])]),
    "broadcast pair": (lambda x, i, j: x[i, :, j], [np.array([[0], [1]]), np.array([2, 1, 0])]),
    "tensor and integer": (lambda x, i: x[:, 0, i], [np.array([1, 3])]),
    "tensor and array": (lambda x, i: x[[0, 1], i], [np.array([1, 2])]),
    "mask over all": (lambda x, m: x[m], [X > 2]),
    "mask over two": (lambda x, m: x[m], [X[:, :, 0] > -4]),
    "mask in the middle": (lambda x, m: x[:, m], [np.array([True, False, True])]),
    "mask with slice": (lambda x, m: x[1:, m], [np.array([True, False, True])]),
    "own comparison": (lambda x: x[x > 0], []),
    "bounds": (lambda x, i: x[:, i:], [np.array(1)]),
    "both bounds": (lambda x, i, j: x[:, :, i:j], [np.array(1), np.array(-1)]),
}


@pytest.mark.parametrize("name", _TRACED_KEYS)
def test_indexing_with_tensors_is_numpys(name: str) -> None:
    """Integer tensors, masks and slice bounds that are known only when the graph runs."""
    f, keys = _TRACED_KEYS[name]
    expected = f(X, *(k if k.ndim else k[()] for k in keys))
    np.testing.assert_array_equal(traced_run(f, X, *keys), expected, strict=True)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (2, "index 2 is out of range for axis 0"),
        ((0, 0, 0, 0), "4 indices"),
        ([0, 5], "index 5 is out of range"),
        (1.5, "cannot index"),
        (True, "single True"),
        ((..., ...), "one Ellipsis"),
        (slice(None, None, 0), "step"),
        (slice("a", None), "bound a slice"),
        (np.zeros((2, 2), bool), "mask of shape"),
    ],
)
def test_a_key_that_does_not_fit_is_an_error_at_the_users_line(key: Any, message: str) -> None:
    """Out of range, too many, of the wrong kind: told with this file's name."""
    with pytest.raises(TraceError, match=message) as e:
        trace(lambda x: x[key], X)
    assert "test_tracing_tensor.py:" in str(e.value)


_PARTS = st.one_of(
    st.integers(-2, 1),
    st.builds(slice, *[st.none() | st.integers(-5, 5)] * 2, st.none() | st.sampled_from([-3, -1, 1, 2])),
    st.none(),
    st.just(...),
    st.lists(st.integers(-2, 1), min_size=2, max_size=2).map(np.array),
    st.lists(st.integers(-2, 1), min_size=1, max_size=1).map(lambda v: np.array([v])),
)


@examples(150, derandomize=True)
@given(st.lists(_PARTS, max_size=6).map(tuple))
def test_any_mix_of_indices_is_numpys(key: Any) -> None:
    """Random keys: what NumPy gives, or an error where NumPy has one."""
    try:
        expected = X[key]
    except IndexError:
        with pytest.raises(TraceError):
            trace(lambda x: x[key], X)
        return
    np.testing.assert_array_equal(traced_run(lambda x: x[key] + 0, X), expected, strict=True)


def test_writing_into_a_tensor_is_an_error() -> None:
    """Item assignment is refused with what to use instead."""

    def f(x: Any) -> Any:
        x[0] = 1
        return x

    with pytest.raises(TraceError, match="Where"):
        trace(f, X)


@pytest.mark.parametrize(
    "f",
    [lambda x: x if x.sum() > 0 else -x, lambda x: float(x[0, 0, 0]), lambda x: range(x.argmax()), np.exp, np.asarray,
     lambda x: np.concatenate([x, x]), lambda x: int(x[0, 0, 0]), lambda x: x.item(), lambda x: 1 in x],
)  # fmt: skip
def test_asking_a_tensor_for_its_numbers_is_an_error(f: Callable[..., Any]) -> None:
    """if, float(), int(), NumPy functions: there are no numbers while tracing, and the message says so."""
    with pytest.raises(TraceError, match="while tracing"):
        trace(f, X)


def test_methods_give_numpys_results() -> None:
    """Shape changes, reductions and elementwise methods, with NumPy's dtypes for sums of integers."""
    i = np.array([[1, -2, 3], [4, 5, -6]], np.int32)
    cases: list[tuple[Callable[..., Any], np.ndarray]] = [
        (lambda x, i: x.reshape(4, -1), X.reshape(4, -1)),
        (lambda x, i: x.reshape((2, 12)), X.reshape(2, 12)),
        (lambda x, i: x.T, X.T),
        (lambda x, i: x.mT, X.swapaxes(-1, -2)),
        (lambda x, i: x.transpose(0, 2, 1), X.transpose(0, 2, 1)),
        (lambda x, i: x.permute((2, 0, 1)), X.transpose(2, 0, 1)),
        (lambda x, i: x.astype(np.int32), X.astype(np.int32)),
        (lambda x, i: x.to("float16"), X.astype(np.float16)),
        (lambda x, i: x.sum(), X.sum()),
        (lambda x, i: x.sum(1), X.sum(1)),
        (lambda x, i: x.sum((0, -1), keepdims=True), X.sum((0, -1), keepdims=True)),
        (lambda x, i: i.sum(0), i.sum(0)),
        (lambda x, i: (i > 0).sum(), (i > 0).sum()),
        (lambda x, i: x.mean(-1), X.mean(-1)),
        (lambda x, i: i.mean(), i.mean().astype(F)),
        (lambda x, i: x.max(2), X.max(2)),
        (lambda x, i: i.min(), i.min()),
        (lambda x, i: x.var(0), X.var(0)),
        (lambda x, i: x.std(), X.std()),
        (lambda x, i: (x > 5).any(1), (X > 5).any(1)),
        (lambda x, i: (x > -100).all(), (X > -100).all()),
        (lambda x, i: x.argmax(1), X.argmax(1)),
        (lambda x, i: i.argmin(), i.argmin()),
        (lambda x, i: x[:1].squeeze(0), X[0]),
        (lambda x, i: x[:1].squeeze(), X[0]),
        (lambda x, i: x.unsqueeze(1), X[:, None]),
        (lambda x, i: x.flatten(1), X.reshape(2, 12)),
        (lambda x, i: x.flatten(), X.reshape(-1)),
        (lambda x, i: x[:1].expand(2, -1, -1), np.broadcast_to(X[:1], (2, 3, 4))),
        (lambda x, i: x.cumsum(1), X.cumsum(1)),
        (lambda x, i: x.clip(0, 3), X.clip(0, 3)),
        (lambda x, i: x.clip(max=3), X.clip(None, 3)),
        (lambda x, i: (x * 0.1).exp(), np.exp(X * F(0.1))),
        (lambda x, i: abs(i).sqrt(), np.sqrt(abs(i).astype(F))),
        (lambda x, i: x.tanh(), np.tanh(X)),
        (lambda x, i: x.relu(), np.maximum(X, 0)),
        (lambda x, i: sum(x[:, :, 0]), X[:, :, 0].sum(0)),
        (lambda x, i: x * len(x) + x.size + x.ndim + x.shape[2], X * 2 + 24 + 3 + 4),
    ]
    got = traced_run(lambda x, i: [f(x, i) for f, _ in cases], X, i)
    for n, (a, (_, b)) in enumerate(zip(got, cases, strict=True)):
        np.testing.assert_allclose(a, b, rtol=2e-6, err_msg=str(n))
        assert np.asarray(a).dtype == b.dtype, n


def test_shapes_stay_known_through_shape_arithmetic() -> None:
    """A shape computed with Shape, Slice and Concat is as good as integers."""

    def f(x: Any) -> Any:
        y = x.reshape(ops.Concat(ops.Shape(x)[:1], [-1], axis=0))
        return y.reshape(y.shape[0] * ops.Size(x) // 12, -1)

    assert trace(f, X).outputs[0].shape == (4, 6)
    np.testing.assert_array_equal(traced_run(f, X), X.reshape(4, 6))


def test_dimensions_that_depend_on_data_are_unknown() -> None:
    """A mask's result has an unknown length; len() says where to get it."""
    assert trace(lambda x: x[x > 0], X).outputs[0].shape == (None,)
    with pytest.raises(TraceError, match=r"xrt\.ops\.Shape"):
        trace(lambda x: len(x[x > 0]), X)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_methods_work_at_older_opsets(opset: int) -> None:
    """Axes are attributes in old opsets and inputs in new ones; the nodes follow the opset asked for."""
    version = opset

    class Old(Graph):
        opset = version

        def build(self, x: Any) -> Any:
            return (x[0].sum(0, keepdims=True).squeeze(0) + x.mean((0, 1))).unsqueeze(0).max(1)

    np.testing.assert_allclose(traced_run(Old(), X), (X[0].sum(0) + X.mean((0, 1)))[None].max(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("compute", "instead"),
    [
        (np.exp, r"np\.exp .* use xrt\.ops\.Exp\(x\), or x\.exp\(\)"),
        (np.arctan, r"use xrt\.ops\.Atan\(x\)"),
        (lambda x: np.maximum(x, 0), r"use xrt\.ops\.Max"),
        (np.add.reduce, r"np\.add\.reduce .* use x\.sum\(axis\)"),
        (np.mean, r"use x\.mean\(axis\)"),
        (lambda x: np.concatenate([x, x]), r"use xrt\.ops\.Concat"),
        (lambda x: np.where(x > 0, x, 0), r"use xrt\.ops\.Where"),
        (np.hypot, r"use xrt\.ops\.<Operator>"),
        (lambda x: np.add(np.ones(2), x, out=np.ones(2)), "np.add with out= cannot be traced"),
        (lambda x: operator.iadd(np.ones(2, np.float32), x), "np.add with out= cannot be traced"),
    ],
)
def test_numpy_functions_say_what_to_write(compute: Any, instead: str) -> None:
    """Those that would compute, with the user's line in front."""
    with pytest.raises(TraceError, match=rf"test_tracing_tensor\.py:\d+ .*{instead}"):
        trace(lambda x: compute(x, x) if compute is np.hypot else compute(x), X[0, 0, :2])


def test_what_is_advised_is_there() -> None:
    """Every operator and method that a message names."""
    for name, text in numpy_interop._INSTEAD.items():
        text = text.format(name, numpy_interop._NAMES.get(name, name.capitalize()))
        assert all(o in dir(ops) for o in re.findall(r"xrt\.ops\.(\w+)", text)), name
        assert all(hasattr(Tensor, m) for m in re.findall(r"\b(?:x|\))\.(\w+)\(", text)), name


@pytest.mark.parametrize("name", sorted(numpy_interop._OPERATORS))
def test_operators_between_arrays_and_tensors(name: str) -> None:
    """NumPy's own function, with an array on either side, is what the operator means."""
    dtype = np.int32 if "bitwise" in name or "shift" in name else np.float32
    a, b = np.array([[1, 2], [3, 4]], dtype), np.array([[2, 1], [3, 2]], dtype)
    for compute in (lambda x: getattr(np, name)(x, b), lambda x: getattr(np, name)(b, x)):
        np.testing.assert_allclose(traced_run(compute, a), compute(a), rtol=1e-6)
