"""Engines asked in a child: their answers are those they give here, and who ends the child is left out."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import chain, fallbacks, heard, leftovers, module, registered
from tests.random_graphs import F32, graph_of, ints, node
from xrt_core.engine import engines
from xrt_core.events import FallbackEvent
from xrt_core.guard import timeouts
from xrt_core.guard.capability import Asker, about, asked
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.timeouts import TooLong
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import WorkerFailure, WorkerProxy, WorkerSlot, process_pool
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType
from xrt_core.options import resolve
from xrt_core.testing.processes import run_python
from xrt_core.testing.stage_faults import STAGE_FAULTS

_settings = GuardSettings.of(resolve({"guard": True, "guard_timeout": 20.0}))
assert _settings is not None
SETTINGS = _settings


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> Iterator[None]:
    forget_all()
    with registered(*tested.ALL):
        yield
    forget_all()


@pytest.fixture
def slot() -> Iterator[WorkerSlot]:
    """A child of this thread."""
    made = WorkerSlot()
    yield made
    made.kill()
    assert leftovers() == []


def test_answers_are_those_given_here(slot: WorkerSlot) -> None:
    """Node by node, with the reasons; nodes that do not touch, and constants, arrive as they are."""
    x, y = Value("x", TensorType(F32, (3, 3))), Value("y", TensorType(F32, (3, 3)))
    made = [Value(n, TensorType(F32, (3, 3))) for n in "abcd"]
    shaped = Value("s", TensorType(F32, (9,)))
    nodes = [
        node("MatMul", [x, y], [made[0]]), node("Add", [made[0], y], [made[1]]),
        node("Reshape", [made[1], ints(9)], [shaped]), node("MatMul", [y, y], [made[2]]),
    ]  # fmt: skip
    graph = graph_of([x, y], [shaped, made[2]], nodes)
    both = [(engines.get(name), "cpu") for name in ("picky", "plain")]
    found = Asker(slot, SETTINGS).supports(about([*nodes[:1], *nodes[2:]], graph), both, "inference")
    for engine, device in both:
        said = [asked(engine, n, device, "inference")[0] for n in (nodes[0], nodes[2], nodes[3])]
        assert list(found[engine.name].supports) == said
        assert found[engine.name].fault == ""
    assert [s.ok for s in found["picky"].supports] == [True, False, True]


def test_who_ends_the_child_says_nothing_and_the_others_do(slot: WorkerSlot) -> None:
    """One child is lost for it; the log and the exit code come along."""
    function = about(list(chain()[0].nodes), chain()[0])
    with registered(STAGE_FAULTS["supports_crashes"], STAGE_FAULTS["supports_raises"]):
        names = ("supports_crashes", "plain", "supports_raises")
        found = Asker(slot, SETTINGS).supports(function, [(engines.get(n), "cpu") for n in names], "inference")
    lost = found["supports_crashes"].failure
    assert lost is not None
    assert (lost.kind, lost.exit_code) == ("crashed", -6)
    assert "Fatal Python error: Aborted" in lost.log
    assert [s.ok for s in found["plain"].supports] == [True] * 3
    assert "a fault was planted here" in found["supports_raises"].fault
    assert not any(s.ok for s in found["supports_raises"].supports)


def test_probing(slot: WorkerSlot) -> None:
    """Who raises is no danger, who exits is; an unknown name is for somebody else to complain about."""
    with registered(STAGE_FAULTS["probe_exits"], STAGE_FAULTS["probe_raises"]):
        found = Asker(slot, SETTINGS).probe(["plain", "probe_exits", "probe_raises", "nobody"])
    lost = found.pop("probe_exits")
    assert lost is not None
    assert lost.exit_code == 3
    assert found == {"plain": None, "probe_raises": None, "nobody": None}


def test_no_child_is_no_answer(slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that nobody has probed is not noted as harmless."""

    def unusable(self: WorkerSlot, *request: object) -> dict[str, object]:
        raise WorkerFailure("unusable", "no child process can be started")

    monkeypatch.setattr(WorkerSlot, "run", unusable)
    assert Asker(slot, SETTINGS).probe(["plain"]) == {}


def test_what_no_child_can_have_is_asked_here(slot: WorkerSlot) -> None:
    """An engine that cannot be imported there has no answer, and nobody is blamed."""

    class Local(tested.Plain):
        name = "local_asked"

    function = about(list(chain()[0].nodes), chain()[0])
    with registered(Local):
        assert Asker(slot, SETTINGS).supports(function, [(engines.get("local_asked"), "cpu")], "inference") == {}
        assert Asker(slot, SETTINGS).probe(["local_asked"]) == {"local_asked": None}


def test_nobody_wants_to_know(slot: WorkerSlot) -> None:
    """Then no child is started for it."""
    lost = Asker(slot, SETTINGS, lambda: False).probe(["plain"])["plain"]
    assert lost is not None
    assert lost.kind == "closed"
    assert slot._worker is None


def test_closing_while_a_child_is_asked() -> None:
    """The child is ended for that, which is no failure of the engine's."""
    graph, x, _ = chain()
    with heard() as events, registered(STAGE_FAULTS["supports_hangs"]):
        m = module(graph, "supports_hangs", guard_tune=False)
        m(x)
        until = time.monotonic() + 20
        while not process_pool().pids() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        m.close()
        for t in threading.enumerate():
            if t.name == "xrt-planning":
                t.join(20)
                assert not t.is_alive()
    assert fallbacks(events) == []
    assert leftovers() == []


