"""What a guarded module leaves behind when an engine fails: a bundle, named in the event, that replays."""

from __future__ import annotations

import pathlib

import pytest

from tests.guard.planted import deep
from xrt_core import XRTModule
from xrt_core.engine import engines
from xrt_core.guard.bundle import read_bundle, replay
from xrt_core.guard.stimuli import stimulus
from xrt_core.testing.faults import RaisesAtCompile, WrongNumbers


@pytest.mark.parametrize(("engine", "stage"), [(RaisesAtCompile, "compile"), (WrongNumbers, "wrong")])
def test_a_failure_leaves_a_bundle(engine: type, stage: str, own_cache: pathlib.Path) -> None:
    """Compilation that fails, or results that are wrong, under guard: one file, with which the failure comes again."""
    engines.register(engine)
    try:
        function = deep(6)
        module = XRTModule(function.body, engine=engine.name, guard=True, guard_async=False, guard_sandbox=False)
        module(*stimulus(function))
        left = list(own_cache.rglob("*.xrtbundle"))
        assert len(left) == 1
        found = read_bundle(left[0])
        assert (found.engine, found.stage) == (engine.name, stage)
        assert len(found.function.body.nodes) == 6
        assert replay(found, engine()).fails
    finally:
        engines.unregister(engine.name)
