"""Engines that fail at one door in one way, for every door and way: what the guard's fault matrix is made of.

A *door* is a place where the core calls an engine, or reads what it returned. Each engine here is the host as an engine
but for its fault. They can be imported by another process (module and class name), as the guard's worker does.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
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
"""Environment variable: the processes in which the faults of `LATE_DOORS` are hit, by number, or "isolated" for that of
isolated executables, with commas between them; elsewhere all is well."""
ISOLATED: Final = "isolated"
LATE_RUNS: Final = 30
"""The run of an executable in which the faults of the door "late_run" begin."""

HANG_SECONDS: Final = 3600.0
MEMORY_STEP: Final = 64 << 20
"""Bytes that a fault of the kind "memory" takes at a time, until something stops it."""
_LEAK: Final = 1 << 20
_LONG: Final = 50_000_000
_MESSAGE: Final = "a fault was planted here"

Results = Sequence[np.ndarray]


class _Unprintable(BaseException):
    """An exception whose message cannot be had."""

    def __str__(self) -> str:
        raise SystemExit(_MESSAGE)

    __repr__ = __str__


class _OfItsOwn(np.ndarray):
    """A class of NumPy arrays of the engine's own."""


def _raising(error: Callable[[], BaseException]) -> Callable[[], None]:
    def deed() -> None:
        raise error()

    return deed


_leaked: list[Any] = []


def _take_memory() -> None:
    """In a worker, of which the guard watches what is in memory, it is written to. Elsewhere a limit of the system on
    what is mapped is to stop it: to write a gigabyte can take longer than a run may."""
    make: Callable[..., np.ndarray] = np.ones if WORKER_VARIABLE in os.environ else np.empty
    taken = []
    while True:
        taken.append(make(MEMORY_STEP, np.uint8))


def _sleep() -> None:
    time.sleep(HANG_SECONDS)


def _leak_thread() -> None:
    threading.Thread(target=_sleep, daemon=True).start()


def _start_thread() -> None:
    if not _leaked:  # one is enough to keep a program from ending
        _leaked.append(threading.Thread(target=_sleep, daemon=False))
        _leaked[-1].start()


def _change_rounding() -> None:
    ctypes.CDLL(None).fesetround(0x400)


def _change_streams() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays


RAISES: Final[MappingProxyType[str, Callable[[], object]]] = MappingProxyType(
    {
        "raises": _raising(lambda: RuntimeError(_MESSAGE)),
        "refused": _raising(lambda: MemoryError(_MESSAGE)),
        "raises_system_exit": _raising(lambda: SystemExit(3)),
        "raises_interrupt": _raising(lambda: KeyboardInterrupt(_MESSAGE)),
        "raises_generator_exit": _raising(lambda: GeneratorExit(_MESSAGE)),
        "raises_stop_iteration": _raising(lambda: StopIteration(_MESSAGE)),
        "raises_group": _raising(lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError(_MESSAGE)])),
        "raises_unprintable": _raising(_Unprintable),
        "raises_long": _raising(lambda: ValueError("x" * _LONG)),
    }
)
"""Deeds that end in an exception."""
ENDS: Final[MappingProxyType[str, Callable[[], object]]] = MappingProxyType(
    {
        "crashes": os.abort,
        "exits": lambda: os._exit(3),
        "segfaults": lambda: ctypes.string_at(0),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "memory": _take_memory,
    }
)
"""Deeds that end the process."""
HARMS: Final[MappingProxyType[str, Callable[[], object]]] = MappingProxyType(
    {
        "leaks_memory": lambda: _leaked.append(np.ones(_LEAK, np.uint8)),
        "leaks_files": lambda: _leaked.append(os.open(os.devnull, os.O_RDONLY)),
        "leaks_threads": _leak_thread,
        "changes_folder": lambda: os.chdir("/"),
        "changes_handlers": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        "changes_errstate": lambda: np.seterr(all="raise"),
        "changes_rounding": _change_rounding,
        "changes_umask": lambda: os.umask(0o777),
        "changes_streams": _change_streams,
        "changes_seeds": lambda: (random.seed(0), np.random.seed(0)),
        "changes_environment": lambda: os.environ.update(XRT_FAULT_WAS_HERE="1"),
        "starts_thread": _start_thread,
    }
)
"""Deeds after which the engine goes on."""
DEEDS: Final = MappingProxyType({**RAISES, "hangs": _sleep, **ENDS, **HARMS})
"""What may happen at any door."""
RETURNS: Final = MappingProxyType({"returns_none": None, "returns_int": 3, "returns_text": "yes"})
"""What the door gives in place of what it should."""


