"""Engines for the guard's tests, in a module that a worker can import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from xrt_core.engine.contract import Engine, EngineStatus, Executable, Phase, Support
from xrt_core.errors import UnsupportedError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Node
from xrt_core.runtime.plan import HOST, Lowered, make_plan
from xrt_core.testing.faults import Faulty, _FaultyExecutable
from xrt_core.testing.host_engine import HostExecutable

FAIL_WHILE = "XRT_TEST_FAIL_WHILE"
"""Environment variable: a file; while it is there, `FailsAWhile` does not compile."""


FAIL_HERE = "XRT_TEST_FAIL_HERE"
"""Environment variable: the process in which `WrongHere` is wrong."""


class Plain(Faulty):
    """The host as an engine."""

    name = "plain"


class Memo(Faulty):
    """Remembers results by inputs, which is faster than any host."""

    name = "memo"

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        key = tuple((id(self), x.shape, float(x.reshape(-1)[0]), float(x.reshape(-1)[-1])) for x in inputs)
        if key not in self._known:
            self._known[key] = run()
        return [r.copy() for r in self._known[key]]


class Sleeps(Faulty):
    """Right, and slower than the host, however busy the machine is."""

    name = "sleeps"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        time.sleep(0.3)
        return run()


class _Unserialisable(_FaultyExecutable):
    def serialize(self) -> bytes:
        raise UnsupportedError("this one cannot be stored")


class Unserialisable(Faulty):
    """Its executables cannot leave the process."""

    name = "unserialisable"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        return _Unserialisable(self, compile())


class WrongUntilStored(Faulty):
    """What it compiles is wrong, and right once it was serialised and loaded."""

    name = "wrong_until_stored"
    compiled: ClassVar[list[Executable]] = []

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        self.compiled.append(_Wrong(self, compile()))
        return self.compiled[-1]


class _Wrong(_FaultyExecutable):
    def run(self, *args: Any, **options: Any) -> Sequence[Any]:
        return [r + 1 for r in super().run(*args, **options)]


class Waits(Faulty):
    """Compiles once it may, in the process of the test (`guard_sandbox=False`)."""

    name = "waits"
    may = threading.Event()

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        self.may.wait(60)
        return super().on_compile(compile)


class FirstWaits(Faulty):
    """Takes symbolic shapes; its first compilation ends once it may, in the process of the test."""

    name = "first_waits"
    dynamic_dims = "any"
    may = threading.Event()
    compilations = 0
    done = 0

    @classmethod
    def reset(cls) -> None:
        cls.may.clear()
        cls.compilations = cls.done = 0

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        return Support.yes()

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        FirstWaits.compilations += 1
        if FirstWaits.compilations == 1:
            self.may.wait(60)
        FirstWaits.done += 1
        return super().on_compile(compile)


class FirstWaitsStatic(FirstWaits):
    """As that, for static shapes."""

    name = "first_waits_static"
    dynamic_dims = "none"


class FailsAWhile(Faulty):
    """Does not compile while a file is there."""

    name = "fails_a_while"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        if os.path.exists(os.environ[FAIL_WHILE]):
            raise RuntimeError("not now")
        return super().on_compile(compile)


class Picky(Memo):
    """Takes products only."""

    name = "picky"

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        return super().supports(node, device, phase) if node.op_type == "MatMul" else Support.no("products only")


class WrongMul(Faulty):
    """Its kernel of Mul is off."""

    name = "wrong_mul"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        made = compile()
        assert isinstance(made, HostExecutable)
        made._plan = make_plan(made.function.body, _lower_wrongly)
        return _Unserialisable(self, made)


class RightForOneSize(Faulty):
    """Says that it takes symbolic shapes, and is wrong for arrays of two rows."""

    name = "right_for_one_size"
    dynamic_dims = "any"
    rows = 2

    def supports(self, node: Node, device: str, phase: Phase) -> Support:
        return Support.yes()

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        return [r + 1 if inputs[0].shape[0] == self.rows else r for r in run()]


class WrongFor50Rows(RightForOneSize):
    """As that, for fifty rows, which no verification tries."""

    name = "wrong_for_50_rows"
    rows = 50


class WrongAbove50(Faulty):
    """Its kernel of Mul is off for large numbers."""

    name = "wrong_above_50"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        made = compile()
        assert isinstance(made, HostExecutable)
        made._plan = make_plan(made.function.body, _lower_wrongly_above_50)
        return _Unserialisable(self, made)


def _lower_wrongly_above_50(node: Node) -> Lowered:
    kernel = host_kernel(node)

    def off(arrays: Sequence[Any]) -> Any:
        large = any(np.abs(a).max() > 50 for a in arrays)
        return tuple(r * np.float32(1.5) if large else r for r in kernel(arrays))

    return Lowered(kernel if node.op_type != "Mul" else off, HOST, node.operator)


class WrongHere(Faulty):
    """Wrong in the process of the test only."""

    name = "wrong_here"

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        here = os.environ.get(FAIL_HERE) == str(os.getpid())
        return [r + 1 if here else r for r in run()]


def _lower_wrongly(node: Node) -> Lowered:
    kernel = host_kernel(node)
    off = kernel if node.op_type != "Mul" else lambda arrays: tuple(r * np.float32(1.5) for r in kernel(arrays))
    return Lowered(off, HOST, node.operator)


class Unthreaded(Faulty):
    """Keeps its inputs where the next run finds them: right on one thread, wrong on two."""

    name = "unthreaded"
    current: ClassVar[list[np.ndarray]] = []

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        results = run()
        type(self).current = [np.array(r) for r in results]
        time.sleep(5e-3)  # on a busy machine the other thread may come later
        return [r.copy() for r in self.current]


class RingOf16(Faulty):
    """Gives out 16 buffers in turn."""

    name = "ring_of_16"

    def __init__(self) -> None:
        self._ring: dict[Any, list[np.ndarray]] = {}
        self._runs = 0

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        self._runs += 1
        results = run()
        for i, r in enumerate(results):
            buffers = self._ring.setdefault((i, r.shape), [np.empty_like(r) for _ in range(16)])
            buffers[self._runs % 16][...] = r
        return [self._ring[i, r.shape][self._runs % 16] for i, r in enumerate(results)]


class Leaks(Faulty):
    """Keeps 64 KiB of every run."""

    name = "leaks"
    kept: ClassVar[list[np.ndarray]] = []

    def on_run(self, run: Callable[[], Sequence[Any]], inputs: Sequence[Any]) -> Any:
        self.kept.append(np.ones(64 << 10, np.uint8))
        return run()


class ChangesUmask(Faulty):
    """Its compiler sets the umask, the first time."""

    name = "changes_umask"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        if not _once:
            _once.append(os.umask(0o070 ^ os.umask(0)))
        return super().on_compile(compile)


class ChangesUmaskWhenProbed(ChangesUmask):
    """Does so when its library is looked for, which "auto" does with every registered engine: not in `ALL`."""

    name = "changes_umask_when_probed"

    def probe(self) -> EngineStatus:
        if not _once:
            _once.append(os.umask(0o070 ^ os.umask(0)))
        return super().probe()


_once: list[int] = []


class CrashesOnSinh(Faulty):
    """Its compiler aborts the process on a Sinh."""

    name = "crashes_on_sinh"

    def on_compile(self, compile: Callable[[], Executable]) -> Any:
        made = compile()
        assert isinstance(made, HostExecutable)
        if any(n.op_type == "Sinh" for n in made.function.body.nodes):
            self.on_sinh()
        return super().on_compile(lambda: made)

    def on_sinh(self) -> None:
        os.abort()


class HangsOnSinh(CrashesOnSinh):
    """Its compiler hangs on a Sinh."""

    name = "hangs_on_sinh"

    def on_sinh(self) -> None:
        time.sleep(3600)


ALL: tuple[type[Engine], ...] = (
    Plain, Memo, Sleeps, Unserialisable, WrongUntilStored, Waits, FailsAWhile, Picky, WrongMul, CrashesOnSinh,
    HangsOnSinh, Unthreaded, RingOf16, Leaks, ChangesUmask, WrongAbove50, WrongHere,
)  # fmt: skip
