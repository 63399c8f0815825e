"""xrt.Graph: parameters by attribute path, nested graphs, calls and results of every structure, threads, errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.frontends.tracing_runs import traced_run
from xrt_core import Graph, ops, trace
from xrt_core.errors import InputError, TraceError
from xrt_core.frontends.graph import as_type, bind, trace_call
from xrt_core.ir.types import TensorType

F = np.float32
X = np.arange(8, dtype=F).reshape(2, 4)


class Dense(Graph):
    """relu(x @ w + b)."""

    def __init__(self, rows: int, columns: int) -> None:
        self.w = np.linspace(-1, 1, rows * columns, dtype=F).reshape(rows, columns)
        self.b = np.full(columns, 0.5, F)

    def build(self, x: Any) -> Any:
        return ops.Relu(x @ self.w + self.b)


class Net(Graph):
    """Two layers in a list, one in a dict, and a table of its own."""

    def __init__(self) -> None:
        self.layers = [Dense(4, 5), Dense(5, 3)]
        self.named = {"head": Dense(3, 2)}
        self.scale = np.full((1, 100), 2.0, F)

    def build(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.named["head"](x) * self.scale[:, :2]


def _dense(x: np.ndarray, d: Dense) -> np.ndarray:
    return np.maximum(x @ d.w + d.b, 0)


def test_nested_graphs_are_traced_inline_with_paths_as_names() -> None:
    """Constants and nodes carry the attribute path; the numbers are those of the layers in a row."""
    net = Net()
    graph = trace(net, X)
    names = [v.name for v in graph.constants]
    assert names[:6] == ["layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "named.head.w", "named.head.b"]
    assert [n.name for n in graph.nodes][:4] == ["layers.0.MatMul", "layers.0.Add", "layers.0.Relu", "layers.1.MatMul"]
    expected = _dense(_dense(_dense(X, net.layers[0]), net.layers[1]), net.named["head"]) * 2
    np.testing.assert_allclose(traced_run(net, X), expected, rtol=1e-5)


def test_parameters_are_not_copied_and_one_array_is_one_constant() -> None:
    """The constant holds the caller's array itself, however often it is used."""
    net = Net()
    big = np.ones((50, 50), F)
    graph = trace(lambda x: (x[0, 0] * big) @ big + big, X)
    (held,) = [v for v in graph.constants if v.shape == (50, 50)]
    assert held.data is big
    traced = trace(net, X)
    assert next(v for v in traced.constants if v.name == "layers.0.w").data is net.layers[0].w


def test_a_graph_called_twice_shares_its_parameters() -> None:
    """Weight sharing: one constant, two nodes with different names."""

    class Twice(Graph):
        def __init__(self) -> None:
            self.f = Dense(4, 4)

        def build(self, x: Any) -> Any:
            return self.f(self.f(x))

    graph = trace(Twice(), X)
    assert [v.name for v in graph.constants] == ["f.w", "f.b"]
    assert len({n.name for n in graph.nodes}) == 6


def test_a_graph_made_inside_build_is_named_after_its_class() -> None:
    """Its constants carry the class's name, as no attribute holds it."""
    graph = trace(lambda x: Dense(4, 2)(x), X)
    assert [v.name for v in graph.constants] == ["Dense.w", "Dense.b"]


def test_named_parameters_lists_the_arrays() -> None:
    """Every array once, by path; also behind slots and cycles."""
    net = Net()
    net.layers[1].parent = net  # type: ignore[attr-defined]
    assert list(net.named_parameters()) == [
        "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "named.head.w", "named.head.b", "scale",
    ]  # fmt: skip
    assert net.named_parameters()["layers.1.w"] is net.layers[1].w

    class Slotted(Graph):
        __slots__ = ("w",)

        def __init__(self) -> None:
            self.w = X

    assert list(Slotted().named_parameters()) == ["w"]


