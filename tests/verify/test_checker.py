"""The checker: right engines pass on hard functions, wrong ones don't; node tests and models on the real engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance import dev_models
from tests.verify.planted import Planted, candidate, deep, value
from xrt_core.engine import engines
from xrt_core.engine.contract import Executable, Function
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.kernels import find_kernel, static_inputs
from xrt_core.testing.functions import forms_of, node
from xrt_core.testing.node_cases import all_cases
from xrt_core.verify.checker import ResultChecker, Rounding
from xrt_core.verify.compare import tolerance_for
from xrt_core.verify.evaluate import EvaluationSettings, evaluate
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import bisect_function
from xrt_core.verify.reference import run_host, wide_dtype

CHECK = EvaluationSettings(tune=False, max_compiles=0)
F32, F64 = np.float32, np.float64


def function(inputs: Sequence[Value], nodes: Sequence[Node], *outputs: Value) -> Function:
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="f"))


class Call(Executable):
    """Runs a Python function."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        return [np.asarray(r) for r in self.call(*inputs)]


@pytest.mark.parametrize("given", [None, 3])
def test_what_is_no_sequence_of_results(given: Any) -> None:
    """It is the reason, and no error of the checker."""
    f = deep(2)

    class Gives(Executable):
        def run(self, *args: Any) -> Any:
            return given

    reason, results = ResultChecker(f, synthesize_inputs(f)).run(Gives())
    assert reason.startswith(f"it returned a {type(given).__name__}")
    assert not results


def test_the_reference_is_wider() -> None:
    """Floats of a float32 function are computed in float64, of a float16 one in float32; casts stay what they are."""
    f = deep(20)
    inputs = synthesize_inputs(f)
    own, wide = run_host(f, inputs)[0][0], run_host(f, inputs, wide=True)[0][0]
    assert (own.dtype, wide.dtype) == (np.dtype(F32), np.dtype(F64))
    assert 0 < np.abs(own - wide).max() < 1e-5

    x, h, y = value("x", (64,)), value("h", (64,), np.float16), value("y", (64,))
    f = function([x], [node("Cast", [x], [h], to=10), node("Cast", [h], [y], to=1)], y)
    inputs = synthesize_inputs(f)
    np.testing.assert_array_equal(run_host(f, inputs, wide=True)[0][0], inputs[0].astype(np.float16).astype(F64))
    half = value("half", (4,), np.float16)
    assert wide_dtype(Graph([half], [h], [node("Tanh", [half], [h])], opsets={"": 21})) == np.float32


def test_what_rounds_and_what_jumps() -> None:
    """A comparison of numbers that came in jumps nowhere; one of rounded ones may, a Range of floats included."""
    x, flag, start, made = value("x", (64,)), value("flag", (64,), np.bool_), value("s", ()), value("made", (64,))
    zero, count = Value.constant(np.zeros((), F32)), Value.constant(np.array(64, F32))
    floor, step = value("floor", (64,)), Value.constant(np.array(1, F32))
    plain = function([x], [node("Floor", [x], [floor]), node("Equal", [floor, zero], [flag])], flag)
    rounded = function([x], [node("Exp", [x], [floor]), node("Equal", [floor, zero], [flag])], flag)
    ranged = function([start], [node("Range", [start, count, step], [made]), node("Equal", [made, zero], [flag])], flag)

    assert [f.body.outputs[0] in Rounding(f.body).jumps for f in (plain, rounded, ranged)] == [False, True, True]


