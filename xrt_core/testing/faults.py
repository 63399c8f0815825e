"""Engines that fail, one way each, for tests of whatever has to survive them: the core, its guard, this kit.

Each is the host as an engine but for its fault, so that results are right wherever the fault is not hit. Register one
with `xrt_core.engine.register_engine`, or name it to the kit as "xrt_core.testing.faults:RaisesAtRun".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from xrt_core.engine.contract import (
    DEFAULT_RUN_OPTIONS,
    CompileOptions,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    Phase,
    RunOptions,
    Support,
)
from xrt_core.ir.graph import Node
from xrt_core.testing.host_engine import HostEngine

FAULTY_IMPORT: Final = "xrt_core.testing.faulty_import:FaultyImportEngine"
"""Target of an entry point whose import raises ImportError."""


class _FaultyExecutable(Executable):
    """Runs what it wraps through the engine's `on_run`."""

    def __init__(self, engine: Faulty, inner: Executable) -> None:
        self._engine = engine
        self._inner = inner

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        results: Any = self._engine.on_run(lambda: self._inner.run(inputs, run_options, block_until_done), inputs)
        return results  # type: ignore[no-any-return]  # a fault may be here

    def serialize(self) -> bytes:
        return self._inner.serialize()

    def as_text(self) -> str:
        return self._inner.as_text()


class _FaultyCompiler(GraphCompiler):
    def __init__(self, engine: Faulty, inner: GraphCompiler) -> None:
        self._engine = engine
        self._inner = inner

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        made: Any = self._engine.on_compile(
            lambda: self._inner.compile(function, entry_params, return_params, aliases)
        )
        return made  # type: ignore[no-any-return]  # a fault may be here

    def load(self, blob: bytes) -> Executable:
        return _FaultyExecutable(self._engine, self._inner.load(blob))


class Faulty(HostEngine):
    """Base of the engines here: the host, with a hook around compiling and one around running."""

    name = "faulty"

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        return _FaultyCompiler(self, super().compiler(device, options))

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        """What the compiler returns."""
        return _FaultyExecutable(self, compile())

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        """What the executable returns."""
        return run()


class RaisesAtCompile(Faulty):
    """Its compiler raises something that is no XRTError."""

    name = "raises_at_compile"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        raise RuntimeError("the compiler has lost its mind")


class RaisesAtRun(Faulty):
    """Its executables raise something that is no XRTError."""

    name = "raises_at_run"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        raise RuntimeError("the device has fallen off the bus")


class RaisesInSupports(Faulty):
    """Asked about a node, it raises."""

    name = "raises_in_supports"

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        raise KeyError(node.op_type)


class WrongNumbers(Faulty):
    """Its results have the right dtypes and shapes, and twice the right numbers."""

    name = "wrong_numbers"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [np.logical_not(r) if r.dtype == np.bool_ else (r + r).astype(r.dtype) for r in run()]


class ZeroNumbers(Faulty):
    """Its results are zeros of the right dtypes and shapes."""

    name = "zero_numbers"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [np.zeros_like(r) for r in run()]


class Unsteady(Faulty):
    """Its floating results are off by one rounding at every second run."""

    name = "unsteady"

    def __init__(self) -> None:
        self._runs = 0

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        self._runs += 1
        off = self._runs % 2
        return [np.nextafter(r, np.inf).astype(r.dtype) if off and r.dtype.kind == "f" else r for r in run()]


class HangsAtCompile(Faulty):
    """Its compiler does not come back for `seconds`."""

    name = "hangs_at_compile"
    seconds: ClassVar[float] = 3600.0

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        time.sleep(self.seconds)
        return super().on_compile(compile)


class HangsAtRun(Faulty):
    """Its executables do not come back for `seconds`."""

    name = "hangs_at_run"
    seconds: ClassVar[float] = 3600.0

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        time.sleep(self.seconds)
        return run()


class CrashesAtCompile(Faulty):
    """Its compiler takes the process with it (SIGABRT), as a failed assertion of a C++ library does."""

    name = "crashes_at_compile"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        os.abort()


class CrashesAtRun(Faulty):
    """Its executables take the process with them."""

    name = "crashes_at_run"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        os.abort()


class Leaks(Faulty):
    """It keeps a copy of every result for ever."""

    name = "leaks"

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        results = run()
        self.kept += [r.copy() for r in results]
        return results


class GreedyCompile(Faulty):
    """Its compiler takes `megabytes` of memory, and more at every compilation."""

    name = "greedy_compile"
    megabytes: ClassVar[int] = 4096

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        self.kept.append(np.ones(self.megabytes << 20, np.uint8))
        return super().on_compile(compile)


class NoExecutable(Faulty):
    """Its compiler returns a function in place of an Executable."""

    name = "no_executable"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        return compile().run


class WrongCount(Faulty):
    """Its executables return one result more than was promised."""

    name = "wrong_count"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [*run(), np.zeros(1, np.float32)]


class WrongShape(Faulty):
    """Its results have one dimension too many."""

    name = "wrong_shape"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [r[None] for r in run()]


class WrongDtype(Faulty):
    """Its results are float64 or, where that is right, float32."""

    name = "wrong_dtype"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [r.astype(np.float32 if r.dtype == np.float64 else np.float64) for r in run()]


class WritesInputs(Faulty):
    """It uses the memory of its first input as scratch."""

    name = "writes_inputs"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        results = run()
        if inputs and isinstance(inputs[0], np.ndarray) and inputs[0].flags.writeable:
            inputs[0][...] = 0
        return results


class ReusesResults(Faulty):
    """All runs of one signature write their results into the same memory."""

    name = "reuses_results"

    def __init__(self) -> None:
        self._buffers: dict[Any, np.ndarray] = {}

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        results = []
        for i, r in enumerate(run()):
            buffer = self._buffers.setdefault((i, r.dtype, r.shape), np.empty_like(r))
            buffer[...] = r
            results.append(buffer)
        return results


class ReturnsInputs(Faulty):
    """A result that equals an input is that input's own array."""

    name = "returns_inputs"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [
            next((x for x in inputs if x.dtype == r.dtype and x.shape == r.shape and (x == r).all()), r) for r in run()
        ]


class WrongApiVersion(Faulty):
    """It is written for a contract that this core does not have."""

    name = "wrong_api_version"
    api_version = 99


FAULTS: Final = MappingProxyType(
    {
        engine.name: engine
        for engine in (
            RaisesAtCompile, RaisesAtRun, RaisesInSupports, WrongNumbers, ZeroNumbers, Unsteady, HangsAtCompile,
            HangsAtRun, CrashesAtCompile, CrashesAtRun, Leaks, GreedyCompile, NoExecutable, WrongCount, WrongShape,
            WrongDtype, WritesInputs, ReusesResults, ReturnsInputs, WrongApiVersion,
        )
    }
)  # fmt: skip
"""Every engine here by name."""