LATE = """
    import threading, time
    from xrt_core.module import XRTModule
    from xrt_core.testing import functions
    function, x = functions.chain()

    def work():
        threading.main_thread().join()
        time.sleep(0.1)
        print(XRTModule(function.body, engine="onnxruntime")(x).shape)

    threading.Thread(target=work).start()
"""


def test_a_thread_that_outlives_the_main_one_has_engines() -> None:
    """The interpreter ends after threads that are no daemons, and not before."""
    pytest.importorskip("onnxruntime")
    assert run_python(LATE) == str(chain()[2].shape)


# --- in a module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_partition_is_asked_for_in_the_child(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is planned, this process asks the engine nothing; a caller who waits anyway waits for the child too."""
    asking: list[str] = []

    def spy(*given: object) -> object:
        asking.append(threading.current_thread().name)
        return asked(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("xrt_core.compiler.support.asked", spy)
    graph, x, want = chain()
    with module(graph, "plain", guard_tune=False, guard_async=asynchronous) as m:
        np.testing.assert_array_equal(m(x), want)
        assert m.wait(60)
        np.testing.assert_array_equal(m(x), want)
        assert m.report().clusters[0]["state"] == "live"
        assert asking == []
        m.partitioned({"x": x})
        assert bool(asking) is asynchronous  # nobody waits in a queue for it


def test_a_module_without_the_engine_that_crashed() -> None:
    """It is asked once, not again for the next signature; the other engine has the nodes; the reason is told."""
    value, square = Value("v", TensorType(F32, (None,))), Value("w")
    graph = graph_of([value], [square], [node("Mul", [value, value], [square])], "square")
    with registered(STAGE_FAULTS["supports_crashes"]), heard() as events:
        with module(graph, ["supports_crashes", "plain"], guard_tune=False) as m:
            for n in (2, 3):
                v = np.arange(n, dtype=np.float32)
                np.testing.assert_array_equal(m(v), v * v)
                assert m.wait(60)
            assert [(c["engine"], c["state"]) for c in m.report().clusters] == [("plain", "live")] * 2
        (event,) = [e for e in events if isinstance(e, FallbackEvent)]
        assert event.fields["engine"] == "supports_crashes"
        assert event.fields["exit_code"] == -6
        assert "Aborted" in event.fields["log"]
        assert "is left out" in event.fields["error"]
        with module(graph, "supports_crashes", guard_tune=False) as m:
            np.testing.assert_array_equal(m(v), v * v)
            assert m.wait(60)
            assert "supports_crashes was left out: crashed" in str(m.explain({"v": v}))
    assert fallbacks(events) == [("supports", "crashed")] * 2


# --- the desk --------------------------------------------------------------------------------------------------------


def test_the_desk_serves_from_the_thread_that_lasts(slot: WorkerSlot) -> None:
    """A child that one planning thread caused is there for the next one."""
    pids = []
    for _ in range(2):
        desk = WorkerProxy(slot)
        desk.serve(20.0, lambda desk=desk: pids.append(Asker(desk, SETTINGS).probe(["plain"])))  # type: ignore[misc]
        assert slot._worker is not None
        pids.append(slot._worker.pid)
        time.sleep(0.1)
    assert pids[0] == pids[2] == {"plain": None}
    assert pids[1] == pids[3]


def test_the_desk_has_a_limit(slot: WorkerSlot) -> None:
    """Who comes back after it finds nobody, and its errors are raised by who serves."""
    go, late = threading.Event(), []

    def hangs() -> None:
        go.wait(30)
        try:
            desk.run({}, 1.0, 0, lambda stage: None)
        except WorkerFailure as e:
            late.append(e.kind)

    desk = WorkerProxy(slot)
    with pytest.raises(TooLong, match=r"0\.1 s"):
        desk.serve(0.1, hangs)
    go.set()
    until = time.monotonic() + 10
    while not late and time.monotonic() < until:
        time.sleep(0.05)
    assert late == ["closed"]
    with pytest.raises(ZeroDivisionError):
        WorkerProxy(slot).serve(5.0, lambda: 1 // 0)  # type: ignore[arg-type]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_a_library_and_not_for_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one that is inside until it is out, within the limit; a thread that waits for a child is not inside."""
    monkeypatch.setattr(timeouts, "_begun", False)
    monkeypatch.setattr(timeouts, "_LIMIT", 0.2)
    entered, go = threading.Event(), threading.Event()

    def inside() -> None:
        with timeouts.native_call():
            entered.set()
            go.wait(30)

    t = threading.Thread(target=inside, daemon=True)
    t.start()
    entered.wait(10)
    start = time.monotonic()
    timeouts._leave()
    assert 0.15 < time.monotonic() - start < 10
    with pytest.raises(timeouts.Leaving), timeouts.native_call():
        raise AssertionError("nobody goes in any more")
    go.set()
    t.join(10)
    monkeypatch.setattr(timeouts, "_begun", False)
    monkeypatch.setattr(timeouts, "_LIMIT", 30.0)
    start = time.monotonic()
    with pytest.raises(timeouts.Leaving), timeouts.native_call(), timeouts.outside_library():
        timeouts._leave()
    assert time.monotonic() - start < 10
    assert timeouts._inside == 0
