"""The stages of a graph as data: captured -> optimised -> partitioned -> planned. Each has `as_text`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrt_core.engine.contract import Engine
from xrt_core.errors import EngineError
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import SymbolicSignature
from xrt_core.ir.types import ValueType
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.passes.pass_manager import RegisteredPass
from xrt_core.passes.sharding import ShardingReport
from xrt_core.passes.symbolic_shapes import SymbolicShapes
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.plan import Plan
from xrt_core.runtime.plan_cache import PlanCache

Signature = tuple[Sequence[ValueType | None], Mapping[int, np.ndarray]]
"""Types of the inputs, and the values of those that determine shapes, by index."""
Engines = Mapping[str, tuple[Engine, str]]


@dataclass(frozen=True)
class Captured:
    """A graph from a frontend, after the passes of the stage "model" (`applied`).

    automatic: whether unmarked nodes are offered to engines. part: it is a subgraph that is planned separately. given:
    the graph before those passes, where its first calls are compared with it (`PassCheck`).
    """

    graph: Graph
    automatic: bool = True
    applied: Sequence[RegisteredPass] = ()
    part: bool = False
    given: Graph | None = None

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Optimised:
    """A graph specialised for one signature: typed, constant-folded, simplified.

    known: values of the inputs that determine shapes, by index. engines: whether it is compiled for engines. precision:
    the nodes lowered to a narrow float, None if mixed precision is off. automatic: as of `Captured`. symbolic: what is
    known of its shapes, where the signature is symbolic. sharding: how its tensors lie on a mesh.
    """

    graph: Graph
    known: Mapping[int, np.ndarray]
    engines: bool
    automatic: bool = True
    precision: PrecisionReport | None = None
    symbolic: SymbolicShapes | None = None
    sharding: ShardingReport | None = None

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Partitioned:
    """A graph whose clusters are Launch nodes. explain: creates the explanation of the partitioning. sizes: of the
    symbols in the first call, where the signature is symbolic."""

    graph: Graph
    explain: Callable[[], Explanation]
    automatic: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)

    def as_text(self) -> str:
        """The graph, then the explanation."""
        return f"{self.graph}\n\n{self.explain()}"

    __str__ = as_text


class Planned(Plan):
    """A plan with its partitioned graph, and the plan caches of its separately planned subgraphs.

    engines: name -> engine and device, of all selected engines. host: the host's array namespace and device. symbolic:
    the symbolic signature that it is for, None for an exact one.
    """

    __slots__ = ("engines", "host", "partitioned", "parts", "signature", "symbolic")

    def __init__(
        self,
        partitioned: Partitioned,
        parts: Mapping[str, PlanCache],
        engines: Engines,
        host: tuple[Any, str],
        *plan: Any,
    ) -> None:
        super().__init__(*plan)
        self.partitioned = partitioned
        self.parts = parts
        self.engines = engines
        self.host = host
        self.signature: Signature = ((), {})
        self.symbolic: SymbolicSignature | None = None

    @property
    def may_run_side_by_side(self) -> bool:
        """Whether launches of different lanes may run concurrently, in this plan or in a subgraph."""
        return bool(self.parts) or super().may_run_side_by_side

    def release(self, reason: str) -> None:
        """See `Plan.release`; that of subgraphs as well."""
        super().release(reason)
        if not self.pinned:
            for cache in self.parts.values():
                cache.clear(reason)

    def explain(self) -> Explanation:
        """Return the explanation, with later failures and the subgraphs that have been planned so far."""
        nested = {
            label: tuple(p.explain() for p in cache.plans() if isinstance(p, Planned))
            for label, cache in self.parts.items()
        }
        return replace(
            self.partitioned.explain(),
            errors={x.function.name: x.trouble for x in self.launches if x.trouble},
            lost=tuple(x.function.name for x in self.launches if x.executable is None),
            ran_on={x.function.name: ", ".join(d) for x in self.launches if (d := _devices(x))},
            memory=str(self.memory),
            peak_bytes=self.memory.peak,
            side_by_side=self.side_by_side,
            nested={k: v for k, v in nested.items() if v},
            symbols=() if self.symbolic is None else tuple(map(str, self.symbolic.symbols.values())),
            guards=tuple(f"{g} >= 0" for g in self.guards),
        )


def _devices(launch: Launch) -> tuple[str, ...]:
    """Where the executable of a launch runs, as it tells; empty where it does not, or there is none."""
    made = launch.executable
    if made is None:
        return ()
    try:
        return made.devices()
    except EngineError:
        return ()
