"""Evaluation of a cluster, from candidates to outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.verify.planted import Planted, deep, value
from xrt_core.engine.contract import CompileOptions, Executable, Function, Tolerance
from xrt_core.errors import XRTError
from xrt_core.files import convert, decode, encode
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.runtime.plan import Plan
from xrt_core.testing.faults import FAULTS
from xrt_core.testing.functions import node
from xrt_core.verify import checker, compare
from xrt_core.verify.evaluate import EvaluationSettings, evaluate
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import Candidate
from xrt_core.verify.verdict import HOST, Outcome, Piece

CHECK = EvaluationSettings(tune=False, edges=False)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, planted: Planted, seconds: float) -> Candidate:
        """The candidate, with runs of `seconds`."""

        def compile(function: Function, fused: bool) -> Executable:
            made = planted.compile(function, fused)
            run = made.run

            def slow(*args: Any) -> Any:
                self.now += seconds
                return run(*args)

            made.run = slow  # type: ignore[method-assign]
            return made

        return Candidate(planted.name, compile)


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host's runs from now on: in the function's own precision, or a wider one."""
    runs: list[str] = []
    own, wide = checker.ReferenceExecutor.run, checker.run_host

    def count_own(self: checker.ReferenceExecutor, inputs: Any) -> Any:
        runs.append("own")
        return own(self, inputs)

    def count_wide(*args: Any, **kwargs: Any) -> Any:
        runs.append("wide")
        return wide(*args, **kwargs)

    monkeypatch.setattr(checker.ReferenceExecutor, "run", count_own)
    monkeypatch.setattr(checker, "run_host", count_wide)
    return runs


def nodes_of(outcome: Outcome, engine: str) -> set[int]:
    return {i for p in outcome.pieces if p.engine == engine for i in p.nodes}


def test_a_right_engine_is_ready() -> None:
    """Compiled once, checked on two sets of inputs, whole."""
    planted = Planted()
    outcome = evaluate(deep(30), [planted.candidate], CHECK)

    assert outcome.verdict == "ready"
    assert [(p.engine, p.nodes, p.fused) for p in outcome.pieces] == [("planted", tuple(range(30)), True)]
    assert outcome.reason == "planted: right on 2 sets of inputs"
    assert not outcome.errors
    assert planted.compiled == [30]
    assert planted.runs == 4
    assert decode(encode(outcome.to_json()), Outcome, "it", XRTError) == outcome


def test_the_host_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right candidate costs two runs of the host but for the edges, however many candidates there are."""
    runs = counted_runs(monkeypatch)
    some = [Planted(name=n).candidate for n in ("one", "two")]
    assert evaluate(deep(30), some, CHECK).verdict == "ready"
    assert runs == ["own", "own"]


def test_verification_times_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that takes long, and was several times as slow as another while it was checked, is not timed."""
    runs = counted_runs(monkeypatch)
    clock = Clock()
    original = Plan._run

    def slow(self: Plan, arrays: Any) -> Any:
        clock.now += 10.0
        return original(self, arrays)

    monkeypatch.setattr(Plan, "_run", slow)
    outcome = evaluate(deep(30), [clock.taking(Planted(), 1.0)], EvaluationSettings(), clock=clock)

    assert outcome.verdict == "ready"
    assert runs == ["own", "own"]
    assert outcome.timings["host"] == pytest.approx(10.0)
    assert outcome.timings["verify"] == pytest.approx(20.0)
    assert outcome.timings["checked runs"] == pytest.approx(4.0)


