"""Synthesized inputs meet the value constraints of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_graphs import graphs
from tests.verify.planted import value
from tests.verify.test_isolate import static
from xrt_core.engine.contract import Function
from xrt_core.errors import InputError, XRTError
from xrt_core.ir.function import Parameter
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.kernels import find_kernel
from xrt_core.runtime.arrays import ranges_of
from xrt_core.testing.functions import forms_of, node
from xrt_core.testing.node_cases import all_cases
from xrt_core.verify.inputs import KINDS, NONFINITE, are_beyond, synthesize_inputs
from xrt_core.verify.reference import run_host
from xrt_core.verify.value_ranges import ValueConstraint, infer_constraints

I64, BOOL = np.int64, np.bool_


def function(inputs: Sequence[Value], nodes: Sequence[Node], *outputs: Value) -> Function:
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="f"))


def through(op_types: str, last: Node | None = None, dtype: Any = np.float32, **attributes: Any) -> Function:
    """x through a chain of operators of one input."""
    x = here = value("x", (3, 8), dtype)
    nodes = []
    for i, op in enumerate(op_types.split()):
        there = value(f"v{i}", (3, 8), dtype)
        nodes.append(node(op, [here], [there], **attributes))
        here = there
    return function([x], nodes, here)


def scalar(x: float, dtype: Any = np.float32) -> Value:
    return Value.constant(np.array(x, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chain",
    [
        "Log", "Sqrt", "Identity Log", "Acos", "Asin", "Acosh", "Atanh", "Reciprocal", "Neg Sqrt", "Exp Exp",
        "Sqrt Log", "Abs Log", "Neg Neg Acosh", "Sqrt Reciprocal",
    ],
)  # fmt: skip
def test_domains_of_functions(chain: str, kind: Any) -> None:
    """Whatever stands before a function with a domain, its argument lies in it, in float32 and float16."""
    for dtype in (np.float32, np.float16):
        f = through(chain, dtype=dtype)
        for seed in range(3):
            results = run_host(f, synthesize_inputs(f, kind, seed), wide=True)[0]
            assert np.isfinite(results[0].astype(np.float64)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_zero_divisors(kind: Any) -> None:
    """Neither integers nor floats are divided by zero, also where the divisor goes through other shapes first."""
    for dtype in (np.float32, np.int64, np.uint8):
        x, y = value("x", (4, 16), dtype), value("y", (64,), dtype)
        shaped, out = value("shaped", (4, 16), dtype), value("out", (4, 16), dtype)
        nodes = [node("Reshape", [y, Value.constant(np.array([4, 16]))], [shaped]), node("Div", [x, shaped], [out])]
        f = function([x, y], nodes, out)
        assert (synthesize_inputs(f, kind)[1] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_in_range_through_arithmetic(kind: Any) -> None:
    """Ids that are offset, cast and reshaped before a Gather stay in the table, and use more than one row of it."""
    table = Value.constant(np.arange(20, dtype=np.float32).reshape(10, 2))
    ids = value("ids", (32,), np.int32)
    wide, off, flat = value("w", (32,), I64), value("o", (32,), I64), value("f", (4, 8), I64)
    out = value("y", (4, 8, 2))
    nodes = [
        node("Cast", [ids], [wide], to=7), node("Add", [wide, scalar(-3, I64)], [off]),
        node("Reshape", [off, Value.constant(np.array([4, 8]))], [flat]), node("Gather", [table, flat], [out], axis=0),
    ]  # fmt: skip
    f = function([ids], nodes, out)
    made = synthesize_inputs(f, kind)[0]
    assert infer_constraints(f.body)[ids] == ValueConstraint(3, 12, whole=True)
    assert made.min() >= 3
    assert made.max() <= 12
    assert len(np.unique(made)) > 3


def test_rows_of_indices_are_distinct() -> None:
    """ScatterND gets every row once, each column within its axis; ScatterElements no index twice along the axis."""
    x, index, updates, out = value("x", (5, 3)), value("i", (12, 2), I64), value("u", (12,)), value("y", (5, 3))
    f = function([x, index, updates], [node("ScatterND", [x, index, updates], [out])], out)
    rows = synthesize_inputs(f)[1]
    assert len(np.unique(rows, axis=0)) == 12
    assert (rows >= 0).all()
    assert (rows < [5, 3]).all()

    x, index, updates, out = value("x", (6, 3)), value("i", (4, 3), I64), value("u", (4, 3)), value("y", (6, 3))
    f = function([x, index, updates], [node("ScatterElements", [x, index, updates], [out], axis=0)], out)
    made = synthesize_inputs(f)[1]
    assert all(len(set(column)) == 4 for column in made.T)
    assert made.max() < 6


def test_masks_mask_some_and_never_all() -> None:
    """A boolean mask, and an integer one that becomes floats, have both truths in each row."""
    mask, ids = value("mask", (5, 7), BOOL), value("ids", (5, 7), I64)
    scores, floats, less = value("s", (5, 7)), value("fl", (5, 7)), value("l", (5, 7))
    picked, out = value("p", (5, 7)), value("y", (5, 7))
    nodes = [
        node("Where", [mask, scores, scalar(-np.inf)], [picked]), node("Softmax", [picked], [out], axis=-1),
        node("Cast", [ids], [floats], to=1), node("Sub", [scalar(1.0), floats], [less]),
    ]  # fmt: skip
    f = function([mask, ids, scores], nodes, out, less)
    for kind in KINDS:
        made = synthesize_inputs(f, kind)
        assert made[0].any(axis=-1).all()
        assert not made[0].all(axis=-1).any()
        assert np.isfinite(run_host(f, made)[0][0]).all()
    assert set(np.unique(synthesize_inputs(f)[1])) == {0, 1}


def test_lengths_of_sequences() -> None:
    """An LSTM's sequences have one step at least and no more than there are."""
    x, lengths, out = value("x", (6, 4, 3)), value("n", (4,), np.int32), value("y", (6, 1, 4, 2))
    w, r = (Value.constant(np.ones((1, 8, n), np.float32) / 4) for n in (3, 2))
    f = function([x, lengths], [node("LSTM", [x, w, r, None, lengths], [out], hidden_size=2)], out)
    for kind in KINDS:
        made = synthesize_inputs(f, kind)[1]
        assert made.min() >= 1
        assert made.max() <= 6


