"""GuardManager, from a module's first call to its end: what is compiled where, what is cached, what answers."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from tests.conformance import dev_models
from tests.guard import engines as tested
from tests.guard.guarded import (
    captured_events,
    chain,
    eventually,
    fallbacks,
    fresh,
    gone,
    leftovers,
    module,
    not_registered,
    registered,
    states,
)
from xrt_core import ops
from xrt_core.engine.contract import CompileOptions, Executable, GraphCompiler
from xrt_core.errors import OptionError
from xrt_core.frontends.onnx_export import save
from xrt_core.guard import launch as launch_module
from xrt_core.guard import manager
from xrt_core.guard.sampling import comparisons
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import WorkerSlot, process_pool
from xrt_core.host import blas_threads, freed_memory
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Value
from xrt_core.module import XRTModule
from xrt_core.plugins import plugins
from xrt_core.plugins.discovery import DISABLE_VARIABLE
from xrt_core.testing import functions
from xrt_core.testing.processes import run_python
from xrt_core.testing.stage_faults import STAGE_FAULTS
from xrt_core.verify import autotune, evaluate
from xrt_core.verify.checker import Nearness, ResultChecker

STATES = ["queued", "compiling", "verifying", "ready", "live"]


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> Iterator[None]:
    """Engines are there, and nothing is known."""
    forget_all()
    with registered(*tested.ALL):
        yield
    forget_all()


def product(size: int = 256) -> tuple[Graph, np.ndarray, np.ndarray]:
    """A chain of products that takes the host a while, an input, and the host's result, alike by any order of sums."""
    rng = np.random.default_rng(0)
    x = functions.value("x", size, size)
    w = Value.constant(np.eye(size, dtype=np.float32)[rng.permutation(size)], "w")
    names = [x, *(functions.value(f"v{i}", size, size) for i in range(6))]
    nodes = [functions.node("MatMul", [a, w], [b]) for a, b in itertools.pairwise(names)]
    made = functions.function("product", [x], nodes, [names[-1]])
    data = rng.uniform(0.5, 1.5, (size, size)).astype(np.float32)
    return made.body, data, XRTModule(made.body, engine="host")(data)


def pinned(graph: Graph, engine: str) -> Graph:
    """The graph with every node marked for an engine."""
    return graph.replace(
        nodes=[n.replace(annotations=n.annotations.replace(engine=engine, region="r")) for n in graph.nodes]
    )


# --- asynchronous and synchronous ------------------------------------------------------------------------------------


def test_the_states_of_a_cluster() -> None:
    """The host answers at once, the engine later; the report has the states and counts both."""
    graph, x, want = chain()
    with captured_events() as events, module(graph, "plain", guard_tune=False) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(60)
        assert m.report().clusters[0]["host_calls"] == 1
        for _ in range(20):
            np.testing.assert_array_equal(m(x), want)
        report = m.report()
    assert states(m) == STATES
    (cluster,) = report.clusters
    assert (cluster["calls"], cluster["host_calls"], cluster["chosen"]) == (21, 1, "plain")
    assert report.accelerated_share == pytest.approx(20 / 21)
    assert [e.name for e in events] == ["guard.begin", "guard.live"]
    assert leftovers() == []


