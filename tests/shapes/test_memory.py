"""Weights are held once by the executables of one model; executables that go are free at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.guard import engines as tested
from tests.guard.guarded import eventually, module, registered
from tests.shapes.models import attention, tokens
from tests.shapes.test_plans import HOST, entries, run
from xrt_core.engine.boundary import direct

WIDTH = 96  # weights of 36 KB, which are not folded into programs


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """What is freed here is freed without the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def executables(m: xrt.XRTModule) -> list[Any]:
    """The engine's own objects."""
    found = [x.executable for e in entries(m) for x in e.plan.launches if x.executable is not None]
    for x in found:
        x.run([np.zeros(p.shape, p.dtype) for p in x.inner._params])
    return [direct(x) for x in found]


def test_executables_of_xla_share_their_weights() -> None:
    """Of several shapes, of buckets and of two modules; the last one takes them with it."""
    pytest.importorskip("jax")
    options: dict[str, Any] = {"engine": "xla", "guard": False, "cache": "off", "minimum_nodes": 1}
    m, other = (xrt.XRTModule(attention(width=WIDTH), **options) for _ in range(2))
    for b, n in ((2, 7), (3, 5)):
        np.testing.assert_allclose(run(m, tokens(b, n)).shape, (b, WIDTH))
    run(other, tokens(1, 3))
    weights = [{id(w) for w in x._weights} for x in (*executables(m), *executables(other))]
    assert len(weights) == 3
    assert weights[0] == weights[1] == weights[2]
    assert len(weights[0]) >= 3
    held = [weakref.ref(w) for w in executables(m)[0]._weights]
    for made in (m, other):
        made._source.caller.plans.clear("of the test")  # type: ignore[union-attr]
    assert all(w() is None for w in held)


def test_memory_decides_how_many_are_kept() -> None:
    """The executable used longest ago goes first, and is free; results stay right."""
    with registered(tested.Plain):
        m = xrt.XRTModule(attention(), engine="plain", guard=False, cache="off", executable_bytes=8_000_000)
        seen: list[weakref.ref[Any]] = []
        for n in range(3, 11):
            np.testing.assert_allclose(run(m, tokens(2, n)), run(HOST["attention"], tokens(2, n)), rtol=1e-4, atol=1e-5)
            seen.append(weakref.ref(entries(m)[-1].plan.launches[0].executable))
    kept = [i for i, x in enumerate(seen) if x() is not None]
    assert 1 <= len(kept) < 8
    assert kept == list(range(8 - len(kept), 8))
    assert len(entries(m)) == len(kept)


@pytest.mark.tiny_clusters
def test_under_guard_they_are_free_as_well() -> None:
    """An executable that is watched, timed and compared goes with its plan."""
    with registered(tested.Plain):
        options = {"guard_sandbox": False, "guard_async": False, "cache": "off", "guard": None}
        m = module(xrt.XRTModule(attention(), engine="host").graph, "plain", cache_size=1, **options)
        run(m, tokens(2, 5))
        for _ in range(12):
            run(m, tokens(2, 5))
        held = weakref.ref(entries(m)[0].plan.launches[0].executable)
        assert held() is not None
        run(m, tokens(2, 6))
        assert len(entries(m)) == 1
        assert eventually(lambda: held() is None, 10)
