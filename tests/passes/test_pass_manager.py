"""The registry of passes: order, errors that leave it as it was, and passes of users in the pipeline."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xrt_core as xrt
from tests.fake_engines import FakeEngine, fake_engine
from tests.profiles import examples
from tests.random_graphs import F32, graph_of, node
from xrt_core.compiler import passes
from xrt_core.errors import OptionError, PassError, RegistrationError
from xrt_core.events import EventLog
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.pass_manager import STAGES, PassRegistry, RegisteredPass

X = np.array([1.0, -2.0], np.float32)


def same(graph: Graph, _: Any = None) -> Graph:
    """Changes nothing."""
    return graph


def registry() -> PassRegistry:
    """Three core passes of one stage and one of another."""
    names = ["one", "two", "clean_unused"]
    core = [RegisteredPass(n, same, ("signature",), "why") for n in names]
    return PassRegistry([*core, RegisteredPass("fold", same, ("engines",), "why")])


def own(name: str, stage: str = "signature", owner: str = "mine", **order: tuple[str, ...]) -> RegisteredPass:
    return RegisteredPass(name, same, (stage,), "", owner=owner, origin="user", **order)  # type: ignore[arg-type]


def order(r: PassRegistry) -> str:
    return " ".join(p.name for p in r.order("signature"))


@pytest.fixture
def user_passes() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(passes.passes._passes)
    yield
    passes.passes._passes = before


def chain(*ops: str) -> Graph:
    values = [Value("x", TensorType(F32, (2,))), *[Value(f"v{i}") for i in range(len(ops))]]
    nodes = [node(op, [a], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    return graph_of(values[:1], values[-1:], nodes, "chain")


def test_passes_run_where_they_say() -> None:
    """Before and after others; with no place, before what cleans up."""
    r = registry()
    r.register(own("x", before=("two",)))
    r.register(own("y", after=("x",), before=("two",)))
    r.register(own("z"))
    r.register(own("last", after=("clean_unused",)))
    r.register(own("w", requires=("z",)))
    assert order(r) == "one x y two z clean_unused last w"
    assert [p.name for p in r.order("engines")] == ["fold"]
    assert r.names()[:4] == ("one", "two", "clean_unused", "fold")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (own("one"), "'one' is registered twice: by xrt-core and by mine"),
        (own("x", owner="other"), "'x' is registered twice: by mine and by other"),
        (own("q", before=("twoo",)), "'q' of mine names the pass 'twoo', which is not there; did you mean 'two'"),
        (own("q", requires=("far",)), "names the pass 'far'"),
        (own("q", after=("clean_unused",), before=("one",)), "wait for each other: .*q .mine. -> one .xrt-core"),
        (own("q", before=("x",), after=("y",)), "wait for each other: y .mine. -> q .mine. -> x .mine"),
        (own("q", stage="nowhere"), "no stage 'nowhere'; stages are model, signature, engines"),
        (own("q", stage="engines", after=("one",)), "cannot be put in order with 'one' of xrt-core"),
        (own("a b"), "must be an identifier"),
    ],
)  # fmt: skip
def test_what_cannot_be_registered(bad: RegisteredPass, message: str) -> None:
    """The message names the owners, and nothing has changed."""
    r = registry()
    r.register(own("x"))
    r.register(own("y", after=("x",)))
    before = order(r)
    with pytest.raises(RegistrationError, match=message):
        r.register(bad)
    assert order(r) == before


def test_taking_out() -> None:
    """Only what is not the core's and not named by others."""
    r = registry()
    r.register(own("x"))
    r.register(own("y", after=("x",)))
    with pytest.raises(RegistrationError, match="'x' is named by 'y' of mine"):
        r.unregister("x")
    with pytest.raises(RegistrationError, match="'one' is one of the core's"):
        r.unregister("one")
    with pytest.raises(RegistrationError, match="no pass 'yy'; did you mean 'y'"):
        r.unregister("yy")
    r.unregister("y")
    r.unregister("x")
    assert order(r) == "one two clean_unused"


def test_passes_that_name_each_other_come_in_any_order() -> None:
    """As those of several plugins do; what cannot be had says why and is in nobody's way."""
    r = registry()
    failed = r.register_all([own("c", after=("b",)), own("b", after=("a",)), own("a"), own("lost", requires=("gone",))])
    assert order(r) == "one two a clean_unused b c"
    assert list(failed) == ["lost"]
    assert "'gone'" in failed["lost"]


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12))
def test_any_order_that_is_accepted_holds(wishes: list[tuple[int, int, bool]]) -> None:
    """Whatever is asked for: each wish that was accepted is kept, the core's own order as well."""
    r = registry()
    for k, (a, b, requires) in enumerate(wishes):
        names = r.order("signature")
        after, before = names[a % len(names)].name, names[b % len(names)].name
        wish = {"requires" if requires else "after": (after,), "before": (before,)}
        with contextlib.suppress(RegistrationError):  # one that cannot be is refused
            r.register(own(f"p{k}", **wish))
    place = {p.name: i for i, p in enumerate(r.order("signature"))}
    assert place["one"] < place["two"] < place["clean_unused"]
    for p in r.order("signature"):
        assert all(place[n] < place[p.name] for n in (*p.after, *p.requires))
        assert all(place[n] > place[p.name] for n in p.before)


