"""Symbolic plans under guard: verified at several sizes, watched at others, and given up where they are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto

from tests.guard import engines as tested
from tests.guard.guarded import module, registered
from tests.shapes.models import Builder
from tests.shapes.test_plans import entries, run, symbolic
from xrt_core.frontends.onnx_import import import_model

pytestmark = pytest.mark.tiny_clusters

IN_PROCESS = {"guard": None, "guard_sandbox": False, "guard_async": False, "guard_verify": True, "cache": "off"}


@pytest.fixture(autouse=True)
def _engines() -> Iterator[None]:
    with registered(tested.Plain, tested.RightForOneSize, tested.WrongFor50Rows):
        yield


def product() -> object:
    """x [n, 4] -> relu(x @ w)."""
    b = Builder()
    b.op("Relu", b.op("MatMul", "x", b.weight(4, 4)))
    return import_model(b.model([("x", TensorProto.FLOAT, ["n", 4])], [f"v{len(b.nodes) - 1}"]))


def rows(n: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)}


def test_an_executable_that_is_right_for_one_size_is_found() -> None:
    """Verification tries other sizes; the module goes on with exact plans, and no result is wrong."""
    graph = product()
    m, host = module(graph, "right_for_one_size", **IN_PROCESS), module(graph, "host")
    for n in (7, 9, 2, 11):
        np.testing.assert_allclose(run(m, rows(n)), run(host, rows(n)), rtol=1e-5)
    assert not symbolic(m)
    assert len(entries(m)) == 3
    assert "n = 2" in str(m.report())


def test_an_executable_that_is_wrong_later_is_left() -> None:
    """A shadow run that disagrees ends the symbolic plan; the call has the host's result."""
    graph = product()
    m, host = module(graph, "wrong_for_50_rows", guard_shadow=1, **IN_PROCESS), module(graph, "host")
    for n in (7, 9):
        m.run(rows(n))
    assert len(symbolic(m)) == 1
    np.testing.assert_allclose(run(m, rows(50)), run(host, rows(50)), rtol=1e-5)
    assert not symbolic(m)
    np.testing.assert_allclose(run(m, rows(8)), run(host, rows(8)), rtol=1e-5)
