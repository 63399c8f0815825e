"""What the core makes of faulty engines: the host stands in; a message has engine, operator and expectation."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from xrt_core.engine import engines, op_kernel, op_kernels
from xrt_core.module import XRTModule
from xrt_core.testing import HostEngine, faults, functions
from xrt_core.testing.processes import run_python

SURVIVED = {
    faults.RaisesAtCompile: "the compiler has lost its mind",
    faults.RaisesAtRun: "the device has fallen off the bus",
    faults.NoExecutable: r"'no_executable' .* returned a method for .* \(.*MatMul.*\), expected an Executable",
    faults.WrongCount: r"engine 'wrong_count', .*MatMul, Add, Mul\): the executable returned 2 results, expected 1",
    faults.WrongShape: r"'wrong_shape', .*\(.*\): result 0 \('y'\) is float32\[1, 4, 8\], expected float32\[4, 8\]",
    faults.WrongDtype: r"'wrong_dtype', .*\(.*\): result 0 \('y'\) is float64\[4, 8\], expected float32\[4, 8\]",
}


@pytest.fixture
def registered() -> Iterator[object]:
    """Registers engines of this process, and takes them out again."""
    names: list[str] = []

    def register(engine: type[HostEngine]) -> str:
        engines.register(engine)
        names.append(engine.name)
        return engine.name

    yield register
    for name in names:
        engines.unregister(name)


@pytest.mark.parametrize("fault", SURVIVED, ids=lambda f: f.name)
def test_a_failing_engine_costs_nothing_but_speed(
    fault: type[faults.Faulty], registered: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets the host's results, every time; the log says what happened."""
    function, x = functions.chain()
    module = XRTModule(function.body, engine=registered(fault))  # type: ignore[operator]
    want = XRTModule(function.body, engine="host")(x)
    with caplog.at_level(logging.WARNING, "xrt"):
        for _ in range(5):
            np.testing.assert_array_equal(module(x), want)
    assert any(_matches(SURVIVED[fault], r.getMessage()) for r in caplog.records), caplog.text


def test_an_engine_that_raises_in_supports_takes_nothing(registered: object) -> None:
    """Every node stays on the host, with the engine's own words as the reason."""
    function, x = functions.chain()
    module = XRTModule(function.body, engine=registered(faults.RaisesInSupports))  # type: ignore[operator]
    np.testing.assert_array_equal(module(x), XRTModule(function.body, engine="host")(x))
    assert all("KeyError" in n.reason for n in module.explain().report.host_nodes)


def test_a_compiler_that_is_none(registered: object, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever `Engine.compiler` returns in place of a GraphCompiler is named, and the host stands in."""

    class NoCompiler(HostEngine):
        name = "no_compiler"

        def compiler(self, device: str, options: faults.CompileOptions) -> faults.GraphCompiler:
            return "a compiler"  # type: ignore[return-value]

    function, x = functions.chain()
    module = XRTModule(function.body, engine=registered(NoCompiler))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "xrt"):
        np.testing.assert_array_equal(module(x), XRTModule(function.body, engine="host")(x))
    assert "'no_compiler' (xrt-no_compiler) gave a str as its compiler for cpu, expected a GraphCompiler" in caplog.text


def test_kernels_of_unknown_operators_are_reported(
    registered: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a kernel of no operator works, and the log names the kernel."""
    monkeypatch.setattr(op_kernels, "_kernels", dict(op_kernels._kernels))
    op_kernel("Rellu", engine=HostEngine.name)(lambda ctx, x: x)
    function, x = functions.chain()
    module = XRTModule(function.body, engine=registered(HostEngine))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "xrt"):
        np.testing.assert_array_equal(module(x), XRTModule(function.body, engine="host")(x))
    assert "kernel ai.onnx.Rellu of engine 'host_reference'" in caplog.text
    assert not module.explain().errors


@pytest.mark.parametrize("when", ["Compile", "Run"])
def test_a_crash_takes_its_process(when: str) -> None:
    """The crashing engines really crash: that is what a sandbox is tested with."""
    with pytest.raises(AssertionError, match="a process ended with -6"):
        run_python(f"""
            from xrt_core.testing import functions
            from xrt_core.testing.subject import Subject
            subject = Subject("xrt_core.testing.faults:CrashesAt{when}")
            function, x = functions.chain()
            subject.compile(function).run([x])
        """)


@pytest.mark.parametrize("fault", [faults.HangsAtCompile, faults.HangsAtRun], ids=lambda f: f.name)
def test_a_hang_lasts(fault: type[faults.HangsAtRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hanging engines come back after `seconds`, with the right results."""
    from time import perf_counter

    monkeypatch.setattr(fault, "seconds", 0.2)
    function, x = functions.chain()
    compiler = fault().compiler("cpu", faults.CompileOptions())
    start = perf_counter()
    (y,) = compiler.compile(function, function.params, function.returns, ()).run([x])
    assert perf_counter() - start >= 0.2
    np.testing.assert_array_equal(y, XRTModule(function.body, engine="host")(x))


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None
