"""Numbers that follow from sizes, computed from the shapes of a graph's inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.host_run import run_graph
from tests.random_graphs import F32, graph_of
from xrt_core.ir.graph import Value
from xrt_core.ir.symbols import Expr, expression, least
from xrt_core.ir.types import TensorType
from xrt_core.passes.size_nodes import SizeNodes

TEXTS = ("n", "m", "3*n*m - 2", "(n + 5)//4", "(n - 9)//4", "2*(m//3)*n", "7", "0")


def elements(*items: Expr | None, shape: tuple[int, ...] | None = None) -> np.ndarray:
    made = np.empty(len(items), object)
    made[:] = items
    return made if shape is None else made.reshape(shape)


def inputs() -> list[Value]:
    return [Value("x", TensorType(F32, (2, "n"))), Value("y", TensorType(F32, ("m", "n", 4)))]


@pytest.mark.parametrize(("shape", "dtype"), [((), np.int64), ((3,), np.int64), ((3, 1), np.int32), ((2, 2), np.bool_)])
def test_they_are_what_the_expressions_are(shape: tuple[int, ...], dtype: Any) -> None:
    """For sizes of any kind, also where a quotient of a negative number is rounded down."""
    known = [expression(t) for t in TEXTS]
    assert all(known)
    known.append(least(Expr.of("n"), Expr.of("m") + 3))
    count = int(np.prod(shape, dtype=int))
    for first in range(0, len(known), max(count, 1)):
        items = [known[(first + i) % len(known)] for i in range(count)]
        given = inputs()
        sizes = SizeNodes(given, 17)
        made = sizes.value(Value("v", TensorType(np.dtype(dtype), shape)), elements(*items, shape=shape))
        assert made is not None
        assert made.type == TensorType(np.dtype(dtype), shape)
        graph = graph_of(given, [made], sizes.nodes)
        for n, m in ((1, 1), (8, 2), (13, 30)):
            (got,) = run_graph(graph, [np.zeros((2, n), np.float32), np.zeros((m, n, 4), np.float32)])
            want = np.array([e.evaluate({"n": n, "m": m}) for e in items if e is not None]).reshape(shape)
            np.testing.assert_array_equal(got, want.astype(dtype))
            assert got.dtype == dtype


def test_what_they_do_not_make() -> None:
    """Numbers of which one is not known, symbols that no input has, older opsets."""
    v = Value("v", TensorType(np.dtype(np.int64), (2,)))
    sizes = SizeNodes(inputs(), 17)
    assert sizes.value(v, None) is None
    assert sizes.value(v, elements(Expr.of("n"), None)) is None
    assert sizes.value(v, elements(Expr.of("n"), Expr.of("k"))) is None
    assert sizes.value(v, elements(Expr.of("n"))) is None, "of another shape"
    assert SizeNodes(inputs(), 12).value(v, elements(Expr.of("n"), Expr.of("m"))) is None
    assert not sizes.nodes


def test_each_is_made_once() -> None:
    """What several numbers have in common is computed once."""
    sizes = SizeNodes(inputs(), 17)
    v = Value("v", TensorType(np.dtype(np.int64), (2,)))
    for _ in range(2):
        assert sizes.value(v, elements(Expr.of("n") * 2, Expr.of("n") * 2 + 1)) is not None
    assert [n.op_type for n in sizes.nodes].count("Shape") == 1
    assert [n.op_type for n in sizes.nodes].count("Mul") == 2  # 2 * n as a number, and as a term of another
