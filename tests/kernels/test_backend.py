"""The single-node backend tests of ONNX through every portable kernel: under NumPy, and under one jax.jit per batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Final

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, all_cases, check, run_numpy, trace_jax
from xrt_core.kernels import find_kernel
from xrt_core.kernels.registry import FAMILIES

pytestmark = pytest.mark.slow

RANDOM: Final = frozenset(("Bernoulli",))
"""Operators whose expected numbers no seed determines."""
BATCH: Final = 48
"""Cases in one jit: each compilation costs as much as dozens of cases in it."""


def family(case: Case) -> str:
    """The module of the kernel that runs the case; "" for an operator without one."""
    kernel = find_kernel(case.node.domain, case.node.op_type)
    return "" if kernel is None else kernel.function.__module__.rpartition(".")[2]


def is_static(case: Case) -> bool:
    """Whether the case has arrays of numbers alone, of shapes that do not depend on data."""
    kernel = find_kernel(case.node.domain, case.node.op_type)
    return case.is_numeric and kernel is not None and kernel.why_dynamic(case.node) is None


CASES: Final = [c for c in all_cases() if family(c) and c.node.op_type not in RANDOM]
STATIC: Final = [c for c in CASES if is_static(c)]


def batches() -> list[object]:
    """The static cases in batches, each of one family of kernels."""
    found = []
    for name, cases in itertools.groupby(sorted(STATIC, key=family), family):
        of_family = list(cases)
        found += [pytest.param(of_family[i : i + BATCH], id=f"{name}-{i}") for i in range(0, len(of_family), BATCH)]
    return found


def softened(case: Case) -> Case:
    """Attention in narrow floats with room for two roundings: the expected outputs were rounded at every step.
    Transforms with room for one of the largest number: zeros are as exact as the numbers that cancel out in them."""
    dtype = case.outputs[0].dtype if case.outputs[0] is not None else None
    if case.node.op_type in ("DFT", "STFT") and case.outputs[0] is not None:
        largest = float(np.abs(case.outputs[0]).max(initial=0.0))
        return dataclasses.replace(case, atol=max(case.atol, largest * float(np.finfo(case.outputs[0].dtype).eps)))
    if family(case) != "attention" or dtype is None or dtype.itemsize > 2:
        return case
    return dataclasses.replace(case, rtol=max(case.rtol, 2 * float(ml_dtypes.finfo(dtype).eps)))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_numpy(case: Case) -> None:
    """The backend test holds under NumPy."""
    check(softened(case), run_numpy(case))


@pytest.mark.parametrize("cases", batches())
def test_jax(cases: list[Case]) -> None:
    """The backend tests hold under jax.jit; those whose output shapes depend on data are not among them."""
    failed = []
    for case, results in zip(cases, trace_jax(cases), strict=True):
        try:
            if isinstance(results, Exception):
                raise results
            check(softened(case), results)
        except Exception as e:
            failed.append(f"{case}: {type(e).__name__}: {e}")
    assert not failed, "\n".join(failed)


def test_every_family_has_cases() -> None:
    """Each module of kernels is run by a backend test, or holds only operators that ONNX has no such test of."""
    assert set(FAMILIES) - {family(c) for c in CASES} == {
        "gradient", "linear_models", "maps", "support_vectors",
    }  # fmt: skip
