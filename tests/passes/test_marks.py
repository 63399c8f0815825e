"""Marks and the order of engines, through XRTModule: what a user writes, and what becomes of it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from tests.dag import ancestors
from tests.fake_engines import FakeEngine, SecondEngine, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.compiler import passes
from xrt_core.errors import GraphError, ModelLoadError, OptionError, TraceError
from xrt_core.explanation import Explanation
from xrt_core.frontends.onnx_export import export_model
from xrt_core.ir.graph import MARK, REGION, Annotations, Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters  # the marks decide, not the costs

X = np.array([0.5, -2.0, 3.0], np.float32)
ops: Any = xrt.ops


class Third(FakeEngine):
    """One more."""

    name = "third"


@pytest.fixture
def engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """Two engines that take anything: fake and second."""
    with fake_engine() as one, fake_engine(SecondEngine) as two:
        yield one, two


@pytest.fixture(autouse=True)
def _undefined() -> Iterator[None]:
    yield
    xrt.config.reset()


def chain(*names: str) -> Graph:
    """x through unary operators; the nodes are called n0, n1, ..."""
    values = [Value("x", TensorType(F32, (3,))), *[Value(f"n{i}") for i in range(len(names))]]
    nodes = [node(op, [a], [b]) for op, a, b in zip(names, values, values[1:], strict=False)]
    return graph_of(values[:1], values[-1:], nodes, "chain")


def clusters(told: Explanation) -> list[str]:
    """The clusters as texts such as 'fake: n0 n1'."""
    return [f"{c.engine}: {' '.join(c.nodes)}" for c in told.report.clusters]


def explained(model: Any, *args: np.ndarray, **options: Any) -> list[str]:
    """The clusters of a module that was run, whose result is the host's."""
    m = XRTModule(model, **options)
    got = m(*(args or (X,)))
    np.testing.assert_allclose(got, XRTModule(model, engine="host")(*(args or (X,))), rtol=1e-6)
    return clusters(m.explain())


def test_blocks_of_a_traced_graph(engines: Any) -> None:
    """Every block is a region; None keeps nodes on the host; one inside another of the same engine changes nothing."""

    def build(x: Any) -> Any:
        a = ops.Neg(x, name="a")
        with xrt.power_by_engine("fake"):
            b = ops.Abs(a, name="b")
            with xrt.power_by_engine("fake"):
                c = ops.Exp(b, name="c")
        with xrt.power_by_engine("fake"):
            d = ops.Neg(c, name="d")
            with xrt.power_by_engine("second"):
                e = ops.Abs(d, name="e")
        with xrt.power_by_engine(None):
            return ops.Neg(e, name="f")

    assert explained(build, engine=["fake", "second"]) == ["fake: b c", "fake: d", "second: e"]
    assert explained(build, engine=["second", "fake"], automatic=True) == [
        "second: a",
        "fake: b c",
        "fake: d",
        "second: e",
    ]


@pytest.mark.parametrize("bad", [3, "", b"x"])
def test_a_block_takes_a_name(bad: Any) -> None:
    """Or None; the message has the user's line."""

    def build(x: Any) -> Any:
        with xrt.power_by_engine(bad):
            return ops.Neg(x)

    with pytest.raises(TraceError, match=r"test_marks.py:\d+.*power_by_engine\(.*takes the name of an engine, or None"):
        XRTModule(build, engine="host")(X)


def test_rules_for_a_model(engines: Any) -> None:
    """By name and by operator; the host as well, which leaves all others to the engines."""
    g = chain("Neg", "Abs", "Exp", "Abs", "Neg")
    both = {"engine": ["fake", "second"]}
    assert explained(g, **both, marks={"name:n[12]": "second"}) == ["second: n1 n2"]
    assert explained(g, **both, marks={"op:Abs": "second", "name:n0": "fake"}) == [
        "fake: n0",
        "second: n1",
        "second: n3",
    ]
    assert explained(g, **both, marks={"op:Exp": "host"}) == ["fake: n0 n1", "fake: n3 n4"]
    assert explained(g, **both, marks={"op:Exp": None}) == ["fake: n0 n1", "fake: n3 n4"]
    assert explained(g, **both, marks={"name:n[12]": "second"}, automatic=True) == [
        "fake: n0",
        "second: n1 n2",
        "fake: n3 n4",
    ]


