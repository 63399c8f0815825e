"""Capability queries: answers are those of this process, engines that fail the worker are excluded, answers are
cached."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.packages import add_package, engine_source
from tests.guard import engines as tested
from tests.guard.guarded import (
    captured_events,
    chain,
    eventually,
    fallbacks,
    leftovers,
    module,
    registered,
    timed_calls_end,
)
from tests.random_graphs import F32, graph_of, ints, node
from xrt_core.cache.disk import DiskCache
from xrt_core.cache.key import cache_key
from xrt_core.cache.store import Compilation, ExecutableStore
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, ask_support
from xrt_core.events import Event, EventLog, FallbackEvent, subscribe
from xrt_core.guard import capability
from xrt_core.guard.capability import Answers, Capabilities
from xrt_core.guard.ipc import Message
from xrt_core.guard.timeouts import BackgroundTask, Cancelled, running
from xrt_core.guard.verdict_cache import answers_key, forget_all, probe_key, read_json, write_json
from xrt_core.guard.worker_pool import WorkerFailure, WorkerPool, WorkerSlot, process_pool
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.options import resolve
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.testing.processes import run_python
from xrt_core.testing.stage_faults import STAGE_FAULTS

_settings = GuardSettings.of(resolve({"guard": True, "guard_timeout": 20.0}))
assert _settings is not None
SETTINGS = _settings
WANTED = BackgroundTask(object(), lambda: True)


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> Iterator[None]:
    forget_all()
    with registered(*tested.ALL):
        yield
    forget_all()
    assert leftovers() == []


def capabilities(*names: str, disk: DiskCache | None = None) -> Capabilities:
    """Of these engines."""
    log = EventLog()
    found = [(engines.get(name), "cpu") for name in names]
    compilation = Compilation(found, CompileOptions(), ExecutableStore(disk, log), log)
    return Capabilities(SETTINGS, compilation, disk, log)


def query(asked: Capabilities, graph: Graph, nodes: Sequence[Any] | None = None) -> Mapping[str, Answers]:
    """What is answered to a background task."""
    with running(WANTED):
        return asked.query(graph, graph.nodes if nodes is None else nodes, "inference")


def probe(*names: str, disk: DiskCache | None = None) -> list[str]:
    """Which of these engines a probe finds to crash, asked by a background task."""
    known = engines.names()
    with running(WANTED), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engines), "names", lambda self: names or known)
        return capability.probed(SETTINGS, disk, EventLog()).failed


# --- queries ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_this_process() -> None:
    """Node by node, with the reasons; nodes that are not connected, and constants, are sent as they are."""
    x, y = Value("x", TensorType(F32, (3, 3))), Value("y", TensorType(F32, (3, 3)))
    made = [Value(n, TensorType(F32, (3, 3))) for n in "abcd"]
    shaped = Value("s", TensorType(F32, (9,)))
    nodes = [
        node("MatMul", [x, y], [made[0]]), node("Add", [made[0], y], [made[1]]),
        node("Reshape", [made[1], ints(9)], [shaped]), node("MatMul", [y, y], [made[2]]),
    ]  # fmt: skip
    graph = graph_of([x, y], [shaped, made[2]], nodes)
    found = query(capabilities("picky", "plain"), graph, [*nodes[:1], *nodes[2:]])
    for name in ("picky", "plain"):
        here = [ask_support(engines.get(name), n, "cpu", "inference")[0] for n in (nodes[0], nodes[2], nodes[3])]
        assert list(found[name].supports) == here
        assert found[name].fault == ""
    assert [s.ok for s in found["picky"].supports] == [True, False, True]


def test_an_engine_that_crashes_the_worker_is_excluded(tmp_path: pathlib.Path) -> None:
    """The others are answered for; the event has the log and the exit code; only answers are cached."""
    events: list[Event] = []
    disk, graph = DiskCache(tmp_path, 1 << 20), chain()[0]
    with registered(STAGE_FAULTS["supports_crashes"], STAGE_FAULTS["supports_raises"]):
        asked = capabilities("supports_crashes", "plain", "supports_raises", disk=disk)
        undo = subscribe(events.append)
        found = query(asked, graph)
        undo()
        function = capability.function_of(graph.nodes, graph)
        for name in ("supports_crashes", "plain"):
            key = answers_key(asked.all_engines.key(function, name))
            assert (read_json(key, function, disk, Answers) is None) == (name == "supports_crashes")
    (event,) = [e for e in events if isinstance(e, FallbackEvent)]
    assert (event.engine, event.stage, event.kind, event.fields["exit_code"]) == (
        "supports_crashes", "supports", "crashed", -6,
    )  # fmt: skip
    assert "Fatal Python error: Aborted" in event.fields["log"]
    assert set(found) == {"plain", "supports_raises"}
    assert all(s.ok for s in found["plain"].supports)
    assert "a fault was planted here" in found["supports_raises"].fault
    assert not any(s.ok for s in found["supports_raises"].supports)
    assert set(asked.compilation.engines) == {"plain", "supports_raises"}
    assert asked.excluded["supports_crashes"].startswith("crashed: ")


def test_probes() -> None:
    """An engine that raises is safe, one that exits is not; an unknown name is left to whoever reports it."""
    with registered(STAGE_FAULTS["probe_exits"], STAGE_FAULTS["probe_raises"]):
        assert probe("plain", "probe_exits", "probe_raises", "unknown") == ["probe_exits"]


@pytest.mark.slow
@pytest.mark.parametrize("folder_is_new", [True, False])
def test_a_package_that_is_added_while_a_worker_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, folder_is_new: bool
) -> None:
    """The worker knows it too: what it took for unknown, and so for harmless, would crash this process."""
    if not folder_is_new:
        monkeypatch.syspath_prepend(tmp_path)
    assert probe("plain") == []  # a worker runs now
    add_package(tmp_path, "xrt-added", "import os\nos.abort()\n" + engine_source("added"), engine="added")
    if folder_is_new:
        monkeypatch.syspath_prepend(tmp_path)
    engines.refresh()
    try:
        assert probe("added") == ["added"]
    finally:
        monkeypatch.undo()
        engines.refresh()


def test_no_worker_is_no_answer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known then, and nothing is cached as safe."""
    written: list[object] = []

    def unusable(self: WorkerPool, *request: object, **options: object) -> dict[str, object]:
        raise WorkerFailure("unusable", "no worker process can be started")

    monkeypatch.setattr(WorkerPool, "call", unusable)
    monkeypatch.setattr(capability, "write_json", lambda *given: written.append(given))
    disk = DiskCache(tmp_path, 1 << 20)
    assert probe(disk=disk) == []
    assert query(capabilities("plain", disk=disk), chain()[0]) == {}
    assert written == []


