"""Saved modules hold buckets: other sizes run padded, without compiling."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.shapes.models import attention, tokens
from tests.shapes.test_plans import HOST, run
from xrt_core.errors import CompileError
from xrt_core.passes.padding.rows import Rows


@pytest.mark.parametrize(("guard", "rows"), [(False, False), (True, False), (False, True)])
def test_a_saved_module_serves_what_its_buckets_hold(
    guard: bool, rows: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, with compilation forbidden, it answers each size up to those of the buckets; a larger one raises. rows:
    the buckets have one row, and serve any number."""
    pytest.importorskip("jax")
    if rows:
        monkeypatch.setattr(Rows, "worth", lambda *given: 1)
    options: dict[str, Any] = {"guard": guard, "guard_sandbox": False} if guard else {"guard": False}
    options |= {"cache": "off", "minimum_nodes": 1}
    m = xrt.XRTModule(attention(), engine="xla", buckets="auto", **options)
    for b, n in ((2, 7), (2, 11), (3, 12)):
        run(m, tokens(b, n))
        assert m.wait(60)
    caller = m._source.caller
    assert caller is not None
    assert caller.buckets is not None
    want = [b.sizes for b in caller.buckets.buckets]
    m.save(tmp_path / "m.xrt")
    back = xrt.XRTModule.load(tmp_path / "m.xrt", **options, forbid_compilation=True)
    assert back.wait(60)
    for b, n in ((2, 7), (2, 12), (3, 12), (3, 8), (2, 3), (1, 1), *([(5, 12)] if rows else [])):
        inputs = tokens(b, n)
        np.testing.assert_allclose(run(back, inputs), run(HOST["attention"], inputs), rtol=1e-4, atol=1e-5)
    again = back._source.caller
    assert again is not None
    assert again.buckets is not None
    assert [b.sizes for b in again.buckets.buckets] == want
    assert any(b.rows is not None for b in again.buckets.buckets) == rows
    assert sum(e.name == "compile" for e in back.events) == 0
    with pytest.raises(CompileError, match="forbid_compilation"):
        back.run(tokens(4, 13))
