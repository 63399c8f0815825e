"""Passes that change what a model computes: who notices, and who answers then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_engines import FakeEngine, fake_engine
from tests.guard.guarded import eventually
from tests.random_graphs import F32, graph_of, node
from xrt_core.compiler import passes
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.pass_manager import RegisteredPass

pytestmark = pytest.mark.tiny_clusters

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
GUARDED = {"guard": None, "guard_sandbox": False, "guard_async": True, "guard_verify": True, "cache": "off"}
Origin = Literal["core", "user", "plugin"]


class AnySize(FakeEngine):
    """Compiles for sizes that vary."""

    name = "any_size"
    dynamic_dims = "any"


def chain(*ops: str, shape: Any = (2, 3)) -> Graph:
    """x through unary operators."""
    values = [Value("x", TensorType(F32, shape)), *[Value(f"v{i}") for i in range(len(ops))]]
    nodes = [node(op, [a], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    return graph_of(values[:1], values[-1:], nodes, "chain")


@pytest.fixture
def put() -> Iterator[Callable[..., None]]:
    """Registers passes that put one operator in the place of another, which are gone after the test."""
    before = dict(passes.passes._passes)

    def register(old: str, new: str, origin: Origin = "plugin", applies: Callable[[Graph], bool] = bool) -> None:
        def rewrite(graph: Graph, _: Any) -> Graph:
            if not applies(graph) or all(n.op_type != old for n in graph.nodes):
                return graph
            made = [node(new, n.inputs, n.outputs) if n.op_type == old else n for n in graph.nodes]
            return graph.replace(nodes=made)

        name = f"{old}_to_{new}"
        owner = "some-package 1.0"
        passes.passes.register(
            RegisteredPass(name, rewrite, ("signature",), after=("identity",), owner=owner, origin=origin)
        )

    yield register
    passes.passes._passes = before


def compared(m: XRTModule, times: int = 1) -> list[str]:
    """Wait until so many calls were compared; what came of each, the last one first."""
    names = ("passes.compared", "passes.not_compared")
    assert eventually(lambda: sum(len(m.events.recent(n)) for n in names) >= times)
    return [e.fields.get("result", e.fields.get("reason")) for n in names for e in m.events.recent(n)]


def left_out(m: XRTModule) -> list[str]:
    """The passes that were found to change results."""
    return [e.fields["stage"] for e in m.events.recent("fallback")]


@contextmanager
def on_fake(graph: Graph, **options: Any) -> Iterator[tuple[XRTModule, FakeEngine]]:
    with fake_engine() as engine, XRTModule(graph, engine="fake", **{**GUARDED, **options}) as m:
        yield m, engine


def test_passes_that_keep_results_are_left_as_they_are(put: Any) -> None:
    put("Neg", "Neg")
    with on_fake(chain("Neg", "Identity", "Abs")) as (m, engine):
        m(X)
        assert compared(m) == ["equal"]
        np.testing.assert_array_equal(m(X), np.abs(X))
        assert engine.runs


@pytest.mark.parametrize("shape", [(2, 3), ("n", 3)])
def test_a_plugin_pass_that_changes_results_is_left_out(put: Any, shape: Any) -> None:
    """The engine computes the model without it, a bound call too; there is an event that names the pass."""
    put("Neg", "Abs")
    with on_fake(chain("Neg", "Exp", shape=shape)) as (m, engine):
        bound = m.bind({"x": X})
        np.testing.assert_array_equal(m(X), np.exp(np.abs(X)))  # nobody knows yet
        compared(m)
        assert eventually(lambda: np.array_equal(m(X), np.exp(-X)))
        np.testing.assert_array_equal(bound()["v1"], np.exp(-X))
        (event,) = m.events.recent("fallback")
        assert event.fields["stage"] == "pass Neg_to_Abs"
        assert event.fields["engine"] == "some-package 1.0"
        assert event.fields["kind"] == "wrong numbers"
        assert m.wait(60)
        runs = engine.runs
        np.testing.assert_array_equal(m(X), np.exp(-X))
        assert engine.runs > runs
        assert "equal" in compared(m, 2)


def test_one_wrong_pass_after_the_other_is_left_out(put: Any) -> None:
    put("Neg", "Abs")
    put("Exp", "Sin")
    with on_fake(chain("Neg", "Exp")) as (m, _):
        assert eventually(lambda: np.array_equal(m(X), np.exp(-X)))
        assert sorted(left_out(m)) == ["pass Exp_to_Sin", "pass Neg_to_Abs"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_where_a_pass_of_the_core_is_wrong_the_host_runs_the_model_as_it_is(put: Any, is_prepared: bool) -> None:
    """Also where the model was prepared, so that no call was answered by the host before, and nothing may compile."""
    put("Neg", "Abs", "core")
    with on_fake(chain("Neg", "Exp"), forbid_compilation=is_prepared) as (m, _):
        if is_prepared:
            m.prepare({"x": X})
        m(X)
        compared(m)
        assert eventually(lambda: np.array_equal(m(X), np.exp(-X)))
        assert m.engines == ()
        assert m.wait(1)


def test_a_users_pass_may_change_results(put: Any) -> None:
    """They are told of it."""
    put("Neg", "Abs", "user")
    with on_fake(chain("Neg")) as (m, _):
        m(X)
        assert eventually(lambda: m.events.recent("passes.differ"))
        assert m.events.recent("passes.differ")[0].fields["name_of_pass"] == "Neg_to_Abs"
        assert m.wait(60)
        np.testing.assert_array_equal(m(X), np.abs(X))


def test_a_pass_that_is_wrong_where_sizes_vary_is_found(put: Any) -> None:
    """The plan for all sizes is compared as well."""

    def varies(graph: Graph) -> bool:
        return any(isinstance(v.type, TensorType) and not v.type.is_static for v in graph.inputs)

    put("Neg", "Abs", applies=varies)
    graph = chain("Neg", "Exp", shape=(None, 3))
    with fake_engine(AnySize), XRTModule(graph, engine="any_size", **GUARDED) as m:
        for n in range(1, 5):
            x = np.full((n, 3), 1, np.float32)
            m(x)
        assert eventually(lambda: left_out(m) == ["pass Neg_to_Abs"])
        assert eventually(lambda: np.array_equal(m(x), np.exp(-x)))


@pytest.mark.parametrize("options", [{"use_bf16": True}, {"guard_verify": False}, {"guard_async": False}])
def test_nothing_is_compared_where_results_are_not_the_models(put: Any, options: Any) -> None:
    put("Neg", "Abs")
    with on_fake(chain("Neg"), **options) as (m, _):
        m(X)
        assert m.wait(60)
        assert getattr(m._pipeline, "on_first_call", None) is None


def test_what_is_not_compared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for which the host took long."""
    from xrt_core.compiler import pass_check

    monkeypatch.setattr(pass_check, "_LONGEST", 0.0)
    with on_fake(chain("Neg")) as (m, _):
        m(X)
        (reason,) = compared(m)
        assert "the host takes 0 s" in reason