def test_a_choice_that_drifts_is_revisited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race on a busy machine is provisional, in the report and in explain(). It is re-opened where calls take longer
    than they took in it: another engine that wins answers then, and the callers notice nothing."""
    graph, x, want = chain()
    busy, winner = True, "plain"

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        return autotune.Tuning(winner, {n: 1.0 + (n != winner) for n in runs}, 1, busy)

    monkeypatch.setattr(evaluate, "tune", tune)
    with captured_events() as events, module(graph, ["plain", "memo"], guard_sandbox=False, guard_tune=True) as m:
        m(x)
        assert m.wait(60)
        guard = m._pipeline.accelerated.services.guard
        assert guard is not None
        (launch,) = guard._all()
        assert (launch.record.chosen, launch.record.outcome.provisional) == ("plain", True)
        assert "provisional" in m.report().as_text()
        assert "provisional" in str(m.explain())
        busy, winner = False, "memo"
        assert eventually(lambda: launch not in guard._building)  # it is live a moment before its job has ended
        launch._failures.drifted(launch, "a call takes too long")
        assert eventually(lambda: launch.record.chosen == "memo")
        np.testing.assert_array_equal(m(x), want)
        assert states(m) == [*STATES, "ready", "live"]
        assert not launch.record.outcome.provisional
        assert eventually(lambda: launch not in guard._building)
        launch._failures.drifted(launch, "and again")
        assert eventually(lambda: launch.record.races == 2)
        assert states(m) == [*STATES, "ready", "live"]  # the same choice: nothing moves
        assert m.report().clusters[0]["host_calls"] == 1
    assert [e.name for e in events].count("guard.race") == 2


def test_wait_waits_for_judgements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the background judges first results, calls after `wait` are the engine's, and not the host's meanwhile."""
    monkeypatch.setattr(launch_module, "_LONG_TO_WAIT", 0.0)
    monkeypatch.setattr(ResultChecker, "nearness", lambda *args: Nearness.FAR)
    judge, go = ResultChecker.check_results, threading.Event()

    def check_results(*args: Any) -> Any:
        assert go.wait(30)
        return judge(*args)

    graph, x, want = chain()
    with module(graph, ["plain"], guard_sandbox=False, guard_tune=False) as m:
        m.prepare({graph.inputs[0].name: x})
        assert m.wait(60)
        monkeypatch.setattr(ResultChecker, "check_results", check_results)
        try:
            m(x)
            assert not m.wait(0)
        finally:
            go.set()
        assert m.wait(30)
        before = m.report().clusters[0]["host_calls"]
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["host_calls"] == before


def test_a_provisional_choice_of_the_host_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host won on a busy machine, and the cached verdict says so: after `guard_retry` there is another race."""
    graph, x, want = product(64)
    winner, races = ["host"], []

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        races.append(winner[0])
        return autotune.Tuning(winner[0], dict.fromkeys(runs, 1.0), 1, winner[0] == "host")

    monkeypatch.setattr(evaluate, "tune", tune)
    with module(graph, "plain", guard_sandbox=False, guard_tune=True, guard_retry=0.001) as m:
        m(x)
        assert m.wait(60)
        (cluster,) = m.report().clusters
        assert (cluster["state"], cluster["outcome"]["provisional"]) == ("rejected", True)
        winner[0] = "plain"
        assert eventually(lambda: np.array_equal(m(x), want) and m.report().clusters[0]["state"] == "live")
        np.testing.assert_array_equal(m(x), want)
    assert races == ["host", "plain"]
    with module(graph, "plain", guard_sandbox=False, guard_tune=True) as other:
        other(x)
        assert other.wait(60)
        assert other.report().clusters[0]["state"] == "live"
    assert races == ["host", "plain"]


@pytest.mark.parametrize(("host", "is_given_back"), [(0.1, True), (1e-4, False)])
def test_memory_of_the_host_is_given_back(host: float, is_given_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an executable answers, what the host's long calls have freed goes back to the system."""

    def tune(runs: Any, *args: Any, **options: Any) -> autotune.Tuning:
        return autotune.Tuning("plain", dict.fromkeys(runs, host), 1)

    given: list[int] = []
    monkeypatch.setattr(evaluate, "tune", tune)
    monkeypatch.setattr(manager, "give_back", lambda: given.append(1))
    graph, x, _ = product(64)
    with module(graph, "plain", guard_sandbox=False, guard_tune=True) as m:
        m(x)
        assert m.wait(60)
        assert eventually(lambda: bool(given)) if is_given_back else not given


