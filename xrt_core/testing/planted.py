"""Faults in an engine of another package: subclasses of it whose executables fail as `faults.FAULTS` do.

A class is an attribute of this module, ENGINE__FAULT, so that the guard's worker process, which is told the module and
the name of a class, has it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from xrt_core.engine import engines
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import (
    DEFAULT_RUN_OPTIONS,
    CompileOptions,
    Engine,
    Executable,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    RunOptions,
)
from xrt_core.testing.faults import FAULTS, Faulty
from xrt_core.testing.subject import as_numpy

SEPARATOR = "__"


class _PlantedExecutable(Executable):
    """Runs the engine's own through `on_run` of the fault, which sees results as NumPy arrays."""

    def __init__(self, fault: Faulty, inner: Executable) -> None:
        self._fault = fault
        self._inner = inner

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        def run() -> list[Any]:
            return [as_numpy(r) for r in self._inner.run(inputs, run_options, True)]

        results: Any = self._fault.on_run(run, inputs)
        return results  # type: ignore[no-any-return]  # a fault may be here


class _PlantedCompiler(GraphCompiler):
    def __init__(self, fault: Faulty, inner: GraphCompiler) -> None:
        self._fault = fault
        self._inner = inner

    def compile(
        self,
        function: Function,
        entry_params: Sequence[Parameter],
        return_params: Sequence[Parameter],
        aliases: Sequence[InputOutputAlias],
    ) -> Executable:
        def compile() -> Executable:
            return self._inner.compile(function, entry_params, return_params, aliases)

        if type(self._fault).on_compile is Faulty.on_compile:
            return _PlantedExecutable(self._fault, compile())
        made: Any = self._fault.on_compile(compile)
        return made  # type: ignore[no-any-return]  # a fault may be here


@functools.cache
def planted(engine: type[Engine], fault: str) -> type[Engine]:
    """The engine with a fault of `FAULTS` that is one of its compiler or its executables; another engine by name."""
    build: Callable[[], Faulty] = FAULTS[fault]

    class Planted(engine):  # type: ignore[misc, valid-type]
        asynchronous = False
        array_families = ()

        def __init__(self) -> None:
            super().__init__()
            self._fault = build()

        def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
            return _PlantedCompiler(self._fault, super().compiler(device, options))

    Planted.name = f"{engine.name}{SEPARATOR}{fault}"
    Planted.__module__, Planted.__qualname__ = __name__, Planted.name
    return Planted


def __getattr__(name: str) -> type[Engine]:
    engine, separator, fault = name.rpartition(SEPARATOR)
    if not separator or fault not in FAULTS or engine not in engines.names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has ENGINE{SEPARATOR}FAULT")
    return planted(type(inner_of(engines.get(engine))), fault)
