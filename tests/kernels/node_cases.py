"""The single-node ONNX backend tests as cases for portable kernels, run through NumPy and through a jitted JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.kernels import OpContext, PortableKernel, find_kernel
from xrt_core.testing.node_cases import Case, all_cases

__all__ = ["Case", "all_cases", "check", "run_jax", "run_numpy", "trace_jax"]


_QUICK: Final = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def run_numpy(case: Case) -> list[Any]:
    """The kernel's results under NumPy; the arguments are read-only, so a kernel that writes into them fails."""
    inputs = []
    for x in case.inputs:
        if isinstance(x, np.ndarray):
            x = x.copy()
            x.flags.writeable = False
        inputs.append(x)
    with np.errstate(all="ignore"):
        return list(_as_tuple(_kernel(case).function(OpContext(case.node, np), *inputs)))


def run_jax(case: Case) -> list[Any]:
    """The kernel's results under jax.jit; inputs in `static` are constants, the others are traced."""
    (results,) = trace_jax([case])
    if isinstance(results, Exception):
        raise results
    return results


def trace_jax(cases: Sequence[Case]) -> list[list[Any] | Exception]:
    """The results of each case under one jax.jit of them all; for one that cannot be traced, its exception.

    Compiled with little optimisation, which takes half the time: the kernels are tested here, not XLA.
    """
    import jax
    import jax.numpy as jnp

    refused: dict[int, Exception] = {}

    def call(arguments: list[dict[int, Any]]) -> list[list[Any]]:
        made = []
        for k, (case, traced) in enumerate(zip(cases, arguments, strict=True)):
            inputs = [traced.get(i, x) for i, x in enumerate(case.inputs)]
            try:
                results = _as_tuple(_kernel(case).function(OpContext(case.node, jnp), *inputs))
                made.append([None if r is None else jnp.asarray(r) for r in results])
            except Exception as e:  # the other cases are still of interest
                refused[k] = e
                made.append([])
        return made

    traced = [
        {i: x for i, x in enumerate(case.inputs) if x is not None and i not in _kernel(case).static} for case in cases
    ]
    with jax.enable_x64(True):
        made = jax.jit(call).lower(traced).compile(compiler_options=_QUICK)(traced)
        return [
            refused[k] if k in refused else [None if r is None else np.asarray(r) for r in results]
            for k, results in enumerate(made)
        ]


def _kernel(case: Case) -> PortableKernel:
    found = find_kernel(case.node.domain, case.node.op_type)
    assert found is not None, f"no portable kernel for {case.node.operator}"
    return found


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
