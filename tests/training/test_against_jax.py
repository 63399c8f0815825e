"""The gradient rules against JAX's own gradients of the same forward pass, which its tracer sees kernel by kernel."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.cases import CASES
from tests.training.checks import Case, cast, run, sources, with_gradients

jax = pytest.importorskip("jax")
DTYPES = ("float64", "float32")


@pytest.mark.parametrize("case", [c for c in CASES if c.jax], ids=lambda c: c.name)
def test_jax_agrees(case: Case) -> None:
    """The gradient graph, run by JAX, gives what jax.grad of the forward graph gives, at float32."""
    arrays = cast(case, "float32")
    graph, made = with_gradients(case, arrays)
    which = tuple(sources(case))

    def both(*given):  # type: ignore[no-untyped-def]
        own = jax.grad(lambda *a: run(graph, a, jax.numpy)[0], argnums=which)(*given)
        return own, run(made, given, jax.numpy)[1:]

    with jax.enable_x64(True):
        own, found = jax.jit(both)(*arrays)
    assert all(np.isfinite(g).all() for g in found)
    for a, b in zip(own, found, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-4)
