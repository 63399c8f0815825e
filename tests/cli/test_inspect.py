"""`xrt inspect` and `XRTModule.clusters`: what engines make of a cluster, and errors that say what there is."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner, Result

import xrt_core as xrt
from xrt_core.cache import store
from xrt_core.cli.app import application
from xrt_core.engine import engines

SHOWN = {
    "xla": {
        "stablehlo": "func.func public @main",
        "hlo": "HloModule",
        "hlo-optimized": "is_scheduled=true",
        "llvm": "define ",
        "llvm-optimized": "define ",
        "asm": "Disassembly of section",
    },
    "onnxruntime": {"onnx": "MatMul", "onnx-optimized": "MatMul"},
    "openvino": {"onnx": "MatMul", "ir": '<net name="', "runtime": "FullyConnected", "execution": "FullyConnected"},
    "toy": {"python": "def matmul", "launches": "MatMul"},
}
"""Engine -> stage -> what its text has."""


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """Tanh(Relu(x @ w))."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, 8]) for n in "xy")
    w = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "product"), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]  # fmt: skip
    path = tmp_path / "model.onnx"
    graph = helper.make_graph(nodes, "small", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(application(), ["inspect", *map(str, arguments), "--option", "prune=False"])


@pytest.mark.parametrize("engine", SHOWN)
def test_stages(engine: str, model: pathlib.Path) -> None:
    """Every engine's own stages are listed, and have the text that they name, beside the nodes that it is given."""
    if engine not in engines.names():
        pytest.skip(f"{engine} is not installed")
    listed = inspect(model, "-e", engine)
    assert listed.exit_code == 0, listed.output
    m = xrt.XRTModule(model, engine=engine, guard=False, prune=False)
    (cluster,) = m.clusters({"x": np.zeros((8, 8), np.float32)})
    assert list(cluster.stages()) == ["function", *SHOWN[engine]]
    assert "Relu" in cluster.as_text("function")
    for stage, part in SHOWN[engine].items():
        assert f"--stage {stage} " in listed.stdout
        if stage == "asm" and not (shutil.which("objdump") or shutil.which("llvm-objdump")):
            with pytest.raises(xrt.UnsupportedError, match="apt install binutils"):
                cluster.as_text(stage)
            continue
        text = cluster.as_text(stage)
        assert part in text or (stage.startswith("llvm") and "since JAX 0.12 XLA dumps no LLVM IR" in text), stage
    if engine != "xla" or shutil.which("objdump"):
        assert list(SHOWN[engine].values())[-1] in cluster.as_text()  # the last stage is the default


def test_the_command(model: pathlib.Path) -> None:
    """The text of a cluster by number or name, and what an option changes in it."""
    pytest.importorskip("onnxruntime")
    given = (model, "-e", "onnxruntime")
    assert "MatMul" in inspect(*given, "--cluster", "0", "--stage", "function").stdout
    by_name = inspect(*given, "--cluster", "onnxruntime_0", "--stage", "onnx").stdout
    assert "Relu" in by_name
    changed = inspect(*given, "--cluster", "0", "--stage", "onnx", "--diff", "use_fp16=True").stdout
    assert "+++ use_fp16=True" in changed
    assert "float16" in changed
    assert "threads=1 changes nothing here" in inspect(*given, "--cluster", "0", "--diff", "threads=1").stdout
    assert "stage function" in inspect(model, "-e", "auto").stdout
    assert "every node runs on the host" in inspect(model, "-e", "host").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "7"), "there is no such cluster for these inputs; there is: 0 (onnxruntime_0)"),
        (("--cluster", "0", "--stage", "onnyx"), "it has function, onnx, onnx-optimized; did you mean 'onnx'?"),
        (("--diff", "threads=1"), "name it with --cluster"),
    ],
)
def test_what_is_not_there(model: pathlib.Path, arguments: tuple[str, ...], message: str) -> None:
    """The error names what there is."""
    pytest.importorskip("onnxruntime")
    done = inspect(model, "-e", "onnxruntime", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_executables(model: pathlib.Path) -> None:
    """A module's executables are what engines run: none before the first call, nor where the host runs all; with the
    guard the engine that was chosen; and each says where it came from, and that it was compiled again for a text."""
    pytest.importorskip("xrt_openvino._toolkit")  # not openvino itself: imported alone it sends telemetry
    x = np.zeros((8, 8), np.float32)
    keywords = {"engine": "openvino", "prune": False}
    m = xrt.XRTModule(model, guard=False, **keywords)
    assert m.executables == ()
    m(x)
    (executable,) = m.executables
    assert executable.origin == "compiled in this process"
    assert "FullyConnected" in executable.as_text("runtime")
    event = m.events.recent("inspect.compiled")[-1]
    assert event.fields["executable"] == "compiled in this process"

    on_host = xrt.XRTModule(model, engine="host")
    on_host(x)
    assert on_host.executables == ()

    guard = {"guard": True, "guard_async": False, "guard_sandbox": False, "guard_tune": False}
    with xrt.XRTModule(model, **keywords, **guard) as guarded:
        guarded(x)
        assert [e.engine for e in guarded.executables] == ["openvino"], guarded.report().as_text()


def test_an_executable_from_the_cache(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What was loaded from the disk is compiled again for its text, and both the executable and the command say so."""
    pytest.importorskip("xrt_openvino._toolkit")  # not openvino itself: imported alone it sends telemetry
    store.forget_all()
    x = np.zeros((8, 8), np.float32)
    keywords = {"engine": "openvino", "guard": False, "prune": False, "cache_dir": str(tmp_path / "cache")}
    xrt.XRTModule(model, **keywords)(x)
    store.forget_all()
    m = xrt.XRTModule(model, **keywords)
    assert m.clusters({"x": x})[0].origin == "in the cache on disk, not loaded"
    done = inspect(model, "-e", "openvino", "--cluster", "0", "--stage", "ir", "-o", f"cache_dir={tmp_path / 'cache'}")
    assert done.stdout.startswith("<?xml")
    said = " ".join(done.stderr.split())
    assert "compiled again for this text: the executable of openvino_0 is in the cache on disk, not loaded" in said
    m(x)
    (executable,) = m.executables
    assert executable.origin == "loaded from the cache on disk"
    assert "FullyConnected" in executable.as_text()
