"""Who gets the shim for `import onnxruntime`, and who the genuine library; the commands."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from behaviours import affine

onnxruntime = pytest.importorskip("onnxruntime")

import xrt_ort  # noqa: E402

PROGRAM = """
import sys
import numpy as np
import onnxruntime
from onnxruntime import InferenceSession, get_available_providers
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession as Inner
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
import onnxruntime.tools
import onnxruntime.quantization.calibrate as calibrate
import xrt_ort
from xrt_onnxruntime import _toolkit
genuine = type(InferenceSession).__mro__ and InferenceSession.__mro__[1]
assert InferenceSession is xrt_ort.InferenceSession is Inner is onnxruntime.InferenceSession
assert _toolkit.ort.InferenceSession is genuine, "XRT's own plugin has the shim"
assert calibrate.onnxruntime.InferenceSession is genuine, "the library's tools have the shim"
assert "XRTExecutionProvider" in get_available_providers()
assert "SessionOptions" in dir(onnxruntime) and onnxruntime.__version__ and onnxruntime.__file__
try:
    onnxruntime.no_such_name
except AttributeError as e:
    assert "no_such_name" in str(e)
session = InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print("y", session.run(["y"], {"x": np.zeros((1, 3), np.float32)})[0].tolist(), sys.argv[1:], __name__)
"""


def run(*arguments: Any, cwd: pathlib.Path) -> Any:
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_a_program_runs_unmodified(tmp_path: pathlib.Path) -> None:
    """`python -m xrt_ort program.py` gives the program XRT's sessions, and XRT's plugins and the library's own tools
    the library; arguments reach the program, and the report tells of the session."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "m.onnx").write_bytes(affine())
    found = run("-m", "xrt_ort", "--report", "--json", "r.json", "program.py", "m.onnx", "--report", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "y [[0.5, -8.0]] ['m.onnx', '--report'] __main__"
    assert "m.onnx: 0 of 1 calls on engines" in found.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert (row["model"], row["calls"], row["offloaded"]) == ("m.onnx", 1, 0)


def test_the_command_runs_packages(tmp_path: pathlib.Path) -> None:
    """`xrt ort -m package` does the same; bad options and programs are said."""
    (tmp_path / "client.py").write_text(PROGRAM)
    (tmp_path / "m.onnx").write_bytes(affine())
    code = "import sys; from xrt_core.cli.app import main; sys.argv[0] = 'xrt'; main()"
    found = run("-c", code, "ort", "--option", "minimum_nodes=2", "-m", "client", "m.onnx", "-m", cwd=tmp_path)
    if "No such command" in found.stderr:
        pytest.skip("the package is not installed, so that `xrt` does not know its command")
    assert found.returncode == 0, found.stderr
    assert "['m.onnx', '-m'] __main__" in found.stdout


@pytest.mark.parametrize("arguments", [["--option", "nothing=1", "p.py"], ["--option", "x", "p.py"], []])
def test_bad_arguments_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option, one without a value, and no program are usage errors."""
    from xrt_ort.command import run_program

    with pytest.raises(SystemExit):
        run_program(arguments, "xrt ort")
    assert "usage" in capsys.readouterr().err


def test_patched_takes_itself_back() -> None:
    """Within `patched()` the name gives the shim, also nested and for modules of it; afterwards the library."""
    with xrt_ort.patched(), xrt_ort.patched():
        import onnxruntime as inside
        import onnxruntime.datasets

        assert inside.InferenceSession is xrt_ort.InferenceSession
        assert onnxruntime.datasets is not None
        with pytest.raises(ImportError):
            from onnxruntime import nothing_of_that_name  # noqa: F401
    import onnxruntime as outside

    assert sys.modules["onnxruntime"] is outside
    assert outside.InferenceSession is not xrt_ort.InferenceSession
    assert outside.InferenceSession is xrt_ort.InferenceSession.__mro__[1]
