"""Products in TF32, as GPUs make them where they may: rejected as float32, right where an engine declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.random_graphs import F32, graph_of, node
from xrt_core.engine.contract import Executable, Function, Tolerance
from xrt_core.ir.graph import Value
from xrt_core.ir.types import TensorType
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
