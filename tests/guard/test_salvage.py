"""What is saved of a cluster whose compiler takes its process along: the search, and the way with real children."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guard.engines import CrashesOnSinh, HangsOnSinh, Plain
from tests.guard.guarded import fallbacks, fresh, gone, heard, leftovers, module, registered
from tests.guard.planted import deep, value
from xrt_core.guard.salvage import LEAST_NODES, LIMIT, examined_in_child, most_probes
from xrt_core.guard.worker_pool import WorkerFailure, process_pool
from xrt_core.ir.graph import Graph, Node
from xrt_core.module import XRTModule
from xrt_core.testing.functions import node
from xrt_core.verify.verdict import HOST, Faults, Outcome, Piece

Nodes = frozenset[int]


class Children:
    """Stands for child processes: they end where `ends` says so of an engine and nodes of it that are compiled as one.

    asked: what they were asked for, in order. seconds: what a child that ends, and one that answers, take.
    """

    def __init__(self, body: Graph, ends: Callable[[str, Nodes], bool], kind: str = "crashed") -> None:
        self.body, self.ends, self.kind = body, ends, kind
        self.asked: list[Mapping[str, Any]] = []
        self.now = 0.0
        self.verdicts: dict[str, str] = {}

    def clock(self) -> float:
        return self.now

    def ask(self, extra: Mapping[str, Any], timeout: float, stage: Callable[[str], None]) -> dict[str, Any]:
        self.asked.append(extra)
        assert timeout > 0
        if "probe" in extra:
            self._compile(extra["probe"]["engine"], frozenset(extra["probe"]["nodes"]), timeout)
            return {"outcome": None}
        every = frozenset(range(len(self.body.nodes)))
        for engine in extra["candidates"]:
            stage(f"trying {engine}")
            faults = extra["faults"].get(engine)
            evicted = {i for i, _ in faults["offenders"]} if faults else set()
            cuts = faults["cuts"] if faults else []
            parts: dict[int, set[int]] = {}
            for i in every - evicted:
                parts.setdefault(sum(c <= i for c in cuts), set()).add(i)
            for part in parts.values():
                self._compile(engine, frozenset(part), timeout)
            stage("verifying")
        verdict: Any = self.verdicts.get(extra["candidates"][0], "ready")
        pieces = [Piece(HOST, tuple(sorted(evicted)))] if evicted else []
        pieces.append(Piece(extra["candidates"][0], tuple(sorted(every - evicted))))
        return {"outcome": Outcome(verdict, tuple(pieces), "fine").to_json()}

    def _compile(self, engine: str, nodes: Nodes, timeout: float) -> None:
        if self.ends(engine, nodes):
            self.now += timeout if self.kind == "hung" else 1.0
            raise WorkerFailure(self.kind, "it ended")  # type: ignore[arg-type]
        self.now += 0.1

    def examined(self, names: Sequence[str], timeout: float = 100.0, **options: Any) -> Any:
        return examined_in_child(
            self.body, names, self.ask, timeout, lambda: None, clock=self.clock, **options
        )

    @property
    def probes(self) -> int:
        return sum("probe" in x for x in self.asked)


def kept(outcome: Outcome) -> set[int]:
    return {i for p in outcome.pieces if p.engine != HOST for i in p.nodes}


@settings(max_examples=50, deadline=None)
@given(st.integers(LEAST_NODES, 200), st.data())
def test_one_node_is_found(count: int, data: st.DataObject) -> None:
    """Whichever node it is, it alone goes to the host, after about log2(n) probes."""
    bad = data.draw(st.integers(0, count - 1))
    children = Children(deep(count).body, lambda engine, nodes: bad in nodes)
    outcome, failures = children.examined(["e"])
    assert kept(outcome) == set(range(count)) - {bad}
    assert outcome.errors == ("e: crashed: it ended",)
    assert [(e, f.stage, f.failure.kind) for e, f in failures.items()] == [("e", "compile", "crashed")]
    assert children.probes <= math.ceil(math.log2(count)) + 4
    assert children.asked[-1]["faults"]["e"]["offenders"] == [(bad, "crashed: it ended")]


def test_two_nodes_are_found() -> None:
    """Two nodes at fault take about twice as many probes."""
    children = Children(deep(128).body, lambda engine, nodes: bool(nodes & {17, 90}))
    outcome, _ = children.examined(["e"])
    assert kept(outcome) == set(range(128)) - {17, 90}
    assert children.probes <= most_probes(128)


def test_nodes_that_end_it_only_together_are_cut_apart() -> None:
    """Nobody is evicted where each side is good by itself."""
    children = Children(deep(64).body, lambda engine, nodes: {10, 50} <= nodes)
    outcome, _ = children.examined(["e"])
    assert kept(outcome) == set(range(64))
    assert len(children.asked[-1]["faults"]["e"]["cuts"]) == 1


def test_what_ends_every_child_fails() -> None:
    """Where nothing can be saved the first failure is raised, after a bounded number of probes."""
    children = Children(deep(100).body, lambda engine, nodes: True)
    with pytest.raises(WorkerFailure, match="it ended"):
        children.examined(["e"])
    assert children.probes <= most_probes(100)


def test_what_does_not_come_again_is_examined_again() -> None:
    """A child that the system ended for reasons of its own costs nothing but time."""
    count = {"ended": 0}

    def once(engine: str, nodes: Nodes) -> bool:
        count["ended"] += 1
        return count["ended"] == 1

    children = Children(deep(32).body, once, "memory")
    outcome, failures = children.examined(["e"])
    assert kept(outcome) == set(range(32))
    assert children.asked[-1]["faults"] == {}
    assert list(failures) == ["e"]


def test_another_engine_comes_first() -> None:
    """Where one engine ends the child another has the cluster whole; nobody looks for the node."""
    children = Children(deep(50).body, lambda engine, nodes: engine == "bad" and 3 in nodes)
    outcome, failures = children.examined(["good", "bad"])
    assert [x["candidates"] for x in children.asked] == [["good", "bad"], ["good"]]
    assert outcome.verdict == "ready"
    assert list(failures) == ["bad"]

    children = Children(deep(50).body, lambda engine, nodes: engine == "bad" and 3 in nodes)
    children.verdicts["other"] = "wrong"
    outcome, _ = children.examined(["bad", "other"])
    assert outcome.pieces[-1].engine == "bad"
    assert kept(outcome) == set(range(50)) - {3}


def test_all_children_together_have_a_limit() -> None:
    """An engine that hangs on everything, and one that hangs on one node, take at most `LIMIT` times the limit."""
    for bad in (set(range(200)), {150}):
        children = Children(deep(200).body, lambda engine, nodes, bad=bad: bool(nodes & bad), "hung")
        try:
            outcome, _ = children.examined(["e"], timeout=100.0)
        except WorkerFailure:
            assert len(bad) == 200
        else:
            assert kept(outcome) == set(range(200)) - bad
        assert children.now <= LIMIT * 100.0


def test_nothing_is_tried_where_it_is_not_wanted() -> None:
    """In small clusters, after an earlier failure, for a module that is closed, and for what is no end of a child."""
    small = Children(deep(LEAST_NODES - 1).body, lambda engine, nodes: 0 in nodes)
    again = Children(deep(50).body, lambda engine, nodes: 0 in nodes)
    closed = Children(deep(50).body, lambda engine, nodes: 0 in nodes)
    raised = Children(deep(50).body, lambda engine, nodes: 0 in nodes, "raised")
    options: list[dict[str, Any]] = [{}, {"salvage": False}, {"is_wanted": lambda: False}, {}]
    for children, given_options in zip((small, again, closed, raised), options, strict=True):
        with pytest.raises(WorkerFailure):
            children.examined(["e"], **given_options)
        assert len(children.asked) == 1


def test_faults_cross_as_json() -> None:
    faults = Faults("it ended", {4: "crashed"}, (7,))
    assert Faults.from_json(faults.to_json()) == faults


# --- with real children --------------------------------------------------------------------------------------------


def ladder(count: int = 200, at: int = 137) -> tuple[Graph, np.ndarray, np.ndarray]:
    """A chain of elementwise nodes, one of them a Sinh; an input, and the host's result."""
    x = here = value("x", (4, 6))
    nodes: list[Node] = []
    for k in range(count):
        out = value(f"n{k}", (4, 6))
        nodes.append(node("Sinh" if k == at else ("Tanh", "Sigmoid", "Erf")[k % 3], [here], [out]))
        here = out
    graph = Graph([x], [here], nodes, opsets={"": 21}, name="ladder")
    given = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    with XRTModule(graph, engine="host") as host:
        return graph, given, host(given)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_crash_costs_one_node(asynchronous: bool, tmp_path: pathlib.Path) -> None:
    """The compiler aborts on one of 200 nodes: the other 199 stay on the engine, and nobody is left behind."""
    fresh()
    graph, x, want = ladder()
    options: dict[str, Any] = {"guard_async": asynchronous, "guard_timeout": 120.0, "cache_dir": str(tmp_path)}
    with (
        registered(CrashesOnSinh),
        heard() as events,
        module(graph, "crashes_on_sinh", guard_tune=False, **options) as m,
    ):
        np.testing.assert_allclose(m(x), want, rtol=1e-5)
        assert m.wait(100)
        np.testing.assert_allclose(m(x), want, rtol=1e-5)
        cluster = m.report().clusters[0]
        pids = process_pool().pids()
    assert cluster["state"] == "live"
    assert fallbacks(events) == [("compile", "crashed")]
    pieces = cluster["outcome"]["pieces"]
    assert [p["nodes"] for p in pieces if p["engine"] == HOST] == [[137]]
    assert sum(len(p["nodes"]) for p in pieces if p["engine"] != HOST) == 199
    assert "the host keeps Sinh" in cluster["reason"]
    assert leftovers() == []
    process_pool().close()
    assert gone(pids)


