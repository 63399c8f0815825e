"""`xrt compile`: a file that another process runs without compiling, also for a device that is not here."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner, Result

from xrt_core.cli.app import application

Xrt = Callable[..., Result]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """y = Relu(x @ w), with x: float32[batch, 3]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    w = helper.make_tensor("w", TensorProto.FLOAT, [3, 4], np.arange(12, dtype=np.float32) - 5)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], "product"), helper.make_node("Relu", ["p"], ["y"], "act")]
    path = tmp_path / "model.onnx"
    graph = helper.make_graph(nodes, "small", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture
def xrt(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Xrt:
    """Runs the command with these arguments, with a cache of its own."""
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path / "cache"))
    return lambda *arguments: CliRunner().invoke(application(), [str(a) for a in arguments])


@pytest.mark.slow
def test_what_is_compiled_here_runs_in_another_process(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another process runs the file without a compilation, and gets what the host gets."""
    pytest.importorskip("xrt_onnxruntime", reason="the engine of this test")
    target = tmp_path / "model.xrt"
    done = xrt("compile", model, "-e", "onnxruntime", "--output", target, "--shape", "batch=2", "-o", "prune=0")
    assert done.exit_code == 0, done.output
    assert "2 nodes, clusters: 1 on onnxruntime" in done.stdout
    assert f"wrote {target}" in done.stdout

    code = f"""
        import numpy as np, xrt_core as xrt
        from xrt_onnxruntime.compiler import OnnxRuntimeCompiler
        def fail(*args): raise SystemExit("it was compiled")
        OnnxRuntimeCompiler.compile = fail
        m = xrt.XRTModule.load({str(target)!r}, cache="off")
        print(m(np.ones((2, 3), np.float32)).tolist(), m.explain().node_share)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == f"{[[0.0, 0.0, 3.0, 6.0]] * 2} 1.0", run.stderr

    again = xrt("run", target, "--shape", "batch=2")
    assert again.exit_code == 0, again.output
    assert "2 nodes, clusters: 1 on onnxruntime; 100% of nodes" in again.stdout
    refused = xrt("run", target, "-e", "host")
    assert refused.exit_code == 2
    assert "no such engine among those chosen" in refused.output
    misfit = xrt("run", target, "--shape", "batch=2", "-o", "threads=1")
    assert misfit.exit_code == 2
    assert "--recompile" in misfit.output
    for name in ("run", "partition"):
        anew = xrt(name, target, "--shape", "batch=2", "-o", "threads=1", "--recompile")
        assert anew.exit_code == 0, anew.output
        assert "onnxruntime" in anew.stdout
    plain = xrt("run", model, "--recompile")
    assert plain.exit_code == 2
    assert "--recompile is for what `xrt compile` wrote" in " ".join(plain.output.split())


def test_for_a_gpu_that_is_not_here(xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """TensorRT builds for a named compute capability; the file says for which."""
    toolkit = pytest.importorskip("xrt_tensorrt._toolkit", reason="the engine of this test")
    try:
        toolkit.toolkit()
    except toolkit.ToolkitError as e:
        pytest.skip(str(e))
    target = tmp_path / "model.xrt"
    arguments = ("compile", model, "-e", "tensorrt", "--output", target, "-o", "prune=0")
    done = xrt(*arguments, "--target", "sm_86")

    assert done.exit_code == 0, done.output
    assert f"wrote {target} for sm_86" in done.stdout
    assert b"sm_86" in target.read_bytes()
    refused = xrt(*arguments, "--target", "sm_90")
    assert refused.exit_code == 2
    assert "does not build for sm_90; it builds for" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--target", "sm_89"), "no engine is named|none is named"),
        (("--target", "sm_89", "-e", "xla"), "compiles for the devices that are here, not for 'sm_89'"),
        (("--target", "a", "-o", "target=b"), "give one of them"),
    ],
)
def test_targets_that_make_no_sense(
    xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path, arguments: tuple[str, ...], reason: str
) -> None:
    """Nothing is written."""
    import re

    pytest.importorskip("xrt_xla", reason="the engine of this test")
    done = xrt("compile", model, "--output", tmp_path / "model.xrt", *arguments)
    assert done.exit_code == 2
    assert re.search(reason, done.stderr), done.stderr
    assert not (tmp_path / "model.xrt").exists()


def test_a_cluster_that_fails_to_compile(
    xrt: Xrt, model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error with the engine's words, unless --partial leaves the cluster to the host."""
    compiler = pytest.importorskip("xrt_onnxruntime.compiler", reason="the engine of this test")
    from xrt_core.errors import CompileError

    def fail(*args: object) -> None:
        raise CompileError("no room left")

    monkeypatch.setattr(compiler.OnnxRuntimeCompiler, "compile", fail)
    target = tmp_path / "model.xrt"
    arguments = ("compile", model, "-e", "onnxruntime", "--output", target, "-o", "prune=0", "-o", "cache=off")
    done = xrt(*arguments)
    assert done.exit_code == 2
    assert "no room left" in done.stderr
    assert not target.exists()
    done = xrt(*arguments, "--partial")
    assert done.exit_code == 0, done.output
    assert "not compiled, the host runs it: " in done.stdout
    assert target.exists()