def test_the_core_is_registered() -> None:
    """Each of the default passes, in their order, with a reason."""
    core = [p.name for p in passes.DEFAULT_PASSES]
    assert set(passes.passes.names()) >= set(core)
    told = [p.name for s in STAGES for p in passes.passes.order(s) if p.origin == "core"]
    assert [n for n in told if n != "clean_unused"] == [n for n in core if n != "clean_unused"]
    assert all(p.reason for s in STAGES for p in passes.passes.order(s))


def test_a_pass_of_a_user(user_passes: None) -> None:
    """A function runs before the nodes it leaves unread are cleaned; the types of what it makes are inferred."""

    @xrt.register_pass(after="identity")
    def neg_to_abs(graph: Graph) -> Graph:
        """Computes something else, so that it shows."""
        nodes = [
            node("Abs", n.inputs, [Value(v.name) for v in n.outputs if v]) if n.op_type == "Neg" else n
            for n in graph.nodes
        ]
        if nodes == list(graph.nodes):
            return graph
        return graph.replace(nodes=nodes, outputs=[nodes[-1].outputs[0]])  # type: ignore[list-item]

    names = [p.name for p in passes.passes.order("signature")]
    assert names.index("identity") < names.index("neg_to_abs")
    with fake_engine():
        m = xrt.XRTModule(chain("Neg"), engine="fake")
        np.testing.assert_array_equal(m(X), np.abs(X))
        assert m.explain().node_share == 1.0  # it has a type, so the engine takes it
        xrt.unregister_pass("neg_to_abs")
        np.testing.assert_array_equal(xrt.XRTModule(chain("Neg"), engine="fake")(X), -X)
        np.testing.assert_array_equal(m(X), np.abs(X))  # a module keeps the passes that it was made with


def test_a_class_says_its_place_itself(user_passes: None) -> None:
    """Through attributes; it needs no arguments."""

    class Nothing(Pass):
        """Changes nothing."""

        name = "nothing"
        stage = "model"
        after = "constant_fold"

        def rewrite(self, graph: Graph) -> Graph:
            return graph

    assert xrt.register_pass(Nothing) is Nothing
    (found,) = [p for p in passes.passes.order("model") if p.name == "nothing"]
    assert (found.after, found.reason, found.owner) == (("constant_fold",), "Changes nothing.", __name__)
    np.testing.assert_array_equal(xrt.XRTModule(chain("Neg"), engine="host")(X), -X)


@pytest.mark.parametrize("bad", [3, "name", object()])
def test_what_is_no_pass(bad: Any) -> None:
    """It says what would be one."""
    with pytest.raises(RegistrationError, match="give a function Graph -> Graph"):
        xrt.register_pass(bad, name="bad")


@pytest.mark.parametrize("bad", [lambda: None, lambda graph, more: graph, lambda *, graph: graph])
def test_a_pass_that_takes_no_graph_is_refused_at_once(user_passes: None, bad: Any) -> None:
    """And not by every module that is made later; what has more arguments with defaults is fine."""
    with pytest.raises(RegistrationError, match="'bad' of .* cannot be called with a graph alone"):
        xrt.register_pass(bad, name="bad")
    xrt.register_pass(lambda graph, twice=False: graph, name="bad")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda g: 1 / 0, "ZeroDivisionError"),
        (lambda g: None, "returned a NoneType instead of a graph"),
        (lambda g: g.replace(nodes=()), "breaks the rule 'outputs'"),
        (lambda g: g.replace(inputs=()), "changed the graph's inputs"),
    ],
    ids=["raises", "no graph", "bad graph", "other inputs"],
)
def test_a_pass_that_fails_is_named(user_passes: None, broken: Any, message: str) -> None:
    """With its owner; also where the graph is not verified otherwise."""
    xrt.register_pass(broken, name="mine_is_broken")
    m = xrt.XRTModule(chain("Neg"), engine="host", verify=False)
    with pytest.raises(PassError, match=f"'mine_is_broken' of {__name__} failed on graph 'chain'.*{message}"):
        m(X)


def test_a_plugin_pass_that_fails_is_in_nobodys_way(user_passes: None) -> None:
    """The model runs without it, and there is a warning."""
    failing = RegisteredPass(
        "bad_plugin",
        lambda g, _: 1 / 0,
        ("signature",),
        owner="some-package 1.0",
        origin="plugin",  # type: ignore[arg-type, return-value]
    )
    passes.passes.register(failing)
    m = xrt.XRTModule(chain("Neg"), engine="host")
    np.testing.assert_array_equal(m(X), -X)
    (event,) = m.events.recent("pass.failed")
    assert "'bad_plugin' of some-package 1.0 failed" in event.fields["error"]