def _other_dtype(r: np.ndarray) -> np.ndarray:
    return r.astype(np.dtype(np.float32 if r.dtype == np.float64 else np.float64))


def _locked(r: np.ndarray) -> np.ndarray:
    r.setflags(write=False)
    return r


def _nan(r: np.ndarray) -> np.ndarray:
    return np.full_like(r, np.nan)


def _double(r: np.ndarray) -> np.ndarray:
    return np.asarray(r + r, r.dtype)


def _same_as_input(inputs: Results, r: np.ndarray) -> np.ndarray:
    found = [x for x in inputs if x.dtype == r.dtype and x.shape == r.shape and np.array_equal(x, r)]
    return found[0] if found else r


def _write(inputs: Results) -> None:
    inputs[0][...] = 77
    raise RuntimeError("after writing to its input")


RESULTS: Final[MappingProxyType[str, Callable[[Results, list[np.ndarray]], Any]]] = MappingProxyType(
    {
        "wrong_count": lambda inputs, results: [*results, np.zeros(1, np.float32)],
        "no_results": lambda inputs, results: [],
        "wrong_shape": lambda inputs, results: [r[None] for r in results],
        "wrong_dtype": lambda inputs, results: [_other_dtype(r) for r in results],
        "wrong_order": lambda inputs, results: [r.astype(r.dtype.newbyteorder(">")) for r in results],
        "objects": lambda inputs, results: [r.astype(object) for r in results],
        "numbers_within": lambda inputs, results: [3.0 for r in results],
        "iterator": lambda inputs, results: iter(results),
        "own_class": lambda inputs, results: [r.view(_OfItsOwn) for r in results],
        "strided": lambda inputs, results: [np.asfortranarray(r) for r in results],
        "input_view": lambda inputs, results: [_same_as_input(inputs, r) for r in results],
        "one_memory": lambda inputs, results: [np.stack(results)[i] for i in range(len(results))],
        "read_only": lambda inputs, results: [_locked(r) for r in results],
        "writes_inputs": lambda inputs, results: _write(inputs),
    }
)
"""What a run returns: of another form, or not the caller's own."""
NUMBERS: Final[MappingProxyType[str, Callable[[Results], Any]]] = MappingProxyType(
    {
        "wrong_numbers": lambda results: [_double(r) for r in results],
        "wrong_output": lambda results: [*results[:-1], _double(results[-1])],
        "nan": lambda results: [_nan(r) for r in results],
        "hundredth": lambda results: [_double(r) for r in results],  # now and then, see `on_run`
        "threads": lambda results: [_double(r) for r in results],  # while another run is under way
    }
)
"""Wrong numbers of the right form."""

CALLS: Final = (
    "construct", "attribute", "probe", "fingerprint", "supports", "compiler", "compile", "serialize", "load", "as_text",
    "delete",
)  # fmt: skip
"""Doors before the runs and after; "delete" is the executable's `__del__`."""
LATE_DOORS: Final = ("first_run", "late_run", "array", "shape", "length")
"""Doors at which faults are hit in the processes of `LATE_PROCESS` only: the first run there, those from the 30th on,
and where results are read: an array's `__array__` and `shape`, the `__len__` of all."""
DOORS: Final = (*CALLS, "run", *LATE_DOORS)
"""Every door. A fault of the door "run" is hit from the first run on, in the worker already."""


