"""Symbolic plans under guard: verified at several sizes, watched at others, and given up where they are wrong."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import xrt_core as xrt
from tests.guard import engines as tested
from tests.guard.guarded import eventually, forget_verdicts, module, not_registered, registered
from tests.shapes.models import Builder, found_by_data, sized_by_data
from tests.shapes.test_plans import entries, run, symbolic
from xrt_core.cache.store import Compilation, ExecutableStore, forget_all
from xrt_core.compiler import models
from xrt_core.compiler.buckets import Bucket, check, choice, forms
from xrt_core.compiler.buckets.times import Times
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.tiering import BaselinePlan
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import InputError, ModelLoadError
from xrt_core.events import EventLog
from xrt_core.frontends.onnx_import import import_model
from xrt_core.guard import background, composite, worker_pool
from xrt_core.guard.background import BackgroundCompiler
from xrt_core.guard.builder import ClusterBuilder
from xrt_core.guard.composite import CompositeBuilder, lighter_sizes
from xrt_core.guard.replay import replay
from xrt_core.ir.graph import Support
from xrt_core.passes.sized_graphs import function_at
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.verify import autotune, evaluate
from xrt_core.verify.repro import read_bundle

pytestmark = pytest.mark.tiny_clusters

IN_PROCESS = {"guard": None, "guard_sandbox": False, "guard_async": False, "guard_verify": True, "cache": "off"}


@pytest.fixture(autouse=True)
def _engines() -> Iterator[None]:
    with registered(tested.Plain, tested.RightForOneSize, tested.WrongFor50Rows):
        yield


def product() -> object:
    """x [n, 4] -> relu(x @ w)."""
    b = Builder()
    b.op("Relu", b.op("MatMul", "x", b.weight(4, 4)))
    return import_model(b.model([("x", TensorProto.FLOAT, ["n", 4])], [f"v{len(b.nodes) - 1}"]))


def rows(n: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)}


def test_an_executable_that_is_right_for_one_size_is_found() -> None:
    """Verification tries other sizes; the module goes on with exact plans, and no result is wrong."""
    graph = product()
    m, host = module(graph, "right_for_one_size", **IN_PROCESS), module(graph, "host")
    for n in (7, 9, 2, 11):
        np.testing.assert_allclose(run(m, rows(n)), run(host, rows(n)), rtol=1e-5)
    assert not symbolic(m)
    assert len(entries(m)) == 3
    assert "n = 2" in str(m.report())


def test_a_bundle_of_symbolic_shapes_is_replayed(tmp_path: pathlib.Path) -> None:
    """For the sizes that it was found with, and others; it tells for which it fails, and succeeds where it is right."""
    m = module(product(), "right_for_one_size", **IN_PROCESS | {"cache": "readwrite", "cache_dir": str(tmp_path)})
    for n in (7, 9):
        run(m, rows(n))
    (path,) = tmp_path.rglob("right_for_one_size-wrong-*.xrtbundle")
    found = read_bundle(path)
    assert found.function.is_symbolic
    assert found.sizes == {"n": 9}
    result = replay(found, tested.RightForOneSize())
    assert result.fails
    assert "wrong for n = 2: " in result.text
    assert not replay(found, tested.Plain()).fails
    with pytest.raises(ModelLoadError, match="for which sizes of n it was written"):
        replay(dataclasses.replace(found, sizes={}), tested.Plain())


def wide(n: str = "n") -> Any:
    """The symbolic cluster of x [n, 1024] -> x @ w, and its function for other sizes."""
    b = Builder()
    b.op("MatMul", "x", b.weight(1024, 1024))
    model = b.model([("x", TensorProto.FLOAT, [n, 1024])], ["v0"])
    m = xrt.XRTModule(model, engine="right_for_one_size", guard=False, cache="off", shapes={"x": (n, 1024)})
    m.run({"x": np.zeros((2, 1024), np.float32)})
    return symbolic(m)[0].plan.launches[0].function


def test_a_cluster_is_examined_at_sizes_that_take_little_time() -> None:
    """2e9 FLOPs are enough: 953 rows of 1024 x 1024. The power of two in a size is kept, and small sizes stay."""
    function = wide()
    assert lighter_sizes(function, {"n": 900}) == {"n": 900}
    assert lighter_sizes(function, {"n": 5000}) == {"n": 624}  # 8 times 78, and 5000 is 8 times 625
    assert lighter_sizes(function, {"n": 4097}) == {"n": 512}
    assert lighter_sizes(function, {"n": 4096 + 64}) == {"n": 512}


def test_sizes_that_leave_nothing_are_not_examined() -> None:
    """Of fewer rows than a filter has the convolution gives none: such a call has a plan of its own."""
    b = Builder()
    b.op("Conv", "x", b.weight(2, 1, 4, 4), strides=[4, 4], kernel_shape=[4, 4])
    b.op("ReduceMean", "v0", axes=[1, 2], keepdims=0)
    model = b.model([("x", TensorProto.FLOAT, ["b", 1, "n", 8])], ["v1"])
    m = xrt.XRTModule(model, engine="right_for_one_size", guard=False, cache="off", shapes={"x": ("b", 1, "n", 8)})
    m.run({"x": np.zeros((3, 1, 12, 8), np.float32)})
    (launch,) = symbolic(m)[0].plan.launches
    assert composite.other_sizes(launch.function, {"b": 3, "n": 12}) == [{"b": 2, "n": 11}]
    assert composite.other_sizes(launch.function, {"b": 1, "n": 4}) == []
    assert composite.other_sizes(product_function(), {"n": 9}) == [{"n": 2}, {"n": 1}]


def test_sizes_too_small_to_be_reflected_are_not_examined() -> None:
    """NumPy reflects an edge that is wider than what there is, libraries fail: such a call has a plan of its own."""
    b = Builder()
    b.op("Exp", b.op("Pad", "x", b.constant([0, 4, 0, 3]), mode="reflect"))
    model = b.model([("x", TensorProto.FLOAT, ["b", "n"])], ["v1"])
    m = xrt.XRTModule(model, engine="onnxruntime", guard=True, cache="off")
    for n in (12, 9, 7, 11):
        x = np.linspace(-1, 1, 2 * n, dtype=np.float32).reshape(2, n)
        for _ in range(2):
            np.testing.assert_allclose(m(x), np.exp(np.pad(x, ((0, 0), (4, 3)), mode="reflect")), rtol=1e-5)
            assert m.wait(60)
    (entry,) = symbolic(m)
    assert "n - 5 >= 0" in entry.plan.explain().guards
    (launch,) = entry.plan.launches
    assert composite.other_sizes(launch.function, {"b": 2, "n": 12}) == [{"b": 1, "n": 11}]
    assert composite.other_sizes(launch.function, {"b": 1, "n": 5}) == []
    assert m.report().clusters[0]["state"] == "live"
    x = np.arange(3, dtype=np.float32).reshape(1, 3)
    np.testing.assert_allclose(m(x), np.exp(np.pad(x, ((0, 0), (4, 3)), mode="reflect")), rtol=1e-5)


def product_function() -> Any:
    """The symbolic cluster of `product`."""
    m = module(product(), "right_for_one_size", guard=False, cache="off", shapes={"x": ("n", 4)})
    m.run(rows(9))
    return symbolic(m)[0].plan.launches[0].function


def test_sizes_that_the_model_does_not_take_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then those of the call are."""
    monkeypatch.setattr(composite, "checker_at", lambda function, sizes: None)
    assert lighter_sizes(wide(), {"n": 4097}) == {"n": 4097}


