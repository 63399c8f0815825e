"""Programs and runs: memory by liveness, views, returns, aliases, threads, bad input, and models through XRT."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xrt_toy
from msgspec import structs
from toy_cases import data, of_nodes, value
from xrt_toy import ToyEngine, _toolkit

import xrt_core as xrt
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import CompileOptions, Function, InputOutputAlias, RunOptions
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError, OptionError
from xrt_core.ir.graph import NO_ANNOTATIONS, Graph, Node, SourceLocation, Value


def _chain(length: int) -> tuple[list[Value], list[Node], list[Value]]:
    """Neg after Neg."""
    values = [value(f"v{i}", np.float32, 64) for i in range(length + 1)]
    nodes = [Node("Neg", [a], [b], version=13) for a, b in pairwise(values)]
    return values[:1], nodes, values[-1:]


def _program(inputs: list[Value], nodes: list[Node], outputs: list[Value]) -> Any:
    from xrt_toy.compiler import make_program

    ToyEngine().prepare()
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    return make_program(function, function.params, function.returns)


def test_temporaries_share_memory_by_liveness() -> None:
    """However long a chain is, two buffers are enough; a value that is needed later keeps its own."""
    assert _program(*_chain(12)).arena == 2 * 256

    inputs, nodes, (last,) = _chain(4)
    early, y = nodes[0].outputs[0], value("y", np.float32, 64)
    program = _program(inputs, [*nodes, Node("Add", [early, last], [y], version=14)], [y])
    assert program.arena == 3 * 256
    kept = program.temporaries[0]
    assert all(t.offset != kept.offset for t in program.temporaries[1:])


def test_buffers_that_live_at_the_same_time_never_overlap() -> None:
    """First fit over buffers of many sizes: no two that are alive together share a byte."""
    from xrt_toy.compiler import make_program
    from xrt_toy.executable import Slot

    sizes = [3, 400, 1, 900, 70, 260, 5, 128]
    x = value("x", np.float32, 1)
    nodes, parts = [], []
    for i, n in enumerate(sizes):
        shape = Value.constant(np.array([n]), f"s{i}")
        wide, out = value(f"w{i}", np.float32, n), value(f"o{i}", np.float32, n)
        nodes += [Node("Expand", [x, shape], [wide], version=13), Node("Exp", [wide], [out], version=13)]
        parts.append(out)
    y = value("y", np.float32, sum(sizes))
    nodes.append(Node("Concat", parts, [y], {"axis": 0}, version=13))
    function = Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="test"))
    program = make_program(function, function.params, function.returns)

    first = len(program.entries) + len(program.constants)
    lives: dict[int, list[int]] = {}
    for i, code in enumerate(program.codes):
        for a in code.arguments:
            if isinstance(a, Slot) and first <= a < first + len(program.temporaries):
                lives.setdefault(a - first, []).append(i)
    spans = [
        (t.offset, t.offset + t.size * t.dtype.itemsize, lives[i][0], lives[i][-1])
        for i, t in enumerate(program.temporaries)
    ]
    for i, (begin, end, born, dies) in enumerate(spans):
        assert end <= program.arena
        for other_begin, other_end, other_born, other_dies in spans[:i]:
            together = born <= other_dies and other_born <= dies
            assert not (together and begin < other_end and other_begin < end)
    assert program.arena < sum(end - begin for begin, end, _, _ in spans)


def test_views_cost_no_launch() -> None:
    """Reshape and its kin name the same memory; only a return that is nothing but an entry is copied."""
    x, shape = value("x", np.float32, 2, 3), Value.constant(np.array([3, 2]), "shape")
    middle, y, z = value("m", np.float32, 3, 2), value("y", np.float32, 3, 2), value("z", np.float32, 6)
    nodes = [
        Node("Reshape", [x, shape], [middle], version=14),
        Node("Neg", [middle], [y], version=13),
        Node("Flatten", [y], [z], {"axis": 0}, version=13),
    ]
    assert [code.node for code in _program([x], nodes[:2], [y]).codes] == ["Neg ''"]
    assert len(_program([x], nodes[:1], [middle]).codes) == 1


def test_returns_never_share_memory(engine: ToyEngine) -> None:
    """An entry, a constant, one value twice and views of one another come back as arrays of their own."""
    x, y = value("x", np.float32, 3), value("y", np.float32, 3)
    constant = Value.constant(np.array([5], np.int64), "c")
    run = of_nodes(engine, [x], [Node("Neg", [x], [y], version=13)], [y, x, y, constant]).run
    given = np.array([1, 2, 3], np.float32)
    first, second = run([given]), run([given + 1])
    for results, start in ((first, given), (second, given + 1)):
        got = [np.asarray(r).tolist() for r in results]
        assert got == [(-start).tolist(), start.tolist(), (-start).tolist(), [5]]


def _aliased(
    engine: ToyEngine, op_type: str, *shape: int, later: str | None = None, attributes: dict[str, Any] | None = None
) -> tuple[Any, list[Any]]:
    """new = op(p, g) in the storage of p, and later(p, new) beside it; it has run once. And p and g on the device."""
    from xrt_toy import _toolkit

    p, g, new, other = (value(n, np.float32, *shape) for n in ("p", "g", "new", "other"))
    op = Node(op_type, [p, g] if op_type not in ("Transpose", "Identity") else [p], [new], attributes, version=13)
    after = [Node(later, [p, new], [other], version=14)] if later else []
    returns = [other, new] if later else [new]
    executable = of_nodes(engine, [p, g], [op, *after], returns, InputOutputAlias(len(returns) - 1, 0))
    executable.run([np.zeros(shape, np.float32)] * 2)
    stream = _toolkit.stream_of(None)
    return executable, [_toolkit.copied(data("float32", *shape, low=low), stream) for low in (-4, 1)]


@pytest.mark.parametrize("op_type", ["Sub", "Identity"])
def test_an_elementwise_update_is_computed_in_its_input(
    engine: ToyEngine, op_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donated array itself holds the new value: no temporary, no result and no copy of its size is made."""
    from xrt_toy import _toolkit

    executable, (p, g) = _aliased(engine, op_type, 3, 5)
    old, step = np.asarray(p).copy(), np.asarray(g)
    made: list[Any] = []
    empty = _toolkit.empty
    monkeypatch.setattr(_toolkit, "empty", lambda shape, *rest: made.append(shape) or empty(shape, *rest))
    (new,) = executable.run([p, g])

    assert new is p
    np.testing.assert_array_equal(np.asarray(p), old - step if op_type == "Sub" else old)
    assert not [shape for shape in made if shape != 0]
    assert "0 temporaries in 0 bytes, 1 returns, return 0 in entry 0" in executable.as_text()


