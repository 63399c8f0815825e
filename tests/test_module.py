"""XRTModule: how arguments are given, what is refused and how, and what holds for results."""

from __future__ import annotations

import collections
import copy
import gc
import logging
import pickle
import threading
import tracemalloc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fake_engines import fake_engine, refuses
from tests.random_graphs import BOOL, F32, I64, graph_of, ints, node
from xrt_core.engine.contract import EngineStatus
from xrt_core.errors import (
    EngineNotFoundError,
    EngineUnavailableError,
    ExecutionError,
    InputError,
    ModelLoadError,
    OptionError,
    UnsupportedError,
)
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import forget
from xrt_core.ir.types import OptionalType, SequenceType, TensorType
from xrt_core.module import XRTModule
from xrt_core.runtime.plan_cache import MAX_VARIANTS

X, Y = np.array([1, -2], np.float32), np.array([10, 20], np.float32)


def f32(name: str, *shape: Any) -> Value:
    return Value(name, TensorType(F32, shape))


def sub(**options: Any) -> XRTModule:
    """x - y, of two float32[2]; y may be left out and is then [10, 20]."""
    x, y, z = f32("x", 2), f32("y", 2), Value("z")
    graph = Graph([x, y], [z], [node("Sub", [x, y], [z])], opsets={"": 18}, name="sub", defaults={y: Y})
    return XRTModule(graph, **{"engine": "host", **options})


def unary(op: str = "Relu", *shape: Any, dtype: Any = F32, engine: str = "host", **attributes: Any) -> XRTModule:
    x, y = Value("x", TensorType(np.dtype(dtype), shape or (2,))), Value("y")
    return XRTModule(graph_of([x], [y], [node(op, [x], [y], **attributes)]), engine=engine)


# --- ways to give arguments -------------------------------------------------------------------------------------------


def test_by_position_by_name_and_as_a_mapping() -> None:
    """All ways give the same; `run` names its results."""
    m = sub()
    for y in (m(X, Y), m(X, y=Y), m(y=Y, x=X), m.run({"y": Y, "x": X})["z"]):
        np.testing.assert_array_equal(y, X - Y)


def test_defaults_may_be_left_out_or_overridden() -> None:
    """In any order of calls, also by None."""
    m = sub()
    for _ in range(2):
        np.testing.assert_array_equal(m(X), X - Y)
        np.testing.assert_array_equal(m(X, X), [0, 0])
        np.testing.assert_array_equal(m(X, None), X - Y)
        np.testing.assert_array_equal(m(X, y=2 * Y), X - 2 * Y)
    assert m.optional_inputs == ("y",)


def test_a_mapping_that_makes_what_is_missing_is_not_asked_for_it() -> None:
    """Inputs are what it has, by whatever kind of mapping."""
    made = collections.defaultdict(lambda: Y, {"z": X})
    m = unary()
    with pytest.raises(InputError, match="unknown input 'z'"):
        m.run(made)
    assert list(made) == ["z"]
    np.testing.assert_array_equal(m.run(collections.ChainMap({"x": X}))["y"], [1, 0])


def test_names_that_are_no_identifiers() -> None:
    """Any string is a name: with colons and slashes, `self`, and none at all."""
    a, b, c = f32("model/a:0", 2), f32("self", 2), f32("", 2)
    y, z = Value("y"), Value("")
    m = XRTModule(graph_of([a, b, c], [z], [node("Add", [a, b], [y]), node("Add", [y, c], [z])]), engine="host")
    given = {"model/a:0": X, "self": X, "input_2": Y}
    np.testing.assert_array_equal(m(**given), 2 * X + Y)
    np.testing.assert_array_equal(m.run(given)["output_0"], 2 * X + Y)
    assert list(m.input_types) == ["model/a:0", "self", "input_2"]


