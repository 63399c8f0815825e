"""Modules in one file: saved with their executables, loaded without a compiler, refused where they do not fit."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.cache.cached import CountingEngine
from tests.fake_engines import fake_engine
from xrt_core import saved_model
from xrt_core.cache.store import forget_all
from xrt_core.engine import engines
from xrt_core.engine.boundary import inner_of
from xrt_core.errors import CacheError, InputError, ModelLoadError, UnsupportedError
from xrt_core.ir.graph import Graph, Value
from xrt_core.module import XRTModule
from xrt_core.saved_model import open_saved
from xrt_core.testing.functions import node, value

RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(64, 64)).astype(np.float32)
X = RNG.normal(size=(2, 64)).astype(np.float32)


class Named(CountingEngine):
    """The serialising host engine, under a name that tests may register; `version` is part of its fingerprint."""

    name = "counting"
    version = "1"

    def fingerprint(self, device: str) -> str:
        return f"counting {self.version}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Named]:
    engines.register(Named)
    forget_all()
    try:
        made = inner_of(engines.get("counting"))
        assert isinstance(made, Named)
        yield made
    finally:
        engines.unregister("counting")


def model() -> Graph:
    """y = relu(x W) reshaped to a shape that is an input."""
    x, shape, y = value("x", None, 64), Value("shape", xrt.ir.types.TensorType(np.dtype(np.int64), (2,))), Value("y")
    w = Value.constant(WEIGHTS, "W")
    product, positive = Value("p"), Value("r")
    nodes = [
        node("MatMul", [x, w], [product]),
        node("Relu", [product], [positive]),
        node("Reshape", [positive, shape], [y]),
    ]
    return Graph([x, shape], [y], nodes, opsets={"": 21}, name="saved")


SHAPE = np.array([4, 32], np.int64)


def saved(folder: pathlib.Path, **options: Any) -> tuple[pathlib.Path, np.ndarray]:
    m = XRTModule(model(), engine="counting", cache=False, **options)
    result = m(X, SHAPE)
    m(X[:1], np.array([64, 1], np.int64))
    path = folder / "model.xrt"
    m.save(path)
    forget_all()  # as another process would find it
    return path, result


def test_a_loaded_module_gives_the_same_without_compiling(engine: Named, tmp_path: pathlib.Path) -> None:
    path, expected = saved(tmp_path)
    compiled = engine.compiled
    m = XRTModule.load(path, cache=False)
    assert engine.loaded == compiled == 2  # both signatures, when load returns
    np.testing.assert_array_equal(m(X, SHAPE), expected)
    assert engine.compiled == compiled
    assert m.engines == ("counting",)


def test_a_new_signature_is_compiled_as_in_any_module(engine: Named, tmp_path: pathlib.Path) -> None:
    path, expected = saved(tmp_path)
    m = XRTModule.load(path, cache=False)
    compiled = engine.compiled
    found = m(X[:1], np.array([8, 8], np.int64))
    np.testing.assert_allclose(found, expected.reshape(2, 64)[:1].reshape(8, 8), rtol=1e-5)
    assert engine.compiled == compiled + 1


def test_weights_stay_in_the_file(engine: Named, tmp_path: pathlib.Path) -> None:
    path, _ = saved(tmp_path)
    m = XRTModule.load(path, cache=False)
    (weights,) = [v.data for v in m._source.caller.graph.constants if v.data is not None and v.data.nbytes > 4096]
    assert not weights.flags.owndata
    assert weights.ctypes.data % 64 == 0
    np.testing.assert_array_equal(weights, WEIGHTS)


def test_options_come_along_and_can_be_overridden(engine: Named, tmp_path: pathlib.Path) -> None:
    path, _ = saved(tmp_path, maximum_nodes=100)
    assert XRTModule.load(path, cache=False).options.maximum_nodes == 100
    assert XRTModule.load(path, cache=False, maximum_nodes=50, recompile=True).options.maximum_nodes == 50


def test_a_file_decides_nothing_but_what_is_computed(
    engine: Named, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options for folders, processes and caches are neither saved nor taken from a file; there is an event of them."""
    given = {"guard": False, "trace": str(tmp_path / "mine"), "cache_size": 3}
    path, expected = saved(tmp_path, maximum_nodes=100, **given)
    assert set(open_saved(path).options) == {"maximum_nodes"}

    crafted = {"trace": str(tmp_path / "elsewhere"), "cache_dir": str(tmp_path / "elsewhere"), "guard": True}
    monkeypatch.setattr(saved_model, "_given", lambda options: {**crafted, "maximum_nodes": 7})
    path, expected = saved(tmp_path)
    m = XRTModule.load(path, cache=False)
    np.testing.assert_array_equal(m(X, SHAPE), expected)
    assert (m.options.maximum_nodes, m.options.trace) == (7, "")
    for name in ("cache_dir", "guard"):
        assert not m.options.source(name).startswith("keyword")
    assert not (tmp_path / "elsewhere").exists()
    (event,) = [e for e in m.events if e.name == "saved.ignored"]
    assert event.fields["options"] == "cache_dir, guard, trace"


