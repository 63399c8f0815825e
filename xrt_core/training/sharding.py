"""How the batch, the variables and the optimizer's slots of a training step lie on a mesh."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import OptionError
from xrt_core.ir.graph import Graph
from xrt_core.ir.sharding import Mesh, S, parse_sbp, sbp_text
from xrt_core.ir.types import TensorType
from xrt_core.options import AUTO
from xrt_core.passes.sharding import automatic, exact_name, marked

DATA = "data"
"""The axis of a mesh over which batches are split."""


class StepSharding:
    """How the programs of one training lie on its mesh.

    mesh: None for one device. sharding: the option, by pattern or "auto", which chooses at the first graph with a
    batch. zero: split the optimizer's slots; has_slots: whether it has any of `xrt.optim`.
    Raises OptionError for `zero` without a mesh or without slots.
    """

    def __init__(self, mesh: Mesh | None, sharding: Any, zero: bool, has_slots: bool) -> None:
        if zero and mesh is None:
            raise OptionError("zero=True splits the optimizer's state over a mesh, and none is given: mesh={'data': 4}")
        if zero and not has_slots:
            raise OptionError("zero=True splits the slots of xrt.optim's optimizers; the state of optax's stays whole")
        self.mesh, self._zero = mesh, zero
        self._is_open = sharding == AUTO and mesh is not None
        self._given: dict[str, str] = {} if isinstance(sharding, str) else dict(sharding or ())
        self._marked: dict[str, str] = {}  # of variables, by name: what `xrt.shard` says of them in a model

    def why_whole(self, batch: Mapping[str, np.ndarray]) -> str:
        """See the function; "" without a mesh."""
        return "" if self.mesh is None else why_whole(self.mesh, self._given, batch)

    def rows(
        self, graph: Graph, batch: Mapping[str, np.ndarray], state: Mapping[str, TensorType],
        slots: Mapping[str, Sequence[str]], whole: bool,
    ) -> tuple[tuple[str, str], ...]:  # fmt: skip
        """The sharding of a graph's inputs (see `step_sharding`); nothing without a mesh. slots: variable -> names of
        all its slots. whole: it is a training step with its update; what a user says of one need not be in a part of
        it."""
        if self.mesh is None:
            return ()
        held = [v.name for v in graph.inputs]
        own = {variable: [n for n in names if n in held] for variable, names in slots.items()}
        if self._is_open and batch:
            self._is_open = False
            self._given = chosen_sharding(graph, self.mesh, batch, own)
        self._marked |= {v.name: text for v, text in marked(graph).items() if v.name in slots}
        given = self._given if whole else present(self._given, graph)
        own_marks = {n: text for n, text in self._marked.items() if n in held and _matching(n, given) is None}
        given = {**given, **{exact_name(n): text for n, text in own_marks.items()}}
        return tuple(step_sharding(self.mesh, given, batch, state, own, held, self._zero).items())


def step_sharding(
    mesh: Mesh,
    given: Mapping[str, str],
    batch: Mapping[str, np.ndarray],
    state: Mapping[str, TensorType],
    slots: Mapping[str, Sequence[str]],
    inputs: Sequence[str],
    zero: bool,
) -> dict[str, str]:
    """The sharding of a step's inputs, by pattern of their names.

    given: the user's patterns, for variables, inputs and values within the graph. batch: arrays of the step, split over
    the axis "data" unless `given` says otherwise; what it does not divide is whole on each device. state: types of the
    entries of the state. slots: variable -> names of its slots, which lie as the variable does; with `zero` they are
    split along their first axis over "data" as well, where it divides that. inputs: names of the graph's inputs;
    without a batch they say that the mesh computes.

    Raises OptionError for zero without an axis "data".
    """
    count = mesh.size(DATA) if DATA in mesh.names else 1
    if zero and DATA not in mesh.names:
        raise OptionError(f"zero=True splits the optimizer's state over the axis {DATA!r}; the mesh has {mesh}")
    rows: dict[str, str] = {}
    for name, array in batch.items():
        if _matching(name, given) is None:
            is_shared = array.ndim and count > 1 and not array.shape[0] % count
            rows[exact_name(name)] = f"{DATA}:S(0)" if is_shared else "B"
    for variable, own in slots.items():
        sbp = parse_sbp(_matching(variable, given) or "B", mesh)
        shape = state[variable].shape or ()
        axis = mesh.names.index(DATA) if DATA in mesh.names else 0
        parts = int(np.prod([n for s, (_, n) in zip(sbp, mesh.sizes, strict=True) if s.axis == 0], initial=count))
        first = shape[0] if shape else None
        if zero and sbp[axis].is_broadcast and isinstance(first, int) and first % parts == 0:
            sbp = (*sbp[:axis], S(0), *sbp[axis + 1 :])
        text = sbp_text(sbp, mesh)
        rows.update({exact_name(name): text for name in own if state[name].shape == shape and text != "B"})
    rows = {**rows, **given}
    if not batch:
        rows.update({exact_name(name): "B" for name in inputs if _matching(name, rows) is None})
    return rows


def chosen_sharding(
    graph: Graph, mesh: Mesh, batch: Mapping[str, np.ndarray], slots: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """How variables lie on a mesh by estimated time (`passes.sharding.automatic`), by pattern; the batch is split as
    always."""
    count = mesh.size(DATA) if DATA in mesh.names else 1
    split = {n: f"{DATA}:S(0)" for n, a in batch.items() if count > 1 and a.ndim and not a.shape[0] % count}
    chosen_here = {n for variable, own in slots.items() for n in (variable, *own)}
    given = {v.name: split.get(v.name, "B") for v in graph.inputs if v.name not in chosen_here}
    chosen = automatic(graph, mesh, slots, given)
    return {pattern: sbp for pattern, sbp in chosen.items() if pattern in map(exact_name, slots)}


def present(given: Mapping[str, str], graph: Graph) -> dict[str, str]:
    """The patterns that match a value of a graph: prediction has no labels, an update alone has no inputs."""
    values = (*graph.inputs, *graph.constants, *(v for n in graph.nodes for v in n.outputs if v is not None))
    names = [v.name for v in values]
    return {pattern: sbp for pattern, sbp in given.items() if fnmatch.filter(names, pattern)}


def why_whole(mesh: Mesh, given: Mapping[str, str], batch: Mapping[str, np.ndarray]) -> str:
    """Why a batch is not split over the axis "data", naming its size and the mesh's; "" where it is."""
    count = mesh.size(DATA) if DATA in mesh.names else 1
    for name, array in batch.items():
        if _matching(name, given) is None and array.ndim and array.shape[0] % count:
            return (
                f"the {count} devices of the mesh's axis {DATA!r} do not divide the {array.shape[0]} examples of the "
                f"batch (input {name!r}), so that each of them computes all of it; multiples of {count} are shared"
            )
    return ""


def _matching(name: str, given: Mapping[str, str]) -> str | None:
    return next((sbp for pattern, sbp in given.items() if fnmatch.fnmatchcase(name, pattern)), None)