def test_the_optimiser_of_subblocks(engines: Any) -> None:
    """It switches automatic clustering on, with a minimum for unmarked nodes; a module's options win; None undoes."""
    g, marks = chain("Neg", "Abs", "Exp", "Abs", "Neg"), {"name:n1": "second"}
    options: Any = {"engine": ["fake", "second"], "marks": marks}
    assert explained(g, **options) == ["second: n1"]
    xrt.init_subblock_optimizer(min_ops=2)
    assert explained(g, **options) == ["second: n1", "fake: n2 n3 n4"]
    assert explained(g, **options, minimum_nodes=1) == ["fake: n0", "second: n1", "fake: n2 n3 n4"]
    assert explained(g, **options, automatic=False) == ["second: n1"]
    xrt.init_subblock_optimizer(None)
    assert explained(g, **options) == ["second: n1"]
    assert explained(g, engine="fake") == ["fake: n0 n1 n2 n3 n4"]  # a graph without marks is as ever
    assert explained(g, engine="fake", automatic=False) == []


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2"])
def test_the_optimiser_takes_a_count(bad: Any) -> None:
    """And nothing else."""
    with pytest.raises(OptionError, match=r"init_subblock_optimizer\(min_ops=.*an integer of at least 1, or None"):
        xrt.init_subblock_optimizer(bad)
    assert dict(xrt.config.values()) == {}


def test_where_the_minimum_came_from() -> None:
    """The message of a contradiction names the call."""
    xrt.init_subblock_optimizer(4)
    with pytest.raises(OptionError, match=r"minimum_nodes=4 \(xrt.init_subblock_optimizer\) is above maximum_nodes=2"):
        XRTModule(chain("Neg"), engine="host", maximum_nodes=2)


@pytest.mark.parametrize("metadata", [{MARK: ""}, {REGION: "r"}, {MARK: "", REGION: "r"}])
def test_metadata_that_names_no_engine_is_an_error(metadata: dict[str, str]) -> None:
    """It names the node and the key, and what the key takes."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> agraph (float[3] x) => (float[3] y) { [first] y = Neg(x) }'
    )
    for key, text in metadata.items():
        model.graph.node[0].metadata_props.add(key=key, value=text)
    with pytest.raises(ModelLoadError, match=r"'first' \(Neg\): its metadata .* names no engine; 'xrt.mark' takes"):
        XRTModule(model, engine="host")


def test_keys_that_are_nearly_marks_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With what was meant, however many nodes and signatures there are; keys of others are theirs."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        "agraph (float[N] x) => (float[N] y) { [first] h = Neg(x) [second] y = Abs(h) }"
    )
    typos = {"xrt.marks": "fake", "xrt.engin": "fake", "XRT_region": "r", "xrt.zzz": "1", "namespace": "mark"}
    for n in model.graph.node:
        for key, text in {**typos, "pkg.torch.onnx.name": "x"}.items():
            n.metadata_props.add(key=key, value=text)
    m = XRTModule(model, engine="host")
    for size in (2, 3):
        m(np.ones(size, np.float32))
    (said,) = [r.getMessage() for r in caplog.records if "mark nothing" in r.getMessage()]
    for key, meant in (("xrt.marks", MARK), ("xrt.engin", MARK), ("XRT_region", REGION)):
        assert f"{key!r} (node 'first'; did you mean {meant!r}?)" in said
    assert "'xrt.zzz' (node 'first')" in said
    assert not any(word in said for word in ("namespace", "torch"))


def test_metadata_of_an_onnx_model(engines: Any) -> None:
    """Nodes carry marks in their file; a call of a function marks what is inlined, but not over its own marks."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        agraph (float[3] x) => (float[3] y) { [first] a = Neg(x)  [call] b = local.twice(a)  [last] y = Exp(b) }
        <domain: "local", opset_import: ["" : 17]> twice (p) => (r) { [in0] q = Abs(p)  [in1] r = Neg(q) }"""
    )
    for n in model.graph.node:
        if n.name in ("first", "call"):
            n.metadata_props.add(key=MARK, value="fake")
    both: Any = {"engine": ["fake", "second"]}
    assert explained(model, **both) == ["fake: first call/in0 call/in1"]
    model.functions[0].node[1].metadata_props.add(key=MARK, value="second")
    assert explained(model, **both) == ["fake: first call/in0", "second: call/in1"]
    assert explained(model, **both, marks={"name:last": "second"})[-1] == "second: last"
    assert explained(model, **both, marks=False) == ["fake: first call/in0 call/in1 last"]
    with pytest.raises(
        GraphError, match="'first', operator Neg, is marked for 'fake' by the model's metadata.*for 'second' by marks"
    ):
        XRTModule(model, **both, marks={"op:Neg": "second"})


def test_marks_go_out_and_come_back(engines: Any, tmp_path: pathlib.Path) -> None:
    """A marked graph that is exported keeps its marks and regions."""

    def build(x: Any) -> Any:
        with xrt.power_by_engine("second"):
            a = ops.Neg(x)
        with xrt.power_by_engine("second"):
            return ops.Abs(a)

    model = export_model(xrt.trace(build, "float32[3]"))
    assert explained(model, engine=["fake", "second"]) == ["second: Neg", "second: Abs"]


def test_marks_survive_simplification(engines: Any) -> None:
    """What is folded or an identity goes from its region, equal nodes in two regions stay two, marks hold within the
    bodies of control flow, which the host runs."""

    def build(x: Any) -> Any:
        with xrt.power_by_engine("second"):
            a = ops.Identity(ops.Neg(x))
        with xrt.power_by_engine("fake"):
            b = ops.Neg(x)
            c = ops.Add(b, ops.Neg(np.ones(3, np.float32)))
        with xrt.power_by_engine("second"):
            positive = ops.ReduceSum(x, keepdims=0) > 0
            d = ops.If(positive, then_branch=lambda: ops.Abs(a), else_branch=lambda: ops.Exp(a))
        return c + d

    m = XRTModule(build, engine=["fake", "second"])
    for given in (X, -X):
        np.testing.assert_allclose(m(given), XRTModule(build, engine="host")(given), rtol=1e-6)
    told = m.explain()
    assert clusters(told) == ["second: Neg", "fake: Neg_1 Add", "second: ReduceSum Greater"]
    inner = [c for parts in told.nested.values() for e in parts for c in clusters(e)]
    assert inner
    assert all(c.startswith("second: ") for c in inner)
    assert any(h.operator == "If" for h in told.report.host_nodes)


def test_the_body_of_an_operator_keeps_its_mark(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that only the standard's body computes: all of the body is in the region."""

    body = chain("Neg", "Abs")
    monkeypatch.setattr(passes, "expand", lambda n: body if n.op_type == "Exp" else None)
    x, y = Value("x", TensorType(F32, (3,))), Value("y")
    marked = node("Exp", [x], [y]).replace(annotations=Annotations(engine="second", region="r"))
    z = Value("z")
    m = XRTModule(graph_of([x], [z], [marked, node("Neg", [y], [z])]), engine=["fake", "second"])
    np.testing.assert_array_equal(m(X), -np.abs(X))
    assert [(c.engine, c.node_count, c.region) for c in m.explain().report.clusters] == [("second", 2, "r")]


