"""How the batch, the variables and the optimizer's slots of a training step lie on a mesh."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from xrt_core.errors import InputError, OptionError
from xrt_core.ir.sharding import Mesh, S, parse_sbp, sbp_text
from xrt_core.ir.types import TensorType
from xrt_core.passes.sharding import exact_name

DATA = "data"
"""The axis of a mesh over which batches are split."""


def step_sharding(
    mesh: Mesh,
    given: Mapping[str, str],
    batch: Mapping[str, np.ndarray],
    state: Mapping[str, TensorType],
    slots: Mapping[str, Sequence[str]],
    zero: bool,
) -> dict[str, str]:
    """The sharding of a step's inputs, by pattern of their names.

    given: the user's patterns, for variables, inputs and values within the graph. batch: arrays of the step, split over
    the axis "data" unless `given` says otherwise. state: types of the entries of the state. slots: variable -> names of
    its slots, which lie as the variable does; with `zero` they are split along their first axis over "data" as well,
    where it divides that.

    Raises InputError for a batch whose size the mesh does not divide, naming both, and OptionError for zero without an
    axis "data".
    """
    count = mesh.size(DATA) if DATA in mesh.names else 1
    if zero and DATA not in mesh.names:
        raise OptionError(f"zero=True splits the optimizer's state over the axis {DATA!r}; the mesh has {mesh}")
    rows: dict[str, str] = {}
    for name, array in batch.items():
        if _matching(name, given) is None and array.ndim and count > 1:
            if array.shape[0] % count:
                raise InputError(
                    f"the batch has {array.shape[0]} examples (input {name!r}), which the {count} devices of the axis "
                    f"{DATA!r} do not divide; give multiples of {count}"
                )
            rows[exact_name(name)] = f"{DATA}:S(0)"
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
    return {**rows, **given}


def _matching(name: str, given: Mapping[str, str]) -> str | None:
    return next((sbp for pattern, sbp in given.items() if fnmatch.fnmatchcase(name, pattern)), None)
