"""Engines for tests: they run what they take by the host's kernels, and fail where they are told to."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from xrt_core.engine import engines
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import Engine, EngineStatus, Executable, Function, GraphCompiler, Support
from xrt_core.errors import CompileError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Node
from xrt_core.kernels import find_kernel
from xrt_core.runtime.plan import HOST, Lowered, make_plan

_serial = itertools.count()
Run = Callable[[Sequence[Any]], Sequence[Any]]


class FakeExecutable(Executable):
    """Runs `call`; counts in `engine.runs`."""

    def __init__(self, engine: FakeEngine, call: Run) -> None:
        self.engine, self.call = engine, call

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        self.engine.runs += 1
        if self.engine.on_run is not None:
            replaced = self.engine.on_run(inputs)
            if replaced is not None:
                return replaced
        return self.call(inputs)


class FakeCompiler(GraphCompiler):
    """Plans the function for the host; keeps it in `engine.compiled`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def compile(self, function: Function, entry_params: Any, return_params: Any, aliases: Any) -> Executable:
        self.engine.compiled.append(function)
        if self.engine.on_compile is not None:
            self.engine.on_compile(function)
        call = make_plan(function.body, lambda n: Lowered(host_kernel(n), HOST, n.operator)).run
        made = FakeExecutable(self.engine, call)
        self.engine.executables.append(made)
        return made


class FakeEngine(Engine):
    """Takes the nodes that `takes` says, of those that have a portable kernel of static shape.

    on_compile(function), on_run(inputs): called first; may raise; a result of on_run takes the place of the real one.
    """

    name = "fake"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self) -> None:
        self.takes: Callable[[Node], bool] = lambda node: True
        self.on_compile: Callable[[Function], None] | None = None
        self.on_run: Callable[[Sequence[Any]], Sequence[Any] | None] | None = None
        self.supports_hook: Callable[[Node], Any] | None = None
        self.status = EngineStatus(True, "1", ("cpu",))
        self.compiled: list[Function] = []
        self.executables: list[FakeExecutable] = []
        self.runs = 0
        self.serial = next(_serial)

    def probe(self) -> EngineStatus:
        return self.status

    def supports(self, node: Node, device: str, phase: Any) -> Support:
        if self.supports_hook is not None:
            return self.supports_hook(node)  # type: ignore[no-any-return]
        kernel = find_kernel(node.domain, node.op_type)
        why = "no kernel" if kernel is None else kernel.why_dynamic(node)
        if why is not None:
            return Support.no(why)
        for i in kernel.static:  # type: ignore[union-attr]
            if i < len(node.inputs) and node.inputs[i] is not None and node.inputs[i].data is None:  # type: ignore[union-attr]
                return Support.no(f"input {i} must be known")
        return Support.yes() if self.takes(node) else Support.no("not wanted")

    def compiler(self, device: str, options: Any) -> GraphCompiler:
        return FakeCompiler(self)

    def fingerprint(self, device: str) -> str:
        return f"fake {self.serial}"  # each test's engine is another one to the process-wide cache


class SecondEngine(FakeEngine):
    """Another engine of the same kind."""

    name = "second"


@contextmanager
def fake_engine(kind: type[FakeEngine] = FakeEngine) -> Iterator[FakeEngine]:
    """The engine registered for the time of a test, by its name."""
    engines.register(kind)
    try:
        made = inner_of(engines.get(kind.name))
        assert isinstance(made, kind)
        yield made
    finally:
        engines.unregister(kind.name)


def chosen(seed: int, share: int) -> Callable[[Node], bool]:
    """Takes about `share` of ten nodes, decided by the node's name alone."""
    return lambda node: zlib.crc32(f"{seed}{node.name}{node.op_type}".encode()) % 10 < share


def refuses(message: str) -> Callable[[Any], None]:
    """Raises CompileError for everything."""

    def refuse(_: Any) -> None:
        raise CompileError(message)

    return refuse
