"""How the inputs of a training step lie on a mesh."""

from __future__ import annotations

import numpy as np
import pytest

from xrt_core.errors import OptionError
from xrt_core.ir.sharding import Mesh
from xrt_core.ir.types import TensorType
from xrt_core.training.sharding import step_sharding, why_whole

F32 = np.dtype(np.float32)
STATE = {
    "w": TensorType(F32, (8, 3)),
    "m/w": TensorType(F32, (8, 3)),
    "b": TensorType(F32, (3,)),
    "m/b": TensorType(F32, (3,)),
}
SLOTS = {"w": ["m/w"], "b": ["m/b"]}


def rows(mesh: Mesh, given: dict[str, str], zero: bool, examples: int = 4) -> dict[str, str]:
    return step_sharding(mesh, given, {"x": np.zeros((examples, 2), F32)}, STATE, SLOTS, [*STATE, "x"], zero)


def test_batches_are_split() -> None:
    """Over the axis "data", unless the user says otherwise, or it does not divide the batch, which is then whole."""
    mesh = Mesh({"data": 2, "model": 2})
    assert rows(mesh, {}, False) == {"x": "data:S(0)"}
    assert rows(mesh, {"x": "B"}, False) == {"x": "B"}
    assert rows(Mesh({"model": 2}), {}, False) == {"x": "B"}
    assert rows(mesh, {}, False, examples=5) == {"x": "B"}
    assert "2 devices of the mesh's axis 'data' do not divide the 5 examples" in why_whole(
        mesh, {}, {"x": np.zeros(5, F32)}
    )
    assert not why_whole(mesh, {}, {"x": np.zeros(4, F32)})


def test_slots_lie_as_their_variables() -> None:
    """And with zero=True are split along their first axis, where "data" divides it."""
    mesh = Mesh({"data": 2, "model": 2})
    assert rows(mesh, {"w": "model:S(1)"}, False) == {"x": "data:S(0)", "m/w": "model:S(1)", "w": "model:S(1)"}
    assert rows(mesh, {}, True) == {"x": "data:S(0)", "m/w": "data:S(0)"}
    with pytest.raises(OptionError, match="over the axis 'data'"):
        rows(Mesh({"model": 2}), {}, True)