@pytest.mark.parametrize(
    ("op_type", "later", "attributes"),
    [("Sub", "Add", {}), ("MatMul", None, {}), ("Transpose", None, {"perm": (1, 0)}), ("Transpose", "Sub", {})],
)
def test_an_old_value_that_is_still_read_is_not_overwritten(
    engine: ToyEngine, op_type: str, later: str | None, attributes: dict[str, Any]
) -> None:
    """A later reader, or threads that read what others write: the new value waits in a temporary until the end."""
    executable, (p, g) = _aliased(engine, op_type, 4, 4, later=later, attributes=attributes)
    old, step = np.asarray(p).copy(), np.asarray(g)
    expected = {"Sub": old - step, "MatMul": old @ step, "Transpose": old.T}[op_type]
    *others, new = executable.run([p, g])

    assert new is p
    np.testing.assert_allclose(np.asarray(p), expected, rtol=1e-5, atol=1e-6)
    assert "1 temporaries" in executable.as_text()
    for other in others:
        np.testing.assert_allclose(
            np.asarray(other), old + expected if later == "Add" else old - expected, rtol=1e-5, atol=1e-6
        )


def test_two_variables_change_places(engine: ToyEngine) -> None:
    """Each new value is the other's old one: one of the two goes by way of a temporary."""
    from xrt_toy import _toolkit

    p, q = (value(n, np.float32, 4) for n in "pq")
    executable = of_nodes(engine, [p, q], [], [q, p], InputOutputAlias(0, 0), InputOutputAlias(1, 1))
    assert "1 temporaries" in executable.as_text()
    stream = _toolkit.stream_of(None)
    a, b = (_toolkit.copied(np.full(4, i, np.float32), stream) for i in (1, 2))
    for _ in range(3):
        assert [x is y for x, y in zip(executable.run([a, b]), (a, b), strict=True)] == [True, True]
    assert np.asarray(a).tolist() == [2] * 4
    assert np.asarray(b).tolist() == [1] * 4


