"""Converters: the registry, what plugins and users add, what goes wrong, and array types of users end to end."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.engine.packages import add_package
from tests.fake_engines import FakeEngine, SecondEngine, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.engine import hookimpl
from xrt_core.engine.converters import Converters, converters
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import ConverterError, InputError, InternalError, PluginError, RegistrationError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.plugins.discovery import Discovery
from xrt_core.runtime.arrays import conversion
from xrt_core.runtime.plan import Lowered, make_plan

pytestmark = pytest.mark.tiny_clusters  # values cross between engines

X = np.array([1, -2], np.float32)


class Held:
    """An array of an engine's own, which no other library can read."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape


@pytest.fixture
def registered() -> Iterator[list[tuple[str, str]]]:
    """Pairs noted here are taken out of the registry of the process after the test."""
    pairs: list[tuple[str, str]] = []
    yield pairs
    for pair in pairs:
        converters.unregister(*pair)


def f32(name: str, *shape: int) -> Value:
    return Value(name, TensorType(F32, shape or (2,)))


def chain(*ops: str) -> Graph:
    """One unary node after another, named after their place."""
    values = [f32("x"), *(f32(f"v{i}") for i in range(len(ops)))]
    nodes = [node(op, [a], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    return graph_of([values[0]], [values[-1]], nodes)


def holding(engine: FakeEngine, function: Any = np.negative) -> list[type]:
    """Let an engine hand out its own arrays; returns the types of what its executables are given."""
    seen: list[type] = []

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        seen.extend(type(a) for a in arrays)
        return [Held(function(a.data if isinstance(a, Held) else a)) for a in arrays]

    engine.on_run = run
    return seen


# --- the registry ---


def test_a_pair_has_one_converter() -> None:
    """A second one is refused, naming both owners; the first stays."""
    found = Converters()
    first = found.register("a", "b", abs, owner="one")
    with pytest.raises(RegistrationError, match="a -> b is registered twice: by one and by two"):
        found.register("a", "b", None, owner="two")
    assert found.find("a", "b") is first
    assert found.find("b", "a") is None
    found.unregister("a", "b")
    with pytest.raises(RegistrationError, match="no converter a -> b"):
        found.unregister("a", "b")


@pytest.mark.parametrize(
    ("source", "target", "function", "message"),
    [
        ("a", "a", abs, "nothing needs converting"),
        ("a b", "host", abs, "'a b' is no space"),
        ("a", 3, abs, "3 is no space"),
        ("a", "b", 3, "3 is neither a function nor None"),
    ],
)
def test_what_is_no_converter(source: Any, target: Any, function: Any, message: str) -> None:
    """Refused, with what is wrong."""
    found = Converters()
    with pytest.raises(RegistrationError, match=message):
        found.register(source, target, function, owner="one")
    assert found.find("a", "b") is None


def test_installed_converters_are_loaded_before_the_first_look() -> None:
    """Once."""
    loads: list[str] = []

    def load() -> None:
        loads.append("once")
        found.register("a", "b", None, owner="plugin")

    found = Converters(load)
    assert found.find("a", "b") is not None
    assert found.find("b", "a") is None
    assert loads == ["once"]


# --- on the way ---


def test_values_cross_by_the_default(registered: list[tuple[str, str]]) -> None:
    """Host, one engine, another engine, host: the default takes arrays of both by the array protocol."""
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        first.takes = lambda n: n.op_type == "Neg"
        second.takes = lambda n: n.op_type == "Abs"
        m = XRTModule(chain("Neg", "Abs", "Tanh"), engine=["fake", "second"])
        np.testing.assert_array_equal(m(X), np.tanh(np.abs(-X)))
        assert [n.op_type for n in m.partitioned({"x": X}).nodes] == [
            "EngineInputConvert", "Launch", "EngineOutputConvert", "EngineInputConvert", "Launch",
            "EngineOutputConvert", "Tanh",
        ]  # fmt: skip


def test_an_engines_own_arrays(registered: list[tuple[str, str]]) -> None:
    """Its converter brings them to the host, for nodes and for results; between its launches they go as they are."""
    calls: list[Any] = []

    @xrt.register_converter("fake", "host")
    def to_host(x: Held) -> np.ndarray:
        calls.append(x)
        return x.data

    registered.append(("fake", "host"))
    with fake_engine() as engine:
        seen = holding(engine)
        engine.takes = lambda n: n.op_type in ("Neg", "Abs")
        x, a, b, y = f32("x"), f32("a"), f32("b"), f32("y")
        host = node("Tanh", [a], [b])
        g = graph_of([x], [y, b], [node("Neg", [x], [a]), host, node("Neg", [a], [y])])
        m = XRTModule(g, engine="fake", strict_clustering=True)
        for _ in range(2):
            twice, middle = m(X)
            np.testing.assert_array_equal(twice, X)
            np.testing.assert_array_equal(middle, np.tanh(-X))
        assert len(m.explain().report.clusters) == 2
        assert seen == [np.ndarray, Held] * 2
        assert len(calls) == 4  # two values a run


def test_from_one_engine_to_another(registered: list[tuple[str, str]]) -> None:
    """A direct converter takes the place of the way over the host."""
    calls: list[str] = []

    @xrt.register_converter("fake", "second")
    def across(x: Held) -> np.ndarray:
        calls.append("across")
        return x.data

    registered.append(("fake", "second"))
    with fake_engine() as first, fake_engine(SecondEngine) as second:
        holding(first)
        first.takes = lambda n: n.op_type == "Neg"
        second.takes = lambda n: n.op_type == "Abs"
        m = XRTModule(chain("Neg", "Abs"), engine=["fake", "second"])
        np.testing.assert_array_equal(m(X), np.abs(X))
        assert calls == ["across"]


def test_into_an_engine(registered: list[tuple[str, str]]) -> None:
    """A converter from the host replaces handing NumPy arrays over."""

    @xrt.register_converter("host", "fake")
    def into(x: np.ndarray) -> np.ndarray:
        assert not x.flags.writeable
        return x.copy()

    registered.append(("host", "fake"))
    with fake_engine() as engine:
        seen: list[Any] = []
        engine.on_run = lambda arrays: seen.extend(arrays)  # type: ignore[func-returns-value]
        m = XRTModule(chain("Neg"), engine="fake")
        np.testing.assert_array_equal(m(X), -X)
        assert not np.shares_memory(seen[0], X)


def test_arrays_that_nothing_converts() -> None:
    """No converter: the host answers, and the event names the pair, the value, both nodes and the remedy."""
    with fake_engine() as engine:
        holding(engine)
        engine.takes = lambda n: n.op_type == "Neg"
        m = XRTModule(chain("Neg", "Tanh"), engine="fake")
        np.testing.assert_array_equal(m(X), np.tanh(-X))
        (fallback,) = m.events.recent("fallback")
        message = fallback.error
        remedy = "@xrt.register_converter('fake', 'host')"
        for part in ("fake -> host", "'v0'", "fake_0 on fake", "Tanh 'v1'", "Held", remedy):
            assert part in message, message
        engine.on_run = None
        np.testing.assert_array_equal(m(X), np.tanh(-X))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.data.astype(np.float64), r"gave float64\[2\].*float32\[2\] is needed"),
        (lambda x: x.data[:1], r"gave float32\[1\].*float32\[2\] is needed"),
        (lambda x: [1.0, 2.0], "gave a list"),
        (lambda x: x.data / x.nothing, "AttributeError"),
    ],
)
def test_a_converter_that_gives_something_else(wrong: Any, message: str, registered: list[tuple[str, str]]) -> None:
    """Noticed at the first use, with the converter's owner, the value and both nodes."""
    xrt.register_converter("fake", "host")(wrong)
    registered.append(("fake", "host"))
    with fake_engine() as engine:
        holding(engine)
        engine.takes = lambda n: n.op_type == "Neg"
        m = XRTModule(chain("Neg", "Tanh"), engine="fake")
        for _ in range(2):
            with pytest.raises(ConverterError, match=message) as e:
                m(X)
            assert "of tests.runtime.test_converters" in str(e.value)
            assert "'v0' (made by fake_0 on fake, read by Tanh 'v1')" in str(e.value)


