"""The host: portable kernels first, onnx.reference behind them, and errors that name the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.random_graphs import F32, ints, node
from xrt_core.errors import ExecutionError, ShapeError, UnsupportedError
from xrt_core.host.executor import run_node
from xrt_core.host.reference import reference_kernel
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import STRING, TensorType
from xrt_core.runtime.plan import _own

X = np.array([1, -2], np.float32)


def test_a_portable_kernel_and_the_reference_agree() -> None:
    """Several outputs, inputs left out, attributes."""
    x, y, z = Value("x", TensorType(F32, (2,))), Value("y"), Value("z")
    for n, arrays in (
        (node("Clip", [x, None, Value("hi", TensorType(F32, ()))], [y]), [X, None, np.array(0, np.float32)]),
        (node("TopK", [x, Value("k")], [y, z], largest=0), [X, np.array([1])]),
        (node("TopK", [x, Value("k")], [None, z]), [X, np.array([1])]),
        (node("Softmax", [x], [y], axis=0), [X]),
    ):
        ours, theirs = run_node(n, arrays), reference_kernel(n)(arrays)
        assert len(ours) == len(theirs)
        for a, b, v in zip(ours, theirs, n.outputs, strict=True):
            if v is not None:
                np.testing.assert_allclose(a, b, rtol=1e-6)
                assert np.asarray(a).dtype == b.dtype


def test_versions_are_kept() -> None:
    """ReduceSum of opset 11 has its axes as an attribute, that of 13 as an input; both paths tell them apart."""
    x, axes, given = Value("x", TensorType(F32, (2, 3))), Value("axes"), np.ones((2, 3), np.float32)
    old = Node("ReduceSum", [x], [Value("y")], {"axes": (0,), "keepdims": 0}, version=11)
    new = Node("ReduceSum", [x, axes], [Value("y")], {"keepdims": 0}, version=13)
    for run in (lambda n, a: run_node(n, a), lambda n, a: reference_kernel(n)(a)):
        assert run(old, [given])[0].tolist() == [2, 2, 2]
        assert run(new, [given, np.array([1])])[0].tolist() == [3, 3]


def test_text_goes_to_the_reference() -> None:
    """A portable kernel never sees strings; results are object arrays."""
    text = TensorType(STRING, (2,))
    x, y = Value("x", text), Value("y", text)
    (out,) = run_node(node("Concat", [x, x], [y], axis=0), [np.array(["a", "b"], dtype=object)] * 2)
    assert (out.dtype, out.tolist()) == (STRING, ["a", "b", "a", "b"])


def test_a_failure_names_the_node_and_its_inputs() -> None:
    """Whatever kind of exception the kernel raises, it is the cause."""
    n = Node("Add", [Value("a"), Value("b")], [Value("y")], version=14, name="sum")
    with pytest.raises(
        ExecutionError, match=r"node 'sum': Add\(float32\[2\], float32\[3\]\) failed on the host: .+"
    ) as e:
        run_node(n, [X, np.zeros(3, np.float32)])
    assert isinstance(e.value.__cause__, ValueError)
    n = Node("Gather", [Value("a"), None], [Value("y")], version=13, name="g")
    with pytest.raises(ExecutionError, match=r"Gather\(float32\[2\], _\) failed"):
        run_node(n, [X, None])


def test_errors_of_our_own_come_through() -> None:
    """A ShapeError of a kernel says what it says."""
    with pytest.raises(ShapeError, match="Reshape"):
        run_node(node("Reshape", [Value("x"), ints(3)], [Value("y")]), [X, np.array([3])])


def test_an_operator_that_nobody_has() -> None:
    """The error comes when the node is run; the message names node, operator and domain."""
    n = Node("Frobnicate", [Value("x")], [Value("y")], domain="com.example", version=2, name="f")
    with pytest.raises(UnsupportedError, match=r"node 'f': operator Frobnicate is of the unknown domain 'com.example'"):
        run_node(n, [X])


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize(("mode", "expected"), [("TF", [1, 2, 2, 2]), ("IDF", [30, 20, 40, 10]),
                                                ("TFIDF", [30, 40, 80, 20])])  # fmt: skip
def test_weights_of_tf_idf_go_by_entry_of_the_pool(mode: str, expected: list[float], strings: bool) -> None:
    """The i-th weight is that of the i-th n-gram of the pool, wherever its count stands."""
    pool: Any = (1, 2, 3, 1, 2)
    x = np.array([[1, 2, 3, 1, 2]], np.int64)
    if strings:
        pool, x = tuple(map(str, pool)), x.astype(str).astype(object)
    node = Node(
        "TfIdfVectorizer", [Value("x", TensorType(x.dtype, x.shape))], [Value("y")],
        {"mode": mode, "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "ngram_counts": (0, 3),
         "ngram_indexes": (3, 1, 0, 2), "pool_strings" if strings else "pool_int64s": pool,
         "weights": (10.0, 20.0, 30.0, 40.0)}, version=9,
    )  # fmt: skip
    np.testing.assert_array_equal(run_node(node, [x])[0], [np.array(expected, np.float32)])
    np.testing.assert_array_equal(run_node(node, [x[0]])[0], np.array(expected, np.float32))


def test_counts_of_tf_idf_that_share_a_column_add_up() -> None:
    """Two n-grams of one index are counted, and weighted, together."""
    x = np.array([1, 2, 2], np.int64)
    node = Node(
        "TfIdfVectorizer", [Value("x", TensorType(x.dtype, x.shape))], [Value("y")],
        {"mode": "TFIDF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0, "ngram_counts": (0,),
         "ngram_indexes": (1, 1), "pool_int64s": (1, 2), "weights": (10.0, 1.0)}, version=9,
    )  # fmt: skip
    np.testing.assert_array_equal(run_node(node, [x])[0], np.array([0, 12], np.float32))


def test_a_view_that_does_not_fit_the_memory_is_an_error_with_its_size() -> None:
    """A result that is a broadcast view is copied for the caller; without the memory for it that is no MemoryError."""
    view = np.broadcast_to(np.zeros(1, np.float32), (1 << 45,))
    with pytest.raises(ExecutionError, match=r"float32\[35184372088832\] takes 140,737,488,355,328 bytes"):
        _own([view])
