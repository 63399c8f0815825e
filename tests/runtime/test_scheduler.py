"""Launches side by side: at the same time, and otherwise exactly as one after another. No test looks at a clock."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engines import SecondEngine, chosen, fake_engine
from tests.guard.guarded import eventually
from tests.host_run import assert_same
from tests.profiles import examples
from tests.random_graphs import F32, RandomGraph, graph_of, graphs, node
from xrt_core.compiler.services import usable_processors
from xrt_core.compiler.stages import Planned
from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import OptionError
from xrt_core.host import executor
from xrt_core.host.executor import host_kernel, reusable_inputs, reusing_kernel
from xrt_core.ir.function import Function, InputOutputAlias
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.options import from_text, resolve
from xrt_core.runtime import scheduler
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan
from xrt_core.runtime.recording import Span, Timeline
from xrt_core.runtime.scheduler import independent_lanes, shared

pytestmark = pytest.mark.tiny_clusters  # launches run beside each other

X = np.array([1, -2], np.float32)
WAIT = 60  # seconds after which a test that would hang fails


def f32(name: str, *shape: int) -> Value:
    return Value(name, TensorType(F32, shape or (2,)))


def fork_and_join() -> Graph:
    """Neg(x) + Abs(x)."""
    x, a, b, y = f32("x"), f32("a"), f32("b"), f32("y")
    return graph_of([x], [y], [node("Neg", [x], [a]), node("Abs", [x], [b]), node("Add", [a, b], [y])])


class Steps:
    """A graph of made-up nodes; each has a lane ("" for the host) and a function, sum and plus one unless given."""

    def __init__(self) -> None:
        self.x = f32("x")
        self.nodes: list[Node] = []
        self.lanes: dict[str, str] = {}
        self.calls: dict[str, Callable[[Sequence[Any]], Any]] = {}
        self.began: list[str] = []
        self.threads: dict[str, int] = {}

    def add(
        self, name: str, *inputs: Value, lane: str = "", call: Callable[[Sequence[Any]], Any] | None = None
    ) -> Value:
        made = f32(name)
        self.nodes.append(Node("F", inputs, [made], domain="test", version=1, name=name))
        self.lanes[name] = lane
        self.calls[name] = call or (lambda arrays: sum(arrays) + 1)
        return made

    def lower(self, n: Node) -> Lowered:
        def run(arrays: Sequence[Any]) -> Sequence[Any]:
            self.began.append(n.name)
            self.threads[n.name] = threading.get_ident()
            return (self.calls[n.name](arrays),)

        return Lowered(run, HOST, n.name, lane=self.lanes[n.name])

    def plan(self, *outputs: Value, side_by_side: bool = True) -> Plan:
        plan = make_plan(graph_of([self.x], outputs, self.nodes), self.lower)
        if side_by_side:
            plan.run_side_by_side()
        return plan


def fail(error: BaseException, *first: threading.Event) -> Callable[[Sequence[Any]], Any]:
    """Raises, after these events."""

    def call(arrays: Sequence[Any]) -> Any:
        for e in first:
            assert e.wait(WAIT)
        raise error

    return call


def then(event: threading.Event, *first: threading.Event) -> Callable[[Sequence[Any]], Any]:
    """Waits for some events and sets another."""

    def call(arrays: Sequence[Any]) -> Any:
        for e in first:
            assert e.wait(WAIT)
        event.set()
        return arrays[0]

    return call


# --- at the same time ---


def test_two_engines_are_in_flight_at_once() -> None:
    """Each waits for the other to begin; the module finds out by itself that they may."""
    barrier = threading.Barrier(2)

    def meet(_: Any) -> None:
        barrier.wait(WAIT)

    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes, second.takes = (lambda n: n.op_type == "Neg"), (lambda n: n.op_type == "Abs")
        first.on_run = second.on_run = meet
        m = XRTModule(fork_and_join(), engine=["fake", "second"], parallel=True)
        for _ in range(3):
            np.testing.assert_array_equal(m(X), -X + np.abs(X))
        assert (first.runs, second.runs) == (3, 3)
        assert not m.explain().errors


def test_synchronous_mode() -> None:
    """parallel=False: all on the thread of the caller."""
    threads = set()
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes, second.takes = (lambda n: n.op_type == "Neg"), (lambda n: n.op_type == "Abs")
        first.on_run = second.on_run = lambda _: threads.add(threading.get_ident())
        m = XRTModule(fork_and_join(), engine=["fake", "second"], parallel=False)
        np.testing.assert_array_equal(m(X), -X + np.abs(X))
    assert threads == {threading.get_ident()}


def test_the_host_stays_on_the_callers_thread() -> None:
    """Host steps run there while launches are in flight, and so does a launch that has nothing beside it."""
    s = Steps()
    host_done = threading.Event()
    alone = s.add("alone", s.x, lane="a")
    one = s.add("one", alone, lane="a", call=then(threading.Event(), host_done))
    two = s.add("two", alone, lane="b", call=then(threading.Event(), host_done))
    host = s.add("host", alone, call=then(host_done))
    last = s.add("last", s.add("sum", one, two, host), lane="b")
    (got,) = s.plan(last).run([X])
    np.testing.assert_array_equal(got, 3 * (X + 1) + 2)
    here = threading.get_ident()
    assert {n for n, t in s.threads.items() if t == here} == {"alone", "host", "sum", "last"}


def test_one_lane_is_one_after_another() -> None:
    """Independent launches of one engine do not run at the same time, nor out of order."""
    s = Steps()
    inside, most = [0], [0]
    lock = threading.Lock()

    def busy(arrays: Sequence[Any]) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        for _ in range(200):
            threading.Event().is_set()
        with lock:
            inside[0] -= 1
        return arrays[0]

    values = [s.add(f"a{i}", s.x, lane="a", call=busy) for i in range(6)]
    other = s.add("b", s.x, lane="b")
    plan = s.plan(s.add("sum", *values, other))
    for _ in range(20):
        s.began.clear()
        plan.run([X])
        assert [n for n in s.began if n.startswith("a")] == [f"a{i}" for i in range(6)]
    assert most == [1]


def test_what_writes_into_its_inputs_runs_alone() -> None:
    """A launch with an alias waits for all before it, and all after it wait."""
    p, q = f32("p"), f32("q")
    body = graph_of([p], [q], [node("Neg", [p], [q])])
    function = Function.from_graph(body, aliases=[InputOutputAlias(0, 0)])
    s = Steps()
    values = [s.add(f"a{i}", s.x, lane="a") for i in range(2)] + [s.add("b", s.x, lane="b")]
    update = s.add("update", s.x, lane="b")
    after = [s.add("c", s.x, lane="a"), s.add("d", s.x, lane="b")]

    def lower(n: Node) -> Lowered:
        if n.name != "update":
            return s.lower(n)
        launch = Launch(function, "b", None, lambda: lambda arrays: s.began.append("update") or [arrays[0]])  # type: ignore[func-returns-value]
        return Lowered(launch, HOST, "update", lane="b")

    plan = make_plan(graph_of([s.x], [*values, update, *after], s.nodes), lower)
    plan.run_side_by_side()
    for _ in range(20):
        s.began.clear()
        plan.run([X])
        assert set(s.began[:3]) == {"a0", "a1", "b"}
        assert s.began[3] == "update"


def test_many_callers_share_the_pool() -> None:
    """Runs of several threads at a time, each with its own arrays; the pool stays bounded."""
    s = Steps()
    a, b, c = (s.add(n, s.x, lane=n) for n in "abc")
    plan = s.plan(s.add("sum", a, b, c))
    arrays = [np.full(2, i, np.float32) for i in range(64)]
    with ThreadPoolExecutor(8) as callers:
        for x, got in zip(arrays, callers.map(lambda x: plan.run([x])[0], arrays), strict=True):
            np.testing.assert_array_equal(got, 3 * (x + 1) + 1)
    assert scheduler.pool._threads <= scheduler._MAX_THREADS


def test_the_callers_context_goes_along() -> None:
    """What NumPy's errstate, or any context variable, says where the module is called holds on the pool's threads."""
    s = Steps()
    seen: list[str] = []

    def look(arrays: Sequence[Any]) -> Any:
        seen.append(np.geterr()["divide"])
        return arrays[0]

    a, b = s.add("a", s.x, lane="a", call=look), s.add("b", s.x, lane="b", call=look)
    s.plan(s.add("sum", a, b)).run([X])
    assert seen == ["ignore", "ignore"]  # as in host steps


FORKED = """
import os, numpy as np
from tests.runtime.test_scheduler import Steps, X
s = Steps()
plan = s.plan(s.add("sum", s.add("a", s.x, lane="a"), s.add("b", s.x, lane="b")))
plan.run([X])
child = os.fork()
result = plan.run([X])[0]
assert (result == 2 * X + 3).all()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of the parent are not in the child."""
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=WAIT)


# --- as one after another ---


@pytest.mark.parametrize("late_first", [False, True])
def test_the_earliest_failure_is_raised(late_first: bool) -> None:
    """Whichever comes first in time; what comes after it in the plan and has not begun does not begin."""
    s = Steps()
    failed, begun = threading.Event(), threading.Event()
    late = ValueError("late")

    def fail_late(arrays: Sequence[Any]) -> Any:
        begun.set()
        failed.set()
        raise late

    early = fail(KeyError("early"), begun, *([failed] if late_first else []))
    a = s.add("a", s.x, lane="a", call=early)
    b = s.add("b", s.x, lane="b", call=fail_late)
    after_a, after_b = s.add("after_a", a), s.add("after_b", b, lane="b")
    plan = s.plan(s.add("sum", after_a, after_b))
    for _ in range(10):
        s.began.clear()
        failed.clear()
        begun.clear()
        with pytest.raises(KeyError, match="early"):
            plan.run([X])
        assert sorted(s.began) == ["a", "b"]


def test_what_comes_before_a_failure_still_runs() -> None:
    """It could fail as well, and would be the one to tell of."""
    s = Steps()
    begun = threading.Event()
    a = s.add("a", s.x, lane="a", call=then(threading.Event(), begun))
    early = s.add("early", a, lane="a", call=fail(KeyError("early")))
    b = s.add("b", s.x, lane="b", call=lambda _: begun.set() or fail(ValueError("late"))(()))
    with pytest.raises(KeyError, match="early"):
        s.plan(s.add("sum", early, b)).run([X])


@pytest.mark.parametrize("name", ["a", "b", "host", "sum"])
def test_a_failure_anywhere_leaves_the_plan_usable(name: str) -> None:
    """In either branch or on the host; and when it is over, nothing of it is left."""
    s = Steps()
    a, b, h = s.add("a", s.x, lane="a"), s.add("b", s.x, lane="b"), s.add("host", s.x)
    plan = s.plan(s.add("sum", a, b, h))
    usual, s.calls[name] = s.calls[name], fail(ValueError(name))
    with pytest.raises(ValueError, match=name):
        plan.run([X])
    s.calls[name] = usual
    np.testing.assert_array_equal(plan.run([X])[0], 3 * (X + 1) + 1)


def test_an_interrupt_in_a_host_step() -> None:
    """What is in flight is waited for, what has not begun does not begin."""
    s = Steps()
    interrupted, ended, begun = threading.Event(), threading.Event(), threading.Barrier(3)

    def slow(arrays: Sequence[Any]) -> Any:
        begun.wait(WAIT)
        assert interrupted.wait(WAIT)
        ended.set()
        return arrays[0]

    def interrupt(arrays: Sequence[Any]) -> Any:
        begun.wait(WAIT)
        interrupted.set()
        raise KeyboardInterrupt

    a, b = s.add("a", s.x, lane="a", call=slow), s.add("b", s.x, lane="b", call=slow)
    queued, h = s.add("queued", s.x, lane="a"), s.add("host", s.x, call=interrupt)
    plan = s.plan(s.add("sum", a, b, queued, h))
    with pytest.raises(KeyboardInterrupt):
        plan.run([X])
    assert ended.is_set()
    assert sorted(s.began) == ["a", "b", "host"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads here")
def test_control_c_while_launches_run() -> None:
    """The caller waits for launches when the signal comes."""
    s = Steps()
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    both = threading.Barrier(2)

    def kill(arrays: Sequence[Any]) -> Any:
        if both.wait(WAIT) == 0:
            signal.pthread_kill(main, signal.SIGINT)
        return arrays[0]

    a, b = s.add("a", s.x, lane="a", call=kill), s.add("b", s.x, lane="b", call=kill)
    plan = s.plan(s.add("sum", s.add("after", a, b, lane="a")))

    def run() -> None:
        plan.run([X])
        threading.Event().wait(WAIT)  # the signal may come a moment after the run

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGINT, before)
    s.calls.update(a=s.calls["sum"], b=s.calls["sum"])
    np.testing.assert_array_equal(plan.run([X])[0], 2 * (X + 1) + 2)


def test_a_launch_that_fails_is_run_by_the_host_as_ever() -> None:
    """An engine that fails on a thread of the pool changes no result."""
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes, second.takes = (lambda n: n.op_type == "Neg"), (lambda n: n.op_type == "Abs")

        def fails(_: Any) -> None:
            raise RuntimeError("device trouble")

        second.on_run = fails
        m = XRTModule(fork_and_join(), engine=["fake", "second"], parallel=True)
        np.testing.assert_array_equal(m(X), -X + np.abs(X))
        assert "device trouble" in m.explain().errors["second_0"]


def test_registers_die_when_their_last_reader_is_done() -> None:
    """In whichever order the readers end: neither sooner nor at the end of the run."""
    s = Steps()
    made: list[weakref.ref[Any]] = []

    def make(arrays: Sequence[Any]) -> Any:
        array = arrays[0] + 1
        made.append(weakref.ref(array))
        return array

    alive: dict[str, bool] = {}
    v = s.add("v", s.x, call=make)
    a, b = s.add("a", v, lane="a"), s.add("b", v, lane="b")
    s.add("unread", v, call=make)

    def look(arrays: Sequence[Any]) -> Any:
        alive.update({str(i): r() is not None for i, r in enumerate(made)})
        return arrays[0]

    last = s.add("last", a, b, call=look)
    s.plan(last).run([X])
    assert alive == {"0": False, "1": False}


@pytest.mark.parametrize("lane", ["", "b"])
def test_a_failed_run_holds_no_arrays(lane: str) -> None:
    """Once its exception is dealt with, without the garbage collector."""
    s = Steps()
    made: list[weakref.ref[Any]] = []

    def make(arrays: Sequence[Any]) -> Any:
        array = arrays[0] + 1
        made.append(weakref.ref(array))
        return array

    v = s.add("v", s.x, call=make)
    a, b = s.add("a", v, lane="a"), s.add("b", v, lane=lane, call=lambda _: [][0])
    plan = s.plan(s.add("sum", v, a, b, s.add("c", v, lane="c")))
    gc.disable()
    try:
        with contextlib.suppress(IndexError):
            plan.run([X])
        assert eventually(lambda: made[0]() is None)  # a thread of the pool may still be on its way out of its task
    finally:
        gc.enable()


def test_a_buffer_is_not_written_over_while_a_launch_waits_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the plan the host step is the last reader; beside launches it is not."""
    monkeypatch.setattr(executor, "MINIMUM_REUSED", 0)
    s = Steps()
    host_done = threading.Event()
    v = Value("v", TensorType(F32, (2,)))
    y = Value("y", TensorType(F32, (2,)))
    exp, neg = node("Exp", [s.x], [v]), node("Neg", [v], [y])
    first = s.add("first", s.x, lane="a", call=then(threading.Event(), host_done))
    other = s.add("other", s.x, lane="b", call=then(threading.Event(), host_done))
    reader = s.add("reader", v, lane="a", call=lambda arrays: arrays[0].copy())
    signal_done = s.add("signal", y, call=then(host_done))
    total = s.add("total", first, other, signal_done)
    nodes = [exp, s.nodes[0], s.nodes[1], s.nodes[2], neg, *s.nodes[3:]]

    def lower(n: Node) -> Lowered:
        if n.domain:
            return s.lower(n)
        return Lowered(
            host_kernel(n), HOST, n.op_type, reusable=reusable_inputs(n), reusing=lambda d: reusing_kernel(n, d)
        )

    plan = make_plan(graph_of([s.x], [reader, total], nodes), lower)
    plan.run_side_by_side()
    for _ in range(10):
        host_done.clear()
        np.testing.assert_array_equal(plan.run([X])[0], np.exp(X))


