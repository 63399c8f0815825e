"""Outcome: what the examination of one cluster found, as data that crosses processes and is kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

Verdict = Literal["ready", "wrong", "slower", "failed"]
"""wrong, slower: the host keeps all nodes; failed: it could not be compiled or examined."""

HOST: Final = "host"
NO_OFFENDERS: Final[Mapping[int, str]] = MappingProxyType({})
_NO_TIMINGS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes of the examined Function that one engine runs as one.

    engine: its name, or "host". nodes: indices into `function.body.nodes`, ascending. fused: False stands for the
    engine's unfused build.
    """

    engine: str
    nodes: tuple[int, ...]
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Faults:
    """What is known about a candidate that took its process with it.

    reason: what it did. offenders: node -> what is wrong with it. cuts: indices of nodes at which it has to be cut.
    """

    reason: str
    offenders: Mapping[int, str] = field(default_factory=lambda: NO_OFFENDERS)
    cuts: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `from_json` takes back."""
        return {"reason": self.reason, "offenders": list(self.offenders.items()), "cuts": list(self.cuts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Faults:
        """The faults that `to_json` gave."""
        offenders = {_index(i): _text(why) for i, why in data["offenders"]}
        return cls(_text(data["reason"]), MappingProxyType(offenders), tuple(_index(i) for i in data["cuts"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to do with one cluster.

    pieces: cover all nodes of the Function; one piece is the whole cluster as it was. reason: for people.
    timings: seconds, by "compile", "verify", "host", an engine's name, "<engine> unfused", ...
    errors: what each candidate that was turned down did.
    """

    verdict: Verdict
    pieces: tuple[Piece, ...]
    reason: str
    timings: Mapping[str, float] = field(default_factory=lambda: _NO_TIMINGS)
    errors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `from_json` takes back."""
        return {
            "verdict": self.verdict,
            "pieces": [{"engine": p.engine, "nodes": list(p.nodes), "fused": p.fused} for p in self.pieces],
            "reason": self.reason,
            "timings": dict(self.timings),
            "errors": list(self.errors),
        }

    @classmethod
    def from_json(cls, data: Any) -> Outcome:
        """The outcome that `to_json` gave. Raises ValueError for anything else."""
        try:
            pieces = tuple(
                Piece(_text(p["engine"]), tuple(_index(i) for i in p["nodes"]), bool(p["fused"]))
                for p in data["pieces"]
            )
            if data["verdict"] not in get_args(Verdict):
                raise ValueError(f"the verdict is {data['verdict']!r}")
            timings = {_text(k): float(v) for k, v in data["timings"].items()}
            errors = tuple(map(_text, data["errors"]))
            return cls(data["verdict"], pieces, _text(data["reason"]), MappingProxyType(timings), errors)
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
