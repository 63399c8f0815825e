"""Random nodes for type inference, operator by operator, in a child process (`scripts/fuzz_inference.py`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

SCRIPT = ROOT / "scripts" / "fuzz_inference.py"


def _fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, check=False)


@pytest.mark.slow
def test_inference_survives_random_nodes_of_operators_that_crashed_it() -> None:
    """Split and Einsum, whose inference in onnx could end or hang the process, give types or ShapeErrors."""
    done = _fuzz("--tries", "200", "Split", "Einsum", "STFT", "Range")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_inference_survives_random_nodes_of_every_operator() -> None:
    """No operator's inference ends the process, takes longer than its limit, or raises anything but ShapeError."""
    done = _fuzz("--tries", "300")
    assert done.returncode == 0, done.stdout + done.stderr