def test_an_executable_that_is_wrong_later_is_left() -> None:
    """A shadow run that disagrees ends the symbolic plan; the call has the host's result."""
    graph = product()
    m, host = module(graph, "wrong_for_50_rows", guard_shadow=1, **IN_PROCESS), module(graph, "host")
    for n in (7, 9):
        m.run(rows(n))
    assert len(symbolic(m)) == 1
    np.testing.assert_allclose(run(m, rows(50)), run(host, rows(50)), rtol=1e-5)
    assert not symbolic(m)
    np.testing.assert_allclose(run(m, rows(8)), run(host, rows(8)), rtol=1e-5)


def test_the_next_engine_takes_over_from_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbolic plan stays where another engine is right for the call that one was wrong for."""
    monkeypatch.setattr(evaluate, "tune", lambda runs, *args, **options: first_wins(runs))
    graph = product()
    with registered(RightForAnySize):
        options = {**IN_PROCESS, "guard_async": True, "guard_tune": True, "guard_shadow": 1, "shapes": {"x": ("n", 4)}}
        m, host = module(graph, ["wrong_for_50_rows", "right_for_any_size"], **options), module(graph, "host")
        m.run(rows(7))
        assert eventually(lambda: any(e.name == "guard.live" for e in m.events))
        (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
        assert launch.record.chosen == "wrong_for_50_rows"
        np.testing.assert_allclose(run(m, rows(50)), run(host, rows(50)), rtol=1e-5)
        assert eventually(lambda: launch.record.chosen == "right_for_any_size" and launch.executable is not None)
        np.testing.assert_allclose(run(m, rows(50)), run(host, rows(50)), rtol=1e-5)
        assert len(symbolic(m)) == 1
        assert not [e for e in m.events if e.name == "shapes.exact"]


def test_a_plan_for_all_sizes_is_built_beside_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build begins before the host's run of the first call; that of an exact plan after it. Both are answered."""
    graph, order = product(), []
    begin, run_host = BackgroundCompiler.begin, BaselinePlan._run

    def begins(self: Any, *given: Any, **more: Any) -> None:
        order.append("build")
        begin(self, *given, **more)

    def runs(self: Any, arrays: Any) -> Any:
        order.append("run")
        return run_host(self, arrays)

    monkeypatch.setattr(BackgroundCompiler, "begin", begins)
    monkeypatch.setattr(BaselinePlan, "_run", runs)
    for shapes, expected in (({"x": ("n", 4)}, ["build", "run"]), ({}, ["run", "build"])):
        m = module(graph, "right_for_one_size", **IN_PROCESS | {"guard_async": True}, shapes=shapes)
        np.testing.assert_allclose(run(m, rows(7)), run(module(graph, "host"), rows(7)), rtol=1e-5)
        assert m.wait(60)
        assert order == expected
        order.clear()


