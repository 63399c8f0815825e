"""Background compilation: the host answers first, and the plan with engines is made after it."""

from __future__ import annotations

import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Queue
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import captured_events, chain, eventually, fallbacks, module, registered
from tests.random_graphs import F32, graph_of, node
from xrt_core import ops
from xrt_core.compiler.passes import register_pass, unregister_pass
from xrt_core.compiler.tiering import BaselinePlan
from xrt_core.engine.contract import EngineStatus, Phase, Support
from xrt_core.errors import EngineError, XRTError
from xrt_core.events import EventLog
from xrt_core.guard import background
from xrt_core.guard.builder import ClusterBuilder
from xrt_core.guard.launch import GuardedLaunch
from xrt_core.guard.record import State
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import Job, WorkerFailure, WorkerPool, planning_pool
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.options import resolve
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.testing.processes import run_python

ALONE = {"guard_tune": False, "guard_sandbox": False}


class Asked(tested.Plain):
    """Records which thread asks it about which operator, and may be slow or hang."""

    name = "asked"
    asked: ClassVar[list[tuple[str, str]]] = []
    before: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        self.asked.append((node.op_type, threading.current_thread().name))
        type(self).before()
        return super().supports(node, device, phase)


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> Iterator[None]:
    forget_all()
    Asked.asked = []
    Asked.before = staticmethod(lambda: None)
    with registered(*tested.ALL, Asked):
        yield
    forget_all()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """No background compilation starts until this is called."""
    go = threading.Event()
    begin = background.BackgroundCompiler._submit

    def submit(*given: Any) -> None:
        go.wait(60)
        begin(*given)

    monkeypatch.setattr(background.BackgroundCompiler, "_submit", submit)
    yield go.set
    go.set()


# --- the first answer ------------------------------------------------------------------------------------------------

UNTOUCHED = """
    import sys
    import numpy as np
    from xrt_core.guard import background
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    background._DELAY = 3600.0
    function, x = functions.chain()
    m = XRTModule(function.body, engine={engine!r}, guard=True)
    assert np.array_equal(m(x), XRTModule(function.body, engine="host")(x))
    assert len(m.report().planning) == 1
    touched = {{n.partition(".")[0] for n in sys.modules}}
    touched &= {{"jax", "onnxruntime", "openvino", "xrt_xla", "xrt_onnxruntime", "xrt_openvino", "xrt_tensorrt"}}
    assert not touched, touched
    heavy = {{f"xrt_core.guard.{{n}}" for n in ("manager", "capability", "worker_pool", "ipc", "composite")}}
    assert not heavy & sys.modules.keys()
    assert "not probed yet" in repr(m)
"""


@pytest.mark.parametrize("engine", ["auto", None])
def test_the_first_answer_touches_no_engine(engine: str | None) -> None:
    """Neither making the module nor its first call imports or queries one, nor imports the guard's machinery."""
    run_python(UNTOUCHED.format(engine=engine))


def test_the_first_plan_is_the_hosts(held: Callable[[], None]) -> None:
    """Step for step that of engine="host", and the engine, although named, was not queried."""
    graph, x, want = chain()
    host = XRTModule(graph, engine="host")
    host(x)
    with module(graph, "asked", **ALONE) as m:
        np.testing.assert_array_equal(m(x), want)
        first, plain = m._source.caller.last, host._source.caller.last  # type: ignore[union-attr]
        assert isinstance(first, BaselinePlan)
        assert first.as_text() == plain.as_text()  # type: ignore[union-attr]
        assert Asked.asked == []
        assert m.report().clusters == ()
        assert "the host answers, waiting for engines" in m.report().as_text()
        assert not m.wait(0.01)
        held()
        assert m.wait(60)
        assert m.report().planning == ()
        np.testing.assert_array_equal(m(x), want)
        assert not isinstance(m._source.caller.last, BaselinePlan)  # type: ignore[union-attr]
        assert m.report().clusters[0]["state"] == "live"
    assert all(thread.startswith("xrt-") for _, thread in Asked.asked)


def test_calls_of_the_first_plan_count() -> None:
    """The report counts them as calls of the cluster that the host answered."""
    graph, x, _ = chain()
    go = threading.Event()
    Asked.before = staticmethod(lambda: go.wait(60))
    with module(graph, "asked", **ALONE) as m:
        for _ in range(5):
            m(x)
        go.set()
        assert m.wait(60)
        m(x)
        (cluster,) = m.report().clusters
        assert (cluster["calls"], cluster["host_calls"]) == (6, 5)