def test_an_engine_that_no_worker_can_import() -> None:
    """It has no answer, and is not excluded."""

    class Local(tested.Plain):
        name = "local_asked"

    with registered(Local):
        asked = capabilities("local_asked")
        assert query(asked, chain()[0]) == {}
        assert asked.excluded == {}
        assert probe("local_asked") == []


def test_a_cancelled_task_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends instead."""
    ran: list[object] = []
    monkeypatch.setattr(WorkerSlot, "run", lambda *given: ran.append(given))
    with running(BackgroundTask(object(), lambda: False)), pytest.raises(Cancelled):
        capabilities("plain").query(chain()[0], chain()[0].nodes, "inference")
    assert ran == []


def test_closing_during_a_query() -> None:
    """The worker is killed, which is no failure of the engine."""
    graph, x, _ = chain()
    with captured_events() as events, registered(STAGE_FAULTS["supports_hangs"]), timed_calls_end():
        m = module(graph, "supports_hangs", guard_tune=False)
        m(x)
        assert eventually(lambda: [s for s in process_pool()._slots if s.job is not None and s._worker is not None])
        m.close()
    assert fallbacks(events) == []


LATE = """
    import threading
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    function, x = functions.chain()

    def work():
        threading.main_thread().join()
        print(XRTModule(function.body, engine="onnxruntime")(x).shape)

    threading.Thread(target=work).start()