def test_what_follows_data_under_guard() -> None:
    """Parts that are planned at run time become symbolic under guard as well; their results are those of the host."""
    options = {**IN_PROCESS, "guard_async": True}
    m, host = (module(import_model(found_by_data()), e, **options) for e in ("wrong_for_50_rows", "host"))
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(rng.integers(1, 9, 2)).astype(np.float32) * (rng.random() < 0.8)
        np.testing.assert_allclose(run(m, {"x": x}), run(host, {"x": x}), rtol=1e-5, atol=1e-6)
        assert m.wait(60)
    assert len(symbolic(m)) == 1


def test_what_follows_data_is_built_with_the_first_call() -> None:
    """Its sizes are symbols from the first call on, of which a warm-up run begins all builds, and which executables are
    compared with before they are live: calls with other numbers of rows compile nothing."""
    with registered(RightForAnySize):
        options = {**IN_PROCESS, "guard_async": True}
        m, host = (module(import_model(found_by_data()), e, **options) for e in ("right_for_any_size", "host"))
        for rows_found in (7, 3, 11, 1):
            x = (np.arange(12).reshape(3, 4) < rows_found).astype(np.float32)
            np.testing.assert_allclose(run(m, {"x": x}), run(host, {"x": x}), rtol=1e-5, atol=1e-6)
            assert m.wait(60)
            if rows_found == 7:
                (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
                assert (launch.record.state.value, launch.record.shadow_runs) == ("live", 1)
        assert [e.name for e in m.events].count("guard.begin") == 1
        assert launch.function.is_symbolic
        assert launch.record.host_calls == 1


def test_sizes_are_symbols_in_what_follows_data() -> None:
    """Those of the whole graph's inputs too: as values they would make a plan for each size and number of rows."""
    with registered(RightForAnySize):
        m = module(import_model(sized_by_data()), "right_for_any_size", guard=False, shapes={"x": ("n", "m")})
        host = module(import_model(sized_by_data()), "host")
        for rows_found, n, width in ((7, 3, 4), (3, 5, 2), (11, 3, 6), (2, 2, 9)):
            x = (np.arange(n * width).reshape(n, width) < rows_found).astype(np.float32)
            np.testing.assert_allclose(run(m, {"x": x}), run(host, {"x": x}), rtol=1e-5, atol=1e-6)
        (plan,) = [e.plan for e in symbolic(m)]
        (part,) = plan.parts.values()
        assert [type(e).__name__ for e in part._entries.values()] == ["SymbolicEntry"]


def test_inputs_that_the_host_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where made-up inputs do not fit together a cluster is examined on those of the call that the host answered."""
    examine = ClusterBuilder._in_process

    def refuses(self: ClusterBuilder, work: Any) -> Any:
        assert eventually(lambda: work.launch.answered is not None)
        if work.inputs is None:
            raise InputError("the numbers must be the sizes of others")
        return examine(self, work)

    monkeypatch.setattr(ClusterBuilder, "_in_process", refuses)
    with registered(RightForAnySize):
        m = module(product(), "right_for_any_size", **IN_PROCESS | {"guard_async": True, "shapes": {"x": ("n", 4)}})
        want = run(m, rows(7))
        assert m.wait(60)
        assert m.report().clusters[0]["state"] == "live"
        assert "guard.real_inputs" in [e.name for e in m.events]
        np.testing.assert_allclose(run(m, rows(7)), want, rtol=1e-5)


def test_the_first_engine_answers_before_the_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a symbolic cluster the first engine that is right is live while the others have not been compiled; they are
    compared some time later, at once where somebody waits, and the fastest takes over. A verdict that knows the first
    one alone serves the next module likewise, but for one that waits for its verdict."""
    raced: list[list[str]] = []

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        raced.append(list(runs))
        best = list(runs)[-2]
        return autotune.Tuning(best, {n: 1.0 + (n != best) for n in runs}, 1)

    monkeypatch.setattr(evaluate, "tune", tune)
    options = {**IN_PROCESS, "guard_async": True, "guard_tune": True, "shapes": {"x": ("n", 4)}}
    names, want = ["wrong_for_50_rows", "right_for_any_size"], run(module(product(), "host"), rows(7))
    with registered(RightForAnySize):
        m = module(product(), names, **options)
        m.run(rows(7))
        assert eventually(lambda: any(e.name == "guard.live" for e in m.events))
        (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
        assert launch.record.chosen == "wrong_for_50_rows"
        assert launch.untried == ("right_for_any_size",)
        assert "right_for_any_size will be compared later" in str(m.explain())
        assert raced == [["wrong_for_50_rows", "host"]]
        np.testing.assert_allclose(run(m, rows(7)), want, rtol=1e-5)

        other = module(product(), names, **options)
        other.run(rows(7))
        assert eventually(lambda: any(e.name == "guard.live" for e in other.events))
        assert len(raced) == 1
        other.close()
        waits = module(product(), names, **options | {"guard_async": False})
        waits.run(rows(7))
        assert waits.report().clusters[0]["chosen"] == "right_for_any_size"

        assert launch.answered is not None
        shadow_runs = launch.record.shadow_runs
        assert m.wait(60)
        assert len(raced) == 3
        assert launch.record.chosen == "right_for_any_size"
        assert not launch.untried
        assert launch.answered is None
        assert launch.record.shadow_runs == shadow_runs + 1, "compared before any call"
        assert raced[-1] == ["wrong_for_50_rows", "right_for_any_size", "host"]
        np.testing.assert_allclose(run(m, rows(50)), run(module(product(), "host"), rows(50)), rtol=1e-5)


def test_engines_left_for_later_are_compared_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calls alone, ten seconds after the first engine answers; once, also where that fails."""
    monkeypatch.setattr(evaluate, "tune", lambda runs, *args, **options: first_wins(runs))
    options = {**IN_PROCESS, "guard_async": True, "guard_tune": True, "shapes": {"x": ("n", 4)}}
    with registered(RightForAnySize):
        m = module(product(), ["wrong_for_50_rows", "right_for_any_size"], **options)
        m.run(rows(7))
        assert eventually(lambda: any(e.name == "guard.live" for e in m.events))
        (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
        told: list[str] = []
        launch._failures.drifted = lambda launch, why: told.append(why)  # type: ignore[method-assign,assignment]
        for _ in range(70):
            m.run(rows(7))
        assert not told
        launch.expectation._next = 0.0
        for _ in range(200):
            m.run(rows(7))
        assert told == ["right_for_any_size had not been tried"]


def test_engines_are_compared_on_the_sizes_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of a race is one of each size that calls had, where the host is out of the question. The race is opened
    again when more sizes have come, up to `_MOST_RACED`."""
    sizes: dict[str, list[int]] = {}

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        sizes.clear()
        for name, call in runs.items():
            before = len(ran)
            call()
            sizes[name] = ran[before:]
        return first_wins(runs)

    ran: list[int] = []

    def on_run(self: tested.RightForOneSize, run: Any, inputs: Any) -> Any:
        ran.append(inputs[0].shape[0])
        return run()

    monkeypatch.setattr(evaluate, "tune", tune)
    monkeypatch.setattr(evaluate.ReferenceExecutor, "seconds", Constant(1e6))
    monkeypatch.setattr(tested.RightForOneSize, "on_run", on_run)
    options = {**IN_PROCESS, "guard_async": True, "guard_tune": True, "shapes": {"x": ("n", 4)}}
    with registered(RightForAnySize):
        m = module(product(), ["wrong_for_50_rows", "right_for_any_size"], **options)
        m.run(rows(7))
        assert eventually(lambda: any(e.name == "guard.live" for e in m.events))
        for n in (7, 20, 3):
            m.run(rows(n))
        assert m.wait(60)
        assert sizes == {"wrong_for_50_rows": [7, 20, 3], "right_for_any_size": [7, 20, 3]}
        (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
        told: list[str] = []
        launch._failures.drifted = lambda launch, why: told.append(why)  # type: ignore[method-assign,assignment]
        launch.expectation._next = 0.0
        for n in range(1, 8):
            for _ in range(80):
                m.run(rows(n))
        assert not told
        for _ in range(80):
            m.run(rows(30))
        assert told == ["calls of 9 sizes have come, and it was chosen for 3"]


def test_who_won_before_any_call_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody waits at once: three sizes of calls are enough then."""
    monkeypatch.setattr(evaluate, "tune", lambda runs, *args, **options: first_wins(runs))
    options = {**IN_PROCESS, "guard_async": True, "guard_tune": True, "shapes": {"x": ("n", 4)}}
    with registered(RightForAnySize):
        m = module(product(), ["wrong_for_50_rows", "right_for_any_size"], **options)
        m.run(rows(7))
        assert m.wait(60)
        (launch,) = m._pipeline.accelerated.services.guard._all()  # type: ignore[union-attr]
        assert (launch.record.races, launch.record.raced) == (1, [{"n": 7}])  # that of the call that was compared
        launch.record.raced = ()  # as where the host's answer was too large to be kept
        told: list[str] = []
        launch._failures.drifted = lambda launch, why: told.append(why)  # type: ignore[method-assign,assignment]
        launch.expectation._next = 0.0
        for n in (7, 8, 7, 8, 9):
            assert not told
            for _ in range(80):
                m.run(rows(n))
        assert told == ["calls of 3 sizes have come, and it was chosen for 1"]


def test_a_clear_lead_over_the_host_needs_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one candidate of a symbolic cluster is right and was twice as fast as the host while it was checked."""
    raced: list[list[str]] = []

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        raced.append(list(runs))
        return first_wins(runs)

    monkeypatch.setattr(evaluate, "tune", tune)
    options = {**IN_PROCESS, "guard_tune": True, "shapes": {"x": ("n", 4)}}
    for slower, races in ((1e6, 0), (1e-6, 1)):
        monkeypatch.setattr(evaluate.ReferenceExecutor, "seconds", Constant(slower))
        forget_verdicts()
        m = module(product(), "wrong_for_50_rows", **options)
        m.run(rows(7))
        assert m.report().clusters[0]["chosen"] == "wrong_for_50_rows"
        assert len(raced) == races


def first_wins(runs: Any) -> autotune.Tuning:
    """A race that ends as if all were equally fast."""
    return autotune.Tuning(next(iter(runs)), dict.fromkeys(runs, 1.0), 1)


class RightForAnySize(tested.RightForOneSize):
    """As that, and right."""

    name = "right_for_any_size"
    rows = -1


class Constant:
    """An attribute that stays what it is."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.value

    def __set__(self, owner: Any, value: float) -> None:
        pass


DROPPED = {**IN_PROCESS, "guard_verify": False, "guard_async": True}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker_pool.WorkerPool]:
    """A pool of this test's own, that builds two clusters at a time."""
    made = worker_pool.WorkerPool(2)
    monkeypatch.setattr(worker_pool, "_workers", made)
    forget_all()  # what other tests compiled of the same graph would answer at once
    with registered(tested.FirstWaits, tested.FirstWaitsStatic):
        tested.FirstWaits.reset()
        yield made
        tested.FirstWaits.may.set()
        assert eventually(lambda: not made._open)  # builds that nobody waits for would count in the next test


def building(m: xrt.XRTModule) -> Any:
    """The launches that are being built, or wait for it."""
    guard = m._pipeline.accelerated.services.guard
    assert guard is not None
    return guard._building


@pytest.mark.usefixtures("pool")
def test_an_exact_build_is_dropped_for_a_symbolic_one() -> None:
    """Once there is a symbolic plan nobody waits for the exact build that runs, and its result goes nowhere."""
    graph = product()
    m = module(graph, "first_waits", **DROPPED)
    m.run(rows(7))
    assert eventually(lambda: tested.FirstWaits.compilations == 1 and entries(m)[0].plan.launches)
    (exact,) = entries(m)[0].plan.launches
    m.run(rows(9))
    assert len(entries(m)) == len(symbolic(m)) == 1  # before any executable of it is there
    m.run(rows(5))
    assert eventually(lambda: not symbolic(m)[0].plan.is_unbuilt)
    assert m.wait(10)
    assert exact.record.reason == "cancelled: a plan for all sizes took its place"
    tested.FirstWaits.may.set()
    assert eventually(lambda: tested.FirstWaits.done == 2 and exact not in building(m))
    exact(list(rows(7).values()))  # of a caller that still has the old plan
    assert exact.executable is None
    np.testing.assert_allclose(run(m, rows(7)), run(module(graph, "host"), rows(7)), rtol=1e-5)
    assert tested.FirstWaits.compilations == 2


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("is_there", [False, True])
def test_shapes_that_come_faster_than_builds(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where engines of static shapes take part, two shapes are planned exactly before a symbolic plan is made; but not
    where the first of them is still being built."""
    monkeypatch.setattr(Pipeline, "_symbolic_after", lambda self, engines: 2)
    if is_there:
        tested.FirstWaits.may.set()
    m = module(product(), "first_waits", **DROPPED)
    m.run(rows(7))
    if is_there:
        assert eventually(lambda: not entries(m)[0].plan.is_unbuilt)
    else:
        assert m._pipeline.accelerated.engines  # chosen: before that every shape is planned exactly
        assert entries(m)[0].plan.is_unbuilt
    m.run(rows(9))
    assert len(symbolic(m)) == (0 if is_there else 1)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("static_is_chosen", [True, False])
def test_an_exact_plan_beside_a_symbolic_one(static_is_chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that comes often gets one, built while the symbolic plan answers, if an engine of static shapes is the
    choice for it; else it is dropped, and after two such no more are made. Other shapes stay with the symbolic plan."""
    tested.FirstWaits.may.set()
    monkeypatch.setattr(models, "OFTEN", 1e-9)
    monkeypatch.setattr(tested.FirstWaitsStatic, "priority", {"train": 0, "inference": 1})
    if not static_is_chosen:
        monkeypatch.setattr(tested.FirstWaitsStatic, "supports", lambda *node: Support.no("not here"))
    monkeypatch.setattr(autotune, "MARGIN", 1e6)  # the first engine wins every race
    monkeypatch.setattr(autotune, "HOST_MARGIN", 1e6)
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))
    with not_registered(tested.Plain, tested.RightForOneSize, tested.WrongFor50Rows):
        m = module(product(), "auto", **DROPPED)
        m._pipeline.accelerated.symbolic_after  # the engines are chosen  # noqa: B018
        for n in (7, 9, 5):
            m.run(rows(n))
            assert m.wait(60)
        (entry,) = symbolic(m)
        for _ in range(3):
            for n in (5, 6, 8):
                np.testing.assert_allclose(run(m, rows(n)), run(module(product(), "host"), rows(n)), rtol=1e-5)
                assert m.wait(60)
        found = [e.fields["is_used"] for e in m.events if e.name == "shapes.beside"]
    assert found == ([True, True, True] if static_is_chosen else [False, False])
    assert symbolic(m) == [entry]
    assert len(entries(m)) == (6 if static_is_chosen else 3)


@pytest.mark.usefixtures("pool")
def test_engines_of_static_shapes_get_no_part_of_a_symbolic_cluster() -> None:
    """Not even the nodes whose own shapes do not vary: the others would be cut into pieces around these."""
    tested.FirstWaits.may.set()
    m = module(product(), "first_waits", guard=False, shapes={"x": ("n", 4)})
    m.run(rows(7))
    function = entries(m)[0].plan.launches[0].function
    both = [(engines.get(n), "cpu") for n in ("first_waits_static", "first_waits")]
    log = EventLog()
    build = CompositeBuilder(Compilation(both, CompileOptions(), ExecutableStore(None, log), log))
    assert function.is_symbolic
    assert build.candidates(function, None) == ("first_waits",)
    assert not any(build.supports("first_waits_static", function))
    static = function_at(function, {"n": 3})
    assert build.candidates(static, None) == ("first_waits_static", "first_waits")


@pytest.mark.usefixtures("pool")
def test_an_exact_build_is_dropped_for_a_bucket() -> None:
    """The same where a bucket that holds the first signature is there before its own executable."""
    graph = product()
    m = module(graph, "first_waits_static", buckets="auto", **DROPPED)
    m.run(rows(7))
    assert eventually(lambda: tested.FirstWaits.compilations == 1 and entries(m)[0].plan.launches)
    (exact,) = entries(m)[0].plan.launches
    m.run(rows(8))
    assert eventually(lambda: exact.record.reason == "cancelled: a bucket took its place")
    assert m.wait(10)
    assert not any(e.plan.launches for e in entries(m))
    np.testing.assert_allclose(run(m, rows(7)), run(module(graph, "host"), rows(7)), rtol=1e-5)
    assert "padded: n 7 to 8" in str(m.explain(rows(7)))
    assert tested.FirstWaits.compilations == 2


@pytest.mark.usefixtures("pool")
def test_an_exact_build_is_not_begun_where_sizes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second size before the plan of the first is there: a bucket is made for both, and nothing else."""
    monkeypatch.setattr(background, "_DELAY", 0.3)
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED)
    m.run(rows(7))
    m.run(rows(8))
    tested.FirstWaits.may.set()
    assert m.wait(10)
    assert eventually(lambda: "padded: n 7 to 8" in str(m.explain(rows(7))))
    host_run(m, 7)
    assert tested.FirstWaits.compilations == 1


def host_run(m: xrt.XRTModule, n: int) -> None:
    """Assert that a call of `n` rows gives what the host gives."""
    np.testing.assert_allclose(run(m, rows(n)), run(module(product(), "host"), rows(n)), rtol=1e-5)


@pytest.mark.usefixtures("pool")
def test_no_call_waits_for_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the proof nor for the executable: the host answers as it is, then the bucket; a larger call has the
    host again until a larger bucket is there. With what varies at every call no more is begun than can be built."""
    padded: list[threading.Thread] = []
    may_pad, pad_graph = threading.Event(), forms.pad_graph

    def slowly(*given: Any, **more: Any) -> Any:
        padded.append(threading.current_thread())
        may_pad.wait(60)
        return pad_graph(*given, **more)

    monkeypatch.setattr(forms, "pad_graph", slowly)
    monkeypatch.setattr(choice, "FIRST_BUCKETS", 1)  # none is made beside a larger one
    monkeypatch.setattr(Times, "host_is_faster", lambda *given: False)
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED)
    host_run(m, 7)
    assert eventually(lambda: tested.FirstWaits.compilations == 1)
    for n in (8, 9, 10, 3):
        host_run(m, n)
    assert eventually(lambda: len(padded) == 1)
    assert padded != [threading.current_thread()]
    assert "the host answers" in str(m.explain())
    assert len(entries(m)) == 2  # the first, exact, and that of the host for all
    caller = m._source.caller
    assert caller is not None
    assert caller.buckets is not None
    made = caller.buckets
    may_pad.set()
    assert m.wait(10)
    assert [str(b) for b in made.buckets] == ["n 8"]  # that of the first call that wanted one
    assert "padded: n 3 to 8" in str(m.explain())  # the last call
    for n in (3, 8, 5):
        host_run(m, n)
    assert made.buckets[0].calls == 3
    host_run(m, 10)
    assert m.wait(10)
    host_run(m, 9)
    assert [(str(b), b.calls) for b in made.buckets] == [("n 8", 3), ("n 12", 1)]
    tested.FirstWaits.may.set()


@pytest.mark.usefixtures("pool")
def test_the_host_takes_what_it_is_faster_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is little in a large bucket is the host's, as it is, while its engine takes longer for the whole; now
    and then the engine is tried again."""
    tested.FirstWaits.may.set()
    monkeypatch.setattr(choice, "FIRST_BUCKETS", 1)
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED)
    for n in (60, 64):
        host_run(m, n)
        assert m.wait(10)
    caller = m._source.caller
    assert caller is not None
    assert caller.buckets is not None
    (made,), times = caller.buckets.buckets, caller.buckets._times
    host_run(m, 64)
    assert made.calls == 1
    times.host_least = times.host_pace = 1.0
    made.seconds = 20.0
    host_run(m, 10)
    assert made.calls == 1
    times.host_least = times.host_pace = 1.0  # not what that call took
    host_run(m, 30)
    assert made.calls == 2
    assert made.seconds < 1.0
    made.seconds = 20.0
    for _ in range(15):  # 0.95 ** 14 is less than a half
        times.host_least = times.host_pace = 1.0
        host_run(m, 10)
    assert made.calls >= 3


@pytest.mark.usefixtures("pool")
def test_a_bucket_that_no_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another attempt is due, and succeeds, the host answers without padding; where nothing can be made, the
    host's plans for exact sizes do."""
    tested.FirstWaits.may.set()
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED | {"guard_retry": 0.1})
    host_run(m, 7)
    assert m.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(tested.FirstWaits, "on_compile", lambda self, compile: 1 / 0)
        host_run(m, 8)
        assert m.wait(10)
        host_run(m, 5)
        caller = m._source.caller
        assert caller is not None
        assert caller.buckets is not None
        (made,) = caller.buckets.buckets
        assert made.inner.is_live is False
        assert made.calls == 0
    assert eventually(lambda: [host_run(m, 6), m.wait(10), made.calls][-1] > 0)