def test_another_library_version_is_refused_or_compiled_anew(
    engine: Named, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(tmp_path)
    monkeypatch.setattr(Named, "version", "2")
    with pytest.raises(CacheError, match=r"made for engine counting on cpu \(counting 1\); here is .*counting 2"):
        XRTModule.load(path, cache=False)
    compiled = engine.compiled
    m = XRTModule.load(path, cache=False, recompile=True)
    np.testing.assert_array_equal(m(X, SHAPE), expected)
    assert engine.compiled > compiled


def test_an_option_that_changes_executables_is_refused(engine: Named, tmp_path: pathlib.Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(CacheError, match=r"nearest differs in .*threads: None != 3|nearest differs in threads"):
        XRTModule.load(path, cache=False, threads=3)


@pytest.mark.parametrize("part", ["head", "manifest", "executable", "cut", "empty", "model"])
def test_damage_is_an_error_with_its_place(engine: Named, tmp_path: pathlib.Path, part: str) -> None:
    path, _ = saved(tmp_path)
    content = bytearray(path.read_bytes())
    at = {
        "head": 3,
        "manifest": len(content) - 50,
        "executable": content.rindex(b'{"info"') - 100,
        "model": content.index(b"MatMul"),
    }.get(part, 0)
    if part == "cut":
        del content[-10:]
    elif part == "empty":
        content.clear()
    else:
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises((CacheError, ModelLoadError), match=re.escape(path.name)):
        XRTModule.load(path, cache=False)


def test_changed_weights_do_not_meet_the_executables(engine: Named, tmp_path: pathlib.Path) -> None:
    path, _ = saved(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.index(WEIGHTS.tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheError, match="differs in function"):
        XRTModule.load(path, cache=False)


def test_no_file_and_other_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        XRTModule.load(tmp_path / "none.xrt")
    (tmp_path / "other").write_bytes(b"\x08\x07 an ONNX model, say" * 10)
    with pytest.raises(CacheError, match="not a model file of XRT, which XRTModule.save writes"):
        XRTModule.load(tmp_path / "other")


def test_a_saved_module_is_no_model(engine: Named, tmp_path: pathlib.Path) -> None:
    """Who takes it for one is told how to open it."""
    path, _ = saved(tmp_path)
    with pytest.raises(ModelLoadError, match=r"is a saved module: XRTModule\.load\(.*\) opens it"):
        XRTModule(path)


def test_an_engine_that_cannot_serialise_is_an_error_and_leaves_no_file(tmp_path: pathlib.Path) -> None:
    with fake_engine():
        m = XRTModule(model(), engine="fake", cache=False)
        m(X, SHAPE)
        (tmp_path / "model.xrt").write_bytes(b"before")
        with pytest.raises(UnsupportedError, match="on engine 'fake' cannot be saved"):
            m.save(tmp_path / "model.xrt")
    assert os.listdir(tmp_path) == ["model.xrt"]
    assert (tmp_path / "model.xrt").read_bytes() == b"before"


def test_a_folder_that_is_not_there(engine: Named, tmp_path: pathlib.Path) -> None:
    m = XRTModule(model(), engine="counting", cache=False)
    m(X, SHAPE)
    with pytest.raises(CacheError, match="cannot be written"):
        m.save(tmp_path / "missing" / "model.xrt")


def test_a_traced_graph_is_saved_with_its_one_signature(engine: Named, tmp_path: pathlib.Path) -> None:
    m = XRTModule(lambda x: xrt.ops.Relu(x) + 1.0, engine="counting", cache=False)
    with pytest.raises(InputError, match="has 0"):
        m.save(tmp_path / "model.xrt")
    expected = m(X)
    m.save(tmp_path / "model.xrt")
    forget_all()
    compiled = engine.compiled
    np.testing.assert_array_equal(XRTModule.load(tmp_path / "model.xrt", cache=False)(X), expected)
    assert engine.compiled == compiled
    m(X[:1])
    with pytest.raises(InputError, match="has 2"):
        m.save(tmp_path / "model.xrt")


def test_without_engines_it_is_a_model_in_one_file(tmp_path: pathlib.Path) -> None:
    m = XRTModule(model(), engine="host")
    expected = m(X, SHAPE)
    m.save(tmp_path / "model.xrt")
    np.testing.assert_array_equal(XRTModule.load(tmp_path / "model.xrt")(X, SHAPE), expected)


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["xla", "onnxruntime", "openvino"])
def test_another_process_loads_and_compiles_nothing(engine_name: str, tmp_path: pathlib.Path) -> None:
    m = XRTModule(model(), engine=engine_name, cache=False)
    expected = m(X, SHAPE)
    m.save(tmp_path / "model.xrt")
    np.savez(tmp_path / "data.npz", x=X, shape=SHAPE, y=expected)
    program = """
import sys, numpy as np, xrt_core as xrt
folder = sys.argv[1]
data = np.load(folder + "/data.npz")
m = xrt.XRTModule.load(folder + "/model.xrt", cache=False)
np.testing.assert_allclose(m(data["x"], data["shape"]), data["y"], rtol=1e-6)
names = [e.name for e in m.events]
assert "saved.loaded" in names and "compile" not in names, names
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
