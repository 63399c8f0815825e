"""Traced graphs with symbols: one trace and plan for many shapes, and exact ones where `build` needs the numbers."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core import Graph, ops
from xrt_core.errors import InputError, TraceError

pytestmark = pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")

ENGINES = ("onnxruntime", "openvino")
PLAIN: dict[str, Any] = {"guard": False, "cache": "off", "prune": False}
F = np.float32


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """An engine that takes symbolic shapes and is installed here."""
    pytest.importorskip(request.param)
    return str(request.param)


class Heads(Graph):
    """Attention whose shapes are read from its input, as people write it."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        rng = np.random.default_rng(0)
        self.qkv = rng.standard_normal((width, 3 * width)).astype(F)
        self.table = rng.standard_normal((32, width)).astype(F)
        self.heads = heads

    def build(self, x: Any) -> Any:
        batch, length, width = x.shape
        each = width // self.heads
        x = x + self.table[:32].reshape(32, width)[None][:, :1] + ops.Cast(ops.Range(0, length, 1), to=1)[None, :, None]
        split = (x @ self.qkv).reshape(batch, length, 3, self.heads, each).transpose(2, 0, 3, 1, 4)
        scores = (split[0] @ split[1].mT) * each**-0.5
        merged = (scores.softmax() @ split[2]).transpose(0, 2, 1, 3).reshape(batch, length, width)
        return {"all": merged, "mean": merged.sum(1) / length, "count": batch * length + 1}


def named(*functions: Any) -> list[Any]:
    """The parameters of a test, by number."""
    return [pytest.param(f, id=str(i)) for i, f in enumerate(functions)]


def data(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F)


def plans(m: xrt.XRTModule) -> list[Any]:
    """The symbolic plans of a module of a traced graph, and the exact ones."""
    callers = {id(c): c for c, _ in m._source._traced.values()}.values()  # type: ignore[union-attr]
    return [p for c in callers for p in c.plans.plans()]


def flat(results: Any) -> list[np.ndarray]:
    """The arrays in what a module returns."""
    if isinstance(results, dict | list | tuple):
        return [a for r in (results.values() if isinstance(results, dict) else results) for a in flat(r)]
    return [np.asarray(results)]


def check(m: xrt.XRTModule, graph: Any, *arrays: np.ndarray, rtol: float = 1e-4) -> None:
    """What `m` gives for these arrays is what the host gives for a trace with their shapes."""
    for got, want in zip(flat(m(*arrays)), flat(xrt.XRTModule(graph, engine="host")(*arrays)), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5)


def test_a_build_that_reads_its_shapes_is_traced_once_for_all(engine: str) -> None:
    """The second shape makes a trace with symbols, which takes the place of the first; results and their dtypes are
    those of exact traces."""
    graph, seen = Heads(), []
    build = graph.build
    graph.build = lambda x: seen.append(x.shape) or build(x)  # type: ignore[method-assign]
    m = xrt.XRTModule(graph, engine=engine, **PLAIN)
    for b, n in ((2, 5), (3, 4), (1, 1), (4, 9), (2, 5)):
        check(m, Heads(), data(b, n, 8))
    assert len(seen) == 2
    (plan,) = plans(m)
    assert plan.symbolic is not None
    assert m.explain().symbols == ("n0 in 1..", "n1 in 1..")
    assert m.explain().flop_share > 0.99


def test_shapes_of_a_traced_graph_can_be_declared(engine: str, tmp_path: pathlib.Path) -> None:
    """There is one trace from the first call on, calls are held to the declaration, and a file serves all sizes."""
    shapes = {"x": ("batch", xrt.Symbol("length", max=16), 8)}
    m = xrt.XRTModule(Heads(), engine=engine, shapes=shapes, **PLAIN)
    for b, n in ((2, 5), (3, 4), (1, 16)):
        check(m, Heads(), data(b, n, 8))
    assert len(plans(m)) == 1
    with pytest.raises(InputError, match=r"'x', axis 1: 17 given, which is more than the maximum 16 \(symbol 'length'"):
        m(data(2, 17, 8))
    assert len(plans(m)) == 1
    m.save(tmp_path / "m.xrt")
    back = xrt.XRTModule.load(tmp_path / "m.xrt", guard=False, cache="off", forbid_compilation=True)
    x = data(5, 7, 8)
    np.testing.assert_allclose(back.run({"x": x})["mean"], m.run({"x": x})["mean"], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="maximum 16"):
        back.run({"x": data(2, 17, 8)})