def test_arrays_of_other_libraries_are_parameters_too() -> None:
    """Anything with __array__ or __dlpack__: jax arrays, torch parameters that ask for gradients."""
    torch = pytest.importorskip("torch")

    class Other:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.full((2, 4), 3, F)

    w = torch.nn.Parameter(torch.ones(4, 3))
    got = traced_run(lambda x: (x @ w, x + Other()), X)
    np.testing.assert_array_equal(got[0], X @ np.ones((4, 3), F))
    np.testing.assert_array_equal(got[1], X + 3)
    half = torch.full((100,), 1.5, dtype=torch.bfloat16)
    (constant,) = trace(lambda x: x[0, 0].astype("bfloat16") * half, X).nodes[-1].inputs[1:]
    assert constant is not None
    assert constant.data is not None
    assert constant.data.dtype.name == "bfloat16"
    assert (constant.data.astype(F) == 1.5).all()


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda x: x * 2, ["output"]),
        (lambda x: (x * 2,), ["output_0"]),
        (lambda x: [x * 2, (x + 1, x)], ["output_0", "output_1.0", "output_1.1"]),
        (lambda x: {"logits": x * 2, "state": [x, x + 1], "n": 3}, ["logits", "state.0", "state.1"]),
        (lambda x: Pair(x, x * 2), ["output_left", "output_right"]),
        (lambda x: (x * 2, None, "text", 7), ["output_0"]),
        (lambda x: (x, x, np.ones(2, F)), ["output_0", "output_1", "output_2"]),
    ],
)
def test_what_build_returns_comes_back_in_its_structure(f: Any, names: list[str]) -> None:
    """Tensors nested in tuples, lists, dicts and named tuples; other objects stay; names are unique and readable."""
    assert list(trace_call(f, [as_type(X)]).output_names) == names
    got, expected = traced_run(f, X), f(X)
    assert type(got) is type(expected) or isinstance(expected, np.ndarray)

    def same(a: Any, b: Any) -> None:
        if isinstance(b, dict):
            assert list(a) == list(b)
            a, b = list(a.values()), list(b.values())
        if isinstance(b, list | tuple):
            assert len(a) == len(b)
            for c, d in zip(a, b, strict=True):
                same(c, d)
        else:
            np.testing.assert_array_equal(a, b)

    same(got, expected)


def test_outputs_that_nodes_make_carry_their_names() -> None:
    """A computed output is named in the graph itself; an input that is returned keeps its own name."""
    graph = trace(lambda x: {"y": x * 2, "same": x, "again": x}, X)
    assert [v.name for v in graph.outputs] == ["y", "x", "x"]


def test_arguments_of_every_kind() -> None:
    """Positional, keyword, defaults, *args, **kwargs, nested containers and Python values."""

    def f(x: Any, *rest: Any, scale: float = 2.0, mode: str = "add", state: Any = None, **more: Any) -> Any:
        y = x * scale
        for r in (*rest, *more.values()):
            y = y + r if mode == "add" else y - r
        return y if state is None else y + state["h"][0]

    np.testing.assert_array_equal(traced_run(f, X), X * 2)
    np.testing.assert_array_equal(traced_run(f, X, X, X, mode="sub"), X * 2 - X - X)
    np.testing.assert_array_equal(traced_run(f, x=X, scale=3.0, extra=X), X * 4)
    np.testing.assert_array_equal(traced_run(f, X, state={"h": [X, X]}), X * 3)
    call = bind(f, (X, X), {"state": {"h": [X]}, "extra": X})
    assert call.names == ("x", "rest.0", "state.h.0", "extra")


