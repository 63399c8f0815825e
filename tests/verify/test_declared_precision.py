"""Products in TF32 and sums in float16 or bfloat16, as GPUs make them: wrong, unless the engine declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.random_graphs import F32, graph_of, node
from xrt_core.engine.contract import Executable, Function, Tolerance
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType
from xrt_core.verify.checker import _products
from xrt_core.verify.compare import MOST_LENIENT, table, tolerance_for, widened_for_products
from xrt_core.verify.evaluate import EvaluationSettings, evaluate
from xrt_core.verify.isolate import Candidate

_DECLARED = {"float32": Tolerance(2e-3, 2e-3, reason="products in TF32, whose factors have 10 bits")}
W = (np.random.default_rng(0).standard_normal((256, 64)) / 16).astype(np.float32)


def tf32(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the 10 bits of a factor in TF32, half to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


class InTf32(Executable):
    """x @ W with rounded factors."""

    def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> Sequence[Any]:
        return [tf32(inputs[0]) @ tf32(W)]


@pytest.mark.parametrize(("declared", "verdict"), [({}, "wrong"), (_DECLARED, "ready")], ids=["float32", "declared"])
def test_products_in_tf32(declared: Mapping[str, Tolerance], verdict: str) -> None:
    """What an engine declares for its option tf32 decides; without a declaration it must not be used by default."""
    x, y = Value("x", TensorType(F32, (32, 256))), Value("y", TensorType(F32, (32, 64)))
    function = Function.from_graph(graph_of([x], [y], [node("MatMul", [x, Value.constant(W, "w")], [y])]))
    candidate = Candidate("tensors", lambda f, fused: InTf32(), declared)
    outcome = evaluate(function, [candidate], EvaluationSettings(tune=False))
    assert outcome.verdict == verdict, outcome.reason


def summed_in(narrow: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w, whose sum is kept in a narrow type from one product to the next."""
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for left, right in zip(x.T.astype(np.float32), w.astype(np.float32), strict=True):
        total = (total + np.outer(left, right)).astype(narrow).astype(np.float32)
    return total


class Summed(Executable):
    """x @ W of 2048 terms, in the type of x, summed in `narrow`; off by `bias` besides."""

    def __init__(self, narrow: Any, w: np.ndarray, bias: float = 0.0) -> None:
        self.narrow, self.w, self.bias = narrow, w, bias

    def run(self, inputs: Sequence[Any], *args: Any, **options: Any) -> Sequence[Any]:
        found = summed_in(self.narrow, inputs[0], self.w)
        return [(found + self.bias * np.abs(found).max()).astype(inputs[0].dtype)]


def _declares(accumulates: str) -> dict[str, Tolerance]:
    return {"float32": Tolerance(2e-3, 2e-3, reason=f"sums in {accumulates}", accumulates=accumulates)}


@pytest.mark.parametrize("by", ["engine", "executable"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_in_narrow_types(name: str, by: str) -> None:
    """Right where the engine, or the executable itself, declares them; an error beyond what such sums make is not."""
    narrow = np.dtype(getattr(ml_dtypes, name, None) or name)
    w = (np.random.default_rng(1).standard_normal((2048, 8)) / 45).astype(np.float32)
    x, y = Value("x", TensorType(F32, (16, 2048))), Value("y", TensorType(F32, (16, 8)))
    function = Function.from_graph(graph_of([x], [y], [node("MatMul", [x, Value.constant(w, "w")], [y])]))

    def verdict(bias: float, tolerance: Mapping[str, Tolerance]) -> str:
        made = Summed(narrow, w, bias)
        if by == "executable":
            made.tolerance, tolerance = tolerance, {}
        candidate = Candidate("tensors", lambda f, fused: made, tolerance)
        return evaluate(function, [candidate], EvaluationSettings(tune=False, edges=False)).verdict

    assert verdict(0.0, _declares("")) == "wrong"
    assert verdict(0.0, _declares(name)) == "ready"
    assert verdict(0.5, _declares(name)) == "wrong"


def test_bounds_grow_with_the_root_of_the_terms() -> None:
    """By half a step of what is declared, within a limit; not at all without a declaration."""
    plain = table()["float16"]
    own = replace(plain, accumulates="float16")
    assert widened_for_products(plain, 1 << 20) == plain
    found = [widened_for_products(own, n) for n in (0, 256, 1024)]
    assert found[0] == own
    assert [round((t.absolute - own.absolute) * 2**11) for t in found] == [0, 16, 32]
    assert widened_for_products(own, 1 << 40).absolute == MOST_LENIENT * own.absolute
    coarser = {"float32": Tolerance(0, 0, accumulates="bfloat16"), "float16": own}
    both = tolerance_for(np.dtype(np.float16), [F32], coarser)
    assert both.accumulates == "bfloat16"


def test_products_are_counted() -> None:
    """The longest sum that a value depends on, by operator."""
    x, w, k = Value("x", TensorType(F32, (2, 8, 6, 6))), np.zeros((4, 8, 3, 3), F32), np.zeros((4, 5, 2, 2), F32)
    h, g, y = Value("h", TensorType(F32, (2, 4, 4, 4))), Value("g", TensorType(F32, (2, 5, 5, 5))), Value("y")
    nodes = [
        node("Conv", [x, Value.constant(w, "w")], [h]),
        node("ConvTranspose", [h, Value.constant(k, "k")], [g]),
        node("Relu", [g], [y]),
    ]
    counted = _products(graph_of([x], [y], nodes))
    assert [counted.get(v) for n in nodes for v in n.outputs] == [72, 72, 72]
