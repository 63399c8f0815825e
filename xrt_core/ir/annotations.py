"""What is known about a node beside its semantics: where it came from, and where it should run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

MARK: Final = "xrt.mark"
"""Key of an ONNX node's `metadata_props` that names the engine the node is marked for, or "host"."""
REGION: Final = "xrt.region"
"""Key beside MARK that tells regions of one engine apart; nodes of one label are one region."""

Phase = Literal["train", "inference"]
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's code that made a node."""

    filename: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Annotations:
    """Typed annotations of a node. None of them changes what the node computes.

    engine: name of the engine the node is marked for ("host" keeps it on the host; None: no mark).
    region: which marked region of that engine the node belongs to; nodes of one label are one region.
    device: device the node is placed on, such as "cpu" or "cuda:0".
    sbp, placement: SBP signature per output ("split(0)", "broadcast", "partial_sum") and the devices it spans.
    phase: training or inference, where a node belongs to only one.
    model_update: the node writes variables (an optimiser's update).
    aliases: pairs (output index, input index) that share storage.
    source: the line of the user's code.
    doc, metadata: ONNX `doc_string` and `metadata_props`.
    """

    engine: str | None = None
    region: str = ""
    device: str | None = None
    sbp: tuple[str, ...] | None = None
    placement: tuple[str, ...] | None = None
    phase: Phase | None = None
    model_update: bool = False
    aliases: tuple[tuple[int, int], ...] = ()
    source: SourceLocation | None = None
    doc: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    def replace(self, **changes: Any) -> Annotations:
        """A copy with some fields changed."""
        return replace(self, **changes)


NO_ANNOTATIONS = Annotations()
