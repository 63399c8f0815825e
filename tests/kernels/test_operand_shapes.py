"""Operands whose shapes broadcast in NumPy, but not in ONNX, are refused: the result would have another shape than the
operator's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.single_node import node_case
from xrt_core.errors import ShapeError
from xrt_core.host.executor import run_node


def _f(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def _i(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


CASES: dict[str, tuple[str, int, list[Any], str]] = {
    "Gemm": ("Gemm", 13, [_f(1, 2), _f(2, 3), _f(4, 3)], r"C of shape \[4, 3\]: .* \[1, 3\]"),
    "InstanceNormalization": ("InstanceNormalization", 6, [_f(1, 1, 4), _f(3), _f(3)], r"a scale .*\[3\]: give \[1\]"),
    "LayerNormalization": ("LayerNormalization", 17, [_f(1, 1), _f(7)], r"a scale of shape \[7\]"),
    "LayerNormalization, bias": ("LayerNormalization", 17, [_f(2, 1), _f(1), _f(3, 1)], r"a bias of shape \[3, 1\]"),
    "loss": ("SoftmaxCrossEntropyLoss", 13, [_f(2, 3), _i(1)], r"labels of shape \[1\]: give \[2\]"),
    "OneHot": ("OneHot", 11, [_i(2), np.array(3), _f(3)], r"values of shape \[3\]: give \[2\]"),
    "ReverseSequence": ("ReverseSequence", 10, [_f(2, 3), _i(1)], r"sequence_lens of shape \[1\]: give \[3\]"),
    "RMSNormalization": ("RMSNormalization", 23, [_f(1, 1), _f(7)], r"a scale of shape \[7\]"),
    "ScatterElements": ("ScatterElements", 18, [_f(2, 2), _i(1, 2), _f(1, 1)], r"updates of shape \[1, 1\]"),
    "ScatterND": ("ScatterND", 18, [_f(2, 2), _i(1, 1), _f(1, 1)], r"updates of shape \[1, 1\]: give \[1, 2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_broadcast_as_onnx_has_it_is_refused(name: str) -> None:
    op, version, inputs, message = CASES[name]
    with pytest.raises(ShapeError, match=message):
        run_node(node_case(op, version, inputs).node, inputs)