def test_a_pair_without_any_way() -> None:
    """Between two spaces that are not the host there is none but a registered one."""
    x, y = f32("x"), f32("y")
    attributes = {"source": "ragged", "target": "fake"}
    convert = Node("EngineInputConvert", [x], [y], attributes, domain="xrt", version=1, name="c")
    g = graph_of([x], [y], [convert])
    with pytest.raises(ConverterError, match=r"no converter from 'ragged' to 'fake', for value 'x' \(an input"):
        conversion(convert, g, np.asarray, Converters())


def test_a_plan_needs_its_converters() -> None:
    """A value of another space that nothing converts is a bug of the pass, and said to be one."""
    x, a, y = f32("x"), f32("a"), f32("y")
    g = graph_of([x], [y], [node("Neg", [x], [a]), node("Abs", [a], [y])])
    with pytest.raises(InternalError, match="Abs reads 'a' on host, which is on fake"):
        make_plan(g, lambda n: Lowered(list, "fake" if n.op_type == "Neg" else "host", n.op_type, reads="host"))


# --- plugins ---


class ConvertingEngine(FakeEngine):
    """Brings a converter for its own arrays."""

    @hookimpl
    def xrt_converters(self) -> list[tuple[str, str, Any]]:
        return [("fake", "host", lambda x: x.data)]


