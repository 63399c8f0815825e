"""Memory of plans: what is computed is what a run takes, the order lowers it, and buffers are used again safely."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engines import fake_engine
from tests.profiles import examples
from tests.random_graphs import F32, RandomGraph, graph_of, graphs, ints, node
from xrt_core.host import executor
from xrt_core.host.executor import host_kernel, reusable_inputs, reusing_kernel
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.kernels import portable_kernels
from xrt_core.kernels.namespace import wide
from xrt_core.module import XRTModule
from xrt_core.runtime.memory_planner import Buffers, is_view, megabytes
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan

N = 1 << 18  # elements: 1 MiB of float32
MB = 4 * N


def f32(name: str, *shape: int) -> Value:
    return Value(name, TensorType(F32, shape or (N,)))


def lowered(n: Node, reuse: bool = True) -> Lowered:
    """As the pipeline lowers nodes of the host; the label is the name of the output."""
    return Lowered(
        host_kernel(n), HOST, n.name, shares=is_view(n), reusable=reusable_inputs(n) if reuse else (),
        reusing=lambda dying: reusing_kernel(n, dying),
    )  # fmt: skip


def planned(graph: Graph, reuse: bool = True) -> Plan:
    return make_plan(graph, lambda n: lowered(n, reuse))


def measured(plan: Plan, arrays: Sequence[Any]) -> int:
    """Bytes that a run allocates at most, seen by tracemalloc, which NumPy tells of its arrays."""
    plan.run(arrays)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        plan.run(arrays)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def chain(ops: Sequence[str], *, more: Sequence[Value] = ()) -> Graph:
    """x through one operator after another."""
    x = f32("x")
    values = [x, *(f32(f"v{i}") for i in range(len(ops)))]
    nodes = [node(op, [a, *more], [b]) for op, a, b in zip(ops, values, values[1:], strict=False)]
    return graph_of([x], [values[-1]], nodes)


def branches(width: int, size: int = N) -> Graph:
    """Sum of exp(x * i) over `width` branches, with all products before all exponentials."""
    x = f32("x", size)
    first = [f32(f"a{i}", 4 * size) for i in range(width)]
    second = [f32(f"b{i}", 1) for i in range(width)]
    y = f32("y", 1)
    nodes = [node("Concat", [x, x, x, x], [a], axis=0) for a in first]
    nodes += [node("ReduceMax", [a, ints(0)], [b]) for a, b in zip(first, second, strict=True)]
    return graph_of([x], [y], [*nodes, node("Sum", second, [y])])


# --- what is computed ---


def test_the_bytes_of_every_step() -> None:
    """Intermediates live from the step that makes them to the last that reads them; inputs and constants all the time.

    x -> a -> b, a + b -> c, c -> y: no reuse of buffers here, so that each value has one of its own.
    """
    x, a, b, c, y = (f32(n) for n in "xabcy")
    w = Value.constant(np.ones(N, np.float32))
    nodes = [node("Mul", [x, w], [a]), node("Exp", [a], [b]), node("Add", [a, b], [c]), node("Neg", [c], [y])]
    memory = planned(graph_of([x], [y], nodes), reuse=False).memory
    assert (memory.inputs, memory.constants) == (MB, MB)
    assert memory.steps == (MB, 2 * MB, 3 * MB, 2 * MB, MB)
    assert (memory.own, memory.step, memory.peak) == (3 * MB, "c", 5 * MB)
    assert str(memory) == "peak 5.2 MB, at step c (inputs 1.0 MB, constants 1.0 MB)"


def test_views_count_once() -> None:
    """A transposed and sliced value is the memory of the value; the value lives as long as its views; a reshape of what
    does not lie in a row is a copy."""
    x, a = f32("x", 512, 512), f32("a", 512, 512)
    t, s, r, y = f32("t", 512, 512), f32("s", 256, 512), f32("r", 131072), f32("y", 131072)
    nodes = [
        node("Exp", [x], [a]), node("Transpose", [a], [t]), node("Slice", [t, ints(0), ints(256), ints(0)], [s]),
        node("Reshape", [s, ints(-1)], [r]), node("Neg", [r], [y]),
    ]  # fmt: skip
    memory = planned(graph_of([x], [y], nodes), reuse=False).memory
    half = MB // 2
    assert memory.steps == (MB, MB, MB, MB + half, 2 * half, half)


def test_results_that_are_copied_count() -> None:
    """A view of an input, and the second of two results of one memory."""
    x, a, b = f32("x", 512, 512), f32("a", 512, 512), f32("b", 512, 512)
    memory = planned(graph_of([x], [a, b, a], [node("Transpose", [x], [a]), node("Exp", [x], [b])])).memory
    assert memory.own == 3 * MB
    assert memory.step == "return"


def test_values_of_unknown_size() -> None:
    """They are counted in number, not in bytes."""
    x, s, d, y = f32("x"), Value("s", SequenceType(None)), Value("d", TensorType(F32, (None,))), Value("y")
    g = graph_of([x, s], [y], [node("Relu", [x], [d]), node("Relu", [d], [y])])
    memory = planned(g).memory
    assert (memory.unknown, memory.own, memory.step) == (3, 0, "")
    assert "3 values of unknown size" in str(memory)


def test_people_read_bytes() -> None:
    """In powers of ten."""
    assert [megabytes(n) for n in (0, 999, 100_000, 12_345_678)] == ["0.0 kB", "1.0 kB", "0.1 MB", "12.3 MB"]


def test_explain_tells() -> None:
    """Of a planned signature, in words and in JSON; parts have their own."""
    m = XRTModule(chain(["Exp", "Neg"]), engine="host")
    assert "memory: peak" not in m.explain().as_text()
    m(np.zeros(N, np.float32))
    told = m.explain()
    assert "memory: peak 2.1 MB, at step Exp v0 (inputs 1.0 MB, constants 0.0 kB)" in told.as_text()
    assert told.to_json()["peak_bytes"] == 2 * MB


def test_launches_count_by_their_results() -> None:
    """Values on engines are alive as well; what leaves the engine shares its memory."""
    with fake_engine() as engine:
        engine.takes = lambda n: n.op_type == "Exp"
        m = XRTModule(chain(["Exp", "Neg"]), engine="fake")
        m(np.zeros(N, np.float32))
        assert m.explain().peak_bytes == 3 * MB


def real_graphs() -> Iterator[tuple[str, Graph]]:
    a, b = f32("a", 512, 512), f32("b", 512, 512)
    yield "chain", chain(["Exp", "Neg", "Tanh", "Abs", "Sqrt"])
    yield "transcendental", chain(["Exp"] * 3)
    yield "branches", branches(6)
    values = [f32("x", 512, 512), a, b, f32("c", 512, 512), f32("d", 512, 512), f32("y", 512, 512)]
    x, a, b, c, d, y = values
    w = Value.constant(np.eye(512, dtype=np.float32))
    nodes = [
        node("MatMul", [x, w], [a]), node("Transpose", [a], [b]), node("MatMul", [b, w], [c]),
        node("Add", [a, c], [d]), node("Mul", [d, x], [y]),
    ]  # fmt: skip
    yield "products", graph_of([x], [y], nodes)
    yield "two results", graph_of([x], [b, y], nodes)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("graph", [g for _, g in real_graphs()], ids=[n for n, _ in real_graphs()])
def test_what_is_computed_is_what_a_run_takes(graph: Graph, reuse: bool) -> None:
    """Within 5 % and 64 kB, for kernels that need no memory of their own while they work."""
    plan = planned(graph, reuse)
    x = np.random.default_rng(0).random(graph.inputs[0].shape, np.float32)
    assert measured(plan, [x]) == pytest.approx(plan.memory.own, rel=0.05, abs=1 << 16)


# --- the order of steps ---


def test_the_order_lowers_the_peak() -> None:
    """Every branch is reduced before the next one grows: one large array at a time, not six."""
    graph = branches(6)
    plan = planned(graph)
    assert plan.memory.own < 4 * MB + 100
    x = np.random.default_rng(0).random(N, np.float32)
    assert measured(plan, [x]) < 5 * MB
    assert plan.run([x])[0] == pytest.approx(6 * x.max())


def test_an_order_that_does_not_help_is_not_taken() -> None:
    """The graph's own order stays."""
    graph = chain(["Exp", "Neg", "Abs"])
    assert [s.label for s in planned(graph).steps] == ["v0", "v1", "v2"]