def test_marks_that_cannot_be(engines: Any) -> None:
    """An engine that is not installed, is not asked for, or cannot take the node; each says what to do."""
    one, _ = engines
    g = chain("Neg", "Abs")
    with pytest.raises(OptionError, match=r"marks=.*'nowhere'.*there is no engine 'nowhere'.*known: .*fake"):
        XRTModule(g, engine="fake", marks={"op:Neg": "nowhere"})
    with pytest.raises(
        OptionError, match=r"'second' is installed, but not among \['fake'\]: add it with engine=\['fake', 'second'\]"
    ):
        XRTModule(g, engine="fake", marks={"op:Neg": "second"})
    one.takes = lambda n: n.op_type != "Abs"
    with pytest.raises(
        GraphError, match="node 'n1', operator Abs,.*'fake', which cannot take it: not wanted; mark it for 'second'"
    ):
        XRTModule(g, engine=["fake", "second"], marks={"op:Abs": "fake"})(X)
    with pytest.raises(GraphError, match="cannot take it: not wanted; take the mark off"):
        XRTModule(g, engine="fake", marks={"op:Abs": "fake"})(X)

    def build(x: Any) -> Any:
        with xrt.power_by_engine("onnxrutime"):
            return ops.Neg(x)

    with pytest.raises(GraphError, match=r"operator Neg, \(.*test_marks.py:\d+.*'onnxrutime'.*there is no engine"):
        XRTModule(build, engine="fake")(X)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"n0": "fake"}, "'n0' names no nodes: say 'name:PATTERN' or 'op:OPERATOR'"),
        ({"name:n0": "no engine"}, "marked for 'no engine', which is no engine's name"),
        ({"name:n0": 3}, "marked for 3"),
        ([("name:n0", "fake"), ("name:n0", "second")], "'name:n0' is marked for 'fake' and for 'second'"),
        ("op:Neg", "it takes a mapping"),
        (True, "it takes a mapping"),
    ],
)
def test_marks_that_are_none(marks: Any, message: str) -> None:
    """The option says what it takes."""
    with pytest.raises(OptionError, match=message):
        XRTModule(chain("Neg"), engine="host", marks=marks)


def test_marks_as_text() -> None:
    """As a command line gives them."""
    from xrt_core.options import from_text

    assert from_text("marks", "name:enc/*=fake, op:Neg=host", "here") == (("name:enc/*", "fake"), ("op:Neg", "host"))
    assert from_text("marks", "off", "here") is False
    with pytest.raises(OptionError, match="from here"):
        from_text("marks", "on", "here")


def test_without_engines_marks_are_only_told(engines: Any) -> None:
    """engine="host" is for comparing: it runs the model whatever its marks."""
    m = XRTModule(chain("Neg"), engine="host", marks={"op:Neg": "nowhere"})
    np.testing.assert_array_equal(m(X), -X)