"""


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_has_engines() -> None:
    """The interpreter shuts down after non-daemon threads, and not before."""
    pytest.importorskip("onnxruntime")
    assert run_python(LATE) == str(chain()[2].shape)


# --- in a module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_partition_queries_the_worker(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks the engine nothing then; a caller that waits anyway waits for the worker too."""
    asking: list[str] = []

    def spy(*given: object) -> object:
        asking.append(threading.current_thread().name)
        return ask_support(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("xrt_core.compiler.support.ask_support", spy)
    graph, x, want = chain()
    with module(graph, "plain", guard_tune=False, guard_async=asynchronous) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["state"] == "live"
        assert asking == []
        m.partitioned({"x": x})
        assert bool(asking) is asynchronous  # a caller does not wait in the queue of background work


@pytest.mark.slow
def test_a_module_without_the_engine_that_crashed() -> None:
    """It is asked once, not again for the next signature; another engine has the nodes; explain gives the reason."""
    value, square = Value("v", TensorType(F32, (None,))), Value("w")
    graph = graph_of([value], [square], [node("Mul", [value, value], [square])], "square")
    with registered(STAGE_FAULTS["supports_crashes"]), captured_events() as events:
        with module(graph, ["supports_crashes", "plain"], guard_tune=False) as m:
            for n in (2, 3):
                v = np.arange(n, dtype=np.float32)
                np.testing.assert_array_equal(m(v), v * v)
                assert m.wait(60)
            assert [(c["engine"], c["state"]) for c in m.report().clusters] == [("plain", "live")] * 2
        (event,) = [e for e in events if isinstance(e, FallbackEvent)]
        assert event.fields["engine"] == "supports_crashes"
        assert "is excluded" in event.fields["error"]
        with module(graph, "supports_crashes", guard_tune=False) as m:
            np.testing.assert_array_equal(m(v), v * v)
            assert m.wait(60)
            assert "supports_crashes was excluded: crashed" in str(m.explain({"v": v}))
    assert fallbacks(events) == [("supports", "crashed")] * 2


# --- cached answers ---------------------------------------------------------------------------------------------------


def test_answers_are_cached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one engine, device and phase; damaged entries are asked again."""
    disk = DiskCache(tmp_path, 1 << 20)
    graph = chain()[0]
    asked: list[str] = []
    supports = capability._Requests.supports

    def spy(self: Any, engine: Any, *given: Any) -> Any:
        asked.append(engine.name)
        return supports(self, engine, *given)

    monkeypatch.setattr(capability._Requests, "supports", spy)
    first = query(capabilities("picky", disk=disk), graph)
    assert asked == ["picky"]
    assert query(capabilities("picky", disk=disk), graph) == first
    assert asked == ["picky"]
    function = capability.function_of(graph.nodes, graph)
    key = cache_key(function, engines.get("picky"), "cpu", CompileOptions())
    for other in (cache_key(function, engines.get("memo"), "cpu", CompileOptions()),
                  cache_key(function, engines.get("picky"), "cpu", CompileOptions(phase="train"))):  # fmt: skip
        assert read_json(answers_key(key), function, disk, Answers) is not None
        assert read_json(answers_key(other), function, disk, Answers) is None
    for data in ({"supports": [[True, ""]], "fault": ""}, "no answers", {"supports": 1}):
        write_json(answers_key(key), "x", function, disk, data)
        asked.clear()
        assert query(capabilities("picky", disk=disk), graph)["picky"] == first["picky"]
        assert asked == ["picky"]


def test_a_graph_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second module of it starts no query, whatever its names are; another engine does, and all without a cache."""
    asked: list[str] = []
    supports = capability._Requests.supports

    def spy(self: Any, engine: Any, *given: Any) -> Any:
        asked.append(engine.name)
        return supports(self, engine, *given)

    monkeypatch.setattr(capability._Requests, "supports", spy)
    graph, x, want = chain()
    ways: list[tuple[list[str], dict[str, Any]]] = [
        (["plain"], {}), (["plain"], {}), (["plain", "memo"], {}), (["plain"], {"cache": False})
    ]  # fmt: skip
    for names, options in ways:
        with module(graph, names, guard_tune=False, guard_verify=False, **options) as m:
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)
            assert [c["state"] for c in m.report().clusters] == ["live"]
    assert asked == ["plain", "memo", "plain"]


def test_probes_of_installed_engines_are_cached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the version of the package and of its requirements, with what was found; engines of this process are probed
    each time."""
    installed = {line.name for line in engines.listing(probe=False) if line.version}
    assert installed, "an engine's package is installed where the tests run"
    probed: list[str] = []

    def fake(self: Any, name: str) -> Message:
        probed.append(name)
        if name == "plain":
            raise WorkerFailure("crashed", "gone")
        return Message(usable=name != "toy")

    monkeypatch.setattr(capability._Requests, "probe", fake)
    disk = DiskCache(tmp_path, 1 << 20)
    everything = set(engines.names())
    assert probe(disk=disk) == ["plain"]
    assert set(probed) == everything
    probed.clear()
    assert probe(disk=disk) == ["plain"]
    assert set(probed) == everything - installed >= {c.name for c in tested.ALL}
    with running(WANTED):
        assert capability.probed(SETTINGS, disk, EventLog()).usable == everything - {"plain", "toy"}
    first, again = (probe_key("xla", "xrt-core", v).digest for v in ("1", "2"))
    assert first != again