def test_cancellation_is_right() -> None:
    """(x + 1e4) - 1e4 in another order of additions: off by far more than the table allows, and right."""
    x, a, y = value("x", (256,)), value("a", (256,)), value("y", (256,))
    big = Value.constant(np.array(1e4, F32))
    f = function([x], [node("Add", [x, big], [a]), node("Sub", [a, big], [y])], y)
    checker = ResultChecker(f, synthesize_inputs(f))

    exact = checker.check(Call(lambda x: [x.copy()]), {})  # a compiler that simplifies
    as_host = checker.check(Call(lambda x: [(x + F32(1e4)) - F32(1e4)]), {})
    wrong = checker.check(Call(lambda x: [x * F32(1.05)]), {})

    assert checker.check_results([checker.inputs[0].copy()], {}).is_right
    assert not checker.check_results([checker.inputs[0] * 2], {}).is_right
    assert exact.is_right
    assert as_host.is_right, as_host.reason
    assert not wrong.is_right
    # in its own precision, off by a rounding, in a wider precision; as it is once more, and rounded otherwise
    assert checker.host_runs == 3 + 8


def spread(rows: np.ndarray) -> tuple[ResultChecker, np.ndarray]:
    """The standard deviation of rows, by E[x^2] - E[x]^2 as LayerNormalization is written out, and the means."""
    x, m, s, ms, sm, v, e, y = (
        value(n, rows.shape if n in "xs" else (len(rows), 1)) for n in ("x", "m", "s", "ms", "sm", "v", "e", "y")
    )
    axes, epsilon = Value.constant(np.array([1], np.int64)), Value.constant(np.array(1e-5, F32))
    nodes = [
        node("ReduceMean", [x, axes], [m]), node("Mul", [x, x], [s]), node("ReduceMean", [s, axes], [ms]),
        node("Mul", [m, m], [sm]), node("Sub", [ms, sm], [v]), node("Add", [v, epsilon], [e]), node("Sqrt", [e], [y]),
    ]  # fmt: skip
    return ResultChecker(function([x], nodes, y), [rows]), rows.mean(axis=1, keepdims=True)


def test_what_cancels_for_everybody_else_is_right() -> None:
    """Rows of equal whole numbers, on which the host is exact by luck: a variance off by what one rounding of a mean
    makes of it is right, and one that is off by more, or on rows that vary, is wrong."""
    checker, mean = spread(np.full((6, 5), 3, F32))
    (exact,) = checker.expected()
    np.testing.assert_allclose(exact, np.sqrt(1e-5), rtol=1e-6)
    one_rounding = mean.astype(F64) ** 2 * 2.0**-24
    off = np.sqrt(1e-5 + one_rounding).astype(F32)
    assert np.abs(off / exact - 1).max() > 0.02
    assert checker.check_results([off], {}).is_right
    assert not checker.check_results([np.sqrt(1e-5 + 100 * one_rounding).astype(F32)], {}).is_right
    assert not checker.check_results([np.zeros_like(exact)], {}).is_right

    alone, _ = spread(np.full((1, 120), -1, F32))  # one result, of which a run or two may be exact by luck as well
    assert alone.check_results([np.full((1, 1), 1 / 317.2933, F32)], {}).is_right

    varied, _ = spread(np.arange(30, dtype=F32).reshape(6, 5))
    (want,) = varied.expected()
    assert varied.check_results([want * F32(1 + 1e-6)], {}).is_right
    assert not varied.check_results([want * F32(1 + 1e-3)], {}).is_right