def test_a_consumer_waits_only_when_strict_is_off(engines: Any) -> None:
    """h, on the host, reads n0. With strict it starts after n0 alone; without, after all of n0, n1 and n2."""
    one, _ = engines
    one.takes = lambda n: n.op_type != "Exp"
    x, a, b, c, h = Value("x", TensorType(F32, (3,))), *(Value(f"n{i}") for i in range(3)), Value("h")
    nodes = [node("Neg", [x], [a]), node("Abs", [a], [b]), node("Neg", [b], [c]), node("Exp", [a], [h])]
    g = graph_of([x], [c, h], nodes)
    waits = {}
    for strict in (True, False):
        m = XRTModule(g, engine="fake", strict_clustering=strict)
        m(X)
        partitioned = m.partitioned()
        place = next(i for i, n in enumerate(partitioned.nodes) if n.op_type == "Exp")
        before = [partitioned.nodes[i] for i in ancestors(partitioned, [place])]
        waits[strict] = sorted(
            n.name for f in before if "function" in f.attributes for n in f.attributes["function"].body.nodes
        )  # type: ignore[union-attr]
    assert waits == {True: ["n0"], False: ["n0", "n1", "n2"]}


def test_updates_may_be_merged(engines: Any) -> None:
    """Those of variables stand apart from what computes their gradients, unless they are asked to share a cluster."""
    x, w, g, u = (Value(n, TensorType(F32, (3,))) for n in "xwgu")
    update = node("Sub", [w, g], [u]).replace(annotations=Annotations(model_update=True, aliases=((0, 0),)))
    graph = graph_of([x, w], [u], [node("Mul", [x, w], [g]), update])
    for merge, found in ((False, ["fake: g", "fake: u"]), (True, ["fake: g u"])):
        m = XRTModule(graph, engine="fake", merge_updates=merge)
        np.testing.assert_allclose(m(X, X + 1), X + 1 - X * (X + 1))
        told = m.explain()
        assert clusters(told) == found
        assert told.report.clusters[-1].model_update


class Xla(FakeEngine):
    """Ranks as XRT's own XLA does."""

    name = "fake_xla"
    priority: ClassVar[Any] = {"train": 100, "inference": 50}


class TensorRT(FakeEngine):
    """Ranks as XRT's own TensorRT does."""

    name = "fake_tensorrt"
    priority: ClassVar[Any] = {"train": 50, "inference": 100}


class Last(FakeEngine):
    """Declares a priority of its own for one phase."""

    name = "fake_last"
    priority: ClassVar[Any] = {"inference": 10}


def test_the_order_follows_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training tries XLA first, inference TensorRT; others by their priority; `engine=[...]` overrides; each engine
    works on what those before it left."""
    monkeypatch.setenv("XRT_DISABLE_PLUGINS", "xla,tensorrt,toy,onnxruntime,openvino")
    with ExitStack() as stack:
        kinds: list[type[FakeEngine]] = [Last, TensorRT, Xla]
        _, tensorrt, xla = (stack.enter_context(fake_engine(k)) for k in kinds)
        tensorrt.takes = lambda n: n.op_type in ("Neg", "Abs")
        xla.takes = lambda n: n.op_type in ("Abs", "Exp")
        g = chain("Neg", "Abs", "Exp", "Sqrt")
        assert XRTModule(g).engines == ("fake_tensorrt", "fake_xla", "fake_last")
        assert XRTModule(g, phase="train").engines == ("fake_xla", "fake_tensorrt", "fake_last")
        assert explained(g, X * X) == ["fake_tensorrt: n0 n1", "fake_xla: n2", "fake_last: n3"]
        assert explained(g, X * X, phase="train") == ["fake_tensorrt: n0", "fake_xla: n1 n2", "fake_last: n3"]
        assert explained(g, X * X, engine=["fake_last", "fake_xla"]) == ["fake_last: n0 n1 n2 n3"]
        assert explained(g, X * X, engine=["fake_xla", "fake_tensorrt"]) == ["fake_tensorrt: n0", "fake_xla: n1 n2"]


def test_the_report_shows_the_estimate(engines: Any) -> None:
    """As text and as data; what does not pay says so."""
    one, _ = engines
    one.takes = lambda n: n.op_type == "Abs"
    m = XRTModule(chain("Neg", "Abs", "Exp"), engine="fake", prune=False)
    told = m.explain({"x": X})
    assert "estimated 6.0 us lost a call: 1.0 us on the host, 7.0 us on the engine" in str(told)
    assert told.to_json()["clusters"][0]["estimate"]["gain_us"] < 0
    pruned = XRTModule(chain("Neg", "Abs", "Exp"), engine="fake", prune=True).explain({"x": X})
    assert clusters(pruned) == []
    assert "a cluster of 1 node would not pay" in str(pruned)
