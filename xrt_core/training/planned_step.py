"""The plan of one signature's training step: how arrays go into it, and what comes out where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.compiler.stages import Planned
from xrt_core.ir.graph import Graph
from xrt_core.passes.mixed_precision import PrecisionReport
from xrt_core.runtime.arrays import family_of, to_numpy
from xrt_core.runtime.binding import settled_host
from xrt_core.runtime.launch import engine_failure
from xrt_core.training.checks import ComputedIndices, IndexRange, refuse_out_of_range


@dataclass(slots=True)
class PlannedStep:
    """The plan of one signature's training step, of an update alone, or of gradients or an inference beside them.

    names: of the arrays of a batch, in order. direct: for each input the array libraries, besides NumPy, whose arrays
    it accepts without conversion. reads, writes: indices into the state of the plan's last inputs, and of its outputs
    after the loss. reads_all: whether the former are the whole state in its order. gives_state: whether the latter are,
    and there are no other results. precision: the nodes of the
    forward graph lowered to a narrow float. ranges: range checks of its integer inputs. computed: checks of indices
    that it computes; None where these are not asked for, and arrays of other libraries than NumPy are not checked
    either. metrics: names of the last outputs. updates: whether it counts as an update.
    fitting: the types of the arrays of a run that needed no conversion. ahead: whether runs return before they are
    done; None: not known yet.
    """

    plan: Planned
    graph: Graph
    names: tuple[str, ...]
    direct: tuple[tuple[str, ...], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    reads_all: bool
    gives_state: bool
    precision: PrecisionReport | None
    ranges: tuple[IndexRange, ...]
    computed: ComputedIndices | None
    metrics: tuple[str, ...]
    updates: bool
    fitting: list[type] | None = None
    ahead: bool | None = None

    def run(self, arrays: list[Any]) -> Sequence[Any]:
        """Run on the arrays of a batch, a rate and the state; the results. Arrays that no engine takes as they are
        are replaced in `arrays` by NumPy's.

        Raises InputError for labels and indices out of range.
        """
        types = [*map(type, arrays)]
        if types != self.fitting:
            direct, fits = self.direct, True
            for i, kind in enumerate(types):
                if kind is not np.ndarray and family_of(kind) not in direct[i]:
                    arrays[i], fits = to_numpy(arrays[i]), False
            self.fitting = types if fits else None
        if self.ranges:  # launches do not check what NumPy's arrays hold
            refuse_out_of_range(self.ranges, arrays, self.computed is not None)
        plan = self.plan
        if plan.host[0] is np:
            return plan.run(arrays)
        with settled_host(*plan.host):
            return plan.run(arrays)

    @property
    def is_read_whole(self) -> bool:
        """Whether the loss is there, or fails to be, once everything else is, and the inputs still are then: it comes
        from the only launch, which takes none of them."""
        launches = self.plan.launches
        return len(launches) == len(self.plan.steps) == 1 and not launches[0].function.aliases

    def read_loss(self, results: list[Any], arrays: Sequence[Any]) -> Any:
        """The loss, the first of the results of a run on `arrays`, as a NumPy scalar. Where the run returned before it
        was done, and has failed since, the host's results take the place of all.

        Raises what reading it raises.
        """
        try:
            return to_numpy(results[0])[()]
        except Exception as e:
            if not self.ahead:
                raise
            engine = self.plan.spaces[0]
            failure = engine_failure(e, engine)
        results[:] = self.plan.run_on_host(arrays, failure, engine)
        return to_numpy(results[0])[()]
