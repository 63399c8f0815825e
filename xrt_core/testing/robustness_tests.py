"""The engine under the guard where things go wrong: planted faults of its own, and mutated models."""

from __future__ import annotations

import pathlib
from typing import Any, Final

import numpy as np
import pytest

from xrt_core.engine import engines
from xrt_core.module import XRTModule
from xrt_core.testing import functions
from xrt_core.testing.base import SuiteBase
from xrt_core.testing.fuzz import run_all
from xrt_core.testing.planted import planted
from xrt_core.testing.subject import Subject

IN_PROCESS: Final = (
    "raises_at_compile", "raises_at_run", "wrong_numbers", "zero_numbers", "no_executable", "wrong_count",
    "wrong_shape", "wrong_dtype",
)  # fmt: skip
"""Faults after which the host's results must come, without a process of their own."""
OTHER_PROCESS: Final = ("crashes_at_compile", "crashes_at_run")
"""Faults that end the process, which must be the guard's worker."""


class RobustnessTests(SuiteBase):
    """What a caller sees of a failing engine: nothing but the host's results."""

    @pytest.mark.parametrize("fault", [*IN_PROCESS, *OTHER_PROCESS])
    def test_a_planted_fault_costs_nothing_but_speed(self, subject: Subject, fault: str) -> None:
        """With a fault in its compiler or executables, the guard gives the host's results; the engine itself is well
        afterwards."""
        crashes = fault in OTHER_PROCESS
        if crashes and subject.plugin is None:
            pytest.skip("no installed package provides the engine, so that no other process can import it")
        function, x = functions.chain()
        refused = [v.reason for n in function.body.nodes if not (v := subject.supports(n))]
        if len(refused) == len(function.body.nodes):
            pytest.skip(f"it takes none of MatMul, Add and Mul in float32: {refused[0]}")
        kind = planted(type(subject.engine), fault)
        want = XRTModule(function.body, engine="host")(x)
        options: dict[str, Any] = {"guard_async": False, "guard_sandbox": crashes, "prune": False, "cache": False}
        engines.register(kind)
        try:
            with XRTModule(function.body, engine=kind.name, device=subject.device, guard=True, **options) as m:
                for _ in range(3):
                    np.testing.assert_array_equal(m(x), want)
                live = [c["name"] for c in m.report().clusters if c["state"] == "live"]
                assert not live, f"the guard lets a faulty engine answer: {live}"
        finally:
            engines.unregister(kind.name)
        taken = next(n for n in function.body.nodes if subject.supports(n))
        outside = [v for v in taken.inputs if v is not None and v.data is None]
        alone = functions.function("alone", outside, [taken], [v for v in taken.outputs if v is not None])
        (got,) = subject.run(subject.compile(alone), [np.ones(p.shape, p.dtype) for p in alone.params])
        assert np.isfinite(got).all()

    def test_mutated_models(self, subject: Subject, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> None:
        """Mutated models end no process, raise nothing but XRTErrors, and give what they give on the host."""
        count = int(request.config.getoption("--xrt-fuzz", default=0))
        if not count:
            pytest.skip("give --xrt-fuzz NUMBER")
        if subject.plugin is None:
            pytest.skip("no installed package provides the engine, so that no other process can import it")
        said: list[str] = []
        cases = [("model", i) for i in range(count)]
        sums = run_all(cases, seed=0, engines=[subject.name], out=tmp_path, say=said.append)
        assert not sums.findings, "\n".join(said)
