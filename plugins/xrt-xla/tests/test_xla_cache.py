"""Executables from the cache on disk, from model files and from bytes: loaded without compiling, or refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xla_functions import compile_nodes
from xrt_xla import XlaEngine, blob

import xrt_core as xrt
from xrt_core.cache import store
from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import CompileError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.testing.functions import chain, function, node, value

# Models in files are run, and saved under another suffix; what is read from such a file is loaded.
_CODE = """
import json, pathlib, sys
import numpy as np
from xrt_core.module import XRTModule
runs = {}
for path in map(pathlib.Path, sys.argv[1:]):
    m = (XRTModule.load if path.suffix == ".xrt" else XRTModule)(path, engine="xla")
    shape = (2, 5, 5) if path.stem == "det" else (4, 96)
    y = m(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape) ** 2)
    events = [(e.name, e.fields.get("reason", "")) for e in m.events]
    runs[path.name] = {"events": events, "y": np.asarray(y).tolist()}
    if path.suffix == ".onnx" and events[0][0] == "cache.miss":
        m.save(path.with_suffix(".xrt"))
print(json.dumps(runs))
"""


def _save(path: Path, x: list[int], y: list[int], nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> None:
    given, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x), ("y", y)))
    constants = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "model", [given], [result], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def _two_layers(path: Path, w: np.ndarray, v: np.ndarray) -> Path:
    """Weights that are too large to become part of the program."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "v"], ["y"], transB=1),
    ]
    _save(path, [4, 96], [4, 96], nodes, {"w": w, "v": v})
    return path


def _process(folder: Path, *models: Path, **environment: str) -> dict[str, Any]:
    """What a process of its own does with the models: events and results of each."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *map(str, models)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XRT_CACHE_DIR": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Stored:
    """What the first process did with two models, and what it left."""

    folder: Path
    model: Path
    det: Path
    runs: dict[str, Any]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)
    model = _two_layers(folder / "m.onnx", *(rng.standard_normal((96, 96), np.float32) for _ in range(2)))
    det = folder / "det.onnx"
    nodes = [helper.make_node("Add", ["x", "e"], ["a"]), helper.make_node("Det", ["a"], ["y"])]
    _save(det, [2, 5, 5], [2], nodes, {"e": np.eye(5, dtype=np.float32)})
    return Stored(folder / "cache", model, det, _process(folder / "cache", model, det))


def _names(run: dict[str, Any]) -> list[str]:
    return [name for name, _ in run["events"]]


def test_the_second_process_loads_what_the_first_compiled(stored: Stored, tmp_path: Path) -> None:
    """No compilation, equal numbers to the last bit, also where the program calls LAPACK, which crashes the process if
    JAX has not registered it; other weights are a miss."""
    zeros = _two_layers(tmp_path / "zeros.onnx", *np.zeros((2, 96, 96), np.float32))
    second = _process(stored.folder, stored.det, stored.model, zeros)

    for name in ("det.onnx", "m.onnx"):
        assert _names(stored.runs[name])[:3] == ["cache.miss", "compile", "cache.stored"]
        assert _names(second[name]) == ["cache.hit", "specialised"]
        assert second[name]["y"] == stored.runs[name]["y"]
    assert _names(second["zeros.onnx"])[:2] == ["cache.miss", "compile"]
    assert second["zeros.onnx"]["y"] == np.zeros((4, 96)).tolist()


def test_an_entry_holds_no_weights(stored: Stored) -> None:
    """They come from the model's file again."""
    sizes = [e.stat().st_size for e in stored.folder.rglob("*.xrt")]
    assert len(sizes) >= 2
    assert max(sizes) < 2 * 96 * 96 * 4


def test_a_saved_model_is_loaded_without_compiling(stored: Stored, tmp_path: Path) -> None:
    """One file, an empty cache, the same bits."""
    loaded = _process(tmp_path / "empty", stored.model.with_suffix(".xrt"))["m.xrt"]
    assert "saved.loaded" in _names(loaded)
    assert "compile" not in _names(loaded)
    assert loaded["y"] == stored.runs["m.onnx"]["y"]


def test_other_flags_of_xla_are_a_miss(stored: Stored) -> None:
    """Some of them change numbers, so what was compiled under others is compiled again."""
    other = _process(stored.folder, stored.model, XLA_FLAGS="--xla_cpu_enable_fast_math=false")["m.onnx"]
    assert _names(other)[:3] == ["cache.miss", "compile", "cache.stored"]
    np.testing.assert_allclose(other["y"], stored.runs["m.onnx"]["y"], rtol=1e-5, atol=1e-5)


