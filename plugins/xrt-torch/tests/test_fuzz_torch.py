"""Random programs of torch against eager (`scripts/fuzz_torch.py`): a sample, and that what differs is found."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SCRIPT = pathlib.Path(__file__).parents[3] / "scripts" / "fuzz_torch.py"


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("how", ["--background", "--export"])
def test_a_sample_has_no_findings(how: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--programs", "8", how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no findings" in done.stdout


def test_every_expression_is_written_and_the_numbers_are_stable(fuzz: Any) -> None:
    """Templates fill in without an error, and a program of a number is the same again."""
    for templates in fuzz.TEMPLATES.values():
        for text in templates:
            compile(text.format(x="x", y="y", w="w", d=0, e=0, p="0", k="", j="j"), "<template>", "exec")
    first, again = fuzz.program(7), fuzz.program(7)
    assert first.text == again.text
    assert all(torch.equal(a, b) for a, b in zip(first.inputs, again.inputs, strict=True))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("return x * 2.1, y, x", "results[0]: differs by up to"),
        ("return x * 2, y.float(), x", "results[1]: torch.float32"),
        ("return x * 2, y, x.clone()", "shared"),
        ("x.add_(1); return (x - 1) * 2, y, x - 1", "written[0]"),
        ("return (x * 2).detach() + 0 * x, y, x", "gradients[0]"),
        ("return [x * 2, y, x]", "instead of"),
        ("torch.rand(1); return x * 2, y, x", "another state of the random numbers"),
    ],
)
def test_what_differs_is_told(fuzz: Any, wrong: str, told: str) -> None:
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3])]
    right = fuzz.Program(0, "def f(x, y):\n    return x * 2, y, x\n", inputs, trains=True, dynamic=False)
    other = fuzz.Program(0, f"def f(x, y):\n    {wrong}\n", inputs, trains=True, dynamic=False)
    expected = fuzz.call(right.function(), right, 0)
    assert fuzz.call(right.function(), right, 0).difference(expected, 1e-3) == ""
    assert told in fuzz.call(other.function(), other, 0).difference(expected, 1e-3)