@st.composite
def dags(draw: st.DrawFn) -> Graph:
    """Random graphs whose values have random sizes, none a view."""
    pool = [f32("x", 10)]
    nodes = []
    for i in range(draw(st.integers(1, 9))):
        read = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True))
        outs = [f32(f"v{i}_{k}", draw(st.integers(1, 9))) for k in range(draw(st.integers(1, 2)))]
        nodes.append(Node("F", read, outs, domain="test", version=1, name=f"n{i}"))
        pool += outs
    outputs = draw(st.lists(st.sampled_from(pool[1:]), min_size=1, max_size=3, unique=True))
    return graph_of([pool[0]], outputs, nodes)


def simulated(graph: Graph, order: Sequence[int]) -> list[int]:
    """The plainest count: after each node, the sizes of made values that something later reads, and of what it made."""
    found = []
    for k, i in enumerate(order):
        later = {v for j in order[k:] for v in graph.nodes[j].inputs} | set(graph.outputs) | set(graph.nodes[i].outputs)
        made = [v for j in order[: k + 1] for v in graph.nodes[j].outputs]
        found.append(sum(4 * v.shape[0] for v in made if v in later))  # type: ignore[index, misc, union-attr]
    return found


@pytest.mark.slow
@examples(200)
@given(dags())
def test_orders_of_random_graphs(graph: Graph) -> None:
    """Bytes are those of a plain simulation; the order is topological, deterministic, and its peak is not above that
    of the graph's own, nor below the best of all orders."""
    count = len(graph.nodes)
    buffers = Buffers(graph, [False] * count, [()] * count, [False] * len(graph.outputs))
    own = list(range(count))
    assert buffers.live(own)[:-1] == simulated(graph, own)
    assert buffers.better_order() == own  # so few bytes are not worth a search
    order = buffers.better_order(worth=0)
    assert order == buffers.better_order(worth=0)
    assert sorted(order) == own
    place = {i: k for k, i in enumerate(order)}
    assert all(place[p] < place[i] for i in own for p in graph.predecessors[i])
    assert buffers.live(order)[:-1] == simulated(graph, order)
    assert max(buffers.live(order)) <= max(buffers.live(own))
    if count <= 6:
        valid = (
            o for o in itertools.permutations(own)
            if all(o.index(p) < o.index(i) for i in own for p in graph.predecessors[i])
        )  # fmt: skip
        assert max(buffers.live(order)) >= min(max(buffers.live(o)) for o in valid)