def test_the_layout_tells_calls_apart_by_everything_but_the_arrays() -> None:
    """Python values with their types, and the places of the arrays, are part of the signature; the numbers are not."""

    def f(x: Any, y: Any = None, n: Any = 1) -> Any:
        return x

    def key(*args: Any, **kwargs: Any) -> Any:
        return bind(f, args, kwargs).layout

    assert key(X) == key(X + 1)
    assert key(X) == key(x=X)
    assert hash(key(X, X)) == hash(key(X, y=X))
    assert len({key(X), key(X, X), key(X, n=1), key(X, n=True), key(X, n=1.0), key(X, [X]), key(X, (X,))}) == 7


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((X, X, X), {}, "too many"),
        ((X,), {"z": X}, "unexpected keyword argument 'z'"),
        (("text",), {}, "argument 'x' is 'text' .str., not an array"),
        (([X, 1.5],), {}, r"argument 'x\.1' is 1\.5"),
        (({"a": None},), {}, r"argument 'x\.a' is None"),
        ((X,), {"y": {1, 2}}, r"\{1, 2\} is not hashable"),
    ],
)
def test_arguments_that_do_not_fit_are_input_errors(args: Any, kwargs: Any, message: str) -> None:
    """Missing, surplus, unknown and non-array arguments are named."""

    def f(x: Any, y: Any = None) -> Any:
        return x

    with pytest.raises(InputError, match=message):
        bind(f, args, kwargs)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_a_pinned_opset_holds_for_every_node(opset: int) -> None:
    """The nodes follow the schemas of the opset that the class asks for, as does the export."""
    version = opset

    class Pinned(Graph):
        opset = version

        def build(self, x: Any) -> Any:
            return ops.ReduceMax(x) + x.sum(0)

    graph = trace(Pinned(), X)
    assert graph.opsets[""] == opset
    assert all(n.version <= opset for n in graph.nodes)
    np.testing.assert_array_equal(traced_run(Pinned(), X), X.max(keepdims=True) + X.sum(0))


def test_opset_errors() -> None:
    """An opset out of range, an operator that came later, and a part that asks for another opset than the whole."""

    def graph(version: Any, f: Any) -> Graph:
        kind = type("Pinned", (Graph,), {"opset": version, "build": lambda self, x: f(x)})
        return kind()

    for bad in (5, 1000, "17"):
        with pytest.raises(TraceError, match="opset"):
            trace(graph(bad, lambda x: x), X)
    with pytest.raises(TraceError, match="Gelu came with opset 20"):
        trace(graph(17, ops.Gelu), X)
    with pytest.raises(TraceError, match="outermost"):
        trace(lambda x: graph(17, ops.Relu)(x), X)


def test_misuse_is_told() -> None:
    """No build, a call with arrays, no tensor returned, an output that is none, a wrong number of types."""
    with pytest.raises(TraceError, match="defines no build"):
        trace_call(Graph(), [])
    with pytest.raises(TraceError, match=r"xrt\.XRTModule\(Dense"):
        Dense(4, 4)(X)
    with pytest.raises(TraceError, match="returned no tensor"):
        trace(lambda x: None, X)
    with pytest.raises(TraceError, match="1 arrays, 2 types"):
        trace(lambda x: x, X, X)
    with pytest.raises(TraceError, match="is no type"):
        trace(lambda x: x, "float32")
    with pytest.raises(TraceError, match="no element type"):
        trace(lambda x: x + np.zeros(2, "datetime64[s]"), X)