def test_quantised_numbers_take_their_whole_type() -> None:
    """Eight bits that are only dequantised are used to the ends; scales are positive."""
    q, scale, zero, out = value("q", (40, 40), np.int8), value("s", ()), value("z", (), np.int8), value("y", (40, 40))
    f = function([q, scale, zero], [node("DequantizeLinear", [q, scale, zero], [out])], out)
    made = synthesize_inputs(f)
    assert made[0].min() < -100
    assert made[0].max() > 100
    assert made[1] > 0


def test_kinds_differ_and_ties_tie() -> None:
    """ties has few different numbers and zeros among them, large is larger, gentle stays near one."""
    f = through("Tanh")
    arrays = {kind: synthesize_inputs(f, kind)[0] for kind in KINDS}
    assert len(np.unique(arrays["ties"])) < 8
    assert (arrays["ties"] == 0).any()
    assert np.abs(arrays["large"]).max() > 2 * np.abs(arrays["normal"]).max()
    assert arrays["gentle"].min() >= 0.5
    assert arrays["gentle"].max() <= 1.5
    with pytest.raises(InputError, match="no values"):
        synthesize_inputs(Function.from_graph(Graph([s := value("s", (2,), object)], [s], [], opsets={"": 21})))


def test_nan_and_infinities_reach_every_float_that_is_no_index() -> None:
    """A few of each, half of the elements, or one; in front of a Log and an Exp as well, whose numbers are bounded."""
    for op in ("Relu", "Log", "Exp"):
        kinds = {kind: synthesize_inputs(through(op), kind)[0] for kind in NONFINITE}
        assert 1 <= (~np.isfinite(kinds["nonfinite"])).sum() <= max(kinds["nonfinite"].size // 8, 1)
        assert np.isnan(kinds["nan"]).sum() == (kinds["nan"].size + 1) // 2
        assert np.isinf(kinds["infinite"]).sum() == (kinds["infinite"].size + 1) // 2
        assert np.isinf(kinds["lone"]).sum() == 1
        assert np.isfinite(kinds["other lone"]).all()  # it is the first param
        assert np.isfinite(kinds["lone"][..., -1]).all()  # the end of each row


@settings(max_examples=60, deadline=None)
@given(graphs(control=False, maximum=14), st.sampled_from(KINDS))
def test_random_graphs_give_numbers(drawn: Any, kind: Any) -> None:
    """On random graphs, whose operators all have results everywhere, synthesized inputs give numbers only."""
    f = static(drawn)
    if f is None:
        return
    inputs = synthesize_inputs(f, kind)
    assert [(x.dtype, x.shape) for x in inputs] == [(p.dtype, p.shape) for p in f.params]
    for r in run_host(f, inputs, wide=True)[0]:
        assert np.isfinite(r).all()


@pytest.mark.slow
def test_every_operator_of_the_standard() -> None:
    """Wherever the standard's own example of a node gives numbers, the synthesized inputs do so too, and run."""
    bad = []
    count = 0
    for case in all_cases()[::5]:
        kernel = find_kernel(case.node.domain, case.node.op_type)
        if not case.is_numeric or kernel is None or kernel.why_dynamic(case.node):
            continue
        try:
            f, arrays = next(iter(forms_of(case, "host")))
        except XRTError:
            continue
        if not f.params:
            continue
        wanted = all(_is_finite(r) for r in run_host(f, arrays, wide=True)[0])
        count += 1
        for kind in ("normal", "gentle"):
            try:
                results = run_host(f, synthesize_inputs(f, kind), wide=True)[0]  # type: ignore[arg-type]
            except XRTError as e:
                bad.append(f"{case.name} {kind}: {e}")
                continue
            if wanted and not all(_is_finite(r) for r in results):
                bad.append(f"{case.name} {kind}: not finite")
    assert not bad, "\n".join(bad)
    assert count > 200


def _is_finite(x: np.ndarray) -> bool:
    return bool(np.isfinite(x if x.dtype.kind == "c" else x.astype(np.float64)).all())


def test_ranges_of_arrays() -> None:
    """The ends of floating arrays with finite numbers, and nothing of others."""
    f = np.array([-3, 0.5, 70], np.float32)
    odd = [np.array([1, np.nan], np.float32), np.zeros(0, np.float32), np.arange(3), [1.0], None]
    assert ranges_of([f, f.astype(ml_dtypes.bfloat16), *odd]) == ((-3.0, 70.0), (-3.0, 70.0), *[None] * len(odd))
    assert ranges_of([f, np.broadcast_to(f[:1], 1 << 23)]) == (None, None)  # it would take too long
    assert are_beyond([None, (-3.0, 70.0)])
    assert not are_beyond([None, (-3.0, 2.0)])


def test_inputs_in_a_range() -> None:
    """They are spread from one end to the other; what has constraints of its own keeps them."""
    x, y, z, w = (value(n, (64,)) for n in "xyzw")
    f = function([x, z], [node("Neg", [x], [y]), node("Sqrt", [z], [w])], y, w)
    spread, root = synthesize_inputs(f, ranges=[(-7.0, 90.0), (-7.0, 90.0)])
    assert (spread.min(), spread.max()) == (-7, 90)
    assert len(np.unique(spread)) > 32
    np.testing.assert_array_equal(root, synthesize_inputs(f)[1])


def test_known_elements_are_what_they_are() -> None:
    """Sizes that a function gets as numbers; those of which nothing is known are made up."""
    x, shape, y = value("x", (4, 1)), value("shape", (2,), I64), value("y", (4, 3))
    f = function([x, shape], [node("Expand", [x, shape], [y])], y)
    f = Function("f", [f.params[0], Parameter("shape", np.dtype(I64), (2,), (4, 3))], f.returns, f.body)
    for kind in KINDS:
        assert synthesize_inputs(f, kind)[1].tolist() == [4, 3]
    f = Function("f", [f.params[0], Parameter("shape", np.dtype(I64), (2,), (None, 3))], f.returns, f.body)
    assert synthesize_inputs(f)[1].tolist()[1] == 3
