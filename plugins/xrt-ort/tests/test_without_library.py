"""The API where onnxruntime is not installed: XRT's own implementation behaves as the library."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from behaviours import BEHAVIOURS, outcome
from library_tests import COVERED, counts

onnxruntime = pytest.importorskip("onnxruntime")

DIFFERENT = {
    "names_of_the_module": "SparseTensor needs the library",
    "feed_of_swapped_bytes": "the library reads other numbers without a word; XRT swaps them",
}
"""Behaviours that are not the library's, with the reason."""

CHILD = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import xrt_ort
from behaviours import BEHAVIOURS, outcome
from library_tests import global_threads
found = {name: outcome(function, xrt_ort) for name, (function, _) in BEHAVIOURS.items()}
del sys.meta_path[0]
with xrt_ort.patched():
    import onnxruntime as ort
    import onnxruntime.backend
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
    assert onnxruntime.backend.prepare(__import__("behaviours").affine())
    assert ort.InferenceSession is xrt_ort.InferenceSession and ort.capi.onnxruntime_pybind11_state
    try:
        ort.InferenceSession(__import__("behaviours").affine()).run(["nothing"], {"x": 1})
    except (InvalidArgument, ValueError):
        pass
assert "onnxruntime" not in sys.modules
assert [str(r) for r in xrt_ort.report()] == [str(r) for r in xrt_ort.report()] and xrt_ort.wait(60)
assert global_threads(xrt_ort) == ([[4.5, -1.0], [4.5, 8.0]], "RuntimeError")
print(json.dumps(found))
"""


def test_behaves_as_the_library_without_it() -> None:
    """In a process where onnxruntime cannot be imported, results, classes of exceptions and facts in messages are
    those of the library, but for the rows that say why not."""
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "XRT_GUARD": "0"}
    child = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout.splitlines()[-1])
    wrong = []
    for name, (function, facts) in BEHAVIOURS.items():
        expected = json.loads(json.dumps(outcome(function, onnxruntime)[0]))
        got, message = found[name]
        if (got == expected and all(f in message for f in facts)) is (name in DIFFERENT):
            wrong.append((name, expected, got, message))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["onnxruntime", "xrt_ort"])
def test_global_threads_of_the_library(name: str) -> None:
    """Sessions that share the threads of the process, with the library, as without it."""
    here = pathlib.Path(__file__).parent
    code = f"import {name}; from library_tests import global_threads; print(global_threads({name}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert child.stdout.splitlines()[-1] == "([[4.5, -1.0], [4.5, 8.0]], 'RuntimeError')", child.stderr[-3000:]


def test_counts_of_the_docs() -> None:
    """docs/onnxruntime.md says how many tests of the library rows stand for, and each row is there."""
    assert set(COVERED) - set(BEHAVIOURS) == {"global_threads"}
    page = (pathlib.Path(__file__).parents[3] / "docs" / "onnxruntime.md").read_text()
    passed, left_out = counts()
    assert f"{passed} of {passed + left_out}" in " ".join(page.split())
