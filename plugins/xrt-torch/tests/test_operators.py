"""torch's own operator tests through the backend: no wrong value, no crash, and as many on XRT as the page says."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("expecttest")

from xrt_torch import conformance, special_functions  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "torch-operators.md"
SAMPLE = (
    "add", "atan2", "cummax", "diagonal_scatter", "digamma", "fft.rfft", "index_reduce.mean", "linalg.solve",
    "linalg.vector_norm", "logcumsumexp", "median", "nn.functional.adaptive_max_pool2d", "nn.functional.batch_norm",
    "nn.functional.dropout", "nn.functional.max_pool3d", "nn.functional.pad.replicate", "nn.functional.pdist",
    "polygamma.polygamma_n_2", "repeat_interleave", "scatter_reduce.mean", "searchsorted", "sort", "topk",
)  # fmt: skip
"""One of each kind; the page is made of all."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows by operator, of a process of their own: torch's test helpers change the one that imports them."""
    log = tmp_path_factory.mktemp("operators") / "log.jsonl"
    conformance.run([*SAMPLE, "nonzero"], ["float32", "int64", "float16"], log, samples=2)
    rows = conformance.read(log)
    return {name: [r for r in rows if r["name"] == name] for name in (*SAMPLE, "nonzero")}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_operators(name: str, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """Forward and backward, float32 and integers; XRT runs what the page says that it runs."""
    rows = outcomes[name]
    assert sum(r["samples"] for r in rows)
    assert not [f for r in rows for f in r["fallen"]]
    assert conformance.kind_of(rows) == "xrt", rows


def test_an_operator_that_data_decide_is_not_captured(outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """The shape of the result depends on data: a graph break of TorchDynamo, and no failure."""
    rows = outcomes["nonzero"]
    assert all(r["uncaptured"] for r in rows)
    assert not [f for r in rows for f in r["fallen"]]
    assert conformance.kind_of(rows) == "torch"


def test_the_table_counts(tmp_path: pathlib.Path) -> None:
    """The page's numbers are those of the log: of three operators one is XRT's, one in part, one wrong."""
    plain = {"dtype": "float32", "samples": 2, "fallen": [], "eager": []}
    rows = [
        {**plain, "name": "a"},
        {**plain, "name": "b", "eager": ["backward: aten.b.default: torchlib has no translation of it"]},
        {**plain, "name": "c", "fallen": ["results: off"]},
    ]
    page = conformance.table(rows)
    assert "| XRT runs all of it, forward | 2 | 66.7% |" in page
    assert "| forward and backward, in every dtype | 1 | 33.3% |" in page
    assert "| b | b.default (backward) |" in page
    assert "| c | results: off |" in page


def test_an_error_in_a_decomposition_is_found(tmp_path: pathlib.Path) -> None:
    """What it is held against are torch's own operators, not the same decomposition in eager."""
    script = (
        "import torch\nfrom xrt_torch import conformance, decompositions\n"
        "decompositions.table()[torch.ops.aten.cummax.default] = lambda x, dim: (x + 1, x.long() * 0)\n"
        "found = conformance.outcome_of(conformance.operators()['cummax'], torch.float32, 1)\n"
        "assert found['fallen'] and not found['captured'], found\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_elements_that_differ() -> None:
    """As many as there are, in a type that has so many; else the tensor as it is."""
    x = torch.zeros(5, 40, dtype=torch.bfloat16)
    assert conformance._different(x).unique().numel() == 200
    assert conformance._different(torch.zeros(3, dtype=torch.bool)).unique().numel() == 1


def test_special_functions_in_float64() -> None:
    """Against torch eager; Bessel functions to 1e-6 of the largest, Airy's to 1e-5, as torch's own are no better:
    its Airy is up to 2e-4 off between -10 and 10 by scipy, ours 2e-8."""
    for operator, function in special_functions.decompositions().items():
        name = str(operator)
        if "zeta" in name:  # of two arguments: test_translations.py
            continue
        x = torch.linspace(-30, 30, 1201, dtype=torch.float64) + 1 / 128
        if "ndtri" in name:
            x = torch.linspace(0, 1, 301, dtype=torch.float64)
        elif "erfinv" in name:
            x = torch.linspace(-1, 1, 301, dtype=torch.float64)
        for order in range(4) if "polygamma" in name else (None,):
            args = (x,) if order is None else (order, x)
            rtol = 1e-5 if "airy" in name else 1e-6 if "bessel_j" in name or "bessel_y" in name else 1e-9
            torch.testing.assert_close(
                function(*args),
                operator(*args),
                rtol=rtol,
                atol=max(rtol, 1e-9),
                equal_nan=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@pytest.mark.nightly
def test_every_operator(tmp_path: pathlib.Path) -> None:
    """All of op_db: nothing wrong, nothing crashes, and no smaller share on XRT than the page says."""
    log = tmp_path / "ops.jsonl"
    subprocess.run([sys.executable, "-m", "xrt_torch.conformance", "--log", str(log)], check=True)
    page = conformance.table(conformance.read(log))
    share = re.compile(r"forward and backward, in every dtype \| (\d+) ")
    assert "| wrong, or fallen back | 0 |" in page, page
    assert int(share.search(page)[1]) >= int(share.search(PAGE.read_text())[1])  # type: ignore[index]