def planned(m: XRTModule) -> Planned:
    caller = m._source.caller
    assert caller is not None
    assert caller.last is not None
    return caller.last


def same_as_sequential(g: RandomGraph, seed: int, share: int) -> bool:
    """Results of a random graph on two engines that take random nodes, twice; whether anything ran side by side."""
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes, second.takes = chosen(seed, share), chosen(seed + 1, share + 3)
        options: dict[str, Any] = {"engine": ["fake", "second"], "maximum_nodes": 2}
        sequential = XRTModule(g.graph, parallel=False, **options)
        beside = XRTModule(g.graph, parallel=True, **options)
        wanted = sequential(*g.arrays)
        for _ in range(2):
            got = beside(*g.arrays)
            if isinstance(wanted, tuple):
                assert_same(got, wanted)
            else:
                assert_same([got], [wanted])
        return planned(beside).side_by_side


@pytest.mark.slow
@examples(500)
@given(graphs(minimum=6, maximum=16), st.integers(0, 9), st.integers(2, 6))
def test_random_graphs(g: RandomGraph, seed: int, share: int) -> None:
    """The very same results, bit for bit."""
    same_as_sequential(g, seed, share)


# --- whether ---


@st.composite
def lanes_of_dags(draw: st.DrawFn) -> tuple[Graph, dict[str, str]]:
    x = f32("x")
    pool, nodes, lanes = [x], [], {}
    for i in range(draw(st.integers(1, 12))):
        out = f32(f"v{i}")
        read = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2))
        nodes.append(Node("F", read, [out], domain="test", version=1, name=f"n{i}"))
        lanes[f"n{i}"] = draw(st.sampled_from(["", "", "a", "b", "c"]))
        pool.append(out)
    return graph_of([x], [pool[-1]], nodes), lanes


