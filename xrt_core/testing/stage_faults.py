"""Engines that fail at one stage in one way, for every stage and way: what the guard's fault matrix is made of.

Each is the host as an engine but for its fault. They can be imported by another process (module and class name), as the
guard's worker does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from xrt_core.engine.contract import (
    WORKER_VARIABLE,
    CompileOptions,
    EngineStatus,
    Executable,
    GraphCompiler,
    Phase,
    Support,
)
from xrt_core.ir.graph import Node
from xrt_core.testing.faults import Faulty, _FaultyCompiler, _FaultyExecutable

LATE_PROCESS: Final = "XRT_FAULT_PROCESS"
"""Environment variable: the process in which faults of the stage "late run" are hit, or "isolated" for that of isolated
executables; elsewhere all is well."""
ISOLATED: Final = "isolated"

HANG_SECONDS: Final = 3600.0
MEMORY_STEP: Final = 64 << 20
"""Bytes that a fault of the kind "memory" takes at a time, until something stops it."""


def _raise() -> None:
    raise RuntimeError("a fault was planted here")


def _hang() -> None:
    time.sleep(HANG_SECONDS)


def _crash() -> None:
    os.abort()


def _exit() -> None:
    os._exit(3)


def _take_memory() -> None:
    taken = []
    while True:
        taken.append(np.ones(MEMORY_STEP, np.uint8))


def _refuse_memory() -> None:
    raise MemoryError("a fault was planted here")


Results = Sequence[np.ndarray]
_DEEDS: Final[MappingProxyType[str, Callable[[], None]]] = MappingProxyType(
    {
        "raises": _raise,
        "hangs": _hang,
        "crashes": _crash,
        "exits": _exit,
        "memory": _take_memory,
        "refused": _refuse_memory,
    }
)
_RESULTS: Final[MappingProxyType[str, Callable[[Results], Any]]] = MappingProxyType(
    {
        "wrong_count": lambda results: [*results, np.zeros(1, np.float32)],
        "wrong_shape": lambda results: [r[None] for r in results],
        "wrong_dtype": lambda results: [r.astype(np.float32 if r.dtype == np.float64 else np.float64) for r in results],
        "wrong_numbers": lambda results: [(r + r).astype(r.dtype) for r in results],
    }
)


class StageFault(Faulty):
    """Base of the engines here. stage: "probe", "supports", "compiler", "compile", "load", "run" or "late_run". kind:
    what it does there."""

    stage: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def probe(self) -> EngineStatus:
        if self.stage == "probe":
            self._hit()
        return super().probe()

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        if self.stage == "supports":
            self._hit()
        return super().supports(node, device, phase)

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        if self.stage == "compiler":
            self._hit()
        return _StageCompiler(self, super(Faulty, self).compiler(device, options))

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        if self.stage == "compile":
            self._hit()
        return _FaultyExecutable(self, compile())

    def on_load(self) -> None:
        """Called before the compiler loads."""
        if self.stage == "load":
            self._hit()

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        where = ISOLATED if os.environ.get(WORKER_VARIABLE) == "runs" else str(os.getpid())
        late = self.stage == "late_run" and os.environ.get(LATE_PROCESS) == where
        if not late and self.stage != "run":
            return run()
        if self.kind in _RESULTS:
            return _RESULTS[self.kind](run())
        self._hit()
        return run()

    def _hit(self) -> None:
        _DEEDS[self.kind]()


class _StageCompiler(_FaultyCompiler):
    def load(self, blob: bytes) -> Executable:
        assert isinstance(self._engine, StageFault)
        self._engine.on_load()
        return super().load(blob)


def _make() -> dict[str, type[StageFault]]:
    made = {}
    for stage in ("probe", "supports", "compiler", "compile", "load", "run", "late_run"):
        kinds = list(_DEEDS) + (list(_RESULTS) if stage in ("run", "late_run") else [])
        for kind in kinds:
            name = f"{stage}_{kind}"
            fields = {"name": name, "stage": stage, "kind": kind, "__module__": __name__, "__qualname__": name,
                      "__doc__": f"At the stage {stage!r} it {kind.replace('_', ' ')}."}  # fmt: skip
            made[name] = type(name, (StageFault,), fields)
    return made


STAGE_FAULTS: Final = MappingProxyType(_make())
"""Every engine here by name, which is `<stage>_<kind>`."""
globals().update(STAGE_FAULTS)