def test_other_families_of_arrays_are_bound_anew() -> None:
    """A torch caller has torch results before and after the plans were swapped."""
    torch = pytest.importorskip("torch")
    graph, x, want = chain()
    with module(graph, "asked", **ALONE) as m:
        for _ in range(3):
            found = m(torch.from_numpy(x))
            assert isinstance(found, torch.Tensor)
            np.testing.assert_array_equal(found.numpy(), want)
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)


# --- what stays synchronous ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["prepare", "explain", "partitioned", "save"])
@pytest.mark.parametrize("called", [False, True])
def test_calls_that_need_the_engines_query_them_at_once(
    ask: str, called: bool, held: Callable[[], None], tmp_path: pathlib.Path
) -> None:
    """Whatever is pending in the background; and a later call uses the plan with engines."""
    graph, x, want = chain()
    m = module(graph, "asked", **ALONE)
    if called:
        m(x)
    if ask == "prepare":
        m.prepare({"x": x})
    elif ask == "explain":
        assert [c.engine for c in m.explain({"x": x}).report.clusters] == ["asked"]
    elif ask == "partitioned":
        assert [n.op_type for n in m.partitioned({"x": x}).nodes] == ["EngineInputConvert", "Launch"]
    else:
        m.prepare({"x": x})
        held()
        assert m.wait(60)
        m.save(tmp_path / "m.xrt")
        assert XRTModule.load(tmp_path / "m.xrt", guard=True).report().clusters[0]["state"] == "live"
    held()
    np.testing.assert_array_equal(m(x), want)
    assert m.wait(60)
    np.testing.assert_array_equal(m(x), want)
    (cluster,) = m.report().clusters
    assert cluster["state"] == "live"
    assert Counter(op for op, _ in Asked.asked)["MatMul"] <= 8
    m.close()


def test_explain_after_a_call_tells_of_the_engines() -> None:
    """Without inputs too, where the last plan is the host's."""
    graph, x, _ = chain()
    with module(graph, "asked", **ALONE) as m:
        m(x)
        assert [c.engine for c in m.explain().report.clusters] == ["asked"]


def test_a_mark_that_cannot_be_obeyed_reaches_the_caller() -> None:
    """At the first call, with the node's name and the reason."""
    x, y = Value("x", TensorType(F32, (2,))), Value("y")
    pinned = Node("Mul", [x, x], [y], version=14, name="it", annotations=Annotations(engine="picky", region="r"))
    with module(graph_of([x], [y], [pinned]), "picky", **ALONE) as m:
        with pytest.raises(XRTError, match="it.*products only"):
            m(np.ones(2, np.float32))
        assert m.report().planning == ()


def test_an_engine_that_cannot_be_used_is_an_error_when_it_is_named() -> None:
    """When the module is made, as without a guard; in "auto" it only does not take part."""

    class Absent(tested.Plain):
        name = "absent"

        def probe(self) -> EngineStatus:
            return EngineStatus(False, (), "", "it is not here", "bring it")

    graph, x, want = chain()
    with registered(Absent):
        with pytest.raises(EngineError, match="it is not here"):
            module(graph, "absent")
        with module(graph, "auto", **ALONE) as m:
            np.testing.assert_array_equal(m(x), want)
            assert "absent" not in m.engines


# --- failures --------------------------------------------------------------------------------------------------------


def test_an_engine_that_hangs_when_it_is_asked() -> None:
    """One event; the host stays; the module waits no longer than its limit, and closes at once."""
    go = threading.Event()
    Asked.before = staticmethod(lambda: go.wait(600))
    graph, x, want = chain()
    with captured_events() as events, module(graph, "asked", **{**ALONE, "guard_timeout": 0.2}) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(30)
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(30)
        (row,) = m.report().planning
        assert (row["state"], row["reason"].partition(":")[0]) == ("failed", "hung")
        assert "planning it with engines failed (hung" in m.report().as_text()
    asked_by_then = len(Asked.asked)
    go.set()
    assert eventually(lambda: not abandoned_threads())
    assert fallbacks(events) == [("plan", "hung")]
    assert len(Asked.asked) == asked_by_then <= 1  # it was cancelled and does not go on