class Unreadable:
    """Looks like an array until one of its attributes is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "name"):
            raise RuntimeError(f"no {name}")
        return {"shape": (2,), "dtype": np.dtype("f4")}.get(name) or object.__getattribute__(self, name)

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise RuntimeError("no __array__")


def test_signatures_that_take_turns() -> None:
    """What answered last is looked at first, and taken for calls of the same types, shapes and dtypes alone."""
    m = unary("Neg", "n")
    for a in (X, np.arange(3, dtype=np.float32), X, X, np.zeros(0, np.float32), X[None][0]):
        np.testing.assert_array_equal(m(a), -a)
    with pytest.raises(InputError, match="dtype float64 given"):
        m(X.astype(np.float64))
    with pytest.raises(InputError, match=r"shape \[1, 2\] given"):
        m(X[None])
    np.testing.assert_array_equal(m(X), -X)


def test_a_dropped_plan_does_not_answer() -> None:
    """The call that was bound to it is not taken any more, though it was the last one."""
    m = unary("Neg", "n")
    m(X), m(X)
    plans = m._known_caller().plans
    (old,) = plans.plans()
    plans.clear("test")
    np.testing.assert_array_equal(m(X), -X)
    assert plans.plans() != [old]


WRONG = [
    (lambda m: m(), r"missing input 'x'; the model takes x \(float32\[2\]\), y \(float32\[2\]\)"),
    (lambda m: m(X, Y, X), r"3 inputs given, the model takes 2: x \("),
    (lambda m: m(X, z=Y), r"unknown input 'z'; the model takes x \("),
    (lambda m: m(X, x=X), "input 'x' is given twice, by position and by name"),
    (lambda m: m.run([X]), "inputs must be a mapping of input names to arrays, not a list"),
    (lambda m: m.run({1: X}), "unknown input 1"),
    (lambda m: m(X.astype(np.float64)), r"input 'x': dtype float64 given, float32 expected; .*\.astype\('float32'\)"),
    (lambda m: m(X.reshape(1, 2)), r"input 'x': shape \[1, 2\] given, float32\[2\] expected"),
    (lambda m: m(np.zeros(3, np.float32)), r"input 'x': shape \[3\] given, float32\[2\] expected"),
    (lambda m: m(X, Y.astype(np.int32)), "input 'y': dtype int32 given"),
    (lambda m: m(3.0), r"input 'x': float is not an array; .*np.asarray"),
    (lambda m: m("text"), "input 'x': str is not an array"),
    (lambda m: m([1.0, 2.0]), r"input 'x' takes a tensor float32\[2\], not a list; give an array"),
    (lambda m: m({"a": X}), "input 'x' takes a tensor float32.2., not a dict"),
    (lambda m: m(Unreadable("shape")), "input 'x': .*Unreadable is not an array"),
    (lambda m: m.run({"x": Unreadable("dtype")}), "input 'x': .*Unreadable is not an array; give"),
    (lambda m: m(x=Unreadable("__array__")), "input 'x': .*Unreadable cannot be read as a NumPy array: no __array__"),
    (lambda m: m(Unreadable("__class__")), "input 'x': .*Unreadable cannot be read as an array: RuntimeError: no"),
    (lambda m: m(None), "input 'x' takes a tensor float32.2., not a NoneType"),
    (lambda m: m(object()), "input 'x': object is not an array"),
    (lambda m: m(np.ma.masked_array(X, [True, False])), "input 'x': .*MaskedArray.* masked elements; fill them"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_arguments_that_do_not_fit(call: Any, message: str) -> None:
    """One InputError that names the input; the module works on, before and after a first good call."""
    m = sub()
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            call(m)
        np.testing.assert_array_equal(m(X, Y), X - Y)


@pytest.mark.parametrize("name", ["shape", "dtype", "__array__", "__class__"])
def test_arguments_of_traced_graphs_that_cannot_be_read(name: str) -> None:
    """An InputError too, and the module works on."""
    m = XRTModule(lambda x: x - 1, engine="host")
    for _ in range(2):
        with pytest.raises(InputError, match=f"no {name}"):
            m(Unreadable(name))
        np.testing.assert_array_equal(m(X), X - 1)


def test_the_hot_path_checks_as_well() -> None:
    """After a good call of one signature every other signature is checked anew."""
    m = sub()
    m(X, Y)
    for bad in (X.astype(np.float16), X[:1], X.astype(">f8")):
        with pytest.raises(InputError):
            m(bad, Y)


@pytest.mark.parametrize(
    "given",
    [
        X.astype(">f4"),
        np.asfortranarray(np.stack([X, X]))[0],
        np.stack([X, X], axis=1)[:, 0],
        np.repeat(X, 2)[::2],
        X[::-1][::-1],
    ],
)
def test_unusual_memory(given: np.ndarray) -> None:
    """Byte-swapped, strided and Fortran-ordered arrays are arrays; results are native."""
    m = unary("Neg")
    for _ in range(2):
        y = m(given)
        np.testing.assert_array_equal(y, -X)
        assert y.dtype == np.dtype("=f4")
        assert y.dtype.isnative


class _Subclass(np.ndarray):
    """Somebody's own kind of array."""


