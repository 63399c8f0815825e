"""The gradient rules against JAX's own gradients of the same forward pass, which its tracer sees kernel by kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.training.cases import CASES
from tests.training.checks import Case, cast, folded, run, sources, with_gradients

jax = pytest.importorskip("jax")


def _cases() -> Iterator[Any]:
    """One case for each operator at once, the others (JAX compiles each of them) among the slow tests."""
    seen = set()
    for c in CASES:
        if c.jax:
            operator = re.split(r"[-\[ ]", c.name)[0]
            yield pytest.param(c, id=c.name, marks=[pytest.mark.slow] if operator in seen else [])
            seen.add(operator)


@pytest.mark.parametrize("case", list(_cases()))
def test_jax_agrees(case: Case) -> None:
    """The gradient graph, run by JAX, gives what jax.grad of the forward graph gives, at float32."""
    arrays = cast(case, "float32")
    graph, made = (folded(g) for g in with_gradients(case, arrays))
    which = tuple(sources(case))

    def both(*given):  # type: ignore[no-untyped-def]
        own = jax.grad(lambda *a: run(graph, a, jax.numpy)[0], argnums=which)(*given)
        return own, run(made, given, jax.numpy)[1:]

    with jax.enable_x64(True):
        own, found = jax.jit(both)(*arrays)
    assert all(np.isfinite(g).all() for g in found)
    for a, b in zip(own, found, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-4)