def test_a_compilation_that_hangs_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is retried once the abandoned thread has come back, and takes no further thread until then."""
    monkeypatch.setattr("xrt_core.compiler.tiering._BUSY", 0.0)
    go = threading.Event()
    Asked.before = staticmethod(lambda: go.wait(600))
    graph, x, want = chain()
    with module(graph, "asked", **{**ALONE, "guard_timeout": 0.2, "guard_retry": 0.001}) as m:
        # on a busy machine the limit may run out before it is asked, and the next call begins anew
        assert eventually(lambda: m(x) is not None and m.wait(60) and len(abandoned_threads()) == 1)
        for _ in range(20):
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(0)
        assert len(abandoned_threads()) == 1
        go.set()
        assert eventually(lambda: m(x) is not None and m.wait(60) and m.report().clusters)
        assert m.wait(60)
        assert m.report().clusters[0]["state"] == "live"


def abandoned_threads() -> list[threading.Thread]:
    """Those that wait in `Asked.before`."""
    frames = sys._current_frames()
    return [t for t in threading.enumerate() if t.ident in frames and _is_within(frames[t.ident], Asked.supports)]


def _is_within(frame: FrameType | None, call: Any) -> bool:
    while frame is not None and frame.f_code is not call.__code__:
        frame = frame.f_back
    return frame is not None


def test_planning_that_fails_is_retried() -> None:
    """By a call after the wait; then the engine has it."""
    broken = True

    def breaks_launches(graph: Graph) -> Graph:
        if broken and any(n.op_type == "Launch" for n in graph.nodes):
            raise RuntimeError("no launches today")
        return graph

    register_pass(breaks_launches, name="breaks_launches", stage="engines", after="subblock_to_engine")
    try:
        graph, x, want = chain()
        with captured_events() as events, module(graph, "asked", **{**ALONE, "guard_retry": 0.001}) as m:
            assert eventually(lambda: np.array_equal(m(x), want) and m.wait(60) and len(events) > 1)
            assert set(fallbacks(events)) == {("plan", "raised")}
            broken = False
            assert eventually(lambda: np.array_equal(m(x), want) and m.wait(60) and m.report().clusters)
            assert m.wait(60)
            assert m.report().clusters[0]["state"] == "live"
            assert m.report().planning == ()
    finally:
        unregister_pass("breaks_launches")


def test_a_module_runs_the_passes_that_there_were() -> None:
    """Also in the plan that is made later."""
    seen: list[str] = []
    graph, x, want = chain()
    with module(graph, "asked", **ALONE) as m:
        register_pass(lambda g: seen.append("ran") or g, name="too_late")
        try:
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)
        finally:
            unregister_pass("too_late")
    assert seen == []


# --- at the same time ------------------------------------------------------------------------------------------------


def test_many_threads_plan_once() -> None:
    """Every one has the host's numbers, and the engine is asked about each node once for the partition."""
    graph, x, want = chain()
    wrong: list[int] = []
    with module(graph, "asked", **ALONE) as m:

        def call(k: int) -> None:
            for _ in range(20):
                if not np.array_equal(m(x), want):
                    wrong.append(k)

        threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert m.wait(60)
        assert len(m.events.recent("host_first")) == 1
        assert len(m.events.recent("specialised")) == 1
        assert len(m.report().clusters) == 1
    assert not wrong


def test_a_signature_that_goes_while_it_waits(held: Callable[[], None]) -> None:
    """An evicted signature is not planned; when it is called again it is."""
    value, square = Value("v", TensorType(F32, (None,))), Value("w")
    graph = graph_of([value], [square], [node("Mul", [value, value], [square])], "square")
    with module(graph, "asked", cache_size=1, **ALONE) as m:
        for n in (2, 3):
            v = np.arange(n, dtype=np.float32)
            np.testing.assert_array_equal(m(v), v * v)
        assert len(m.report().planning) == 2
        held()
        assert m.wait(60)
        assert len(m.events.recent("specialised")) == 1
        v = np.arange(2, dtype=np.float32)
        np.testing.assert_array_equal(m(v), v * v)
        assert m.wait(60)
        assert len(m.events.recent("specialised")) == 2