@pytest.mark.usefixtures("pool")
def test_a_bucket_answers_no_call_before_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background its results are compared with the host's at its edges; one that differs is never used."""
    tested.FirstWaits.may.set()
    seen: list[threading.Thread] = []

    def differs(bucket: Bucket, arrays: Any, reference: Any) -> str:
        assert [a.shape for a in arrays] == [(8, 4)]
        assert (bucket.calls, bucket.inner.is_live) == (0, True)
        seen.append(threading.current_thread())
        return "it differs"

    monkeypatch.setattr(check, "difference", differs)
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED | {"guard_verify": True})
    for n in (7, 8, 8, 6):
        host_run(m, n)
        assert m.wait(10)
    assert len(seen) == 1
    assert seen != [threading.current_thread()]
    caller = m._source.caller
    assert caller is not None
    assert caller.buckets is not None
    (made,) = caller.buckets.buckets
    assert (made.failed, made.calls) == ("it differs", 0)
    assert sum(bool(e.plan.launches) for e in entries(m)) == 3  # of 7, 8 and 6 rows, exact


@pytest.mark.usefixtures("pool")
def test_a_bucket_whose_making_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on by exact plans, and the reason is told."""
    tested.FirstWaits.may.set()
    monkeypatch.setattr(forms, "pad_graph", lambda *given, **more: 1 / 0)
    m = module(product(), "first_waits_static", buckets="auto", **DROPPED)
    for n in (7, 8, 9, 9):
        host_run(m, n)
        assert m.wait(10)
    assert "ZeroDivisionError" in str(m.explain())
    assert sum(bool(e.plan.launches) for e in entries(m)) == 2  # of 7 and 9 rows: that of 8 was the host's


def test_a_build_that_has_not_begun_never_does(pool: worker_pool.WorkerPool) -> None:
    """A plan that was dropped while its build waited for other work."""
    pool.size = 1
    other = threading.Event()
    pool.submit(worker_pool.Job(lambda slot: other.wait(60), None))
    m = module(product(), "first_waits", **DROPPED)
    m.run(rows(7))
    assert eventually(lambda: any(x in building(m) for x in entries(m)[0].plan.launches))
    m._source.caller.plans.clear("dropped by the test")  # type: ignore[union-attr]
    assert m.wait(10)
    other.set()
    last = worker_pool.Job(lambda slot: None, None)
    pool.submit(last)
    assert last.done.wait(60)
    assert tested.FirstWaits.compilations == 0


def test_explain_after_a_preparation_in_the_background() -> None:
    """Of a model whose declared sizes are symbols, before its first call."""
    m = module(product(), "plain", **IN_PROCESS | {"guard_async": True})
    m.prepare(rows(7), background=True)
    m.wait()
    assert m.explain().engine_node_count == 2


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("varied", [True, False])
def test_sizes_that_varied_before_are_planned_before_engines_are_chosen(
    varied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """With "auto", in a process after one in which a symbolic plan was live; no call waits for the choice."""
    tested.FirstWaits.may.set()
    monkeypatch.setattr(autotune, "HOST_MARGIN", 1e6)  # an engine wins every race
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))
    options = {**DROPPED, "cache": "readwrite", "cache_dir": str(tmp_path)}
    with not_registered(tested.Plain, tested.RightForOneSize, tested.WrongFor50Rows):
        first = module(product(), "auto", **options)
        for n in (7, 9, 5) if varied else (7,):
            first.run(rows(n))
            assert first.wait(60)
        assert len(symbolic(first)) == (1 if varied else 0)
        first.close()
        monkeypatch.setattr(BackgroundCompiler, "_submit", lambda *given: None)  # nothing begins
        second = module(product(), "auto", **options)
        for n in (3, 8):
            np.testing.assert_allclose(run(second, rows(n)), run(module(product(), "host"), rows(n)), rtol=1e-5)
            assert len(symbolic(second)) == (1 if varied else 0)
        assert "not probed yet" in repr(second)
        second.close()