@pytest.mark.parametrize("operator", ["RNN", "GRU", "LSTM"])
def test_states_are_rounded_at_the_scale_of_one(operator: str) -> None:
    """A recurrent state that is tiny may be off by a rounding step of 1, and by no hundredth of itself more."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[operator]
    x, w, r = value("x", (2, 1, 2)), value("w", (1, 4 * gates, 2)), value("r", (1, 4 * gates, 4))
    y = value("y", (1, 1, 4))
    f = function([x, w, r], [node(operator, [x, w, r], [None, y], hidden_size=4)], y)
    checker = ResultChecker(f, [np.ones((2, 1, 2), F32), np.full((1, 4 * gates, 2), 1e-5, F32),
                                np.full((1, 4 * gates, 4), 0.1, F32)])  # fmt: skip
    (want,) = checker.expected()
    assert checker.check_results([want + F32(2**-24)], {}).is_right
    assert not checker.check_results([want + F32(1e-5)], {}).is_right


def test_what_is_left_of_constant_rows_less_their_mean_has_the_rounding_of_a_long_sum() -> None:
    """A wave of one value less its mean is 0 by the host, whose sum is exact by luck; one that is added in eight lanes
    is off by many steps of the value, and more than that is wrong."""
    x, mean, y = value("x", (2, 70_000)), value("mean", (2, 1)), value("y", (2, 70_000))
    f = function([x], [node("ReduceMean", [x], [mean], axes=[-1]), node("Sub", [x, mean], [y])], y)
    wave = np.repeat(np.array([[0.7], [5.1]], F32), 70_000, axis=1)
    checker = ResultChecker(f, [wave])

    def in_lanes(x: np.ndarray) -> list[np.ndarray]:
        lanes = np.add.accumulate(x.reshape(2, -1, 8), axis=1, dtype=F32)[:, -1]
        return [x - lanes.sum(-1, keepdims=True, dtype=F32) / F32(x.shape[1])]

    (off,) = in_lanes(wave)
    assert np.abs(off).max() > 1e-5
    assert checker.check(Call(in_lanes), {}).is_right
    assert not checker.check(Call(lambda x: [r + F32(1e-2) for r in in_lanes(x)]), {}).is_right


def layers(dtype: Any, seed: int, depth: int) -> Function:
    """Dense layers and a Tanh between them, in one dtype."""
    rng = np.random.default_rng(seed)
    x = here = value("x", (4, 24), dtype)
    nodes: list[Node] = []
    for k in range(depth):
        m, t = value(f"m{k}", (4, 24), dtype), value(f"t{k}", (4, 24), dtype)
        w = Value.constant((rng.standard_normal((24, 24)) / 5).astype(dtype))
        nodes += [node("MatMul", [here, w], [m]), node("Tanh", [m], [t])]
        here = t
    return function([x], nodes, here)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([F32, F64, np.float16, ml_dtypes.bfloat16]),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(0, 95),
    st.sampled_from([-1.0, 1.0]),
    st.floats(1.02, 50.0),
    st.floats(0.0, 0.95),
)
def test_errors_beyond_the_range_are_found(
    dtype: Any, seed: int, depth: int, at: int, sign: float, beyond: float, below: float
) -> None:
    """One element that is off by more than what the docs say a check may let through is found, one that is off by less
    than the bound less the host's own error is not."""
    f = layers(dtype, seed, depth)
    checker = ResultChecker(f, synthesize_inputs(f, seed=seed), seed)
    host = checker.expected()[0].astype(F64).ravel()
    exact = checker.widened()[0].astype(F64).ravel()
    spread = np.abs(checker._perturbed()[0].astype(F64).ravel() - host)
    wider = np.abs(checker._perturbed()[0].astype(F64).ravel() - exact)
    row = tolerance_for(np.dtype(dtype), [], {})
    largest = max(np.abs(exact).max(), np.abs(host).max())
    off = np.abs(host - exact)
    otherwise = np.abs(list(checker._rounded())[-1][0].astype(F64).ravel() - exact)
    moved = max(np.quantile(s, 0.95) + s[at] for s in (spread, wider, otherwise))
    # an element that is off by k bounds may be larger by that, and so may its bound
    most = (row.relative * np.abs(exact[at]) + row.absolute * largest + 8 * moved) / (1 - row.relative) + off[at]
    least = row.relative * np.abs(exact[at]) + row.absolute * np.abs(exact).max()

    def call(error: float) -> Call:
        results = host.copy()
        results[at] = exact[at] + sign * error
        return Call(lambda x: [results.reshape(4, 24).astype(dtype)])

    step = float(ml_dtypes.finfo(dtype).eps) * (abs(exact[at]) + most)
    assert not checker.check(call(most * beyond + step), {}).is_right
    assert checker.check(call(least * below - step), {}).is_right