def test_declared_inputs_must_be_there() -> None:
    """A name that `build` does not have is an error at once; one that a call does not have, at that call."""
    with pytest.raises(InputError, match="unknown input 'y'; build takes x"):
        xrt.XRTModule(Heads(), engine="host", shapes={"y": ("n",)})
    m = xrt.XRTModule(lambda *xs: xs[0] + xs[1], engine="host", shapes={"xs.2": ("n",)})
    with pytest.raises(InputError, match=r"unknown input 'xs.2'; this call has xs.0, xs.1"):
        m(data(3), data(3))


@pytest.mark.parametrize(
    "decide",
    named(
        lambda n, x: x * 2 if n == 4 else x,
        lambda n, x: x * 2 if n > 4 else x,
        lambda n, x: x * 2 if n in (4, 6) else x,
        lambda n, x: x * 2 if n in {4: 1, 6: 2} else x,
        lambda n, x: x * sum(range(n)),
        lambda n, x: x * n**-0.5,
        lambda n, x: x * (n / 3),
        lambda n, x: x * (0.5 * n),
        lambda n, x: x * (np.float32(0.5) * n),
        lambda n, x: x + np.arange(n, dtype=F),
        lambda n, x: x * float(n),
        lambda n, x: x[-len(x) :],
    ),
)
def test_a_build_that_needs_the_numbers_is_traced_for_each_shape(decide: Any) -> None:
    """No branch is taken by a size that is not known, and no arithmetic done that differs from that of numbers."""
    pytest.importorskip("onnxruntime")

    def build(x: Any) -> Any:
        return decide(x.shape[0], x)

    m = xrt.XRTModule(build, engine="onnxruntime", **PLAIN)
    for n in (3, 4, 6, 5):
        check(m, build, data(n))
    assert not any(p.symbolic for p in plans(m))
    assert any("cannot be traced with symbols" in str(e) for e in m.events)


@pytest.mark.parametrize(
    "compute",
    named(
        lambda n, x: x * n,
        lambda n, x: n - x,
        lambda n, x: x / n,
        lambda n, x: n / x,
        lambda n, x: x**n,
        lambda n, x: x * (n * 2 - 1),
        lambda n, x: x * ((n + 1) // 2),
        lambda n, x: x * (n % 3),
        lambda n, x: x * -n,
        lambda n, x: x.astype("float16") * n,
        lambda n, x: x.astype("int32") * n,
        lambda n, x: ops.Where(n > 4, x, -x),
        lambda n, x: x[: n - 1],
        lambda n, x: x[n - 1],
        lambda n, x: x[None].expand(3, n),
        lambda n, x: x[None].broadcast_to((n, n)),
        lambda n, x: x.reshape(n, 1, -1),
        lambda n, x: ops.Reshape(x, [1, n]),
        lambda n, x: (x, n, [n + 1]),
    ),
)
def test_sizes_compute_as_numbers_do(compute: Any) -> None:
    """A size that differs between calls does what the integer does in an exact trace: the same results and dtypes."""
    pytest.importorskip("onnxruntime")

    def build(x: Any) -> Any:
        return compute(x.shape[0], x)

    m = xrt.XRTModule(build, engine="onnxruntime", **PLAIN)
    for n in (3, 4, 6, 5):
        check(m, build, data(n), rtol=1e-3)
    assert not any("cannot be traced with symbols" in str(e) for e in m.events)


def test_a_size_is_no_number() -> None:
    """`xrt.trace` with symbols says what cannot be had, and where."""
    with pytest.raises(TraceError, match=r"test_traced.py.*needs the number in <Size .*differs between the calls"):
        xrt.trace(lambda x: x * int(x.shape[0]), "float32[n, 4]")
    graph = xrt.trace(lambda x: x.reshape(x.shape[0] * 2, 2), "float32[n, 4]")
    assert graph.outputs[0].shape == (None, 2)
    graph = xrt.trace(lambda x: x.reshape(x.shape[0], 2, 2), "float32[n, 4]")
    assert graph.outputs[0].shape == ("n", 2, 2)


def test_traced_graphs_are_padded_to_buckets() -> None:
    """An engine of static shapes: the trace with symbols is what padding is proven of."""
    pytest.importorskip("jax")

    def build(x: Any) -> Any:
        return (x.reshape(x.shape[0], -1) @ np.ones((8, 3), F)).softmax()

    sizes = {"buckets": {"rows": (4, 16)}, "shapes": {"x": ("rows", 8)}}
    m = xrt.XRTModule(build, engine="xla", **sizes, **PLAIN)
    for n in (3, 4, 2, 9, 16, 1):
        check(m, build, data(n, 8))
    assert sum(e.name == "compile" for e in m.events) == 2
    m = xrt.XRTModule(build, engine="xla", buckets="auto", **PLAIN)
    for n in (16, 12, 13, 14, 15, 11, 10, 9):
        check(m, build, data(n, 8))
    assert sum(e.name == "compile" for e in m.events) <= 4