def test_another_race_checks_only_a_new_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that were found right before are timed: what runs now is not checked again, what takes over is."""
    runs, clock = counted_runs(monkeypatch), Clock()
    original = Plan._run

    def slow(self: Plan, arrays: Any) -> Any:
        clock.now += 10.0
        return original(self, arrays)

    monkeypatch.setattr(Plan, "_run", slow)
    for seconds, wrong, winner, host_runs in (
        ((1.0, 2.0), False, "one", 1),  # of which the inputs are taken that everything is timed on
        ((2.0, 1.0), False, "two", 2),
        ((2.0, 1.0), True, "one", 3),  # one in higher precision
    ):
        runs.clear()
        planted = [Planted(name="one"), Planted(lambda n, k, wrong=wrong: wrong, name="two")]  # type: ignore[misc]
        candidates = [clock.taking(p, s) for p, s in zip(planted, seconds, strict=True)]
        outcome = evaluate(
            deep(30), candidates, EvaluationSettings(edges=False), clock=clock, right=("one", "two"), current="one"
        )
        assert (outcome.verdict, outcome.timed) == ("ready", winner)
        assert outcome.pieces == (Piece(winner, tuple(range(30))),)
        assert len(runs) == host_runs
        assert ("found before" in outcome.reason) == (winner == "one")
        assert bool(outcome.errors) == wrong


def test_results_out_of_bounds_cost_another_run_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that the host's own rounding puts out of bounds takes another run of the host, and is right."""
    runs = counted_runs(monkeypatch)
    x, a, y = value("x", (256,)), value("a", (256,)), value("y", (256,))
    big = Value.constant(np.array(1e3, np.float32))
    f = Function.from_graph(
        Graph([x], [y], [node("Add", [x, big], [a]), node("Sub", [a, big], [y])], opsets={"": 21}, name="f")
    )

    class Simplified(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            return [inputs[0].copy()]

    assert evaluate(f, [Candidate("simplifies", lambda f, fused: Simplified())], CHECK).verdict == "ready"
    assert runs == ["own", "own", "wide"]  # no second set: the budget is used


def test_uninformative_sets_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set on which the host has no numbers is a run of the host as well: the next one takes its place."""
    runs = counted_runs(monkeypatch)
    x, h, y = value("x", (64,)), value("h", (64,)), value("y", (64,))
    below = Value.constant(np.array(-20.0, np.float32))
    f = Function.from_graph(
        Graph([x], [y], [node("Min", [x, below], [h]), node("Sqrt", [h], [y])], opsets={"": 21}, name="f")
    )
    assert evaluate(f, [Planted().candidate], CHECK).verdict == "ready"
    assert len(runs) == 3  # no set is informative, and the first one is used
    runs.clear()
    real = [np.full((4, 6), np.nan, np.float32)] * 2
    outcome = evaluate(deep(2), [Planted().candidate], CHECK, real)
    assert outcome.reason == "planted: right on 1 set of inputs"
    assert len(runs) == 2


def test_a_local_fault_costs_one_node() -> None:
    """The outcome names the node, the engine keeps the others, and a second candidate is preferred whole."""
    function = deep(50)
    at = next(i for i, n in enumerate(function.body.nodes) if n.op_type == "Erf")
    planted = Planted(lambda n, k: n.op_type == "Erf" and n.inputs[0] is not None)
    every = {i for i, n in enumerate(function.body.nodes) if n.op_type == "Erf"}

    outcome = evaluate(function, [planted.candidate], CHECK)

    assert outcome.verdict == "ready"
    assert nodes_of(outcome, HOST) == every
    assert nodes_of(outcome, "planted") == set(range(50)) - every
    assert any(f"(node {at})" in e for e in outcome.errors)
    assert "the host runs" in outcome.reason

    both = evaluate(function, [planted.candidate, Planted(name="other").candidate], CHECK)
    assert [p.engine for p in both.pieces] == ["other"]
    assert both.errors[0].startswith("planted: result")


def test_a_candidate_with_pieces() -> None:
    """A candidate that comes with its pieces is timed like any other; if it is wrong it is rejected, and not
    corrected."""
    function = deep(12)
    pieces = (Piece("slow", tuple(range(6))), Piece(HOST, tuple(range(6, 12))))
    clock = Clock()
    slow, alone = clock.taking(Planted(name="slow"), 2.0), clock.taking(Planted(name="slow alone"), 0.5)
    outcome = evaluate(function, [slow, replace(alone, pieces=pieces)], EvaluationSettings(), clock=clock)
    assert outcome.timings["slow alone"] == pytest.approx(0.5)

    wrong = replace(Planted(lambda n, k: n.op_type == "Erf", name="slow alone").candidate, pieces=pieces)
    outcome = evaluate(function, [wrong], CHECK)
    assert outcome.verdict == "failed"
    assert nodes_of(outcome, HOST) == set(range(12))
    right = evaluate(function, [replace(Planted(name="slow alone").candidate, pieces=pieces)], CHECK)
    assert right.pieces == pieces
    assert right.reason == "slow alone: right on 2 sets of inputs"


@pytest.mark.parametrize("name", ["raises_at_compile", "no_executable"])
def test_what_does_not_compile_fails(name: str) -> None:
    """If the compiler fails on everything the host runs the cluster, and the reason is the compiler's."""
    outcome = evaluate(deep(12), [fault(name)], CHECK)
    assert outcome.verdict == "failed"
    assert nodes_of(outcome, HOST) == set(range(12))
    assert "lost its mind" in outcome.reason or "expected an Executable" in outcome.reason


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises_at_run", "fallen off the bus"), ("wrong_numbers", "out of bounds"), ("zero_numbers", "out of bounds"),
        ("wrong_count", "results, expected"), ("wrong_shape", "expected float32"),
        ("wrong_dtype", "expected float32"), ("writes_inputs", "wrote into its input"),
        ("reuses_results", "of an earlier run"),
    ],
)  # fmt: skip
def test_engines_of_the_kit_that_fail(name: str, says: str) -> None:
    """An engine that is wrong everywhere keeps no node, and the reason says how."""
    outcome = evaluate(deep(12), [fault(name)], CHECK)
    assert says in outcome.reason
    assert outcome.verdict == "wrong" or name == "writes_inputs"  # it has a use for nodes that read no input


