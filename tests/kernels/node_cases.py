"""The single-node ONNX backend tests as cases for portable kernels, run through NumPy and through a jitted JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.kernels import OpContext, find_kernel
from xrt_core.testing.node_cases import Case, all_cases, cases_for

__all__ = ["Case", "all_cases", "cases_for", "check", "run_jax", "run_numpy"]


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def run_numpy(case: Case) -> list[Any]:
    """The kernel's results under NumPy; the arguments are read-only, so a kernel that writes into them fails."""
    found = find_kernel(case.node.domain, case.node.op_type)
    assert found is not None, f"no portable kernel for {case.node.operator}"
    inputs = []
    for x in case.inputs:
        if isinstance(x, np.ndarray):
            x = x.copy()
            x.flags.writeable = False
        inputs.append(x)
    with np.errstate(all="ignore"):
        return list(_as_tuple(found.function(OpContext(case.node, np), *inputs)))


def run_jax(case: Case) -> list[Any]:
    """The kernel's results under jax.jit; inputs in `static` are constants, the others are traced."""
    import jax
    import jax.numpy as jnp

    found = find_kernel(case.node.domain, case.node.op_type)
    assert found is not None, f"no portable kernel for {case.node.operator}"
    traced = [i for i, x in enumerate(case.inputs) if x is not None and i not in found.static]

    def call(*args: Any) -> tuple[Any, ...]:
        inputs = list(case.inputs)
        for i, a in zip(traced, args, strict=True):
            inputs[i] = a
        results = _as_tuple(found.function(OpContext(case.node, jnp), *inputs))
        return tuple(jnp.asarray(r) if r is not None else None for r in results)

    with jax.enable_x64(True):
        return [None if r is None else np.asarray(r) for r in jax.jit(call)(*[case.inputs[i] for i in traced])]


def check(case: Case, results: list[Any]) -> None:
    """Assert that results have the expected count, dtypes, shapes and numbers."""
    assert len(results) >= len(case.outputs)
    for i, (got, want) in enumerate(zip(results, case.outputs, strict=False)):
        if want is None:
            continue
        got = np.asarray(got)
        assert got.dtype == want.dtype, f"output {i}: dtype {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"output {i}: shape {got.shape}, expected {want.shape}"
        if want.dtype.kind in "biuO":
            np.testing.assert_array_equal(got, want)
        else:
            wide = np.complex128 if want.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=case.rtol, atol=case.atol)