def test_scalars_and_subclasses() -> None:
    """NumPy scalars are arrays of rank 0; subclasses give plain arrays; read-only inputs are fine."""
    x, y = Value("x", TensorType(F32, None)), Value("y")
    m = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine="host")
    out = m(np.float32(3))
    assert type(out) is np.ndarray
    assert (out.shape, float(out)) == ((), -3)
    assert type(m(X.view(_Subclass))) is np.ndarray
    still = X.copy()
    still.flags.writeable = False
    np.testing.assert_array_equal(m(still), -X)
    out = m(np.ma.masked_array(X))
    np.testing.assert_array_equal(out, -X)


def test_text() -> None:
    """Strings of every NumPy kind come in, object arrays go out."""
    m = unary("Identity", dtype=object)
    strings = [np.array(["a", "é"]), np.array(["a", "é"], dtype=object), np.array([b"a", "é".encode()])]
    strings.append(np.array(["a", "é"], dtype=np.dtypes.StringDType()))
    for given in strings:
        out = m(given)
        assert out.dtype == object
        assert out.tolist() == ["a", "é"]


def test_empty_tensors_nan_and_infinity() -> None:
    """They are values like others, and no warning comes."""
    m = unary("Sqrt", "n")
    assert m(np.zeros(0, np.float32)).shape == (0,)
    np.testing.assert_array_equal(m(np.array([-1, np.inf, np.nan, 4], np.float32)), [np.nan, np.inf, np.nan, 2])
    x, y, z = f32("x", 2), f32("y", 2), Value("z")
    div = XRTModule(graph_of([x, y], [z], [node("Div", [x, y], [z])]), engine="host")
    np.testing.assert_array_equal(div(X, np.zeros(2, np.float32)), [np.inf, -np.inf])


# --- results ----------------------------------------------------------------------------------------------------------


def check_owned(m: XRTModule, *arrays: np.ndarray) -> list[np.ndarray]:
    """Results are plain, writable, and share memory with nothing: what is written into them changes no other call."""
    before = [a.copy() for a in arrays]
    first = m(*arrays)
    first = list(first) if isinstance(first, tuple) else [first]
    wanted = [y.copy() for y in first]
    for i, y in enumerate(first):
        assert type(y) is np.ndarray
        assert y.flags.writeable
        assert not any(np.shares_memory(y, a) for a in arrays)
        assert not any(np.shares_memory(y, z) for z in first[:i])
        y[...] = 77
    second = m(*arrays)
    for y, w in zip(second if isinstance(second, tuple) else [second], wanted, strict=True):
        np.testing.assert_array_equal(y, w)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b)
    return wanted


def test_a_graph_without_nodes() -> None:
    """Inputs that go straight out, twice, beside a constant that is returned twice."""
    x, c = f32("x", 2), Value.constant(Y.copy(), "c")
    (a, b, d, e) = check_owned(XRTModule(graph_of([x], [x, x, c, c], []), engine="host"), X.copy())
    np.testing.assert_array_equal([a, b, d, e], [X, X, Y, Y])
    with fake_engine():
        check_owned(XRTModule(graph_of([x], [x, c], []), engine="fake"), X.copy())


