"""Subject: the engine under test, found by name or by "module:Class", and the short ways to compile and run on it."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from packaging.requirements import Requirement

from xrt_core import __version__
from xrt_core.engine import engines
from xrt_core.engine.boundary import CompilerProxy, inner_of, mover, read
from xrt_core.engine.contract import (
    CompileOptions,
    Engine,
    EngineStatus,
    Executable,
    Function,
    GraphCompiler,
    Phase,
    Support,
)
from xrt_core.engine.device_kinds import kinds
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import RegistrationError
from xrt_core.ir.graph import Node
from xrt_core.plugins.discovery import Discovery, Plugin
from xrt_core.testing.capabilities import Capabilities


class Subject:
    """An engine under test.

    spec: its name, or "module:Class" of one that no installed package provides; such a class is known to a manager
        of the kit's own, so that it takes part in nothing else of the process.
    """

    def __init__(self, spec: str, device: str | None = None, capabilities: Capabilities | None = None) -> None:
        self.spec = spec
        self.is_installed = ":" not in spec
        if self.is_installed:
            self.manager: EngineManager = engines
            self.name = spec
        else:
            engine = load_class(spec)
            self.manager = EngineManager(Discovery(__version__, path=[]))
            self.manager.register(engine)
            self.name = engine.name
        self._device = device
        self._capabilities = capabilities
        self._compiler: GraphCompiler | None = None
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The engine. Raises as `EngineManager.get`."""
        return inner_of(self.manager.get(self.name))

    @property
    def status(self) -> EngineStatus:
        """What its probe says. Raises as `EngineManager.status`."""
        return self.manager.status(self.name)

    @property
    def device(self) -> str:
        """The device that the tests run on."""
        return self.manager.device(self.engine, self._device)

    @property
    def is_known_elsewhere(self) -> bool:
        """Whether another process can find the engine: it is installed, or its class can be imported."""
        return "<locals>" not in self.spec if not self.is_installed else self.plugin is not None

    @property
    def plugin(self) -> Plugin | None:
        """The entry point that brings the engine; None for one of this process."""
        found = Discovery(__version__).plugins("xrt.engines").get(self.name) if self.is_installed else None
        return found[0] if found else None

    @functools.cached_property
    def toolkit(self) -> tuple[str, ...]:
        """Top-level modules of the engine's library: as declared, else those of what its package requires."""
        declared = self.capabilities.toolkit
        if declared is not None:
            return declared
        if self.plugin is None:
            return ()
        from importlib.metadata import packages_distributions, requires

        wanted = {Requirement(r).name.lower() for r in self.plugin.requirements if "extra ==" not in r}
        shared = {"xrt-core", *(Requirement(r).name.lower() for r in requires("xrt-core") or ())}
        return tuple(
            sorted(m for m, d in packages_distributions().items() if {n.lower() for n in d} & (wanted - shared))
        )

    @property
    def capabilities(self) -> Capabilities:
        """The suite's answers, else those of the engine's own `conformance`, else none."""
        if self._capabilities is not None:
            return self._capabilities
        said: Mapping[str, Any] = getattr(self.engine, "conformance", {})
        known = {f.name for f in fields(Capabilities)}
        unknown = sorted(set(said) - known)
        if unknown:
            raise RegistrationError(
                f"engine {self.name!r}: its `conformance` names {unknown[0]!r}; it may name {', '.join(sorted(known))}"
            )
        return Capabilities(**said)

    def supports(self, node: Node, phase: Phase = "inference") -> Support:
        """What the engine says about a node; what it raises is raised."""
        return self.engine.supports(node, self.device, phase)

    def compile(self, function: Function, options: CompileOptions | None = None) -> Executable:
        """The function's executable, by one compiler for all calls without options. Raises AssertionError where the
        engine gives something else than an Executable."""
        compiler = self.compiler(options)
        made: Any = compiler.compile(function, function.params, function.returns, function.aliases)
        assert isinstance(made, Executable), (
            f"the compiler of engine {self.name!r} ({self.engine.package}) returned a {type(made).__name__} for "
            f"{function.name}, expected an Executable"
        )
        return made

    def compiler(self, options: CompileOptions | None = None) -> GraphCompiler:
        """A compiler for the device; the same one for all calls without options."""
        if options is not None:
            return self._compiler_for(options)
        with self._lock:
            if self._compiler is None:
                self._compiler = self._compiler_for(CompileOptions())
            return self._compiler

    def _compiler_for(self, options: CompileOptions) -> GraphCompiler:
        """The engine's own compiler; on a kind of device with arrays of its own, one whose executables move inputs."""
        made = self.engine.compiler(self.device, options)
        return made if mover(self.device) is None else CompilerProxy(made, self.name, self.engine.package, self.device)

    def run(self, executable: Executable, inputs: Sequence[Any], **options: Any) -> list[np.ndarray]:
        """Results as NumPy arrays. options: of `Executable.run`."""
        return [as_numpy(r) for r in executable.run(inputs, **options)]

    def __repr__(self) -> str:
        return f"<Subject {self.spec}>"


@functools.cache
def subject_for(spec: str, device: str | None, capabilities: Capabilities | None) -> Subject:
    """The one Subject of these answers: compilers and loaded engines are kept between tests."""
    return Subject(spec, device, capabilities)


def load_class(spec: str) -> type[Engine]:
    """The engine class of "module:Class". Raises RegistrationError for what is not one."""
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise RegistrationError(f"there is no engine {spec!r}: {e}; give a name, or module:Class") from e
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise RegistrationError(f"{spec!r} is {found!r}, not a subclass of xrt_core.engine.Engine")
    return found


def spec_of(engine: str | type[Engine]) -> str:
    """The spec of a name, or of a class."""
    return engine if isinstance(engine, str) else f"{engine.__module__}:{engine.__qualname__}"


def as_numpy(result: Any) -> np.ndarray:
    """A result as a NumPy array, by its device kind, `numpy.asarray` or DLPack as the contract allows."""
    if kinds.of_array(type(result)) is not None:
        return read(result)
    if hasattr(result, "__cuda_array_interface__") and hasattr(result, "get"):
        return np.asarray(result.get())
    if hasattr(result, "__array__") or isinstance(result, np.ndarray) or not hasattr(result, "__dlpack__"):
        return np.asarray(result)
    return np.from_dlpack(result)


def address(array: Any) -> int | None:
    """Where an array's memory begins, by whichever protocol it has, without holding on to it; None if unknown."""
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        found = getattr(array, protocol, None)
        if found is not None:
            return int(found["data"][0])
    for method in ("unsafe_buffer_pointer", "data_ptr"):  # JAX, torch
        found = getattr(array, method, None)
        if found is not None:
            return int(found())
    return None