def test_an_engine_brings_its_converters() -> None:
    """By a hook; they go when the engine goes."""
    with fake_engine(ConvertingEngine) as engine:
        holding(engine)
        np.testing.assert_array_equal(XRTModule(chain("Neg"), engine="fake")(X), -X)
        found = converters.find("fake", "host")
        assert found is not None
        assert "fake_engines" in found.owner or "test_converters" in found.owner
    assert converters.find("fake", "host") is None


@pytest.mark.parametrize("rows", ["3", "[('fake', 'host')]", "[('fake', 'fake', None)]", "[('fake', 'host', 3)]"])
def test_a_hook_that_gives_no_converters(rows: str) -> None:
    """The engine's package is named, and nothing is left behind."""

    class Wrong(FakeEngine):
        @hookimpl
        def xrt_converters(self) -> Any:
            return eval(rows)

    xrt_engines = EngineManager(Discovery(xrt.__version__, []))
    xrt_engines.register(Wrong)
    with pytest.raises(PluginError, match="xrt_converters|implements a hook wrongly"):
        xrt_engines.get("fake")
    assert converters.find("fake", "host") is None


PLUGIN = """
from xrt_core.engine import hookimpl

class Rows:
    @hookimpl
    def xrt_converters(self):
        return [("left", "right", None)]

rows = Rows()
"""


