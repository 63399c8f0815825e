"""TrainModule under guard: it waits, tells and closes as XRTModule does, and trains to the same numbers."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import QUICK, registered
from tests.training.test_module import Classifier, losses
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker_pool import process_pool
from xrt_core.training import SGD, TrainModule


@pytest.mark.slow
@pytest.mark.parametrize(("how", "asynchronous"), [(True, True), (True, False), ("isolated", True)])
def test_steps_under_guard(how: Any, asynchronous: bool, own_cache: pathlib.Path) -> None:
    """The host takes steps until the clusters are live; the losses are those of the host alone."""
    forget_all()
    options = {"loss": "cross_entropy", "optimizer": SGD(0.1), "seed": 3}
    plain = TrainModule(Classifier(), engine="host", **options)
    want = losses(plain, 6)
    assert plain.wait(0)
    assert plain.report().clusters == ()
    guard = {"guard": how, "guard_tune": False, "guard_async": asynchronous, **QUICK}
    with registered(tested.Plain):
        with TrainModule(Classifier(), engine="plain", **options, **guard) as t:
            found = losses(t, 2)
            assert t.wait(60)
            found += losses(t, 4)
            report = t.report()
            assert report.clusters
            assert {c["state"] for c in report.clusters} == {"live"}, report.as_text()
            assert all(c["calls"] > c["host_calls"] for c in report.clusters)
        np.testing.assert_allclose(found, want, rtol=1e-5)
        assert np.isfinite(losses(t, 1)).all()  # steps go on after it was closed
    process_pool().close()
