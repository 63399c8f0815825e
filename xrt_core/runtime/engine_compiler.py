"""Compilation: from a Function to an Executable of one engine, through the store of executables."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from xrt_core.cache.key import CacheKey
from xrt_core.cache.store import ExecutableStore
from xrt_core.engine.contract import CompileOptions, Engine, Executable, Function, GraphCompiler
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import EngineError, RegistrationError
from xrt_core.events import EventLog


class Compilation:
    """Compiles Functions for a fixed set of engines, each on one device. Safe to use from many threads.

    engines: with their devices, in the order in which they are tried. options: for all of them; their `extra` has the
    options of single engines, by the engine's name. store: where executables are looked for before they are compiled.
    Compilers are made at first use and kept.
    """

    def __init__(
        self,
        engines: Sequence[tuple[Engine, str]],
        options: CompileOptions,
        store: ExecutableStore,
        events: EventLog,
    ) -> None:
        self.engines = {engine.name: (engine, device) for engine, device in engines}
        self.options = options
        self.events = events
        self._store = store
        self._compilers: dict[tuple[str, bool, bool], GraphCompiler] = {}

    def without(self, names: Collection[str]) -> Compilation:
        """The same with fewer engines; compilers are shared."""
        kept = [e for name, e in self.engines.items() if name not in names]
        other = Compilation(kept, self.options, self._store, self.events)
        other._compilers = self._compilers
        return other

    def through(self, store: ExecutableStore) -> Compilation:
        """The same engines and options with another store; compilers are shared."""
        other = Compilation(tuple(self.engines.values()), self.options, store, self.events)
        other._compilers = self._compilers
        return other

    def sharing(self) -> Compilation:
        """The same for executables all of which share the cores with others (see `CompileOptions.shared`)."""
        other = Compilation(tuple(self.engines.values()), replace(self.options, shared=True), self._store, self.events)
        other._compilers = self._compilers
        return other

    def executable(self, function: Function, engine: str, fused: bool = True, shared: bool = False) -> Executable:
        """The executable of `function` on an engine. fused: False for the engine's build without fusions. shared: see
        `CompileOptions`.

        Raises CompileError where the engine broke its contract, and whatever else the engine raises.
        """
        owner, device = self.engines[engine]
        options = self.options_for(engine, fused, shared)

        def compile(compiler: GraphCompiler) -> Executable:
            nodes = len(function.body.nodes)
            with self.events.span("compile", engine=engine, cluster=function.name, nodes=nodes):
                return compiler.compile(function, function.params, function.returns, function.aliases)

        return self._store.obtain(
            function, owner, device, options, lambda: self._compiler(engine, fused, shared), compile
        )

    def stored(
        self, function: Function, engine: str, fused: bool = True, shared: bool = False
    ) -> Executable | None:
        """What the disk holds for `executable`, loaded once more; None where there is nothing that loads."""
        owner, device = self.engines[engine]
        options = self.options_for(engine, fused, shared)
        return self._store.load(function, owner, device, options, lambda: self._compiler(engine, fused, shared))

    def key(self, function: Function, engine: str) -> CacheKey:
        """The key of `executable`."""
        owner, device = self.engines[engine]
        return self._store.key(function, owner, device, self.options_for(engine))

    def unhashed_bytes(self, function: Function) -> int:
        """Bytes of constants that `key` would have to hash, because no process has done it."""
        return self._store.unhashed_bytes(function)

    def check_options(self) -> None:
        """Raises OptionError where an engine does not take an option of its own that it was given."""
        for name in self.options.extra:
            if name in self.engines:
                with contextlib.suppress(EngineError):  # its other errors are reported when it compiles
                    self._compiler(name, self.options.fused)

    def options_for(self, engine: str, fused: bool = True, shared: bool = False) -> CompileOptions:
        """What one engine's compiler gets."""
        shared = shared or self.options.shared
        extra = self.options.extra
        if not extra and (fused, shared) == (self.options.fused, self.options.shared):
            return self.options
        return replace(self.options, fused=fused, shared=shared, extra=extra.get(engine, {}))

    def _compiler(self, engine: str, fused: bool, shared: bool = False) -> GraphCompiler:
        shared = shared or self.options.shared
        made = self._compilers.get((engine, fused, shared))
        if made is None:  # without a lock: one that hangs in its engine must not block the others
            new = self._new_compiler(*self.engines[engine], fused, shared)
            made = self._compilers[engine, fused, shared] = new
        return made

    def _new_compiler(self, engine: Engine, device: str, fused: bool, shared: bool) -> GraphCompiler:
        compiler = engine.compiler(device, self.options_for(engine.name, fused, shared))
        try:
            op_kernels.validate(engine.name)
        except RegistrationError as e:  # a kernel of an unknown operator, never used: a bug of its package
            self.events.emit("kernels.invalid", level=logging.WARNING, engine=engine.name, error=str(e))
        return compiler
