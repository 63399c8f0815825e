"""A guarded module over an engine that fails: it leaves a bundle that replays, or keeps what is right of the engine."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.verify.planted import deep
from tests.verify.test_repro import Suspect
from xrt_core import XRTModule
from xrt_core.engine import engines
from xrt_core.guard.record import FailureRecord
from xrt_core.guard.replay import replay
from xrt_core.options import AUTO
from xrt_core.testing.faults import Faulty, RaisesAtCompile, WrongNumbers
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.reference import run_host
from xrt_core.verify.repro import read_bundle


@pytest.mark.parametrize(("engine", "stage"), [(RaisesAtCompile, "compile"), (WrongNumbers, "wrong")])
def test_a_failure_leaves_a_bundle(engine: type, stage: str, own_cache: pathlib.Path) -> None:
    """Compilation that fails, or results that are wrong, under guard: one file, with which the failure comes again."""
    engines.register(engine)
    try:
        function = deep(6)
        module = XRTModule(function.body, engine=engine.name, guard=True, guard_async=False, guard_sandbox=False)
        module(*synthesize_inputs(function))
        left = list(own_cache.rglob("*.xrtbundle"))
        assert len(left) == 1
        found = read_bundle(left[0])
        assert (found.engine, found.stage) == (engine.name, stage)
        assert len(found.function.body.nodes) == 6
        assert replay(found, engine()).fails
    finally:
        engines.unregister(engine.name)


@pytest.mark.parametrize(
    ("kind", "message", "level", "engine"),
    [
        ("wrong numbers", "wrong_numbers: result 'y' is off", logging.WARNING, "wrong_numbers"),
        ("raised", "raises_at_compile: it does not compile", logging.WARNING, "raises_at_compile"),
        ("slower", "the host is faster", logging.INFO, None),
    ],
)
def test_a_failure_of_one_of_several_engines(
    kind: Any, message: str, level: int, engine: str | None, own_cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bundle is of the engine that failed; a host that is merely faster is no warning, and leaves no bundle."""
    for each in (WrongNumbers, RaisesAtCompile):
        engines.register(each)
    try:
        function, names = deep(6), [RaisesAtCompile.name, WrongNumbers.name]
        with XRTModule(function.body, engine=names, guard=True, guard_sandbox=False) as module:
            guard = module._pipeline.accelerated.services.guard  # type: ignore[union-attr]
            assert guard is not None
            record = guard.launch(function, AUTO, lambda: lambda arrays: arrays).record
            with caplog.at_level(logging.INFO, "xrt"):
                guard.record_failure(record, function, FailureRecord("examine", kind, message))
        assert [r.levelno for r in caplog.records if message in r.getMessage()] == [level]
        assert [read_bundle(p).engine for p in own_cache.rglob("*.xrtbundle")] == [engine] * (engine is not None)
    finally:
        for each in (WrongNumbers, RaisesAtCompile):
            engines.unregister(each.name)


@pytest.mark.usefixtures("own_cache")
def test_a_faulty_kernel_costs_its_nodes_alone() -> None:
    """A module over an engine with one wrong operator gives the host's numbers; the other nodes stay on the engine."""
    engines.register(Suspect)
    try:
        function = deep(40)
        module = XRTModule(
            function.body, engine="suspect", guard=True, guard_async=False, guard_sandbox=False, guard_tune=False
        )
        inputs = synthesize_inputs(function, seed=9)
        for _ in range(3):
            for got, want in zip(module(*inputs), run_host(function, inputs)[0], strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        text = module.report().as_text()
        faulty = sum(n.op_type == "Erf" for n in function.body.nodes)
        assert f"right for {40 - faulty} of 40 nodes" in text
        assert "live" in text.lower()
    finally:
        engines.unregister("suspect")


class _Claims:
    """An array of a library of its own, which says that it is one of float32, and is read as one of objects."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.dtype, self.shape = array, array.dtype, array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array.astype(object)


class ReadsOtherwise(Faulty):
    """Its results are read as another dtype than they claim."""

    name = "reads_otherwise"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [_Claims(r) for r in run()]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("guard", [False, True])
def test_a_result_is_what_it_is_read_as(guard: bool) -> None:
    """Not what it claims to be: the caller gets the host's float32 from the first call on, also without guard."""
    engines.register(ReadsOtherwise)
    try:
        function = deep(6)
        inputs = synthesize_inputs(function)
        want = run_host(function, inputs)[0]
        with XRTModule(function.body, engine=ReadsOtherwise.name, guard=guard, prune=False) as module:
            for _ in range(5):
                for got, right in zip(module(*inputs), want, strict=True):
                    assert got.dtype == np.float32
                    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-6)
    finally:
        engines.unregister(ReadsOtherwise.name)