def test_exceptions_of_the_user_come_through() -> None:
    """An error raised in build is the user's own, and leaves tracing switched off."""

    def f(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(f, X)
    with pytest.raises(TraceError, match="only while one is traced"):
        ops.Relu(X)


def test_types_may_be_symbolic_and_given_as_text() -> None:
    """Symbols and unknown dimensions go through inference."""
    graph = trace(lambda x: ops.Concat(x, x, axis=1) + 1, "float32[batch, 4]")
    assert graph.outputs[0].type == TensorType(np.dtype(F), ("batch", 8))


def test_shapes_stay_integers_through_arithmetic() -> None:
    """What specialisation follows, tracing follows as well: here a product over the largest sizes, turned round."""

    def turned(x: Any) -> Any:
        shape = ops.Shape(x)
        largest = ops.ReduceMax(ops.Tile(ops.Transpose(ops.Reshape(shape, [2, 1])), [2, 1]), keepdims=0)
        return ops.Expand(ops.ReduceMax(x, keepdims=0), ops.Unsqueeze(largest, [0]))

    assert trace(turned, "float32[3, 5]").outputs[0].type == TensorType(np.dtype(F), (5,))


def test_tracing_inside_tracing_and_in_many_threads() -> None:
    """A trace inside build is its own; threads that trace one graph at once do not see each other."""
    inner: list[Any] = []

    def outer(x: Any) -> Any:
        y = x + 1
        inner.append(trace(lambda a: a * 2, X))
        return y * 3

    graph = trace(outer, X)
    assert [n.op_type for n in graph.nodes] == ["Add", "Mul"]
    assert [n.op_type for n in inner[0].nodes] == ["Mul"]

    net, texts, failures = Net(), [], []
    start = threading.Barrier(8)

    def work() -> None:
        try:
            start.wait()
            for _ in range(5):
                texts.append(tuple(n.name for n in trace(net, X).nodes))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(texts) == 40
    assert len(set(texts)) == 1


def test_a_traced_graph_can_be_imported_without_onnx() -> None:
    """Defining a Graph imports no onnx; only tracing does."""
    code = "import sys, xrt_core\nclass G(xrt_core.Graph): pass\nxrt_core.ops; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_parameters_are_loaded_wherever_they_stand() -> None:
    """In attributes, lists, dicts, tuples and nested graphs, and in each place where one array stands twice."""

    class Inner(xrt.Graph):
        def __init__(self, w: np.ndarray) -> None:
            self.w = w

        def build(self, x: Any) -> Any:
            return x * self.w

    class Outer(xrt.Graph):
        def __init__(self) -> None:
            shared = np.ones(2, np.float32)
            self.parts = [Inner(shared), Inner(np.zeros(2, np.float32))]
            self.bias = {"b": np.zeros(2, np.float32)}
            self.pair = (np.ones(2, np.float32), 3)
            self.again = shared

        def build(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x) + self.bias["b"]
            return x * self.again + self.pair[0] * float(self.pair[1])

    graph = Outer()
    given = {n: np.full(2, i + 2, np.float32) for i, n in enumerate(graph.named_parameters())}
    graph.load_parameters(given)
    assert all(np.array_equal(a, given[n]) for n, a in graph.named_parameters().items())
    assert graph.again is graph.parts[0].w
    s, z, b, p = (given[n][0] for n in ("parts.0.w", "parts.1.w", "bias.b", "pair.0"))
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(xrt.XRTModule(graph, engine="host")(x), ((x * s + b) * z + b) * s + p * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": np.zeros(2, np.float32)}, "has no parameter 'v'; it has w"),
        ({"w": np.zeros(3, np.float32)}, r"parameter 'w' of Held is float32\[2\], given is float32\[3\]"),
        ({"w": np.zeros(2)}, r"given is float64\[2\]"),
    ],
)
def test_parameters_that_do_not_fit_change_nothing(change: dict[str, np.ndarray], message: str) -> None:
    class Held(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones(2, np.float32)

        def build(self, x: Any) -> Any:
            return x * self.w

    graph = Held()
    with pytest.raises(InputError, match=message):
        graph.load_parameters({"w": np.zeros(2, np.float32), **change})
    assert graph.w.tolist() == [1, 1]
    with pytest.raises(InputError, match="also has the parameter 'w'"):
        graph.load_parameters({})


@pytest.mark.parametrize("text", ["float32[n,4]", "float32[n , 4]", " float32[n,  4] "])
def test_a_types_text_takes_any_spaces(text: str) -> None:
    """Dimensions are what stands between commas."""
    graph = trace(lambda x: ops.Relu(x), text)
    assert str(graph.inputs[0].type) == "float32[n, 4]"
