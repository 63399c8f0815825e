"""Mutated models and files, on the host and on every engine through the guard (`scripts/fuzz_models.py`): a sample."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest

from tests.architecture.source import ROOT
from tests.frontends.onnx_models import N, model
from xrt_core.errors import InternalError
from xrt_core.module import XRTModule
from xrt_core.testing import fuzz, mutations

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "scripts" / "fuzz_models.py"


X = np.arange(6, dtype=np.float32).reshape(2, 3)
BASE = mutations.Base("relu", model([N("Relu", ["x"], ["y"], name="n")]), {"x": X})


def _fuzz(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=9000, check=False)


def test_a_sample_has_no_findings(tmp_path: pathlib.Path) -> None:
    """No process ends, no raw error, and no result that differs from the host's, in fifty cases."""
    done = _fuzz(tmp_path / "found", "--models", "30", "--files", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 models, of which" in done.stdout


@pytest.mark.nightly
def test_ten_thousand_cases_have_no_findings(tmp_path: pathlib.Path) -> None:
    """As above, half an hour of another seed."""
    done = _fuzz(tmp_path / "found", "--models", "8000", "--files", "2000", "--seed", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_cases_are_made_of_seed_and_number() -> None:
    """The same model and arguments for the same number, others for another number or seed."""
    cases = [mutations.model_case([BASE], 3, i) for i in range(60)]
    assert all(mutations.model_case([BASE], 3, i).content == c.content for i, c in enumerate(cases))
    assert len({c.content for c in cases}) > 40
    assert {c.content for c in cases} != {mutations.model_case([BASE], 4, i).content for i in range(60)}


def test_what_surprises_is_a_finding(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions that are no XRTErrors, InternalErrors, and other types, errors or numbers than the host's."""
    fuzz.store(mutations.Case("relu", BASE.model.SerializeToString(), [{"x": X}]), tmp_path / "case")
    assert fuzz.examine(tmp_path / "case", [], sandbox=False).findings == []

    def raises(error: Exception) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            raise error

        return run

    for error in (ValueError("x"), InternalError("x")):
        with monkeypatch.context() as patch:
            patch.setattr(XRTModule, "run", raises(error))
            (found,) = fuzz.examine(tmp_path / "case", [], sandbox=False).findings
            assert type(error).__name__ in found
    assert list(fuzz._differences({"y": X}, {"y": X}, True)) == []
    assert "float64" in next(fuzz._differences({"y": X.astype(np.float64)}, {"y": X}, True))
    assert "differs: at [5]" in next(fuzz._differences({"y": np.where(X == 5, np.nan, X)}, {"y": X}, True))


def test_results_that_leave_no_memory_for_others_are_not_compared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on the host alone: an engine that has no memory for its own beside them has done nothing wrong."""
    called: list[str] = []
    monkeypatch.setattr(fuzz, "_on_engine", lambda told, engine, *rest: called.append(engine))
    fuzz.store(mutations.Case("relu", BASE.model.SerializeToString(), [{"x": X}, {"x": X}]), tmp_path / "case")
    for most, wanted in ((2 * X.nbytes, ["acme"]), (2 * X.nbytes - 1, [])):
        monkeypatch.setattr(fuzz, "_COMPARED", most)
        called.clear()
        told = fuzz.examine(tmp_path / "case", ["acme"], sandbox=False)
        assert (told.ran["host"], called) == (2, wanted)


def test_extremes_are_run_and_not_compared(tmp_path: pathlib.Path) -> None:
    """Numbers whose squares overflow or vanish; not casts of what is not finite, which have one rule."""
    (tmp_path / "m.onnx").write_bytes(BASE.model.SerializeToString())
    judge = fuzz._Judge(tmp_path / "m.onnx")
    assert judge.judges({"x": np.array([0, 1, np.nan, np.inf], np.float32)}, None)
    assert not judge.judges({"x": np.float32([1e30])}, None)
    assert not judge.judges({"x": np.float32([1e-40])}, None)
    cast = model([N("Cast", ["x"], ["y"], to=onnx.TensorProto.INT32)])
    (tmp_path / "c.onnx").write_bytes(cast.SerializeToString())
    assert fuzz._Judge(tmp_path / "c.onnx").judges({"x": np.float32([np.nan])}, None)
    power = model([N("Pow", ["x", "e"], ["y"])], ["x", "e"])
    (tmp_path / "p.onnx").write_bytes(power.SerializeToString())
    assert not fuzz._Judge(tmp_path / "p.onnx").judges({"x": np.array([2**31]), "e": np.float32([4])}, None)
    softplus = model([N("Exp", ["x"], ["e"]), N("Log", ["e"], ["y"])])
    (tmp_path / "s.onnx").write_bytes(softplus.SerializeToString())
    judge, x = fuzz._Judge(tmp_path / "s.onnx"), {"x": np.float32([1000])}
    assert not judge.judges(x, {"y": np.float32([np.inf])})  # which a library may know better
    assert judge.judges(x, {"y": np.float32([1000])})


def test_a_worker_that_ends_is_told(tmp_path: pathlib.Path) -> None:
    """And the next case has another one."""
    worker = fuzz._Worker(tmp_path, 0, [])
    try:
        fuzz.store(mutations.Case("relu", BASE.model.SerializeToString(), [{"x": X}]), tmp_path / "good")
        assert worker.run("replay", str(tmp_path / "good")).findings == []
        worker._process.kill()
        worker._process.join()
        assert worker.run("replay", str(tmp_path / "good")) == "ends the process with status -9"
        assert worker.run("replay", str(tmp_path / "good")).ran["host"] == 1
    finally:
        worker.end()
