"""Results in arrays of the caller's: copied there, or written there by an engine that can."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_cupy import installed
from tests.fake_engines import fake_engine
from tests.fake_gpu import GPU, GpuEngine, fake_torch, memory, on_gpu
from tests.random_graphs import F32, graph_of, node
from xrt_core.errors import InputError
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters

X = np.array([[1, -2], [3, 4]], np.float32)


def _graph() -> Graph:
    """p = -x, q = |x|."""
    x, p, q = Value("x", TensorType(F32, (2, 2))), Value("p"), Value("q")
    return graph_of([x], [p, q], [node("Neg", [x], [p]), node("Abs", [x], [q])])


def test_numpy() -> None:
    """What is given comes back filled, the others as ever; an input may be one of them."""
    m = XRTModule(_graph(), engine="host")
    for scale in (1, 2, 3):
        out, x = np.full((2, 2), np.nan, np.float32), X * scale
        found = m.run({"x": x}, results={"q": out})
        assert found["q"] is out
        np.testing.assert_array_equal(out, np.abs(x))
        np.testing.assert_array_equal(found["p"], -x)
    assert m.run({"x": x}, results={"p": x})["p"] is x
    np.testing.assert_array_equal(x, -3 * X)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"y": np.zeros((2, 2), np.float32)}, "unknown output 'y'; the model gives 'p', 'q'"),
        ({"p": np.zeros((2, 3), np.float32)}, r"is float32\[2, 3\], the model gives float32\[2, 2\]"),
        ({"p": np.zeros((2, 2))}, "is float64"),
        ({"p": np.broadcast_to(np.float32(0), (2, 2))}, "is read-only"),
        ({"p": [[0.0, 0.0], [0.0, 0.0]]}, "is a list, which cannot be written to"),
        ([np.zeros((2, 2), np.float32)], "must be a mapping"),
    ],
)
def test_what_does_not_fit(results: Any, message: str) -> None:
    """Each is an InputError, and nothing was written."""
    m = XRTModule(_graph(), engine="host")
    with pytest.raises(InputError, match=message):
        m.run({"x": X}, results=results)
    assert not np.any(np.asarray(next(iter(results.values())) if isinstance(results, dict) else results[0]))


def test_a_traced_graph() -> None:
    """Names of results are those that `run` gives."""

    class Doubled(xrt.Graph):
        def build(self, x: Any) -> Any:
            return {"y": x + x}

    m = XRTModule(Doubled(), engine="host")
    (name,) = m.run({"x": X})
    out = np.empty((2, 2), np.float32)
    assert m.run({"x": X}, results={name: out})[name] is out
    np.testing.assert_array_equal(out, X + X)


@pytest.mark.parametrize("form", ["one launch", "two", "it does not"])
def test_an_engine_on_a_gpu_writes_there(form: str) -> None:
    """Where the graph is one launch the engine gets the array; else, and where it does not use it, a copy follows in
    the order of the caller's stream. Nothing waits."""
    GPU.reset()
    with installed(devices=2), fake_engine(GpuEngine) as made:
        assert isinstance(made, GpuEngine)
        made.writes_there = form != "it does not"
        m = XRTModule(_graph(), engine="gpu", prune=False, marks={"op:Abs": "host"} if form == "two" else {})
        m(on_gpu(X))
        GPU.current = 5
        out = on_gpu(np.full((2, 2), np.nan, np.float32))
        GPU.waits.clear()
        found = m.run({"x": on_gpu(X)}, results={"p": out})
        assert found["p"] is out
        assert not GPU.waits
        assert tuple(made.wanted[-1]) == (() if form == "two" else (out, None))
        GPU.drain(5)
        np.testing.assert_array_equal(memory(out), -X)
        np.testing.assert_array_equal(found["q"].get(), np.abs(X))


def test_a_tensor_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled on its device, from results of another library."""
    GPU.reset()
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    with installed(devices=2), fake_engine(GpuEngine):
        m = XRTModule(_graph(), engine="gpu")
        tensor = sys.modules["torch"].from_dlpack(on_gpu(np.zeros((2, 2), np.float32)))
        assert m.run({"x": X}, results={"p": tensor})["p"] is tensor
        GPU.wait_for_all()
        np.testing.assert_array_equal(memory(tensor), -X)
