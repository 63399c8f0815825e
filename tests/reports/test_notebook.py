"""What a real kernel shows of a module, an explanation, a graph and a report."""

from __future__ import annotations

import os

import pytest

nbclient = pytest.importorskip("nbclient", reason="it runs notebooks")
nbformat = pytest.importorskip("nbformat", reason="it makes notebooks")
pytest.importorskip("ipykernel", reason="the kernel of notebooks")

CELLS = (
    """
import numpy as np
import xrt_core as xrt

m = xrt.XRTModule(lambda x: xrt.ops.Relu(x) + 1.0, engine="host")
m(np.ones(3, np.float32))
m
""",
    "m.explain()",
    "m.graph",
    "m.report()",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that talk to the kernel
def test_a_notebook_shows_pictures() -> None:
    """The first two cells show the partition, the third the graph's text, the last the guard's report; all as HTML
    beside the plain text."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute(env=environment)
    shown = [c.outputs[-1].data for c in book.cells]
    assert all("text/plain" in data for data in shown)
    assert ["<svg" in data["text/html"] for data in shown] == [True, True, False, False]
    assert "Relu" in shown[2]["text/html"]
