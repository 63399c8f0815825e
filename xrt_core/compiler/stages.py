"""The stages of a graph as data: captured -> optimised -> partitioned -> planned. Each prints itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xrt_core.engine.contract import Engine
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import ValueType
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.passes.pass_manager import RegisteredPass
from xrt_core.runtime.plan import Plan
from xrt_core.runtime.plan_cache import PlanCache

Signature = tuple[Sequence[ValueType | None], Mapping[int, np.ndarray]]
"""Types of the inputs, and the values of those that determine shapes, by index."""
Engines = Mapping[str, tuple[Engine, str]]


@dataclass(frozen=True)
class Captured:
    """A graph as a frontend gave it, after the passes of the stage "model" (`applied`).

    automatic: whether nodes without a mark are offered to engines.
    """

    graph: Graph
    automatic: bool = True
    applied: Sequence[RegisteredPass] = ()

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Optimised:
    """A graph for one signature: typed, folded, simplified.

    known: values of the inputs that determine shapes, by index. engines: whether engines take part. precision: what was
    lowered to a narrow float, None where nothing was asked for. automatic: as of `Captured`.
    """

    graph: Graph
    known: Mapping[int, np.ndarray]
    engines: bool
    automatic: bool = True
    precision: PrecisionReport | None = None

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Partitioned:
    """A graph whose clusters are Launch nodes, and the explanation of every decision."""

    graph: Graph
    explanation: Explanation
    automatic: bool = True

    def as_text(self) -> str:
        """The graph, then the explanation."""
        return f"{self.graph}\n\n{self.explanation}"

    __str__ = as_text


class Planned(Plan):
    """A plan with what was decided when it was made, and the plan caches of the parts that are planned by themselves.

    signature: the types of the inputs, and the values of those that determine shapes. engines: those that may take
    part, by name, with their devices. xp: the host's array namespace.
    """

    __slots__ = ("_explanation", "engines", "parts", "signature", "xp")

    def __init__(
        self, explanation: Explanation, parts: Mapping[str, PlanCache], engines: Engines, xp: Any, *plan: Any
    ) -> None:
        super().__init__(*plan)
        self._explanation = explanation
        self.parts = parts
        self.engines = engines
        self.xp = xp
        self.signature: Signature = ((), {})

    @property
    def may_run_side_by_side(self) -> bool:
        """Whether launches of different lanes run at the same time, here or perhaps in a part."""
        return bool(self.parts) or super().may_run_side_by_side

    def explain(self) -> Explanation:
        """What was decided, with what failed since and the parts as far as they have run."""
        nested = {
            label: tuple(p.explain() for p in cache.plans() if isinstance(p, Planned))
            for label, cache in self.parts.items()
        }
        return replace(
            self._explanation,
            errors={x.function.name: x.trouble for x in self.launches if x.trouble},
            lost=tuple(x.function.name for x in self.launches if x.executable is None),
            memory=str(self.memory),
            peak_bytes=self.memory.peak,
            side_by_side=self.side_by_side,
            nested={k: v for k, v in nested.items() if v},
        )
