"""The gradient rules against JAX's own gradients of the same forward pass, which its tracer sees kernel by kernel."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from tests.training.cases import CASES
from tests.training.checks import Case, cast, folded, run, sources, with_gradients

jax = pytest.importorskip("jax")


BATCH: Final = 16
"""Cases in one jit: much of what JAX does to compile is done once for all of them."""
QUICK: Final = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
"""For XLA: the gradients are tested, not its optimiser. At level 0 it computes RoiAlign-max wrong."""
TAKEN: Final = [c for c in CASES if c.jax]
LONG: Final = ("GRU-", "Resize-", "STFT", "Conv-same", "ConvTranspose-plain", "Upsample")
"""Batches with cases that begin so take JAX 10 to 25 s to compile; finite differences (test_rules.py) hold the same."""


def _batches() -> list[Any]:
    """The cases in batches; the first in the fast tests, those of long compilations by night."""

    def marks(i: int) -> list[pytest.MarkDecorator]:
        slow = [pytest.mark.slow] if i else []
        return [*slow, pytest.mark.nightly] if any(c.name.startswith(LONG) for c in TAKEN[i : i + BATCH]) else slow

    return [
        pytest.param(TAKEN[i : i + BATCH], id=f"{TAKEN[i].name} to {i + BATCH}", marks=marks(i))
        for i in range(0, len(TAKEN), BATCH)
    ]


@pytest.mark.parametrize("cases", _batches())
def test_jax_agrees(cases: list[Case]) -> None:
    """The gradient graph, run by JAX, gives what jax.grad of the forward graph gives, at float32."""
    arrays = [cast(c, "float32") for c in cases]
    graphs = [[folded(g) for g in with_gradients(c, a)] for c, a in zip(cases, arrays, strict=True)]

    def both(given):  # type: ignore[no-untyped-def]
        results = []
        for case, (graph, made), own in zip(cases, graphs, given, strict=True):
            forward = lambda *a, graph=graph: run(graph, a, jax.numpy)[0]  # noqa: E731
            wanted = jax.grad(forward, argnums=tuple(sources(case)))(*own)
            results.append((wanted, run(made, own, jax.numpy)[1:]))
        return results

    with jax.enable_x64(True):
        results = jax.jit(both).lower(arrays).compile(compiler_options=QUICK)(arrays)
    for case, (wanted, found) in zip(cases, results, strict=True):
        assert all(np.isfinite(g).all() for g in found), case.name
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-4, err_msg=case.name)