def test_a_logistic_function_is_rounded_at_the_scale_of_its_range() -> None:
    """1/2 plus a polynomial is off by a rounding step of 1/2, also where all results are tiny; more is wrong, and
    an Exp in the same place has no such excuse."""
    x, h, y = value("x", (4, 64)), value("h", (4, 64)), value("y", (64, 4))
    inputs = [np.linspace(-16, -13, 256, dtype=F32).reshape(4, 64)]

    def rounded(x: np.ndarray) -> np.ndarray:
        return (np.rint((1 / (1 + np.exp(-x.astype(F64)))).T * 2**24) * 2.0**-24).astype(F32)

    def made(op_type: str) -> Function:
        return function([x], [node(op_type, [x], [h]), node("Transpose", [h], [y], perm=[1, 0])], y)

    sigmoid = ResultChecker(made("Sigmoid"), inputs)
    assert sigmoid.check(Call(lambda x: [rounded(x)]), {}).is_right
    assert not sigmoid.check(Call(lambda x: [rounded(x) + F32(1e-5)]), {}).is_right
    assert not ResultChecker(made("Exp"), inputs).check(Call(lambda x: [rounded(x)]), {}).is_right


@pytest.mark.parametrize("op_type", ["ReduceSum", "GlobalLpPool"])
def test_a_long_sum_may_be_made_one_after_the_other(op_type: str) -> None:
    """What adds term by term in float32 passes, further on too; ten times its error does not, nor does as much error
    where little is summed."""
    x, s, y = value("x", (1, 1, 40_000)), value("s", (1, 1, 1)), value("y", (1, 1, 1))
    attributes = {"p": 1} if op_type == "GlobalLpPool" else {}
    f = function([x], [node(op_type, [x], [s], **attributes), node("Sqrt", [s], [y])], y)
    inputs = [np.resize(np.array([0.1, 0.7, 1.3], F32), (1, 1, 40_000))]

    def in_sequence(x: np.ndarray, times: float = 1.0) -> np.ndarray:
        exact = x.astype(F64).sum()
        return np.array([[[exact + times * (float(np.cumsum(x)[-1]) - exact)]]])

    checker = ResultChecker(f, inputs)
    off = abs(in_sequence(inputs[0]).item() / inputs[0].astype(F64).sum() - 1)
    assert off > 5e-5
    assert checker.check(Call(lambda x: [np.sqrt(in_sequence(x)).astype(F32)]), {}).is_right
    assert not checker.check(Call(lambda x: [np.sqrt(in_sequence(x, 10.0)).astype(F32)]), {}).is_right

    h, z = value("h", (1, 1, 40_000)), value("z", (1, 1, 40_000))
    short = function([x], [node("Sqrt", [x], [h]), node("Mul", [h, h], [z])], z)
    assert not ResultChecker(short, inputs).check(Call(lambda x: [x * F32(1 + off)]), {}).is_right


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("is_in_body", [False, True])
def test_places_between_pixels_are_rounded(mode: str, is_in_body: bool) -> None:
    """Libraries compute them in float32, which moves what is interpolated by more than sums are rounded, and with it
    what is computed from that, within a body of control flow too; a place that is off by a tenth of a pixel is none."""
    x, h, y = value("x", (1, 1, 237, 4), F32), value("h", (1, 1, 320, 4), F32), value("y", (1, 1, 320, 4), F32)
    sizes = Value.constant(np.array([1, 1, 320, 4]), "sizes")
    nodes = [node("Resize", [x, None, None, sizes], [h], mode=mode), node("Sinh", [h], [y])]  # type: ignore[list-item]
    if is_in_body:
        c, z = value("c", (), np.bool_), value("z", (1, 1, 320, 4), F32)
        bodies = {
            "then_branch": Graph([], [y], nodes, opsets={"": 21}),
            "else_branch": Graph([], [x], [], opsets={"": 21}),
        }
        f = function([x, c], [node("If", [c], [z], **bodies)], z)
    else:
        f = function([x], nodes, y)

    def engine(off: float) -> Call:
        def call(a: np.ndarray, *condition: np.ndarray) -> Any:
            place = (np.arange(320, dtype=F32) + F32(0.5)) * F32(237 / 320) - F32(0.5) + F32(off)
            first = np.floor(place)
            taps, distances = zip(*((first + k, place - (first + k)) for k in range(-1, 3)), strict=True)
            d = np.abs(np.stack(distances))
            if mode == "linear":
                w = np.maximum(1 - d, 0)
            else:
                near, far = (1.25 * d - 2.25) * d * d + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3
                w = np.where(d <= 1, near, np.where(d < 2, far, 0))
            picked = a[:, :, np.clip(np.stack(taps), 0, 236).astype(int)]
            return (np.sinh((picked * w[None, None, :, :, None].astype(F32)).sum(axis=2)),)

        return Call(call)

    checker = ResultChecker(f, [*synthesize_inputs(f)[:1], *([np.array(True)] if is_in_body else [])])
    assert checker.check(engine(0.0), {}).is_right
    assert not checker.check(engine(0.1), {}).is_right
    assert not checker.check(engine(1e-3), {}).is_right


