"""The key of a compiled executable, as labelled rows: two keys that differ say in which row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xrt_core.engine.contract import CompileOptions, Engine
from xrt_core.ir.function import Function


@dataclass(frozen=True)
class CacheKey:
    """Everything that an executable depends on. rows: (label, text) in a fixed order."""

    rows: tuple[tuple[str, str], ...]

    @cached_property
    def digest(self) -> str:
        """Hex digest over all rows."""
        h = hashlib.blake2b(digest_size=20)
        for label, text in self.rows:
            h.update(f"{len(label)}:{label}={len(text)}:{text};".encode())
        return h.hexdigest()

    def differences(self, other: CacheKey) -> list[str]:
        """One line for each row that differs: why one is a miss where the other is stored."""
        mine, theirs = dict(self.rows), dict(other.rows)
        return [
            f"{label}: {mine.get(label, '(none)')} != {theirs.get(label, '(none)')}"
            for label in dict.fromkeys([*mine, *theirs])
            if mine.get(label) != theirs.get(label)
        ]


def cache_key(function: Function, engine: Engine, device: str, options: CompileOptions) -> CacheKey:
    """The key of `function` compiled by `engine` for `device` with `options`."""
    return CacheKey(
        (
            ("function", function.fingerprint),
            ("entry", _signature(function.params)),
            ("return", _signature(function.returns)),
            ("aliases", ", ".join(f"{a.output}<-{a.input}" for a in function.aliases)),
            ("engine", engine.name),
            ("engine fingerprint", engine.fingerprint(device)),
            ("device", device),
            ("phase", options.phase),
            ("fused", str(options.fused)),
            ("workspace_bytes", str(options.workspace_bytes)),
            ("max_batch_size", str(options.max_batch_size)),
            ("threads", str(options.threads)),
            ("extra", _canonical(options.extra)),
        )
    )


def _signature(params: Sequence[Any]) -> str:
    return ", ".join(str(p.type) for p in params)


def _canonical(value: Any) -> str:
    """A text that does not depend on the order of dicts and sets."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_canonical(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    return repr(value)
