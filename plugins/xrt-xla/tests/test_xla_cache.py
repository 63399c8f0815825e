"""XLA's executables in XRT's cache on disk: loaded by another process, with the model's weights in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xrt_xla import XlaEngine

from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import CompileError
from xrt_core.ir.graph import Value
from xrt_core.testing.functions import chain, function, node, value

_CODE = """
import json, sys
import numpy as np
from xrt_core.module import XRTModule
m = XRTModule(sys.argv[1], engine="xla")
y = m(np.linspace(-1, 1, 4 * 96, dtype=np.float32).reshape(4, 96))
events = [(e.name, e.fields.get("reason", "")) for e in m.events]
print(json.dumps({"events": events, "y": np.asarray(y).tolist()}))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers whose weights are too large to become part of the program."""
    rng = np.random.default_rng(0)
    w, v = (numpy_helper.from_array(rng.standard_normal((96, 96), np.float32), n) for n in "wv")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 96]) for n in "xy")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "v"], ["y"], transB=1),
    ]
    graph = helper.make_graph(nodes, "two_layers", [x], [y], [w, v])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def process(model: Path, folder: Path) -> dict[str, Any]:
    """What a process of its own does with the model: its events and its result."""
    environment = {**os.environ, "XRT_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(model)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_second_process_loads_what_the_first_compiled(model: Path, tmp_path: Path) -> None:
    """No compilation, equal numbers to the last bit, and an entry without the weights; other weights are a miss."""
    first, second = (process(model, tmp_path / "cache") for _ in range(2))
    names = [[name for name, _ in run["events"]] for run in (first, second)]

    assert names[0] == ["cache.miss", "compile", "cache.stored", "specialised"]
    assert names[1] == ["cache.hit", "specialised"]
    assert first["y"] == second["y"]
    (entry,) = (tmp_path / "cache").rglob("*.xrt")
    assert entry.stat().st_size < 2 * 96 * 96 * 4

    proto = onnx.load(model)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((96, 96), np.float32), "w"))
    onnx.save(proto, model)
    third = process(model, tmp_path / "cache")
    assert third["events"][0][0] == "cache.miss"
    assert third["y"] == np.zeros((4, 96)).tolist()


def test_a_damaged_entry_is_compiled_again(model: Path, tmp_path: Path) -> None:
    """With the reason in the event, and the right result."""
    first = process(model, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").rglob("*.xrt")
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes(data)
    second = process(model, tmp_path / "cache")

    assert second["events"][0] == ["cache.miss", "'executable' in it is damaged: its digest does not fit"]
    assert second["y"] == first["y"]


def test_code_is_loaded_with_the_functions_weights(engine: XlaEngine) -> None:
    """`load_code` gives what `compile` gave; without the function, or with another one, it says what is wrong."""
    size = 128
    w = np.random.default_rng(0).standard_normal((size, size), np.float32)
    f = _product(w)
    compiler = engine.compiler("cpu", CompileOptions())
    made = compiler.compile(f, f.params, f.returns, f.aliases)
    x = np.ones((2, size), np.float32)
    want = np.asarray(made.run([x])[0])
    code = made.serialize_code()
    loaded = compiler.load_code(code, f)

    assert len(code) < w.nbytes < len(made.serialize())
    np.testing.assert_array_equal(np.asarray(loaded.run([x])[0]), want)
    np.testing.assert_array_equal(np.asarray(compiler.load(loaded.serialize()).run([x])[0]), want)
    np.testing.assert_array_equal(np.asarray(compiler.load_code(loaded.serialize_code(), f).run([x])[0]), want)
    with pytest.raises(CompileError, match="1 weights that are not those of the function"):
        compiler.load(code)
    with pytest.raises(CompileError, match="not those of the function"):
        compiler.load_code(code, chain()[0])


def _product(w: np.ndarray) -> Any:
    """y = x @ w."""
    x, y = value("x", 2, len(w)), value("y", 2, len(w))
    return function("product", [x], [node("MatMul", [x, Value.constant(w, "w")], [y])], [y])
