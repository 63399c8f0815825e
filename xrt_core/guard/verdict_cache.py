"""The verdict cache: outcomes of verification and answers to capability queries, as JSON entries of the disk cache.

They are kept beside the executables that they are about, so that other processes need neither verify nor query again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from xrt_core.cache.disk import DiskCache, Miss
from xrt_core.cache.key import CacheKey
from xrt_core.cache.lru import LRU
from xrt_core.errors import CacheError
from xrt_core.files import decode, encode
from xrt_core.ir.function import Function, function_lines
from xrt_core.verify.verdict import Outcome

T = TypeVar("T")

_REVISION: Final = 6
"""Raised with every change of the verification that invalidates older verdicts."""
_CAPABILITY_REVISION: Final = "2"  # the same for answers to capability queries
_REQUIREMENT: Final = re.compile(r"[A-Za-z0-9._-]+")
_memory: LRU[Outcome] = LRU(1024)


def forget_all() -> None:
    """Clear the verdicts in this process's memory."""
    _memory.clear()


def verdict_key(executables: Sequence[CacheKey], settings: Any) -> CacheKey:
    """The key of a verdict: the rows of each candidate's executable, the settings, and the number of processors.

    executables: keys of the candidates, in order. settings: a dataclass, all of whose fields count.
    """
    rows: list[tuple[str, str]] = []
    for k, key in enumerate(executables):
        for label, text in key.rows:
            if not k:
                rows.append((label, text))
            elif (label, text) not in rows:
                rows.append((f"{key.row('engine')}: {label}", text))
    text = ", ".join(f"{f.name}={getattr(settings, f.name)!r}" for f in dataclasses.fields(settings))
    return CacheKey((*rows, ("verdict", text), ("processors", f"{_processors()}, verification {_REVISION}")))


def find_verdict(key: CacheKey, function: Function, disk: DiskCache | None) -> Outcome | None:
    """The verdict of a key in memory or on disk, if it fits the function; None otherwise."""
    found = _memory.get(key.digest)
    if found is None and (found := read_json(key, function, disk, Outcome)) is not None:
        _memory.put(key.digest, found)
    return found if found is not None and found.covers(len(function.body.nodes)) else None


def keep_verdict(key: CacheKey, function: Function, disk: DiskCache | None, outcome: Outcome) -> str:
    """Keep a verdict in memory and on disk. Returns "", or why it is not on disk.

    "failed" is not kept: what went wrong may not go wrong again.
    """
    if outcome.verdict == "failed":
        return "it failed"
    _memory.put(key.digest, outcome)
    seconds = outcome.timings.get("compile", 0.0)
    return write_json(key, f"verdict on {function.name}", function, disk, outcome.to_json(), seconds, outcome.verdict)


def answers_key(executable: CacheKey) -> CacheKey:
    """The key of an engine's answers about the nodes of a function, from the key of its executable."""
    return CacheKey((*executable.rows, ("answers", _CAPABILITY_REVISION)))


def probe_key(name: str, package: str, version: str) -> CacheKey:
    """The key of an engine's probe: its package, the installed versions of its requirements, and the interpreter."""
    rows = [("engine", name), ("package", f"{package} {version}"), ("probe", _CAPABILITY_REVISION)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in sorted(importlib.metadata.requires(package) or ()):
            found = _REQUIREMENT.match(requirement)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                if found is not None:
                    rows.append((f"requires {found[0]}", importlib.metadata.version(found[0])))
    return CacheKey((*dict(rows).items(), ("python", f"{sys.executable} {sys.version}")))


def read_json(key: CacheKey, function: Function | None, disk: DiskCache | None, type: type[T]) -> T | None:
    """The data of an entry of the disk cache, of a type that `decoding` knows; None if there is none, or of another.

    function: that it is about, None for none.
    """
    hit = None if disk is None else disk.read(key, _text(function))
    if hit is None or isinstance(hit, Miss):
        return None
    try:
        return decode(hit.blob, type, "the entry", CacheError)
    except CacheError:
        return None


def write_json(
    key: CacheKey,
    title: str,
    function: Function | None,
    disk: DiskCache | None,
    data: Any,
    compile_seconds: float = 0.0,
    verdict: str = "",
) -> str:
    """Write an entry for `read_json`. title: shown by `xrt cache`. Returns "", or why nothing was written."""
    if disk is None:
        return "there is no disk cache"
    info: dict[str, object] = {
        "cluster": title,
        "nodes": 0 if function is None else len(function.body.nodes),
        "created": round(time.time(), 3),
        "compile_seconds": round(compile_seconds, 4),
    }
    if verdict:
        info["verdict"] = verdict
    return disk.write(key, info, _text(function), encode(data))


def _text(function: Function | None) -> bytes:
    return b"" if function is None else "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