def test_one_rounding_more_is_right() -> None:
    """Results that differ between runs by a rounding step are right."""
    assert evaluate(deep(12), [fault("unsteady")], CHECK).verdict == "ready"


def test_wrong_at_every_second_run() -> None:
    """A candidate is run more than once."""
    state = {"runs": 0}

    def every_second(n: Node, whole: int) -> bool:
        if n.outputs[0] is not None and n.op_type == "Tanh":
            state["runs"] += 1
        return state["runs"] % 2 == 0 and n.op_type == "Tanh"

    function = deep(1)
    outcome = evaluate(function, [Planted(every_second).candidate], CHECK)
    assert outcome.verdict == "wrong"
    assert "in some runs only" in outcome.reason


def test_the_fastest_stays_and_the_host_may_win() -> None:
    """Among right candidates the clock decides; where the host is clearly faster it keeps the cluster."""
    function = deep(12)
    clock = Clock()
    slow, fast = clock.taking(Planted(name="slow"), 2.0), clock.taking(Planted(name="fast"), 0.5)

    outcome = evaluate(function, [slow, fast], EvaluationSettings(), clock=clock)
    assert outcome.verdict == "slower"  # the host takes no time at all on this clock
    assert outcome.timings["slow"] == pytest.approx(2.0)
    assert outcome.timings["fast"] == pytest.approx(0.5)
    assert "the host is faster" in outcome.reason

    def ticking() -> float:
        clock.now += 10.0  # whoever is timed takes ten seconds for that alone, the host too
        return clock.now

    outcome = evaluate(function, [slow, fast], EvaluationSettings(), clock=ticking)
    assert outcome.verdict == "ready"
    assert [p.engine for p in outcome.pieces] == ["fast"]
    assert {"compile", "verify", "host", "slow", "fast"} <= set(outcome.timings)
    assert "faster than slow" in outcome.reason


def test_real_inputs_come_first() -> None:
    """A fault that shows only on the caller's inputs is found on them."""
    function = deep(1)  # one Tanh

    class OnlySevens(Planted):
        def wrong(self, n: Node, whole: int) -> bool:
            return False

    planted = OnlySevens()
    real = [np.full((4, 6), 7.5, np.float32), np.ones((4, 6), np.float32)]

    def compile(f: Function, fused: bool) -> Executable:
        made = planted.compile(f, fused)
        run = made.run
        made.run = lambda given, *a: [  # type: ignore[method-assign]
            r + np.float32(1) if given[0].flat[0] == 7.5 else r for r in run(given, *a)
        ]
        return made

    assert evaluate(function, [Candidate("sevens", compile)], CHECK).verdict == "ready"
    assert evaluate(function, [Candidate("sevens", compile)], CHECK, real).verdict == "wrong"