def test_a_graph_without_inputs_or_outputs() -> None:
    """No inputs: constants come out. No outputs: nothing does."""
    y = Value("y")
    m = XRTModule(graph_of([], [y], [node("Neg", [Value.constant(X)], [y])]), engine="host")
    np.testing.assert_array_equal(m(), -X)
    x = f32("x", 2)
    assert XRTModule(graph_of([x], [], []), engine="host")(X) == ()


VIEWS: list[tuple[str, list[Value], dict[str, Any]]] = [
    ("Reshape", [ints(3, 2)], {}),
    ("Transpose", [], {}),
    ("Slice", [ints(0), ints(1), ints(0)], {}),
    ("Slice", [ints(-1), ints(-9), ints(1), ints(-1)], {}),
    ("Expand", [ints(2, 2, 3)], {}),
    ("Flatten", [], {}),
    ("Unsqueeze", [ints(0)], {}),
    ("Identity", [], {}),
    ("Cast", [], {"to": 1}),
    ("Dropout", [], {}),
    ("Concat", [], {"axis": 0}),
    ("Sum", [], {}),
    ("Tile", [ints(1, 1)], {}),
    ("Gather", [Value.constant(np.array(1))], {}),
    ("Pad", [ints(0, 0, 0, 0)], {}),
    ("Clip", [], {}),
    ("CenterCropPad", [ints(2, 3)], {}),
    ("Trilu", [], {}),
]


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("engine", ["host", "fake"])
@pytest.mark.parametrize(("op", "more", "attributes"), VIEWS, ids=[f"{v[0]}{i}" for i, v in enumerate(VIEWS)])
def test_results_never_alias(op: str, more: list[Value], attributes: dict[str, Any], engine: str) -> None:
    """Operators that may return a view: of an input, of a constant, of another result, of a step in between."""
    x, c = f32("x", 2, 3), Value.constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    a, b, h, d, e = (Value(n) for n in "abhde")
    nodes = [
        node(op, [x, *more], [a], **attributes),
        node(op, [c, *more], [b], **attributes),
        node("Relu", [x], [h]),
        node(op, [h, *more], [d], **attributes),
        node(op, [h, *more], [e], **attributes),
    ]
    with fake_engine() as fake:
        fake.takes = lambda n: n.op_type == "Relu"
        given = np.arange(-2, 4, dtype=np.float32).reshape(2, 3)
        check_owned(XRTModule(graph_of([x], [a, b, h, d, e, a], nodes), engine=engine), given)
        check_owned(XRTModule(graph_of([x], [a], nodes[:1]), engine=engine), given.T.copy().T)


def test_a_part_of_a_large_array_does_not_keep_it_alive() -> None:
    """One row of an intermediate result is copied out of it."""
    x, h, y = f32("x", 1000), Value("h"), Value("y")
    m = XRTModule(
        graph_of([x], [y], [node("Relu", [x], [h]), node("Slice", [h, ints(0), ints(1)], [y])]), engine="host"
    )
    assert m(np.ones(1000, np.float32)).base is None


