"""Outcome: the result of evaluating one cluster, as plain data for other processes and the disk cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from xrt_core.files import Size

Verdict = Literal["ready", "wrong", "slower", "failed"]
"""ready: an engine takes nodes. wrong, slower: the host keeps all of them. failed: nothing could be compiled or run."""

HOST: Final = "host"
_NO_TIMINGS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes of the evaluated Function that one engine runs as one executable.

    engine: its name, or "host". nodes: indices into `function.body.nodes`, ascending. fused: False for the engine's
    unfused build.
    """

    engine: str
    nodes: tuple[Size, ...]
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What runs one cluster.

    pieces: cover all nodes of the Function; a single piece is the whole cluster. reason: human-readable. timings:
    seconds, by "compile", "verify", "host", an engine's name, "<engine> unfused", ... errors: why candidates were
    rejected. finite_only: the engines' results are the host's for finite inputs, and not for NaN and infinities.
    serialised: they are right in one thread at a time, and wrong in two at once. notes: what the engines change in the
    process, beside their results. timed: which of `timings` is that of the choice, "" where nothing was timed.
    provisional: the machine was busy while candidates were timed, so that another may be the fastest. untried: engines
    that were not compared, as the first one that was right answers meanwhile.
    """

    verdict: Verdict
    pieces: tuple[Piece, ...]
    reason: str
    timings: Mapping[str, float] = field(default_factory=lambda: _NO_TIMINGS)
    errors: tuple[str, ...] = ()
    finite_only: bool = False
    serialised: bool = False
    notes: tuple[str, ...] = ()
    timed: str = ""
    provisional: bool = False
    untried: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, of which `decoding` makes an Outcome again."""
        return {
            "verdict": self.verdict,
            "pieces": [{"engine": p.engine, "nodes": list(p.nodes), "fused": p.fused} for p in self.pieces],
            "reason": self.reason,
            "timings": dict(self.timings),
            "errors": list(self.errors),
            "finite_only": self.finite_only,
            "serialised": self.serialised,
            "notes": list(self.notes),
            "timed": self.timed,
            "provisional": self.provisional,
            "untried": list(self.untried),
        }

    def covers(self, nodes: int) -> bool:
        """Whether the pieces have each of the function's nodes once."""
        return sorted(i for p in self.pieces for i in p.nodes) == list(range(nodes))


@dataclass(frozen=True, slots=True)
class SavedVerdicts:
    """What a saved module holds of them. verdicts: outcomes by the fingerprints of their functions."""

    verdicts: Mapping[str, Outcome] = field(default_factory=dict)
