"""Rows that do not mix: graphs divided along a symbol against the whole, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.passes.varying_graphs import HIDDEN, SHAPES, Builder, arguments, encoder, soup
from xrt_core.errors import ExecutionError
from xrt_core.host.executor import run_graph
from xrt_core.ir.graph import Graph, Value
from xrt_core.passes.padding import PaddingRefused, pad_graph
from xrt_core.passes.padding.form import ROWS
from xrt_core.passes.padding.rows import divided

SIZES = {"s": 16}


def compare(graph: Graph, rng: np.random.Generator, rows: int, b: int, s: int) -> bool:
    """Assert that parts of so many rows, padded, give what the graph gives; False where the graph itself fails."""
    arrays = arguments(rng, b, s)
    form, found = divided(graph, SHAPES, SIZES, "b", rows)
    if form.why_not({"s": s}) is not None:
        return False
    try:
        want = run_graph(graph, arrays)
    except ExecutionError:
        return False
    parts = [
        form.cut(run_graph(form.graph, form.pad(found.part(arrays, start, rows), {"s": s})), {"s": s})
        for start in range(0, b, rows)
    ]
    for whole, got in zip(want, found.joined(parts, b, rows), strict=True):
        assert (got.dtype, got.shape) == (whole.dtype, whole.shape)
        scale = np.abs(whole[np.isfinite(whole)]).max(initial=1)
        np.testing.assert_allclose(got, whole, rtol=1e-3, atol=1e-4 * scale)
    return True


def try_graphs(make: Callable[[np.random.Generator], Graph], seeds: range) -> int:
    """The number of graphs whose rows do not mix, each compared on several sizes."""
    proven = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        graph = make(rng)
        try:
            divided(graph, SHAPES, SIZES, "b", 1)
        except PaddingRefused:
            continue
        proven += 1
        for rows, b, s in ((1, 3, 16), (2, 5, 7), (3, 4, 1), (4, 2, 11)):
            compare(graph, rng, rows, b, s)
    return proven


def test_rows_of_transformers() -> None:
    """The rows of encoders as exporters write them do not mix."""
    assert try_graphs(encoder, range(4)) == 4


def test_rows_of_random_graphs() -> None:
    """Graphs of random operators are divided without an error in any result, or refused."""
    assert try_graphs(soup, range(1000, 1100)) >= 4


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "count", "least"), [(encoder, 150, 0.9), (soup, 800, 0.05)])
def test_rows_of_many_graphs(make: Callable[[np.random.Generator], Graph], count: int, least: float) -> None:
    """Of many graphs none is wrong for any of four sizes."""
    assert try_graphs(make, range(2000, 2000 + count)) >= least * count


def build(make: Callable[[Builder], Value]) -> Graph:
    g = Builder(np.random.default_rng(0))
    return g.graph([make(g)])


def _count(g: Builder) -> Value:
    """How many rows there are, of int64 and without axes."""
    return g.add("Squeeze", g.size(g.ids, 0))


def _places(g: Builder, axes: int = 3) -> Value:
    """Which row is which, as [b, 1, ...]."""
    at = g.add("Range", g.scalar(0), _count(g), g.scalar(1))
    return g.add("Reshape", at, g.ints(-1, *[1] * (axes - 1)))


def _looked_up(g: Builder, rows: Value) -> Value:
    """mask[rows, 0, 1, 2, ...] for each column, by the indices of GatherND."""
    columns = g.add("Range", g.scalar(0), g.add("Squeeze", g.size(g.ids, 1)), g.scalar(1))
    shape = g.add("Concat", g.size(g.ids, 0), g.size(g.ids, 1), g.ints(1), axis=0)
    pairs = [g.add("Expand", v, shape) for v in (rows, g.add("Reshape", columns, g.ints(1, -1, 1)))]
    return g.add("GatherND", g.mask, g.add("Concat", *pairs, axis=2))


def _own_mask(g: Builder) -> Value:
    mask = g.add("Unsqueeze", _looked_up(g, _places(g)), g.ints(2))
    return g.add("Mul", g.x, g.add("Cast", mask, to=1))


def _own_row(g: Builder) -> Value:
    return g.add("Gather", g.x, g.add("Reshape", _places(g), g.ints(-1)), axis=0)


def _merged(g: Builder) -> Value:
    """A row's place, where rows are merged with another size: that of another row's element."""
    flat = g.add("Reshape", g.add("ReduceMax", g.x, g.ints(1), keepdims=0), g.ints(-1))
    return g.add("Gather", flat, g.add("Reshape", _places(g), g.ints(-1)))


def _narrow(g: Builder) -> Value:
    """A row's place as int8, where that of the 129th is -128."""
    places = g.add("Cast", g.add("Reshape", _places(g), g.ints(-1)), to=3)
    return g.add("Gather", g.x, g.add("Cast", places, to=7))


def _written(g: Builder) -> Value:
    """The first row written anew."""
    update = g.add("Slice", g.x, g.ints(0), g.ints(1), g.ints(0))
    return g.add("ScatterND", g.x, g.add("Reshape", g.ints(0), g.ints(1, 1)), update)


