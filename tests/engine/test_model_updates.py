"""Kernels that declare an update of variables: annotations of their nodes, and what follows from them end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guard.guarded import registered
from tests.random_graphs import F32, graph_of, node
from xrt_core.engine.op_kernels import OpKernelRegistry, mark_updates, op_kernel, op_kernels
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.passes.rematerialization import Recompute
from xrt_core.passes.simplify import CommonSubexpressions, ConstantFold, IdentityNodes
from xrt_core.testing import HostEngine

T = TensorType(F32, (4,))


@pytest.fixture
def registry() -> OpKernelRegistry:
    """One with kernels of the engine "it": SGD as a Sub of the gradient, and running statistics as an Add."""
    made = OpKernelRegistry()
    op_kernel("Sub", engine="it", mutable_variables=(0,), model_update=True, registry=made)(lambda ctx, w, g: w - g)
    op_kernel("Add", engine="it", mutable_variables=(1,), registry=made)(lambda ctx, x, s: x + s)
    return made


def value(name: str) -> Value:
    return Value(name, T)


W, G, NEW = value("w"), value("g"), value("new")


def sgd(outputs: list[Value] | None = None, *more: Node) -> Graph:
    """new = w - g."""
    return graph_of([W, G], outputs or [NEW], [node("Sub", [W, G], [NEW]), *more])


def marks(graph: Graph, registry: OpKernelRegistry, *names: str, **options: Any) -> list[tuple[Any, ...]]:
    """(update, phase, aliases) of each node of the marked graph."""
    marked = mark_updates(graph, names or ("it",), registry=registry, **options)
    return [(a.model_update, a.phase, a.aliases) for a in (n.annotations for n in marked.nodes)]


def test_a_declared_update_is_annotated(registry: OpKernelRegistry) -> None:
    """It is an update of the phase train, and its state shares storage with the output."""
    assert marks(sgd(), registry) == [(True, "train", ((0, 0),))]


def test_mutable_variables_alone_leave_the_phase(registry: OpKernelRegistry) -> None:
    """A node that writes variables in inference too, such as running statistics."""
    g = graph_of([W, G], [NEW], [node("Add", [W, G], [NEW])])
    assert marks(g, registry) == [(True, None, ((0, 1),))]


def test_engines_that_take_no_part_declare_nothing(registry: OpKernelRegistry) -> None:
    """The graph is the same object where no kernel says anything."""
    g = sgd()
    assert mark_updates(g, ("other",), registry=registry) is g


def test_only_state_of_the_caller_is_handed_over(registry: OpKernelRegistry) -> None:
    """No intermediate value, no input that is returned as it is, none of two updates, and none in a part of a graph."""
    h = value("h")
    inner = graph_of([W, G], [NEW], [node("Relu", [W], [h]), node("Sub", [h, G], [NEW])])
    assert marks(inner, registry)[1] == (True, "train", ())
    assert marks(sgd([NEW, W]), registry) == [(True, "train", ())]
    twice = sgd([NEW, h], node("Sub", [W, G], [h]))
    assert marks(twice, registry) == [(True, "train", ()), (True, "train", ())]
    assert marks(sgd(), registry, aliases=False) == [(True, "train", ())]


def test_a_node_that_is_marked_stays_as_it_is(registry: OpKernelRegistry) -> None:
    """A training step with donate=False has updates without aliases."""
    own = Annotations(model_update=True, phase="train")
    g = graph_of([W, G], [NEW], [node("Sub", [W, G], [NEW]).replace(annotations=own)])
    assert mark_updates(g, ("it",), registry=registry) is g


def test_passes_leave_declared_updates_alone(registry: OpKernelRegistry) -> None:
    """Two equal ones are not merged, one of constants is not folded, one that is an identity stays."""
    again = value("again")
    two = mark_updates(sgd([NEW, again], node("Sub", [W, G], [again])), ("it",), registry=registry)
    assert len(CommonSubexpressions()(sgd([NEW, again], node("Sub", [W, G], [again]))).nodes) == 1
    assert CommonSubexpressions()(two) is two

    c = Value.constant(np.ones(4, F32), "c")
    known = graph_of([], [NEW], [node("Sub", [c, c], [NEW])])
    assert not ConstantFold(run_node)(known).nodes
    marked = mark_updates(known, ("it",), registry=registry)
    assert ConstantFold(run_node)(marked) is marked

    op_kernel("Identity", engine="it", model_update=True, registry=registry)(lambda ctx, x: x)
    same = graph_of([W], [NEW], [node("Identity", [W], [NEW])])
    assert not IdentityNodes()(same).nodes
    marked = mark_updates(same, ("it",), registry=registry)
    assert IdentityNodes()(marked) is marked


def test_rematerialization_does_not_repeat_an_update(registry: OpKernelRegistry) -> None:
    """A region with an update in it is computed again from the update's result, which is kept."""
    loss, after, y = value("loss"), value("after"), value("y")
    nodes = [
        node("Sub", [W, G], [NEW]),
        node("Exp", [NEW], [y]),
        node("ReduceSum", [y], [loss]),
        node("Mul", [y, loss], [after]),
    ]
    g = graph_of([W, G], [loss, after], nodes)
    label = {id(n): "region" for n in g.nodes[:2]}
    plain = Recompute(lambda n: label.get(id(n)))(g)
    assert [n.op_type for n in plain.nodes].count("Sub") == 2
    marked = mark_updates(g, ("it",), registry=registry)
    label = {id(n): "region" for n in marked.nodes[:2]}
    again = Recompute(lambda n: label.get(id(n)))(marked)
    assert [n.op_type for n in again.nodes].count("Sub") == 1
    assert [n.op_type for n in again.nodes].count("Exp") == 2