def test_large_results_are_not_copied_for_nothing() -> None:
    """What a kernel has just made is given away as it is, also when it has been reshaped."""
    x, h, y = f32("x", 1 << 20), Value("h"), Value("y")
    nodes = [node("Neg", [x], [h]), node("Reshape", [h, ints(1 << 10, 1 << 10)], [y])]
    m = XRTModule(graph_of([x], [y], nodes), engine="host")
    given = np.ones(1 << 20, np.float32)
    m(given)
    tracemalloc.start()
    m(given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * given.nbytes


def test_sequences_come_in_and_go_out() -> None:
    """A list of arrays; the elements that come out are the caller's own."""
    s, x, more, n = Value("s", SequenceType(TensorType(F32))), f32("x", 2), Value("more"), Value("n")
    nodes = [node("SequenceInsert", [s, x], [more]), node("SequenceLength", [s], [n])]
    m = XRTModule(graph_of([s, x], [more, n], nodes), engine="host")
    given = [X.copy(), X[:1].copy()]
    for _ in range(2):
        out, count = m(given, Y.copy())
        assert [e.tolist() for e in out] == [[1, -2], [1], [10, 20]]
        assert int(count) == 2
        for e in out:
            e[...] = 0
    with pytest.raises(
        InputError, match=r"input 's' takes a list of arrays \(sequence\(float32\[...\]\)\), not a ndarray"
    ):
        m(X, Y)
    with pytest.raises(InputError, match=r"input 's\[1\]': dtype int32 given"):
        m([X, X.astype(np.int32)], Y)


def test_optionals_may_be_absent() -> None:
    """Left out, None, or there."""
    o, y = Value("o", OptionalType(TensorType(F32, (2,)))), Value("y")
    m = XRTModule(graph_of([o], [y], [node("OptionalHasElement", [o], [y])]), engine="host")
    assert [bool(m()), bool(m(None)), bool(m(X)), bool(m())] == [False, False, True, False]
    with pytest.raises(InputError, match="input 'o': dtype int64"):
        m(np.zeros(2, np.int64))


# --- signatures -------------------------------------------------------------------------------------------------------


def test_values_that_determine_shapes() -> None:
    """Each value has a plan, up to a bound; beyond it one plan serves all; large ones are never taken by value."""
    x, shape, y, z = f32("x", 24), Value("shape", TensorType(I64, (2,))), Value("y"), Value("z")
    g = graph_of([x, shape], [z], [node("Reshape", [x, shape], [y]), node("Neg", [y], [z])])
    given = np.arange(24, dtype=np.float32)
    with fake_engine() as engine:
        m = XRTModule(g, engine="fake")
        for target in ([2, 12], [3, 8], [2, 12], [-1, 4]):
            np.testing.assert_array_equal(m(given, np.array(target)), -given.reshape(target))
        assert len(engine.compiled) == 3
        calls = len(m.events)
        m(given, np.array([2, 12]))
        assert len(m.events) == calls
        m = XRTModule(g.replace(inputs=[x, shape]), engine="fake")
        engine.compiled.clear()
        divisors = [d for d in range(1, 25) if 24 % d == 0]
        targets = [(d, 24 // d) for d in divisors] + [(-1, d) for d in divisors] + [(d, -1) for d in divisors]
        assert len(targets) > MAX_VARIANTS
        for t in targets:
            np.testing.assert_array_equal(m(given, np.array(t)), -given.reshape(t))
        caller = m._source.caller
        assert caller is not None
        assert len(caller.plans.plans()) == MAX_VARIANTS + 1


def test_a_flag_chooses_the_plan() -> None:
    """Two values of a condition, two plans; an engine sees neither the If nor the dead branch."""
    x, flag, y = f32("x", 2), Value("flag", TensorType(BOOL, ())), Value("y")
    outs = [Value("a"), Value("b")]
    then, other = (graph_of([], [o], [node(op, [x], [o])]) for o, op in zip(outs, ("Neg", "Abs"), strict=True))
    with fake_engine() as engine:
        m = XRTModule(
            graph_of([x, flag], [y], [node("If", [flag], [y], then_branch=then, else_branch=other)]), engine="fake"
        )
        for _ in range(3):
            np.testing.assert_array_equal(m(X, np.array(True)), -X)
            np.testing.assert_array_equal(m(X, np.array(False)), np.abs(X))
        assert [[n.op_type for n in f.body.nodes] for f in engine.compiled] == [["Neg"], ["Abs"]]
        assert m.explain({"x": X, "flag": np.array(True)}).node_share == 1.0


def test_no_more_plans_are_kept_than_asked_for() -> None:
    """The executables of signatures that are long unused go; those in use stay."""
    with fake_engine() as engine:
        x, y = f32("x", "n"), Value("y")
        m = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine="fake", cache_size=3)
        alive = []
        for n in range(1, 12):
            m(np.ones(n, np.float32))
            m(np.ones(1, np.float32))  # the first signature is always the last used but one
            alive.append(weakref.ref(engine.executables.pop()) if engine.executables else None)
        gc.collect()
        assert sum(r is not None and r() is not None for r in alive) <= 3
        assert sum(f.params[0].shape == (1,) for f in engine.compiled) == 1


def test_seeded_draws_are_reproducible() -> None:
    """Between calls and between modules; unseeded ones differ."""
    y = Value("y")

    def draw(**attributes: Any) -> XRTModule:
        x = f32("x", 64)
        return XRTModule(graph_of([x], [y], [node("RandomNormalLike", [x], [y], **attributes)]), engine="host")

    x, seeded = np.zeros(64, np.float32), draw(seed=3.0)
    np.testing.assert_array_equal(seeded(x), seeded(x))
    np.testing.assert_array_equal(seeded(x), draw(seed=3.0)(x))
    assert not np.array_equal(draw()(x), draw()(x))


# --- engines ----------------------------------------------------------------------------------------------------------


def test_unknown_engines_options_and_values() -> None:
    """Each names what is wrong, what there is, and what to do; and where a value came from."""
    with pytest.raises(EngineNotFoundError, match=r"no engine 'xlaa'|unknown engine 'xlaa'|'xlaa'.*xla"):
        sub(engine="xlaa")
    with pytest.raises(OptionError, match="unknown option 'minimum_node'.*did you mean 'minimum_nodes'"):
        sub(minimum_node=3)
    with pytest.raises(OptionError, match=r"'minimum_nodes' cannot be 0 \(from keyword minimum_nodes=\)"):
        sub(minimum_nodes=0)


def test_a_value_from_the_environment_is_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable."""
    monkeypatch.setenv("FLAGS_clustering_minimum_nodes", "none")
    with pytest.raises(OptionError, match="environment variable FLAGS_clustering_minimum_nodes"):
        sub()


def test_an_engine_that_cannot_be_used_says_why() -> None:
    """Its reason, and its remedy."""
    with fake_engine() as engine:
        engine.status = EngineStatus(False, reason="no device found", remedy="plug one in")
        with pytest.raises(
            EngineUnavailableError, match="'fake' is installed but cannot.*no device found; plug one in"
        ):
            sub(engine="fake")


def test_what_is_no_model() -> None:
    """A number is none."""
    with pytest.raises(ModelLoadError, match="builtins.int is not a model"):
        XRTModule(3, engine="host")


def test_an_engine_that_fails_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    """The host's result, one warning, and the explanation tells."""
    with fake_engine() as engine, caplog.at_level(logging.WARNING, "xrt"):
        engine.on_compile = refuses("no room in the kernel cache")
        m = sub(engine="fake")
        for _ in range(3):
            np.testing.assert_array_equal(m(X, Y), X - Y)
        assert len([r for r in caplog.records if "no room" in r.message]) == 1
        told = m.explain()
        assert told.errors == {"fake_0": "failed to compile, the host runs it: no room in the kernel cache"}
        assert (told.lost, told.engine_node_count) == (("fake_0",), 0)
        assert "failed to compile, the host runs it: no room" in str(told)


def test_an_engine_that_fails_at_run(caplog: pytest.LogCaptureFixture) -> None:
    """The host stands in; after three failures in a thousand calls it takes over; results are the caller's own."""
    with fake_engine() as engine, caplog.at_level(logging.WARNING, "xrt"):
        m = sub(engine="fake")
        failing = True

        def fail(_: Any) -> None:
            if failing:
                raise RuntimeError("device lost")

        engine.on_run = fail
        lost = "engine 'fake' raised RuntimeError: device lost"
        for _ in range(2):
            np.testing.assert_array_equal(m(X, Y), X - Y)
        assert m.explain().errors == {"fake_0": f"failed while running, the host ran it instead: {lost}"}
        assert m.explain().engine_node_count == 1
        failing = False
        np.testing.assert_array_equal(m(X, Y), X - Y)
        failing = True
        for _ in range(5):
            np.testing.assert_array_equal(m(X, Y), X - Y)
        assert engine.runs == 2 + 1 + 1
        assert m.explain().errors == {"fake_0": f"failed while running, the host runs it: {lost}"}
        assert m.explain().lost == ("fake_0",)
        assert "the cluster stays on the host" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        [],
        [X, X],
        [X.astype(np.float64)],
        [X[:1]],
        ["nonsense"],
        3,
    ],
    ids=["none", "two", "dtype", "shape", "text", "number"],
)
def test_an_engine_that_breaks_its_promise(given: Any) -> None:
    """Results of another number, dtype or shape are a failure, not a result."""
    with fake_engine() as engine:
        engine.on_run = lambda _: given
        m = sub(engine="fake")
        for _ in range(5):
            np.testing.assert_array_equal(m(X, Y), X - Y)
        assert m.explain().lost == ("fake_0",)