class Mixed(xrt.Graph):
    """A traced graph with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = xrt.Variable(np.full(1, 2, np.float32))

    def build(self, x: Any) -> Any:
        return xrt.ops.Exp(xrt.ops.Neg(x) * self.scale)


@pytest.mark.parametrize("model", [Mixed(), lambda x: xrt.ops.Exp(xrt.ops.Neg(x) * np.float32(2))])
@pytest.mark.parametrize("origin", ["plugin", "core"])
def test_what_is_traced_is_compared(put: Any, model: Any, origin: Origin) -> None:
    """Each signature, by what was traced for it."""
    put("Neg", "Abs", origin, applies=lambda g: len(g.inputs[0].shape or ()) == 1)
    expected = np.exp(-2 * X)
    with on_fake(model) as (m, _):
        m(X)
        assert compared(m) == ["equal"]
        row, bound = X[1], m.bind({"x": X[1]})
        m(row)
        assert eventually(lambda: np.array_equal(m(row), expected[1]))
        assert left_out(m) == ["pass Neg_to_Abs"]
        np.testing.assert_array_equal(m(X), expected)
        assert [np.array_equal(r, expected[1]) for r in bound().values()] == [True]


def test_what_is_traced_with_symbols_is_compared(put: Any) -> None:
    put("Neg", "Abs", applies=lambda g: not all(n.outputs[0].type.is_static for n in g.nodes))
    with fake_engine(AnySize), XRTModule(lambda x: xrt.ops.Exp(xrt.ops.Neg(x)), engine="any_size", **GUARDED) as m:
        for n in range(1, 6):
            x = np.full((n, 3), 1, np.float32)
            m(x)
        assert eventually(lambda: left_out(m) == ["pass Neg_to_Abs"])
        assert eventually(lambda: np.array_equal(m(x), np.exp(-x)))


def test_a_function_of_many_signatures_is_compared_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from xrt_core.compiler import pass_check

    monkeypatch.setattr(pass_check, "_MOST", 2)
    with on_fake(lambda x: xrt.ops.Exp(x)) as (m, _):
        for n in range(1, 5):
            m(np.ones((2,) * n, np.float32))
        assert compared(m, 2) == ["equal", "equal"]
        assert m.wait(60)
        assert not eventually(lambda: len(compared(m)) > 2, 1.0)


def test_a_graph_that_was_made_of_the_models_is_not_taken_for_it() -> None:
    """Decoders run such graphs, with the same inputs and other results."""
    with on_fake(chain("Neg", "Exp")) as (m, _):
        derived = m.derived(chain("Neg", "Neg"))
        assert derived is not None
        derived((X,), {})
        assert m.wait(60)
        m(X)
        assert compared(m) == ["equal"]
        assert not left_out(m)


def test_a_call_with_an_optional_input_is_compared(put: Any) -> None:
    put("Neg", "Abs", applies=lambda g: len(g.inputs) == 2)
    x, y = Value("x", TensorType(F32, (2, 3))), Value("y", TensorType(F32, (2, 3)))
    a, b = Value("a"), Value("b")
    graph = graph_of([x, y], [b], [node("Neg", [x], [a]), node("Add", [a, y], [b])], "optional")
    graph = graph.replace(defaults={y: np.zeros((2, 3), np.float32)})
    with on_fake(graph) as (m, _):
        m(X)
        assert compared(m) == ["equal"]
        other = np.ones_like(X)
        m(X, other)
        assert eventually(lambda: np.array_equal(m(X, other), other - X))
        assert left_out(m) == ["pass Neg_to_Abs"]


def test_random_numbers_are_compared_by_their_bounds() -> None:
    """Two runs draw different ones."""
    x, r, y = Value("x", TensorType(F32, (2, 3))), Value("r"), Value("y")
    graph = graph_of([x], [y], [node("RandomUniformLike", [x], [r]), node("Add", [x, r], [y])], "random")
    with on_fake(graph) as (m, _):
        m(X)
        compared(m)
        assert not left_out(m)
