"""`scripts/gpu`, rehearsed over stand-ins: what is there, and a model on every engine for callers of every library."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu"


@pytest.mark.slow
def test_it_runs_without_a_gpu(tmp_path: pathlib.Path) -> None:
    """Its steps run each in a process, leave text and JSON, and a summary that says that they succeeded."""
    environment = {**os.environ, "XRT_DISABLE_PLUGINS": "tensorrt,openvino,onnxruntime"}
    command = [sys.executable, str(SCRIPT), "--rehearse", "1", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "02-smoke.txt").read_text()
    first, second = json.loads((tmp_path / "summary.json").read_text())
    assert (first["name"], first["exit"], first["found"]["round trip"]) == ("what", 0, "numpy -> cupy -> numpy")
    assert (second["name"], second["exit"]) == ("smoke", 0)
    assert set(second["found"].values()) == {"ok"}
    assert {"host, cupy", "xla, numpy", "toy, cupy"} <= second["found"].keys()


def test_a_step_that_takes_too_long_is_ended(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is named, what it wrote until then is kept."""
    import importlib.machinery
    import importlib.util

    loader = importlib.machinery.SourceFileLoader("xrt_gpu_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("xrt_gpu_script", loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_steps.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    outcome = script.run_step(3, "tests", 1.0, tmp_path, dict(os.environ))
    assert (outcome["exit"], outcome["says"]) == ("killed after 1 s", "begun")