def test_an_engine_that_cannot_say_what_it_supports(caplog: pytest.LogCaptureFixture) -> None:
    """It raises, or returns something else than a Support: refused with the reason, one warning for all nodes."""
    for hook, reason in ((lambda n: 1 / 0, "ZeroDivisionError"), (lambda n: True, "True instead of a Support")):
        with fake_engine() as engine, caplog.at_level(logging.WARNING, "xrt"):
            engine.supports_hook = hook
            caplog.clear()
            x, h, y = f32("x", 2), Value("h"), Value("y")
            m = XRTModule(graph_of([x], [y], [node("Neg", [x], [h]), node("Abs", [h], [y])]), engine="fake")
            np.testing.assert_array_equal(m(X), np.abs(X))
            assert all(reason in n.reason for n in m.explain().report.host_nodes)
            assert len(caplog.records) == 1


def test_errors_of_the_host_name_the_node_and_leave_the_module_whole() -> None:
    """An index out of range fails one call, not the next."""
    x, i, y = f32("x", 2), Value("i", TensorType(I64, ())), Value("y")
    m = XRTModule(graph_of([x, i], [y], [node("Gather", [x, i], [y])]), engine="host")
    with pytest.raises(ExecutionError, match=r"node 'y': Gather\(float32\[2\], int64\[\]\) failed on the host"):
        m(X, np.array(9))
    assert float(m(X, np.array(1))) == -2