def test_bodies_and_late_parts_are_planned_with_their_graph() -> None:
    """After one call and a wait the clusters within an If, and behind a NonZero, are live: from a warm-up run."""

    def build(v: Any) -> Any:
        picked = ops.Transpose(ops.NonZero(v))
        flag = ops.Greater(ops.ReduceSum(v), np.float32(0))
        branch = ops.If(flag, then_branch=lambda: ops.Mul(ops.Exp(v), v), else_branch=lambda: ops.Add(ops.Exp(v), v))
        return branch, ops.Mul(picked, picked)

    v = np.array([1, 0, 2], np.float32)
    want = XRTModule(build, engine="host")(v)
    with module(build, "asked", **ALONE) as m:
        for found, right in zip(m(v), want, strict=True):
            np.testing.assert_array_equal(found, right)
        assert m.wait(60)
        before = m.report().clusters
        assert sorted(c["operators"] for c in before) == ["Exp, Mul", "ReduceSum, Greater", "Transpose, Mul"]
        assert {c["state"] for c in before} == {"live"}
        for found, right in zip(m(v), want, strict=True):
            np.testing.assert_array_equal(found, right)
        after = m.report().clusters
        assert [c["host_calls"] for c in after] == [1] * len(after)
        assert len(after) == len(before)
        assert len(m.events.recent("host_first")) == 1  # parts of the host's plan are the host's
        np.testing.assert_array_equal(m(-v)[0], np.exp(-v) - v)  # the warm-up run did not take this branch
        assert len(m.events.recent("host_first")) == 2
        assert m.wait(60)
        np.testing.assert_array_equal(m(-v)[0], np.exp(-v) - v)
        (late,) = [c for c in m.report().clusters if c["operators"] == "Exp, Add"]
        assert (late["state"], late["calls"], late["host_calls"]) == ("live", 2, 1)


def test_inputs_of_the_call_reach_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is allowed: copies, so that the caller may go on with the array."""
    from xrt_core.guard.manager import GuardManager

    given: list[Any] = []
    begin = GuardManager.begin

    def spy(self: GuardManager, launch: Any, arrays: Any, seconds: float | None = 0.0) -> None:
        given.append(None if arrays is None else [np.array(a) for a in arrays])
        begin(self, launch, arrays, seconds)

    monkeypatch.setattr(GuardManager, "begin", spy)
    graph, x, want = chain()
    for allowed in (False, True):
        given.clear()
        mine = x.copy()
        with module(graph, "asked", guard_real_inputs=allowed, **ALONE) as m:
            np.testing.assert_array_equal(m(mine), want)
            mine[...] = 0
            assert m.wait(60)
        if allowed:
            np.testing.assert_array_equal(given[0][0], x)
        else:
            assert given[0] is None


@dataclass
class Waiting:
    """Something to plan."""

    name: str = "square"

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Nothing to do."""

    def postpone(self, first: float) -> None:
        """Nothing to do."""


def test_inputs_of_all_calls_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many new signatures at once do not exhaust the memory."""
    kept: Queue[tuple[background.CompilationRecord, Any]] = Queue()
    monkeypatch.setattr(background, "MAX_INPUT_BYTES", 100)
    monkeypatch.setattr(
        background.BackgroundCompiler, "_submit", lambda self, record, inputs: kept.put((record, inputs))
    )
    settings = GuardSettings.of(resolve({"guard": True}))
    assert settings is not None
    made = background.BackgroundCompiler(settings, "asked", None, EventLog())
    plans = [Waiting() for _ in range(3)]
    for plan in plans:
        made.begin(plan, [np.zeros(6), [np.zeros(2), None]])  # 64 bytes
    records = dict(kept.get(timeout=10) for _ in plans)
    (first,) = [r for r, inputs in records.items() if inputs is not None]
    first.done.set()
    made.begin(plans[0], [np.zeros(8)])
    assert kept.get(timeout=10)[1] is not None


def test_a_cluster_for_which_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has the host's answer, and there is one event."""

    def full(self: WorkerPool, job: Job) -> None:
        raise WorkerFailure("unusable", "no thread can be started")

    graph, x, want = chain()
    with captured_events() as events, module(graph, "asked", guard_async=False, **ALONE) as m:
        monkeypatch.setattr(WorkerPool, "submit", full)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["state"] == "failed"
    assert fallbacks(events) == [("compile", "unusable")]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_closing_while_it_waits(held: Callable[[], None]) -> None:
    """Nothing is planned after that, `wait` returns, and the host answers."""
    graph, x, want = chain()
    m = module(graph, "asked", **ALONE)
    m(x)
    m.close()
    assert m.wait(0)
    held()
    assert eventually(lambda: not [t for t in threading.enumerate() if isinstance(t, threading.Timer)])
    job = Job(lambda slot: None, None)
    planning_pool().submit(job)
    assert job.done.wait(60)  # and with it whatever was queued before
    np.testing.assert_array_equal(m(x), want)
    assert Asked.asked == []
    assert m.report().clusters == ()