@pytest.mark.slow
@examples(300)
@given(lanes_of_dags())
def test_independent_lanes_of_random_graphs(case: tuple[Graph, dict[str, str]]) -> None:
    """Against every pair of launches and the ways between them."""
    graph, lanes = case
    names = [n.name for n in graph.nodes]
    ahead: list[set[int]] = []
    for preds in graph.predecessors:
        ahead.append(set(preds).union(*(ahead[p] for p in preds)))
    wanted = set()
    for i, a in enumerate(names):
        for j, b in enumerate(names[:i]):
            if lanes[a] and lanes[b] and lanes[a] != lanes[b] and j not in ahead[i]:
                wanted |= {lanes[a], lanes[b]}
    assert independent_lanes(graph, lambda n: lanes[n.name]) == wanted


def test_the_option() -> None:
    """Off unless asked for, from text as well."""
    assert resolve({}).parallel is False
    assert [from_text("parallel", t, "test") for t in ("on", "0")] == [True, False]
    with pytest.raises(OptionError, match="parallel"):
        resolve({"parallel": "auto"})


def test_engines_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they always run so: the cores over the engines, at least one; what is asked for wins."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(9), raising=False)
    with fake_engine(), fake_engine(SecondEngine):

        def threads(**options: Any) -> int | None:
            m = XRTModule(fork_and_join(), **options)
            return m._pipeline.services.compilation.options.threads

        both = ["fake", "second"]
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert threads(engine=both, parallel=True) == 4
        assert threads(engine=both, parallel=True, threads=7) == 7
        assert threads(engine=both) is None
        assert threads(engine=both, parallel=False) is None
        assert threads(engine="fake", parallel=True) is None
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1), raising=False)
        assert threads(engine=both, parallel=True) == 1
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        assert threads(engine="fake") == 1  # of 8
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
        assert threads(engine="fake") == 3
        assert threads(engine="fake", threads=5) == 5