def test_freed_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the C library keeps between blocks that are in use; without glibc nothing happens."""
    pages = pathlib.Path("/proc/self/statm")
    if pages.exists() and platform.libc_ver()[0] == "glibc":
        blocks = [bytes(100_000) for _ in range(500)]  # below the size from which a block is mapped by itself
        kept, blocks = blocks[::50], []
        before = int(pages.read_text().split()[1])
        freed_memory.give_back()
        assert int(pages.read_text().split()[1]) * 4096 < before * 4096 - 20_000_000
        assert len(kept) == 10
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    freed_memory.give_back()


def test_synchronous() -> None:
    """The first call is accelerated already, and another thread is not kept waiting: the host answers it."""
    graph, x, want = chain()
    tested.Waits.may.clear()
    with module(graph, "waits", guard_async=False, guard_sandbox=False, guard_tune=False) as m:
        first = threading.Thread(target=m, args=(x,))
        first.start()
        assert eventually(lambda: m.report().clusters and m.report().clusters[0]["state"] != "queued")
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["state"] != "live"
        tested.Waits.may.set()
        first.join(60)
        cluster = m.report().clusters[0]
        assert (cluster["state"], cluster["calls"], cluster["host_calls"]) == ("live", 2, 1)


def test_prepare_sets_it_going() -> None:
    """Without a call; `wait` returns whether it has ended, and True if nothing is guarded."""
    graph, x, _ = product(8)  # that nobody compiled in this process
    tested.Waits.may.clear()
    with module(graph, "waits", guard_sandbox=False, guard_tune=False) as m:
        assert m.wait(0)
        m.prepare({"x": x})
        assert not m.wait(0.05)
        tested.Waits.may.set()
        assert m.wait(60)
        m(x)
        assert m.report().clusters[0]["host_calls"] == 0
    assert XRTModule(graph, engine="plain").wait(0)
    assert XRTModule(graph, engine="plain").report().clusters == ()


def test_without_a_sandbox() -> None:
    """The same states in this process; no worker is started."""
    fresh()
    graph, x, want = chain()
    with module(graph, "plain", guard_sandbox=False, guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert states(m) == STATES
        assert process_pool().pids() == []


def test_what_was_verified_is_what_runs() -> None:
    """In one process too: the executable that the disk gave back, although the one that was compiled still exists."""
    graph, x, want = chain()
    options = {"guard_sandbox": False, "guard_async": False, "guard_tune": False}
    with module(graph, "wrong_until_stored", **options) as m:
        for _ in range(2):
            np.testing.assert_array_equal(m(x), want)
        assert tested.WrongUntilStored.compiled
        assert m.report().clusters[0]["host_calls"] == 0
    tested.WrongUntilStored.compiled.clear()


def test_asynchronous_alone() -> None:
    """Compiled in the background without verification; failures at run time are still caught."""
    graph, x, want = chain()
    with captured_events() as events, XRTModule(graph, engine="wrong_mul", guard_async=True) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(60)
        np.testing.assert_allclose(m(x), want * 1.5, rtol=1e-6)
    assert states(m) == ["queued", "compiling", "ready", "live"]
    assert fallbacks(events) == []


def test_every_signature_has_its_own_record() -> None:
    """And they come to rest each by itself."""
    with module(lambda v: ops.Mul(v, v), "plain", guard_tune=False) as m:
        for n in (2, 3):
            x = np.arange(n, dtype=np.float32)
            np.testing.assert_array_equal(m(x), x * x)
        assert m.wait(60)
        assert [(c["number"], c["state"]) for c in m.report().clusters] == [(0, "live"), (1, "live")]
        text = m.report().to_prometheus()
    assert 'xrt_cluster_state{cluster="plain_0",engine="plain",number="1",state="live"} 1.0' in text


# --- what is kept ----------------------------------------------------------------------------------------------------

PROCESS = """
    import json, sys
    import numpy as np
    from xrt_core.engine import engines
    from xrt_core.guard.worker_pool import process_pool
    from xrt_core.module import XRTModule
    from tests.guard import engines as tested
    from tests.guard.guarded import states
    found = {}
    for engine in (tested.Plain, tested.WrongMul):
        engines.register(engine)
        m = XRTModule(sys.argv[1], engine=engine.name, guard=True, guard_tune=False)
        m(np.ones((4, 8), np.float32))
        assert m.wait(60)
        m(np.ones((4, 8), np.float32))
        compiled = "compile" in [e.name for e in m.events]
        found[engine.name] = [states(m), len(process_pool().pids()), compiled, m.report().clusters[0]["reason"]]
    print(json.dumps(found))