def _recurrent(g: Builder) -> Value:
    x = g.add("Transpose", g.x, perm=(1, 0, 2))
    _, last = g.add("GRU", x, g.weight(1, 9, HIDDEN), g.weight(1, 9, 3), outputs=2, hidden_size=3)
    return last


@pytest.mark.parametrize(
    "make",
    [
        lambda g: g.add("Softmax", g.add("MatMul", g.x, g.weight(HIDDEN, 3)), axis=1),
        lambda g: g.add("Reshape", g.x, g.ints(-1, HIDDEN)),
        lambda g: g.add("ReduceMean", g.x, g.ints(1), keepdims=0),
        lambda g: g.add("Expand", g.number(2.0), g.add("Shape", g.x)),
        lambda g: g.add("Transpose", g.add("Slice", g.x, g.ints(0), g.ints(1), g.ints(1)), perm=(1, 0, 2)),
        _own_mask,
        _own_row,
        _recurrent,
    ],
)
def test_what_is_divided(make: Callable[[Builder], Value]) -> None:
    """Graphs that compute each row from the same row give the same by parts."""
    rng, graph = np.random.default_rng(1), build(make)
    for rows, b, s in ((1, 4, 16), (2, 5, 3), (4, 3, 5)):
        assert compare(graph, rng, rows, b, s)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda g: g.add("ReduceMean", g.x, g.ints(0)), "rows might mix"),
        (lambda g: g.add("ReduceSum", g.x, g.ints(0), keepdims=0), "rows might mix"),
        (lambda g: g.add("Softmax", g.x, axis=0), "rows might mix"),
        (lambda g: g.add("CumSum", g.x, g.scalar(0)), "rows might mix"),
        (lambda g: g.add("Slice", g.x, g.ints(-1), g.ints(-(1 << 62)), g.ints(0), g.ints(-1)), "how many rows"),
        (lambda g: g.add("Add", g.x, g.add("Slice", g.x, g.ints(0), g.ints(1), g.ints(0))), "rows might mix"),
        (lambda g: g.add("Slice", g.x, g.ints(1), g.ints(9999), g.ints(0)), "number.of.rows"),
        (lambda g: g.add("Concat", g.x, g.x, axis=0), "2\\*number.of.rows|rows might mix"),
        (lambda g: g.add("Div", g.x, g.add("Cast", _count(g), to=1)), "how many rows there are"),
        (lambda g: g.add("Add", g.ids, _count(g)), "how many rows there are"),
        # of few rows the same, of many another
        (lambda g: g.add("Add", g.ids, g.add("Div", _count(g), g.scalar(100))), "how many rows there are"),
        (lambda g: g.add("Add", g.x, g.add("Cast", _places(g), to=1)), "which row is which"),
        (lambda g: g.add("Add", g.ids, _places(g, 2)), "which row is which"),
        (_places, "which row is which"),
        (lambda g: _looked_up(g, g.add("Sub", g.add("Sub", _count(g), g.scalar(1)), _places(g))), "how many rows"),
        (lambda g: g.add("Gather", g.weight(9, 4), g.add("Reshape", _places(g), g.ints(-1))), "which row is which"),
        (_merged, "which row is which"),
        (_narrow, "which row is which"),
        (_written, "no rule"),
        (lambda g: g.add("Add", g.x, g.add("RandomNormal", shape=(HIDDEN,))), "other random numbers"),
        (lambda g: g.add("DynamicQuantizeLinear", g.x, outputs=3)[0], "rows might mix"),
        (lambda g: g.add("ReduceMax", g.x, g.ints(0, 1, 2)), "rows might mix"),
        (lambda g: g.add("Squeeze", g.add("Shape", g.x)), "how many rows there are|no result has rows"),
        (lambda g: g.add("TopK", g.x, g.ints(2), axis=2, outputs=2)[0], "no rule"),
        (lambda g: g.weight(3, 4), "no result has rows"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[Builder], Value], reason: str) -> None:
    """What might read other rows, or how many there are, is refused."""
    graph = build(make)
    for rows in (1, 4):
        with pytest.raises(PaddingRefused, match=reason):
            divided(graph, SHAPES, SIZES, "b", rows)


def test_shapes_in_which_rows_do_not_lie_along_one_axis() -> None:
    """A symbol that is part of two axes of an input, or a part of one, counts no rows."""
    graph = build(lambda g: g.add("Relu", g.x))
    for shape in (("b", "b", HIDDEN), ("2*b", "s", HIDDEN)):
        with pytest.raises(PaddingRefused, match="is no number of rows along one axis"):
            divided(graph, (shape, *SHAPES[1:]), SIZES, "b", 2)
    with pytest.raises(PaddingRefused, match="has a meaning of its own"):
        pad_graph(graph, [(ROWS, 4, HIDDEN), (ROWS, 4), (ROWS, 4)], {ROWS: 4})


def test_a_run_is_worth_its_beginning() -> None:
    """The fewer elements a row has, the more rows a run gets."""
    form, rows = divided(encoder(np.random.default_rng(5)), SHAPES, SIZES, "b", 2)
    assert form.buckets == SIZES
    counts = [rows.worth({"s": s}) for s in (1, 16, 1024, 1 << 22)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[-1] == 1