@pytest.fixture
def in_process(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, which modules of this process use, as if each were a process of its own."""
    shutil.copytree(stored.folder, tmp_path / "cache")
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_all()
    return tmp_path / "cache"


def _events_of(model: Path) -> tuple[list[str], list[str]]:
    """Names and reasons of what happens to the model in this process."""
    store.forget_all()
    m = xrt.XRTModule(model, engine="xla")
    m(np.ones((4, 96), np.float32))
    return [e.name for e in m.events], [str(e.fields.get("reason", "")) for e in m.events]


def test_a_damaged_entry_is_compiled_again(stored: Stored, in_process: Path) -> None:
    """With the reason in the event."""
    for entry in in_process.rglob("*.xrt"):
        data = bytearray(entry.read_bytes())
        data[-100] ^= 1
        entry.write_bytes(data)
    names, reasons = _events_of(stored.model)
    assert names[:3] == ["cache.miss", "compile", "cache.stored"]
    assert reasons[0] == "the file is damaged or cut off: its manifest does not fit its digest"


def test_an_entry_of_an_older_format_is_compiled_again(
    stored: Stored, in_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that an earlier version of this package wrote is no error, and is replaced."""
    shutil.rmtree(in_process)
    with monkeypatch.context() as earlier:
        earlier.setattr(blob, "_MAGIC", b"XRTXLA3\n")
        assert _events_of(stored.model)[0][:3] == ["cache.miss", "compile", "cache.stored"]
        assert _events_of(stored.model)[0][0] == "cache.hit"
    names, reasons = _events_of(stored.model)
    assert names[:3] == ["cache.miss", "compile", "cache.stored"]
    assert "not a serialised executable of this version" in reasons[0]
    assert _events_of(stored.model)[0][0] == "cache.hit"


def test_code_is_loaded_with_the_functions_weights(engine: XlaEngine) -> None:
    """`load_code` gives what `compile` gave; without the function, or with another one, it says what is wrong."""
    size = 128
    w = np.random.default_rng(0).standard_normal((size, size), np.float32)
    x, y = value("x", 2, size), value("y", 2, size)
    f = function("product", [x], [node("MatMul", [x, Value.constant(w, "w")], [y])], [y])
    compiler = engine.compiler("cpu", CompileOptions())
    made = compiler.compile(f, f.params, f.returns, f.aliases)
    ones = np.ones((2, size), np.float32)
    want = np.asarray(made.run([ones])[0])
    code = made.serialize_code()
    loaded = compiler.load_code(code, f)

    assert len(code) < w.nbytes < len(made.serialize())
    again = compiler.load(loaded.serialize()), compiler.load_code(loaded.serialize_code(), f)
    for executable in (loaded, *again):
        np.testing.assert_array_equal(np.asarray(executable.run([ones])[0]), want)
    assert loaded.serialize_code() == code
    assert "HloModule" in loaded.as_text()
    with pytest.raises(CompileError, match="1 weights that are not those of the function"):
        compiler.load(code)
    with pytest.raises(CompileError, match="not those of the function"):
        compiler.load_code(code, chain()[0])


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


def test_a_loaded_program_gives_the_same_for_every_dtype(engine: XlaEngine) -> None:
    """Of any shape, passed through and computed, with arguments that the program does not read."""
    rng = np.random.default_rng(1)
    shapes: list[tuple[int, ...]] = [(), (0, 3), (5,)]
    entries, nodes, outputs, given = [], [], [], []
    for i, (name, shape) in enumerate((d, s) for d in DTYPES for s in shapes):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        x, y, unread = (Value(f"{n}{i}", TensorType(dtype, shape)) for n in "xyu")
        op, count = ("Not", 1) if name == "bool" else ("Add", 2)
        nodes.append(Node(op, [x] * count, [y], version=1 if name == "bool" else 14))
        entries += [x, unread]
        outputs += [x, y]
        array = np.asarray(rng.standard_normal(shape) * 50).astype(dtype)
        given += [array, np.zeros_like(array)]
    made = compile_nodes(engine, entries, nodes, outputs)
    want = made.run(given)
    got = engine.compiler("cpu", CompileOptions()).load(made.serialize()).run(given)
    for g, w in zip(got, want, strict=True):
        assert isinstance(g, jax.Array)
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()