def test_what_is_not_donated_stays_as_it_is(engine: ToyEngine) -> None:
    """NumPy's arrays, `donate=False`, and one array given for two inputs: the update is computed in a copy."""
    executable, (p, g) = _aliased(engine, "Sub", 4)
    old, step = np.asarray(p).copy(), np.asarray(g).copy()
    host = old.copy()
    for inputs, options in (([host, g], RunOptions()), ([p, g], RunOptions(donate=False))):
        (new,) = executable.run(inputs, options)
        np.testing.assert_array_equal(np.asarray(new), old - step)
    (nothing,) = executable.run([p, p])
    assert np.asarray(nothing).tolist() == [0] * 4
    np.testing.assert_array_equal(host, old)
    np.testing.assert_array_equal(np.asarray(p), old)


def test_a_first_run_that_fails_leaves_its_inputs(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled at their first launch; whoever stands in for the engine finds the old value."""
    from xrt_toy import _toolkit

    p, g, middle, new = (value(n, np.float32, 4) for n in ("p", "g", "middle", "new"))
    nodes = [Node("Sub", [p, g], [middle], version=14), Node("Neg", [middle], [new], version=13)]
    executable = of_nodes(engine, [p, g], nodes, [middle, new], InputOutputAlias(0, 0))
    a, b = (_toolkit.copied(np.full(4, i, np.float32), _toolkit.stream_of(None)) for i in (5, 2))
    launch, calls = _toolkit.launch, iter((True, False))

    def failing(*arguments: Any) -> None:
        if not next(calls, True):
            raise RuntimeError("does not compile")
        launch(*arguments)

    monkeypatch.setattr(_toolkit, "launch", failing)
    with pytest.raises(ExecutionError, match="does not compile"):
        executable.run([a, b])
    assert np.asarray(a).tolist() == [5] * 4
    assert executable.run([a, b])[0] is a  # now it succeeds, and brings the update in
    assert np.asarray(a).tolist() == [3] * 4


def test_what_a_failed_run_reads_is_held_as_well(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were launched before the one that fails are still under way."""
    monkeypatch.setattr(_toolkit, "mark", lambda stream: object())
    monkeypatch.setattr(_toolkit, "is_past", lambda event: False)
    monkeypatch.setattr(_toolkit, "wait_for", lambda event: None)
    executable = inner_of(of_nodes(engine, *_chain(2)))
    launch, count = _toolkit.launch, iter(range(10))

    def failing(*arguments: Any) -> None:
        if next(count) == 1:
            raise RuntimeError("no such kernel")
        launch(*arguments)

    monkeypatch.setattr(_toolkit, "launch", failing)
    x = data("float32", 64).view(_Watched)
    held = weakref.ref(x)
    with pytest.raises(ExecutionError, match="no such kernel"):
        executable.run([x], block_until_done=False)
    del x
    gc.collect()
    assert held() is not None


def test_results_feed_the_next_call_and_runs_need_not_wait(engine: ToyEngine) -> None:
    """What one call returns can be given to the next before it is computed."""
    run = of_nodes(engine, *_chain(3)).run
    x = data("float32", 64)
    for _ in range(2):
        (y,) = run([x], block_until_done=False)
        (z,) = run([y], block_until_done=False)
        assert np.array_equal(np.asarray(z), x)


def test_inputs_are_held_until_the_run_is_done(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their owners, such as JAX, know nothing of Toy's streams, and would give the memory to somebody else."""
    done: list[object] = []
    monkeypatch.setattr(_toolkit, "mark", lambda stream: object())
    monkeypatch.setattr(_toolkit, "is_past", lambda event: event in done)
    monkeypatch.setattr(_toolkit, "wait_for", done.append)
    executable = inner_of(of_nodes(engine, *_chain(2)))
    x = data("float32", 64).view(_Watched)
    held = weakref.ref(x)
    executable.run([x], block_until_done=False)
    del x
    gc.collect()
    assert held() is not None

    done += [event for event, _ in executable._flying]
    executable.run([data("float32", 64)], block_until_done=False)
    gc.collect()
    assert held() is None
    ((last, _),) = executable._flying
    del executable
    gc.collect()
    assert last in done


class _Watched(np.ndarray):
    """An array that can be referred to weakly."""


def test_the_default_stream_of_a_thread_is_no_name_for_memory(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handle 2 is another stream in each thread: a run for it goes to Toy's own stream, between two events."""
    asked: list[tuple[object, object]] = []
    callers = object()
    executable = inner_of(of_nodes(engine, *_chain(3)))
    monkeypatch.setattr(_toolkit, "stream_of", lambda handle: callers)
    monkeypatch.setattr(_toolkit, "order", lambda stream, after: asked.append((stream, after)))
    x = data("float32", 64)
    (y,) = executable.run([x], RunOptions(stream=2))

    np.testing.assert_array_equal(np.asarray(y), -x)
    own = executable._stream
    assert asked == [(own, callers), (callers, own)]
    assert list(executable._pool) == [None]


def test_many_threads_share_an_executable(engine: ToyEngine) -> None:
    """Calls at the same time have temporaries of their own."""
    run = of_nodes(engine, *_chain(3)).run
    inputs = [np.full(64, i, np.float32) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: np.asarray(run([x])[0]), inputs))
    assert [r[0] for r in results] == [-i for i in range(12)]
    assert all((r == r[0]).all() for r in results)


def test_bad_input_is_named_and_leaves_the_executable_usable(engine: ToyEngine) -> None:
    """Count, dtype and shape of the inputs are checked before anything runs."""
    executable = of_nodes(engine, *_chain(1))
    with pytest.raises(ExecutionError, match="takes 1 inputs, 2 were given"):
        executable.run([np.zeros(64, np.float32)] * 2)
    with pytest.raises(ExecutionError, match=r"input 'v0' must be float32\[64\], float64\[64\] was given"):
        executable.run([np.zeros(64)])
    with pytest.raises(ExecutionError, match=r"float32\[64\], float32\[8, 8\] was given"):
        executable.run([np.zeros((8, 8), np.float32)])
    with pytest.raises(ExecutionError, match="list was given"):
        executable.run([[0.0] * 64])
    assert np.asarray(executable.run([np.ones(64, np.float32)])[0]).tolist() == [-1] * 64


def test_a_node_that_does_not_compile_is_named_with_its_source(engine: ToyEngine) -> None:
    """A compile error says which node it was and which line made it."""
    x, y = value("x", np.float32, 2), value("y", np.int64, 2)
    place = NO_ANNOTATIONS.replace(source=SourceLocation("model.py", 7))
    node = Node("Identity", [x], [y], version=16, name="turn", annotations=place)
    with pytest.raises(CompileError, match=r"'y' of node 'turn' \(Identity-16\) from model.py:7 came out as"):
        of_nodes(engine, [x], [node], [y])


def test_the_engine_says_what_it_is(engine: ToyEngine) -> None:
    """Version and device tell a GPU from the simulator; other devices and options are refused by name."""
    from xrt_toy import _toolkit

    status = engine.probe()
    assert status.available
    assert status.devices[0] == "cuda:0"
    assert ("simulator" in status.version) == _toolkit.SIMULATED
    assert status.version in engine.fingerprint("cuda")
    with pytest.raises(EngineUnavailableError, match="no device 'cuda:99' here; numba sees cuda:0"):
        engine.compiler("cuda:99", CompileOptions())
    with pytest.raises(OptionError, match="unknown option 'fold_bytes'"):
        engine.compiler("cuda", CompileOptions(extra={"fold_bytes": 1}))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Node("Relu", [value("x", np.uint8, 2)], [value("y", np.uint8, 2)], version=14), "does not take uint8"),
        (Node("Gemm", [value("x", np.int32, 2, 2)] * 2, [value("y", np.int32, 2, 2)], {"alpha": 0.5}, version=13),
         "whole numbers only"),
        (Node("MaxPool", [value("x", np.float32, 1, 1, 4)],
              [value("y", np.float32, 1, 1, 2), value("i", np.int64, 1, 1, 2)], {"kernel_shape": (3,)}, version=12),
         "first output only"),
        (Node("Conv", [value("x", np.float32, 1, 1, 2, 2, 2)] * 2, [value("y", np.float32, 1, 1, 1, 1, 1)], version=11),
         "1 or 2 axes, not 3"),
        (Node("Reshape", [value("x", np.float32, 2), value("s", np.int64, 1)], [value("y", np.float32, 2)], version=14),
         "must be known at compile time"),
        (Node("Cast", [value("x", np.float32, 2)], [value("y", np.uint8, 2)], {"to": 2}, version=13),
         "does not make uint8"),
        (Node("Neg", [Value("x", None)], [Value("y", None)], version=13), "wants static shapes"),
        (Node("Unique", [value("x", np.float32, 2)], [value("y", np.float32, 2)], version=11), "no kernel for Unique"),
    ],
    ids=lambda x: x.op_type if isinstance(x, Node) else None,
)  # fmt: skip
def test_refusals_name_the_reason(engine: ToyEngine, node: Node, reason: str) -> None:
    """What no kernel takes is refused in a sentence."""
    verdict = engine.supports(node, "cuda:0", "inference")
    assert not verdict
    assert reason in verdict.reason


