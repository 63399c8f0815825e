"""Training steps on a CuPy host: NumPy's losses, and state that stays on the device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fake_cuda import GPU
from tests.fake_cupy import installed
from tests.training import peers


@pytest.mark.slow
@pytest.mark.parametrize("model", [peers.mlp(), peers.cnn(), peers.mobilenet(), peers.bert()], ids=lambda m: m.name)
def test_a_step_moves_its_batch_alone(model: peers.Model) -> None:
    """After the first step the batch and the rate go up; the loss comes down."""
    expected = list(peers.losses(peers.by_xrt(model, "host")[0], model, 3))
    with installed():
        step, _ = peers.by_xrt(model, "host", device="cuda")
        found = [float(step(model.batch(k))) for k in range(2)]
        batch = model.batch(2)
        GPU.up = GPU.down = GPU.downloads = 0

        found.append(float(step(batch)))

        assert GPU.up <= sum(a.nbytes for a in batch.values()) + 16
        assert (GPU.down, GPU.downloads) == (4, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