def test_waiting_for_what_was_closed_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` returns although a job was running when the module was closed, however far it still gets."""
    entered, closed, cleared, go = (threading.Event() for _ in range(4))

    def outcome(self: ClusterBuilder, launch: GuardedLaunch, *_: Any) -> Any:
        entered.set()
        closed.wait(30)
        launch.record.move(State.COMPILING)
        cleared.set()
        go.wait(60)
        raise WorkerFailure("closed", "it was given up")

    monkeypatch.setattr(ClusterBuilder, "outcome", outcome)
    graph, x, _ = chain()
    m = module(graph, "asked", **ALONE)
    m(x)
    assert entered.wait(30)
    m.close()
    closed.set()
    assert cleared.wait(30)
    waiting = threading.Thread(target=m.wait, daemon=True)
    waiting.start()
    go.set()
    waiting.join(60)
    assert not waiting.is_alive()


IMPORTING = """
    import sys, threading
    import numpy as np
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    function, x = functions.chain()
    entered, closing = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("xrt_core.") and "xrt_core.guard.worker_pool" in sys.modules:
                sys.meta_path.remove(self)
                entered.set()
                closing.wait(60)

    sys.meta_path.insert(0, Slow())
    with XRTModule(function.body, engine="auto", guard=True) as m:
        m(x)
        assert entered.wait(60)
        closing.set()
    print("closed")
"""


@pytest.mark.slow
def test_closing_while_the_pool_is_imported() -> None:
    """A module that another thread has half imported is waited for."""
    assert run_python(IMPORTING) == "closed"


LEAVES = """
    import time
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    function, x = functions.chain()
    m = XRTModule(function.body, engine="auto", guard=True)
    m(x)
    time.sleep({seconds})
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a matter of how threads end")
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_shutdown_during_capability_queries(seconds: float) -> None:
    """It ends without an error, long before the compilation would."""
    assert run_python(LEAVES.format(seconds=seconds)) == ""


@pytest.mark.parametrize("whole", [True, False])
def test_no_call_waits_for_the_host_a_second_time(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answered first is what the executable is compared with, where that computes the whole graph."""
    answered: list[str] = []
    original = GuardedLaunch.on_host
    monkeypatch.setattr(GuardedLaunch, "on_host", lambda self, arrays: answered.append("") or original(self, arrays))
    monkeypatch.setattr(tested.Plain, "supports", lambda self, node, *_: Support(whole or node.op_type != "Exp"))

    def build(v: Any) -> Any:
        return ops.Exp(ops.Mul(ops.Tanh(v), v))

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with module(build, "plain", **ALONE) as m:
        want = m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        (row,) = m.report().clusters
        assert (row["state"], row["shadow_runs"]) == ("live", 1)
        assert bool(answered) != whole


def test_calls_are_kept_for_the_first_comparison_within_limits(
    held: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many shapes that wait for their plans; nothing is kept where no engine takes the graph, or after a failure."""
    monkeypatch.setattr(background, "_MOST_KEPT", 1000)
    with module(lambda v: ops.Exp(ops.Tanh(v)), "plain", cache="off", **ALONE) as m:
        for rows in range(1, 9):
            m(np.ones((rows, 10), np.float32))  # 40 bytes a row, inputs and results
        compiler = m._pipeline.background
        kept = list(compiler._answered)
        assert len(kept) == 4
        assert sum(a.nbytes for a in kept) <= 1000
        assert compiler.room == 1000 - sum(a.nbytes for a in kept)
        del kept
        monkeypatch.setattr(tested.Plain, "supports", lambda self, node, *_: Support.no("not here"))
        held()
        assert m.wait(60)
        for rows in range(1, 9):
            m(np.ones((rows, 10), np.float32))
        assert eventually(lambda: compiler.room == 1000)