class ReluGraph(xrt.Graph):
    """The example of the lineage."""

    def build(self, x: Any) -> Any:
        return xrt.ops.Relu(x)


def test_the_relu_graph_runs() -> None:
    """The first example of XRT runs as it stands, wholly on this engine."""
    m = xrt.XRTModule(ReluGraph(), engine="toy")
    x = np.array([-1.0, 0.0, 2.5], np.float32)
    y = m(x)
    assert np.asarray(y).tolist() == [0, 0, 2.5]
    assert m.explain().summary() == "1 nodes, clusters: 1 on toy; 100% of nodes and 100% of FLOPs on engines"


class Perceptron(xrt.Graph):
    """Two dense layers and a Softmax."""

    def build(self, x: Any) -> Any:
        hidden = xrt.ops.Relu(xrt.ops.Gemm(x, data("float32", 6, 8), data("float32", 8)))
        logits = xrt.ops.MatMul(hidden, data("float32", 8, 3)) + data("float32", 3)
        scaled = xrt.ops.LayerNormalization(logits, np.ones(3, np.float32), np.zeros(3, np.float32))
        return xrt.ops.Softmax(scaled)


class Convolutional(xrt.Graph):
    """Convolution, normalisation, pooling, and a dense layer."""

    def build(self, x: Any) -> Any:
        ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
        y = xrt.ops.Conv(x, data("float32", 3, 1, 3, 3), pads=[1, 1, 1, 1])
        y = xrt.ops.Relu(xrt.ops.BatchNormalization(y, ones, zeros, zeros, ones))
        y = xrt.ops.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])
        y = xrt.ops.Flatten(xrt.ops.GlobalAveragePool(y))
        return xrt.ops.Gemm(y, data("float32", 4, 3), data("float32", 4), transB=1)