def test_a_model_update_implies_training(registry: OpKernelRegistry) -> None:
    """An engine's kernel need not say both."""
    assert registry.supports("it", sgd().nodes[0], "cpu", "train").ok
    add = node("Add", [W, G], [NEW])
    assert not registry.supports("it", add, "cpu", "train").ok


# --- from the module to the array ------------------------------------------------------------------------------------


class Updating(HostEngine):
    """The host as an engine; `xrt` asks its kernels what updates variables."""

    name = "updating"

    def prepare(self) -> None:
        if op_kernels.find(self.name, "", "Sub") is None:
            op_kernel("Sub", engine=self.name, mutable_variables=(0,), model_update=True)(lambda ctx, w, g: w - g)


@pytest.fixture
def _updating() -> Iterator[None]:
    with registered(Updating):
        yield
    op_kernels._kernels.pop((Updating.name, "", "Sub"), None)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.full(4, 5, F32), np.ones(4, F32)


@pytest.mark.usefixtures("_updating")
def test_the_state_holds_the_new_value() -> None:
    """In the phase train; in inference the node stays on the host, and the state as it was."""
    w, g = arrays()
    m = XRTModule(sgd(), engine=Updating.name, phase="train")
    new = m(w, g)
    assert new is w or np.shares_memory(new, w)
    np.testing.assert_array_equal(w, np.full(4, 4, F32))
    (cluster,) = m.explain().to_json()["clusters"]
    assert cluster["model_update"]

    w, g = arrays()
    m = XRTModule(sgd(), engine=Updating.name)
    np.testing.assert_array_equal(m(w, g), np.full(4, 4, F32))
    np.testing.assert_array_equal(w, np.full(4, 5, F32))
    assert "it belongs to the phase 'train'" in str(m.explain())


@pytest.mark.usefixtures("_updating")
@pytest.mark.parametrize("late", ["Relu", "NonZero"])
def test_readers_of_the_old_value_come_first(late: str) -> None:
    """A node behind the update in the graph reads the state as it was, on the engine and on the host."""
    out = Value("out", T if late == "Relu" else TensorType(np.dtype(np.int64), (1, None)))
    w, g = arrays()
    w[0] = 0
    expected = run_node(node(late, [W], [out]), [w.copy()])[0]
    graph = sgd([NEW, out], node(late, [W], [out]))
    for merge in (False, True):
        state = w.copy()
        m = XRTModule(graph, engine=Updating.name, phase="train", merge_updates=merge)
        new, seen = m(state, g)
        np.testing.assert_array_equal(new, w - g)
        np.testing.assert_array_equal(seen, expected)


@pytest.mark.usefixtures("_updating")
def test_a_state_that_somebody_reads_afterwards_is_not_overwritten() -> None:
    """Where a reader of the old value waits for the new one, the update has storage of its own."""
    out = value("out")
    w, g = arrays()
    graph = graph_of([W, G], [out], [node("Sub", [W, G], [NEW]), node("Max", [NEW, W], [out])])
    m = XRTModule(graph, engine=Updating.name, phase="train")
    np.testing.assert_array_equal(m(w, g), np.full(4, 5, F32))
    np.testing.assert_array_equal(w, np.full(4, 5, F32))