@pytest.mark.parametrize("op", ["InstanceNormalization", "GroupNormalization", "LayerNormalization"])
def test_means_of_equal_elements_may_be_summed_in_turn(op: str) -> None:
    """They are rounded the same way again and again, and what is normalised is a few of the resulting steps over a
    tiny deviation; a mean that is off by a thousandth is wrong."""
    count = 4096
    shape = (1, 4, count)
    x, h, y = (value(n, shape, F32) for n in "xhy")
    length = count if op == "LayerNormalization" else 4
    scale, bias = (Value.constant(np.full(length, c, F32)) for c in (1.5, 0.25))
    attributes = {"num_groups": 4} if op == "GroupNormalization" else {}
    f = function([x], [node(op, [x, scale, bias], [h], **attributes), node("Sinh", [h], [y])], y)
    row = np.repeat(np.array([[0.3], [0.7], [1.1], [5.3]], F32), count, axis=1)[None]

    def engine(off: float) -> Call:
        def call(a: np.ndarray) -> Any:
            mean = np.cumsum(a, axis=2, dtype=F32)[:, :, -1:] / F32(count) * F32(1 + off)
            centred = a - mean
            var = (centred * centred).mean(axis=2, keepdims=True)
            return (np.sinh(centred / np.sqrt(var + F32(1e-5)) * F32(1.5) + F32(0.25)),)

        return Call(call)

    checker = ResultChecker(f, [row])
    assert checker.check(engine(0.0), {}).is_right
    assert not checker.check(engine(1e-3), {}).is_right


def test_sums_of_products_behind_a_steep_function_may_be_added_in_turn() -> None:
    """Large logits cancel, and most results of the Sigmoid are 0 or 1: a step of rounding of what was summed shows
    where they are not, and a weight of half the precision is wrong there."""
    rng = np.random.default_rng(5)
    rows, width, layers = 64, 512, 5
    weights = [rng.standard_normal((width, width if i else 64)).astype(F32) / F32(16) for i in reversed(range(layers))]
    x = last = value("x", (rows, width))
    nodes = []
    for i, w in enumerate(weights):
        h, r = (value(f"{name}{i}", (rows, w.shape[1])) for name in "hr")
        after = "Relu" if i + 1 < layers else "Sigmoid"
        nodes += [node("MatMul", [last, Value.constant(w)], [h]), node(after, [h], [r])]
        last = r
    f = function([x], nodes, last)

    def engine(dtype: Any) -> Call:
        def call(a: np.ndarray) -> list[np.ndarray]:
            for w in weights:
                total = np.zeros((rows, w.shape[1]), F32)
                for column, row in zip(np.maximum(a, 0).T if w is not weights[0] else a.T, w, strict=True):
                    total += column[:, None] * row.astype(dtype).astype(F32)
                a = total
            with np.errstate(over="ignore"):
                return [1 / (1 + np.exp(-a))]

        return Call(call)

    checker = ResultChecker(f, [rng.standard_normal((rows, width)).astype(F32) * F32(500)])
    assert checker.check(engine(F32), {}).is_right
    assert not checker.check(engine(np.float16), {}).is_right