# --- explanations -----------------------------------------------------------------------------------------------------


def test_explaining_before_and_after_a_run() -> None:
    """Before: partitioned, not compiled. For a signature that ran: what happened to it."""
    with fake_engine() as engine:
        m = sub(engine="fake")
        assert m.explain().node_share == 1.0
        assert engine.compiled == []
        engine.on_compile = refuses("no")
        m(X, Y)
        assert m.explain({"x": X, "y": Y}).errors
        assert not m.explain({"x": X}).errors
    x, y = f32("x", "n"), Value("y")
    m = XRTModule(graph_of([x], [y], [node("Neg", [x], [y])]), engine="host")
    with pytest.raises(InputError, match=r"input 'x' is declared as float32\[n\]: give inputs"):
        m.explain()
    with pytest.raises(InputError, match="dtype"):
        m.explain({"x": X.astype(np.int32)})
    assert "x: float32[2]" in str(m.explain({"x": X}))


def test_prepare_compiles_without_running() -> None:
    """The next call finds its executable."""
    with fake_engine() as engine:
        m = sub(engine="fake")
        m.prepare({"x": X, "y": Y})
        assert (len(engine.compiled), engine.runs) == (1, 0)
        m(X, Y)
        assert (len(engine.compiled), engine.runs) == (1, 1)


# --- threads, leaks, the hot path -------------------------------------------------------------------------------------