@pytest.mark.parametrize(
    ("cgroup", "files", "wanted"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/of/outside", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 9),
        ("5:memory:/x", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 9),
        ("odd", {}, 9),
    ],
)
def test_quotas_of_control_groups_count(
    cgroup: str, files: dict[str, str], wanted: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 1 and 2, rounded up; the least of a group and those around it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(9), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_processors(tmp_path) == wanted


def test_compilers_are_told_where_clusters_share_the_cores() -> None:
    """Where a plan has two on the CPU, whichever way it runs; not for an engine that is merely there. And whether the
    program computes by itself between calls."""
    told: list[bool] = []
    released: list[bool] = []
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        for e in (first, second):
            original = e.compiler

            def compiler(device: str, options: CompileOptions, make: Any = original) -> Any:
                told.append(options.shared)
                released.append(options.release_cores)
                return make(device, options)

            e.compiler = compiler
        first.takes, second.takes = (lambda n, op=op: n.op_type == op for op in ("Neg", "Abs"))
        XRTModule(fork_and_join(), engine=["fake", "second"], parallel=False, prune=False)(X)
        assert told == [True, True]
        told.clear()
        first.takes = lambda n: n.op_type != "Add"
        XRTModule(fork_and_join(), engine=["fake", "second"], prune=False)(X)
        assert not any(released)
        XRTModule(fork_and_join(), engine=["fake", "second"], prune=False, release_cores=True)(X)
        assert (told, released[-1]) == ([False, False], True)


# --- the timeline ---


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_run_with_its_times(side_by_side: bool) -> None:
    """Every step once, with its lane and thread; the same results; in the trace format a row for each lane."""
    s = Steps()
    plan = s.plan(s.add("sum", s.add("a", s.x, lane="a"), s.add("b", s.x, lane="b")), side_by_side=side_by_side)
    results, timeline = plan.run_timed([X])
    spans = timeline.spans
    np.testing.assert_array_equal(results[0], 2 * (X + 1) + 1)
    assert {x.label: x.lane for x in spans} == {"a": "a", "b": "b", "sum": ""}
    assert len(spans) == 3
    assert all(0 <= x.start <= x.end for x in spans)
    here = threading.current_thread().name
    assert {x.label for x in spans if x.thread == here} == ({"sum"} if side_by_side else {"a", "b", "sum"})
    ends = {x.label: x.end for x in spans}
    assert next(x.start for x in spans if x.label == "sum") >= max(ends["a"], ends["b"])
    events = timeline.to_json()["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == list(dict.fromkeys(x.lane or "host" for x in spans))
    drawn = {e["name"]: e for e in events if e["ph"] == "X"}
    assert {n: e["cat"] for n, e in drawn.items()} == {"a": "a", "b": "b", "sum": "host"}
    assert drawn["a"]["dur"] == pytest.approx(1e6 * next(x.end - x.start for x in spans if x.label == "a"))


def test_a_failing_run_has_its_times_too() -> None:
    """The exception is that of the step."""
    s = Steps()
    plan = s.plan(s.add("a", s.x, call=fail(ValueError("no"))))
    with pytest.raises(ValueError, match="no"):
        plan.run_timed([X])


def test_the_time_in_which_lanes_overlap() -> None:
    """Two at once and three at once count the same; touching ends do not."""

    def line(*times: tuple[float, float]) -> Timeline:
        return Timeline(tuple(Span(str(i), str(i), "", a, b) for i, (a, b) in enumerate(times)))

    assert line((0, 2), (2, 4)).overlap == 0
    assert line((0, 2), (1, 4)).overlap == 1
    assert line((0, 6), (1, 3), (2, 5)).overlap == 4
    assert line().overlap == 0


def test_shared_calls() -> None:
    """Two threads take the calls in turns; results are in order. Who comes meanwhile computes alone."""
    meet = threading.Barrier(2, timeout=30)
    threads = set()

    def together(i: int) -> int:
        meet.wait()
        threads.add(threading.get_ident())
        assert shared([partial(square, k) for k in range(3)]) == [0, 1, 4]  # beside the two that there are
        return i

    def square(i: int) -> int:
        threads.add(threading.get_ident())
        return i * i

    assert shared([partial(together, i) for i in range(6)]) == list(range(6))
    assert len(threads) == 2
    assert threading.get_ident() in threads
    assert shared([]) == []
    assert shared([lambda: 7]) == [7]


def test_shared_calls_that_fail() -> None:
    """The first error is raised when nothing runs any more, calls that have not started are left out, and the next
    ones have both threads again."""
    started: list[int] = []
    running = threading.Event()

    def call(i: int) -> int:
        started.append(i)
        if i == 0:
            assert running.wait(30)
            raise ValueError("first")
        if i == 1:
            running.set()
            started.append(-1)
            raise KeyError("second")
        return i

    meeting = threading.Barrier(2, timeout=30)

    def call_or_interrupt(i: int) -> int:
        meeting.wait()
        raise KeyboardInterrupt if i else ValueError("of the program's engine")

    with pytest.raises(ValueError, match="first"):
        shared([partial(call, i) for i in range(9)])
    with pytest.raises(KeyboardInterrupt):  # which no error hides
        shared([partial(call_or_interrupt, i) for i in range(2)])
    assert -1 in started
    assert not {2, 3, 4, 5, 6, 7, 8} & set(started)
    meet = threading.Barrier(2, timeout=30)
    assert shared([lambda: meet.wait() >= 0, lambda: meet.wait() >= 0]) == [True, True]