def test_an_engine_may_declare_its_tolerance() -> None:
    """A coarse engine that says so is taken, and its reason is shown; one that is worse than it says is not."""
    function = deep(1)

    def coarse(error: float) -> Candidate:
        planted = Planted(lambda n, k: True, spoil=lambda rs: [(r * (1 + error)).astype(r.dtype) for r in rs])
        own = {"float32": Tolerance(1e-4, 1e-4, reason="it computes in TF32")}
        return Candidate("coarse", planted.compile, own)

    outcome = evaluate(function, [coarse(5e-5)], CHECK)
    assert outcome.verdict == "ready"
    assert "it computes in TF32" in outcome.reason
    assert evaluate(function, [coarse(0.005)], CHECK).verdict == "wrong"


def test_a_deadline_that_has_passed() -> None:
    """Without time nothing is compiled, and the host runs the cluster."""
    clock = Clock()
    planted = Planted()
    outcome = evaluate(deep(3), [planted.candidate], EvaluationSettings(deadline_seconds=-1.0), clock=clock)
    assert outcome.verdict == "failed"
    assert "no time" in outcome.reason
    assert planted.compiled == []


def test_without_verification() -> None:
    """Without `verify` what compiles is taken."""
    planted = Planted(lambda n, k: True)
    outcome = evaluate(deep(3), [planted.candidate], EvaluationSettings(verify=False, tune=False))
    assert outcome.verdict == "ready"
    assert "not checked" in outcome.reason
    assert planted.runs == 0


def fault(name: str) -> Candidate:
    """An engine of the kit that fails."""
    engine = FAULTS[name]()

    def compile(function: Function, fused: bool) -> Executable:
        compiler = engine.compiler("cpu", CompileOptions(fused=fused))
        return compiler.compile(function, function.params, function.returns, function.aliases)

    return Candidate(name, compile)


