"""What engines said in a child, kept on disk: who did no harm there is not asked there again, by any process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import sys
import time
from typing import Final

from xrt_core.cache.disk import DiskCache, Miss
from xrt_core.cache.key import CacheKey
from xrt_core.errors import XRTError
from xrt_core.guard.asking import Answers
from xrt_core.ir.fingerprint import function_lines
from xrt_core.ir.function import Function
from xrt_core.ir.support import Support

_REVISION: Final = "1"
"""Raised with every change that makes older answers doubtful."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def answers_key(executable: CacheKey) -> CacheKey:
    """The key of an engine's answers about the nodes of a function, from that of its executable of all of them."""
    return CacheKey((*executable.rows, ("answers", _REVISION)))


def find_answers(key: CacheKey, function: Function, disk: DiskCache) -> Answers | None:
    """The answers of a key, one for each node; None where there are none."""
    hit = disk.read(key, _text(function))
    if isinstance(hit, Miss):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(hit.blob)
        supports = [Support(bool(ok), str(reason)) for ok, reason in found["supports"]]
        if len(supports) == len(function.body.nodes):
            return Answers(supports, str(found["fault"]))
    return None


def keep_answers(key: CacheKey, function: Function, disk: DiskCache, answers: Answers) -> None:
    """Keep answers that were given without harm."""
    if answers.failure is None:
        blob = json.dumps({"supports": [list(s) for s in answers.supports], "fault": answers.fault})
        info = _info(f"answers about {function.name}", len(function.body.nodes))
        disk.write(key, info, _text(function), blob.encode())


def probe_key(name: str, package: str, version: str) -> CacheKey:
    """The key of an engine's probe: its package, what that requires, as it is installed, and the interpreter."""
    rows = [("engine", name), ("package", f"{package} {version}"), ("probe", _REVISION)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in sorted(importlib.metadata.requires(package) or ()):
            found = _NAME.match(requirement)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                if found is not None:
                    rows.append((f"requires {found[0]}", importlib.metadata.version(found[0])))
    return CacheKey((*dict(rows).items(), ("python", f"{sys.executable} {sys.version}")))


def was_harmless(key: CacheKey, disk: DiskCache) -> bool:
    """Whether an engine has been probed in a child before, and the child lived on."""
    return not isinstance(disk.read(key, b""), Miss)


def keep_harmless(key: CacheKey, name: str, disk: DiskCache) -> None:
    """Note that an engine has been probed in a child that lived on."""
    disk.write(key, _info(f"probe of {name}", 0), b"", b"{}")


def usable(disk: DiskCache | None) -> DiskCache | None:
    """The cache, where it may be read now; entries that are to be made anew ("verify") are not read."""
    with contextlib.suppress(XRTError):
        if disk is not None and disk.mode != "verify":
            disk.prepare()
            return disk
    return None


def _info(what: str, nodes: int) -> dict[str, object]:
    return {"cluster": what, "nodes": nodes, "created": round(time.time(), 3), "compile_seconds": 0.0}


def _text(function: Function) -> bytes:
    return "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")