def test_a_softmax_of_logits_without_digits_is_chaotic() -> None:
    """Equal weights: all inputs that are a little off give equal logits, but how each sum of products is rounded
    decides which class has it all."""
    x, w = value("x", (1, 64)), Value.constant(np.full((64, 1000), 0.5, F32), "w")
    logits, y = value("logits", (1, 1000)), value("y", (1, 1000))
    f = function([x], [node("MatMul", [x, w], [logits]), node("Softmax", [logits], [y])], y)
    rng = np.random.default_rng(0)
    for size, chaotic in ((1e9, True), (1.0, False)):
        inputs = [(size * rng.uniform(1, 2, (1, 64))).astype(F32)]
        checker = ResultChecker(f, inputs)
        few = np.zeros((1, 1000), F32)
        few[:, 240:272] = 1 / 32
        assert not checker.check_results([few], {}).is_right
        assert checker.is_chaotic is chaotic


def test_ties_after_arithmetic_are_right() -> None:
    """ArgMax over sums that are equal but for rounding may take another of them; ArgMax of the inputs may not."""
    rng = np.random.default_rng(0)
    x, s, i = value("x", (400, 3)), value("s", (400, 3)), value("i", (400,), np.int64)
    w = Value.constant(np.repeat(rng.standard_normal((3, 1)), 3, axis=1).astype(F32))
    nodes = [node("MatMul", [x, w], [s]), node("ArgMax", [s], [i], axis=1, keepdims=0)]
    f = function([x], nodes, i)
    checker = ResultChecker(f, synthesize_inputs(f))

    def flipped(x: np.ndarray) -> list[np.ndarray]:
        found = run_host(f, [x])[0][0].copy()
        found[7] = (found[7] + 1) % 3
        return [found]

    assert checker.check(Call(flipped), {}).is_right

    direct = function([x], [node("ArgMax", [x], [i], axis=1, keepdims=0)], i)

    def last(x: np.ndarray) -> list[np.ndarray]:
        return [np.where(np.arange(400) == 7, (x.argmax(1) + 1) % 3, x.argmax(1))]

    assert not ResultChecker(direct, synthesize_inputs(direct)).check(Call(last), {}).is_right


def test_random_numbers_are_not_compared() -> None:
    """Random numbers must be finite and lie where the host's do, and nothing more; other results are compared."""
    x, r, y = value("x", (100,)), value("r", (100,)), value("y", (100,))
    f = function([x], [node("RandomNormalLike", [x], [r]), node("Neg", [x], [y])], r, y)
    checker = ResultChecker(f, synthesize_inputs(f))
    rng = np.random.default_rng(1)
    assert checker.check(Call(lambda x: [rng.standard_normal(100).astype(F32), -x]), {}).is_right
    assert not checker.check(Call(lambda x: [rng.standard_normal(100).astype(F32), x.copy()]), {}).is_right
    for wrong in (np.zeros(100), np.full(100, np.nan), 40 + rng.standard_normal(100)):
        assert not checker.check(Call(lambda x, w=wrong: [w.astype(F32), -x]), {}).is_right


def quantised() -> Function:
    """Six dense layers between 8-bit integers, and one number at the end."""
    rng = np.random.default_rng(2)
    scale, zero = Value.constant(np.array(0.02, F32)), Value.constant(np.array(0, np.int8))
    x = here = value("x", (4, 32))
    nodes: list[Node] = []
    for k in range(6):
        q, d, m, t = (value(f"{n}{k}", (4, 32), np.int8 if n == "q" else F32) for n in "qdmt")
        w = Value.constant((rng.standard_normal((32, 32)) / 5).astype(F32))
        nodes += [node("QuantizeLinear", [here, scale, zero], [q]), node("DequantizeLinear", [q, scale, zero], [d]),
                  node("MatMul", [d, w], [m]), node("Tanh", [m], [t])]  # fmt: skip
        here = t
    total = value("total", ())
    nodes.append(node("ReduceSum", [here], [total], keepdims=0))
    return function([x], nodes, total)


