"""Verdicts on disk: the outcome of an examination lies in the cache beside the executables that it is about."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from xrt_core.cache.disk import DiskCache, Miss
from xrt_core.cache.key import CacheKey
from xrt_core.cache.lru import LRU
from xrt_core.ir.fingerprint import function_lines
from xrt_core.ir.function import Function
from xrt_core.verify.verdict import Outcome

_REVISION: Final = 3
"""Raised with every change to examinations that makes older verdicts doubtful."""
_KNOWN: Final = 1024  # verdicts that a process remembers
_memory: LRU[Outcome] = LRU(_KNOWN)


def forget_all() -> None:
    """Forget the verdicts of this process's memory."""
    _memory.clear()


def verdict_key(executables: Sequence[CacheKey], settings: Any) -> CacheKey:
    """The key of a verdict: the rows of each engine's executable, what was asked, and how many processors it had.

    executables: keys of the candidates, in order. settings: a dataclass, all of whose fields matter.
    """
    rows: list[tuple[str, str]] = []
    for k, key in enumerate(executables):
        for label, text in key.rows:
            if not k:
                rows.append((label, text))
            elif (label, text) not in rows:
                rows.append((f"{key.row('engine')}: {label}", text))
    asked = ", ".join(f"{f.name}={getattr(settings, f.name)!r}" for f in dataclasses.fields(settings))
    return CacheKey((*rows, ("verdict", asked), ("processors", f"{_processors()}, examination {_REVISION}")))


def find_verdict(key: CacheKey, function: Function, disk: DiskCache | None) -> Outcome | None:
    """The verdict of a key from memory or disk, if there is one that fits the function."""
    found = _memory.get(key.digest)
    if found is None and disk is not None:
        hit = disk.read(key, _text(function))
        if isinstance(hit, Miss):
            return None
        try:
            found = Outcome.from_json(json.loads(hit.blob))
        except ValueError:
            return None
        _memory.put(key.digest, found)
    return found if found is not None and _fits(found, function) else None


def keep_verdict(key: CacheKey, function: Function, disk: DiskCache | None, outcome: Outcome) -> str:
    """Keep a verdict for this process, and on disk for others. Returns "", or why it is not on disk.

    One that failed is kept nowhere: what went wrong may not go wrong again.
    """
    if outcome.verdict == "failed":
        return "it failed"
    _memory.put(key.digest, outcome)
    if disk is None:
        return "there is no cache on disk"
    info = {
        "cluster": f"verdict on {function.name}",
        "nodes": len(function.body.nodes),
        "created": round(time.time(), 3),
        "compile_seconds": round(outcome.timings.get("compile", 0.0), 4),
        "verdict": outcome.verdict,
    }
    return disk.write(key, info, _text(function), json.dumps(outcome.to_json()).encode())


def _fits(outcome: Outcome, function: Function) -> bool:
    covered = sorted(i for p in outcome.pieces for i in p.nodes)
    return covered == list(range(len(function.body.nodes)))


def _text(function: Function) -> bytes:
    return "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