def test_inputs_are_the_same_for_the_same_seed() -> None:
    """Evaluation is reproducible."""
    for a, b in zip(synthesize_inputs(deep(3), seed=4), synthesize_inputs(deep(3), seed=4), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(synthesize_inputs(deep(3), seed=4)[0], synthesize_inputs(deep(3), seed=5)[0])


def _relu(run: Callable[[np.ndarray], np.ndarray], op: str = "Relu", **attributes: Any) -> Outcome:
    """The outcome of a function of one elementwise node on [8, 16] for an engine that computes `run`."""
    x, y = value("x", (8, 16)), value("y", (8, 16))
    f = Function.from_graph(Graph([x], [y], [node(op, [x], [y], **attributes)], opsets={"": 21}, name="f"))

    class Library(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            return [run(np.array(inputs[0]))]

    return evaluate(f, [Candidate("library", lambda f, fused: Library())], EvaluationSettings(tune=False))


def test_an_engine_that_loses_nan_is_right_for_finite_inputs_only() -> None:
    """It stays ready, the verdict and its JSON say so, and one that keeps NaN and infinity has no such note."""
    loses = _relu(lambda x: np.where(x > 0, x, np.float32(0)))
    assert (loses.verdict, loses.finite_only) == ("ready", True)
    assert "for finite inputs only" in loses.reason
    assert convert(loses.to_json(), Outcome, XRTError, "the verdict").finite_only
    keeps = _relu(lambda x: np.maximum(x, np.float32(0)))
    assert (keeps.verdict, keeps.finite_only) == ("ready", False)


def test_an_engine_that_loses_nan_at_some_places_is_right_for_finite_inputs_only() -> None:
    """As a maximum that keeps NaN where it is the first element only, or the rest of a vectorised loop."""

    def of_the_last(x: np.ndarray) -> np.ndarray:
        out = np.maximum(x, 0)
        out.reshape(-1)[-6:] = np.fmax(x.reshape(-1)[-6:], 0)
        return out

    outcome = _relu(of_the_last)
    assert outcome.verdict == "ready"
    assert outcome.finite_only


def _running_mean(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """The mean of each row, each element being added as what it differs by from the mean of those before: NaN from an
    infinity on."""
    with np.errstate(invalid="ignore"):
        mean = np.zeros_like(x[:, :1])
        for i in range(x.shape[1]):
            mean = mean + (x[:, i : i + 1] - mean) / np.float32(i + 1)
        exact = x.mean(1, keepdims=True)
        centred = x - exact
        inverse = np.float32(1) / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(1e-5))
        return [centred * inverse * scale + bias, mean]


def _folded_scale(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """Instance normalisation as one product and one sum: NaN where infinities of both signs are added."""
    with np.errstate(invalid="ignore"):
        mean = x.mean((2, 3), keepdims=True)
        factor = scale[:, None, None] / np.sqrt(x.var((2, 3), keepdims=True) + np.float32(1e-5))
        return [x * factor + (bias[:, None, None] - mean * factor)]


@pytest.mark.parametrize(
    ("op", "shape", "run"),
    [("LayerNormalization", (3, 4), _running_mean), ("InstanceNormalization", (1, 2, 1, 3), _folded_scale)],
)
def test_what_only_a_lone_infinity_shows(op: str, shape: tuple[int, ...], run: Callable[..., Any]) -> None:
    """In a small array several make NaN of everything on any engine."""
    x, y = value("x", shape), value("y", shape)
    scale, bias = (value(n, (shape[1],)) for n in ("scale", "bias"))
    outputs = [y, value("mean", (shape[0], 1))] if op == "LayerNormalization" else [y]
    f = Function.from_graph(
        Graph([x, scale, bias], outputs, [node(op, [x, scale, bias], outputs)], opsets={"": 21}, name="f")
    )

    class Library(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            return run(*inputs)

    outcome = evaluate(f, [Candidate("library", lambda f, fused: Library())], EvaluationSettings(tune=False))
    assert (outcome.verdict, outcome.finite_only) == ("ready", True), outcome.reason


def test_operators_that_weigh_are_right_for_finite_inputs_only() -> None:
    """The standard leaves open what NaN of weight zero gives, so no set of inputs can tell."""
    x, y = value("x", (1, 1, 4, 4)), value("y", (1, 1, 8, 8))
    sizes = Value.constant(np.array([1, 1, 8, 8], np.int64))
    resize = node("Resize", [x, None, None, sizes], [y], mode="nearest")
    f = Function.from_graph(Graph([x], [y], [resize], opsets={"": 21}, name="f"))
    planted = Planted()
    outcome = evaluate(f, [planted.candidate], EvaluationSettings(tune=False))
    assert (outcome.verdict, outcome.finite_only) == ("ready", True), outcome.reason


def test_recurrent_cells_are_right_for_finite_inputs_only() -> None:
    """Their first state is zero: the host multiplies it by an infinite weight, which is NaN; libraries leave it out."""
    x, w, r, y = value("x", (3, 1, 2)), value("w", (1, 4, 2)), value("r", (1, 4, 4)), value("y", (3, 1, 1, 4))
    f = Function.from_graph(
        Graph([x, w, r], [y], [node("RNN", [x, w, r], [y], hidden_size=4)], opsets={"": 21}, name="f")
    )
    outcome = evaluate(f, [Planted().candidate], EvaluationSettings(tune=False))
    assert (outcome.verdict, outcome.finite_only) == ("ready", True), outcome.reason


def test_the_factors_of_a_determinant_are_right_for_finite_inputs_only() -> None:
    """NumPy calls a matrix singular that has a pivot of zero, even beside an infinite one; libraries multiply them."""
    x, y = value("x", (3, 2, 2)), value("y", (3,))
    f = Function.from_graph(Graph([x], [y], [node("Det", [x], [y])], opsets={"": 21}, name="f"))
    outcome = evaluate(f, [Planted().candidate], EvaluationSettings(tune=False))
    assert (outcome.verdict, outcome.finite_only) == ("ready", True), outcome.reason


@pytest.mark.parametrize(("constant", "verdict"), [(-np.inf, "wrong"), (-3.0, "ready")])
def test_constants_that_are_not_finite(constant: float, verdict: str) -> None:
    """They are tried on positive numbers alone: scores of -infinity weigh nothing, which a library may make NaN."""
    x, y = value("x", (1, 1, 8, 4)), value("y", (1, 1, 8, 4))
    queries = np.random.default_rng(0).random((1, 1, 8, 4), np.float32)
    queries[..., 1, 2] = constant
    attention = Node("Attention", [Value.constant(queries), x, x], [y], version=23)
    f = Function.from_graph(Graph([x], [y], [attention], opsets={"": 23}, name="f"))

    class Library(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            (k,) = inputs
            with np.errstate(all="ignore"):
                scores = queries @ np.swapaxes(k, 2, 3) / np.float32(2)
                weights = np.exp(scores - scores.max(3, keepdims=True))
                return [weights / weights.sum(3, keepdims=True) @ k]

    settings = EvaluationSettings(tune=False, seed=1)  # whose rows of one number are negative
    outcome = evaluate(f, [Candidate("library", lambda f, fused: Library())], settings)
    assert outcome.verdict == verdict, outcome.reason
    assert ("it is nan, not 0" in outcome.reason) == (verdict == "wrong")


def test_elementwise_results_are_judged_element_by_element() -> None:
    """An error that only small elements show is found, though large ones are beside them."""
    assert _relu(np.tanh, "Tanh").verdict == "ready"
    wrong = _relu(lambda x: np.where(np.abs(x) < 0.02, x * np.float32(0.9999), np.tanh(x)), "Tanh")
    assert wrong.verdict == "wrong"


def test_an_exponential_less_one_is_right_for_small_numbers() -> None:
    """Elu by exp(x) - 1, as the standard writes it, passes although it is rounded at the scale of 1."""
    assert _relu(lambda x: np.where(x > 0, x, np.exp(np.minimum(x, np.float32(0))) - 1), "Elu").verdict == "ready"


def test_normalisations_of_constants_are_checked() -> None:
    """A library whose variance of equal numbers is negative gives NaN there, and is rejected."""

    def normalised(x: np.ndarray) -> np.ndarray:
        mean = x.mean(axis=1, keepdims=True)
        centred = x - mean
        var = (centred * centred).mean(axis=1, keepdims=True)
        return centred / np.where(var < 1e-9, np.float32(np.nan), np.sqrt(var) + np.float32(1e-9))

    wrong = _relu(normalised, "MeanVarianceNormalization", axes=(1,))
    assert wrong.verdict == "wrong"


def _range_of_rows(clipped: Callable[[np.ndarray], np.ndarray], negative: bool) -> Outcome:
    """The verdict on an engine that computes min / max of rows, and clips that by a function."""
    x, low, high, q, y = (value(n, (4, 8) if n == "x" else (4, 1)) for n in ("x", "low", "high", "q", "y"))
    axes, one = Value.constant(np.array([1], np.int64)), Value.constant(np.array(1.0, np.float32))
    relu = value("relu", (4, 8))
    nodes = [
        node("Relu", [x], [relu]), node("ReduceSum", [relu, axes], [low]), node("ReduceSum", [relu, axes], [high]),
        node("Div", [low, high], [q]), node("Clip", [q, None, one], [y]),
    ]  # fmt: skip
    if not negative:
        nodes[0] = node("Abs", [x], [relu])
    f = Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="f"))

    class Library(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            a = np.maximum(inputs[0], 0) if negative else np.abs(inputs[0])
            with np.errstate(all="ignore"):
                return [clipped(a.sum(axis=1, keepdims=True) / a.sum(axis=1, keepdims=True))]

    return evaluate(f, [Candidate("library", lambda f, fused: Library())], replace(CHECK, edges=True, max_compiles=0))


@pytest.mark.parametrize("negative", [False, True])
def test_nan_that_arises_inside_is_looked_for(negative: bool) -> None:
    """0 / 0, of inputs that are all zero or all negative: an engine that makes a number of it is wrong for finite
    inputs, which no check of the inputs would keep from it."""
    assert _range_of_rows(lambda q: np.minimum(q, np.float32(1)), negative).verdict == "ready"
    assert _range_of_rows(lambda q: np.fmin(q, np.float32(1)), negative).verdict == "wrong"


def test_parts_that_stay_are_checked_on_the_edges_too() -> None:
    """A node that is wrong costs its place, and what is left is found to lose NaN as any other would be."""
    x, a, y = value("x", (4, 8)), value("a", (4, 8)), value("y", (4, 8))
    f = Function.from_graph(
        Graph([x], [y], [node("Neg", [x], [a]), node("Relu", [a], [y])], opsets={"": 21}, name="f")
    )
    right = Planted(lambda n, k: n.op_type == "Neg").candidate
    outcome = evaluate(f, [right], EvaluationSettings(tune=False))
    assert (outcome.verdict, nodes_of(outcome, "planted"), outcome.finite_only) == ("ready", {1}, False)

    def fmax(function: Function, fused: bool) -> Executable:
        made = right.build(function, fused)
        run = made.run

        def loses(*args: Any) -> Any:
            return [np.fmax(r, np.float32(0)) if function.body.nodes[-1].op_type == "Relu" else r for r in run(*args)]

        made.run = loses  # type: ignore[method-assign]
        return made

    outcome = evaluate(f, [replace(right, compile=fmax)], EvaluationSettings(tune=False))
    assert (outcome.verdict, nodes_of(outcome, "planted"), outcome.finite_only) == ("ready", {1}, True)
    assert "for finite inputs only" in outcome.reason


@pytest.mark.parametrize(("ranges", "verdict"), [((), "ready"), ([(0.0, 2.0)], "ready"), ([(0.0, 80.0)], "wrong")])
def test_wrong_for_large_numbers_only(ranges: Any, verdict: str) -> None:
    """It is found where inputs of a real call have such numbers."""
    x, y = value("x", (8, 16)), value("y", (8, 16))
    f = Function.from_graph(Graph([x], [y], [node("Neg", [x], [y])], opsets={"": 21}, name="f"))

    class Library(Executable):
        def run(self, inputs: Any, run_options: Any = None, block_until_done: bool = True) -> Any:
            return [np.where(np.abs(inputs[0]) > 50, inputs[0], -inputs[0])]

    candidates = [Candidate("library", lambda f, fused: Library())]
    assert evaluate(f, candidates, EvaluationSettings(tune=False), ranges=ranges).verdict == verdict


# --- chaotic functions ---


def recurrence(steps: int = 24) -> Function:
    """The gradient of the states of a recurrent network, by its first one: it grows where the weights `r` are large."""
    h, r, g = value("h", (16, 64)), value("r", (64, 64)), value("g", (16, 64))
    one = Value.constant(np.array(1.0, np.float32))
    nodes, states = [], [h]
    for i in range(steps):
        product, after = value(f"p{i}", (16, 64)), value(f"h{i}", (16, 64))
        nodes += [node("MatMul", [states[-1], r], [product]), node("Tanh", [product], [after])]
        states.append(after)
    for i in range(steps, 0, -1):
        square, slope, scaled, before = (value(f"{n}{i}", (16, 64)) for n in ("q", "s", "m", "g"))
        nodes += [node("Mul", [states[i], states[i]], [square]), node("Sub", [one, square], [slope])]
        nodes += [node("Mul", [g, slope], [scaled]), node("MatMul", [scaled, r], [before])]
        g = before
    inputs = [h, r, next(v for n in nodes for v in n.inputs if v is not None and v.name == "g")]
    return Function.from_graph(Graph(inputs, [g], nodes, opsets={"": 21}, name="recurrence"))


class Elsewhere(Executable):
    """Rounds where the host does not: its inputs, by a step or two. wrong: what is added to the largest result."""

    def __init__(self, function: Function, wrong: float) -> None:
        self.function, self.wrong = function, wrong

    def run(self, arrays: Any, *options: Any) -> list[Any]:
        given = [np.asarray(x) * np.float32(1 + 2e-7) for x in arrays]
        y = np.array(checker.run_host(self.function, given)[0][0])
        y.reshape(-1)[np.abs(y).argmax()] *= np.float32(1 + self.wrong)
        return [y]


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are not widened by how far the host's results move: the few elements that move most pass them anyway."""
    monkeypatch.setattr(compare, "NOISE", 0.0)


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_a_chaotic_function_is_checked_on_calmer_inputs(wrong: float, no_noise: None) -> None:
    """Where rounding decides about the host's own results, an engine is judged by calmer inputs."""
    function = recurrence()
    normal = checker.ResultChecker(function, synthesize_inputs(function, "normal"))
    assert normal.is_chaotic
    assert not normal.check(Elsewhere(function, 0.0), {}).is_right
    assert not checker.ResultChecker(function, synthesize_inputs(function, "damped")).is_chaotic

    outcome = evaluate(function, [Candidate("other", lambda f, fused: Elsewhere(f, wrong))], CHECK)

    assert (outcome.verdict == "ready") == (not wrong), outcome.reason


def test_inputs_that_were_given_are_not_replaced(no_noise: None) -> None:
    """Real inputs on which the function is chaotic are what the engine is judged by."""
    function = recurrence()
    given = synthesize_inputs(function, "normal")

    outcome = evaluate(function, [Candidate("other", lambda f, fused: Elsewhere(f, 0.0))], CHECK, inputs=given)

    assert any("out of bounds" in e for e in outcome.errors)