def test_quantised_networks_are_judged_part_by_part() -> None:
    """One number behind many roundings may be off by some steps where every part is right; where one is wrong it is
    found."""
    f = quantised()
    right = float(run_host(f, synthesize_inputs(f), wide=True)[0][0])

    class Chance(Planted):
        """Right in every part; of the whole network, a rounding fell to the other side."""

        def compile(self, function: Function, fused: bool) -> Executable:
            made = super().compile(function, fused)
            if function is f:
                run = made.run
                made.run = lambda *a: [r * F32(1.01) for r in run(*a)]  # type: ignore[method-assign]
            return made

    assert right != 0
    chance = Chance()
    assert evaluate(f, [chance.candidate], CHECK).verdict == "ready"
    assert len(chance.compiled) == 2
    found = bisect_function(f, Chance().candidate)
    assert (found.is_right, found.compiles) == (True, 2)
    assert "each part between roundings" in found.summary

    wrong = Planted(lambda n, k: n.op_type == "Tanh", spoil=lambda rs: [r * F32(1.01) for r in rs])
    outcome = evaluate(f, [wrong.candidate], EvaluationSettings(tune=False))
    host = {i for p in outcome.pieces if p.engine == "host" for i in p.nodes}
    assert host == {i for i, n in enumerate(f.body.nodes) if n.op_type == "Tanh"}


# --- real engines --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("onnxruntime", 4), ("xla", 32)])
def test_node_tests_are_right(name: str, step: int) -> None:
    """On a sample of the standard's node tests that an engine takes, none is condemned."""
    one = candidate(name)
    engine = engines.get(name)
    bad, count = [], 0
    for case in all_cases()[::step]:
        if not case.is_numeric:
            continue
        try:
            forms = list(forms_of(case, name))
        except XRTError:
            continue
        f = forms[min(1, len(forms) - 1)][0]
        n = f.body.nodes[0]
        static = all(v is None or v.is_static for v in n.outputs)
        if not f.params or not static or _is_dynamic(n) or not engine.supports(n, "cpu", "inference"):
            continue
        count += 1
        outcome = evaluate(f, [one], CHECK)
        if outcome.verdict != "ready":
            bad.append(f"{case.name}: {outcome.reason}")
    assert not bad, "\n".join(bad)
    assert count > 1000 // step // 2


def _is_dynamic(n: Node) -> bool:
    """Whether the pipeline would not put it into a cluster: its shape depends on data, or on inputs not known."""
    kernel = find_kernel(n.domain, n.op_type)
    given = (n.inputs[i] for i in static_inputs(n))
    return kernel is None or kernel.why_dynamic(n) is not None or any(v is not None and v.data is None for v in given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [("ppocr_cls", "onnxruntime"), ("silero_vad", "onnxruntime"), ("silero_vad_sequence", "onnxruntime"),
     ("silero_vad_sequence", "xla"), ("minilm_int8", "onnxruntime"), ("light_squeezenet", "onnxruntime")],
)  # fmt: skip
def test_models_are_right(name: str, engine: str) -> None:
    """Every cluster of real models is ready in one piece."""
    from importlib.metadata import PackageNotFoundError

    from xrt_core.module import XRTModule

    one = candidate(engine)
    try:
        path = str(dev_models.path(name))
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed")
    given = dev_models.inputs_for(name, 0)
    module = XRTModule(path, engine=engine)
    if name.startswith("light_"):
        names = [n for n in module.input_types if n not in module.optional_inputs]
        given = dict(zip(names, given.values(), strict=False))
    functions = [f for n in module.partitioned(given).nodes if isinstance(f := n.attributes.get("function"), Function)]
    assert functions
    for f in functions:
        outcome = evaluate(f, [one], CHECK)
        assert outcome.verdict == "ready", outcome.reason
        assert len(outcome.pieces) == 1
