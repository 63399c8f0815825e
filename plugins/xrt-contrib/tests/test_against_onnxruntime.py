"""Every operator against ONNX Runtime's own kernel, on the host, and a few of each family through engines."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from typing import Any

import cases_attention
import cases_float
import cases_native
import cases_other
import cases_quantized
import numpy as np
import pytest
from ort_comparison import Case, by_onnxruntime, by_xrt, compare, fed, model_of
from xrt_contrib.native import NATIVE
from xrt_contrib.operators import operator_sets
from xrt_contrib.schemas import definitions

import xrt_core as xrt

pytest.importorskip("onnxruntime", reason="it computes what is expected")

CASES = [c for m in (cases_float, cases_attention, cases_quantized, cases_other, cases_native) for c in m.ALL]
BY_OP: dict[str, list[Case]] = defaultdict(list)
for _case in CASES:
    BY_OP[_case.op].append(_case)
_AT_FIRST = 2
"""Cases of each operator in the default run; the nightly one has all."""


def _operators() -> Any:
    return next(s for s in operator_sets() if s.domain == "com.microsoft").operators


def test_every_operator_with_a_kernel_there_has_cases() -> None:
    """What ONNX Runtime computes on the CPU and this package lowers is compared."""
    there = {name for name, d in definitions().items() if d.cpu}
    here = {o.schema.op_type for o in _operators()} - set(NATIVE)
    untested = {"QEmbedLayerNormalization", "SparseToDenseMatMul"}  # the latter takes no dense tensors there
    assert there & here - BY_OP.keys() == untested


@pytest.mark.parametrize("op", sorted(BY_OP))
def test_equal(op: str) -> None:
    """XRT's host gives what ONNX Runtime's kernel gives."""
    for case in BY_OP[op][:_AT_FIRST]:
        compare(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [c for cases in BY_OP.values() for c in cases[_AT_FIRST:]], ids=str)
def test_equal_over_attributes_and_inputs(case: Case) -> None:
    """Each attribute, optional input and dtype of the tables."""
    compare(case)


ON_ENGINES = ("SkipLayerNormalization", "MultiHeadAttention", "MatMulNBits", "FusedConv", "GroupQueryAttention")
ENGINES = [e for e in ("xla", "onnxruntime") if importlib.util.find_spec(f"xrt_{e}")]


@pytest.mark.parametrize("op", ON_ENGINES)
@pytest.mark.parametrize("engine", ENGINES)
def test_equal_on_an_engine(engine: str, op: str) -> None:
    """What an operator is lowered to is compiled by engines."""
    compare(BY_OP[op][0], engine, prune=False)


@pytest.mark.nightly
@pytest.mark.parametrize("op", sorted(BY_OP))
@pytest.mark.parametrize("engine", ENGINES)
def test_equal_on_engines(engine: str, op: str) -> None:
    """All of them."""
    for case in BY_OP[op][:6]:
        compare(case, engine, prune=False)


@pytest.mark.parametrize("op", ["Attention", "BiasGelu", "FusedMatMul"])
def test_shapes_that_are_not_known(op: str) -> None:
    """A model whose dimensions are symbols is lowered for each signature."""
    case = BY_OP[op][0]
    for a, b in zip(by_xrt(case, symbolic=True), by_onnxruntime(case), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_library_of_the_operator_takes_it_as_it_is(engine: str) -> None:
    """ONNX Runtime multiplies packed weights by its own kernel; every other engine gets the lowering."""
    case = BY_OP["MatMulNBits"][0]
    module = xrt.XRTModule(model_of(case), engine=engine, cache="off", prune=False)
    module(*fed(case))
    (launch,) = (n for n in module.partitioned().nodes if n.op_type == "Launch")
    inside = {n.op_type for n in launch.attributes["function"].body.nodes}
    assert ("MatMulNBits" in inside) == (engine == "onnxruntime")
