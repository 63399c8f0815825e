"""Where sessions read large constants: in the model's files, as they were when they were mapped."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xrt_onnxruntime import weights as module
from xrt_onnxruntime.weights import Weights

import xrt_core as xrt
from xrt_core.engine.onnx_bridge import OnnxModel, onnx_model
from xrt_core.ir.file_backed import place_of

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody replace a file that is mapped")
X = np.ones((2, 64), np.float32)


def write(path: pathlib.Path, factor: float = 1.0, beside: bool = False) -> np.ndarray:
    """A product of 64 x 64 in a file; what it gives for X. The name's length moves the constant to an odd address."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) * np.float32(factor)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 64]) for n in "xy")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g" * 3, [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=beside, location=f"{path.stem}.data", size_threshold=0)
    return X @ w


def exported(m: xrt.XRTModule) -> OnnxModel:
    """The model that the library is given for the one cluster."""
    (launch,) = (n for n in m.partitioned().nodes if n.op_type == "Launch")
    return onnx_model(launch.attributes["function"], engine="onnxruntime", unaligned=True)


@pytest.mark.parametrize("beside", [False, True])
def test_a_session_reads_the_file(beside: bool, tmp_path: pathlib.Path) -> None:
    """A constant of a file is named by its place there, and is not given in memory."""
    wanted = write(tmp_path / "m.onnx", beside=beside)
    m = xrt.XRTModule(tmp_path / "m.onnx", engine="onnxruntime", prune=False, cache="off")
    np.testing.assert_allclose(m(X), wanted, rtol=1e-5)
    made = Weights(exported(m))
    assert not made.in_memory
    assert made.folder == str(tmp_path.resolve())
    (stored,) = made.exported.model.graph.initializer
    entries = {e.key: e.value for e in stored.external_data}
    assert entries["location"] == ("m.data" if beside else "m.onnx")
    assert entries["length"] == str(64 * 64 * 4)


def test_a_file_that_was_replaced_is_not_read(tmp_path: pathlib.Path) -> None:
    """What was mapped is the model, whatever its name leads to by now."""
    wanted = write(tmp_path / "m.onnx")
    m = xrt.XRTModule(tmp_path / "m.onnx", engine="onnxruntime", prune=False, cache="off")
    write(tmp_path / "other.onnx", factor=2.0)
    (tmp_path / "other.onnx").replace(tmp_path / "m.onnx")
    np.testing.assert_allclose(m(X), wanted, rtol=1e-5)
    made = Weights(exported(m))
    assert made.folder is None
    assert list(made.in_memory) == ["w"]


def test_a_file_that_is_replaced_meanwhile(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is made once more, of what was mapped."""
    wanted = write(tmp_path / "m.onnx")
    m = xrt.XRTModule(tmp_path / "m.onnx", engine="onnxruntime", prune=False, cache="off")
    write(tmp_path / "other.onnx", factor=2.0)
    name_files = module.Weights._name_files

    def and_replace(self: Weights, model: OnnxModel) -> None:
        name_files(self, model)
        (tmp_path / "other.onnx").replace(tmp_path / "m.onnx")

    monkeypatch.setattr(module.Weights, "_name_files", and_replace)
    np.testing.assert_allclose(m(X), wanted, rtol=1e-5)


def test_a_module_is_saved_after_its_model_is_gone(tmp_path: pathlib.Path) -> None:
    """What a session had read in the file is still mapped."""
    wanted = write(tmp_path / "m.onnx")
    m = xrt.XRTModule(tmp_path / "m.onnx", engine="onnxruntime", prune=False, cache="off")
    m(X)
    (tmp_path / "m.onnx").unlink()
    m.save(tmp_path / "saved.xrt")
    np.testing.assert_allclose(xrt.XRTModule.load(tmp_path / "saved.xrt")(X), wanted, rtol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are let go of by madvise")
def test_pages_that_were_let_go_are_read_again(tmp_path: pathlib.Path) -> None:
    """Letting go of a mapped array changes nothing in it."""
    from xrt_core.frontends.onnx_file import map_file
    from xrt_core.ir.file_backed import let_go

    data = np.arange(1 << 16, dtype=np.uint32)
    (tmp_path / "data").write_bytes(b"odd" + data.tobytes())
    array = np.frombuffer(map_file(tmp_path / "data"), np.uint8)[3:].view(np.uint32)
    assert place_of(array) is not None
    assert array.sum(dtype=np.int64) == data.sum(dtype=np.int64)
    let_go(array)
    let_go(data)
    np.testing.assert_array_equal(array, data)