class StageFault(Faulty):
    """Base of the engines here. stage: one of `DOORS`. kind: what it does there."""

    stage: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def __init__(self) -> None:
        self._runs = 0
        self._running = 0
        self._buffers: dict[Any, np.ndarray] = {}
        self.at("construct", None)

    @property
    def tolerance(self) -> Any:  # type: ignore[override]
        return self.at("attribute", super().tolerance)

    def probe(self) -> EngineStatus:
        return self.at("probe", super().probe())  # type: ignore[no-any-return]

    def fingerprint(self, device: str) -> str:
        return self.at("fingerprint", super().fingerprint(device))  # type: ignore[no-any-return]

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        return self.at("supports", super().supports(node, device, phase))  # type: ignore[no-any-return]

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        made = _StageCompiler(self, super(Faulty, self).compiler(device, options))
        return self.at("compiler", made)  # type: ignore[no-any-return]

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        return self.at("compile", _StageExecutable(self, compile()))

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        if self.stage not in ("run", *LATE_DOORS) or not (self.stage == "run" or self._is_late()):
            return run()
        self._runs += 1
        if self.stage in ("array", "shape", "length"):
            if self.stage == "length":
                return _OddLength(self, list(run()))
            return [_OddArray(self, r) for r in run()]
        if self.stage == "late_run" and self._runs < LATE_RUNS:
            return run()
        return self._run_with_fault(run, inputs)

    def _run_with_fault(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        kind = self.kind
        if kind == "slow":
            time.sleep(0.05)
            return run()
        if kind == "threads":
            self._running += 1
            try:
                time.sleep(1e-3)
                alone = self._running == 1
                results = run()
            finally:
                self._running -= 1
            return results if alone else NUMBERS[kind](results)
        if kind == "hundredth" and self._runs % 100:
            return run()
        if kind == "reuses":
            return [self._buffer(i, r) for i, r in enumerate(run())]
        if kind in RESULTS:
            return RESULTS[kind](inputs, list(run()))
        return NUMBERS[kind](run()) if kind in NUMBERS else self.at(self.stage, run())

    def _buffer(self, i: int, r: np.ndarray) -> np.ndarray:
        buffer = self._buffers.setdefault((i, r.dtype, r.shape), np.empty_like(r))
        buffer[...] = r
        return buffer

    def at(self, stage: str, right: Any) -> Any:
        """What a door gives: `right`, but for the fault of this engine."""
        if stage != self.stage:
            return right
        if self.kind in RETURNS:
            return RETURNS[self.kind]
        DEEDS[self.kind]()
        return right

    @staticmethod
    def _is_late() -> bool:
        where = ISOLATED if os.environ.get(WORKER_VARIABLE) == "runs" else str(os.getpid())
        return where in os.environ.get(LATE_PROCESS, "").split(",")


class _OddArray:
    """An array of a library of its own, of which the door "array" or "shape" is odd."""

    def __init__(self, engine: StageFault, array: np.ndarray) -> None:
        self._engine, self._array = engine, array
        self.dtype = array.dtype

    @property
    def shape(self) -> Any:
        return self._engine.at("shape", self._array.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._engine.at("array", self._array.copy())


class _OddLength:
    """The results of a run, as a sequence whose length is odd."""

    def __init__(self, engine: StageFault, results: list[np.ndarray]) -> None:
        self._engine, self._results = engine, results

    def __len__(self) -> int:
        return self._engine.at("length", len(self._results))  # type: ignore[no-any-return]

    def __getitem__(self, i: int) -> np.ndarray:
        return self._results[i]


class _StageExecutable(_FaultyExecutable):
    @property
    def _stage(self) -> StageFault:
        assert isinstance(self._engine, StageFault)
        return self._engine

    def serialize(self) -> bytes:
        return self._stage.at("serialize", super().serialize())  # type: ignore[no-any-return]

    def as_text(self) -> str:
        return self._stage.at("as_text", super().as_text())  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self._stage.at("delete", None)


class _StageCompiler(_FaultyCompiler):
    def load(self, blob: bytes) -> Executable:
        assert isinstance(self._engine, StageFault)
        made = _StageExecutable(self._engine, self._inner.load(blob))
        return self._engine.at("load", made)  # type: ignore[no-any-return]


def _kinds(stage: str) -> list[str]:
    """The kinds of a door. What reading results or a late run does to the process is what a first run does to it."""
    if stage in ("array", "shape", "length"):
        return [*RAISES, "hangs", "crashes", *RETURNS]
    found = [k for k in DEEDS if stage != "late_run" or k not in HARMS]
    if stage not in ("construct", "delete"):
        found += RETURNS
    if stage in ("run", "first_run", "late_run"):
        found += [*RESULTS, "reuses", *NUMBERS]
    if stage == "late_run":
        found += ["slow"]
    return found


def _make() -> dict[str, type[StageFault]]:
    made = {}
    for stage in DOORS:
        for kind in _kinds(stage):
            name = f"{stage}_{kind}"
            fields = {"name": name, "stage": stage, "kind": kind, "__module__": __name__, "__qualname__": name,
                      "__doc__": f"At the door {stage!r} it {kind.replace('_', ' ')}."}  # fmt: skip
            made[name] = type(name, (StageFault,), fields)
    return made


STAGE_FAULTS: Final = MappingProxyType(_make())
"""Every engine here by name, which is `<door>_<kind>`."""
globals().update(STAGE_FAULTS)