"""


def in_a_process(model: pathlib.Path) -> dict[str, list[Any]]:
    """For two engines: states, number of workers, whether it compiled, and the reason, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROCESS), str(model)], capture_output=True, text=True,
        check=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
    )  # fmt: skip
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_second_process_neither_compiles_nor_verifies(tmp_path: pathlib.Path) -> None:
    """It reads the verdicts, those against nodes of an engine too, and loads what the first one's worker stored; no
    worker is started."""
    function, _ = functions.chain()
    save(function, tmp_path / "m.onnx")
    first, again = (in_a_process(tmp_path / "m.onnx") for _ in range(2))
    assert first["plain"][:3] == [STATES, 1, False]
    assert again["plain"] == [["queued", "ready", "live"], 0, False, first["plain"][3]]
    assert first["wrong_mul"][:2] == [STATES, 1]
    assert "right for 2 of 3 nodes" in first["wrong_mul"][3]
    assert again["wrong_mul"][:2] == [["queued", "ready", "live"], 0]
    assert again["wrong_mul"][3] == first["wrong_mul"][3]


@pytest.mark.parametrize("host_seconds", [20.0, 0.01])
def test_what_is_known_answers_the_first_call(host_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is planned at once, where the host would take longer than loading takes; a quick host answers itself."""
    from xrt_core.guard import verdict_cache

    kept = verdict_cache.keep_verdict

    def keep(key: Any, function: Any, disk: Any, outcome: Any) -> str:
        return kept(key, function, disk, dataclasses.replace(outcome, timings={"host": host_seconds}))

    monkeypatch.setattr("xrt_core.guard.builder.keep_verdict", keep)
    graph, x, want = chain()
    for first in (True, False):
        with module(pinned(graph, "plain"), "plain", guard_tune=False) as m:
            np.testing.assert_array_equal(m(x), want)
            host_calls = m.report().clusters[0]["host_calls"]
            assert host_calls == (1 if first or host_seconds < 0.1 else 0)
            assert m.wait(60)


@pytest.mark.slow
def test_settings_and_engines_are_part_of_the_verdict() -> None:
    """Other settings mean another verification."""
    graph, x, _ = chain()
    ways = []
    for options in ({}, {}, {"guard_verify": False}, {"guard_timeout": 30.0}):
        with module(graph, "plain", guard_tune=False, **options) as m:
            m(x)
            assert m.wait(60)
            ways.append(len(states(m)))
    assert ways == [5, 3, 5, 5]


def test_failures_are_not_kept_and_tried_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the wait, by a call; then it goes live."""
    fresh()
    blocker = tmp_path / "blocker"
    blocker.touch()
    monkeypatch.setenv(tested.FAIL_WHILE, str(blocker))
    graph, x, want = chain()
    with module(graph, "fails_a_while", guard_tune=False, guard_retry=0.001) as m:
        m(x)
        assert m.wait(60)
        assert states(m) == ["queued", "compiling", "failed"]
        blocker.unlink()
        assert eventually(lambda: np.array_equal(m(x), want) and len(states(m)) > 3)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert states(m) == ["queued", "compiling", "failed", *STATES]
        assert list(m.explain({"x": x}).errors) == ["fails_a_while_0"]
    fresh()


@pytest.mark.parametrize("mode", ["off", "read"])
def test_without_a_cache_that_can_be_written(mode: str, own_cache: pathlib.Path) -> None:
    """Executables pass through a temporary folder, and the cache stays as it was."""
    graph, x, want = chain()
    m = module(graph, "plain", guard_tune=False, cache=mode)
    m(x)
    assert m.wait(60)
    np.testing.assert_array_equal(m(x), want)
    assert states(m) == STATES
    assert [e.name for e in m.events if e.name == "compile"] == []
    assert not list(own_cache.glob("**/*.xrt"))


def test_engines_that_do_not_serialise_are_compiled_twice() -> None:
    """First in the worker, and after that was safe, here."""
    graph, x, want = chain()
    with module(graph, "unserialisable", guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert states(m) == STATES
        assert [e.name for e in m.events].count("compile") == 1


def test_a_saved_module_is_ready_when_it_is_loaded(tmp_path: pathlib.Path) -> None:
    """Its executables were verified before they were saved; nothing is compiled, failures at run time are caught."""
    graph, x, want = chain()
    with module(graph, "plain", guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        m.save(tmp_path / "m.xrt")
    fresh()
    with XRTModule.load(tmp_path / "m.xrt", guard=True) as loaded:
        assert states(loaded) == ["queued", "ready", "live"]
        np.testing.assert_array_equal(loaded(x), want)
        assert loaded.report().clusters[0]["host_calls"] == 0
        assert "compile" not in [e.name for e in loaded.events]
    assert process_pool().pids() == []


@pytest.mark.parametrize("name", ["ppocr_cls", pytest.param("minilm_int8", marks=pytest.mark.slow)])
def test_first_answers_are_the_hosts_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models, while a worker compiles: by as many threads, which the order of sums depends on."""
    monkeypatch.setattr(blas_threads, "_half", lambda: 1024)
    try:
        path = str(dev_models.path(name))
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed")
    given = dev_models.inputs_for(name, 0)
    want = XRTModule(path, engine="host").run(given)
    with registered(STAGE_FAULTS["compile_hangs"]), module(path, "compile_hangs", guard_timeout=600.0) as m:
        for _ in range(3):
            for label, got in m.run(given).items():
                np.testing.assert_array_equal(got, want[label])


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_faster_engine_stays_and_a_slower_one_goes() -> None:
    """By time against the host, with the times in the report."""
    for engine, state, made in (("memo", "live", product()), ("sleeps", "rejected", chain())):
        graph, x, want = made
        with module(graph, engine) as m:
            m(x)
            assert m.wait(60)
            np.testing.assert_array_equal(m(x), want)
            (cluster,) = m.report().clusters
            assert cluster["state"] == state, m.report().as_text()
            assert {"compile", "verify", "host", engine} <= set(cluster["outcome"]["timings"])


@pytest.mark.nightly
def test_of_several_engines_the_fastest() -> None:
    """Whatever their order."""
    graph, x, want = product()
    with module(graph, ["sleeps", "memo"]) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["chosen"] == "memo", m.report().as_text()


@pytest.mark.slow
def test_losing_candidates_are_released() -> None:
    """Nothing refers to the executables of other candidates then, whose threads would go on."""
    made: list[tuple[str, weakref.ref[Executable]]] = []

    class Counted(tested.Memo):
        name = "counted"

        def on_compile(self, compile: Callable[[], Executable]) -> Executable:
            found: Executable = super().on_compile(compile)
            made.append((self.name, weakref.ref(found)))
            return found

    class Slow(Counted):
        name = "slow"

        def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
            time.sleep(0.05)
            return run()

    graph, x, want = product()
    with registered(Counted, Slow), module(graph, ["slow", "counted"], guard_sandbox=False, cache="off") as m:
        m(x)
        assert m.wait(60)
        assert m.report().clusters[0]["chosen"] == "counted", m.report().as_text()
        np.testing.assert_array_equal(m(x), want)

        def held() -> set[str]:
            gc.collect()
            return {name for name, reference in made if reference() is not None}

        assert {name for name, _ in made} == {"slow", "counted"}
        # the thread of the verification may still be ending; what answers may have been loaded from the disk since
        assert eventually(lambda: held() <= {"counted"})


def test_clusters_that_share_the_cores_are_compiled_as_such() -> None:
    """Under guard as without it: of two clusters of a call both are compiled as such, of one cluster none."""
    shared: list[bool] = []

    class Recorded(tested.Picky):
        name = "recorded"

        def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
            shared.append(options.shared)
            return super().compiler(device, options)

    rng = np.random.default_rng(0)
    x, h, s, y = (functions.value(n, 256, 256) for n in "xhsy")
    w = Value.constant(rng.standard_normal((256, 256), np.float32), "w")
    nodes = [functions.node("MatMul", [x, w], [h]), functions.node("Tanh", [h], [s]),
             functions.node("MatMul", [s, w], [y])]  # fmt: skip
    given = rng.standard_normal((256, 256), np.float32)
    for count in (3, 1):
        graph = functions.function("middle", [x], nodes[:count], [(h, s, y)[count - 1]]).body
        with registered(Recorded), module(graph, "recorded", guard_sandbox=False, cache="off") as m:
            m(given)
            assert m.wait(60)
            m(given)
            assert len(m.report().clusters) == (2 if count == 3 else 1)
        assert shared == [count == 3] * len(shared)
        assert shared
        shared.clear()


def test_pieces() -> None:
    """A cluster with one wrong operator keeps its others; the report says so."""
    graph, x, want = chain()
    with module(graph, "wrong_mul", guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        (cluster,) = m.report().clusters
    assert cluster["state"] == "live"
    assert cluster["chosen"] == "wrong_mul + host"
    assert [p["nodes"] for p in cluster["outcome"]["pieces"]] == [[0, 1], [2]]


@pytest.mark.slow
def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that is ready takes part, and the fastest has the cluster."""
    monkeypatch.setenv(DISABLE_VARIABLE, ",".join(plugins.names("xrt.engines")))
    others = [c for c in tested.ALL if c not in (tested.Sleeps, tested.Memo)]
    graph, x, want = product()
    with not_registered(*others), XRTModule(graph, guard=True) as m:  # no engine named: "auto"
        assert m.engines == ("memo", "sleeps")
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["chosen"] == "memo", m.report().as_text()
        assert m.explain().report.clusters[0].engine == "auto"


def test_an_engine_that_takes_half_a_cluster_shares_it() -> None:
    """In a cluster of the union, an engine's candidate is itself where it can, and others where it can't."""
    from xrt_core.cache.store import Compilation, ExecutableStore
    from xrt_core.engine import engines
    from xrt_core.events import EventLog
    from xrt_core.guard.composite import CompositeBuilder, CompositeExecutable

    function, x = functions.chain()
    log = EventLog()
    both = [(engines.get("picky"), "cpu"), (engines.get("plain"), "cpu")]
    build = CompositeBuilder(Compilation(both, CompileOptions(), ExecutableStore(None, log), log))
    assert build.candidates(function, None) == ("picky", "plain")
    assert build.candidates(function, "picky") == ("picky", "plain")
    assert build.candidates(function, "plain") == ("plain",)
    made = build.executable(function, "picky")
    assert isinstance(made, CompositeExecutable)
    assert [s.label for s in made._plan.steps if "on" in s.label] == ["picky_0 on picky", "plain_0 on plain"]
    np.testing.assert_array_equal(made.run([x])[0], XRTModule(function.body, engine="host")(x))
    assert build.alone(function, "plain") is None


def test_an_engine_and_the_host_are_a_way_of_their_own() -> None:
    """An engine that refuses a node in the middle is tried with another engine there, and with the host, whose node it
    is in the pieces; executables on the same cores are compiled as such."""
    from xrt_core.cache.store import Compilation, ExecutableStore
    from xrt_core.engine import engines
    from xrt_core.events import EventLog
    from xrt_core.guard.composite import CompositeBuilder, CompositeExecutable

    rng = np.random.default_rng(0)
    x, h, s, y = (functions.value(n, 256, 256) for n in "xhsy")
    w = Value.constant(rng.standard_normal((256, 256), np.float32), "w")
    nodes = [functions.node("MatMul", [x, w], [h]), functions.node("Tanh", [h], [s]),
             functions.node("MatMul", [s, w], [y])]  # fmt: skip
    function = functions.function("middle", [x], nodes, [y])
    log, shared = EventLog(), []
    both = [(engines.get("picky"), "cpu"), (engines.get("plain"), "cpu")]
    compilation = Compilation(both, CompileOptions(), ExecutableStore(None, log), log)

    def compile(f: Function, engine: str, fused: bool, is_shared: bool) -> Executable:
        shared.append((engine, is_shared))
        return compilation.executable(f, engine, fused, is_shared)

    build = CompositeBuilder(compilation, compile)
    pieces = build.alone(function, "picky")
    assert pieces is not None
    assert [(p.engine, p.nodes) for p in pieces] == [("picky", (0,)), ("host", (1,)), ("picky", (2,))]
    given = rng.standard_normal((256, 256), np.float32)
    want = XRTModule(function.body, engine="host")(given)
    for made in (build.executable(function, "picky", alone=True), build.pieces(function, pieces)):
        assert isinstance(made, CompositeExecutable)
        np.testing.assert_allclose(made.run([given])[0], want, rtol=1e-5)
    assert shared == [("picky", True)] * 4
    build.executable(function, "plain")
    assert shared[-1] == ("plain", False)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_closing_does_not_wait() -> None:
    """The running job and its worker end, the state stays as it was, and the host answers."""
    graph, x, want = chain()
    with registered(STAGE_FAULTS["compile_hangs"]):
        m = module(graph, "compile_hangs", guard_timeout=600.0)
        m(x)
        assert eventually(lambda: m.report().clusters and m.report().clusters[0]["state"] == "compiling")
        assert eventually(process_pool().pids)
        pids = process_pool().pids()
        start = time.monotonic()
        m.close()
        m.close()
        assert time.monotonic() - start < 60  # the job would take ten minutes
        assert m.wait(60)
        assert gone(pids)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["faults"] == []


LEAVES = """
    import numpy as np
    import sys, time
    from xrt_core.engine import engines
    from xrt_core.guard.worker_pool import process_pool
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    from xrt_core.testing.stage_faults import STAGE_FAULTS
    engines.register(STAGE_FAULTS["compile_hangs"])
    m = XRTModule(functions.chain()[0].body, engine="compile_hangs", guard=True, guard_sandbox=sys.argv[1] == "worker")
    m(np.ones((4, 8), np.float32))
    while sys.argv[1] == "worker" and not process_pool().pids():
        time.sleep(0.01)
    print(*process_pool().pids(), flush=True)
"""


FORKS = """
    import os, sys
    from xrt_core.engine import engines
    from xrt_core.guard.worker_pool import process_pool
    from tests.guard import engines as tested
    from tests.guard.guarded import chain, forget_verdicts, module
    engines.register(tested.Plain)
    graph, x, want = chain()
    m = module(graph, "plain", guard_tune=False)
    m(x)
    assert m.wait(60)
    mine = process_pool().pids()
    child = os.fork()
    if not child:
        assert (m(x) == want).all()
        forget_verdicts()
        n = module(graph, "plain", guard_tune=False, guard_async=False, cache=False)
        assert (n(x) == want).all()
        assert n.report().clusters[0]["state"] == "live", str(n.report())
        assert not set(process_pool().pids()) & set(mine)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert process_pool().pids() == mine
"""


@pytest.mark.slow
def test_a_forked_process_has_workers_of_its_own() -> None:
    """It compiles through its own, and its end does nothing to its parent's."""
    run_python(FORKS)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["worker", "thread"])
def test_shutdown_does_not_wait(where: str) -> None:
    """Nor does anything of it stay."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES), where], capture_output=True, text=True, check=True, timeout=120
    )  # the job would take an hour
    assert gone([int(p) for p in done.stdout.split()])
    assert done.stderr.count("Error") == 0, done.stderr


def test_folders_of_processes_that_were_killed_go(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of living processes, and what has another name, stay."""
    from xrt_core.guard import ipc

    monkeypatch.setattr(ipc, "_folder", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"xrt-guard-{dead.pid}-abc", f"xrt-guard-{os.getppid()}-abc", "xrt-guard-abc", f"other-{dead.pid}-abc"]
    for name in names:
        (tmp_path / name).mkdir()
    made = ipc.new_folder("job")
    assert made.is_dir()
    assert made.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names[1:], made.parent.name])


