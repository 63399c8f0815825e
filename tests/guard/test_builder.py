"""Builds in a worker that an engine crashes or hangs: the engine is excluded, or the host keeps the whole cluster."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import captured_events, fallbacks, fresh, gone, leftovers, module, registered
from xrt_core.events import FallbackEvent
from xrt_core.guard.builder import _Examination, kind_of
from xrt_core.guard.worker_pool import WorkerFailure, process_pool
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.module import XRTModule
from xrt_core.testing import functions
from xrt_core.verify.verdict import HOST, Outcome, Piece


@pytest.fixture(autouse=True)
def _alone(own_cache: pathlib.Path) -> None:
    fresh()


def ladder(count: int = 12, at: int = 5) -> tuple[Graph, np.ndarray, np.ndarray]:
    """A chain of elementwise nodes, one of them a Sinh; an input, and the host's result."""
    values = [functions.value(f"v{k}", 4, 6) for k in range(count + 1)]
    nodes: list[Node] = [
        functions.node("Sinh" if k == at else ("Tanh", "Sigmoid", "Erf")[k % 3], [values[k]], [values[k + 1]])
        for k in range(count)
    ]
    graph = functions.function("ladder", [values[0]], nodes, [values[-1]]).body
    given = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    with XRTModule(graph, engine="host") as host:
        return graph, given, host(given)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_node_that_crashes_the_compiler_leaves_the_cluster_to_the_host(asynchronous: bool) -> None:
    """One worker, one event, no search for the node; no process and no file is left."""
    graph, x, want = ladder()
    options = {"guard_tune": False, "guard_async": asynchronous}
    with (
        registered(tested.CrashesOnSinh),
        captured_events() as events,
        module(graph, "crashes_on_sinh", **options) as m,
    ):
        for _ in range(3):
            np.testing.assert_array_equal(m(x), want)
            assert m.wait(60)
        (cluster,) = m.report().clusters
        pids = process_pool().pids()
    assert (cluster["state"], cluster["chosen"], cluster["host_calls"]) == ("failed", HOST, 3)
    assert fallbacks(events) == [("compile", "crashed")]
    assert leftovers() == []
    process_pool().close()
    assert gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind"),
    [(tested.CrashesOnSinh, "crashed"), (tested.HangsOnSinh, "hung")],
)
def test_another_engine_takes_the_cluster(engine: type[tested.CrashesOnSinh], kind: str) -> None:
    """With two engines the one that fails the worker is excluded, in whatever order, and the report says why."""
    graph, x, want = ladder()
    limit = 12.0 if kind == "hung" else 60.0
    with (
        registered(engine, tested.Plain),
        captured_events() as events,
        module(graph, [engine.name, "plain"], guard_timeout=limit) as m,
    ):
        np.testing.assert_allclose(m(x), want, rtol=1e-5)
        assert m.wait(60)
        (cluster,) = m.report().clusters
    (event, *_) = [e for e in events if isinstance(e, FallbackEvent)]
    assert (event.stage, event.kind) == ("compile", kind)
    assert event.error.startswith(f"{engine.name}: ")
    assert cluster["outcome"]["errors"][0].startswith(f"{engine.name}: {kind}")
    assert "plain" in cluster["outcome"]["timings"]
    assert leftovers() == []


@pytest.mark.parametrize(
    ("verdict", "error", "kind"),
    [
        ("slower", "", "slower"),
        ("wrong", "e: it raised MemoryError: no", "memory"),
        ("wrong", "e: it raised RuntimeError: no", "raised"),
        ("failed", "e: it does not compile: ValueError: no", "raised"),
        ("wrong", "e: it returned 3 results, expected 1", "wrong count"),
        ("wrong", "e: result 'y' is float32[2, 1], expected float32[2]", "wrong shape"),
        ("wrong", "e: result 'y' is float64[2], expected float32[2]", "wrong dtype"),
        ("wrong", "e: result 'y': 3 of 4 elements out of bounds", "wrong numbers"),
    ],
)
def test_kinds(verdict: str, error: str, kind: str) -> None:
    """The kind of failure is read from what the verification says of the first candidate."""
    errors = (error,) if error else ()
    outcome = Outcome(verdict, (Piece(HOST, (0,)),), "reason", errors=errors)  # type: ignore[arg-type]
    assert kind_of(outcome) == kind


def test_one_deadline_for_all_attempts() -> None:
    """A candidate that hangs leaves the others what it did not take of `guard_timeout`, not as much again."""
    given: list[float] = []

    class Slot:
        def run(self, request: Mapping[str, Any], seconds: float, *_: Any, **options: Any) -> Any:
            given.append(seconds)
            assert request["timeout"] == seconds > request["settings"]["deadline_seconds"]
            time.sleep(0.1)
            raise WorkerFailure("hung", "it hung")

    graph, _, _ = ladder()
    with registered(tested.CrashesOnSinh, tested.Plain), module(graph, ["crashes_on_sinh", "plain"]) as m:
        guard = m._pipeline.accelerated.services.guard
        assert guard is not None
        function = Function.from_graph(graph)
        launch = guard.launch(function, "crashes_on_sinh", lambda: lambda arrays: arrays)
        names, until = ("crashes_on_sinh", "plain"), time.monotonic() + 10
        with pytest.raises(WorkerFailure):
            guard._builder._in_worker(_Examination(launch, names, None, Slot(), until))  # type: ignore[arg-type]
    assert len(given) == 2
    assert 5 < given[0] < 7
    assert given[1] < 10 - 0.1