# --- buffers used again ---


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are used again however small they are."""
    monkeypatch.setattr(executor, "MINIMUM_REUSED", 0)


@pytest.mark.slow
def test_a_chain_needs_one_buffer() -> None:
    """Computed and measured: half of what it takes without reuse."""
    graph = chain(["Exp", "Neg", "Abs", "Sqrt", "Tanh"])
    x = np.random.default_rng(0).random(N, np.float32)
    with_reuse, without = planned(graph), planned(graph, reuse=False)
    assert (with_reuse.memory.own, without.memory.own) == (MB, 2 * MB)
    assert measured(with_reuse, [x]) < 1.1 * MB
    assert measured(without, [x]) > 1.9 * MB
    np.testing.assert_array_equal(with_reuse.run([x])[0], without.run([x])[0])


def test_what_others_see_is_never_written_over() -> None:
    """Inputs, constants, results, and values with views that live."""
    x, a, t, b, y = f32("x", 512, 512), f32("a", 512, 512), f32("t", 512, 512), f32("b", 512, 512), f32("y", 512, 512)
    c = Value.constant(np.ones((512, 512), np.float32))
    nodes = [
        node("Add", [x, c], [a]), node("Transpose", [a], [t]), node("Exp", [a], [b]), node("Mul", [t, b], [y]),
    ]  # fmt: skip
    given = np.random.default_rng(0).random((512, 512), np.float32)
    before = given.copy()
    results = planned(graph_of([x], [y, b], nodes)).run([given])
    np.testing.assert_array_equal(results[1], np.exp(given + 1))
    np.testing.assert_array_equal(results[0], (given + 1).T * np.exp(given + 1))
    np.testing.assert_array_equal(given, before)
    assert (c.data == 1).all()


def reusing_nodes() -> Iterator[Node]:
    """A node for every operator and dtype that can write over an input."""
    for portable in portable_kernels().values():
        if not portable.ufunc:
            continue
        for dtype in (np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float16):
            t = TensorType(np.dtype(dtype), (3, 1031))
            inputs = [Value(f"x{i}", t) for i in range(getattr(np, portable.ufunc).nin)]
            n = node(portable.op_type, inputs, [Value("y", t)])
            yield Node(n.op_type, inputs, n.outputs, version=n.version, name=f"{n.op_type}-{np.dtype(dtype).name}")


def random_array(dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.kind == "f":
        x = (rng.standard_normal((3, 1031)) * rng.choice([1e-3, 1, 1e3], (3, 1031))).astype(dtype)
        x[0, :7] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1]
        return x
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (3, 1031), dtype, endpoint=True)


@pytest.mark.parametrize("n", list(reusing_nodes()), ids=lambda n: n.name)
def test_every_operator_gives_the_same_bits(n: Node, every_size: None) -> None:
    """Written over each of its inputs, with the other one an array, a broadcast or a view of itself."""
    dtype = n.outputs[0].dtype  # type: ignore[union-attr]
    assert dtype is not None
    candidates = reusable_inputs(n)
    integers_too = ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Abs", "Neg", "Sign")
    if wide(dtype) != dtype:
        assert candidates == ()
        return
    if dtype.kind == "f" or n.op_type in integers_too:
        assert len(candidates) == len(n.inputs)
    call = reusing_kernel(n, candidates)
    for k in candidates:
        for other in (random_array(dtype, 7), random_array(dtype, 7)[1:2], random_array(dtype, 7)[:, ::-1]):
            arrays = [random_array(dtype, 3) if i == k else other for i in range(len(n.inputs))]
            with np.errstate(all="ignore"):
                wanted = host_kernel(n)([a.copy() for a in arrays])[0]
                registers = list(arrays)
                where = arrays[k].ctypes.data
                arrays.clear()
                got = call([registers[i] for i in range(len(registers))])[0]
            assert got.ctypes.data == where
            assert got.tobytes() == wanted.tobytes()
            assert got.flags.c_contiguous == wanted.flags.c_contiguous


def test_an_array_with_another_reference_is_left_alone(every_size: None) -> None:
    """Held elsewhere, looked at by a view, read-only, not in C order, not its own memory."""
    x, y = f32("x", 4, 6), f32("y", 4, 6)
    call = reusing_kernel(node("Neg", [x], [y]), (0,))

    def kept(array: np.ndarray) -> bool:
        """Whether the result is elsewhere; nothing but the registers holds the array when it is called."""
        registers = [array]
        where, before = array.ctypes.data, array.copy()
        del array
        (got,) = call([registers[i] for i in (0,)])
        np.testing.assert_array_equal(got, -before)
        return bool(got.ctypes.data != where)

    def fresh() -> np.ndarray:
        return np.arange(24, dtype=np.float32).reshape(4, 6).copy()

    read_only = fresh()
    read_only.flags.writeable = False
    held = fresh()
    view = held[1:]
    assert kept(held)
    assert view[0, 0] == 6
    assert kept(read_only)
    assert kept(np.asfortranarray(np.array(fresh())))
    assert kept(np.frombuffer(bytearray(96), np.float32).reshape(4, 6))
    registers = [fresh()]
    where = registers[0].ctypes.data
    (got,) = call([registers[i] for i in (0,)])
    assert got.ctypes.data == where  # and this one is not


@pytest.mark.slow
@examples(150)
@given(graphs(maximum=14))
def test_random_graphs_are_the_same_bit_for_bit(g: RandomGraph) -> None:
    """With views, broadcasts, aliases, control flow: reuse changes no result, no input, and no second run."""
    original = executor.MINIMUM_REUSED
    executor.MINIMUM_REUSED = 0
    try:
        reusing = XRTModule(g.graph, engine="host")
        before = [a.copy() for a in g.arrays]
        first = results_of(reusing, g)
    finally:
        executor.MINIMUM_REUSED = original
    plain = XRTModule(g.graph, engine="host")
    for a, b, c in zip(first, results_of(plain, g), results_of(reusing, g), strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()
    for a, b in zip(g.arrays, before, strict=True):
        assert a.tobytes() == b.tobytes()


def results_of(module: XRTModule, g: RandomGraph) -> tuple[Any, ...]:
    got = module(*g.arrays)
    return got if isinstance(got, tuple) else (got,)


def test_threads_have_buffers_of_their_own() -> None:
    """Many runs of one plan at a time, each with its own arrays."""
    graph = chain(["Exp", "Neg", "Abs", "Sqrt", "Tanh", "Exp"])
    plan, plain = planned(graph), planned(graph, reuse=False)
    arrays = [np.random.default_rng(i).random(N, np.float32) for i in range(8)]
    wanted = [plain.run([a])[0] for a in arrays]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, want in zip(pool.map(lambda a: plan.run([a])[0], arrays), wanted, strict=True):
                np.testing.assert_array_equal(got, want)


def test_no_array_outlives_its_step() -> None:
    """When a step runs, what died before it is gone, also what the step before it made."""
    x, a, b, y = (f32(n) for n in "xaby")
    made: list[Any] = []

    def call(n: Node) -> Any:
        def run(arrays: Sequence[Any]) -> Sequence[Any]:
            if n.name == "b":
                made.append(sys.getrefcount(arrays[0]))
            return (arrays[0] + 1,)

        return run

    g = graph_of([x], [y], [node("Neg", [x], [a]), node("Neg", [a], [b]), node("Neg", [b], [y])])
    make_plan(g, lambda n: Lowered(call(n), HOST, n.name)).run([np.zeros(4, np.float32)])
    assert made == [executor._SOLE]
