"""The key of a compiled executable, as labelled rows: two keys that differ say in which row."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

import xrt_core
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import API_VERSION, CompileOptions, Engine
from xrt_core.files import storable
from xrt_core.ir.function import Function, digest
from xrt_core.ir.graph import every_node
from xrt_core.ir.operator_set import CORE_DOMAINS, find_operator, operator_owner

IGNORED_OPTIONS: Final[frozenset[str]] = frozenset()
"""Fields of `CompileOptions` that change no executable. Every other field is a row of every key, new ones included."""

_FUNCTION: Final = "function"
_CODE: Final = ("engine", "ir", "kernels")  # the parts of the core whose code decides what an engine compiles


@dataclass(frozen=True)
class CacheKey:
    """Everything that an executable depends on. rows: (label, text) in a fixed order, as entries can store them."""

    rows: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not "".join(map("".join, self.rows)).isascii():
            object.__setattr__(self, "rows", tuple((storable(label), storable(text)) for label, text in self.rows))

    @cached_property
    def digest(self) -> str:
        """Hex digest over all rows."""
        rows = (f"{len(label)}:{label}={len(text)}:{text};" for label, text in self.rows)
        return digest("".join(rows).encode())

    def of_function(self, function: Function) -> CacheKey:
        """The key with the function's own fingerprint."""
        return CacheKey(tuple((label, function.fingerprint if label == _FUNCTION else t) for label, t in self.rows))

    def row(self, label: str) -> str:
        """The text of a row, "" if there is none of that label."""
        return dict(self.rows).get(label, "")

    def differences(self, other: CacheKey) -> list[str]:
        """One line for each row that differs: why one is a miss where the other is stored."""
        mine, theirs = dict(self.rows), dict(other.rows)
        return [
            f"{label}: {mine.get(label, '(none)')} != {theirs.get(label, '(none)')}"
            for label in dict.fromkeys([*mine, *theirs])
            if mine.get(label) != theirs.get(label)
        ]


def cache_key(
    function: Function, engine: Engine, device: str, options: CompileOptions, fingerprint: str = ""
) -> CacheKey:
    """The key of `function` compiled by `engine` for `device` with `options`. fingerprint: what stands for the
    function, by default its own."""
    return CacheKey(
        (
            (_FUNCTION, fingerprint or function.fingerprint),
            ("entry", _signature(function.params)),
            ("return", _signature(function.returns)),
            ("aliases", ", ".join(f"{a.output}<-{a.input}" for a in function.aliases)),
            *engine_rows(engine, device),
            *(
                (f.name, canonical(getattr(options, f.name)))
                for f in dataclasses.fields(options)
                if f.name not in IGNORED_OPTIONS
            ),
            ("operators", _plugin_operators(function)),
            core_row(),
        )
    )


def engine_rows(engine: Engine, device: str) -> tuple[tuple[str, str], ...]:
    """The rows of a key that say which engine it is, in which state, and for which device."""
    return (
        ("engine", engine.name),
        ("engine package", package_state(type(inner_of(engine)).__module__, engine.package)),
        ("engine fingerprint", engine.fingerprint(device)),
        ("device", device),
    )


def core_row() -> tuple[str, str]:
    """The row of a key that says which state of this package made the entry."""
    return "xrt-core", f"{xrt_core.__version__}, contract {API_VERSION}{_core_code()}"


def _signature(params: Sequence[Any]) -> str:
    return ", ".join(str(p.type) for p in params)


def canonical(value: Any) -> str:
    """A text that does not depend on the order of dicts and sets, and leaves nothing of an array out."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{digest(value.tobytes())}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {canonical(value[k])}" for k in sorted(value, key=repr)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(canonical, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(canonical, value)) + "]"
    return repr(value)


@functools.cache
def package_state(module: str, package: str) -> str:
    """Name and version of the package that a module is of, and the state of its code where that is a source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = f"{package} {version(package)}"
    except PackageNotFoundError:  # an engine that the program registered itself
        found = f"{package} (not installed)"
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return found
    path = pathlib.Path(file)
    return found + _source_state((path.parent if (path.parent / "__init__.py").exists() else path,))


def _plugin_operators(function: Function) -> str:
    """The operators of plugins that the function has, with their packages and the state of their kernels' code."""
    rows = []
    for name in {(n.domain, n.op_type, n.version) for n in every_node(function.body) if n.domain not in CORE_DOMAINS}:
        o = find_operator(*name)
        if o is None:
            continue
        kernels = (o.kernel, *(k.function for k in o.engine_kernels))
        files = {getattr(sys.modules.get(getattr(k, "__module__", "")), "__file__", None) for k in kernels if k}
        state = _source_state(sorted(pathlib.Path(f) for f in files if f)) if any(files) else ""
        rows.append(f"{o.schema.domain}.{o.schema.op_type}-{o.schema.since_version} of {operator_owner(o)}{state}")
    return ", ".join(sorted(rows))


@functools.cache
def _core_code() -> str:
    root = pathlib.Path(xrt_core.__file__).parent
    return _source_state(tuple(root / part for part in _CODE))


def _source_state(paths: Sequence[pathlib.Path]) -> str:
    """The newest change of Python files outside an installation: an edit invalidates what was compiled before it.

    "" for installed packages, whose version says it all.
    """
    if any("-packages" in part for part in paths[0].parts):
        return ""
    times = []
    for path in paths:
        if path.is_file():
            times.append(path.stat().st_mtime_ns)
        for folder, _, names in os.walk(path):
            times += [os.stat(os.path.join(folder, n)).st_mtime_ns for n in names if n.endswith(".py")]
    text = ",".join(map(str, sorted(times)))
    return f", source {digest(text.encode())[:12]}"