@pytest.mark.parametrize(("graph", "shape"), [(Perceptron, (4, 6)), (Convolutional, (2, 1, 6, 6))])
def test_a_model_runs_wholly_here(
    graph: type[xrt.Graph], shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A perceptron and a small convolutional network go to the engine as one cluster, and agree with the host."""
    x = data("float32", *shape)
    m = xrt.XRTModule(graph(), engine="toy")
    got = np.asarray(m(x))
    assert "clusters: 1 on toy; 100% of nodes" in m.explain().summary()
    assert not m.explain().errors
    assert "fallback" not in caplog.text
    np.testing.assert_allclose(got, np.asarray(xrt.XRTModule(graph(), engine="host")(x)), rtol=1e-4, atol=1e-5)


def test_nobody_gets_toy_without_asking() -> None:
    """Without `engine=` the engine does not take part, however ready it is."""
    assert not xrt_toy.ToyEngine.automatic
    m = xrt.XRTModule(ReluGraph())
    m(np.zeros(3, np.float32))
    assert "toy" not in m.explain().summary()


def _said(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env={**kept, **environment},
    )  # fmt: skip


def test_the_simulator_says_so_once() -> None:
    """Without a GPU one line goes to the log, at the first use; with one, none."""
    from xrt_toy import _toolkit

    done = _said("""
        from xrt_toy import ToyEngine
        engine = ToyEngine()
        for _ in range(2):
            engine.probe()
            engine.prepare()
            ToyEngine().probe()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("simulator") == int(_toolkit.SIMULATED)


@pytest.mark.parametrize(
    ("first", "environment", "reason"),
    [
        ("from numba import cuda", {}, "imported before it could be told to simulate one"),
        ("import numpy", {"NUMBA_ENABLE_CUDASIM": "0"}, "NUMBA_ENABLE_CUDASIM=0 forbids numba's simulator"),
    ],
)
def test_neither_gpu_nor_simulator(first: str, environment: dict[str, str], reason: str) -> None:
    """Where the simulator cannot be used and there is no GPU, the engine says why and refuses to compile."""
    from xrt_toy import _toolkit

    if _toolkit.GPUS:
        pytest.skip("this machine has a GPU")
    done = _said(
        f"""
        {first}
        from xrt_toy import ToyEngine
        from xrt_core.engine.contract import CompileOptions
        from xrt_core.errors import EngineUnavailableError
        status = ToyEngine().probe()
        assert not status.available
        assert status.remedy
        try:
            ToyEngine().compiler("cuda:0", CompileOptions())
        except EngineUnavailableError as e:
            print(e)
        """,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


@pytest.mark.parametrize("op_type", ["Assign", "Sub"])
def test_a_kernel_that_declares_an_update_runs_in_a_cluster_of_updates(
    engine: ToyEngine, op_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XRT hands over the state of a plain graph as the declaration says, and it holds the new value."""
    from xrt_toy import _toolkit

    engine.prepare()
    if op_type == "Sub":  # an SGD-like kernel: w - g
        declared = structs.replace(
            op_kernels.find("toy", "", "Sub"),
            mutable_variables=(0,),
            model_update=True,  # type: ignore[type-var]
        )
        monkeypatch.setitem(op_kernels._kernels, ("toy", "", "Sub"), declared)
    w, g, new = (value(n, np.float32, 4) for n in ("w", "g", "new"))
    domain, version = ("xrt", 1) if op_type == "Assign" else ("", 14)
    node = Node(op_type, [w, g], [new], domain=domain, version=version, name="update")
    graph = Graph([w, g], [new], [node], opsets={"": 21, "xrt": 1}, name="step")
    arrays = {"w": np.full(4, 5, np.float32), "g": np.ones(4, np.float32)}
    with xrt.XRTModule(graph, engine="toy", phase="train") as module:
        (launch,) = (n for n in module.partitioned(arrays).nodes if n.op_type == "Launch")
        (cluster,) = module.explain(arrays).to_json()["clusters"]
    assert cluster["model_update"]
    function = launch.attributes["function"]
    assert isinstance(function, Function)
    assert function.aliases == (InputOutputAlias(0, 0),)

    compiler = engine.compiler("cuda", CompileOptions(phase="train"))
    executable = compiler.compile(function, function.params, function.returns, function.aliases)
    executable.run([arrays["w"], arrays["g"]])  # the first run of a program is on copies
    stream = _toolkit.stream_of(None)
    state, step = (_toolkit.copied(arrays[n], stream) for n in ("w", "g"))
    (made,) = executable.run([state, step])
    assert made is state
    assert np.asarray(state).tolist() == ([4.0] * 4 if op_type == "Sub" else [1.0] * 4)

    with xrt.XRTModule(graph, engine="toy") as module:  # in inference nothing is updated
        assert "it belongs to the phase 'train'" in str(module.explain(arrays))
