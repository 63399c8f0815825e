"""Outcome: the result of evaluating one cluster, as plain data for other processes and the disk cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

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
    nodes: tuple[int, ...]
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What runs one cluster.

    pieces: cover all nodes of the Function; a single piece is the whole cluster. reason: human-readable. timings:
    seconds, by "compile", "verify", "host", an engine's name, "<engine> unfused", ... errors: why candidates were
    rejected. finite_only: the engines' results are the host's for finite inputs, and not for NaN and infinities.
    """

    verdict: Verdict
    pieces: tuple[Piece, ...]
    reason: str
    timings: Mapping[str, float] = field(default_factory=lambda: _NO_TIMINGS)
    errors: tuple[str, ...] = ()
    finite_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain data, for `from_json`."""
        return {
            "verdict": self.verdict,
            "pieces": [{"engine": p.engine, "nodes": list(p.nodes), "fused": p.fused} for p in self.pieces],
            "reason": self.reason,
            "timings": dict(self.timings),
            "errors": list(self.errors),
            "finite_only": self.finite_only,
        }

    @classmethod
    def from_json(cls, data: Any) -> Outcome:
        """The outcome that `to_json` described. Raises ValueError for anything else."""
        try:
            pieces = tuple(
                Piece(_text(p["engine"]), tuple(_index(i) for i in p["nodes"]), bool(p["fused"]))
                for p in data["pieces"]
            )
            if data["verdict"] not in get_args(Verdict):
                raise ValueError(f"the verdict is {data['verdict']!r}")
            timings = {_text(k): float(v) for k, v in data["timings"].items()}
            errors = tuple(map(_text, data["errors"]))
            return cls(
                data["verdict"],
                pieces,
                _text(data["reason"]),
                MappingProxyType(timings),
                errors,
                data.get("finite_only") is True,
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"this is no outcome: {type(e).__name__}: {e}") from None


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is no text")
    return x


def _index(x: Any) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or x < 0:
        raise TypeError(f"{x!r} is no index")
    return x
