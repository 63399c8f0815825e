"""Functions, keys and an engine that counts its work, for the tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.cache.key import CacheKey, cache_key
from xrt_core.engine.contract import CompileOptions, Executable, Function, GraphCompiler
from xrt_core.ir.function import function_lines
from xrt_core.ir.graph import Value
from xrt_core.testing.functions import function, node, value
from xrt_core.testing.host_engine import HostCompiler, HostEngine

OPTIONS = CompileOptions()


class CountingEngine(HostEngine):
    """The host as an engine that serialises, and counts what it compiles and loads."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0

    def compiler(self, device: str, options: CompileOptions) -> GraphCompiler:
        return _CountingCompiler(self)


class _CountingCompiler(HostCompiler):
    def __init__(self, engine: CountingEngine) -> None:
        self._engine = engine

    def compile(self, *arguments: Any) -> Executable:
        self._engine.compiled += 1
        return super().compile(*arguments)

    def load(self, blob: bytes) -> Executable:
        self._engine.loaded += 1
        return super().load(blob)


def shifted(by: float, shape: Sequence[int] = (2, 3)) -> Function:
    """y = x + by."""
    x, y = value("x", *shape), value("y", *shape)
    c = Value.constant(np.full(shape, by, np.float32), "c")
    return function(f"shifted_{by}", [x], [node("Add", [x, c], [y])], [y])


def key_of(f: Function, options: CompileOptions = OPTIONS) -> CacheKey:
    """The key of a function on the host engine."""
    return cache_key(f, HostEngine(), "cpu", options)


def text_of(f: Function) -> bytes:
    """What is stored and compared."""
    return "\n".join(function_lines(f)).encode("utf-8", "surrogatepass")