def test_many_threads() -> None:
    """Eight threads, five signatures, in different orders: right results and one compilation a signature."""
    x, h, y = f32("x", "n"), Value("h"), Value("y")
    g = graph_of([x], [y], [node("Neg", [x], [h]), node("CumSum", [h, Value.constant(np.array(0))], [y])])
    with fake_engine() as engine:
        m = XRTModule(g, engine="fake")
        wrong: list[Any] = []
        start = threading.Barrier(8)

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            start.wait()
            for _ in range(60):
                given = rng.standard_normal(rng.integers(1, 6)).astype(np.float32)
                if not np.allclose(m(given), np.cumsum(-given), atol=1e-5):
                    wrong.append(given)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
        assert sorted(f.params[0].shape[0] for f in engine.compiled) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["host", "fake"])
def test_ten_thousand_calls_leak_nothing(engine: str) -> None:
    """Memory stands still, also with values in the signature and with errors in between."""
    x, shape, h, y = f32("x", 4), Value("shape", TensorType(I64, (2,))), Value("h"), Value("y")
    g = graph_of([x, shape], [y], [node("Reshape", [x, shape], [h]), node("Neg", [h], [y])])
    with fake_engine():
        m = XRTModule(g, engine=engine)
        given, shapes = np.ones(4, np.float32), [np.array(s) for s in ([2, 2], [4, 1], [1, 4])]

        def calls(count: int) -> None:
            for i in range(count):
                m(given, shapes[i % 3])
                if i % 100 == 0:
                    with pytest.raises(InputError):
                        m(given, given)

        calls(300)
        gc.collect()
        tracemalloc.start()
        base = tracemalloc.get_traced_memory()[0]
        calls(10_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - base
        tracemalloc.stop()
    assert grown < 50_000


@pytest.mark.slow
def test_ever_new_signatures_are_forgotten() -> None:
    """A thousand shapes and values leave behind no more than the cache holds (inference's own memory is bounded)."""
    x, shape, y = f32("x", "n"), Value("shape", TensorType(I64, (2,))), Value("y")
    m = XRTModule(
        graph_of([x, shape], [y], [node("Reshape", [x, shape], [y])]), engine="host", cache_size=8, verify=False
    )

    def calls(first: int, last: int) -> None:
        for n in range(first, last):
            m(np.ones(n, np.float32), np.array([1, n]))

    calls(1, 300)
    forget()
    gc.collect()
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    calls(300, 1000)
    forget()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert grown < 250_000
    assert len(m._source.caller.plans.plans()) == 8  # type: ignore[union-attr]


def test_a_call_of_one_launch_does_not_look_at_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known signature enters no function of the graph's size: as many Python calls for 5 nodes as for 500."""
    import sys

    def python_calls(count: int) -> int:
        x = f32("x", 2)
        nodes: list[Node] = []
        last = x
        for _ in range(count):
            after = Value("")
            nodes.append(node("Neg", [last], [after]))
            last = after
        m = XRTModule(graph_of([x], [last], nodes), engine="fake")
        m(X)
        seen = 0
        answer = [X]
        engine.on_run = lambda _: answer

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal seen
            seen += event == "call"

        sys.setprofile(profile)
        try:
            m(X)
        finally:
            sys.setprofile(None)
        engine.on_run = None
        return seen

    with fake_engine() as engine:
        few, many = python_calls(5), python_calls(500)
    assert few == many
    assert few < 15


def test_dtypes_of_ml_dtypes_pass_through() -> None:
    """bfloat16 and int4 go in and come out as they are."""
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn):
        given = np.array([1, 2], dtype)
        out = unary("Identity", dtype=dtype)(given)
        assert out.dtype == given.dtype
        np.testing.assert_array_equal(out.astype(np.float32), [1, 2])


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_module_is_saved_not_copied(copied: Any) -> None:
    """The error says how."""
    x, y = ints(3), Value("y")
    m = XRTModule(graph_of([], [y], [node("Neg", [x], [y])]), engine="host")
    with pytest.raises(UnsupportedError, match=r"m\.save\(path\) .* XRTModule\.load\(path\)"):
        copied(m)