@pytest.mark.slow
def test_a_hang_costs_one_node(tmp_path: pathlib.Path) -> None:
    """The same of a compiler that does not come back: its limit passes once, and then small parts of it."""
    fresh()
    graph, x, want = ladder(16, 5)
    options: dict[str, Any] = {"guard_tune": False, "guard_timeout": 6.0, "cache_dir": str(tmp_path)}
    with registered(HangsOnSinh), heard() as events, module(graph, "hangs_on_sinh", **options) as m:
        np.testing.assert_allclose(m(x), want, rtol=1e-5)
        assert m.wait(60)
        cluster = m.report().clusters[0]
    assert cluster["state"] == "live"
    assert fallbacks(events) == [("compile", "hung")]
    evicted = [i for p in cluster["outcome"]["pieces"] if p["engine"] == HOST for i in p["nodes"]]
    assert 5 in evicted  # and what a busy machine makes look as if it hung
    assert leftovers() == []


def test_a_crash_leaves_the_cluster_to_another_engine(tmp_path: pathlib.Path) -> None:
    """With two engines the one that does not crash has it, whole."""
    fresh()
    graph, x, want = ladder(12, 5)
    both, options = ["crashes_on_sinh", "plain"], {"guard_timeout": 60.0, "cache_dir": str(tmp_path)}
    with registered(CrashesOnSinh, Plain), heard() as events, module(graph, both, **options) as m:
        np.testing.assert_allclose(m(x), want, rtol=1e-5)
        assert m.wait(60)
        cluster = m.report().clusters[0]
    assert ("compile", "crashed") in fallbacks(events)
    assert cluster["outcome"]["errors"][0].startswith("crashes_on_sinh: crashed")
    assert "plain" in cluster["outcome"]["timings"]