def test_packages_bring_converters(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry-point group; a broken package is told of and is in nobody's way."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = add_package(tmp_path, "xrt-rows", PLUGIN, engine="rows", group="xrt.converters", target="X")
    (tmp_path / "xrt_rows-1.0.dist-info" / "entry_points.txt").write_text(f"[xrt.converters]\nrows = {module}:rows\n")
    add_package(tmp_path, "xrt-torn", "import nothing_of_the_sort", engine="torn", group="xrt.converters")
    manager = EngineManager(Discovery(xrt.__version__, [str(tmp_path)]))
    try:
        failed = manager.load_converters()
        assert list(failed) == ["torn"]
        assert "nothing_of_the_sort" in str(failed["torn"])
        found = converters.find("left", "right")
        assert found is not None
        assert found.function is None
        assert found.owner == "xrt-rows 1.0"
    finally:
        manager.refresh()
    assert converters.find("left", "right") is None


# --- array types of users ---


class RaggedTensor:
    """Rows of different lengths: all values in one row, and where each row begins."""

    def __init__(self, values: np.ndarray, splits: Sequence[int]) -> None:
        self.values, self.splits = values, tuple(splits)

    @classmethod
    def of(cls, *rows: Sequence[float]) -> RaggedTensor:
        values = np.array([x for row in rows for x in row], np.float32)
        return cls(values, np.cumsum([0, *map(len, rows)]).tolist())

    def rows(self) -> list[list[float]]:
        return [self.values[a:b].tolist() for a, b in zip(self.splits, self.splits[1:], strict=False)]


class ShapedRaggedTensor(RaggedTensor):
    """One that looks like an array: its shape does not tell how many values it holds."""

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        return (len(self.splits) - 1, None)


def ragged(result: np.ndarray, like: RaggedTensor) -> Any:
    """A result that has a value for each of the argument's, as rows again; any other as it is."""
    return type(like)(result, like.splits) if result.shape[:1] == like.values.shape else result


@pytest.fixture
def ragged_type() -> Iterator[None]:
    xrt.register_array_type(RaggedTensor, to_host=lambda r: r.values, from_host=ragged)
    yield
    converters.unregister_type(RaggedTensor)


@pytest.fixture(params=["host", "fake", "onnxruntime"])
def engine_name(request: pytest.FixtureRequest) -> Iterator[str]:
    from xrt_core.engine import engines

    if request.param not in ("host", "fake") and request.param not in engines.names():
        pytest.skip(f"{request.param} is not installed")
    with fake_engine():
        yield request.param


def flat_graph() -> Graph:
    """x[n] -> (-|x|)[n], sum of x."""
    x, a, y, s = Value("x", TensorType(F32, ("n",))), Value("a"), Value("y"), Value("s")
    nodes = [node("Abs", [x], [a]), node("Neg", [a], [y]), node("ReduceSum", [x], [s], keepdims=0)]
    return graph_of([x], [y, s], nodes)


@pytest.mark.parametrize("kind", [RaggedTensor, ShapedRaggedTensor])
def test_ragged_tensors_through_an_engine(kind: type[RaggedTensor], engine_name: str, ragged_type: None) -> None:
    """By position, by name, again and with other lengths; what fits comes back ragged, of the argument's class."""
    m = XRTModule(flat_graph(), engine=engine_name)
    for rows in ([[1.0, -2.0], [], [3.0]], [[1.0, -2.0], [], [3.0]], [[4.0], [5.0, -6.0], [7.0, 8.0]]):
        given = kind.of(*rows)
        for y, s in (m(given), m(x=given), m.run({"x": given}).values()):
            assert type(y) is kind
            assert y.rows() == [[-abs(v) for v in row] for row in rows]
            assert type(s) is np.ndarray
            assert s == sum(v for row in rows for v in row)
    assert "x: float32[" in m.explain({"x": given}).as_text()
    m.prepare({"x": kind.of([1.0])})


def test_ragged_tensors_through_a_traced_graph(engine_name: str, ragged_type: None) -> None:
    """The same for xrt.Graph."""

    class Double(xrt.Graph):
        def build(self, x: Any) -> Any:
            return {"twice": x * np.float32(2)}

    m = XRTModule(Double(), engine=engine_name)
    for rows in ([[1.0], [2.0, 3.0]], [[1.0, 2.0]]):
        for result in (m(RaggedTensor.of(*rows)), m(x=RaggedTensor.of(*rows))):
            assert result["twice"].rows() == [[2 * v for v in row] for row in rows]


def test_results_follow_the_first_argument(ragged_type: None) -> None:
    """An array first: results are arrays, whatever else was given."""
    x, z, y = f32("x", 3), f32("z", 3), f32("y", 3)
    m = XRTModule(graph_of([x, z], [y], [node("Add", [x, z], [y])]), engine="host")
    a, r = np.ones(3, np.float32), RaggedTensor.of([1, 2], [3])
    assert type(m(a, r)) is np.ndarray
    assert m(r, a).rows() == [[2, 3], [4]]


def test_one_way_is_enough() -> None:
    """Without from_host results are NumPy's."""
    xrt.register_array_type(RaggedTensor, to_host=lambda r: r.values)
    try:
        y, _ = XRTModule(flat_graph(), engine="host")(RaggedTensor.of([1, -2]))
        np.testing.assert_array_equal(y, [-1, -2])
    finally:
        converters.unregister_type(RaggedTensor)


def test_an_unknown_type_says_how_to_make_it_known() -> None:
    """The message has the remedy."""
    with pytest.raises(InputError, match=r"input 'x': .*RaggedTensor is not an array.*xrt.register_array_type"):
        XRTModule(flat_graph(), engine="host")(RaggedTensor.of([1]))
    with pytest.raises(InputError, match=r"argument 'x' is .*RaggedTensor.*xrt.register_array_type"):
        XRTModule(lambda x: xrt.ops.Neg(x), engine="host")(RaggedTensor.of([1]))


def test_array_types_that_cannot_be(ragged_type: None) -> None:
    """A class or a name that is taken, no class, no function."""
    with pytest.raises(RegistrationError, match=r"'RaggedTensor' .* is registered twice: by .*test_converters and by"):
        xrt.register_array_type(RaggedTensor, to_host=lambda r: r.values)
    with pytest.raises(RegistrationError, match="registered twice"):
        xrt.register_array_type(int, to_host=np.asarray, name="RaggedTensor")
    for arguments in ({"to_host": 3}, {"to_host": abs, "from_host": 3}):
        with pytest.raises(RegistrationError, match="as functions are needed"):
            xrt.register_array_type(Held, **arguments)
    with pytest.raises(RegistrationError, match="a class"):
        xrt.register_array_type("Held", to_host=abs)  # type: ignore[arg-type]
    for known in (np.ndarray, list, object, type(None)):
        with pytest.raises(RegistrationError, match=f"XRT takes a .*{known.__name__} as it is"):
            xrt.register_array_type(known, to_host=np.asarray)
        assert converters.array_type(known) is None
    assert converters.array_type(Held) is None


@pytest.mark.parametrize(
    ("to_host", "message"),
    [
        (lambda r: r.nothing, "to_host of the array type 'Held' .* failed: AttributeError"),
        (lambda r: [1.0], "gave a list, which is no array"),
        (lambda r: r.data.astype(np.float64), "dtype float64 given, float32 expected"),
        (lambda r: r.data.reshape(1, 2), r"shape \[1, 2\] given"),
    ],
)
def test_a_type_that_converts_wrongly(to_host: Any, message: str) -> None:
    """An InputError; the module goes on working."""
    xrt.register_array_type(Held, to_host=to_host)
    try:
        m = XRTModule(flat_graph(), engine="host")
        with pytest.raises(InputError, match=message):
            m(Held(X))
        np.testing.assert_array_equal(m(X)[0], -np.abs(X))
    finally:
        converters.unregister_type(Held)


def test_a_type_that_cannot_take_results() -> None:
    """from_host that raises is named."""

    def refuse(result: np.ndarray, like: Held) -> Held:
        raise ValueError("no room")

    xrt.register_array_type(Held, to_host=lambda h: h.data, from_host=refuse)
    try:
        with pytest.raises(ConverterError, match="from_host of the array type 'Held' .* failed: ValueError: no room"):
            XRTModule(flat_graph(), engine="host")(Held(X))
    finally:
        converters.unregister_type(Held)