def test_an_engine_that_no_worker_can_import() -> None:
    """It is not compiled in this process instead: that is what the sandbox is there to prevent."""

    class Local(tested.Plain):
        name = "local"

    graph, x, want = chain()
    with registered(Local), captured_events() as events, module(graph, "local", guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert "define it in a module, or set guard_sandbox=False" in m.report().as_text()
    assert fallbacks(events) == [("compile", "unusable")]


def test_auto_is_alone() -> None:
    """It stands for every engine, so naming another is an error."""
    with pytest.raises(OptionError, match="stands alone"):
        XRTModule(chain()[0], engine=["auto", "plain"])


@pytest.mark.slow
def test_a_mark_binds_the_guard_too() -> None:
    """A region that is marked for one engine is that engine's or the host's, whichever engine would be faster."""
    graph, x, want = chain()
    inline = {"guard_async": False, "guard_sandbox": False}
    with XRTModule(pinned(graph, "sleeps"), engine=["plain", "sleeps"], guard=True, **inline) as m:
        np.testing.assert_array_equal(m(x), want)
        (cluster,) = m.report().clusters
        assert cluster["engine"] == "sleeps"
        assert cluster["chosen"] != "plain"


def test_a_module_without_options_is_guarded(own_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host answers, the engine is verified in the background, and its first live result is compared."""
    monkeypatch.delenv("XRT_GUARD")
    graph, x, want = chain()
    with XRTModule(graph, engine="plain", prune=False) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        (cluster,) = m.report().clusters
    assert (cluster["state"], cluster["chosen"]) == ("live", "plain")
    assert cluster["shadow_runs"] >= 1


# --- disproved while live ---------------------------------------------------------------------------------------------


def test_faulty_nodes_of_a_disproved_cluster_go_to_the_host() -> None:
    """The search begins by itself with the inputs of the call, and its verdict is the one that is kept."""
    graph, x, want = chain()
    large = x * np.float32(100)
    with XRTModule(graph, engine="host") as host:
        want_large = host(large)
    with captured_events() as events, module(graph, "wrong_above_50", guard_tune=False, guard_shadow=1) as m:
        m(x)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        np.testing.assert_array_equal(m(large), want_large)
        assert eventually(lambda: states(m)[-3:] == ["rejected", "ready", "live"])
        for _ in range(3):
            np.testing.assert_array_equal(m(large), want_large)
        (cluster,) = m.report().clusters
        assert cluster["state"] == "live"
        assert "right for 2 of 3 nodes" in cluster["reason"]
        assert cluster["chosen"] == "wrong_above_50 + host"
        assert fallbacks(events) == [("shadow", "wrong numbers")]
    forget_all()
    with module(graph, "wrong_above_50", guard_tune=False) as m:
        m(x)
        assert m.wait(60)
        assert m.report().clusters[0]["chosen"] == "wrong_above_50 + host"


def test_what_is_wrong_in_one_process_only_stays_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker finds no faulty nodes, and the verdict stays "wrong"."""
    graph, x, want = chain()
    for _ in range(2):
        monkeypatch.setenv(tested.FAIL_HERE, str(os.getpid()))
        with module(graph, "wrong_here", guard_tune=False) as m:
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)
            np.testing.assert_array_equal(m(x), want)
            assert states(m)[-1] == "rejected"
            if "live" in states(m):
                assert eventually(lambda m=m: "no nodes were found that are at fault" in m.report().as_text())  # type: ignore[misc]
                assert states(m)[-1] == "rejected"
        forget_all()
    assert states(m) == ["queued", "rejected"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_range_of_the_first_inputs_is_tried(asynchronous: bool) -> None:
    """What is wrong for large numbers only is found before it is live, where the first call has such numbers."""
    graph, x, _ = chain()
    large = x * np.float32(100)
    with XRTModule(graph, engine="host") as host:
        want = host(large)
    with module(graph, "wrong_above_50", guard_tune=False, guard_shadow=0, guard_async=asynchronous) as m:
        for _ in range(2):
            np.testing.assert_array_equal(m(large), want)
            assert m.wait(60)
        assert m.report().clusters[0]["chosen"] == "wrong_above_50 + host"
        assert "rejected" not in states(m)


def test_a_build_leaves_processors_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products use fewer threads while a background build lasts, and as many as before afterwards."""
    blas = [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]
    if not blas:
        pytest.skip("NumPy's BLAS is none that threadpoolctl knows")
    monkeypatch.setattr(blas_threads, "_half", lambda: 2)
    comparisons().wait()  # of tests before, which take one thread
    seen: list[int] = []
    run = WorkerSlot.run

    def observed(*given: Any, **more: Any) -> Any:
        seen.append(max(x.num_threads for x in blas))
        return run(*given, **more)

    monkeypatch.setattr(WorkerSlot, "run", observed)
    with threadpool_limits(4, "blas"):
        before = max(x.num_threads for x in blas)
        graph, x, _ = chain()
        m = module(graph, "plain", guard_async=True)
        m(x)
        assert m.wait(60)
        assert min(seen) == min(before, 2)
        assert eventually(lambda: max(x.num_threads for x in blas) == before)