def test_passes_of_plugins_are_found(user_passes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through their entry points; one that is broken, and one whose requirement is not there, are listed with why."""
    from xrt_core.engine import engines
    from xrt_core.errors import PluginError

    def tidy(graph: Graph) -> Graph:
        return graph

    tidy.after = "identity"  # type: ignore[attr-defined]
    lonely = type("Lonely", (Pass,), {"rewrite": lambda self, g: g, "requires": "absent_pass"})
    rows = [("tidy", "pkg 1", tidy), ("bad", "pkg 2", PluginError("cannot be imported")), ("lonely", "pkg 3", lonely)]
    monkeypatch.setattr(engines, "load_passes", lambda: rows)
    monkeypatch.setattr(passes, "_plugin_passes", {})
    events = EventLog()
    faults = passes.load_plugin_passes(events)
    assert faults["bad"] == "cannot be imported"
    assert "'absent_pass', which is not there" in faults["lonely"]
    assert len(events.recent("pass.left_out")) == 2
    (found,) = [p for p in passes.passes.order("signature") if p.name == "tidy"]
    assert (found.owner, found.origin, found.after) == ("pkg 1", "plugin", ("identity",))
    assert passes.load_plugin_passes(events) == faults  # once a process


def test_passes_of_engines_are_found(user_passes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through their hook, at the first module after the engine was loaded; a hook that fails is in nobody's way."""
    from xrt_core.engine import hookimpl

    def from_hook(graph: Graph) -> Graph:
        return graph

    class WithPasses(FakeEngine):
        """Brings a pass."""

        name = "with_passes"

        @hookimpl
        def xrt_passes(self) -> list[Any]:
            return [from_hook]

    class Failing(FakeEngine):
        """Has a hook that fails."""

        name = "failing_hook"

        @hookimpl
        def xrt_passes(self) -> list[Any]:
            raise OSError("no such thing")

    monkeypatch.setattr(passes, "_plugin_passes", {})
    with fake_engine(WithPasses), fake_engine(Failing):
        m = xrt.XRTModule(chain("Neg"), engine=["with_passes", "failing_hook"])
        np.testing.assert_array_equal(m(X), -X)
        (found,) = [p for p in passes.passes.order("signature") if p.name == "from_hook"]
        assert (found.origin, found.owner) == ("plugin", f"{__name__}.{WithPasses.__qualname__}")
        (event,) = m.events.recent("pass.left_out")
        assert "the hook xrt_passes of 'failing_hook' failed: OSError: no such thing" in event.fields["reason"]
        xrt.XRTModule(chain("Neg"), engine="with_passes")  # once


def test_the_trace_in_files(tmp_path: pathlib.Path) -> None:
    """A folder for each stage: an index with every pass, and the graph whenever it changed."""
    m = xrt.XRTModule(chain("Neg", "Identity", "Abs"), engine="host", trace=tmp_path / "trace")
    m(X)
    folders = sorted((tmp_path / "trace").iterdir())
    assert [f.name.rpartition("-")[2] for f in folders] == list(STAGES)
    head, *rows = [line.split("\t") for line in (folders[1] / "index.tsv").read_text().splitlines()]
    assert head == [
        "number",
        "pass",
        "owner",
        "milliseconds",
        "nodes before",
        "nodes after",
        "file before",
        "file after",
    ]
    assert [r[1] for r in rows] == [p.name for p in passes.passes.order("signature")]
    first = next(r for r in rows if r[1] == "specialise")
    assert first[4:] == ["3", "2", "000-start.txt", "002-specialise.txt"]
    assert float(first[3]) >= 0
    assert "Identity" in (folders[1] / first[6]).read_text()
    assert "Identity" not in (folders[1] / first[7]).read_text()
    assert all((folders[1] / r[7]).exists() for r in rows)


def test_the_trace_as_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """One INFO line for each pass, with its time and the counts of nodes."""
    with caplog.at_level(logging.INFO, "xrt"):
        xrt.XRTModule(chain("Neg", "Identity"), engine="host", trace=True)(X)
    lines = [r.message for r in caplog.records if r.message.startswith("pass.")]
    assert len(lines) == sum(len(passes.passes.order(s)) for s in STAGES)
    (line,) = [t for t in lines if t.startswith("pass.specialise")]
    assert "ms model=chain of=signature nodes=2 -> 1" in line


def test_a_folder_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    """It is said when the module is made."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="trace=.*cannot be made"):
        xrt.XRTModule(chain("Neg"), engine="host", trace=tmp_path / "file" / "inside")


def test_a_disk_that_fails_ends_the_trace_and_not_the_run(tmp_path: pathlib.Path) -> None:
    """With one warning for each run of passes."""
    m = xrt.XRTModule(chain("Neg"), engine="host", trace=tmp_path / "t")
    for f in (tmp_path / "t").iterdir():
        for inner in f.iterdir():
            inner.unlink()
        f.rmdir()
    (tmp_path / "t").rmdir()
    (tmp_path / "t").write_text("in the way")
    np.testing.assert_array_equal(m(X), -X)
    assert len(m.events.recent("trace.failed")) == 2
